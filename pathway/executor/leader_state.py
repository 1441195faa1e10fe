"""The records that an island's leader keeps, why they wait (O-8), and what must always hold of them."""

from __future__ import annotations

from pathway.errors import ErrorInfo
from pathway.executor.gangs import PartInfo


class Buffer:
    """A buffer about which something is still open. `readers` are the gangs without a place that read it, in order."""

    __slots__ = ("awaited_hosts", "defined", "donor", "error", "readers", "released", "what")

    def __init__(self, what: str, defined: bool = False, error: ErrorInfo | None = None) -> None:
        self.what = what
        self.defined = defined
        self.error = error
        self.released = False
        self.readers: dict[tuple[Part, int], None] = {}
        self.donor: tuple[Part, int] | None = None
        self.awaited_hosts: set[int] = set()


READY = Buffer("a defined buffer that nobody waits for", defined=True)
"""Stands for every buffer about which nothing is open, so that the common case makes no object. Never changed."""

DONATED = Buffer(
    "a donated buffer",
    defined=True,
    error=ErrorInfo("DeletedError", "the buffer was donated to an earlier computation"),
)
"""The same, for a buffer whose donor has its place."""


class Plan:
    __slots__ = ("active", "awaited_hosts", "dropped", "error", "info", "since", "waiting")

    def __init__(self, info: PartInfo, hosts: int, since: float) -> None:
        self.info = info
        self.awaited_hosts = set(range(hosts))
        self.error: ErrorInfo | None = None
        self.waiting: list[Part] = []  # parts submitted before the plan was bound everywhere
        self.active = 0
        self.dropped = False
        self.since = since


class Part:
    """One run's part. `missing[g]` counts the open conditions of gang g; `open` counts (gang, host) pairs that have not
    ended."""

    __slots__ = (
        "awaited_edges",
        "buffers",
        "error",
        "errors",
        "missing",
        "open",
        "placed",
        "plan",
        "run",
        "seq",
        "session",
        "since",
        "unplaced",
    )

    def __init__(self, session: Session, run: int, plan: Plan, seq: int, hosts: int, since: float) -> None:
        count = len(plan.info.gangs)
        self.session = session
        self.run = run
        self.plan = plan
        self.seq = seq
        self.since = since
        self.open = count * hosts
        self.unplaced = count
        self.error: ErrorInfo | None = None
        self.missing: list[int] = []
        self.placed: list[bool] = []
        self.errors: list[ErrorInfo | None] = []
        self.buffers: list[tuple[int, ...]] = []  # per gang: the buffers it reads
        self.awaited_edges: dict[int, set[int]] = {}


class Session:
    __slots__ = ("buffers", "first_results", "id", "parts", "plans")

    def __init__(self, session: int) -> None:
        self.id = session
        self.plans: dict[int, Plan] = {}
        self.buffers: dict[int, Buffer] = {}
        self.parts: dict[int, Part] = {}
        self.first_results: dict[int, int] = {}


def waits(sessions: dict[int, Session], now: float) -> list[tuple[int, int, str, float]]:
    """(session, run or plan, reason, since seconds ago), for `ExecutorReport`."""
    found = []
    for session in sessions.values():
        for number, plan in session.plans.items():
            if plan.awaited_hosts and plan.error is None:
                reason = f"plan {plan.info.name!r} is being compiled on host {_listed(plan.awaited_hosts)}"
                found.append((session.id, number, reason, now - plan.since))
        for part in session.parts.values():
            found.append((session.id, part.run, _reason(part), now - part.since))
    return found


def _reason(part: Part) -> str:
    if not part.unplaced:
        return f"{part.plan.info.name!r}: {part.open} of its gangs' ends on hosts are still to come"
    if part.plan.awaited_hosts:
        return f"{part.plan.info.name!r}: waits for its plan to be compiled on host {_listed(part.plan.awaited_hosts)}"
    gang = next(number for number, placed in enumerate(part.placed) if not placed)
    reasons = [
        f"edge {edge} from island {part.plan.info.edges[edge].source_island} on host {_listed(awaited)}"
        for edge, awaited in part.awaited_edges.items()
        if gang in part.plan.info.edges[edge].gangs
    ]
    for number in part.buffers[gang]:
        buffer = part.session.buffers.get(number)
        if buffer is not None and not buffer.defined:
            where = f" on host {_listed(buffer.awaited_hosts)}" if buffer.awaited_hosts else ""
            reasons.append(f"buffer {number} ({buffer.what}){where}")
        elif buffer is not None and buffer.donor == (part, gang):
            reasons.append(f"earlier readers of buffer {number}, which it takes for itself")
    reasons += [f"gang {needed}" for needed in part.plan.info.gangs[gang].needs if not part.placed[needed]]
    return f"{part.plan.info.name!r}: gang {gang} waits for " + "; ".join(reasons)


def validate(sessions: dict[int, Session]) -> None:
    """Assert what must hold between events."""
    for buffer in (READY, DONATED):
        assert buffer.defined
        assert not buffer.readers
        assert not buffer.released
    for session in sessions.values():
        assert session.parts.keys() == session.first_results.keys()
        for number, plan in session.plans.items():
            assert plan.active == sum(part.plan is plan for part in session.parts.values()), number
            assert plan.active or not plan.dropped
        for part in session.parts.values():
            assert part.open > 0
            assert part.unplaced == part.placed.count(False)
            for gang, placed in enumerate(part.placed):
                assert placed or (part.missing[gang] > 0 and part.errors[gang] is None), (part.run, gang)
        for number, buffer in session.buffers.items():
            assert not (buffer.released and buffer.defined and not buffer.readers), number
            for part, gang in buffer.readers:
                assert session.parts.get(part.run) is part
                assert not part.placed[gang]


def _listed(hosts: set[int]) -> str:
    return ", ".join(map(str, sorted(hosts)))
