"""Subject: dask.distributed, a local cluster of one worker process. The step is done in numpy, as in `ray_chain`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import distributed
import numpy as np

from bench import CHAIN_LENGTH
from bench.subject import serve


def step(x: Any) -> Any:
    return x + x.sum() * np.float32(2.0**-20)


def fused(x: Any) -> Any:
    for _ in range(CHAIN_LENGTH):
        x = step(x)
    return x


def main() -> None:
    start = np.full(1, 0.5, np.float32)
    cluster = distributed.LocalCluster(n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None)
    with cluster, distributed.Client(cluster) as client:

        def task_each(function: Callable[[Any], Any], calls: int) -> None:
            future: Any = start
            for _ in range(calls):
                future = client.submit(function, future, pure=False)
            future.result()

        def graph_each(calls: int) -> None:
            """One graph of `CHAIN_LENGTH` tasks a call."""
            x = start
            for call in range(calls):
                graph: dict[Any, Any] = {(call, 0): (step, x)}
                graph |= {(call, node): (step, (call, node - 1)) for node in range(1, CHAIN_LENGTH)}
                x = client.get(graph, (call, CHAIN_LENGTH - 1), optimize_graph=False)

        cases: dict[str, Callable[[int], None]] = {
            "O": lambda calls: task_each(step, calls),
            "C": graph_each,
            "F": lambda calls: task_each(fused, calls),
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
                client.submit(step, start, pure=False).result()
                seconds.append(time.perf_counter() - began)
            return seconds

        def version() -> str:
            return f"distributed {distributed.__version__}"

        serve({"measure": measure, "blocking": blocking, "version": version})


if __name__ == "__main__":
    main()
