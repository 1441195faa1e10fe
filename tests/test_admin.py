"""What administrators order: weights, draining an island, ending a session; and what becomes of cancelled runs."""

from __future__ import annotations

from sched_world import World, executor_of, hello, refused, sent

from pathway.sched.events import Instruction
from pathway.sched.policies import Fair
from pathway.transport import messages as m


def world_with_admin(*islands: str) -> World:
    world = World(policy=Fair())
    for island in islands:
        world.form(island)
    world.say("admin", hello("admin"))
    return world


def reply(out: list[Instruction]) -> m.AdminReply:
    [answer] = sent(out, "admin", m.AdminReply)
    return answer


def report(world: World, island: str, *held: tuple[int, int, int]) -> list[Instruction]:
    return world.say(executor_of(island), m.ExecutorReport(held, (), 0))


def test_weights_come_with_the_connection_and_change_by_order() -> None:
    world = world_with_admin("east")
    session = world.connect("ann", weight=4.0, priority=2)
    tenant = world.core.clients.lanes.tenant(session)
    assert (tenant.weight, tenant.priority) == (4.0, 2)
    assert "weight 0.5" in reply(world.say("admin", m.SetWeight(1, "ann", 0.5))).text
    assert (tenant.weight, tenant.priority) == (0.5, 2)
    assert not reply(world.say("admin", m.SetWeight(2, f"{session:x}", None, 7))).error
    assert tenant.priority == 7
    assert reply(world.say("admin", m.SetWeight(3, "ann", -1.0))).error
    [line] = world.core.status(world.now)["sessions"]
    assert (line["weight"], line["priority"], line["device_us"]) == (0.5, 7, 0)


def test_a_session_that_is_not_one_is_named_back() -> None:
    world = world_with_admin("east")
    world.connect("ann")
    assert "there are: " in reply(world.say("admin", m.KillSession(1, "bob"))).error
    world.say("second", hello("client", name="ann"))
    assert "2 sessions are called 'ann'" in reply(world.say("admin", m.KillSession(1, "ann"))).error


def test_a_client_may_not_give_orders() -> None:
    world = world_with_admin("east")
    world.connect("ann")
    assert refused(world.say("ann", m.KillSession(1, "ann"))).kind == "PermissionDeniedError"


def test_killing_a_session_tells_it_and_frees_all() -> None:
    world = world_with_admin("east")
    session = world.connect("ann")
    world.slice("ann", 1, 4)
    world.plan("ann", 1, "east")
    world.start("ann", 1, 1)
    out = world.say("admin", m.KillSession(1, "ann"))
    assert refused(out).kind == "SessionLostError"
    assert sent(out, executor_of("east")) == [m.CloseSession(session)]
    assert reply(out).text == "session ann is ended, with 1 runs that it had"
    assert not world.core.clients.sessions
    assert world.core.clients.lanes.active == 0


def test_a_drained_island_takes_no_slices_until_it_is_undrained() -> None:
    world = world_with_admin("east")
    world.connect("ann")
    assert "nothing is there" in reply(world.say("admin", m.DrainIsland(1, "east", True))).text
    assert world.slice("ann", 1, 2, wait=True) == []
    [wait] = world.core.waits(world.now)
    assert "drained: east" in wait.reason
    [refusal] = sent(world.slice("ann", 2, 2), "ann", m.SliceRefused)
    assert "drained: east" in refusal.reason
    out = world.say("admin", m.DrainIsland(2, "east", False))
    assert [bound.slice for bound in sent(out, "ann", m.SliceBound)] == [1]
    assert "there is no island 'north'" in reply(world.say("admin", m.DrainIsland(3, "north", True))).error


def test_draining_moves_what_is_idle_and_lets_the_rest_end() -> None:
    world = world_with_admin("east", "west")
    ann, bob = world.connect("ann"), world.connect("bob")
    [held] = sent(world.slice("ann", 1, 2), "ann", m.SliceBound)
    assert held.island == "east"
    world.slice("bob", 1, 2, island="east")  # insists
    world.plan("ann", 1, "east")
    world.start("ann", 1, 1)
    out = world.say("admin", m.DrainIsland(1, "east", True))
    assert "slices and 1 runs are still there" in reply(out).text
    world.say(executor_of("east"), m.PartsFinished(((ann, 1),)))
    assert not sent(report(world, "east", (ann, 1, 8)), "ann", m.SliceBound)  # its result is there
    world.now += 1.6
    assert not sent(report(world, "east", (ann, 1, 8)), "ann", m.SliceBound)
    moved = sent(report(world, "east"), "ann", m.SliceBound)
    assert [(bound.slice, bound.island) for bound in moved] == [(1, "west")]
    [failed] = sent(world.start("ann", 2, 1), "ann", m.RunFailed)  # of the plan for the old place
    assert "was moved" in failed.error.message
    islands = {held.session: held.island for s in world.core.clients.sessions.values() for held in s.slices.values()}
    assert islands == {ann: "west", bob: "east"}  # bob insists on east, and stays
