"""Sessions: leases, resuming, and that nothing of a closed one is left."""

from __future__ import annotations

import json

from sched_world import NO_ARGUMENTS, World, executor_of, hello, refused, sent

from pathway.errors import ErrorInfo
from pathway.sched.events import Close
from pathway.transport import messages as m
from pathway.version import PROTOCOL_VERSION


def busy_world() -> tuple[World, m.Welcome]:
    world = World(credits=1)
    world.form("east", hosts=2)
    out = world.say("client", hello("client", name="ann"))
    [welcome] = sent(out, "client", m.Welcome)
    world.slice("client", 1, 8)
    world.plan("client", 1, "east")
    world.start("client", 1, 1)
    world.start("client", 2, 1)
    return world, welcome


def nothing_left(world: World) -> bool:
    clients = world.core.clients
    lanes = [island.lane for island in world.core.cluster.islands.values() if island.lane is not None]
    return not (
        clients.sessions
        or clients.lanes.active
        or clients.plans.computation_count
        or any(clients.binder.holders.values())
        or any(lane.running or lane.queue or lane.registered for lane in lanes)
    )


def test_goodbye_closes_the_session_on_all_hosts_at_once() -> None:
    world, welcome = busy_world()
    out = world.say("client", m.Goodbye())
    for host in range(2):
        assert sent(out, executor_of("east", host)) == [m.CloseSession(welcome.session)]
    assert nothing_left(world)
    # What leaders still say about it is no news.
    assert world.say(executor_of("east"), m.PartsFinished(((welcome.session, 1),))) == []
    assert world.say(executor_of("east"), m.PartFailed(welcome.session, 2, ErrorInfo("Cancelled", ""))) == []


def test_any_message_renews_the_lease_and_silence_ends_it() -> None:
    world, welcome = busy_world()
    for _ in range(5):
        world.say("client", m.Ping(1))
        world.wait(9.0)
    assert welcome.session in world.core.clients.sessions
    out = world.wait(1.5)
    assert sent(out, executor_of("east", 1)) == []  # its executors were silent for longer, too
    assert any(isinstance(one, Close) and one.peer == b"client" for one in out)
    assert nothing_left(world)


def test_a_broken_connection_keeps_its_session_for_one_lease() -> None:
    world, welcome = busy_world()
    world.close("client", "connection reset")
    assert welcome.session in world.core.clients.sessions
    world.wait(9.9)
    assert welcome.session in world.core.clients.sessions
    world.wait(0.2)
    assert nothing_left(world)


def test_a_resumed_session_hears_what_it_missed_and_starts_nothing_twice() -> None:
    world, welcome = busy_world()
    world.close("client")
    out = world.say(executor_of("east"), m.PartsFinished(((welcome.session, 1),)))
    assert not sent(out, "client")
    assert sent(out, executor_of("east"), m.StartPart)
    out = world.say("again", hello("client", resume=welcome.session, token=welcome.token))
    messages = sent(out, "again")
    assert messages[0].session == welcome.session
    assert isinstance(messages[1], m.Directory)
    assert m.RunsFinished((1,)) in messages
    assert isinstance(messages[-1], m.SliceBound)
    for run in (1, 2):
        assert world.say("again", m.StartRun(run, 1, 1, (NO_ARGUMENTS,))) == []
    assert world.plan("again", 1, "east") == []
    assert sent(world.slice("again", 1, 8), "again", m.SliceBound)
    out = world.say(executor_of("east"), m.PartsFinished(((welcome.session, 2),)))
    assert sent(out, "again") == [m.RunsFinished((2,))]


def test_resuming_takes_the_session_from_the_older_connection() -> None:
    world, welcome = busy_world()
    out = world.say("again", hello("client", resume=welcome.session, token=welcome.token))
    assert refused(out).reason == "another connection resumed the session"
    assert refused(world.say("client", m.Ping(1))).kind == "DisconnectedError"
    world.say("again", m.Ping(1))
    world.wait(9.0)
    assert welcome.session in world.core.clients.sessions


def test_sessions_are_resumed_only_by_who_has_the_token_and_within_the_lease() -> None:
    world, welcome = busy_world()
    out = world.say("thief", hello("client", resume=welcome.session, token=1))
    assert refused(out).kind == "PermissionDeniedError"
    assert refused(world.say("lost", hello("client", resume=12345))).kind == "SessionLostError"
    assert world.core.clients.sessions[welcome.session].peer == b"client"


def test_old_notices_are_forgotten() -> None:
    world, welcome = busy_world()
    session = world.core.clients.sessions[welcome.session]
    for second in range(40):
        world.say("client", m.Ping(1))
        for peer in ("worker-east-0", "worker-east-1", executor_of("east"), executor_of("east", 1)):
            world.say(peer, m.Ping(1))
        world.say("client", m.StartRun(100 + second, 77, 1, ()))
        world.wait(1.0)
    assert len(session.notices) <= 12


def test_status_is_json_and_names_everything() -> None:
    world, welcome = busy_world()
    report = m.ExecutorReport(((welcome.session, 3, 4096),), ((welcome.session, 1, "gang 0 waits for edge 2", 0.5),), 9)
    world.say(executor_of("east"), report)
    [reply] = sent(world.say("client", m.StatusRequest(5)), "client", m.StatusReply)
    assert reply.request == 5
    status = json.loads(reply.status)
    [island] = status["islands"]
    assert (island["island"], island["state"], island["devices"], island["bytes"]) == ("east", "formed", 8, 4096)
    assert [host["hostname"] for host in island["hosts"]] == ["east-0", "east-1"]
    [session] = status["sessions"]
    assert (session["name"], session["runs"], session["bytes"]) == ("ann", 2, 4096)
    assert status["slices"][0]["devices"] == list(range(8))
    reasons = [wait["reason"] for wait in status["waits"]]
    assert "all 1 credits of island east are in use" in reasons
    assert "gang 0 waits for edge 2" in reasons


def test_damaged_transfers_are_counted_whichever_host_received_them() -> None:
    world, _ = busy_world()
    busy = m.ExecutorReport(((5, 3, 4096),), (), 9, damaged_transfers=1)
    world.say(executor_of("east", 0), busy)
    world.say(executor_of("east", 0), busy)
    world.say(executor_of("east", 1), m.ExecutorReport((), (), 0, 2))
    world.say(executor_of("east", 1), m.ExecutorReport((), (), 0, 4))
    [island] = world.core.status(world.now)["islands"]
    assert (island["damaged_transfers"], island["bytes"], island["busy_us"]) == (5, 4096, 9)
    world.close(executor_of("east", 0))
    world.wait(1)
    [island] = world.core.status(world.now)["islands"]
    assert island["damaged_transfers"] == 5


def test_welcome_names_the_scheduler_and_its_terms() -> None:
    world = World()
    [welcome] = sent(world.say("client", hello("client")), "client", m.Welcome)
    assert welcome.protocol == PROTOCOL_VERSION
    assert (welcome.lease_s, welcome.heartbeat_s) == (10.0, 0.5)
    assert welcome.scheduler == world.core.scheduler
    assert welcome.token
    [other] = sent(world.say("worker", hello("worker")), "worker", m.Welcome)
    assert (other.session, other.token) == (0, 0)
