"""Subject: the same JAX with no runtime above it, in one process or as a `jax.distributed` island of several."""

from __future__ import annotations

import argparse
import functools
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bench import CHAIN_LENGTH, chain
from bench.subject import serve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1, help="devices of this process")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--host-index", type=int, default=0)
    parser.add_argument("--coordinator", default="")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.devices)
    if options.hosts > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(options.coordinator, options.hosts, options.host_index)
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.array(devices), (chain.AXIS,))
    sharding = NamedSharding(mesh, PartitionSpec(chain.AXIS))
    value = chain.start_value(len(devices))
    start = jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    @functools.cache
    def compiled(case: str, wait_us: int) -> chain.Step:
        step = chain.make_step(wait_us)
        function = chain.make_fused(step) if case == "F" else step
        call: chain.Step = jax.jit(function, in_shardings=sharding, out_shardings=sharding)
        call(start).block_until_ready()
        return call

    def measure(case: str, calls: int, wait_us: int = 0) -> float:
        """Seconds for `calls` dependent calls. C, of which raw JAX has none, is its steps called one by one."""
        call = compiled(case, wait_us)
        jit_calls = calls * CHAIN_LENGTH if case == "C" else calls
        x = start
        began = time.perf_counter()
        for _ in range(jit_calls):
            x = call(x)
        x.block_until_ready()
        return time.perf_counter() - began

    def blocking(calls: int) -> list[float]:
        """Seconds of every one of `calls` one-step calls, each waited for before the next."""
        call = compiled("O", 0)
        seconds = []
        for _ in range(calls):
            began = time.perf_counter()
            call(start).block_until_ready()
            seconds.append(time.perf_counter() - began)
        return seconds

    serve({"measure": measure, "blocking": blocking})


if __name__ == "__main__":
    main()
