"""Admission by memory (M-1 to M-5, B-1, B-2, V-4): the scheduler's core, with islands that have a limit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw
from sched_world import World, executor_of, sent

from pathway.dataflow.layout import Aval, Layout
from pathway.dataflow.memory import part_memory, size
from pathway.dataflow.plan import Execute, Gang, Part
from pathway.dataflow.tiles import replicated
from pathway.errors import ErrorInfo
from pathway.sched.ledger import Charge, Ledger
from pathway.sched.memory import OVERTAKEN
from pathway.sched.peers import PeerSettings
from pathway.transport import messages as m

MB = 1_000_000
LIMIT = 100
"""Of each device, in MB."""


def layout(megabytes: int, devices: Sequence[int] = (0, 1)) -> Layout:
    return Layout(Aval((megabytes * MB,), "uint8"), replicated(len(devices), 1), tuple(devices))


def part(
    island: str, arguments: Sequence[int], results: Sequence[int], donates: Sequence[int] = (), first: int = 0
) -> Part:
    """One computation: sizes in MB on each of devices 0 and 1. `first`: the number of its first result."""
    count = len(arguments)
    inputs, outputs = tuple(range(count)), tuple(range(count, count + len(results)))
    step = Execute(0, "key", (0, 1), inputs, outputs, tuple(donates), inputs)
    return Part(
        "plan",
        island,
        "cpu",
        tuple(layout(megabytes) for megabytes in (*arguments, *results)),
        inputs,
        tuple(enumerate(outputs, first)),
        (Gang((step,), arguments=inputs),),
        names=("work",),
        sources=("train.py:12 in step",),
    )


class MemoryWorld(World):
    """Islands of two devices of 100 MB each. Every session shares both."""

    def __init__(self, *islands: str, temp: int = 0, **settings: Any) -> None:
        patient = PeerSettings(host_silence_s=1e9, executor_silence_s=1e9, lease_s=1e9)
        super().__init__(**{"credits": 4, "peers": patient, **settings})
        self.temp = temp
        self.sessions: dict[str, int] = {}
        self.islands = islands
        for island in islands:
            self.form(island, devices=2, memory_bytes=LIMIT * MB)

    def client(self, name: str, **fields: Any) -> int:
        session = self.sessions[name] = self.connect(name)
        for number, island in enumerate(self.islands, 1):
            self.slice(name, number, 2, island=island, shared=True, **fields)
        return session

    def plan(self, client: str, number: int, *parts: Any, **_: Any) -> list[Any]:
        self.say(client, m.RegisterComputation("key", b"", b"module"))
        payloads = tuple(m.PartPayload(one.island, 1, ("key",), msgspec.msgpack.encode(one)) for one in parts)
        out = self.say(client, m.RegisterPlan(number, f"plan{number}", payloads))
        for one in parts:
            compiled = m.ComputationsCompiled(self.sessions[client], number, (("key", self.temp * MB),))
            out += self.say(executor_of(one.island), compiled)
        return out

    def start(self, client: str, run: int, plan: int, *arguments: Sequence[int], **_: Any) -> list[Any]:
        packed = tuple(Raw(msgspec.msgpack.encode(tuple(buffers))) for buffers in arguments)
        return self.say(client, m.StartRun(run, plan, run * 100, packed))

    def put(self, client: str, buffer: int, megabytes: int, island: str = "east") -> list[Any]:
        return self.say(client, m.PutBuffer(buffer, island, 1, layout(megabytes)))

    def release(self, client: str, *buffers: int, island: str = "east") -> list[Any]:
        return self.say(client, m.ReleaseBuffers(island, 1, buffers))

    def finish(self, client: str, *runs: int, island: str = "east") -> list[Any]:
        session = self.sessions[client]
        return self.say(executor_of(island), m.PartsFinished(tuple((session, run) for run in runs)))

    def reasons(self) -> list[str]:
        return [wait.reason for wait in self.core.waits(self.now)]

    def ledger(self, island: str = "east") -> Ledger:
        lane = self.core.cluster.islands[island].lane
        assert lane is not None
        assert lane.ledger is not None
        return lane.ledger


def starts(out: list[Any], island: str = "east") -> list[int]:
    return [message.run for message in sent(out, executor_of(island), m.StartPart)]


# -- one thing at a time ---------------------------------------------------------------------------------------------


def test_what_a_part_needs() -> None:
    needs = part_memory(part("east", (10, 20), (15,), donates=[0]), {"key": 7 * MB})
    assert needs.peak == {0: (20 + 15 + 7) * MB, 1: (20 + 15 + 7) * MB}
    assert needs.beyond == {0: 12 * MB, 1: 12 * MB}
    assert needs.donated == (0,)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (3_140_000_000, "3.14 GB"), (10**15, "1e+03 TB")]
)
def test_sizes_are_written_for_people(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


def test_one_that_never_can_is_refused_with_the_largest_buffers_and_where_they_are_made() -> None:
    world = MemoryWorld("east", temp=30)
    session = world.client("ann")
    out = world.plan("ann", 1, part("east", (10,), (70,)))
    [failed] = sent(out, "ann", m.PlanFailed)
    assert failed.error.kind == "DeviceMemoryError"
    assert "needs 110 MB on a device of island east, which has 100 MB" in failed.error.message
    assert "70 MB uint8[70000000] of work (train.py:12 in step)" in failed.error.message
    assert "30 MB temporaries of work" in failed.error.message
    assert failed.error.source == "train.py:12 in step"
    out = world.start("ann", 1, 1, [7])
    assert sent(out, "ann") == [m.RunFailed(1, failed.error)]
    # Who was queued to read its result gets the same error.
    assert sent(out, executor_of("east")) == [m.PutOnIsland(session, 100, layout(70), None, failed.error)]


def test_a_run_waits_until_its_plan_is_compiled_since_only_then_its_need_is_known() -> None:
    world = MemoryWorld("east")
    session = world.client("ann")
    world.say("ann", m.RegisterComputation("key", b"", b"module"))
    payload = m.PartPayload("east", 1, ("key",), msgspec.msgpack.encode(part("east", (), (50,))))
    world.say("ann", m.RegisterPlan(1, "plan1", (payload,)))
    assert starts(world.start("ann", 1, 1, [])) == []
    assert world.reasons() == ["its plan is being compiled: only then it is known how much memory it needs"]
    assert starts(world.say(executor_of("east"), m.ComputationsCompiled(session, 1, (("key", 0),)))) == [1]


def test_one_that_can_later_waits_and_says_for_what_on_whom() -> None:
    world = MemoryWorld("east")
    world.client("ann")
    world.client("bob")
    world.plan("ann", 1, part("east", (), (60,)))
    world.plan("bob", 1, part("east", (), (50,)))
    world.plan("bob", 2, part("east", (), (20,)))
    assert starts(world.start("ann", 1, 1, [])) == [1]
    world.finish("ann", 1)
    assert starts(world.start("bob", 1, 1, [])) == []
    assert world.reasons() == ["waits for 50 MB on east, where 40 MB are free; 60 MB held by session ann"]
    world.client("eve")
    world.plan("eve", 1, part("east", (), (30,)))
    assert starts(world.start("eve", 1, 1, [])) == [1]  # others go on
    world.finish("eve", 1)
    world.release("eve", 100)
    assert starts(world.start("bob", 2, 2, [])) == []  # those of its own session stay behind it (O-4)
    assert starts(world.release("ann", 100)) == [1, 2]
    assert world.reasons() == ["1 of its 1 parts are in flight"] * 2


def test_a_release_frees_when_the_runs_in_flight_have_ended() -> None:
    world = MemoryWorld("east")
    world.client("ann")
    world.plan("ann", 1, part("east", (), (40,)))
    world.plan("ann", 2, part("east", (40,), (40,)))
    world.start("ann", 1, 1, [])
    world.start("ann", 2, 2, [100])
    assert world.release("ann", 100)  # read by run 2, which is in flight
    assert starts(world.start("ann", 3, 2, [200])) == []
    world.finish("ann", 1)
    assert world.ledger().used == [80 * MB]
    assert starts(world.finish("ann", 2)) == [3]


def test_a_release_does_not_stand_behind_a_run_that_waits_for_it() -> None:
    world = MemoryWorld("east")
    session = world.client("ann")
    world.plan("ann", 1, part("east", (), (60,)))
    world.start("ann", 1, 1, [])
    world.finish("ann", 1)
    assert starts(world.start("ann", 2, 1, [])) == []
    out = world.release("ann", 100)  # M-5
    assert sent(out, executor_of("east"), m.FreeBuffers) == [m.FreeBuffers(session, (100,))]
    assert starts(out) == [2]
    world.finish("ann", 2)
    world.release("ann", 200)
    world.plan("ann", 2, part("east", (30,), (60,)))
    world.put("ann", 1, 30)
    world.put("ann", 2, 20)
    assert starts(world.start("ann", 3, 2, [1])) == []
    assert world.release("ann", 1) == []  # it reads what is released
    assert starts(world.release("ann", 2)) == [3]


def test_donated_memory_is_not_needed_twice() -> None:
    world = MemoryWorld("east")
    world.client("ann")
    world.plan("ann", 1, part("east", (), (70,)))
    world.plan("ann", 2, part("east", (70,), (70,), donates=[0]))
    world.start("ann", 1, 1, [])
    assert starts(world.start("ann", 2, 2, [100])) == [2]
    assert starts(world.start("ann", 3, 2, [200])) == [3]
    world.finish("ann", 1, 2, 3)
    assert world.ledger().used == world.ledger().settled == [70 * MB]
    world.release("ann", 100, 200, 300)
    assert world.ledger().used == [0]


def test_a_cluster_full_of_one_clients_results_refuses_only_that_client() -> None:
    world = MemoryWorld("east")
    session = world.client("ann")
    world.client("bob")
    world.plan("ann", 1, part("east", (), (30,)))
    world.plan("ann", 2, part("east", (30,), (1,)))
    world.plan("bob", 1, part("east", (), (10,)))
    for run in (1, 2, 3, 4):
        world.start("ann", run, 1, [])
    world.start("ann", 5, 2, [400])
    world.finish("ann", 1, 2, 3)
    assert starts(world.start("bob", 1, 1, [])) == [1]
    world.finish("bob", 1)
    world.release("bob", 100)
    world.wait(1.4)
    out = world.wait(2.0)
    [failed] = sent(out, "ann", m.RunFailed)
    assert (failed.run, failed.error.kind) == (4, "DeviceMemoryError")
    assert "90 MB of that are held by results and arrays of this client" in failed.error.message
    assert "30 MB uint8[30000000] of work (train.py:12 in step)" in failed.error.message
    [spoiled] = sent(out, executor_of("east"), m.PutOnIsland)
    assert (spoiled.session, spoiled.buffer, spoiled.error) == (session, 400, failed.error)
    assert starts(out) == [5]  # which finds the error in its argument
    assert not sent(out, "bob")


def test_a_session_that_releases_in_time_is_not_refused() -> None:
    world = MemoryWorld("east")
    world.client("ann")
    world.plan("ann", 1, part("east", (), (60,)))
    world.start("ann", 1, 1, [])
    world.finish("ann", 1)
    world.start("ann", 2, 1, [])
    assert not sent(world.wait(1.0), "ann", m.RunFailed)
    assert starts(world.release("ann", 100)) == [2]


def test_puts_wait_for_memory_too_and_runs_stay_behind_them() -> None:
    world = MemoryWorld("east")
    world.client("ann")
    world.client("bob")
    world.plan("bob", 1, part("east", (50,), ()))
    assert sent(world.put("ann", 1, 70), executor_of("east"), m.PutOnIsland)
    assert world.put("bob", 1, 50) == []
    assert world.start("bob", 1, 1, [1]) == []
    assert world.reasons() == [
        "waits for 50 MB on east, where 30 MB are free; 70 MB held by session ann",
        "a put of its session before it in the queue of island east",
    ]
    out = world.release("ann", 1)
    assert [type(message) for message in sent(out, executor_of("east"))] == [m.FreeBuffers, m.PutOnIsland, m.StartPart]
    out = world.put("ann", 2, 101)
    assert sent(out, executor_of("east"))[0].error.kind == "DeviceMemoryError"
    world.finish("bob", 1)
    world.release("bob", 1)
    world.put("ann", 3, 60)
    assert world.put("ann", 4, 50) == []
    [refused] = sent(world.wait(4.0), executor_of("east"))
    assert (refused.buffer, refused.error.kind) == (4, "DeviceMemoryError")


def test_buffers_made_of_shards_of_others_keep_them() -> None:
    world = MemoryWorld("east")
    world.client("ann")
    world.put("ann", 1, 60)
    world.say("ann", m.AssembleBuffer(2, "east", 1, layout(60), (1, 1)))
    assert world.ledger().used == [60 * MB]
    world.release("ann", 1)
    assert world.ledger().used == [60 * MB]
    world.release("ann", 2)
    assert world.ledger().used == [0]


def test_a_session_that_ends_gives_everything_back() -> None:
    world = MemoryWorld("east")
    world.client("ann")
    world.client("bob")
    world.plan("ann", 1, part("east", (), (60,)))
    world.plan("bob", 1, part("east", (), (90,)))
    world.put("ann", 1, 20)
    world.start("ann", 1, 1, [])
    assert starts(world.start("bob", 1, 1, [])) == []
    assert starts(world.say("ann", m.Goodbye())) == [1]
    assert world.ledger().used == [90 * MB]


def test_a_lost_island_ends_the_waits_for_its_memory() -> None:
    world = MemoryWorld("east", "west")
    world.client("ann")
    world.put("ann", 1, 90)
    world.plan("ann", 1, part("east", (), (50,)), part("west", (), (50,)))
    assert world.start("ann", 1, 1, [], []) == []
    out = world.close("worker-east-0", "gone")
    assert [message.run for message in sent(out, "ann", m.RunFailed)] == [1]
    assert not world.core.clients.lanes.memory.waiting


def test_what_was_overtaken_often_enough_goes_next() -> None:
    """M-3: a stream of small runs does not starve a large one."""
    world = MemoryWorld("east", credits=8)
    world.client("ann")
    world.client("bob")
    world.plan("ann", 1, part("east", (), (80,)))
    world.plan("bob", 1, part("east", (), (15,)))
    for run in (1, 2):
        world.start("bob", run, 1, [])
        world.release("bob", run * 100)
    world.start("ann", 1, 1, [])
    overtakers = 0
    for run in range(1, 10 * OVERTAKEN):
        world.start("bob", run + 2, 1, [])
        world.release("bob", (run + 2) * 100)
        world.finish("bob", run)
        if ("ann", 1) in running(world):
            break
        overtakers += 1
    assert overtakers <= OVERTAKEN + 8


def running(world: MemoryWorld, island: str = "east") -> set[tuple[str, int]]:
    """(client, run) of what is in flight."""
    lane = world.core.cluster.islands[island].lane
    assert lane is not None
    names = {session: name for name, session in world.sessions.items()}
    return {(names[session], run) for session, run in lane.running}


def test_a_slice_that_was_promised_memory_finds_it() -> None:
    world = MemoryWorld("east")
    world.client("ann", memory_bytes=40 * MB)
    world.client("bob")
    world.plan("ann", 1, part("east", (), (40,)))
    world.plan("bob", 1, part("east", (), (50,)))
    world.plan("bob", 2, part("east", (), (20,)))
    assert starts(world.start("bob", 1, 1, [])) == [1]
    world.finish("bob", 1)
    assert starts(world.start("bob", 2, 2, [])) == []
    assert "40 MB promised to a slice of session ann" in world.reasons()[0]
    assert starts(world.start("ann", 1, 1, [])) == [1]
    assert starts(world.say("ann", m.ReleaseSlice(1))) == []
    assert starts(world.say("ann", m.Goodbye())) == [2]


def test_slices_are_bound_where_their_memory_is() -> None:
    world = World(grace_s=0.0)
    world.form("small", devices=2, memory_bytes=10 * MB)
    world.form("large", devices=2, memory_bytes=50 * MB)
    world.connect()
    [bound] = sent(world.slice("client", 1, 1, shared=True, memory_bytes=20 * MB), "client", m.SliceBound)
    assert bound.island == "large"
    [bound] = sent(world.slice("client", 2, 2, shared=True, memory_bytes=30 * MB), "client", m.SliceBound)
    assert bound.island == "large"
    [refused] = sent(world.slice("client", 3, 2, shared=True, memory_bytes=30 * MB), "client", m.SliceRefused)
    assert "slice 2 of session client holds 2 with 30 MB each" in refused.reason
    [refused] = sent(world.slice("client", 4, 1, memory_bytes=60 * MB), "client", m.SliceRefused)
    assert "1 devices with 60 MB of memory each: no island can ever have them" in refused.reason
    assert "large (2 cpu devices of 50 MB)" in refused.reason


def test_a_question_about_memory_is_answered_when_the_plan_is_compiled() -> None:
    world = MemoryWorld("east", temp=3)
    world.client("ann")
    world.plan("ann", 1, part("east", (), (5,)))
    assert world.say("ann", m.AskMemory(7, 1))[0].message == m.MemoryAnswer(7, (("key", 3 * MB),))
    assert world.say("ann", m.AskMemory(8, 2))[0].message.error.kind == "ProgramError"


def test_blocks_split_where_charges_tell_devices_apart() -> None:
    ledger = Ledger(100, 4)
    both, left = Charge((((0, 1, 2, 3), 10),)), Charge((((0, 1), 5),))
    ledger.add(1, both)
    assert ledger.used == [10]
    ledger.add(1, left)
    assert sorted(ledger.used) == [10, 15]
    ledger.add(1, both, -1)
    ledger.add(1, left, -1)
    assert ledger.used == [0, 0]
    assert sorted(map(ledger.devices_of, range(2))) == [[0, 1], [2, 3]]


# -- random histories ------------------------------------------------------------------------------------------------


@dataclass
class Physical:
    """What lies on a device of an island, from what its leader was told: kept apart from the scheduler's own book."""

    buffers: dict[tuple[int, int], int] = field(default_factory=dict)
    freed: dict[tuple[int, int], int] = field(default_factory=dict)
    spilled: dict[tuple[int, int], int] = field(default_factory=dict)
    running: dict[tuple[int, int], tuple[Part, tuple[int, ...], int]] = field(default_factory=dict)
    temp: int = 0

    def take(self, message: m.Message, parts: dict[tuple[int, int], Part]) -> None:
        match message:
            case m.PutOnIsland(session, buffer, made) if message.error is None:
                self.buffers[session, buffer] = made.shard_nbytes // MB
            case m.StartPart(session, run, plan, first):
                arguments = msgspec.msgpack.decode(message.arguments)
                for buffer in arguments:
                    if (session, buffer) in self.spilled:  # brought back
                        self.buffers[session, buffer] = self.spilled.pop((session, buffer))
                self.running[session, run] = (parts[session, plan], tuple(arguments), first)
            case m.SpillBuffers(session, buffers):
                for buffer in buffers:
                    self.spilled[session, buffer] = self.buffers.pop((session, buffer))
            case m.FreeBuffers(session, buffers):
                for buffer in buffers:
                    self.spilled.pop((session, buffer), None)
                    size = self.buffers.pop((session, buffer), None)
                    if size is not None:
                        self.freed[session, buffer] = size
                    elif any(key[0] == session for key in self.running):
                        self.freed[session, buffer] = 0
            case m.CloseSession(session):
                for table in (self.buffers, self.freed, self.spilled, self.running):
                    for key in [key for key in table if key[0] == session]:
                        del table[key]  # type: ignore[attr-defined]
        self._drop_unread()

    def end(self, session: int, run: int) -> bool:
        """False: it found an error among its arguments."""
        part, arguments, first = self.running.pop((session, run))
        if any((session, buffer) not in self.buffers and (session, buffer) not in self.freed for buffer in arguments):
            self._drop_unread()
            return False
        donated = [arguments[p] for p in part.gangs[0].steps[0].donates]  # type: ignore[union-attr]
        for buffer in donated:
            self.buffers.pop((session, buffer), None)
            self.freed.pop((session, buffer), None)
        for number, slot in part.results:
            if (session, first + number) not in self.freed:
                self.buffers[session, first + number] = part.slots[slot].shard_nbytes // MB
        self._drop_unread()
        return True

    def _drop_unread(self) -> None:
        read = {(key[0], buffer) for key, (_, arguments, _) in self.running.items() for buffer in arguments}
        made = {(key[0], first + n) for key, (part, _, first) in self.running.items() for n, _ in part.results}
        self.freed = {key: size for key, size in self.freed.items() if key in read or key in made}

    @property
    def megabytes(self) -> int:
        beyond = 0
        for part, _, _ in self.running.values():
            beyond += part_memory(part, {"key": self.temp * MB}).beyond[0] // MB
        return sum(self.buffers.values()) + sum(self.freed.values()) + beyond


