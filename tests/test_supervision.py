"""What a worker decides: pure, events in and instructions out."""

from __future__ import annotations

from pathway.executor.supervision import (
    REJOIN_S,
    ChildExited,
    CloseLink,
    Exit,
    KillChild,
    LinkFailed,
    LinkLost,
    LinkOpened,
    OpenLink,
    Received,
    Send,
    StartChild,
    StopRequested,
    TerminateChild,
    Tick,
    WorkerCore,
)
from pathway.processes import GRACE_S
from pathway.transport.messages import (
    ExecutorExited,
    FormIsland,
    Goodbye,
    HostJoined,
    Ping,
    Pong,
    Refused,
    StopExecutor,
    Welcome,
)

JOINED = HostJoined("east", 2, 1, 4, "cpu", "node", 17, "127.0.0.1:5000")
WELCOME = Welcome(1, "0", scheduler=5, heartbeat_s=0.5)


def form(incarnation: int) -> FormIsland:
    return FormIsland("east", incarnation, "127.0.0.1:5000", 2, 1)


def exited(incarnation: int, cause: str) -> Send:
    return Send(ExecutorExited("east", incarnation, 1, cause))


def linked(now: float = 0.0) -> WorkerCore:
    core = WorkerCore(JOINED)
    assert core.handle(LinkOpened(WELCOME), now) == [Send(JOINED)]
    return core


def running(incarnation: int = 1) -> WorkerCore:
    core = linked()
    assert core.handle(Received(form(incarnation)), 0.0) == [StartChild(form(incarnation))]
    return core


def test_it_joins_and_starts_what_is_asked_for() -> None:
    core = running()
    assert core.handle(Received(form(1)), 0.1) == []  # said twice


def test_the_end_of_a_child_is_told_and_not_repaired_by_itself() -> None:
    core = running()
    assert core.handle(ChildExited("signal SIGSEGV"), 1.0) == [exited(1, "signal SIGSEGV")]
    assert core.handle(Received(form(2)), 1.1) == [StartChild(form(2))]


def test_a_newer_incarnation_starts_when_the_older_is_reaped() -> None:
    """W-1"""
    core = running()
    assert core.handle(Received(form(2)), 1.0) == [TerminateChild()]
    assert core.handle(ChildExited("signal SIGTERM"), 1.2) == [exited(1, "signal SIGTERM"), StartChild(form(2))]


def test_stopping_is_answered_once_whether_it_ran_or_not() -> None:
    """W-2"""
    core = running()
    assert core.handle(Received(StopExecutor("east", 1)), 1.0) == [TerminateChild()]
    assert core.handle(ChildExited("signal SIGTERM"), 1.1) == [exited(1, "signal SIGTERM")]
    assert core.handle(Received(StopExecutor("east", 1)), 1.2) == [exited(1, "it was not running")]


def test_an_order_to_stop_an_older_one_leaves_the_newer_alone() -> None:
    core = running(2)
    assert core.handle(Received(StopExecutor("east", 1)), 1.0) == [exited(1, "it was not running")]


def test_a_child_that_does_not_end_is_killed_after_the_grace() -> None:
    core = running()
    core.handle(Received(StopExecutor("east", 1)), 1.0)
    assert KillChild() not in core.handle(Tick(), 1.0 + GRACE_S / 2)
    assert KillChild() in core.handle(Tick(), 1.0 + GRACE_S)


def test_it_pings_every_heartbeat() -> None:
    core = linked(now=10.0)
    assert core.next_deadline() == 10.5
    assert core.handle(Tick(), 10.5) == [Send(Ping(1))]
    assert core.handle(Received(Pong(1)), 10.6) == []
    assert core.next_deadline() == 11.0


def test_a_lost_link_ends_the_child_and_a_new_schedulers_first_incarnation_is_another() -> None:
    """W-3"""
    core = running()
    lost = core.handle(LinkLost("closed"), 1.0)
    assert [type(instruction) for instruction in lost] == [CloseLink, TerminateChild, OpenLink]
    assert core.handle(LinkOpened(WELCOME), 1.1) == [Send(JOINED)]
    assert core.handle(Received(form(1)), 1.2) == []  # the old child is on its way out
    assert core.handle(ChildExited("signal SIGTERM"), 1.3) == [StartChild(form(1))]


def test_unreachable_is_tried_again_more_and_more_slowly() -> None:
    core = WorkerCore(JOINED)
    delays = []
    for _ in range(8):
        (again,) = core.handle(LinkFailed("nobody listens", refused=False), 0.0)
        assert isinstance(again, OpenLink)
        delays.append(again.delay_s)
    assert delays == sorted(delays)
    assert delays[-1] == 1.0


def test_a_refusal_ends_the_worker() -> None:
    core = linked()
    assert core.handle(Received(Refused("ConfigError", "island east is complete")), 0.1) == [
        Exit(2, "island east is complete")
    ]
    core = WorkerCore(JOINED)
    assert core.handle(LinkFailed("versions do not match", refused=True), 0.1) == [Exit(2, "versions do not match")]


def test_a_worker_that_was_taken_for_lost_begins_again() -> None:
    core = running()
    out = core.handle(Received(Refused("DisconnectedError", "begin again")), 1.0)
    assert [type(instruction) for instruction in out] == [CloseLink, TerminateChild, OpenLink]


def test_a_worker_that_returns_before_it_was_missed_is_patient() -> None:
    """W-4"""
    core = running()
    core.handle(LinkLost("closed"), 1.0)
    core.handle(ChildExited("signal SIGTERM"), 1.1)
    core.handle(LinkOpened(WELCOME), 1.2)
    refused = Received(Refused("ConfigError", "host 1 has already joined"))
    assert [type(instruction) for instruction in core.handle(refused, 1.3)] == [CloseLink, OpenLink]
    core.handle(LinkOpened(WELCOME), 1.4)
    assert core.handle(refused, 1.0 + REJOIN_S)[-1] == Exit(2, "host 1 has already joined")


def test_stopping_says_goodbye_and_waits_for_the_child() -> None:
    core = running()
    assert core.handle(StopRequested("SIGTERM"), 1.0) == [Send(Goodbye("SIGTERM")), TerminateChild()]
    assert core.handle(Received(form(2)), 1.1) == []
    assert core.handle(ChildExited("exit code 0"), 1.2) == [Exit(0, "SIGTERM")]  # the scheduler has forgotten us


def test_stopping_without_a_child_is_immediate() -> None:
    assert linked().handle(StopRequested("SIGINT"), 1.0) == [Send(Goodbye("SIGINT")), Exit(0, "SIGINT")]
    assert WorkerCore(JOINED).handle(StopRequested("SIGINT"), 1.0) == [Exit(0, "SIGINT")]
