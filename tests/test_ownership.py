"""A session reaches the devices of its own slices, whatever its messages say (A-1, A-2): the scheduler's core alone."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from pathway.dataflow.layout import Aval, Layout, Sharding
from pathway.dataflow.plan import Edge, Execute, Gang, Part
from pathway.errors import PermissionDeniedError, ProtocolError
from pathway.sched.clients import Limits
from pathway.sched.core import SchedulerCore, SchedulerSettings
from pathway.sched.events import Close, MessageReceived, Send
from pathway.sched.ownership import check_reach, reach_of_plan, within
from pathway.sched.sessions import UsedNumbers
from pathway.transport import messages as m
from pathway.version import PROTOCOL_VERSION, __version__

ALICE, MALLORY = b"alice", b"mallory"


def layout(*devices: int) -> Layout:
    return Layout(Aval((8,), "float32"), Sharding((("data", len(devices)),), (("data",),)), devices)


def part(island: str, *devices: int, **more: Any) -> Part:
    steps = (Execute(0, "c", devices, (0,), (1,)),)
    slots = more.pop("slots", (layout(*devices), layout(*devices)))
    return Part("plan", island, "cpu", slots, (0,), ((0, 1),), (Gang(steps),), **more)


def payload(part: Part, incarnation: int = 1, computations: tuple[str, ...] = ()) -> m.PartPayload:
    return m.PartPayload(part.island, incarnation, computations, msgspec.msgpack.encode(part))


class Cluster:
    """A scheduler's core with islands of one host and four devices."""

    def __init__(self, *islands: str, limits: Limits | None = None) -> None:
        self.core = SchedulerCore(SchedulerSettings(limits=limits or Limits()), random.Random(5), 0.0)
        for name in islands:
            worker, executor = f"worker {name}".encode(), f"executor {name}".encode()
            self.hello(worker, "worker")
            self.say(worker, m.HostJoined(name, 1, 0, 4, "cpu", name, 1, "127.0.0.1:1"))
            self.hello(executor, "executor")
            self.say(executor, m.ExecutorReady(name, 1, 0, f"tcp://127.0.0.1:{len(name)}", "cpu", 4, 2))

    def say(self, peer: bytes, message: m.Message) -> list[Any]:
        return [
            instruction.message if isinstance(instruction, Send) else instruction
            for instruction in self.core.handle(MessageReceived(peer, message), 1.0)
        ]

    def hello(self, peer: bytes, role: str) -> list[Any]:
        return self.say(peer, m.Hello(PROTOCOL_VERSION, __version__, role))

    def slice(self, peer: bytes, number: int, devices: int, island: str = "") -> m.SliceBound:
        replies = self.say(peer, m.RequestSlice(number, devices, (("data", devices),), island))
        [bound] = [reply for reply in replies if isinstance(reply, m.SliceBound)]
        return bound


def two_clients() -> tuple[Cluster, m.SliceBound, m.SliceBound]:
    cluster = Cluster("east", "west")
    cluster.hello(ALICE, "client")
    cluster.hello(MALLORY, "client")
    return cluster, cluster.slice(ALICE, 1, 2, "east"), cluster.slice(MALLORY, 1, 2, "east")


def run(number: int, plan: int, parts: int = 1) -> m.StartRun:
    return m.StartRun(number, plan, 1, (msgspec.Raw(msgspec.msgpack.encode([])),) * parts)


# -- reading plans ----------------------------------------------------------------------------------------------------


def edge(source: str, target: str, target_device: int) -> Edge:
    return Edge(0, source, target, 1, 2, layout(0), layout(target_device))


