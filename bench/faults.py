"""What a killed executor costs: real processes, SIGKILL, and the clock of the client.

`python -m bench.faults [--quick]`. One island runs a client's computations; its executor is killed again and again, and
each time is measured from the kill:

- until the client's waiting call has raised `IslandLostError`;
- until the island has come back, with the client's 100 programs compiled from the disk cache: all of them run once.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from typing import Any

import jax
import numpy as np
import trio

import pathway as pw
from bench.harness import Goal, note, note_machine, report
from pathway.embedded import start_local_cluster
from pathway.observe import give_order
from pathway.transport.messages import DrainIsland

BENCH = "faults"
PROGRAMS = 100
SEEN_GOAL = Goal("value", "<=", 100)
BACK_GOAL = Goal("value", "<=", 3)


def executor_pid(client: pw.Client) -> int:
    """Of the island's only host; waits until it is there."""
    while True:
        [island] = client.status()["islands"]
        pid = int(island["hosts"][0]["executor_pid"]) if island["hosts"] else 0
        if island["state"] == "formed" and pid:
            return pid
        time.sleep(0.02)


def kill_once(client: pw.Client, programs: list[Any], endless: Any) -> tuple[float, float, float]:
    """Seconds from the kill to the error, until the island takes runs, and to the end of a run of each program."""
    pid = executor_pid(client)
    awaited = endless(np.float32(1))
    killed = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    try:
        awaited.block_until_ready()
        raise AssertionError("a run of a killed executor has ended well")
    except pw.IslandLostError:
        seen_s = time.perf_counter() - killed
    results = []
    formed_s = 0.0
    for number, program in enumerate(programs):
        while True:
            try:
                results.append((number, program(np.float32(1))))
                formed_s = formed_s or time.perf_counter() - killed
                break
            except pw.IslandLostError:
                time.sleep(0.005)  # the slice is not bound again
    for number, result in results:
        assert float(result) == number + 1
    return seen_s, formed_s, time.perf_counter() - killed


def faults(rounds: int, programs: int) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="pathway-bench-") as cache,
        start_local_cluster(
            {"island": {"devices": 1}}, environment={"PATHWAY_CACHE_DIR": cache}, log_level="error"
        ) as cluster,
        pw.Client(cluster.address) as client,
    ):
        place = client.slice(1)
        functions = [_adder(place, number) for number in range(programs)]

        @pw.jit(place)
        def endless(x: Any) -> Any:
            return jax.lax.fori_loop(0, 2_000_000_000, lambda i, x: x * 0.5 + 1.0, x)

        note(f"compiling {programs} programs")
        for number, function in enumerate(functions):
            assert float(function(np.float32(1))) == number + 1
        seen, back = [], []
        for one in range(rounds):
            seen_s, formed_s, back_s = kill_once(client, functions, endless)
            note(f"kill {one + 1}: error {seen_s * 1e3:.0f} ms, island {formed_s:.2f} s, programs {back_s:.2f} s")
            trio.run(give_order, cluster.address, DrainIsland(1, "island", False), 10.0)  # these losses are meant
            seen.append(seen_s)
            back.append(back_s)
    report(BENCH, "kill -9 to error at the client", statistics.median(seen) * 1e3, "ms", goal=SEEN_GOAL)
    case = f"kill -9 to island back, {programs} programs"
    report(BENCH, case, statistics.median(back), "s", goal=BACK_GOAL)


def _adder(place: Any, number: int) -> Any:
    """A program that is no other's."""
    return pw.jit(place)(lambda x: x + float(number))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 kills in place of 20")
    parser.add_argument("--rounds", type=int, metavar="N", help="how many kills")
    options = parser.parse_args()
    note_machine("jax", "pyzmq", "trio")
    faults(options.rounds or (5 if options.quick else 20), PROGRAMS)


if __name__ == "__main__":
    main()
