"""Clients of SimNet with a workload: each keeps a number of runs under way on slices of its own, until it is told to
stop. For questions about a cluster: what each gets, and how long it waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw

from pathway.dataflow.plan import Execute, Gang, Part
from pathway.testing.sim_client import SimClient
from pathway.testing.sim_programs import layout_of
from pathway.transport import messages as m

if TYPE_CHECKING:
    from pathway.testing.simnet import SimNet

_encode = msgspec.msgpack.Encoder().encode
_NO_ARGUMENTS = Raw(_encode(()))

COMPUTATION = "k1"


@dataclass(frozen=True)
class Workload:
    """What one client does. `islands`: on how many it has a slice; a run is on `spread` of them, in turns. A slice has
    `devices` devices and is shared with others'. `ahead`: runs that it keeps under way. `length_s`: how long a
    computation holds its devices, on average; `steady`: always, else exponentially distributed."""

    islands: int = 1
    spread: int = 1
    devices: int = 1
    ahead: int = 32
    length_s: float = 1e-3
    steady: bool = True
    weight: float = 1.0
    priority: int = 0


@dataclass(eq=False)
class WorkloadClient(SimClient):
    """`waited_s` has the wait of each run that ended well: from being submitted until the last of its gangs began."""

    workload: Workload = field(default_factory=Workload)
    wanted: Sequence[str] = ()  # the islands that it asks for
    stopping: bool = False
    waited_s: list[float] = field(default_factory=list)
    _started: dict[int, tuple[float, float]] = field(default_factory=dict)  # run: submitted, last gang's begin
    _plan_of: dict[tuple[int, ...], tuple[int, tuple[tuple[str, int], ...]]] = field(default_factory=dict)
    _turns: itertools.count[int] = field(default_factory=itertools.count)

    def _begin(self) -> None:
        devices = self.workload.devices
        for number, island in enumerate(self.wanted, 1):
            self.slices[number] = None
            self._send(m.RequestSlice(number, devices, (("d", devices),), island=island, shared=True, wait=True))

    def _work(self) -> None:
        if self.slices and all(self.slices.values()):
            self._refill()

    def _refill(self) -> None:
        while not self.stopping and self.alive and len(self._started) < self.workload.ahead:
            if not self._submit_next():
                break
        if self.stopping and not self._started and self.alive:
            self._end()

    def _submit_next(self) -> bool:
        bound = [entry for entry in self.slices.values() if entry is not None]
        if not bound:
            return False
        spread = min(self.workload.spread, len(bound))
        first = next(self._turns) * spread % len(bound)
        chosen = tuple(sorted({(first + offset) % len(bound) for offset in range(spread)}))
        slices = tuple(bound[index] for index in chosen)
        key = tuple(entry.slice for entry in slices)
        homes = tuple((entry.island, entry.incarnation) for entry in slices)
        known = self._plan_of.get(key)
        if known is None or known[1] != homes:
            if known is not None:
                self._send(m.ReleasePlan(known[0]))
            self.last_plan += 1
            known = self._plan_of[key] = (self.last_plan, homes)
            self._send(m.RegisterComputation(COMPUTATION, b"", b""))
            parts = tuple(m.PartPayload(*home, (COMPUTATION,), _encode(_part(entry))) for entry, home in
                          zip(slices, homes, strict=True))  # fmt: skip
            self._send(m.RegisterPlan(self.last_plan, f"plan{self.last_plan}", parts))
        self.last_run += 1
        self._started[self.last_run] = (self.net.now, 0.0)
        self._send(m.StartRun(self.last_run, known[0], self.last_buffer + 1, (_NO_ARGUMENTS,) * len(slices)))
        return True

    def gang_ran(self, run: int, began_s: float) -> None:
        """One of its gangs has ended."""
        if run in self._started:
            submitted_s, last_s = self._started[run]
            self._started[run] = (submitted_s, max(last_s, began_s))

    def stop(self) -> None:
        """Start no more runs, and leave when those under way have ended."""
        self.stopping = True
        self._refill()

    def state(self) -> str:
        return f"{len(self._started)} runs under way, connected {self.link is not None}"

    # -- how runs end -----------------------------------------------------------------------------------------------

    def _run_finished(self, run: int) -> None:
        started = self._started.pop(run, None)
        if started is not None:
            self.finished += 1
            self.waited_s.append(max(0.0, started[1] - started[0]))
            self._refill()

    def _run_failed(self, run: int, why: str) -> None:
        if self._started.pop(run, None) is not None:
            self.failures += 1
            if not self.net.faults.any:
                self.net.fail(f"{self.name}: run {run} failed without a fault: {why}")
            # Not at once: a run that fails because its island is lost would be submitted, and fail, for ever.
            self.net.after(0.01, self._refill)


def _part(bound: m.SliceBound) -> Part:
    """One computation on all devices of a slice, of which nothing is kept."""
    layout = layout_of(bound)
    step = Execute(0, COMPUTATION, bound.devices, (), (0,), frees=(0,))
    return Part(
        plan_name="work", island=bound.island, platform="cpu", slots=(layout,), arguments=(), results=(),
        gangs=(Gang((step,)),),
    )  # fmt: skip


def workload_clients(net: SimNet) -> list[WorkloadClient]:
    """Those of a simulation's clients that have workloads."""
    return [client for client in net.clients if isinstance(client, WorkloadClient)]
