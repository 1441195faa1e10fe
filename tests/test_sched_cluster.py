"""Islands: how they form, what is refused, what happens when one is lost."""

from __future__ import annotations

import itertools

import pytest
from sched_world import World, executor_of, hello, refused, sent

from pathway.sched.cluster import State
from pathway.sched.events import AccessChanged, Close, Drain, Send, Stop
from pathway.transport import messages as m
from pathway.version import PROTOCOL_VERSION


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_island_forms_when_its_last_host_arrives_whatever_the_order(order: tuple[int, ...]) -> None:
    world = World()
    world.connect()
    for host in order[:-1]:
        assert world.join("east", host, hosts=3) == []
    assert world.join("east", order[-1], hosts=3) == [
        Send(f"worker-east-{host}".encode(), m.FormIsland("east", 1, "east-0:1", 3, host)) for host in range(3)
    ]
    for host in order[:-1]:
        assert not sent(world.ready("east", host), "client")
    out = world.ready("east", order[-1])
    entry = m.IslandEntry("east", 1, "cpu", 4, tuple(f"tcp://east-{host}-1" for host in range(3)), "sim")
    for host in range(3):
        assert sent(out, executor_of("east", host)) == [m.Directory((entry,))]
    assert sent(out, "client") == [m.DirectoryChange((entry,))]
    assert m.Directory((entry,)) in sent(world.say("newcomer", hello("client")), "newcomer")


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ({"hosts": 3}, "says hosts: 3, but the island's other hosts say 2"),
        ({"devices": 8}, "says devices a host: 8, but the island's other hosts say 4"),
        ({"platform": "tpu"}, "says platform: tpu, but the island's other hosts say cpu"),
        ({"host": 0}, "has already joined, from east-0 (process 7)"),
        ({"host": 2}, "make no sense"),
    ],
)
def test_a_host_that_does_not_fit_is_refused(second: dict[str, object], why: str) -> None:
    world = World()
    world.join("east", 0, hosts=2)
    world.say("late", hello("worker"))
    fields = {"host": 1, "hosts": 2, "devices": 4, **second}
    assert why in refused(world.say("late", world.joined("east", **fields))).reason  # type: ignore[arg-type]
    assert world.core.peers.get(b"late") is None


def test_a_complete_island_takes_no_more_hosts() -> None:
    world = World()
    world.form("east")
    world.say("late", hello("worker"))
    assert "already complete with its 1 hosts (east-0)" in refused(world.say("late", world.joined("east"))).reason


def test_peers_of_another_version_are_refused_naming_both() -> None:
    out = World().say("old", m.Hello(PROTOCOL_VERSION + 1, "9.9.9", "worker"))
    reason = refused(out).reason
    assert f"protocol {PROTOCOL_VERSION} " in reason
    assert f"protocol {PROTOCOL_VERSION + 1} (pathway 9.9.9)" in reason


def test_who_has_not_said_hello_is_refused_and_roles_say_only_what_is_theirs() -> None:
    world = World()
    assert refused(world.say("stranger", m.Ping(1))).kind == "DisconnectedError"
    assert refused(world.say("stranger", hello("king"))).kind == "ConnectError"
    world.say("observer", hello("observer"))
    assert sent(world.say("observer", m.StatusRequest(3)), "observer", m.StatusReply)
    assert refused(world.say("observer", m.CancelRun(1))).kind == "PermissionDeniedError"
    assert world.core.peers.get(b"observer") is None


def test_an_executor_exit_ends_the_island_and_forms_it_again() -> None:
    world = World()
    world.connect()
    world.form("east", hosts=2)
    out = world.say("worker-east-1", m.ExecutorExited("east", 1, 1, "signal SIGKILL"))
    assert sent(out, "worker-east-0") == [m.StopExecutor("east", 1)]
    [lost] = sent(out, "client", m.IslandLost)
    assert (lost.island, lost.incarnation, lost.error.kind) == ("east", 1, "IslandLostError")
    assert "host 1 (east-1): signal SIGKILL" in lost.error.message
    assert sent(out, "client", m.DirectoryChange) == [m.DirectoryChange(gone=("east",))]
    assert "waits for host 0 to end its executor" in world.core.waits(world.now)[0].reason
    out = world.say("worker-east-0", m.ExecutorExited("east", 1, 0, "stopped"))
    assert [one.message.incarnation for one in out if isinstance(one.message, m.FormIsland)] == [2, 2]  # type: ignore[union-attr]
    # A late report of the earlier incarnation changes nothing.
    assert world.say("worker-east-0", m.ExecutorExited("east", 1, 0, "stopped")) == []
    world.ready("east", 0, incarnation=2)
    assert sent(world.ready("east", 1, incarnation=2), "client", m.DirectoryChange)


