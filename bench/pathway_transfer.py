"""Subject: Pathway, with a cluster of two islands of one device each, between which arrays move.

`--sockets` switches shared memory off; `--keys` gives the cluster keys, so that all sockets are CURVE's.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pathway as pw
from bench.subject import serve
from pathway.embedded import start_local_cluster
from pathway.transport.keys import generate

HOPS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sockets", action="store_true")
    parser.add_argument("--keys", action="store_true")
    options = parser.parse_args()
    with contextlib.ExitStack() as running:
        keys = ""
        if options.keys:
            keys = running.enter_context(tempfile.TemporaryDirectory(prefix="pathway-bench-keys-"))
            generate(Path(keys))
        if options.sockets:
            os.environ["PATHWAY_SHARED_MEMORY"] = "no"
        islands = {name: {"hosts": 1, "devices": 1} for name in ("one", "two")}
        cluster = running.enter_context(start_local_cluster(islands, keys=keys, preload=("bench.device_wait",)))
        running.enter_context(pw.connect(cluster.address, keys=keys or None))
        serve(Handlers().by_name())


class Handlers:
    """What can be asked for."""

    def __init__(self) -> None:
        self.one, self.two = (pw.slice(1, island=name) for name in ("one", "two"))

    def by_name(self) -> dict[str, Callable[..., Any]]:
        return {
            "edge": self.edge,
            "edges": self.edges,
            "hops": self.hops,
            "put": self.put,
            "get": self.get,
            "put many": self.put_many,
            "stages": self.stages,
            "churn": self.churn,
        }

    @functools.cached_property
    def _first_element(self) -> Callable[[Any], Any]:
        """Needs its whole argument on the second island, and costs nothing there."""

        @pw.jit(self.two)
        def first_element(x: Any) -> Any:
            return jax.lax.slice_in_dim(x, 0, 1)

        return first_element

    @functools.cache  # noqa: B019 (as long as the process)
    def _on_one(self, nbytes: int, number: int = 0) -> Any:
        x = pw.put(np.full(nbytes, number % 250 + 1, np.uint8), self.one)
        return x.block_until_ready()

    def edge(self, nbytes: int, count: int, in_flight: int = 2) -> float:
        """Seconds for `count` transfers from island to island, a call each, so many of them under way at once."""
        x = self._on_one(nbytes)
        began = time.perf_counter()
        self._move(x, in_flight, lambda moved: moved < count)
        return time.perf_counter() - began

    def churn(self, nbytes: int, in_flight: int, seconds: float) -> int:
        """Move arrays for so long; how many."""
        ends = time.monotonic() + seconds
        return self._move(self._on_one(nbytes), in_flight, lambda moved: time.monotonic() < ends)

    def _move(self, x: Any, in_flight: int, goes_on: Callable[[int], bool]) -> int:
        moved, waiting = 0, collections.deque[Any]()
        while goes_on(moved):
            if len(waiting) == in_flight:
                waiting.popleft().block_until_ready()
            waiting.append(self._first_element(x))
            moved += 1
        jax.block_until_ready(list(waiting))
        return moved

    def edges(self, nbytes: int, arrays: int, count: int) -> float:
        """Seconds for `count` runs of a program that moves so many arrays from island to island, each an edge."""
        xs = [self._on_one(nbytes, number) for number in range(arrays)]
        program = self._first_elements(arrays)
        program(xs).block_until_ready()
        began = time.perf_counter()
        for _ in range(count):
            program(xs).block_until_ready()
        return time.perf_counter() - began

    @functools.cache  # noqa: B019 (as long as the process)
    def _first_elements(self, arrays: int) -> Callable[[Any], Any]:
        @pw.jit(self.two)
        def first_elements(xs: Any) -> Any:
            return jnp.stack([x[0] for x in xs])

        return pw.program(name=f"{arrays} edges")(lambda xs: first_elements(xs))

    @functools.cached_property
    def _there_and_back(self) -> Callable[[Any], Any]:
        """A program of `HOPS` hops between the islands, each of which needs the one before."""
        steps = [pw.jit(place, name=name)(lambda x: x + 1) for place, name in ((self.two, "there"), (self.one, "back"))]

        def program(x: Any) -> Any:
            for hop in range(HOPS):
                x = steps[hop % 2](x)
            return x

        return pw.program(name="there and back")(program)

    def hops(self, nbytes: int, count: int) -> list[float]:
        """For each of `count` runs, the seconds a hop took."""
        x = self._on_one(nbytes)
        self._there_and_back(x).block_until_ready()
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            self._there_and_back(x).block_until_ready()
            seconds.append((time.perf_counter() - began) / HOPS)
        return seconds

    def put(self, nbytes: int, count: int) -> float:
        """Seconds for `count` puts of one array, each of them ready on its device before the next begins."""
        value = np.ones(nbytes, np.uint8)
        began = time.perf_counter()
        for _ in range(count):
            pw.put(value, self.one).block_until_ready()
        return time.perf_counter() - began

    def get(self, nbytes: int, count: int) -> float:
        """Seconds for `count` gets, each of an array that was not got before, and whose value is dropped."""
        arrays = [pw.put(np.ones(nbytes, np.uint8), self.one).block_until_ready() for _ in range(count)]
        seconds = 0.0
        while arrays:
            array = arrays.pop()
            began = time.perf_counter()
            value = pw.get(array)
            seconds += time.perf_counter() - began
            assert value.nbytes == nbytes
            del value, array
        return seconds

    def put_many(self, nbytes: int, arrays: int, count: int) -> float:
        """Seconds for `count` puts of so many arrays at once."""
        tree = [np.full(nbytes, number % 250, np.uint8) for number in range(arrays)]
        seconds = 0.0
        for _ in range(count):
            began = time.perf_counter()
            placed = jax.block_until_ready(pw.put(tree, self.one))
            seconds += time.perf_counter() - began
            del placed
        return seconds

    @functools.cache  # noqa: B019 (as long as the process)
    def _stages(self, nbytes: int, wait_us: int, microbatches: int) -> Callable[[Any], Any]:
        from bench.device_wait import device_wait

        elements = max(1, nbytes // 4)

        @pw.jit(self.one)
        def first(seed: Any) -> Any:
            return jnp.broadcast_to(device_wait(seed, wait_us), (elements,))

        @pw.jit(self.two)
        def second(x: Any) -> Any:
            return device_wait(jax.lax.slice_in_dim(x, 0, 1), wait_us)

        def program(seeds: Any) -> Any:
            return [second(first(seed)) for seed in seeds]

        return pw.program(name=f"stages of {nbytes} bytes")(program)

    def stages(self, nbytes: int, wait_us: int, microbatches: int, count: int) -> float:
        """Seconds for `count` runs of two stages, one an island, each of which holds its device for `wait_us` for every
        microbatch; `nbytes` go from one to the other each time."""
        seeds = [pw.put(np.full(1, number, np.float32), self.one) for number in range(microbatches)]
        program = self._stages(nbytes, wait_us, microbatches)
        jax.block_until_ready(program(seeds))
        began = time.perf_counter()
        for _ in range(count):
            jax.block_until_ready(program(seeds))
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
