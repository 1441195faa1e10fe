"""Data parallel over two islands beside one island that has all the devices (Figure 12).

`python -m bench.islands [--quick]`. The model is a chain of layers; on every device a layer's pass holds the device for
a time by its share of the batch (`bench.device_wait`: this machine's islands share its cores), and has real weights,
whose gradients are real and travel. On one island the gradients are reduced by XLA between the island's devices; on two
by XLA within each and by `pathway.programs.data_parallel` between them. The goal is the paper's figure for a model of
64 B parameters on two islands of 512 TPUs.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pathway as pw
from bench.device_wait import device_wait
from bench.harness import Goal, Measure, interleaved_medians, note_machine, report
from pathway.programs import data_parallel

BENCH = "islands"
LAYERS, WIDTH, BATCH = 4, 512, 16
LAYER_US = 20_000  # a layer's pass over the whole batch on all devices together, each working on its share
DEVICES = 4
ISLANDS = {
    "all": {"hosts": 1, "devices": DEVICES},
    "half0": {"hosts": 1, "devices": DEVICES // 2},
    "half1": {"hosts": 1, "devices": DEVICES // 2},
}
Tree = Any


def layer_on(slice: pw.Slice) -> pw.Stage:
    """A layer on a slice, data parallel over its devices. All of them together take as long on either set-up."""

    def held(x: Any) -> Any:
        return device_wait(x, LAYER_US)

    def layer(weights: Any, x: Any) -> Any:
        spec = P("data")
        waited = jax.shard_map(held, mesh=slice.abstract_mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)
        return waited + jnp.tanh(waited @ weights)

    return pw.jit(slice, in_specs=(P(), P("data")), out_specs=P("data"))(layer)


def replica(slice: pw.Slice) -> Callable[..., Any]:
    stage = layer_on(slice)

    def loss(params: list[Any], x: Any) -> Any:
        for weights in params:
            x = stage(weights, x)
        return (x**2).mean()

    both: Callable[..., Any] = jax.value_and_grad(loss)
    return both


def trainer(step: Callable[..., Any]) -> pw.Program:
    """The step with its update."""

    def train(params: Tree, *batch: Any) -> Any:
        value, gradients = step(params, *batch)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients), value

    return pw.program(donate_argnums=0)(train)


def measured(train: pw.Program, params: Tree, *batch: Any) -> Measure:
    """The seconds of steps, each of which needs the parameters of the one before."""
    state = [params]

    def measure(calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            state[0], value = train(state[0], *batch)
        jax.block_until_ready((state[0], value))
        return time.perf_counter() - begin

    return measure


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.islands", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds: for a look, not for a figure")
    options = parser.parse_args(argv)
    note_machine("jax", "pyzmq")
    rng = np.random.default_rng(0)
    host = [(rng.normal(size=(WIDTH, WIDTH)) / WIDTH).astype(np.float32) for _ in range(LAYERS)]
    x = np.ones((BATCH, WIDTH), np.float32)
    with pw.connect(islands=ISLANDS, preload=("bench.device_wait",)):
        whole = pw.slice(DEVICES, island="all")
        halves = [pw.slice(DEVICES // 2, island=name) for name in ("half0", "half1")]
        one = trainer(replica(whole))
        two = data_parallel([replica(half) for half in halves])

        def on_two(params: Tree, first: Any, second: Any) -> Any:
            # The batch lives where it is used, as an input pipeline would have put it.
            return two.on_parts(params, [(first,), (second,)])

        medians = interleaved_medians(
            {
                "one": measured(one, pw.put(host, whole), pw.put(x, whole, P("data"))),
                "two": measured(
                    trainer(on_two),
                    [pw.put(host, half) for half in halves],
                    *[pw.put(part, half, P("data")) for part, half in zip(np.split(x, 2), halves, strict=True)],
                ),
            },
            rounds=3 if options.quick else 9,
            round_s=1.0,
        )
    megabytes = sum(leaf.nbytes for leaf in host) / 1e6
    report(
        BENCH,
        f"two islands of {DEVICES // 2}, {megabytes:.1f} MB of gradients each way, device wait (Figure 12)",
        1 / medians["two"],
        "steps/s",
        rival=f"one island of {DEVICES}",
        rival_value=1 / medians["one"],
        goal=Goal("ratio", ">=", 0.972),
    )


if __name__ == "__main__":
    main()
