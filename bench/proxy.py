"""An unchanged JAX program through `pathway proxy`, beside the same program on local CPU devices, in turns.

    python -m bench.proxy [--rounds N] [--only CASE ...]

Where the machine has fewer cores than the client, the proxy, the scheduler and the executor would like, they compete,
and the figures say so: stderr has the CPU time that each process spends on a call.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping

from bench.harness import Goal, interleaved_medians, note, note_machine, report
from bench.jax_program import BULK_BYTES, SMALL_ARRAYS
from bench.subject import Subject
from pathway.embedded import LocalCluster, start_local_cluster

CASES: Mapping[str, tuple[str, float, str, Goal | None]] = {
    # what is asked for: (request, scale of the seconds, unit, goal)
    "enqueue": ("enqueue", 1e6, "us/call", Goal("value", "<=", 50)),
    "sustained": ("sustained", 1e6, "us/call", Goal("value", "<=", 100)),
    "blocking": ("blocking", 1e6, "us/call", None),
    "train": ("train", 1e3, "ms/step", Goal("ratio", "<=", 1 / 0.9)),
    "put 1,000 small": ("put_small", 1e3, "ms", Goal("value", "<=", 50)),
    "get 1,000 small": ("get_small", 1e3, "ms", Goal("value", "<=", 50)),
}
BULK = {"put 64 MiB": "put", "get 64 MiB": "get"}
DIRECTORY_CASE = "put 64 MiB by shared directory"
COMPILE_LAYERS = 24
MEMORY_GOAL_MB = 150 + SMALL_ARRAYS / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-s", type=float, default=0.5)
    parser.add_argument("--only", nargs="*", default=[], metavar="CASE")
    options = parser.parse_args()
    note_machine("jax", "jaxlib", "grpcio")
    program = [sys.executable, "-m", "bench.jax_program"]
    local_environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "NPROC": "16"}
    with (
        tempfile.TemporaryDirectory(prefix="pathway-bench-", dir=_memory_directory()) as directory,
        start_local_cluster({"one": {"hosts": 1, "devices": 2}}) as cluster,
    ):
        address = cluster.start_proxy("127.0.0.1:0", "--transfer-directory", directory)
        proxied_environment = {
            "JAX_PLATFORMS": "proxy,cpu",
            "JAX_BACKEND_TARGET": address,
            "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
        }
        shared = {
            **proxied_environment,
            "IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_DIRECTORY": directory,
            "IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_THRESHOLD_BYTES": str(1 << 20),
        }
        with (
            Subject("local", [program], environment=local_environment) as local,
            Subject("proxied", [program], environment=proxied_environment) as proxied,
        ):
            wanted = [case for case in CASES if not options.only or case in options.only]
            for case in wanted:
                _case(case, local, proxied, cluster, options.rounds, options.round_s)
            for case, request in BULK.items():
                if not options.only or case in options.only:
                    _bulk(case, request, local, proxied, options.rounds, Goal("value", ">=", 1))
            if not options.only or DIRECTORY_CASE in options.only:
                with Subject("by directory", [program], environment=shared) as other:
                    _bulk(DIRECTORY_CASE, "put", local, other, options.rounds, Goal("value", ">=", 2))
            if not options.only or "compile" in options.only:
                seconds = {s.name: s.ask("compile", layers=COMPILE_LAYERS) for s in (local, proxied)}
                report(
                    "proxy", f"first compile, {COMPILE_LAYERS} layers", seconds["proxied"], "s",
                    rival="local CPU devices", rival_value=seconds["local"], goal=Goal("ratio", "<=", 1.1),
                )  # fmt: skip
            report("proxy", "server memory", _rss_mb(cluster), "MB", goal=Goal("value", "<=", MEMORY_GOAL_MB))


def _case(case: str, local: Subject, proxied: Subject, cluster: LocalCluster, rounds: int, round_s: float) -> None:
    request, scale, unit, goal = CASES[case]
    medians = interleaved_medians(
        {
            "local": lambda calls: local.ask(request, calls=calls),
            "proxied": lambda calls: proxied.ask(request, calls=calls),
        },
        rounds=rounds,
        round_s=round_s,
    )
    report(
        "proxy", case, medians["proxied"] * scale, unit,
        rival="local CPU devices", rival_value=medians["local"] * scale, goal=goal,
    )  # fmt: skip
    calls = max(1, int(round_s / medians["proxied"]))
    before = _cpu_s(cluster, proxied)
    proxied.ask(request, calls=calls)
    spent = {name: (after - before[name]) / calls for name, after in _cpu_s(cluster, proxied).items()}
    note(
        f"  {case}: CPU a call: "
        + ", ".join(f"{name} {s * scale:.3g} {unit.split('/')[0]}" for name, s in spent.items())
    )


def _bulk(case: str, request: str, local: Subject, proxied: Subject, rounds: int, goal: Goal) -> None:
    subjects = {"local": local, "proxied": proxied}
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds + 1):  # one to warm up; one array at a time, which is memory enough
        for name, subject in subjects.items():
            seconds[name].append(subject.ask(request, calls=1))
    rates = {name: BULK_BYTES / statistics.median(all_[1:]) / 1e9 for name, all_ in seconds.items()}
    report("proxy", case, rates["proxied"], "GB/s", rival="local CPU devices", rival_value=rates["local"], goal=goal)


def _processes(cluster: LocalCluster, client: Subject) -> dict[str, int]:
    assert cluster.scheduler is not None
    [executor] = _children(cluster.workers["one", 0].pid)
    return {
        "client": client.ask("pid"), "proxy": cluster.proxies[0].pid, "scheduler": cluster.scheduler.pid,
        "executor": executor,
    }  # fmt: skip


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as file:
            found += map(int, file.read().split())
    return found


def _cpu_s(cluster: LocalCluster, client: Subject) -> dict[str, float]:
    spent = {}
    for name, pid in _processes(cluster, client).items():
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        spent[name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent


def _rss_mb(cluster: LocalCluster) -> float:
    with open(f"/proc/{cluster.proxies[0].pid}/status") as file:
        return next(int(line.split()[1]) / 1000 for line in file if line.startswith("VmRSS"))


def _memory_directory() -> str | None:
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


if __name__ == "__main__":
    main()
