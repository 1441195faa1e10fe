"""A pipeline of four stages over two islands: microbatches, gradients through all stages, and adam where weights live.

Run it with `python examples/pipeline.py`; it starts a cluster on this machine, or uses `$PATHWAY_ADDRESS`. It learns to
undo a fixed random rotation, and writes pipeline-timeline.svg, in which the stages overlap.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import pathway as pw

WIDTH = 64
STAGES = 4
MICROBATCHES = 8
MICROBATCH_SIZE = 32
STEPS = 60


def layer(weights, x):
    """What every stage computes: a layer with a residual connection."""
    return x + jnp.tanh(x @ weights["in"]) @ weights["out"]


def main(timeline: Path) -> None:
    with pw.connect():
        # Two stages on each island: an island has four devices, so each stage has two.
        islands = [island.name for island in pw.islands()]
        slices = [pw.slice(2, island=islands[number * len(islands) // STAGES]) for number in range(STAGES)]
        stages = [
            pw.jit(slice, in_specs=(P(), P("data")), out_specs=P("data"), name="layer")(layer) for slice in slices
        ]
        optimizer = optax.adam(3e-3)

        @pw.program(donate_argnums=(0, 1))
        def step(params, states, inputs, targets):
            def loss(params):
                total = 0.0
                for x, target in zip(inputs, targets, strict=True):
                    for stage, weights in zip(stages, params, strict=True):
                        x = stage(weights, x)
                    total += ((x - target) ** 2).mean()
                return total / MICROBATCHES

            value, gradients = jax.value_and_grad(loss)(params)
            for number in range(STAGES):
                updates, states[number] = optimizer.update(gradients[number], states[number])
                params[number] = optax.apply_updates(params[number], updates)
            return params, states, value

        rng = np.random.default_rng(0)
        rotation = np.linalg.qr(rng.normal(size=(WIDTH, WIDTH)))[0].astype(np.float32)
        params, states = [], []
        for slice in slices:
            weights = {
                "in": (rng.normal(size=(WIDTH, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32),
                "out": np.zeros((WIDTH, WIDTH), np.float32),
            }
            params.append(pw.put(weights, slice))
            states.append(pw.put(optimizer.init(weights), slice))

        def batch():
            targets = rng.normal(size=(MICROBATCHES, MICROBATCH_SIZE, WIDTH)).astype(np.float32)
            return list(targets @ rotation), list(targets)

        values = []
        for _ in range(STEPS):
            params, states, value = step(params, states, *batch())
            values.append(value)
        print(f"loss {float(values[0]):.3f} -> {float(values[-1]):.3f} in {STEPS} steps of {MICROBATCHES} microbatches")

        with pw.record_steps() as recording:
            params, states, value = step(params, states, *batch())
            value.block_until_ready()
        timeline.write_text(recording.draw(title="one training step"))
        print(f"wrote {timeline}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "pipeline-timeline.svg"))
