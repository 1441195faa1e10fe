"""Computations and plans: kept for as long as a session needs them, sent once to each incarnation of an island. Pure.

Invariants
  R-1  A host has every computation of a part before it has the part, and every part before the leader has a run of it.
  R-2  Computations are content-addressed and shared; they go with the last session that registered them.
  R-3  An island's executors know the addresses of the islands that they share plans with, and no others: what is sent
       when an island comes or goes does not grow with the cluster.
"""

from __future__ import annotations

from pathway.errors import ErrorInfo, PermissionDeniedError, ProtocolError
from pathway.sched.cluster import Cluster
from pathway.sched.events import Instruction
from pathway.sched.lanes import Lane
from pathway.sched.ownership import check_reach, reach_of_plan
from pathway.sched.sessions import Plan, Session
from pathway.transport.messages import Directory, PartPayload, RegisterComputation, RegisterPart, RegisterPlan


class PlanRegistry:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._computations: dict[str, tuple[RegisterComputation, set[int]]] = {}

    # -- computations -----------------------------------------------------------------------------------------------

    def add_computation(self, session: Session, message: RegisterComputation, limit_bytes: int) -> None:
        if message.key in session.computations:
            return
        nbytes = len(message.artifact) + len(message.metadata)
        if session.computation_bytes + nbytes > limit_bytes:
            session.computations_refused += 1
            return
        session.computation_bytes += nbytes
        _, owners = self._computations.setdefault(message.key, (message, set()))
        owners.add(session.id)
        session.computations.add(message.key)

    def drop_session(self, session: Session) -> None:
        for key in session.computations:
            _, owners = self._computations[key]
            owners.discard(session.id)
            if not owners:
                del self._computations[key]

    @property
    def computation_bytes(self) -> int:
        return sum(len(message.artifact) for message, _ in self._computations.values())

    @property
    def computation_count(self) -> int:
        return len(self._computations)

    # -- plans ------------------------------------------------------------------------------------------------------

    def register(self, session: Session, message: RegisterPlan, out: list[Instruction]) -> Plan:
        """The plan, registered with all its islands, or with the reason why it cannot be."""
        lanes: list[Lane] = []
        for part in message.parts:
            error = self._why_not(session, part)
            lane = self._cluster.lane(part.island, part.incarnation)
            if error is None and lane in lanes:
                error = ErrorInfo("ProtocolError", f"plan {message.name!r} has two parts on island {part.island}")
            if error is not None or lane is None:
                return Plan(message, (), {}, error or _stale(part))
            lanes.append(lane)
        try:
            reach = reach_of_plan(message.parts)
            check_reach(reach, session.reach(), f"plan {message.name!r}")
        except (PermissionDeniedError, ProtocolError) as refused:
            return Plan(message, (), {}, ErrorInfo(type(refused).__name__, str(refused)))
        for lane, part in zip(lanes, message.parts, strict=True):
            self._introduce(lane, lanes, out)
            self._send_part(session, lane, message.plan, part, out)
        return Plan(message, tuple(lanes), reach, None)

    def _why_not(self, session: Session, part: PartPayload) -> ErrorInfo | None:
        if self._cluster.lane(part.island, part.incarnation) is None:
            return _stale(part)
        if not session.holds(part.island):
            return ErrorInfo(
                "PermissionDeniedError", f"the session has no slice on island {part.island}", island=part.island
            )
        missing = [key for key in part.computations if key not in session.computations]
        if missing and session.computations_refused:
            reason = f"the session's programs have {session.computation_bytes:,} bytes, and this would be one too many"
            return ErrorInfo("LimitError", f"{reason} (max_program_mib_per_session)")
        if missing:
            return ErrorInfo("ProtocolError", f"computation {missing[0]} was never registered in this session")
        return None

    def register_again(self, session: Session, lane: Lane, out: list[Instruction]) -> None:
        """Send the session's parts to a new incarnation of their island, so that it compiles ahead of the next runs."""
        for number, plan in session.plans.items():
            for part in plan.message.parts:
                if part.island == lane.island and plan.error is None:
                    session.lanes[lane] = None
                    self._send_part(session, lane, number, part, out)

    def _send_part(self, session: Session, lane: Lane, plan: int, part: PartPayload, out: list[Instruction]) -> None:
        session.lanes[lane] = None
        if (session.id, plan) in lane.registered:
            return
        for key in part.computations:
            if key not in lane.computations:
                lane.computations.add(key)
                lane.tell_all(self._computations[key][0], out)
        lane.registered.add((session.id, plan))
        lane.tell_all(RegisterPart(session.id, plan, part.payload), out)

    # -- who knows whom (R-3) ---------------------------------------------------------------------------------------

    def _introduce(self, lane: Lane, lanes: list[Lane], out: list[Instruction]) -> None:
        unknown = [
            other for other in lanes if other is not lane and lane.neighbours.get(other.island) != other.incarnation
        ]
        if unknown:
            lane.neighbours.update((other.island, other.incarnation) for other in unknown)
            self.send_directory(lane, out)

    def send_directory(self, lane: Lane, out: list[Instruction]) -> None:
        """To the executors of one island: itself and its neighbours."""
        names = sorted({lane.island, *lane.neighbours})
        islands = self._cluster.islands
        lane.tell_all(Directory(tuple(islands[name].entry for name in names if islands[name].lane is not None)), out)


def _stale(part: PartPayload) -> ErrorInfo:
    return ErrorInfo(
        "IslandLostError",
        f"incarnation {part.incarnation} of island {part.island} is not the one that is formed now",
        island=part.island,
        incarnation=part.incarnation,
    )
