"""Sessions: what a client owns, and what it is told, also across a broken connection. Pure.

Invariants
  N-1  A session belongs to the connection that opened it, or to the last one that resumed it; nobody else reaches what
       it owns (section 11).
  N-2  What a client was told within one lease is told again when it resumes: a connection loses at most what was sent
       after it broke, and it is taken for broken within one lease. Every notice is harmless when it comes twice.
  N-3  A run number is used once, and they grow: a request that comes again after a resume starts nothing twice.
  N-4  A plan number is used once: executors keep a plan under its number, and are never told that it is another now.
"""

from __future__ import annotations

from collections import deque

from pathway.errors import ErrorInfo
from pathway.sched.events import Instruction, PeerKey, Send
from pathway.sched.lanes import Lane, Run
from pathway.sched.memory import PlanNeeds
from pathway.sched.ownership import Reach
from pathway.sched.queues import UNKNOWN_US
from pathway.sched.scripts import SessionScripts
from pathway.sched.slices import Slice
from pathway.transport.messages import Message, RegisterPlan, RunsFinished


class Plan:
    """A registered plan. `lanes[i]` is where its part i runs: the incarnation that it was made for. `reach` are the
    devices that it names (A-1), `devices[i]` one of those of part i, `costs_us[i]` what part i takes, as learned."""

    __slots__ = ("costs_us", "devices", "error", "lanes", "message", "needs", "reach")

    def __init__(self, message: RegisterPlan, lanes: tuple[Lane, ...], reach: Reach, error: ErrorInfo | None) -> None:
        self.message = message
        self.lanes = lanes
        self.reach = reach
        self.error = error
        self.needs: PlanNeeds | None = None  # of memory, where one of its islands has a limit
        self.costs_us = [UNKNOWN_US] * len(lanes)
        self.devices = tuple(min(reach.get(lane.island, ()), default=0) for lane in lanes)


class UsedNumbers:
    """Which numbers were used. They come from a counter, so nearly all of them are those up to some number."""

    MOST_APART = 10_000

    __slots__ = ("_above", "_up_to")

    def __init__(self) -> None:
        self._up_to = 0
        self._above: set[int] = set()

    def use(self, number: int) -> bool:
        """False if it was used before, or leaves too many unused behind it."""
        if number <= self._up_to or number in self._above or len(self._above) >= self.MOST_APART:
            return False
        self._above.add(number)
        while self._up_to + 1 in self._above:
            self._up_to += 1
            self._above.discard(self._up_to)
        return True


class Session:
    """`peer` is None while its connection is broken, since `detached_at`."""

    __slots__ = (
        "active_at",
        "computation_bytes",
        "computations",
        "computations_refused",
        "detached_at",
        "finished",
        "id",
        "lanes",
        "last_run",
        "name",
        "notices",
        "opened_at",
        "peer",
        "plan_numbers",
        "plans",
        "public_key",
        "relayed_bytes",
        "runs",
        "scripts",
        "share",
        "slices",
        "token",
    )

    def __init__(
        self, session: int, name: str, token: int, peer: PeerKey, now: float, public_key: str | None = None
    ) -> None:
        self.id = session
        self.name = name or f"{session:x}"
        self.token = token
        self.public_key = public_key  # who opened it, and who alone can resume it (N-1)
        self.peer: PeerKey | None = peer
        self.share = 1.0  # of its key's weight
        self.opened_at = now
        self.active_at = now  # when it last started a run or put a buffer
        self.detached_at = 0.0
        self.slices: dict[int, Slice] = {}
        self.plans: dict[int, Plan] = {}
        self.runs: dict[int, Run] = {}
        self.last_run = 0
        self.plan_numbers = UsedNumbers()
        self.scripts: SessionScripts | None = None  # from its first script on
        self.computations: set[str] = set()
        self.computation_bytes = 0
        self.relayed_bytes = 0  # of arrays that went through the scheduler
        self.computations_refused = 0  # over the session's limit
        self.lanes: dict[Lane, None] = {}  # where leaders may keep something of it
        self.notices: deque[tuple[float, Message]] = deque()
        self.finished: deque[tuple[float, list[int]]] = deque()  # runs, by the second

    def tell(self, message: Message, now: float, lease_s: float, out: list[Instruction]) -> None:
        notices = self.notices
        notices.append((now, message))
        while notices[0][0] < now - lease_s:
            notices.popleft()
        if self.peer is not None:
            out.append(Send(self.peer, message))

    def tell_finished(self, runs: tuple[int, ...], now: float, lease_s: float, out: list[Instruction]) -> None:
        """As `tell`, for what there may be very many of: one list for each second."""
        finished = self.finished
        if finished and now - finished[-1][0] < 1.0:
            finished[-1][1].extend(runs)
        else:
            while finished and finished[0][0] < now - lease_s - 1.0:
                finished.popleft()
            finished.append((now, list(runs)))
        if self.peer is not None:
            out.append(Send(self.peer, RunsFinished(runs)))

    def tell_again(self, out: list[Instruction]) -> None:
        """To a connection that has just resumed the session (N-2)."""
        if self.peer is None:
            return
        for _, runs in self.finished:
            out.append(Send(self.peer, RunsFinished(tuple(runs))))
        for _, message in self.notices:
            out.append(Send(self.peer, message))

    def holds(self, island: str) -> bool:
        """Whether one of its slices is on the island."""
        return any(held.island == island for held in self.slices.values())

    def reach(self) -> Reach:
        """The devices of its slices."""
        devices: dict[str, set[int]] = {}
        for held in self.slices.values():
            if held.island:
                devices.setdefault(held.island, set()).update(held.devices)
        return {island: frozenset(of_island) for island, of_island in devices.items()}