def test_an_island_that_crash_loops_rests_longer_and_longer_and_says_so() -> None:
    world = World()
    world.join("east")
    rests = []
    for incarnation in range(1, 6):
        world.say("worker-east-0", m.ExecutorExited("east", incarnation, 0, "exit code 1"))
        island = world.core.cluster.islands["east"]
        rests.append(island.rests_until - world.now)
        if island.state is State.RESTING:
            [wait] = world.core.waits(world.now)
            assert f"after {incarnation} losses in a row" in wait.reason
            assert "exit code 1" in wait.reason
            world.say("worker-east-0", m.Ping(1))
            for _ in range(int(rests[-1])):
                world.wait(1.0)
                world.say("worker-east-0", m.Ping(1))
        assert island.incarnation == incarnation + 1
    assert rests == [0.0, 1.0, 2.0, 4.0, 8.0]


def test_an_island_that_crash_loops_is_given_up_until_an_administrator_wants_it_back() -> None:
    world = World()
    world.connect()
    world.join("east")
    island = world.core.cluster.islands["east"]
    for incarnation in range(1, 9):
        world.say("worker-east-0", m.ExecutorExited("east", incarnation, 0, "exit code 1"))
        while island.state is State.RESTING:
            world.wait(1.0)
            world.say("worker-east-0", m.Ping(1))
    assert island.state is State.GIVEN_UP
    assert island.drained
    [wait] = world.core.waits(world.now)
    assert "given up and drained after 8 losses in a row (it was lost: host 0 (east-0): exit code 1)" in wait.reason
    assert "pathway undrain east" in wait.reason
    for _ in range(200):
        world.wait(1.0)
        world.say("worker-east-0", m.Ping(1))
    assert island.incarnation == 8
    world.say("admin", hello("admin"))
    out = world.say("admin", m.DrainIsland(1, "east", False))
    assert [one.message.incarnation for one in out if isinstance(getattr(one, "message", None), m.FormIsland)] == [9]
    assert not island.drained
    assert island.losses == 0


def test_a_silent_worker_is_a_lost_host_after_two_seconds() -> None:
    world = World()
    world.connect()
    world.form("east", hosts=2)
    for _ in range(4):
        world.say("worker-east-0", m.Ping(1))
        assert not [one for one in world.wait(0.49) if isinstance(one, Close)]
    world.say("worker-east-0", m.Ping(1))
    out = world.wait(0.1)
    assert Close(b"worker-east-1", m.Refused("DisconnectedError", "nothing was heard of it for 2 s")) in out
    assert sent(out, "client", m.IslandLost)
    assert sent(out, "worker-east-0") == [m.StopExecutor("east", 1)]
    world.say("worker-east-0", m.ExecutorExited("east", 1, 0, "stopped"))
    assert "waits for host 1 of 2 to join (it was lost: host 1" in world.core.waits(world.now)[0].reason
    out = world.join("east", 1, hosts=2)
    assert [message.incarnation for message in sent(out, "worker-east-0", m.FormIsland)] == [2]


def test_the_worker_has_a_moment_to_say_why_an_executor_is_gone() -> None:
    world = World()
    world.connect()
    world.form("east")
    assert world.close(executor_of("east")) == []
    out = world.say("worker-east-0", m.ExecutorExited("east", 1, 0, "killed for memory"))
    assert "killed for memory" in sent(out, "client", m.IslandLost)[0].error.message
    world.form("west")
    world.close(executor_of("west"), "connection reset")
    world.say("worker-west-0", m.Ping(1))
    out = world.wait(0.6)
    assert "connection reset" in sent(out, "client", m.IslandLost)[0].error.message
    assert sent(out, "worker-west-0") == [m.StopExecutor("west", 1)]


def test_executors_that_found_other_devices_end_their_incarnation() -> None:
    world = World()
    world.join("east")
    out = world.ready("east", devices=3)
    assert "found 3 devices, its worker announced 4" in refused(out).reason
    assert sent(out, "worker-east-0") == [m.StopExecutor("east", 1)]


