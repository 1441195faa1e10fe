"""Subject: Pathway, with a cluster of one island of its own."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

from jax.sharding import PartitionSpec

import pathway as pw
from bench import chain
from bench.subject import serve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1, help="devices of each host")
    parser.add_argument("--hosts", type=int, default=1)
    options = parser.parse_args()
    island = {"hosts": options.hosts, "devices": options.devices}
    with pw.connect(islands={"one": island}, preload=("bench.device_wait",)):
        devices = pw.slice(options.hosts * options.devices, mesh={chain.AXIS: options.hosts * options.devices})
        spec = PartitionSpec(chain.AXIS)
        start = pw.put(chain.start_value(options.hosts * options.devices), devices, spec)

        @functools.cache
        def ready(case: str, wait_us: int) -> Callable[[Any], Any]:
            step = chain.make_step(wait_us)
            placed = pw.jit(devices, in_specs=(spec,), out_specs=spec)
            placed_step = placed(step)
            cases: dict[str, Callable[[Any], Any]] = {
                "O": placed_step,
                "C": pw.program(fuse=False)(chain.make_fused(placed_step)),
                "C fused": pw.program(chain.make_fused(placed_step)),
                "F": placed(chain.make_fused(step)),
            }
            call = cases[case]
            call(start).block_until_ready()
            return call

        def measure(case: str, calls: int, wait_us: int = 0) -> float:
            """Seconds for `calls` dependent calls."""
            call = ready(case, wait_us)
            x = start
            began = time.perf_counter()
            for _ in range(calls):
                x = call(x)
            x.block_until_ready()
            return time.perf_counter() - began

        def blocking(calls: int) -> list[float]:
            """Seconds of every one of `calls` one-step calls, each of whose results is brought here before the next."""
            call = ready("O", 0)
            seconds = []
            for _ in range(calls):
                began = time.perf_counter()
                call(start).numpy()
                seconds.append(time.perf_counter() - began)
            return seconds

        serve({"measure": measure, "blocking": blocking})


if __name__ == "__main__":
    main()
