"""Runs: order, credits, failure, cancellation; and that none of it costs more in a larger cluster."""

from __future__ import annotations

import gc
import random
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sched_world import NO_ARGUMENTS, World, cluster_of, empty_part, executor_of, sent

from pathway.errors import ErrorInfo
from pathway.sched.events import Instruction, MessageReceived, Send
from pathway.sched.lanes import Lane, LaneScheduler, Run
from pathway.sched.validate import validate_lanes
from pathway.transport import messages as m

BROKEN = ErrorInfo("ExecutionError", "broken")


def world_of(*islands: str, credits: int = 2) -> tuple[World, int]:
    """A client with a slice on each island and a plan for each prefix of them: plan n has n parts."""
    world = World(credits=credits)
    for island in islands:
        world.form(island)
    session = world.connect()
    for number, island in enumerate(islands, 1):
        world.slice("client", number, 4, island=island)
        world.plan("client", number, *islands[:number])
    return world, session


def start_part(session: int, run: int, plan: int = 1) -> m.StartPart:
    return m.StartPart(session, run, plan, run * 100, NO_ARGUMENTS)


def finish(world: World, session: int, *runs: int, island: str = "east") -> list[Instruction]:
    return world.say(executor_of(island), m.PartsFinished(tuple((session, run) for run in runs)))


def test_a_run_is_one_message_to_each_leader_and_one_back() -> None:
    world, session = world_of("east", "west")
    assert world.start("client", 1, 2, islands=2) == [
        Send(executor_of("east").encode(), start_part(session, 1, 2)),
        Send(executor_of("west").encode(), start_part(session, 1, 2)),
    ]
    assert finish(world, session, 1) == []
    assert finish(world, session, 1, island="west") == [Send(b"client", m.RunsFinished((1,)))]


def test_credits_bound_what_is_in_flight_and_finishes_leave_together() -> None:
    world, session = world_of("east", credits=2)
    for run in (1, 2, 3, 4):
        world.start("client", run, 1)
    reasons = [wait.reason for wait in world.core.waits(world.now)]
    assert reasons == [
        "1 of its 1 parts are in flight",
        "1 of its 1 parts are in flight",
        "all 2 credits of island east are in use",
        "1 of its session before it in the queue of island east",
    ]
    assert finish(world, session, 1, 2) == [
        Send(executor_of("east").encode(), start_part(session, 3)),
        Send(executor_of("east").encode(), start_part(session, 4)),
        Send(b"client", m.RunsFinished((1, 2))),
    ]


def test_all_or_nothing_and_first_come_first_served() -> None:
    world, session = world_of("east", "west", credits=1)
    world.start("client", 1, 1)  # east is full
    assert world.start("client", 2, 2, islands=2) == []  # waits for east, and its turn has come on west
    world.connect("other")
    world.say("client", m.ReleaseSlice(2))
    world.slice("other", 1, 4, island="west")
    world.plan("other", 1, "west")
    [first] = sent(world.start("other", 1, 1), executor_of("west"))  # west does not idle meanwhile
    assert world.start("other", 2, 1) == []
    assert finish(world, session, 1) == [Send(b"client", m.RunsFinished((1,)))]  # west has no credit for run 2 now
    out = finish(world, first.session, 1, island="west")
    assert sent(out, executor_of("east")) == sent(out, executor_of("west")) == [start_part(session, 2, 2)]  # S-3
    finish(world, session, 2)
    assert len(sent(finish(world, session, 2, island="west"), executor_of("west"), m.StartPart)) == 1


def test_puts_and_releases_stay_behind_the_runs_of_their_session_that_are_queued() -> None:
    world, session = world_of("east", credits=1)
    release = m.ReleaseBuffers("east", 1, (7,))
    free = Send(executor_of("east").encode(), m.FreeBuffers(session, (7,)))
    assert world.say("client", release) == [free]
    world.start("client", 1, 1)
    assert world.say("client", release) == [free]  # nothing of it is queued
    world.start("client", 2, 1)
    assert world.say("client", release) == []
    assert world.say("client", m.ReleasePlan(1)) == []
    out = finish(world, session, 1)
    assert sent(out, executor_of("east")) == [start_part(session, 2), free.message, m.DropPlan(session, 1)]


def test_releases_of_an_earlier_incarnation_are_dropped() -> None:
    world, _ = world_of("east")
    assert world.say("client", m.ReleaseBuffers("east", 9, (7,))) == []


def test_a_failed_part_fails_its_run_once_and_keeps_the_other_credits() -> None:
    world, session = world_of("east", "west", credits=1)
    world.start("client", 1, 2, islands=2)
    out = world.say(executor_of("east"), m.PartFailed(session, 1, BROKEN))
    assert out == [Send(b"client", m.RunFailed(1, BROKEN))]
    assert world.start("client", 2, 2, islands=2) == []  # west has not given its credit back
    out = world.say(executor_of("west"), m.PartFailed(session, 1, ErrorInfo("ExecutionError", "poisoned by it")))
    assert not sent(out, "client")
    assert sent(out, executor_of("west")) == [start_part(session, 2, 2)]


