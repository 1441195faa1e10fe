"""The scheduler on clusters that nobody here has: its core's time and its messages for each gang, from 16 to 4,096
islands of 8 hosts, simulated (`pathway.testing.simulate`).

    python -m bench.scale [--quick] [--churn]

`--churn` plays a day of a large cluster instead: 10,000 sessions come and go on 1,000 islands with 2,000 faults.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Sequence

from bench.harness import Goal, note, note_machine, report
from pathway.testing.simulate import Result, Scenario, simulate

BENCH = "scale"
SIZES = (16, 64, 256, 1024, 4096)
QUICK_SIZES = (16, 64, 256)
HOSTS, DEVICES = 8, 4
RUNS = 6000
CORE_GOAL = Goal("value", "<=", 20)
MESSAGES_GOAL = Goal("value", "<=", 2)
NO_FASTER_GOAL = Goal("ratio", "<=", 1)

CHURN_ISLANDS, CHURN_SESSIONS, CHURN_FAULTS = 1000, 10_000, 2000


def small_gangs(islands: int) -> Result:
    """Runs of one island each, from 64 clients that share all islands."""
    seconds = 1.0
    length_us = max(1000.0, 1e6 * islands * seconds / RUNS)
    return _played(
        Scenario(
            islands=islands, hosts=HOSTS, devices=DEVICES, clients=min(64, islands), seconds=seconds,
            lengths_us=(length_us,), ahead=max(32, 4 * islands // 64),
        )
    )  # fmt: skip


def full_gangs(islands: int) -> Result:
    """Runs over all islands, from one client."""
    return _played(
        Scenario(
            islands=islands, hosts=HOSTS, devices=DEVICES, clients=1, slices=islands, spread=islands,
            seconds=max(0.2, 10 * islands / 4096), lengths_us=(5e4,), ahead=4,
        )
    )  # fmt: skip


def _played(scenario: Scenario) -> Result:
    gc.collect()
    gc.freeze()  # the cluster's own records are many; looking through them again and again is no work of the core's
    result = simulate(scenario)
    gc.unfreeze()
    for violation in result.violations:
        note(f"violation: {violation}")
    return result


def scale(sizes: Sequence[int]) -> None:
    first_full_us = None
    for islands in sizes:
        result = small_gangs(islands)
        where = f"{islands:,} islands"
        report(BENCH, f"core time of a gang, {where}", result.core_us_per_run, "us", goal=CORE_GOAL)
        report(BENCH, f"messages of a run and island, {where}", result.messages_per_run, "messages", goal=MESSAGES_GOAL)
        report(BENCH, f"violations, {where}", len(result.violations), "violations", goal=Goal("value", "<=", 0))
        full_us = full_gangs(islands).core_us_per_run / islands
        if first_full_us is None:
            first_full_us = full_us
        report(
            BENCH, f"core time of a gang over all, for each island, {where}", full_us, "us",
            rival=f"{sizes[0]} islands", rival_value=first_full_us, goal=NO_FASTER_GOAL,
        )  # fmt: skip


def churn(islands: int, sessions: int, faults: int) -> None:
    """A day: sessions come and go, a few at a time, islands are lost, and in the end nothing is left."""
    from pathway.testing.sim_churn import churned

    result = churned(islands, sessions, faults, seed=int.from_bytes(os.urandom(3), "big"))
    for violation in result.violations:
        note(f"violation: {violation}")
    note(f"seed {result.seed}, {result.runs:,} runs, {result.islands_lost:,} islands lost, {result.real_s:.0f} s")
    where = f"{sessions:,} sessions, {islands:,} islands, {faults:,} faults"
    report(BENCH, f"violations, {where}", len(result.violations), "violations", goal=Goal("value", "<=", 0))
    report(
        BENCH, f"memory at the end, {where}", result.end_mb, "MB", rival="after a tenth", rival_value=result.tenth_mb,
        goal=Goal("ratio", "<=", 1.1),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"up to {QUICK_SIZES[-1]} islands")
    parser.add_argument("--churn", action="store_true", help="a day of a large cluster instead")
    options = parser.parse_args()
    note_machine()
    if options.churn:
        part = 20 if options.quick else 1
        churn(CHURN_ISLANDS // part, CHURN_SESSIONS // part, CHURN_FAULTS // part)
    else:
        scale(QUICK_SIZES if options.quick else SIZES)


if __name__ == "__main__":
    main()
