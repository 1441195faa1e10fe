"""Subject: Ray, one actor. The step is done in numpy, so JAX is not needed where Ray is installed, and its work costs
less."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import numpy as np
import ray
from ray.dag import InputNode

from bench import CHAIN_LENGTH
from bench.subject import serve


def one_step(x: Any) -> Any:
    return x + x.sum() * np.float32(2.0**-20)


class Stepper:
    def step(self, x: Any) -> Any:
        return one_step(x)

    def fused(self, x: Any) -> Any:
        for _ in range(CHAIN_LENGTH):
            x = one_step(x)
        return x


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    actor: Any = ray.remote(Stepper).remote()
    start = np.full(1, 0.5, np.float32)

    @functools.cache
    def compiled() -> Any:
        """The chain as a compiled graph: its channels are made once, and a run passes through all nodes."""
        with InputNode() as x:
            node = x
            for _ in range(CHAIN_LENGTH):
                node = actor.step.bind(node)
        return node.experimental_compile()

    def actor_calls(method: Any, calls: int) -> None:
        reference: Any = start
        for _ in range(calls):
            reference = method.remote(reference)
        ray.get(reference)

    def graph_runs(calls: int) -> None:
        """A compiled graph's result must be read before it can be given to the next run."""
        x = start
        for _ in range(calls):
            x = ray.get(compiled().execute(x))

    cases: dict[str, Callable[[int], None]] = {
        "O": lambda calls: actor_calls(actor.step, calls),
        "C": graph_runs,
        "F": lambda calls: actor_calls(actor.fused, calls),
    }

    def measure(case: str, calls: int) -> float:
        """Seconds for `calls` dependent calls."""
        began = time.perf_counter()
        cases[case](calls)
        return time.perf_counter() - began

    def blocking(calls: int) -> list[float]:
        """Seconds of every one of `calls` one-step calls, each of whose results is brought here before the next."""
        seconds = []
        for _ in range(calls):
            began = time.perf_counter()
            ray.get(actor.step.remote(start))
            seconds.append(time.perf_counter() - began)
        return seconds

    def version() -> str:
        return f"ray {ray.__version__}"

    serve({"measure": measure, "blocking": blocking, "version": version})
    ray.shutdown()


if __name__ == "__main__":
    main()