def test_a_plan_reaches_what_its_steps_values_and_edges_name() -> None:
    parts = (
        payload(part("east", 0, slots=(layout(1), layout(2)), edges_out=(edge("east", "west", 3),))),
        payload(part("west", 2, slots=(layout(2),) * 3, edges_in=(edge("east", "west", 3),))),
    )
    assert reach_of_plan(parts) == {"east": {0, 1, 2}, "west": {2, 3}}


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ([m.PartPayload("east", 1, (), b"garbage")], "not well-formed"),
        ([m.PartPayload("east", 1, (), b"")], "not well-formed"),
        ([m.PartPayload("west", 1, (), msgspec.msgpack.encode(part("east", 0)))], "says that it is for east"),
        ([payload(part("east", 0, edges_out=(edge("east", "west", 0),)))], "on which the plan has no part"),
    ],
)
def test_parts_that_are_none_are_refused(parts: list[m.PartPayload], complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        reach_of_plan(parts)


def test_what_is_held_is_reached_and_no_more() -> None:
    held = {"east": frozenset({0, 1})}
    for reach in ({"east": frozenset({0, 1})}, {"east": frozenset({1})}, {}):
        check_reach(reach, held, "it")
        assert within(reach, held)
    for reach in ({"east": frozenset({1, 2})}, {"west": frozenset({0})}, {"west": frozenset()}):
        with pytest.raises(PermissionDeniedError, match=r"it names .* which no slice of this session has"):
            check_reach(reach, held, "it")
        assert not within(reach, held)


# -- the core ---------------------------------------------------------------------------------------------------------


def test_a_plan_on_somebody_elses_devices_is_refused() -> None:
    cluster, alice, mallory = two_clients()
    assert not set(alice.devices) & set(mallory.devices)
    own = cluster.say(ALICE, m.RegisterPlan(1, "own", (payload(part("east", *alice.devices)),)))
    assert [type(message) for message in own] == [m.RegisterPart]
    thefts = (part("east", *alice.devices), part("east", mallory.devices[0], alice.devices[0]), part("west", 0))
    for number, stolen in enumerate(thefts, 1):
        [failed] = cluster.say(MALLORY, m.RegisterPlan(number, "theft", (payload(stolen),)))
        assert isinstance(failed, m.PlanFailed)
        assert failed.error.kind == "PermissionDeniedError"
    [refused] = cluster.say(MALLORY, run(1, 1))
    assert isinstance(refused, m.RunFailed)
    assert refused.error.kind == "PermissionDeniedError"
    assert [type(message) for message in cluster.say(ALICE, run(1, 1))] == [m.StartPart]


def test_an_edge_to_an_island_without_a_slice_is_refused() -> None:
    cluster, alice, _ = two_clients()
    leak = part("east", *alice.devices, edges_out=(edge("east", "west", 0),))
    for parts in ((payload(leak),), (payload(leak), payload(part("west", 0)))):
        [failed] = cluster.say(ALICE, m.RegisterPlan(1, "leak", parts))
        assert isinstance(failed, m.PlanFailed)


def test_a_buffer_on_somebody_elses_devices_ends_the_connection() -> None:
    cluster, alice, _ = two_clients()
    put = cluster.say(ALICE, m.PutBuffer(1, "east", 1, layout(*alice.devices), b"x" * 32))
    assert [type(message) for message in put] == [m.PutOnIsland]
    [closed] = cluster.say(MALLORY, m.PutBuffer(1, "east", 1, layout(*alice.devices), b"x" * 32))
    assert isinstance(closed, Close)
    assert closed.refused is not None
    assert closed.refused.kind == "PermissionDeniedError"
    assert closed.peer == MALLORY
    assert [type(message) for message in cluster.say(ALICE, m.ReleaseBuffers("east", 1, (1,)))] == [m.FreeBuffers]


def test_a_plan_takes_no_runs_once_its_slice_is_released() -> None:
    cluster, alice, _ = two_clients()
    second = cluster.slice(ALICE, 2, 2, "west")
    for number, bound in ((1, alice), (2, second)):
        cluster.say(ALICE, m.RegisterPlan(number, f"plan {number}", (payload(part(bound.island, *bound.devices)),)))
    cluster.say(ALICE, m.ReleaseSlice(1))
    [refused] = cluster.say(ALICE, run(1, 1))
    assert isinstance(refused, m.RunFailed)
    assert (refused.error.kind, refused.error.message) == ("SliceError", "slice 1 was released")
    assert [type(message) for message in cluster.say(ALICE, run(2, 2))] == [m.StartPart]


def test_the_directory_tells_the_key_of_each_executor_and_the_status_does_not() -> None:
    cluster = Cluster("east")
    key, executor = "k" * 40, b"executor of host 0"
    cluster.hello(b"worker", "worker")
    cluster.say(b"worker", m.HostJoined("north", 1, 0, 4, "cpu", "north", 1, "127.0.0.1:1"))
    hello = m.Hello(PROTOCOL_VERSION, __version__, "executor")
    cluster.core.handle(MessageReceived(executor, hello, key), 1.0)
    cluster.say(executor, m.ExecutorReady("north", 1, 0, "tcp://127.0.0.1:9", "cpu", 4, 2))
    [_, directory] = cluster.hello(ALICE, "client")
    assert {entry.island: entry.hosts for entry in directory.islands} == {
        "east": ("tcp://127.0.0.1:4",),
        "north": (f"tcp://127.0.0.1:9#{key}",),
    }
    assert key not in str(cluster.core.status(1.0))


def test_a_session_is_resumed_by_the_key_that_opened_it() -> None:
    cluster = Cluster()
    alice, mallory = "a" * 40, "m" * 40

    def hello(peer: bytes, key: str, resume: int = 0, token: int = 0) -> Any:
        message = m.Hello(PROTOCOL_VERSION, __version__, "client", "", resume, token)
        return cluster.core.handle(MessageReceived(peer, message, key), 1.0)[0]

    welcome = hello(ALICE, alice).message
    stolen = hello(MALLORY, mallory, welcome.session, welcome.token)
    assert isinstance(stolen, Close)
    assert stolen.refused == m.Refused("PermissionDeniedError", "the session does not belong to this connection")
    guessed = hello(b"another", alice, welcome.session, welcome.token + 1)
    assert isinstance(guessed, Close)
    resumed = hello(b"again", alice, welcome.session, welcome.token)
    assert isinstance(resumed, Close)  # of the connection that had it
    assert resumed.peer == ALICE


def test_guessed_numbers_reach_nothing_of_anybody_else() -> None:
    """mallory says all that a client can about the numbers that alice has, of slices, plans, runs and buffers."""
    cluster, alice, _ = two_clients()
    own = payload(part("east", *alice.devices))
    cluster.say(ALICE, m.RegisterPlan(1, "own", (own,)))
    cluster.say(ALICE, m.PutBuffer(5, "east", 1, layout(*alice.devices), b"x" * 32))
    cluster.say(ALICE, run(1, 1))
    [session] = [one for one in cluster.core.clients.sessions.values() if one.peer == ALICE]
    before = (dict(session.plans), dict(session.runs), dict(session.slices), session.last_run)
    guesses = [m.CancelRun(1), m.ReleasePlan(1), m.ReleaseSlice(1), m.ReleaseBuffers("east", 1, (5,)), run(1, 1)]
    for guess in guesses:
        for answer in cluster.say(MALLORY, guess):
            assert getattr(answer, "session", session.id + 1) != session.id, answer  # nothing in alice's name
    assert before == (dict(session.plans), dict(session.runs), dict(session.slices), session.last_run)


def test_a_plan_number_is_used_once() -> None:
    """Executors keep what came first under a number: what came later would be checked, and the first would run."""
    cluster, alice, _ = two_clients()
    second = cluster.slice(ALICE, 2, 2, "west")
    there = payload(part("west", *second.devices))
    first = m.RegisterPlan(1, "first", (payload(part("east", *alice.devices)),))
    assert [type(message) for message in cluster.say(ALICE, first)] == [m.RegisterPart]
    assert cluster.say(ALICE, first) == []  # sent again after a resume
    cluster.say(ALICE, m.ReleaseSlice(1))
    for _ in range(2):
        [failed] = cluster.say(ALICE, m.RegisterPlan(1, "second", (there,)))
        assert isinstance(failed, m.PlanFailed)
        assert failed.error.kind == "ProtocolError"
        [refused] = [one for one in cluster.say(ALICE, run(1, 1)) if isinstance(one, m.RunFailed)] or [None]
        cluster.say(ALICE, m.ReleasePlan(1))
    assert refused is None  # run 1 was refused before
    numbers = UsedNumbers()
    assert [numbers.use(number) for number in (1, 3, 2, 3, 1, 4, 0, -1, 2, 5)] == [
        *(True, True, True, False, False, True, False, False, False, True),
    ]
    assert sum(numbers.use(10 + 2 * number) for number in range(20_000)) == UsedNumbers.MOST_APART


def test_a_session_keeps_so_many_bytes_of_programs() -> None:
    cluster = Cluster("east", limits=Limits(computation_bytes_per_session=100))
    cluster.hello(ALICE, "client")
    bound = cluster.slice(ALICE, 1, 2)
    for key, nbytes in (("a", 60), ("b", 60), ("c", 40)):
        cluster.say(ALICE, m.RegisterComputation(key, b"", b"x" * nbytes))
    own = part("east", *bound.devices)
    for number, key, fails in ((1, "a", False), (2, "b", True), (3, "c", False)):
        answers = cluster.say(ALICE, m.RegisterPlan(number, key, (payload(own, computations=(key,)),)))
        errors = [answer.error for answer in answers if isinstance(answer, m.PlanFailed)]
        assert bool(errors) == fails
        assert all(error.kind == "LimitError" and "max_program_mib_per_session" in error.message for error in errors)


def test_limits_are_named_by_their_settings() -> None:
    cluster = Cluster("east", limits=Limits(sessions=1, plans_per_session=2))
    cluster.hello(ALICE, "client")
    [refused] = cluster.hello(MALLORY, "client")
    assert isinstance(refused, Close)
    assert refused.refused == m.Refused("LimitError", "the scheduler has 1 sessions, which is its limit (max_sessions)")
    bound = cluster.slice(ALICE, 1, 2)
    for number in (1, 2):
        [sent] = cluster.say(ALICE, m.RegisterPlan(number, "plan", (payload(part("east", *bound.devices)),))) or [None]
        assert not isinstance(sent, m.PlanFailed)
    [failed] = cluster.say(ALICE, m.RegisterPlan(3, "plan", (payload(part("east", *bound.devices)),)))
    assert isinstance(failed, m.PlanFailed)
    assert (failed.error.kind, failed.error.message) == (
        "LimitError",
        "the session has 2 plans, which is the limit (max_plans_per_session)",
    )
    cluster.say(ALICE, m.ReleasePlan(1))
    assert cluster.say(ALICE, m.RegisterPlan(3, "plan", (payload(part("east", *bound.devices)),)))
    cluster.say(ALICE, m.Goodbye())
    [welcome, _] = cluster.hello(MALLORY, "client")
    assert isinstance(welcome, m.Welcome)
