"""What waits for an island: runs, in lines. The records that `lanes` moves about. Pure.

A *lane* is one incarnation of an island. In it every session has a *flow*, in which its runs, and the messages that
must not overtake them, stand in their order (O-4). The first run of a flow waits in the line of its *group*: the
devices that its plan touches, with all that overlap them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from msgspec import Raw

from pathway.errors import ErrorInfo
from pathway.sched.events import Instruction, PeerKey, Send
from pathway.sched.ledger import Charge, Ledger
from pathway.sched.policies import WINDOW_US, Policy, Tenant
from pathway.transport.messages import ExecutorReport, Message, PutOnIsland

if TYPE_CHECKING:
    from pathway.sched.memory import PlanNeeds

UNKNOWN_US = WINDOW_US
"""What a part is expected to take before it was ever measured: so long that few are in flight until it was."""


class Run:
    """`open` counts the parts in flight. `error` is what the client was told, if it was told of a failure.
    `costs_us[i]` is what part i is expected to take (shared with the plan, and learned), `devices[i]` one of its
    devices."""

    __slots__ = (
        "admitted",
        "arguments",
        "arrival",
        "claimed",
        "costs_us",
        "counted",
        "devices",
        "error",
        "expected_us",
        "first_result",
        "groups",
        "lanes",
        "needs",
        "number",
        "open",
        "plan",
        "session",
        "since",
        "turns",
    )

    def __init__(
        self,
        session: int,
        number: int,
        plan: int,
        first_result: int,
        arguments: tuple[Raw, ...],
        lanes: tuple[Lane, ...],
        since: float,
        costs_us: list[float] | None = None,
        devices: tuple[int, ...] = (),
        needs: PlanNeeds | None = None,
    ) -> None:
        self.session = session
        self.number = number
        self.plan = plan
        self.first_result = first_result
        self.arguments = arguments
        self.lanes = lanes
        self.since = since
        self.costs_us = costs_us or [UNKNOWN_US] * len(lanes)
        self.devices = devices or (0,) * len(lanes)
        self.needs = needs  # of memory; None where none of its islands has a limit
        self.admitted = False  # it has its memory
        self.counted = False  # among the runs in flight of its key
        self.open = 0
        self.error: ErrorInfo | None = None
        self.arrival = 0
        self.claimed = 0  # the number of its claim (S-3)
        self.groups: list[Group] = []  # one for each lane
        self.turns: set[Group] = set()  # where its turn has come
        self.expected_us: list[float] = []  # what it was charged where its turn has come, for each lane


class Held:
    """A message that keeps its place behind the session's queued runs."""

    __slots__ = ("message", "session")

    def __init__(self, session: int, message: Message) -> None:
        self.session = session
        self.message = message


class Put(Held):
    """A put that needs memory when its place has come. It may be the first of its flow, and then waits for that alone.
    `origin` says what it is, and where it was made."""

    __slots__ = ("admitted", "charge", "lane", "origin", "since")

    message: PutOnIsland

    def __init__(
        self, session: int, message: PutOnIsland, lane: Lane, charge: Charge, origin: tuple[str, str], since: float
    ) -> None:
        super().__init__(session, message)
        self.lane = lane
        self.charge = charge
        self.admitted = False
        self.origin = origin
        self.since = since

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return (self.lane,)


class Flow:
    """One session's entries in a lane, in order. There is a flow while there are entries, and its first is a run, or a
    put that waits for memory. `stamp`: the number of the offer that counts, 0 while its first run waits in no line.
    `reads`: while the first waits for memory, the buffers that its entries read, and `makes` the least of those that
    they make (M-5)."""

    __slots__ = ("entries", "makes", "reads", "stamp", "tenant")

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.reads: set[int] | None = None
        self.makes = 0
        self.entries: deque[Run | Held] = deque()
        self.stamp = 0

    @property
    def first(self) -> Run:
        run = self.entries[0]
        assert isinstance(run, Run)
        return run


class Group:
    """Devices of a lane that are time-shared. `offers` is a heap of (rank, arrival, stamp, flow), of which those with
    another stamp than their flow's are void. `claims`: runs that go next, whatever their rank. `count` and `us`: parts
    in flight whose inputs are there, and what they are expected to take. `parked[session]`: parts in flight whose
    inputs are late."""

    __slots__ = ("claims", "count", "lane", "line", "merged", "offers", "parked", "us", "waiting")

    def __init__(self, lane: Lane, policy: Policy) -> None:
        self.lane = lane
        self.line = policy.line()
        self.offers: list[tuple[float, int, int, Flow]] = []
        self.claims: deque[Run] = deque()
        self.count = 0
        self.us = 0.0
        self.parked: dict[int, int] = {}
        self.merged = False  # with more in flight than one group may have, for a while
        self.waiting: dict[int, int] = {}  # how many runs of a session wait for the group

    def offer(self, flow: Flow, stamp: int) -> None:
        run = flow.first
        flow.stamp = stamp
        rank = self.line.rank(flow.tenant, run.arrival, run.since)
        heappush(self.offers, (rank, run.arrival, stamp, flow))

    def next_offer(self) -> None:
        heappop(self.offers)

    def take_over(self, other: Group) -> None:
        """What `other` had is this group's."""
        self.merged = True
        self.count += other.count
        self.us += other.us
        for mine, theirs in ((self.parked, other.parked), (self.waiting, other.waiting)):
            for session, count in theirs.items():
                mine[session] = mine.get(session, 0) + count
        self.claims = deque(sorted((*self.claims, *other.claims), key=lambda run: run.claimed))


