"""Subject: an embedded cluster, started and stopped once. `bench.dispatch` asks, and looks at what is left behind."""

from __future__ import annotations

import time

import pathway as pw
from bench.subject import serve


def start() -> float:
    """Seconds from `connect()` to the first result of a computation."""
    began = time.perf_counter()
    pw.connect()
    devices = pw.slice(1)

    @pw.jit(devices)
    def add_one(x: float) -> float:
        return x + 1

    first_result = float(add_one(1.0))
    took_s = time.perf_counter() - began
    assert first_result == 2.0
    return took_s


def work(calls: int) -> None:
    """Some runs, so that the scheduler's memory is that of a scheduler which has worked."""
    devices = pw.slice(1)

    @pw.jit(devices)
    def add_one(x: float) -> float:
        return x + 1

    x = add_one(0.0)
    for _ in range(calls):
        x = add_one(x)
    x.block_until_ready()


def stop() -> float:
    """Seconds that stopping takes."""
    began = time.perf_counter()
    pw.disconnect()
    return time.perf_counter() - began


if __name__ == "__main__":
    serve({"start": start, "work": work, "stop": stop})
