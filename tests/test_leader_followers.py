"""A follower's core, and random histories of a leader with followers."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import Raw
from msgspec.structs import replace

from pathway.errors import ErrorInfo
from pathway.executor import gangs as g
from pathway.executor.follower import FollowerCore
from pathway.executor.leader import LeaderCore
from pathway.transport import messages as m

S = 5
BROKEN = ErrorInfo("ExecutionError", "broken")
TWO = g.PartInfo("two", (g.GangInfo(), g.GangInfo()), {}, single=False)


class Follower:
    def __init__(self) -> None:
        self.core = FollowerCore()

    def handle(self, event: Any) -> list[Any]:
        out = self.core.handle(event, 1.0)
        self.core.validate()
        return out


def start(run: int, plan: int = 1, session: int = S) -> g.PartSubmitted:
    return g.PartSubmitted(m.StartPart(session, run, plan, run * 100, Raw(b"\x90")), ())


def test_a_follower_does_what_the_leader_says_in_its_order() -> None:
    follower = Follower()
    assert follower.handle(g.PartRegistered(S, 1, TWO)) == []
    bound = m.PartBound(S, 1)
    assert follower.handle(bound) == [g.SendToLeader(bound)]
    event = start(10)
    assert follower.handle(event) == [g.Begin(event.message, ())]
    assert follower.handle(m.LaunchGang(S, 10, 1)) == [g.Launch(S, 10, 1)]
    arrived = m.EdgeArrived(S, 10, 3)
    assert follower.handle(arrived) == [g.SendToLeader(arrived)]
    done = m.GangsDone(((S, 10, 1),))
    assert follower.handle(done) == [g.SendToLeader(done)]
    assert follower.handle(m.PoisonGang(S, 10, 0, BROKEN)) == [g.Poison(S, 10, 0, BROKEN), g.End(S, 10)]
    assert follower.handle(m.FreeBuffers(S, (1,))) == [g.Free(S, (1,))]
    assert follower.handle(m.DropPlan(S, 1)) == [g.ForgetPlan(S, 1)]


def test_a_gang_that_fails_is_over_too() -> None:
    follower = Follower()
    follower.handle(g.PartRegistered(S, 1, replace(TWO, gangs=TWO.gangs[:1])))
    follower.handle(start(10))
    failed = m.GangFailed(S, 10, 0, BROKEN)
    assert follower.handle(failed) == [g.SendToLeader(failed), g.End(S, 10)]


def test_the_leaders_order_waits_for_a_registration_that_is_late() -> None:
    follower = Follower()
    put = m.PutOnIsland(7, 1, None, b"x")  # type: ignore[arg-type]
    for event in (start(10), m.LaunchGang(S, 10, 0), put, start(11, plan=2)):
        assert follower.handle(event) == []
    assert "the leader's order is ahead: plan 1" in follower.core.waits(2.0)[0][2]
    assert follower.handle(g.PartRegistered(S, 1, TWO)) == [
        g.Begin(start(10).message, ()),
        g.Launch(S, 10, 0),
        g.Put(put),
    ]
    assert follower.handle(g.PartRegistered(S, 2, TWO)) == [g.Begin(start(11, plan=2).message, ())]


def test_a_session_closes_in_the_leaders_order_and_stays_closed() -> None:
    follower = Follower()
    follower.handle(g.PartRegistered(S, 1, TWO))
    follower.handle(start(10))
    assert follower.handle(g.SessionClosed(S)) == []
    assert follower.handle(m.LaunchGang(S, 10, 0)) == [g.Launch(S, 10, 0)]  # the leader has placed it: O-1
    assert follower.handle(m.CloseSession(S)) == [g.DropSession(S)]
    assert follower.core.is_idle


def test_a_registration_that_comes_after_the_leader_closed_its_session_is_dropped() -> None:
    follower = Follower()
    follower.handle(m.CloseSession(S))
    assert follower.handle(g.PartRegistered(S, 1, TWO)) == [g.ForgetPlan(S, 1)]
    assert follower.handle(m.PartBound(S, 1)) == []
    follower.handle(g.SessionClosed(S))
    assert follower.core.is_idle


# -- random histories ------------------------------------------------------------------------------------------------

PARTS = [
    g.PartInfo("one", (g.GangInfo(reads=(0,), results=(0,)),), {}, True),
    g.PartInfo("takes", (g.GangInfo(reads=(0,), donates=(0,), results=(0,)),), {}, True),
    g.PartInfo("edge", (g.GangInfo(edges=(1,), results=(0,)),), {1: g.EdgeInfo("west", (0, 2), (0,))}, False),
    g.PartInfo(
        "deep",
        (
            g.GangInfo(reads=(0,), results=(0,), dependents=(1, 2)),
            g.GangInfo(needs=(0,), producers=(0,), edges=(1,), rereads=(0,), dependents=(2,)),
            g.GangInfo(needs=(0, 1), reads=(1,), results=(1,)),
        ),
        {1: g.EdgeInfo("west", (1,), (1,))},
        False,
    ),
]


class Island(RuleBasedStateMachine):
    """A leader and two followers. Everything that hosts report comes in any order; links are FIFO."""

    def __init__(self) -> None:
        super().__init__()
        self.leader = LeaderCore(3, 1)
        self.followers = [FollowerCore(), FollowerCore()]
        self.links: list[deque[m.Message]] = [deque(), deque()]
        self.orders: list[list[tuple[str, int, int]]] = [[], [], []]
        self.launched: list[list[tuple[int, int]]] = [[], [], []]
        self.reports: list[tuple[int, m.Message]] = []
        self.donated: set[int] = set()
        self.buffers: list[int] = []
        self.frees: list[int] = []
        self.submitted: set[int] = set()
        self.ended: list[int] = []
        self.run = 0
        for plan, part in enumerate(PARTS):
            for host in range(3):
                event = g.PartRegistered(S, plan, part)
                self.perform(host, self.core(host).handle(event, 0.0))
                self.reports.append((host, m.PartBound(S, plan)))

    def core(self, host: int) -> LeaderCore | FollowerCore:
        return self.followers[host - 1] if host else self.leader

    def perform(self, host: int, out: list[Any]) -> None:
        for one in out:
            if isinstance(one, g.SendToFollowers):
                for link in self.links:
                    link.append(one.message)
            elif isinstance(one, g.SendToLeader):
                self.perform(0, self.leader.handle(g.HostReported(host, one.message), 0.0))
            elif isinstance(one, g.Launch):
                self.orders[host].append(("launch", one.run, one.gang))
                self.launched[host].append((one.run, one.gang))
            elif isinstance(one, g.Poison):
                self.orders[host].append(("poison", one.run, one.gang))
            elif isinstance(one, g.Begin) and PARTS[one.message.plan].edges:
                edge = PARTS[one.message.plan].edges[1]
                if host in edge.hosts:
                    self.reports.append((host, m.EdgeArrived(S, one.message.run, 1)))
            elif isinstance(one, g.SendToScheduler):
                message = one.message
                if isinstance(message, m.PartsFinished):
                    self.ended += [run for _, run in message.parts]
                elif isinstance(message, m.PartFailed):
                    self.ended.append(message.run)
            elif isinstance(one, g.Free) and host == 0:
                self.frees += one.buffers

    def to_leader(self, event: Any) -> None:
        self.perform(0, self.leader.handle(event, 0.0))

    @rule(plan=st.integers(0, 3), pick=st.randoms(use_true_random=False))
    def submit(self, plan: int, pick: random.Random) -> None:
        self.run += 1
        usable = [buffer for buffer in self.buffers if buffer not in self.donated]
        arguments: list[int | bytes] = [
            pick.choice(usable) if usable and pick.random() < 0.8 else b"x" for _ in range(2)
        ]
        if plan == 1 and isinstance(arguments[0], int):
            self.donated.add(arguments[0])
        message = m.StartPart(S, self.run, plan, self.run * 10, Raw(b"\x90"))
        self.submitted.add(self.run)
        self.to_leader(g.PartSubmitted(message, tuple(arguments)))
        self.buffers += [self.run * 10 + result for gang in PARTS[plan].gangs for result in gang.results]

    @precondition(lambda self: self.buffers)
    @rule(pick=st.randoms(use_true_random=False))
    def release(self, pick: random.Random) -> None:
        buffer = pick.choice(self.buffers)
        self.buffers.remove(buffer)
        self.to_leader(m.FreeBuffers(S, (buffer,)))

    @precondition(lambda self: self.submitted)
    @rule(pick=st.randoms(use_true_random=False))
    def cancel(self, pick: random.Random) -> None:
        self.to_leader(m.CancelPart(S, pick.choice(sorted(self.submitted)), BROKEN))

    @precondition(lambda self: self.reports)
    @rule(pick=st.randoms(use_true_random=False), fails=st.integers(0, 9))
    def report(self, pick: random.Random, fails: int) -> None:
        host, message = self.reports.pop(pick.randrange(len(self.reports)))
        if isinstance(message, m.EdgeArrived) and fails == 0:
            message = replace(message, error=BROKEN)
        self.tell(host, message)

    def tell(self, host: int, message: m.Message) -> None:
        if host:
            self.perform(host, self.core(host).handle(message, 0.0))
        else:
            self.to_leader(g.HostReported(0, message))

    @precondition(lambda self: any(self.launched))
    @rule(pick=st.randoms(use_true_random=False), fails=st.integers(0, 9))
    def end_gang(self, pick: random.Random, fails: int) -> None:
        host = pick.choice([host for host in range(3) if self.launched[host]])
        run, gang = self.launched[host].pop(0)
        self.tell(host, m.GangFailed(S, run, gang, BROKEN) if fails == 0 else m.GangsDone(((S, run, gang),)))

    @precondition(lambda self: any(self.links))
    @rule(which=st.integers(0, 1), count=st.integers(1, 10))
    def deliver(self, which: int, count: int) -> None:
        for _ in range(min(count, len(self.links[which]))):
            message = self.links[which].popleft()
            event = g.PartSubmitted(message, ()) if isinstance(message, m.StartPart) else message
            self.perform(which + 1, self.followers[which].handle(event, 0.0))

    @invariant()
    def holds(self) -> None:
        self.leader.validate()
        for follower, order in zip(self.followers, self.orders[1:], strict=True):
            follower.validate()
            assert order == self.orders[0][: len(order)], "O-1"
        assert len(set(self.ended)) == len(self.ended), "L-4"
        assert len(set(self.frees)) == len(self.frees), "L-1"

    def teardown(self) -> None:
        while self.reports or any(self.launched) or any(self.links):
            for which in (0, 1):
                self.deliver_all(which)
            reports, self.reports = self.reports, []
            for host, message in reports:
                self.tell(host, message)
            for host in range(3):
                gangs, self.launched[host] = self.launched[host], []
                for run, gang in gangs:
                    self.tell(host, m.GangsDone(((S, run, gang),)))
            self.holds()
        assert set(self.ended) == self.submitted, "L-3: every part ends"
        assert self.orders[0] == self.orders[1] == self.orders[2], "O-1"
        # Whatever was released is freed by now, whatever was not is still there.
        self.to_leader(m.FreeBuffers(S, tuple(self.buffers)))
        made = {run * 10 + result for run in self.submitted for result in (0, 1)}
        assert set(self.frees) <= made
        assert not set(self.buffers) - set(self.frees)

    def deliver_all(self, which: int) -> None:
        while self.links[which]:
            message = self.links[which].popleft()
            event = g.PartSubmitted(message, ()) if isinstance(message, m.StartPart) else message
            self.perform(which + 1, self.followers[which].handle(event, 0.0))


TestIsland = Island.TestCase
TestIsland.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