def test_an_island_that_does_not_form_in_time_begins_again() -> None:
    world = World()
    world.join("east", 0, hosts=2)
    world.join("east", 1, hosts=2)
    world.ready("east", 0)
    stopped = []
    for _ in range(301):
        for peer in ("worker-east-0", "worker-east-1", executor_of("east", 0)):
            world.say(peer, m.Ping(1))
        stopped += sent(world.wait(1.0), "worker-east-1", m.StopExecutor)
    assert stopped == [m.StopExecutor("east", 1)]
    assert "executor of host 1" in world.core.cluster.islands["east"].cause


def test_executors_know_themselves_and_whom_they_share_plans_with() -> None:
    world = World()
    for island in ("east", "north", "west"):
        world.form(island)
    world.connect()
    world.slice("client", 1, 4, island="east")
    world.slice("client", 2, 4, island="west")
    out = world.plan("client", 1, "east", "west")
    messages = sent(out, executor_of("east"))
    assert [entry.island for entry in messages[0].islands] == ["east", "west"]
    assert [type(message) for message in messages[1:]] == [m.RegisterComputation, m.RegisterPart]
    assert not sent(world.plan("client", 2, "east", "west"), executor_of("east"), m.Directory)
    out = world.say("worker-west-0", m.ExecutorExited("west", 1, 0, "exit code 1"))
    assert sent(out, executor_of("east"), m.IslandLost)
    assert not sent(out, executor_of("north"))


def test_executors_get_the_access_list_when_they_come_and_when_it_changes() -> None:
    world = World()
    access = m.AccessList(b"secret")
    world.handle(AccessChanged(access))
    world.join("east")
    out = world.say(executor_of("east"), hello("executor"))
    assert [type(message) for message in sent(out, executor_of("east"))] == [m.Welcome, m.AccessList]
    newer = m.AccessList(b"newer")
    assert world.handle(AccessChanged(newer)) == [Send(executor_of("east").encode(), newer)]


def test_draining_lets_runs_end_and_takes_no_more() -> None:
    world = World()
    world.form("east")
    session = world.connect()
    world.slice("client", 1, 4)
    world.plan("client", 1, "east")
    world.start("client", 1, 1)
    assert world.handle(Drain()) == []
    [failed] = sent(world.start("client", 2, 1), "client")
    assert "takes no new runs: it is shutting down" in failed.error.message
    assert refused(world.say("other", hello("client"))).kind == "ConnectError"
    out = world.say(executor_of("east"), m.PartsFinished(((session, 1),)))
    assert sent(out, "client", m.RunsFinished) == [m.RunsFinished((1,))]
    assert sent(out, "client", m.Goodbye)
    assert not sent(out, "worker-east-0", m.StopExecutor)
    assert isinstance(out[-1], Stop)
    assert world.start("client", 3, 1) == []
    assert world.core.next_deadline() is None


def test_draining_stops_at_its_deadline_and_ends_executors_if_asked() -> None:
    world = World()
    world.form("east")
    world.connect()
    world.slice("client", 1, 4)
    world.plan("client", 1, "east")
    world.start("client", 1, 1)
    world.handle(Drain(deadline_s=1.0, stop_workers=True))
    out = world.wait(1.0)
    assert sent(out, "worker-east-0", m.StopExecutor) == [m.StopExecutor("east", 1)]
    assert out[-1] == Stop("1 runs were not over after 1 s")


def test_a_stopped_executor_is_vouched_for_and_its_wait_is_listed() -> None:
    world = World()
    world.form("east")
    executor = executor_of("east")
    world.say("worker-east-0", m.ExecutorPaused("east", 1, 0, True))
    for _ in range(60):
        world.wait(1.0)
        world.say("worker-east-0", m.Ping(1))
    assert world.core.cluster.islands["east"].state is State.FORMED
    [wait] = world.core.waits(world.now)
    assert "executor of host 0 is stopped (SIGSTOP)" in wait.reason
    assert wait.since_s == 60.0
    world.say("worker-east-0", m.ExecutorPaused("east", 1, 0, False))
    assert not world.core.waits(world.now)
    for _ in range(12):
        world.wait(1.0)
        world.say("worker-east-0", m.Ping(1))
    assert world.core.cluster.islands["east"].state is not State.FORMED, f"{executor} was silent for too long"
