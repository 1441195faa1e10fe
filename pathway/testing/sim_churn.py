"""A day's churn of a large cluster: sessions come, work and go, and faults strike, all the time. It is played in a few
minutes of virtual time, since what a day adds to that is heartbeats. What must not happen is that something stays:
memory is flat, and in the end nothing is left.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field

from pathway.sched.core import SchedulerSettings
from pathway.sched.policies import Fair
from pathway.testing.sim_client import SimClient
from pathway.testing.simnet import Faults, SimNet, SimulationFailure

SPAN_S = 600.0
RUNS_EACH = 5


@dataclass
class Churned:
    """`tenth_mb` and `end_mb`: this process's memory after a tenth of the day, and at its end."""

    seed: int
    runs: int = 0
    islands_lost: int = 0
    tenth_mb: float = 0.0
    end_mb: float = 0.0
    real_s: float = 0.0
    violations: list[str] = field(default_factory=list)


def churned(islands: int, sessions: int, faults: int, seed: int, span_s: float = SPAN_S) -> Churned:
    """Play it: half of the faults kill executors."""
    began = time.perf_counter()
    result = Churned(seed)
    part = faults // 8
    some = Faults(4 * part, part, part, part, part, gang_failure=0.001, compile_failure=0.001, span_s=span_s)
    settings = SchedulerSettings(credits=8, policy=Fair())
    net = SimNet(seed, islands, hosts=1, devices=3, clients=(), faults=some, settings=settings)
    finished = 0

    def come(number: int) -> None:
        nonlocal finished
        for client in net.clients:
            if client.ended:
                finished += client.finished
                net.begun.pop(client.session, None)
        net.clients = [client for client in net.clients if not client.ended]
        client = SimClient(net, f"client{number}", RUNS_EACH)
        net.clients.append(client)
        client.start()

    for number in range(sessions):
        net.at(span_s * (number + net.random.random()) / sessions, come, number)
    try:
        for step in range(1, 11):
            net.run_until(lambda: False, span_s * step / 10)
            gc.collect()
            if step == 1:
                result.tenth_mb = _memory_mb()
        result.end_mb = _memory_mb()
        net.run(limit_s=2 * span_s + 60)
    except SimulationFailure as failure:
        result.violations.append(str(failure))
    result.runs = finished + sum(client.finished for client in net.clients)
    result.islands_lost = sum(island.incarnation - 1 for island in net.scheduler.core.cluster.islands.values())
    result.real_s = time.perf_counter() - began
    return result


def _memory_mb() -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1000 for line in file if line.startswith("VmRSS"))
