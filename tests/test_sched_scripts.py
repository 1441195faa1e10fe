"""Scripts at the scheduler: what is started when, what waits for it and nothing else, and that nothing is left over."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw
from sched_world import World, empty_part, executor_of, sent

from pathway.dataflow.script import Body, Choose, Repeat, RunPlan, Script, as_text, why_invalid
from pathway.errors import ErrorInfo
from pathway.sched.events import Instruction
from pathway.transport import messages as m

EAST = executor_of("east")
BROKEN = ErrorInfo("ExecutionError", "broken")

DECIDE, ONE, OTHER, AFTER = 1, 2, 3, 4

CONDITION = Script(
    (
        Body(
            5,
            0,
            (
                RunPlan(DECIDE, ((-1,),), (0, 1), (0, 0), ((1, 2),), first=0),
                Choose(2, (1, 2), ((0,), (0,)), (3,)),
                RunPlan(AFTER, ((3, -2),), (4,), (0,), first=2),
            ),
            (4,),
        ),
        Body(2, 1, (RunPlan(ONE, ((0,),), (1,), (0,)),), (1,)),
        Body(2, 1, (RunPlan(OTHER, ((0,),), (1,), (0,)),), (1,)),
    ),
    arguments=2,
    results=3,
)

LOOP = Script(
    (
        Body(2, 0, (Repeat(1, 2, (), (), (0,)), RunPlan(AFTER, ((0,),), (1,), (0,), first=0)), (1,)),
        Body(3, 0, (RunPlan(DECIDE, ((-1,),), (0, 1), (0, 0), ((1, 2),)),), (0, 2)),
        Body(4, 1, (RunPlan(ONE, ((0,),), (1, 2), (0, 0), ((1, 3),)),), (1, 3)),
    ),
    arguments=1,
    results=1,
)


class Scripted(World):
    """One island, one session with plans 1 to 4 of one part, and script 9."""

    def __init__(self, script: Script) -> None:
        super().__init__(credits=8)
        self.form("east")
        self.session = self.connect()
        self.slice("client", 1, 4, island="east")
        for number in (DECIDE, ONE, OTHER, AFTER):
            self.plan("client", number, "east")
        self.say("client", m.RegisterPlan(5, "use", (m.PartPayload("east", 1, ("key",), empty_part("east")),), 1))
        self.told = self.say("client", m.RegisterScript(9, "script", msgspec.msgpack.encode(script)))

    def run(self, run: int, *arguments: int | bytes) -> list[Any]:
        return self.parts(self.say("client", m.StartScript(run, 9, run * 100, arguments)))

    def use(self, run: int, *buffers: int) -> list[Any]:
        """A run of plan 5 that reads these buffers."""
        arguments = Raw(msgspec.msgpack.encode(buffers))
        return self.parts(self.say("client", m.StartRun(run, 5, run * 100, (arguments,))))

    def parts(self, out: list[Instruction]) -> list[Any]:
        """(run, plan, first result, arguments) of the parts that are started, and the buffers that are freed."""
        self.out = out
        return [
            (each.run, each.plan, each.first_result, msgspec.msgpack.decode(each.arguments))
            if isinstance(each, m.StartPart)
            else each.buffers
            for each in sent(out, EAST)
            if isinstance(each, (m.StartPart, m.FreeBuffers))
        ]

    def decide(self, run: int, result: int, value: int) -> list[Any]:
        return self.parts(self.say(EAST, m.Decided(self.session, run, ((result, value),))))

    def finish(self, *runs: int) -> list[Any]:
        return self.parts(self.say(EAST, m.PartsFinished(tuple((self.session, run) for run in runs))))

    def release(self, *buffers: int) -> list[Any]:
        return self.parts(self.say("client", m.ReleaseBuffers("east", 1, buffers)))

    def said(self, kind: type) -> list[Any]:
        return sent(self.out, "client", kind)


@pytest.mark.parametrize(("value", "plan"), [(0, ONE), (1, OTHER)])
def test_a_decision_starts_the_chosen_side_and_what_follows_in_one_round_trip(value: int, plan: int) -> None:
    world = Scripted(CONDITION)
    # The number that decides is a buffer too; the scheduler has no other use for it.
    [(first, *started), freed] = world.run(7, 50, b"host")
    assert started == [DECIDE, 700, [50]]
    assert freed == (701,)
    [(second, *chosen), (third, *after), freed] = world.decide(first, 1, value)
    assert chosen == [plan, chosen[1], [700]]
    assert after == [AFTER, 702, [chosen[1], b"host"]]
    assert min(second, third, chosen[1]) >= m.OWN_RUNS
    assert freed == (700, chosen[1])
    assert world.finish(first, second) == []
    assert world.said(m.RunsFinished) == []
    world.finish(third)
    assert world.said(m.RunsFinished) == [m.RunsFinished((7,))]
    assert world.core.clients.lanes.active == 0


def test_a_decision_from_another_host_may_come_after_the_end_of_its_run() -> None:
    world = Scripted(CONDITION)
    first = world.run(7, 50, b"")[0][0]
    assert world.finish(first) == []
    assert world.said(m.RunsFinished) == []
    assert [each[1] for each in world.decide(first, 1, 0) if len(each) == 4] == [ONE, AFTER]


def test_what_reads_a_promise_waits_and_nothing_else() -> None:
    world = Scripted(CONDITION)
    first = world.run(7, 50, b"")[0][0]
    assert world.use(8, 702) == []
    assert world.use(9, 800) == [], "it reads what a waiting run will make"
    assert world.use(10, 60) == [(10, 5, 1000, [60])], "O-3"
    reasons = [wait.reason for wait in world.core.waits(world.now)]
    assert any("1 decisions" in reason for reason in reasons)
    assert sum("wait for a decision" in reason for reason in reasons) == 2
    parts = [each for each in world.decide(first, 1, 0) if len(each) == 4][-2:]
    assert [each[1:] for each in parts] == [(5, 800, [702]), (5, 900, [800])]
    assert m.OWN_RUNS < parts[0][0] < parts[1][0], "runs of an island begin in the order of their numbers"
    world.finish(parts[0][0])
    assert world.said(m.RunsFinished) == [m.RunsFinished((8,))]
    world.parts(world.say(EAST, m.PartFailed(world.session, parts[1][0], BROKEN)))
    assert world.said(m.RunFailed) == [m.RunFailed(9, BROKEN)]


def test_a_held_run_can_be_cancelled_and_so_is_what_waits_for_it() -> None:
    world = Scripted(CONDITION)
    first = world.run(7, 50, b"")[0][0]
    world.use(8, 702)
    world.use(9, 800)
    world.out = world.say("client", m.CancelRun(8))
    assert [(each.run, each.error.kind) for each in world.said(m.RunFailed)] == [(8, "Cancelled"), (9, "Cancelled")]
    assert all(each[0] not in (8, 9) for each in world.decide(first, 1, 0))


def test_released_buffers_stay_for_as_long_as_something_will_read_them() -> None:
    world = Scripted(CONDITION)
    first = world.run(7, 50, b"")[0][0]
    world.use(8, 702, 60)
    assert world.release(50, 60, 61, 702) == [(61,)]
    parts = world.decide(first, 1, 0)
    assert parts.index((60,)) > next(i for i, each in enumerate(parts) if len(each) == 4 and each[2] == 800), "X-1"
    assert (702,) in parts
    runs = [each[0] for each in parts if len(each) == 4]
    assert world.finish(first, *runs) == [(50,)]


def test_a_failure_fails_the_script_and_what_waits_for_it_and_frees_what_it_made() -> None:
    world = Scripted(CONDITION)
    first = world.run(7, 50, b"")[0][0]
    world.use(8, 702)
    world.decide(first, 1, 0)
    world.run(17, 51, b"")
    assert world.use(18, 1702) == []
    own = max(number for number in world.core.clients.sessions[world.session].runs if number >= m.OWN_RUNS)
    parts = world.parts(world.say(EAST, m.PartFailed(world.session, own, BROKEN)))
    assert parts == [(1700,)]
    assert world.said(m.RunFailed) == [m.RunFailed(17, BROKEN), m.RunFailed(18, BROKEN)]


def test_a_loop_costs_one_message_each_way_a_step() -> None:
    world = Scripted(LOOP)
    run, _, made, _ = world.run(7, 50)[0]
    carried = made
    for _ in range(3):
        [(following, *step), freed] = world.decide(run, 1, 1)
        assert step == [ONE, step[1], [carried]]
        assert set(freed) == {carried, step[1] + 1}, "what was carried before goes, and what decided"
        assert world.finish(run) == []
        run, carried = following, step[1]
    [(last, *after), freed] = world.decide(run, 1, 0)
    assert after == [AFTER, 700, [carried]]
    assert freed == (carried,)
    world.finish(run, last)
    assert world.said(m.RunsFinished) == [m.RunsFinished((7,))]


def test_an_endless_loop_can_be_cancelled() -> None:
    world = Scripted(LOOP)
    entry = world.run(7, 50)[0][0]
    run = world.decide(entry, 1, 1)[0][0]
    world.parts(world.say("client", m.CancelRun(7)))
    [failed] = world.said(m.RunFailed)
    assert failed.run == 7
    assert failed.error.kind == "Cancelled"
    assert [each.run for each in sent(world.out, EAST, m.CancelPart)][-1:] == [run]
    assert world.decide(run, 1, 1) == []
    assert world.finish(entry, run) == []
    assert not list(world.core.waits(world.now))


def test_a_lost_island_fails_scripts() -> None:
    world = Scripted(LOOP)
    world.run(7, 50)
    world.out = world.say("worker-east-0", m.ExecutorExited("east", 1, 0, "signal SIGKILL"))
    assert [failed.run for failed in world.said(m.RunFailed)] == [7]


def test_a_closed_session_leaves_nothing() -> None:
    world = Scripted(LOOP)
    run = world.run(7, 50)[0][0]
    world.say("client", m.Goodbye())
    assert world.decide(run, 1, 1) == []
    assert world.core.clients.lanes.active == 0


def test_a_released_script_keeps_its_plans_until_its_runs_are_over() -> None:
    world = Scripted(LOOP)
    run = world.run(7, 50)[0][0]
    world.out = world.say("client", m.ReleasePlan(9))
    assert sent(world.out, EAST) == []
    last = world.decide(run, 1, 0)[0][0]
    world.finish(run, last)
    dropped = [each.plan for each in sent(world.out, EAST, m.DropPlan)]
    assert sorted(dropped) == [DECIDE, ONE, AFTER]


@pytest.mark.parametrize(
    "script",
    [
        Script((), 0, 0),
        Script((Body(1, 0, (RunPlan(1, ((3,),), (0,), (0,)),)),), 0, 1),
        Script((Body(1, 0, (RunPlan(1, ((-2,),), (0,), (0,)),)),), 1, 1),
        Script((Body(1, 0, (RunPlan(1, ((),), (0,), (1,)),)),), 0, 1),
        Script((Body(1, 0, (RunPlan(1, ((),), (0,), (0,)),)),), 0, 0),
        Script((Body(1, 0, (RunPlan(1, ((),), (0,), (0,)), RunPlan(1, ((),), (0,), (0,)))),), 0, 1),
        Script((Body(1, 0, (Choose(-1, (0,), ((),), ()),)),), 1, 0),
        Script((Body(1, 0, (Choose(-1, (), (), ()),)),), 1, 0),
        Script((Body(1, 0, (Choose(-1, (1,), ((),), (0,)),)), Body(0, 0, ())), 1, 0),
        Script((Body(1, 0, (Repeat(1, 1, (), (), (0,)),)), Body(1, 1, (), (0,))), 1, 0),
        Script((Body(0, 0, (), (4,)),), 0, 0),
    ],
)
def test_scripts_that_make_no_sense_are_refused_and_hurt_nobody(script: Script) -> None:
    assert why_invalid(script)
    world = Scripted(script)
    assert [each.error.kind for each in sent(world.told, "client", m.PlanFailed)] == ["ProtocolError"]
    world.run(7, 50)
    assert [each.run for each in world.said(m.RunFailed)] == [7]


@pytest.mark.parametrize(("value", "kind"), [(-1, "ProtocolError"), (2, "ProtocolError")])
def test_a_decision_for_no_branch_fails_the_script(value: int, kind: str) -> None:
    world = Scripted(CONDITION)
    first = world.run(7, 50, b"")[0][0]
    world.decide(first, 1, value)
    assert [each.error.kind for each in world.said(m.RunFailed)] == [kind]


NUMBERS = st.integers(-3, 6)
LISTS = st.lists(NUMBERS, max_size=3).map(tuple)
TASKS = st.one_of(
    st.builds(
        RunPlan,
        st.sampled_from([DECIDE, ONE, 77]),
        st.lists(LISTS, max_size=2).map(tuple),
        LISTS,
        LISTS,
        st.lists(st.tuples(NUMBERS, NUMBERS), max_size=2).map(tuple),
        NUMBERS,
    ),
    st.builds(Choose, NUMBERS, LISTS, st.lists(LISTS, max_size=2).map(tuple), LISTS),
    st.builds(Repeat, NUMBERS, NUMBERS, LISTS, LISTS, LISTS),
)
BODIES = st.builds(Body, NUMBERS, NUMBERS, st.lists(TASKS, max_size=3).map(tuple), LISTS)


def renamed(script: Script, numbers: list[int]) -> Script:
    """The same with some of its numbers changed: nearly right."""
    data = msgspec.to_builtins(script)

    def change(value: Any) -> Any:
        if isinstance(value, list):
            return [change(each) for each in value]
        return numbers.pop() if isinstance(value, int) and numbers and numbers[-1] % 5 == 0 else value

    encoded = msgspec.msgpack.encode(change(msgspec.msgpack.decode(msgspec.msgpack.encode(data))))
    try:
        return msgspec.msgpack.decode(encoded, type=Script)
    except msgspec.ValidationError:
        return script


SCRIPTS = st.one_of(
    st.builds(Script, st.lists(BODIES, max_size=4).map(tuple), st.integers(0, 3), st.integers(0, 5)),
    st.builds(renamed, st.sampled_from([CONDITION, LOOP]), st.lists(st.integers(-3, 12), max_size=40)),
)


@settings(max_examples=100, deadline=None)
@given(script=SCRIPTS, values=st.lists(st.integers(-1, 3), min_size=1, max_size=12))
def test_no_script_hurts_the_scheduler(script: Script, values: list[int]) -> None:
    world = Scripted(script)
    world.run(7, *[50 + number for number in range(max(0, min(script.arguments, 10)))])
    for value in values:
        own = [number for number in world.core.clients.sessions[world.session].runs if number >= m.OWN_RUNS]
        for run in own[:4]:
            world.say(EAST, m.Decided(world.session, run, tuple((result, value) for result in range(3))))
            world.say(EAST, m.PartsFinished(((world.session, run),)))
    world.say("client", m.CancelRun(7))
    world.say("client", m.Goodbye())
    assert not world.core.clients.sessions


def test_scripts_are_printed_for_people() -> None:
    text = as_text(CONDITION)
    assert "by (r2): body 1 of (r0) or body 2 of (r0)" in text
    assert "for as long as that decides so" in as_text(LOOP)