class History:
    """Clients that start runs on two islands, put, release and go, as `random` says."""

    ISLANDS = ("east", "west")

    def __init__(self, seed: int, spill: bool) -> None:
        self.random = random.Random(seed)
        self.world = MemoryWorld(*self.ISLANDS, temp=self.random.choice([0, 5, 20]), spill=spill, credits=3)
        self.physical = {island: Physical(temp=self.world.temp) for island in self.ISLANDS}
        self.parts: dict[str, dict[tuple[int, int], Part]] = {island: {} for island in self.ISLANDS}
        self.held: dict[str, dict[int, tuple[str, int]]] = {}  # client -> buffer -> (island, size)
        self.plans: dict[str, list[tuple[int, list[Part]]]] = {}
        self.last: dict[str, int] = {}
        self.open_runs: dict[str, set[int]] = {}
        for name in ("ann", "bob", "eve"):
            self.enter(name)

    def enter(self, name: str) -> None:
        session = self.world.client(name)
        self.held[name], self.plans[name], self.last[name], self.open_runs[name] = {}, [], 0, set()
        for number in range(1, 6):
            islands = self.random.choice([("east",), ("west",), ("east", "west")])
            parts: list[Part] = []
            for island in islands:
                arguments = [self.random.choice([10, 30]) for _ in range(self.random.randint(0, 2))]
                results = [self.random.choice([10, 30]) for _ in range(self.random.randint(0, 2))]
                same = arguments[:1] == results[:1] != []
                donates = [0] if same and self.random.random() < 0.5 else []
                made = sum(len(one.results) for one in parts)
                parts.append(part(island, arguments, results, donates, made))
                self.parts[island][session, number] = parts[-1]
            self.take(self.world.plan(name, number, *parts))
            self.plans[name].append((number, parts))

    def take(self, out: list[Any]) -> None:
        for island in self.ISLANDS:
            for message in sent(out, executor_of(island)):
                self.physical[island].take(message, self.parts[island])
            assert self.physical[island].megabytes <= LIMIT, "M-1"
        for name in self.held:
            for message in sent(out, name):
                match message:
                    case m.RunFailed():
                        assert message.error.kind == "DeviceMemoryError"
                        self.open_runs[name].discard(message.run)
                    case m.RunsFinished():
                        self.open_runs[name] -= set(message.runs)
        memory = self.world.core.clients.lanes.memory
        for waiting in memory.waiting.values():
            assert not waiting.needs or not memory._fits(waiting), "a wait for nothing"

    def step(self) -> None:
        name = self.random.choice(list(self.held))
        actions = [self.run, self.run, self.run, self.put, self.release, self.finish, self.finish, self.go]
        self.random.choice(actions)(name)

    def run(self, name: str) -> None:
        number, parts = self.random.choice(self.plans[name])
        arguments, used = [], set()
        for one in parts:
            chosen = []
            for slot in one.arguments:
                wanted = (one.island, one.slots[slot].shard_nbytes // MB)
                fitting = [b for b, what in self.held[name].items() if what == wanted and b not in used]
                if not fitting:
                    return
                chosen.append(self.random.choice(fitting))
                used.add(chosen[-1])
            arguments.append(chosen)
        self.last[name] += 1
        run = self.last[name]
        self.open_runs[name].add(run)
        donated = []
        for one, chosen in zip(parts, arguments, strict=True):
            step = one.gangs[0].steps[0]
            donated += [chosen[position] for position in step.donates]  # type: ignore[union-attr]
        for one in parts:
            for result, slot in one.results:
                self.held[name][run * 100 + result] = (one.island, one.slots[slot].shard_nbytes // MB)
        self.take(self.world.start(name, run, number, *arguments))
        for buffer in donated:  # as clients do: the run may be refused
            island, _ = self.held[name].pop(buffer)
            self.take(self.world.release(name, buffer, island=island))

    def put(self, name: str) -> None:
        self.last[name] += 1
        buffer, island, size = self.last[name] * 100, self.random.choice(self.ISLANDS), self.random.choice([10, 30])
        self.held[name][buffer] = (island, size)
        self.take(self.world.put(name, buffer, size, island))

    def release(self, name: str) -> None:
        if self.held[name]:
            buffer = self.random.choice(list(self.held[name]))
            island, _ = self.held[name].pop(buffer)
            self.take(self.world.release(name, buffer, island=island))

    def finish(self, name: str) -> None:
        island = self.random.choice(self.ISLANDS)
        mine = [key for key in self.physical[island].running if key[0] == self.world.sessions[name]]
        if mine:
            self.finish_part(island, *mine[0])  # in order: a run may read what the one before it makes

    def finish_part(self, island: str, session: int, run: int) -> None:
        if self.physical[island].end(session, run):
            self.take(self.world.say(executor_of(island), m.PartsFinished(((session, run),))))
        else:
            error = ErrorInfo("DeviceMemoryError", "what it reads was refused")
            self.take(self.world.say(executor_of(island), m.PartFailed(session, run, error)))

    def go(self, name: str) -> None:
        if self.random.random() < 0.1:
            self.take(self.world.say(name, m.Goodbye()))
            self.enter(name)

    def drain(self) -> None:
        """Let everything in flight end, and everybody release what they hold: nothing may wait then."""
        for _ in range(1000):
            for island, physical in self.physical.items():
                for session, run in list(physical.running):
                    if (session, run) in physical.running:
                        self.finish_part(island, session, run)
            for name in self.held:
                while self.held[name]:
                    self.release(name)
            self.take(self.world.wait(1.0))
            if not any(self.open_runs.values()):
                break
        assert not any(self.open_runs.values()), self.world.reasons()
        assert not self.world.core.clients.lanes.memory.waiting
        for island in self.ISLANDS:
            ledger = self.world.ledger(island)
            assert not any(ledger.used)
            assert not any(ledger.settled)
            assert not ledger.spilled_bytes


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_never_over_capacity_no_wait_for_nothing_and_none_for_ever(seed: int, spill: bool) -> None:
    history = History(seed, spill)
    for _ in range(80):
        history.step()
    history.drain()
