"""What clients and hosts say that concerns memory: plans whose needs become known, puts, questions, refusals. Pure.

The decisions are in `memory`; here is what they mean for sessions. A run or a put that is refused leaves its error
where its buffers would have been, so that whatever was queued to read them gets that error, and not another one (L-3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from pathway.dataflow.memory import size
from pathway.dataflow.plan import Part
from pathway.errors import ErrorInfo
from pathway.sched.events import Instruction, PeerKey, Send
from pathway.sched.ledger import Charge, Ledger
from pathway.sched.memory import PlanNeeds
from pathway.sched.queues import Lane, Put, Run
from pathway.sched.timers import Timers
from pathway.transport import messages as m

if TYPE_CHECKING:
    from pathway.sched.lanes import LaneScheduler
    from pathway.sched.sessions import Plan, Session

_part_decoder = msgspec.msgpack.Decoder(Part)

PlanFailed = Callable[["Session", int, ErrorInfo, float, list[Instruction]], None]


class MemoryRequests:
    """`sessions` are those of `Clients`. `plan_failed(session, plan, error, now, out)` is called for a plan that can
    never run."""

    def __init__(
        self,
        sessions: dict[int, Session],
        lanes: LaneScheduler,
        timers: Timers,
        patience_s: float,
        plan_failed: PlanFailed,
    ) -> None:
        self._sessions = sessions
        self._lanes = lanes
        self._timers = timers
        self._patience_s = patience_s
        self._plan_failed = plan_failed
        self._looking = False
        self._unknown: dict[tuple[int, int], Plan] = {}  # whose needs, or those of a question about them, are awaited
        self._questions: dict[tuple[int, int], list[tuple[PeerKey, int]]] = {}
        lanes.memory.name_of = self._name_of

    def _name_of(self, session: int) -> str:
        found = self._sessions.get(session)
        return found.name if found is not None else f"{session:x}"

    # -- islands ----------------------------------------------------------------------------------------------------

    def island_formed(self, lane: Lane, memory_bytes: int, devices: int) -> None:
        """`memory_bytes`: of each device; 0 where it has no limit."""
        if memory_bytes:
            lane.ledger = Ledger(memory_bytes, devices, self._lanes.memory.spill)

    # -- plans ------------------------------------------------------------------------------------------------------

    def plan_registered(self, session: Session, number: int, plan: Plan, now: float, out: list[Instruction]) -> None:
        if plan.error is None and any(lane.ledger is not None for lane in plan.lanes):
            plan.needs = PlanNeeds(plan.message.name)
            self._unknown[session.id, number] = plan
            self._look_at_plan((session.id, number), now, out)

    def compiled(self, lane: Lane, message: m.ComputationsCompiled, now: float, out: list[Instruction]) -> None:
        """A host has compiled computations of a plan."""
        lane.temp_bytes.update(message.temp_bytes)
        for key in [key for key, plan in self._unknown.items() if lane in plan.lanes]:
            self._look_at_plan(key, now, out)

    def _look_at_plan(self, key: tuple[int, int], now: float, out: list[Instruction]) -> None:
        plan = self._unknown[key]
        session = self._sessions.get(key[0])
        if session is None or session.plans.get(key[1]) is not plan:
            self.forget_plan(key, ErrorInfo("ProgramError", f"plan {key[1]} was released"), out)
            return
        compiled = all(
            computation in lane.temp_bytes
            for lane, part in zip(plan.lanes, plan.message.parts, strict=False)
            for computation in part.computations
        )
        if plan.error is None and plan.needs is not None and plan.needs.demands is None:
            payloads = [part.payload for part in plan.message.parts]
            error = plan.needs.learn(plan.lanes, payloads, compiled)
            if error is not None:
                self._plan_failed(session, key[1], error, now, out)
        if key not in self._unknown or not (compiled or plan.error is not None):
            return
        del self._unknown[key]
        if plan.needs is not None and plan.error is None:
            self._lanes.memory.stirred = True
            self._lanes.pump([], out)
        self._answer(key, plan, plan.error, out)

    def forget_plan(self, key: tuple[int, int], error: ErrorInfo, out: list[Instruction]) -> None:
        """The plan is released, or can never run."""
        plan = self._unknown.pop(key, None)
        if plan is not None:
            self._answer(key, plan, error, out)

    def lane_lost(self, lane: Lane, error: ErrorInfo, out: list[Instruction]) -> None:
        for key in [key for key, plan in self._unknown.items() if lane in plan.lanes]:
            self.forget_plan(key, error, out)

    def session_closed(self, session: int) -> None:
        for key in [key for key in self._unknown if key[0] == session]:
            del self._unknown[key]
            self._questions.pop(key, None)

    # -- questions --------------------------------------------------------------------------------------------------

    def ask(self, peer: PeerKey, session: Session, message: m.AskMemory, now: float, out: list[Instruction]) -> None:
        """What does a plan need? Answered when it is compiled."""
        plan = session.plans.get(message.plan)
        if plan is None or plan.error is not None:
            unknown = ErrorInfo("ProgramError", f"plan {message.plan} is not registered")
            error = unknown if plan is None else plan.error
            out.append(Send(peer, m.MemoryAnswer(message.request, (), error)))
            return
        key = (session.id, message.plan)
        self._questions.setdefault(key, []).append((peer, message.request))
        self._unknown[key] = plan
        self._look_at_plan(key, now, out)

    def _answer(self, key: tuple[int, int], plan: Plan, error: ErrorInfo | None, out: list[Instruction]) -> None:
        session = self._sessions.get(key[0])
        for peer, request in self._questions.pop(key, ()):
            if session is not None and session.peer == peer:
                temp_bytes: dict[str, int] = {}
                for lane, part in zip(plan.lanes, plan.message.parts, strict=False):
                    temp_bytes |= {one: lane.temp_bytes[one] for one in part.computations if one in lane.temp_bytes}
                out.append(Send(peer, m.MemoryAnswer(request, tuple(temp_bytes.items()), error)))

    # -- puts -------------------------------------------------------------------------------------------------------

    def put(self, session: Session, lane: Lane, message: m.PutOnIsland, now: float, out: list[Instruction]) -> None:
        """A put, on an island that has a limit."""
        assert lane.ledger is not None
        layout = message.layout.physical
        nbytes = layout.shard_nbytes
        if nbytes > lane.ledger.limit_bytes:
            error = ErrorInfo(
                "DeviceMemoryError",
                f"{layout.aval} needs {size(nbytes)} on a device of island {lane.island}, which has "
                f"{size(lane.ledger.limit_bytes)}",
                island=lane.island,
                source=message.source,
            )
            self._lanes.send_behind(lane, session.id, in_error(message, error), out)
            return
        origin = (f"{layout.aval} that was put", message.source)
        self._lanes.put(Put(session.id, message, lane, Charge(((layout.devices, nbytes),)), origin, now), out)

    def assemble(self, lane: Lane, session: int, message: m.AssembleOnIsland) -> None:
        """The buffer takes no memory of its own, and keeps that of others."""
        if lane.ledger is not None:
            lane.ledger.assemble(session, message.buffer, message.sources, (str(message.layout.aval), ""))

    # -- refusals (M-4) ---------------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Something waits: look, now and then, whether it waits for its own session only."""
        if not self._looking:
            self._looking = True
            self._timers.at(now + self._patience_s / 2, self._refuse)

    def _refuse(self, now: float, out: list[Instruction]) -> None:
        self._looking = False
        memory = self._lanes.memory
        while refused := memory.refused(self._patience_s, now):
            for what, error in refused:
                if what not in memory.waiting:
                    continue
                if isinstance(what, Run):
                    self.spoil_queued(what, error)
                    self._lanes.fail_queued([what], error, now, out)
                else:
                    self._lanes.refuse_put(what, error, out)
        if memory.waiting:
            self.look(now)

    def spoil_queued(self, run: Run, error: ErrorInfo) -> None:
        """Leave the error where the results of a queued run would have been, for when it is dropped."""
        plan = self._sessions[run.session].plans.get(run.plan)
        for lane, messages in _spoiled(run.session, plan, run.first_result, error):
            self._lanes.leave_behind(run, lane, messages)

    def spoil_new(
        self, session: Session, plan: Plan | None, first: int, error: ErrorInfo, out: list[Instruction]
    ) -> None:
        """The same, for a run that is refused as it comes."""
        for lane, messages in _spoiled(session.id, plan, first, error):
            session.lanes[lane] = None
            for message in messages:
                self._lanes.send_behind(lane, session.id, message, out)


def _spoiled(
    session: int, plan: Plan | None, first: int, error: ErrorInfo
) -> Iterator[tuple[Lane, list[m.PutOnIsland]]]:
    """What puts `error` in the place of each result of a run, by island."""
    for lane, payload in zip(plan.lanes, plan.message.parts, strict=False) if plan is not None else ():
        if lane.error is None:
            part = _part_decoder.decode(payload.payload)
            yield (
                lane,
                [
                    m.PutOnIsland(session, first + number, part.slots[slot].physical, None, error)
                    for number, slot in part.results
                ],
            )


def in_error(message: m.PutOnIsland, error: ErrorInfo) -> m.PutOnIsland:
    return msgspec.structs.replace(message, data=None, error=error)
