"""The smallest program over two islands: a function of two stages, its value and its gradient.

Run it with `python examples/first_program.py`; it starts a cluster on this machine, or uses `$PATHWAY_ADDRESS`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pathway as pw


def main() -> None:
    with pw.connect():
        front = pw.slice(4, mesh={"data": 2, "model": 2})
        back = pw.slice(2)

        @pw.jit(front, in_specs=(P(None, "model"), P("data")), out_specs=P("data", "model"))
        def embed(weights, x):
            return jnp.tanh(x @ weights)

        @pw.jit(back, in_specs=(P(), P("data"), P("data")))
        def error(weights, hidden, y):
            return ((hidden @ weights - y) ** 2).mean()

        @pw.program(donate_argnums=0)
        def step(params, x, y):
            def loss(params):
                return error(params["back"], embed(params["front"], x), y)

            value, gradients = jax.value_and_grad(loss)(params)  # backward stages run where their forward stages ran
            updated = jax.tree.map(lambda p, g: p - 0.2 * g, params, gradients)  # runs where its operands are
            return updated, value

        rng = np.random.default_rng(0)
        x = rng.normal(size=(64, 8)).astype(np.float32)
        y = np.sin(x[:, :1])
        params = {
            "front": pw.put(rng.normal(size=(8, 16)).astype(np.float32), front, P(None, "model")),
            "back": pw.put(np.zeros((16, 1), np.float32), back),
        }
        print(step.lower(params, x, y).as_text())  # where every computation is, and what moves between the slices
        values = []
        for _ in range(100):
            params, value = step(params, x, y)  # returns at once, with futures
            values.append(value)
        print(f"error {float(values[0]):.4f} -> {float(values[-1]):.4f}")  # waits


if __name__ == "__main__":
    main()