def test_a_lost_island_fails_what_touches_it_and_nothing_else() -> None:
    world, session = world_of("east", "west", credits=1)
    world.start("client", 1, 2, islands=2)  # in flight on both
    world.start("client", 2, 2, islands=2)  # queued on both
    world.start("client", 3, 1)  # queued on east, behind it
    out = world.say("worker-west-0", m.ExecutorExited("west", 1, 0, "exit code 1"))
    failed = sent(out, "client", m.RunFailed)
    assert [message.run for message in failed] == [1, 2]
    assert {(f.error.kind, f.error.island, f.error.incarnation) for f in failed} == {("IslandLostError", "west", 1)}
    assert not sent(out, executor_of("east"), m.StartPart)  # run 1's part there has not ended
    assert sent(finish(world, session, 1), executor_of("east")) == [start_part(session, 3)]
    # A plan for the lost incarnation starts nothing any more, whether the island is back or not.
    assert sent(world.start("client", 4, 2, islands=2), "client", m.RunFailed)
    out = world.ready("west", incarnation=2)
    assert [type(message) for message in sent(out, executor_of("west", incarnation=2))] == [
        m.Directory,
        m.RegisterComputation,
        m.RegisterPart,
    ]
    assert sent(world.start("client", 5, 2, islands=2), "client", m.RunFailed)
    [failed_plan] = sent(world.plan("client", 9, "west", incarnation=1), "client", m.PlanFailed)
    assert failed_plan.error.kind == "IslandLostError"


def test_cancelling() -> None:
    world, session = world_of("east", credits=1)
    world.start("client", 1, 1)
    world.start("client", 2, 1)
    [failed] = sent(world.say("client", m.CancelRun(2)), "client")
    assert (failed.run, failed.error.kind) == (2, "Cancelled")
    [cancel] = world.say("client", m.CancelRun(1))
    assert isinstance(cancel, Send)
    assert isinstance(cancel.message, m.CancelPart)
    assert world.say("client", m.CancelRun(77)) == []
    world.say(executor_of("east"), m.PartFailed(session, 1, cancel.message.error))
    assert world.core.clients.lanes.active == 0


def test_a_plan_that_does_not_compile_fails_with_its_queued_runs() -> None:
    world, session = world_of("east", credits=1)
    world.start("client", 1, 1)
    world.start("client", 2, 1)
    error = ErrorInfo("CompileError", "XLA refused it")
    refusal = m.PartRefused(session, 1, error)
    out = world.say(executor_of("east"), refusal)
    assert sent(out, "client") == [m.PlanFailed(1, error), m.RunFailed(2, error)]
    assert world.say(executor_of("east"), refusal) == []  # the next host says so too
    assert sent(world.start("client", 3, 1), "client") == [m.RunFailed(3, error)]


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (m.StartRun(1, 9, 1, (NO_ARGUMENTS,)), "ProgramError"),
        (m.StartRun(1, 1, 1, ()), "ProtocolError"),
    ],
)
def test_runs_that_make_no_sense_fail(run: m.StartRun, kind: str) -> None:
    world, _ = world_of("east")
    [failed] = sent(world.say("client", run), "client", m.RunFailed)
    assert failed.error.kind == kind


def test_a_plan_without_parts_is_finished_at_once() -> None:
    world, _ = world_of("east")
    world.say("client", m.RegisterPlan(5, "nothing", ()))
    assert sent(world.start("client", 1, 5, islands=0), "client") == [m.RunsFinished((1,))]


def test_plans_need_their_computations_and_one_part_an_island() -> None:
    world, _ = world_of("east")
    part = m.PartPayload("east", 1, (), empty_part("east"))
    [failed] = sent(world.say("client", m.RegisterPlan(5, "twice", (part, part))), "client")
    assert "two parts on island east" in failed.error.message
    part = m.PartPayload("east", 1, ("unheard",), empty_part("east"))
    [failed] = sent(world.say("client", m.RegisterPlan(6, "unheard", (part,))), "client")
    assert "was never registered" in failed.error.message


def test_computations_travel_once_to_each_incarnation() -> None:
    world, _ = world_of("east")
    out = world.plan("client", 2, "east")
    assert [type(message) for message in sent(out, executor_of("east"))] == [m.RegisterPart]
    world.connect("other")
    world.say("client", m.ReleaseSlice(1))
    world.slice("other", 1, 4)
    out = world.plan("other", 1, "east")
    assert [type(message) for message in sent(out, executor_of("east"))] == [m.RegisterPart]


# -- random histories of the lanes alone -----------------------------------------------------------------------------


