"""The leader of an island: it decides the order in which the island's hosts start their gangs. Pure: no clock, no I/O.

Invariants
  O-1  The order is the sequence of Launch and Poison instructions; the same sequence goes to the followers.
  O-2  A gang gets its place once the part is bound on every host, each of its edges has arrived on all the hosts that
       need it, each buffer it reads is defined (its producer has its place, or its put has arrived everywhere), and the
       gangs it needs have theirs. So a placed gang waits only for gangs before it, and gangs that are not ready are
       overtaken. Gangs that become ready together keep the order of their runs.
  L-1  A buffer is freed only when the client has released it and no gang without a place reads it.
  L-2  A gang that donates an argument gets its place after every gang submitted before it that reads the same buffer,
       also as a value of the run that made it.
  L-3  An error goes where the values would have gone: a gang that cannot have an input is poisoned with the input's own
       error, in the order, and its results and edges carry that error on. A part always ends.
  L-4  A part is over when every host has finished all of its gangs; then its run and its credit are given back, once.
  L-5  A buffer is named once: a run that names as its result what exists already, or that brings other arguments than
       its plan takes, goes through all the same, with errors in the place of its values, so that nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from pathway.errors import ErrorInfo
from pathway.executor import leader_state as state
from pathway.executor.gangs import (
    Assemble,
    Begin,
    DropSession,
    End,
    ForgetPlan,
    Free,
    GiveUp,
    HostReported,
    Instruction,
    Launch,
    PartRegistered,
    PartSubmitted,
    Poison,
    Put,
    SendToFollowers,
    SendToScheduler,
    Spill,
)
from pathway.executor.impossible import NOWHERE, why_refused, without_inputs
from pathway.executor.leader_state import DONATED, READY, Buffer, Part, Plan, Session
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
    IslandLost,
    LaunchGang,
    PartBound,
    PartFailed,
    PartRefused,
    PartsFinished,
    PoisonGang,
    PutOnIsland,
    SpillBuffers,
)

EARLY_REPORTS = 1024
"""Plans that followers have bound before their registration reached the leader: no more than these are remembered."""


class LeaderCore:
    """`handle` is the only door. Events: see `pathway.executor.gangs` and the scheduler's messages."""

    def __init__(self, hosts: int, devices_per_host: int) -> None:
        self.hosts = hosts
        self.devices_per_host = devices_per_host
        self._sessions: dict[int, Session] = {}
        self._early: dict[tuple[int, int], list[tuple[int, PartBound]]] = {}
        self._seq = 0
        self._ready: list[tuple[int, int, Part]] = []
        self._handlers: dict[type, Callable[[Any, float, list[Instruction]], None]] = {
            PartSubmitted: self._part_submitted,
            HostReported: self._host_reported,
            FreeBuffers: self._free_buffers,
            PutOnIsland: self._put,
            AssembleOnIsland: self._assemble,
            SpillBuffers: self._spill,
            PartRegistered: self._part_registered,
            DropPlan: self._drop_plan,
            CancelPart: self._cancel,
            IslandLost: self._island_lost,
            CloseSession: self._close_session,
        }
        self._reports: dict[type, Callable[[int, Any, list[Instruction]], None]] = {
            GangsDone: self._gangs_done,
            GangFailed: self._gang_failed,
            EdgeArrived: self._edge_arrived,
            BufferArrived: self._buffer_arrived,
            PartBound: self._part_bound,
        }

    def handle(self, event: Any, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        self._handlers[type(event)](event, now, out)
        if self._ready:
            self._place_ready(out)
        return out

    # -- plans -------------------------------------------------------------------------------------------------------

    def _part_registered(self, event: PartRegistered, now: float, out: list[Instruction]) -> None:
        session = self._session(event.session)
        if event.plan not in session.plans:
            session.plans[event.plan] = Plan(event.info, self.hosts, now)
            for host, report in self._early.pop((event.session, event.plan), ()):
                self._part_bound(host, report, out)

    def _part_bound(self, host: int, report: PartBound, out: list[Instruction]) -> None:
        session = self._sessions.get(report.session)
        plan = session.plans.get(report.plan) if session else None
        if plan is None:  # a follower with a warm cache overtakes the scheduler's message to its leader
            self._early.setdefault((report.session, report.plan), []).append((host, report))
            if len(self._early) > EARLY_REPORTS:  # of sessions that closed meanwhile
                del self._early[next(iter(self._early))]
            return
        if host not in plan.awaited_hosts:
            return
        plan.awaited_hosts.discard(host)
        if report.error is not None and plan.error is None:
            plan.error = report.error
            out.append(SendToScheduler(PartRefused(report.session, report.plan, report.error)))
            for part in plan.waiting:
                self._doom_all(part, report.error)
        if not plan.awaited_hosts:
            for part in plan.waiting:
                for gang in range(len(plan.info.gangs)):
                    self._one_condition_met(part, gang)
            plan.waiting = []

    def _drop_plan(self, event: DropPlan, now: float, out: list[Instruction]) -> None:
        session = self._sessions.get(event.session)
        plan = session.plans.get(event.plan) if session else None
        if session is None or plan is None:
            return
        plan.dropped = True
        if not plan.active:
            self._forget_plan(session, event.plan, out)

    def _forget_plan(self, session: Session, plan: int, out: list[Instruction]) -> None:
        del session.plans[plan]
        if self.hosts > 1:
            out.append(SendToFollowers(DropPlan(session.id, plan)))
        out.append(ForgetPlan(session.id, plan))

    # -- runs --------------------------------------------------------------------------------------------------------

    def _part_submitted(self, event: PartSubmitted, now: float, out: list[Instruction]) -> None:
        message = event.message
        session = self._sessions.get(message.session)
        plan = session.plans.get(message.plan) if session else None
        run = message.run
        if session is None or plan is None:
            error = ErrorInfo("ExecutionError", f"plan {message.plan} of run {run} is not registered on this island")
            out.append(SendToScheduler(PartFailed(message.session, run, error)))
            self._give_up(CancelPart(message.session, run, error), out)
            return
        hosts = self.hosts
        info = plan.info
        buffers = session.buffers
        self._seq += 1
        refused = why_refused(event, info, buffers)
        if refused is not None:
            event = without_inputs(event, info, self._seq)
            message = event.message
        if hosts > 1:
            out.append(SendToFollowers(message))
        out.append(Begin(message, event.arguments))
        part = Part(session, run, plan, self._seq, hosts, now)
        session.parts[run] = part
        plan.active += 1
        if info.single and not plan.awaited_hosts and plan.error is None and refused is None:
            for argument in event.arguments:
                if type(argument) is int and buffers.get(argument) is not READY:
                    break
            else:
                # Every input is there: the gang has its place at once, and nothing needs to be counted.
                gang = info.gangs[0]
                if hosts > 1:
                    out.append(SendToFollowers(LaunchGang(session.id, run, 0)))
                out.append(Launch(session.id, run, 0))
                first = message.first_result
                for number in gang.results:
                    buffers[first + number] = READY
                for position in gang.donates:
                    donated = event.arguments[position]
                    if type(donated) is int:
                        buffers[donated] = DONATED
                part.unplaced = 0
                session.first_results[run] = first
                return
        self._enter(part, message.first_result, event.arguments, refused or plan.error)
        if not info.gangs:
            self._finish_if_over(part, out)

    def _enter(
        self, part: Part, first_result: int, arguments: tuple[int | bytes, ...], refused: ErrorInfo | None
    ) -> None:
        """Count what every gang of the part waits for. `refused`: why none of them can be started."""
        session, plan, info = part.session, part.plan, part.plan.info
        session.first_results[part.run] = first_result
        count = len(info.gangs)
        part.placed = [False] * count
        part.errors = [None] * count
        part.missing = [len(gang.edges) + len(gang.needs) + (1 if plan.awaited_hosts else 0) for gang in info.gangs]
        part.awaited_edges = {edge: set(info.edges[edge].hosts) for edge in info.edges}
        if plan.awaited_hosts:
            plan.waiting.append(part)
        for number, gang in enumerate(info.gangs):
            key = (part, number)
            given = (arguments[position] for position in gang.reads)
            made = (first_result + result for result in gang.rereads)
            read = tuple(dict.fromkeys((*(buffer for buffer in given if isinstance(buffer, int)), *made)))
            donated = {arguments[position] for position in gang.donates}
            part.buffers.append(read)
            for argument in read:
                buffer = self._open(session, argument)
                if buffer is None:
                    self._doom(part, number, _no_such_buffer(argument))
                elif buffer.error is not None:
                    self._doom(part, number, buffer.error)
                elif buffer.donor is not None:
                    self._doom(part, number, _no_such_buffer(argument))
                else:
                    if not buffer.defined:
                        part.missing[number] += 1
                    if argument in donated:
                        buffer.donor = key
                        if buffer.readers:
                            part.missing[number] += 1
                    buffer.readers[key] = None
            if gang.results:
                what = f"a result of run {part.run}"
                for result in gang.results:
                    buffer = session.buffers[first_result + result] = Buffer(what)
                    buffer.released = first_result <= NOWHERE
        for number in range(count):
            if refused is not None:
                self._doom(part, number, refused)
            elif not part.missing[number]:
                heappush(self._ready, (part.seq, number, part))

    def _open(self, session: Session, number: int) -> Buffer | None:
        """The buffer's own record, made when there is none yet because nothing was open about it."""
        buffer = session.buffers.get(number)
        if buffer is READY:
            buffer = session.buffers[number] = Buffer("a buffer", defined=True)
        return buffer

    def _one_condition_met(self, part: Part, gang: int) -> None:
        part.missing[gang] -= 1
        if not part.missing[gang]:
            heappush(self._ready, (part.seq, gang, part))

    def _doom(self, part: Part, gang: int, error: ErrorInfo) -> None:
        """The gang cannot have one of its inputs, so it will be poisoned at its place (L-3)."""
        if part.placed[gang] or part.errors[gang] is not None:
            return
        part.errors[gang] = error
        if part.error is None:
            part.error = error
        heappush(self._ready, (part.seq, gang, part))

    def _doom_all(self, part: Part, error: ErrorInfo) -> None:
        for gang in range(len(part.placed)):
            self._doom(part, gang, error)

    def _place_ready(self, out: list[Instruction]) -> None:
        ready = self._ready
        while ready:
            _, gang, part = heappop(ready)
            if not part.placed[gang]:
                self._place(part, gang, out)

    def _place(self, part: Part, number: int, out: list[Instruction]) -> None:
        """The next place in the island's order is this gang's (O-1, O-2)."""
        session, run, error = part.session, part.run, part.errors[number]
        part.placed[number] = True
        part.unplaced -= 1
        if error is None:
            if self.hosts > 1:
                out.append(SendToFollowers(LaunchGang(session.id, run, number)))
            out.append(Launch(session.id, run, number))
        else:
            if self.hosts > 1:
                out.append(SendToFollowers(PoisonGang(session.id, run, number, error)))
            out.append(Poison(session.id, run, number, error))
            part.open -= self.hosts
        key = (part, number)
        freed = []
        for argument in part.buffers[number]:
            buffer = session.buffers.get(argument)
            if buffer is None or key not in buffer.readers:
                continue
            del buffer.readers[key]
            if buffer.donor == key and error is None:
                buffer.error = DONATED.error
            elif buffer.donor is not None and list(buffer.readers) == [buffer.donor]:
                self._one_condition_met(*buffer.donor)
            if self._settle(session, argument, buffer):
                freed.append(argument)
        gang = part.plan.info.gangs[number]
        first = session.first_results[run]
        for result in gang.results:
            if self._define(session, first + result, error):
                freed.append(first + result)
        for dependent in gang.dependents:
            if error is not None and number in part.plan.info.gangs[dependent].producers:
                self._doom(part, dependent, error)
            else:
                self._one_condition_met(part, dependent)
        if freed:
            self._free(session, tuple(freed), out)
        if not part.open:
            self._finish_if_over(part, out)

    def _finish_if_over(self, part: Part, out: list[Instruction]) -> None:
        if part.open:
            return
        session, run, plan = part.session, part.run, part.plan
        del session.parts[run]
        del session.first_results[run]
        out.append(End(session.id, run))
        if part.error is None:
            out.append(SendToScheduler(PartsFinished(((session.id, run),))))
        else:
            out.append(SendToScheduler(PartFailed(session.id, run, part.error)))
        plan.active -= 1
        if plan.dropped and not plan.active:
            number = next(number for number, other in session.plans.items() if other is plan)
            self._forget_plan(session, number, out)

    def _cancel(self, event: CancelPart, now: float, out: list[Instruction]) -> None:
        session = self._sessions.get(event.session)
        part = session.parts.get(event.run) if session else None
        if part is not None and part.unplaced:
            self._doom_all(part, event.error)
        self._give_up(event, out)

    def _give_up(self, event: CancelPart, out: list[Instruction]) -> None:
        """On every host: what is on its way to the run, or comes from it, is not wanted any more."""
        if self.hosts > 1:
            out.append(SendToFollowers(event))
        out.append(GiveUp(event.session, event.run))

    # -- what hosts report -------------------------------------------------------------------------------------------

    def _host_reported(self, event: HostReported, now: float, out: list[Instruction]) -> None:
        self._reports[type(event.message)](event.host, event.message, out)

    def _gangs_done(self, host: int, report: GangsDone, out: list[Instruction]) -> None:
        sessions = self._sessions
        for session_id, run, _ in report.gangs:
            session = sessions.get(session_id)
            part = session.parts.get(run) if session else None
            if part is not None:
                part.open -= 1
                if not part.open:
                    self._finish_if_over(part, out)

    def _gang_failed(self, host: int, report: GangFailed, out: list[Instruction]) -> None:
        session = self._sessions.get(report.session)
        part = session.parts.get(report.run) if session else None
        if session is None or part is None:
            return
        error = report.error
        part.open -= 1
        if part.error is None:
            part.error = error
        gang = part.plan.info.gangs[report.gang]
        first = session.first_results[report.run]
        for result in gang.results:
            buffer = self._open(session, first + result)
            if buffer is not None and buffer.error is None:
                buffer.error = error
                for reader in buffer.readers:
                    self._doom(*reader, error)
        for dependent in gang.dependents:
            if report.gang in part.plan.info.gangs[dependent].producers:
                self._doom(part, dependent, error)
        self._finish_if_over(part, out)

    def _edge_arrived(self, host: int, report: EdgeArrived, out: list[Instruction]) -> None:
        session = self._sessions.get(report.session)
        part = session.parts.get(report.run) if session else None
        if part is not None:
            self._edge_settled(part, report.edge, host, report.error)

    def _edge_settled(self, part: Part, edge: int, host: int, error: ErrorInfo | None) -> None:
        awaited = part.awaited_edges.get(edge)
        if awaited is None or host not in awaited:
            return
        if error is not None:
            del part.awaited_edges[edge]
            for gang in part.plan.info.edges[edge].gangs:
                self._doom(part, gang, error)
            return
        awaited.discard(host)
        if not awaited:
            del part.awaited_edges[edge]
            for gang in part.plan.info.edges[edge].gangs:
                self._one_condition_met(part, gang)

    def _island_lost(self, event: IslandLost, now: float, out: list[Instruction]) -> None:
        for session in self._sessions.values():
            for part in session.parts.values():
                for edge, awaited in list(part.awaited_edges.items()):
                    if part.plan.info.edges[edge].source_island == event.island:
                        self._edge_settled(part, edge, next(iter(awaited)), event.error)

    # -- buffers -----------------------------------------------------------------------------------------------------

    def _put(self, event: PutOnIsland, now: float, out: list[Instruction]) -> None:
        session = self._session(event.session)
        if event.buffer in session.buffers:
            return  # sent again after a broken connection
        if self.hosts > 1:
            out.append(SendToFollowers(event))
        out.append(Put(event))
        if event.error is not None:
            session.buffers[event.buffer] = Buffer("a buffer that was refused", defined=True, error=event.error)
        elif event.data is not None:
            session.buffers[event.buffer] = READY
        else:
            buffer = session.buffers[event.buffer] = Buffer("the client's data")
            buffer.awaited_hosts = {device // self.devices_per_host for device in event.layout.devices}

    def _assemble(self, event: AssembleOnIsland, now: float, out: list[Instruction]) -> None:
        session = self._session(event.session)
        if event.buffer in session.buffers:
            return  # sent again after a broken connection
        if self.hosts > 1:
            out.append(SendToFollowers(event))
        buffer = session.buffers[event.buffer] = Buffer("shards of other buffers")
        buffer.awaited_hosts = {device // self.devices_per_host for device in event.layout.devices}
        out.append(Assemble(event))

    def _spill(self, event: SpillBuffers, now: float, out: list[Instruction]) -> None:
        if self.hosts > 1:
            out.append(SendToFollowers(event))
        out.append(Spill(event))

    def _buffer_arrived(self, host: int, report: BufferArrived, out: list[Instruction]) -> None:
        session = self._sessions.get(report.session)
        buffer = session.buffers.get(report.buffer) if session else None
        if session is None or buffer is None or buffer.defined or host not in buffer.awaited_hosts:
            return
        buffer.awaited_hosts.discard(host)
        if report.error is not None and buffer.error is None:
            buffer.error = report.error
            for reader in buffer.readers:
                self._doom(*reader, report.error)
        if not buffer.awaited_hosts and self._define(session, report.buffer, buffer.error):
            self._free(session, (report.buffer,), out)

    def _define(self, session: Session, number: int, error: ErrorInfo | None) -> bool:
        """The buffer has its place in the order, as a value or as an error. True if it can be freed at once."""
        buffer = session.buffers[number]
        buffer.defined = True
        if error is not None:
            buffer.error = error
        for reader in buffer.readers:
            if error is not None:
                self._doom(*reader, error)
            else:
                self._one_condition_met(*reader)
        return self._settle(session, number, buffer)

    def _settle(self, session: Session, number: int, buffer: Buffer) -> bool:
        """Forget what is no longer open about a buffer. True if it is to be freed now (L-1)."""
        if buffer.readers or not buffer.defined:
            return False
        if buffer.released:
            del session.buffers[number]
            return True
        if buffer.error is None:
            session.buffers[number] = READY
        return False

    def _free_buffers(self, event: FreeBuffers, now: float, out: list[Instruction]) -> None:
        session = self._sessions.get(event.session)
        if session is None:
            return
        freed = []
        for number in event.buffers:
            buffer = session.buffers.get(number)
            if buffer is None:
                continue
            if buffer.defined and not buffer.readers:
                del session.buffers[number]
                freed.append(number)
            else:
                buffer.released = True
        if freed:
            self._free(session, tuple(freed), out)

    def _free(self, session: Session, buffers: tuple[int, ...], out: list[Instruction]) -> None:
        if self.hosts > 1:
            out.append(SendToFollowers(FreeBuffers(session.id, buffers)))
        out.append(Free(session.id, buffers))

    # -- sessions ----------------------------------------------------------------------------------------------------

    def _session(self, number: int) -> Session:
        session = self._sessions.get(number)
        if session is None:
            session = self._sessions[number] = Session(number)
        return session

    def _close_session(self, event: CloseSession, now: float, out: list[Instruction]) -> None:
        self._sessions.pop(event.session, None)
        for key in [key for key in self._early if key[0] == event.session]:
            del self._early[key]
        if self.hosts > 1:
            out.append(SendToFollowers(event))
        out.append(DropSession(event.session))

    # -- what others look at ------------------------------------------------------------------------------------------

    def waits(self, now: float) -> list[tuple[int, int, str, float]]:
        """(session, run or plan, reason, since seconds ago), for `ExecutorReport` (O-8)."""
        return state.waits(self._sessions, now)

    def is_late(self, session: int, run: int) -> bool:
        """The run's part waits for something before all of it can be started."""
        found = self._sessions.get(session)
        part = found.parts.get(run) if found is not None else None
        return part is not None and part.unplaced > 0

    def validate(self) -> None:
        """Assert what must hold between events. For tests."""
        assert not self._ready
        state.validate(self._sessions)

    @property
    def is_idle(self) -> bool:
        """Nothing is kept for anybody."""
        return not self._sessions


def _no_such_buffer(number: int) -> ErrorInfo:
    return ErrorInfo(
        "DeletedError", f"buffer {number} is not on this island: it was never made there, or freed or lost"
    )
