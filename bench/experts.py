"""Sparse experts: the time of a call grows with the rows that are sent, and not with the experts that there are.

`python -m bench.experts [--quick]`. Sixteen experts lie on two slices of two islands, the router on a third. A row
holds its expert's device for a time (`bench.device_wait`: this machine's islands share its cores). Of 2, 4, 8 or 16
chosen experts each is sent as many rows, so twice the experts are twice the rows, and the devices need twice the time.
Beside it: the same two chosen where there are only two experts, and all sixteen computing all rows (dense).
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp
import numpy as np

import pathway as pw
from bench.device_wait import device_wait
from bench.harness import Goal, Measure, interleaved_medians, note_machine, report
from pathway.programs import Experts, experts

BENCH = "experts"
EXPERTS, WIDTH = 16, 64
ROWS = 64  # for each chosen expert
ROW_US = 100
CHOSEN = (2, 4, 8, 16)
ISLANDS = {
    "router": {"hosts": 1, "devices": 1},
    "left": {"hosts": 1, "devices": 1},
    "right": {"hosts": 1, "devices": 1},
}


def expert(weights: Any, rows: Any) -> Any:
    return jnp.tanh(device_wait(rows, ROW_US * rows.shape[0]) @ weights)


def measured(ready: Experts, router: pw.Slice, chosen: int, dense: bool = False) -> Measure:
    """The seconds of calls in which so many experts are chosen by `ROWS` rows each."""
    weights = [np.full((WIDTH, WIDTH), number / WIDTH, np.float32) for number in range(len(ready))]
    params = ready.put(weights)
    front = pw.jit(router, name="router")(lambda x: x * 0.5)
    rows = chosen * ROWS

    def call(params: Any, x: Any, index: Any, gates: Any) -> Any:
        hidden = front(x)
        calls = [functools.partial(stage, each) for stage, each in zip(ready.stages, params, strict=True)]
        if dense:
            return [each(hidden) for each in calls]
        return pw.route(hidden, index, gates, calls)

    program = pw.program(fuse=False)(call)  # XLA's CPU client runs waits of one computation side by side
    home = [
        pw.put(each, router)
        for each in (
            np.ones((rows, WIDTH), np.float32),
            np.arange(rows, dtype=np.int32) % chosen,
            np.ones(rows, np.float32),
        )
    ]

    def measure(calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            out = program(params, *home)
            out[-1].block_until_ready() if dense else out.block_until_ready()
        return time.perf_counter() - begin

    return measure


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.experts", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds: for a look, not for a figure")
    options = parser.parse_args(argv)
    note_machine("jax", "pyzmq")
    with pw.connect(islands=ISLANDS, preload=("bench.device_wait",)):
        router, *slices = (pw.slice(1, island=name) for name in ISLANDS)
        sixteen, two = experts(expert, slices, EXPERTS), experts(expert, slices, 2)
        medians = interleaved_medians(
            {
                **{f"{chosen} of 16": measured(sixteen, router, chosen) for chosen in CHOSEN},
                "2 of 2": measured(two, router, 2),
                "dense": measured(sixteen, router, 2, dense=True),
            },
            rounds=2 if options.quick else 7,
            round_s=0.3 if options.quick else 1.0,
        )
    for chosen in CHOSEN:
        rows = chosen * ROWS
        report(
            BENCH,
            f"{chosen} of 16 experts chosen, {rows} rows",
            medians[f"{chosen} of 16"] * 1e3,
            "ms",
            rival="the devices' own time for these rows",
            rival_value=rows * ROW_US / len(slices) / 1e3,
        )
    report(
        BENCH,
        "2 of 16 experts chosen, beside all 16",
        medians["2 of 16"] * 1e3,
        "ms",
        rival="16 of 16, each with as many rows",
        rival_value=medians["16 of 16"] * 1e3,
        goal=Goal("ratio", "<=", 0.25),
    )
    report(
        BENCH,
        "2 experts chosen where there are 16",
        medians["2 of 16"] * 1e3,
        "ms",
        rival="where there are 2",
        rival_value=medians["2 of 2"] * 1e3,
        goal=Goal("ratio", "<=", 1.25),
    )
    report(
        BENCH,
        f"2 of 16 experts chosen, {2 * ROWS} rows",
        medians["2 of 16"] * 1e3,
        "ms",
        rival="all 16 computing all rows",
        rival_value=medians["dense"] * 1e3,
    )


if __name__ == "__main__":
    main()