class Lanes(RuleBasedStateMachine):
    """Runs of three sessions over three islands. Model: what each leader was sent, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[Run] = []
        self.scheduler = LaneScheduler(2, lambda run, error, now, out: self.failures.append(run))
        self.lanes = [Lane(name, 1, (name.encode(),)) for name in ("a", "b", "c")]
        self.submitted: list[Run] = []
        self.order: dict[tuple[bytes, int], list[int]] = {}
        self.ended: list[Run] = []

    def note(self, out: list[Instruction]) -> None:
        for one in out:
            assert isinstance(one, Send)
            if isinstance(one.message, m.StartPart):
                self.order.setdefault((one.peer, one.message.session), []).append(one.message.run)

    @rule(session=st.integers(1, 3), where=st.sets(st.integers(0, 2), min_size=1))
    def submit(self, session: int, where: set[int]) -> None:
        lanes = tuple(self.lanes[number] for number in sorted(where))
        number = len(self.submitted) + 1
        run = Run(session, number, 1, 0, (NO_ARGUMENTS,) * len(lanes), lanes, float(number))
        self.submitted.append(run)
        out: list[Instruction] = []
        self.scheduler.submit(run, out)
        self.note(out)

    @precondition(lambda self: any(lane.running for lane in self.lanes))
    @rule(pick=st.randoms(use_true_random=False), fails=st.booleans())
    def end_part(self, pick: random.Random, fails: bool) -> None:
        lane = pick.choice([lane for lane in self.lanes if lane.running])
        part = pick.choice(list(lane.running))
        out: list[Instruction] = []
        if fails:
            self.scheduler.part_failed(lane, part, BROKEN, 0.0, out)
        else:
            self.ended += self.scheduler.parts_finished(lane, [part], out)
        self.note(out)

    @precondition(lambda self: self.submitted)
    @rule(pick=st.randoms(use_true_random=False))
    def cancel(self, pick: random.Random) -> None:
        run = pick.choice(self.submitted)
        if any(run in lane.queue for lane in self.lanes):
            out: list[Instruction] = []
            self.scheduler.cancel(run, BROKEN, 0.0, out)
            self.note(out)

    @rule(lane=st.integers(0, 2))
    def release(self, lane: int) -> None:
        self.scheduler.send_behind(self.lanes[lane], 1, m.FreeBuffers(1, (1,)), [])

    @rule(session=st.integers(1, 3))
    def close(self, session: int) -> None:
        out: list[Instruction] = []
        self.scheduler.session_closed(session, self.lanes, out)
        self.note(out)

    @invariant()
    def holds(self) -> None:
        validate_lanes(self.scheduler, self.lanes)
        for order in self.order.values():
            assert order == sorted(set(order)), "O-4, and no run twice"
        assert len(set(self.ended)) == len(self.ended)
        assert len(set(self.failures)) == len(self.failures), "S-2"
        assert not set(self.ended) & set(self.failures)

    def teardown(self) -> None:
        while any(lane.running for lane in self.lanes):
            for lane in self.lanes:
                for part in list(lane.running):
                    out: list[Instruction] = []
                    self.scheduler.parts_finished(lane, [part], out)
                    self.note(out)
        assert not any(lane.queue for lane in self.lanes), "nothing deadlocks"
        assert self.scheduler.active == 0


TestLanes = Lanes.TestCase
TestLanes.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# -- what a run costs ------------------------------------------------------------------------------------------------


def cost_of_run(islands: int, hosts: int = 1, devices: int = 4, runs: int = 3000) -> tuple[float, int]:
    """Seconds and instructions for one run, submitted and finished."""
    core, session, executor = cluster_of(islands, hosts, devices)
    arguments = (NO_ARGUMENTS,)
    instructions = 0
    gc.collect()
    best = float("inf")
    for round_number in range(3):
        began = time.perf_counter()
        for run in range(round_number * runs + 1, (round_number + 1) * runs + 1):
            instructions += len(core.handle(MessageReceived(b"client", m.StartRun(run, 1, 1, arguments)), 1.0))
            instructions += len(core.handle(MessageReceived(executor, m.PartsFinished(((session, run),))), 1.0))
        best = min(best, time.perf_counter() - began)
    return best / runs, instructions // (3 * runs)


@pytest.mark.parametrize(("islands", "hosts", "devices"), [(4096, 1, 4), (1, 64, 64)])
def test_a_run_costs_the_same_for_4096_islands_or_shards_as_for_one(islands: int, hosts: int, devices: int) -> None:
    small_s, small_count = cost_of_run(1, 1, 1)
    large_s, large_count = cost_of_run(islands, hosts, devices)
    assert small_count == large_count == 2
    assert large_s < 3 * small_s + 5e-6
    assert large_s < 60e-6  # the budget is 20 us on a quiet machine
