"""What all benches share: interleaved medians, goals, and one JSON object a line.

Every line has exactly the keys of `KEYS`. `met` is null where nothing is promised; `ratio` is value / rival_value.
What a reader should know of the machine goes to stderr, so that stdout can be piped.
"""

from __future__ import annotations

import importlib.metadata
import json
import operator
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

KEYS = ("bench", "case", "value", "unit", "rival", "rival_value", "ratio", "goal", "met")

_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le}


@dataclass(frozen=True)
class Goal:
    """A promise: `subject` is "value" or "ratio". Printed as, for example, "ratio >= 0.97"."""

    subject: str
    comparison: str
    bound: float

    def met(self, value: float | None, ratio: float | None) -> bool:
        compared = value if self.subject == "value" else ratio
        return compared is not None and _COMPARISONS[self.comparison](compared, self.bound)

    def __str__(self) -> str:
        return f"{self.subject} {self.comparison} {self.bound:g}"


def report(
    bench: str,
    case: str,
    value: float | None,
    unit: str,
    *,
    rival: str | None = None,
    rival_value: float | None = None,
    goal: Goal | None = None,
) -> dict[str, object]:
    """Print one result, and return it as it was printed. A value of None: what was looked for was not found."""
    ratio = value / rival_value if value is not None and rival_value else None
    line: dict[str, object] = {
        "bench": bench,
        "case": case,
        "value": _rounded(value),
        "unit": unit,
        "rival": rival,
        "rival_value": _rounded(rival_value),
        "ratio": _rounded(ratio),
        "goal": None if goal is None else str(goal),
        "met": None if goal is None else goal.met(value, ratio),
    }
    print(json.dumps(line), flush=True)
    return line


def _rounded(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.4g}")


def note(text: str) -> None:
    """A line for people, on stderr."""
    print(text, file=sys.stderr, flush=True)


def note_machine(*packages: str) -> None:
    """What the figures were measured on: cores, Python and the versions of `packages`, on stderr."""
    versions = []
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} not installed")
    cores = len(os.sched_getaffinity(0))
    note(f"{cores} cores, {platform.machine()}, Python {platform.python_version()}, " + ", ".join(versions))


Measure = Callable[[int], float]
"""Makes so many calls, and returns the seconds that they took together."""


def interleaved_medians(measures: Mapping[str, Measure], *, rounds: int, round_s: float) -> dict[str, float]:
    """The median seconds a call of each, measured in turns (A B C A B C ...), so that what disturbs the machine for a
    while disturbs all of them. Each turn takes about `round_s`; the calls that this needs are found by doubling,
    which also warms up."""
    calls = {name: calibrated_calls(measure, round_s) for name, measure in measures.items()}
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            seconds[name].append(measure(calls[name]) / calls[name])
    return {name: statistics.median(samples) for name, samples in seconds.items()}


def calibrated_calls(measure: Measure, round_s: float) -> int:
    """How many calls take about `round_s` seconds."""
    calls = 1
    while (took := measure(calls)) < round_s / 2:
        growth = round_s / took if took > 0 else 8.0
        calls = max(calls + 1, int(calls * min(growth, 8.0)))
    return calls
