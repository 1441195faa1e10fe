"""How fast a client can tell devices what to do, beside the same JAX without a runtime, Ray and dask.distributed.

`python -m bench.dispatch [--quick]`. The cases O, C and F are those of `bench.chain`; an island is written as hosts x
devices of each. Ray and dask.distributed are measured where this interpreter has them, or where
PATHWAY_BENCH_RAY_PYTHON and PATHWAY_BENCH_DASK_PYTHON name another that does.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from bench import CHAIN_LENGTH
from bench.harness import Goal, Measure, interleaved_medians, note, note_machine, report
from bench.leftovers import Watched, peak_rss_mb
from bench.subject import REPOSITORY, Subject, SubjectError

BENCH = "dispatch"
OURS = "pathway"
RAW = "raw JAX"

ENOUGH_XLA_THREADS = {"NPROC": "64"}
"""XLA's pool has a thread a core, which starves collectives of more devices than cores."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """An island. `waits_us` are the lengths that Figure 6 is drawn for on it."""

    hosts: int
    devices: int  # of each host
    waits_us: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.hosts}x{self.devices}"


ONE_DEVICE = Shape(1, 1, waits_us=(20, 50, 100, 150, 300, 600, 1000))
FOUR_DEVICES = Shape(1, 4)
TWO_HOSTS = Shape(2, 2, waits_us=(1, 100, 200, 400, 700, 1500))

GOALS: Mapping[tuple[str, Shape, str | None], Goal] = {
    ("O", ONE_DEVICE, None): Goal("value", ">=", 10_000),
    ("O", ONE_DEVICE, "ray"): Goal("ratio", ">=", 10),
    ("C", ONE_DEVICE, RAW): Goal("ratio", ">=", 0.5),
    ("C", TWO_HOSTS, RAW): Goal("ratio", ">=", 0.9),
    ("F", FOUR_DEVICES, RAW): Goal("ratio", ">=", 0.97),
    ("F", TWO_HOSTS, RAW): Goal("ratio", ">=", 0.97),
    ("C fused", ONE_DEVICE, "pathway F"): Goal("ratio", ">=", 0.95),
    ("C fused", FOUR_DEVICES, "pathway F"): Goal("ratio", ">=", 0.95),
    ("C fused", TWO_HOSTS, "pathway F"): Goal("ratio", ">=", 0.95),
    ("shortest computation", ONE_DEVICE, None): Goal("value", "<=", 200),
    ("shortest computation", TWO_HOSTS, None): Goal("value", "<=", 1000),
    ("blocking call", ONE_DEVICE, None): Goal("value", "<=", 300),
}
"""What is promised: by case, island and rival (None: by itself)."""