class Part:
    """One run's part in flight."""

    __slots__ = ("expected_us", "group", "index", "parked", "run")

    def __init__(self, run: Run, index: int, group: Group, expected_us: float) -> None:
        self.run = run
        self.index = index
        self.group = group
        self.expected_us = expected_us
        self.parked = False


class Lane:
    """One formed incarnation of an island. `neighbours`: the islands, with their incarnations, that its executors were
    told of because they share plans. `error`: why it was lost."""

    __slots__ = (
        "busy_us",
        "computations",
        "error",
        "flows",
        "groups",
        "hosts",
        "incarnation",
        "island",
        "leader",
        "ledger",
        "neighbours",
        "queue",
        "reaches",
        "registered",
        "report",
        "running",
        "stale",
        "temp_bytes",
    )

    def __init__(self, island: str, incarnation: int, hosts: tuple[PeerKey, ...]) -> None:
        self.island = island
        self.incarnation = incarnation
        self.hosts = hosts
        self.leader = hosts[0]
        self.error: ErrorInfo | None = None
        self.queue: dict[Run, None] = {}  # the runs that wait, in the order of their arrival
        self.flows: dict[int, Flow] = {}
        self.groups: dict[int, Group] = {}  # by device
        self.reaches: dict[tuple[int, int], frozenset[int]] = {}  # the devices of each plan, by (session, plan)
        self.stale = False  # a plan has gone: the groups may be larger than need be
        self.running: dict[tuple[int, int], Part] = {}
        self.registered: set[tuple[int, int]] = set()
        self.computations: set[str] = set()
        self.temp_bytes: dict[str, int] = {}  # of each compiled computation, on each device
        self.ledger: Ledger | None = None  # of its memory, if that has a limit
        self.neighbours: dict[str, int] = {}
        self.report: ExecutorReport | None = None
        self.busy_us: dict[int, float] = {}  # measured device time of each session

    def tell_all(self, message: Message, out: list[Instruction]) -> None:
        for host in self.hosts:
            out.append(Send(host, message))

    def distinct_groups(self) -> Iterable[Group]:
        return dict.fromkeys(self.groups.values())

    def forget_session(self, session: int) -> None:
        self.registered = {key for key in self.registered if key[0] != session}
        for key in [key for key in self.reaches if key[0] == session]:
            self.forget_plan(key)

    def forget_plan(self, key: tuple[int, int]) -> None:
        self.registered.discard(key)
        if self.reaches.pop(key, None) is not None:
            self.stale = True


# -- groups -----------------------------------------------------------------------------------------------------------


def join(
    policy: Policy, lane: Lane, devices: Iterable[int], offer: Callable[[Group, Flow], None] | None = None
) -> None:
    """Make these devices of a lane one group, with all groups that have one of them."""
    devices = devices or (0,)
    found = dict.fromkeys(lane.groups[device] for device in devices if device in lane.groups)
    into = next(iter(found), None) or Group(lane, policy)
    for other in found:
        if other is not into:
            _merge(lane, into, other, offer)
    for device in devices:
        lane.groups[device] = into


def regroup(policy: Policy, lane: Lane) -> None:
    """The groups anew, of an idle lane some of whose plans are gone."""
    lane.stale = False
    lane.groups.clear()
    for devices in lane.reaches.values():
        join(policy, lane, devices)


def _merge(lane: Lane, into: Group, other: Group, offer: Callable[[Group, Flow], None] | None) -> None:
    for part in lane.running.values():
        if part.group is other:
            part.group = into
    for run in dict.fromkeys((*lane.queue, *(part.run for part in lane.running.values()))):
        run.groups = [into if group is other else group for group in run.groups]
        if other in run.turns:
            run.turns = (run.turns - {other}) | {into}
    for device, group in lane.groups.items():
        if group is other:
            lane.groups[device] = into
    into.take_over(other)
    for flow in lane.flows.values():
        if flow.stamp and flow.first.groups[flow.first.lanes.index(lane)] is into and offer is not None:
            into.line.came(flow.tenant)
            offer(into, flow)
