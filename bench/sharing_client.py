"""Subject: one client of a shared cluster, which keeps computations of a given length queued and counts what ends."""

from __future__ import annotations

import argparse
import threading
import time
from collections import deque
from typing import Any

import numpy as np

import pathway as pw
from bench.device_wait import device_wait
from bench.subject import serve
from pathway.client.recording import Recording


class Load:
    """Computations of `wait_us`, `window` of them under way, from a thread of its own until it is stopped."""

    def __init__(self, function: Any, window: int) -> None:
        self.ended = 0
        self._stop = threading.Event()
        self._function = function
        self._window = window
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        under_way: deque[Any] = deque()
        x = np.float32(1)
        while not self._stop.is_set():
            while len(under_way) < self._window:
                under_way.append(self._function(x))
            under_way.popleft().block_until_ready()
            self.ended += 1
            while under_way and under_way[0].is_ready():
                under_way.popleft()
                self.ended += 1
        for value in under_way:
            value.cancel()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--weight", type=float, default=1.0)
    options = parser.parse_args()
    client = pw.Client(options.address, name=options.name, weight=options.weight)
    place = client.slice(1, shared=True)
    functions: dict[int, Any] = {}
    loads: list[Load] = []

    def function(wait_us: int) -> Any:
        if wait_us not in functions:
            made = functions[wait_us] = pw.jit(place)(lambda x: device_wait(x, wait_us))
            for _ in range(20):
                made(np.float32(1)).block_until_ready()
        return functions[wait_us]

    def begin(wait_us: int, window: int) -> None:
        loads.append(Load(function(wait_us), window))

    def count() -> int:
        return loads[-1].ended

    def end() -> None:
        loads.pop().stop()

    def waits(wait_us: int, calls: int) -> list[float]:
        """Seconds from each of `calls` calls to its result, with a pause between them."""
        made, seconds = function(wait_us), []
        for _ in range(calls):
            time.sleep(0.01)
            began = time.perf_counter()
            made(np.float32(1)).block_until_ready()
            seconds.append(time.perf_counter() - began)
        return seconds

    recording = Recording(client)

    def record() -> None:
        recording.__enter__()

    def recorded() -> list[tuple[float, float]]:
        """From when to when each computation since `record` held the device, in seconds of one clock."""
        recording.__exit__(None, None, None)
        return [(step.start_s, step.end_s) for step in recording.steps]

    serve({"begin": begin, "count": count, "end": end, "waits": waits, "record": record, "recorded": recorded})


if __name__ == "__main__":
    main()