REACHED_RATIO = 0.95
"""Figure 6 asks for the shortest computation at which the runtime has this part of raw JAX's rate."""


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long is measured."""

    rounds: int
    round_s: float


FULL = Effort(rounds=9, round_s=0.4)
QUICK = Effort(rounds=3, round_s=0.1)


# -- subjects ---------------------------------------------------------------------------------------------------------


def pathway_subject(shape: Shape) -> Subject:
    command = [sys.executable, "-m", "bench.pathway_chain", f"--hosts={shape.hosts}", f"--devices={shape.devices}"]
    return Subject(OURS, [command])


def raw_subject(shape: Shape) -> Subject:
    """Raw JAX: one process a host, each with its own loop of the same calls, as in multi-controller JAX."""
    command = [sys.executable, "-m", "bench.raw_jax", f"--hosts={shape.hosts}", f"--devices={shape.devices}"]
    command.append(f"--coordinator=127.0.0.1:{free_port()}")
    commands = [[*command, f"--host-index={index}"] for index in range(shape.hosts)]
    return Subject(RAW, commands, environment=ENOUGH_XLA_THREADS)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def other_runtime(rival: str, package: str) -> Subject | None:
    """Ray or dask in a process of its own; None, with a note, where it is not installed."""
    variable = f"PATHWAY_BENCH_{rival.upper()}_PYTHON"
    python = os.environ.get(variable) or (sys.executable if importlib.util.find_spec(package) else "")
    if not python:
        note(f"{rival} is not installed here, and {variable} names no interpreter that has it: left out")
        return None
    subject = Subject(rival, [[python, "-m", f"bench.{rival}_chain"]])
    try:
        note(f"{rival} is {subject.ask('version')}; its steps are numpy's")
    except SubjectError as error:
        note(f"{rival} is left out: {error}")
        subject.close()
        return None
    return subject


# -- what is measured -------------------------------------------------------------------------------------------------


def timing(subject: Subject, case: str, **arguments: object) -> Measure:
    def measure(calls: int) -> float:
        seconds: float = subject.ask("measure", case=case, calls=calls, **arguments)
        return seconds

    return measure


def report_beside(case: str, shape: Shape, values: dict[str, float], unit: str) -> None:
    """One line for every rival in `values`, and one without where something is promised for the value itself."""
    rivals = dict(values)
    ours = rivals.pop(OURS)
    own_goal = GOALS.get((case, shape, None))
    if own_goal is not None or not rivals:
        report(BENCH, f"{case} {shape}", ours, unit, goal=own_goal)
    for rival, value in rivals.items():
        goal = GOALS.get((case, shape, rival))
        report(BENCH, f"{case} {shape}", ours, unit, rival=rival, rival_value=value, goal=goal)


def figure_5(shape: Shape, subjects: Mapping[str, Subject], effort: Effort) -> None:
    """Steps a second of O, C and F; and of C with fusing on, beside F."""
    for case, steps in (("O", 1), ("C", CHAIN_LENGTH), ("F", CHAIN_LENGTH)):
        timings = {name: timing(subject, case) for name, subject in subjects.items()}
        seconds = interleaved_medians(timings, rounds=effort.rounds, round_s=effort.round_s)
        report_beside(case, shape, {name: steps / median for name, median in seconds.items()}, "steps/s")
    ours = subjects[OURS]
    timings = {OURS: timing(ours, "C fused"), "pathway F": timing(ours, "F")}
    seconds = interleaved_medians(timings, rounds=effort.rounds, round_s=effort.round_s)
    report_beside("C fused", shape, {name: CHAIN_LENGTH / median for name, median in seconds.items()}, "steps/s")


def figure_6(shape: Shape, subjects: Mapping[str, Subject], effort: Effort) -> None:
    """The rate of O beside raw JAX's as computations get longer, and the shortest from which on it is (almost) the
    same. A computation is made longer with the device wait; its length is what raw JAX needs for a call."""
    shortest_us: float | None = None
    for wait_us in shape.waits_us:
        timings = {name: timing(subjects[name], "O", wait_us=wait_us) for name in (OURS, RAW)}
        seconds = interleaved_medians(timings, rounds=effort.rounds, round_s=effort.round_s)
        rates = {name: 1 / median for name, median in seconds.items()}
        report_beside(f"O, device wait of {wait_us} us,", shape, rates, "steps/s")
        if rates[OURS] < REACHED_RATIO * rates[RAW]:
            shortest_us = None
        elif shortest_us is None:
            shortest_us = seconds[RAW] * 1e6
    case = "shortest computation"
    report(BENCH, f"{case} {shape}", shortest_us, "us", goal=GOALS.get((case, shape, None)))


def blocking_call(shape: Shape, subjects: Mapping[str, Subject], effort: Effort) -> None:
    """The median of one-node calls, each of whose results the client has in hand before the next."""

    def median_s(subject: Subject) -> float:
        samples: list[float] = subject.ask("blocking", calls=int(effort.rounds * effort.round_s * 500))
        return statistics.median(samples)

    report_beside("blocking call", shape, {name: median_s(subject) * 1e6 for name, subject in subjects.items()}, "us")


def start_and_stop(effort: Effort) -> None:
    """An embedded cluster from nothing to its first result, and back to nothing; the scheduler's memory on the way."""
    started, stopped, rss_mb, left = [], [], [], []
    for _ in range(max(1, effort.rounds // 3)):
        watched = Watched()
        with contextlib.closing(watched):
            command = [sys.executable, "-m", "bench.start_stop"]
            with Subject(OURS, [command], environment=watched.environment) as subject:
                started.append(subject.ask("start"))
                subject.ask("work", calls=5000)
                schedulers = [pid for pid, line in watched.processes().items() if " scheduler" in line]
                rss_mb += [peak_rss_mb(pid) for pid in schedulers]
                stopped.append(subject.ask("stop"))
            left += watched.leftovers()
    for leftover in left:
        note(f"left behind: {leftover}")
    limits: tuple[tuple[str, Sequence[float], Callable[[Sequence[float]], float], str, Goal], ...] = (
        ("connect() to first result", started, statistics.median, "s", Goal("value", "<=", 6)),
        ("stop", stopped, statistics.median, "s", Goal("value", "<=", 2)),
        ("scheduler's peak memory", rss_mb, max, "MB", Goal("value", "<=", 80)),
    )
    for case, samples, summary, unit, goal in limits:
        report(BENCH, case, summary(samples) if samples else None, unit, goal=goal)
    report(BENCH, "left behind", len(left), "things", goal=Goal("value", "<=", 0))


def import_cost(effort: Effort) -> None:
    """What `import pathway` takes where JAX is imported already, with all public names, which load when first used."""
    program = (
        "import time, jax; began = time.perf_counter(); import pathway; "
        "[getattr(pathway, name) for name in pathway.__all__]; print(time.perf_counter() - began)"
    )
    command = [sys.executable, "-c", program]
    samples = [
        float(subprocess.run(command, capture_output=True, check=True, text=True, cwd=REPOSITORY).stdout)
        for _ in range(effort.rounds)
    ]
    report(BENCH, "import", statistics.median(samples), "s", goal=Goal("value", "<=", 0.25))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fraction of the time, for less exact figures")
    effort = QUICK if parser.parse_args(argv).quick else FULL
    note_machine("jax", "pyzmq", "trio")
    import_cost(effort)
    start_and_stop(effort)
    for shape in (ONE_DEVICE, FOUR_DEVICES, TWO_HOSTS):
        with contextlib.ExitStack() as running:
            subjects: dict[str, Subject] = {}
            for subject in (pathway_subject(shape), raw_subject(shape)):
                subjects[subject.name] = running.enter_context(subject)
            if shape == ONE_DEVICE:
                for rival, package in (("ray", "ray"), ("dask", "distributed")):
                    if (other := other_runtime(rival, package)) is not None:
                        subjects[other.name] = running.enter_context(other)
            figure_5(shape, subjects, effort)
            if shape.waits_us:
                figure_6(shape, subjects, effort)
            if shape == ONE_DEVICE:
                blocking_call(shape, subjects, effort)
    return 0


if __name__ == "__main__":
    sys.exit(main())
