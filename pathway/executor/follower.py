"""A follower: a host that starts its island's gangs in exactly the leader's order. Pure: no clock, no I/O.

Invariants
  O-1  What comes from the leader is carried out in the leader's sequence. Where the sequence is ahead of this host (a
       run of a plan whose registration, which comes on another link, is not here yet), all of it waits; nothing
       overtakes.
  F-1  A session is closed in the leader's sequence, never before: gangs that the leader has placed start here too. The
       session is remembered until the scheduler's own `CloseSession` is here as well, since only then no registration
       for it can be on its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from pathway.executor.gangs import (
    Assemble,
    Begin,
    DropSession,
    End,
    ForgetPlan,
    Free,
    GiveUp,
    Instruction,
    Launch,
    PartInfo,
    PartRegistered,
    PartSubmitted,
    Poison,
    Put,
    SendToLeader,
    SessionClosed,
    Spill,
)
from pathway.transport.messages import (
    AssembleOnIsland,
    BufferArrived,
    CancelPart,
    CloseSession,
    DropPlan,
    EdgeArrived,
    FreeBuffers,
    GangFailed,
    GangsDone,
    LaunchGang,
    PartBound,
    PoisonGang,
    PutOnIsland,
    SpillBuffers,
)


class _Run:
    __slots__ = ("name", "open", "since")

    def __init__(self, name: str, gangs: int, since: float) -> None:
        self.name = name
        self.open = gangs
        self.since = since


class _Session:
    __slots__ = ("plans", "runs")

    def __init__(self) -> None:
        self.plans: dict[int, PartInfo] = {}
        self.runs: dict[int, _Run] = {}


class FollowerCore:
    """`handle` is the only door. Events: see `pathway.executor.gangs` and the leader's messages."""

    def __init__(self) -> None:
        self._sessions: dict[int, _Session] = {}
        self._closed_by_leader: set[int] = set()
        self._closed_by_scheduler: set[int] = set()
        self._sequence: deque[Any] = deque()
        self._blocked_since = 0.0
        self._steps: dict[type, Callable[[Any, float, list[Instruction]], None]] = {
            PartSubmitted: self._begin,
            LaunchGang: self._launch,
            PoisonGang: self._poison,
            PutOnIsland: self._put,
            AssembleOnIsland: self._assemble,
            SpillBuffers: self._spill,
            FreeBuffers: self._free,
            DropPlan: self._drop_plan,
            CloseSession: self._close_session,
        }
        self._events: dict[type, Callable[[Any, float, list[Instruction]], None]] = {
            PartRegistered: self._part_registered,
            SessionClosed: self._session_closed,
            GangsDone: self._gangs_done,
            GangFailed: self._gang_failed,
            EdgeArrived: self._report,
            BufferArrived: self._report,
            PartBound: self._report,
            CancelPart: self._cancelled,
        }

    def handle(self, event: Any, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        step = self._steps.get(type(event))
        if step is None:
            self._events[type(event)](event, now, out)
        elif self._sequence or self._is_ahead(event):
            if not self._sequence:
                self._blocked_since = now
            self._sequence.append(event)
        else:
            step(event, now, out)
        return out

    # -- the leader's sequence ---------------------------------------------------------------------------------------

    def _is_ahead(self, event: Any) -> bool:
        """The event is about a plan whose registration is not here yet."""
        if isinstance(event, PartSubmitted):
            event = event.message
        elif not isinstance(event, DropPlan):
            return False
        session = self._sessions.get(event.session)
        return session is None or event.plan not in session.plans

    def _begin(self, event: PartSubmitted, now: float, out: list[Instruction]) -> None:
        session = self._sessions[event.message.session]
        info = session.plans[event.message.plan]
        out.append(Begin(event.message, event.arguments))
        session.runs[event.message.run] = _Run(info.name, len(info.gangs), now)
        if not info.gangs:
            self._one_gang_ended(event.message.session, event.message.run, 0, out)

    def _launch(self, event: LaunchGang, now: float, out: list[Instruction]) -> None:
        out.append(Launch(event.session, event.run, event.gang))

    def _poison(self, event: PoisonGang, now: float, out: list[Instruction]) -> None:
        out.append(Poison(event.session, event.run, event.gang, event.error))
        self._one_gang_ended(event.session, event.run, 1, out)

    def _put(self, event: PutOnIsland, now: float, out: list[Instruction]) -> None:
        # A put may be the first that this host hears of its session; what comes of it must be reported all the same.
        self._sessions.setdefault(event.session, _Session())
        out.append(Put(event))

    def _assemble(self, event: AssembleOnIsland, now: float, out: list[Instruction]) -> None:
        self._sessions.setdefault(event.session, _Session())
        out.append(Assemble(event))

    def _spill(self, event: SpillBuffers, now: float, out: list[Instruction]) -> None:
        out.append(Spill(event))

    def _free(self, event: FreeBuffers, now: float, out: list[Instruction]) -> None:
        out.append(Free(event.session, event.buffers))

    def _drop_plan(self, event: DropPlan, now: float, out: list[Instruction]) -> None:
        del self._sessions[event.session].plans[event.plan]
        out.append(ForgetPlan(event.session, event.plan))

    def _close_session(self, event: CloseSession, now: float, out: list[Instruction]) -> None:
        self._sessions.pop(event.session, None)
        out.append(DropSession(event.session))
        if event.session in self._closed_by_scheduler:
            self._closed_by_scheduler.discard(event.session)
        else:
            self._closed_by_leader.add(event.session)

    # -- the scheduler's link ----------------------------------------------------------------------------------------

    def _part_registered(self, event: PartRegistered, now: float, out: list[Instruction]) -> None:
        if event.session in self._closed_by_leader:
            out.append(ForgetPlan(event.session, event.plan))
            return
        session = self._sessions.setdefault(event.session, _Session())
        session.plans.setdefault(event.plan, event.info)
        while self._sequence and not self._is_ahead(self._sequence[0]):
            step = self._sequence.popleft()
            self._steps[type(step)](step, now, out)
            self._blocked_since = now

    def _session_closed(self, event: SessionClosed, now: float, out: list[Instruction]) -> None:
        if event.session in self._closed_by_leader:
            self._closed_by_leader.discard(event.session)
        else:
            self._closed_by_scheduler.add(event.session)

    def _cancelled(self, event: CancelPart, now: float, out: list[Instruction]) -> None:
        """The leader has poisoned what could be; this does not wait for its turn, for nothing comes of it."""
        out.append(GiveUp(event.session, event.run))

    # -- this host's own reports -------------------------------------------------------------------------------------

    def _report(self, event: EdgeArrived | BufferArrived | PartBound, now: float, out: list[Instruction]) -> None:
        if event.session in self._sessions:
            out.append(SendToLeader(event))

    def _gangs_done(self, event: GangsDone, now: float, out: list[Instruction]) -> None:
        out.append(SendToLeader(event))
        for session, run, _ in event.gangs:
            self._one_gang_ended(session, run, 1, out)

    def _gang_failed(self, event: GangFailed, now: float, out: list[Instruction]) -> None:
        out.append(SendToLeader(event))
        self._one_gang_ended(event.session, event.run, 1, out)

    def _one_gang_ended(self, number: int, run_number: int, count: int, out: list[Instruction]) -> None:
        session = self._sessions.get(number)
        run = session.runs.get(run_number) if session else None
        if session is None or run is None:
            return
        run.open -= count
        if not run.open:
            del session.runs[run_number]
            out.append(End(number, run_number))

    # -- waits (O-8), and what tests look at -------------------------------------------------------------------------

    def waits(self, now: float) -> list[tuple[int, int, str, float]]:
        """(session, run or plan, reason, since seconds ago)."""
        found = [
            (number, run_number, f"{run.name!r}: {run.open} gangs have not ended on this host", now - run.since)
            for number, session in self._sessions.items()
            for run_number, run in session.runs.items()
        ]
        if self._sequence:
            head = self._sequence[0]
            head = head.message if isinstance(head, PartSubmitted) else head
            reason = f"the leader's order is ahead: plan {head.plan} is not registered on this host yet"
            found.insert(0, (head.session, head.plan, reason, now - self._blocked_since))
        return found

    def validate(self) -> None:
        """Assert what must hold between events."""
        assert not self._sequence or self._is_ahead(self._sequence[0])
        assert not self._closed_by_leader & self._closed_by_scheduler
        for number, session in self._sessions.items():
            assert number not in self._closed_by_leader
            assert all(run.open > 0 for run in session.runs.values())

    @property
    def is_idle(self) -> bool:
        """Nothing is kept for anybody."""
        return not (self._sessions or self._closed_by_leader or self._closed_by_scheduler or self._sequence)
