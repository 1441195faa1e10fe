"""Hostile input to what decodes and what decides, in this process: nothing but a refusal ever comes of it."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from pathway.dataflow.layout import Aval, Layout, Sharding
from pathway.dataflow.script import Script
from pathway.errors import PermissionDeniedError, ProtocolError
from pathway.sched.events import Send
from pathway.transport import messages as m
from pathway.transport.bulklink import BULK, BulkLink, TransferMemory
from pathway.transport.permissions import MAY_SEND_TO_SCHEDULER, admit_to_scheduler
from tests.hostile import NUMBERS, Hostile
from tests.hostile_peers import bulk
from tests.sched_world import World, empty_part, executor_of, hello

SOAK = 20
"""So many times as much in the long run."""


def in_two_sizes(*counts: int) -> Any:
    return pytest.mark.parametrize(
        "count", [*counts, *(pytest.param(SOAK * count, marks=pytest.mark.soak) for count in counts)]
    )


@in_two_sizes(36_000)
@pytest.mark.timeout(600)
def test_frames(count: int) -> None:
    hostile = Hostile(seed=11)
    understood = 0
    for _ in range(count):
        frame = hostile.frame()
        try:
            messages = m.decode(frame)
        except ProtocolError:
            continue
        understood += 1
        m.encode(messages)  # whoever passes it on can
    assert count / 20 < understood < count / 2


# -- bulk -------------------------------------------------------------------------------------------------------------


class Link:
    """A link to an executor, as its peer socket has one, without the socket."""

    def __init__(self, memory: TransferMemory) -> None:
        self.answers = 0
        self.came = 0
        self.bulk = BulkLink(self._post, lambda message, blob: self._post(message), memory, "router", "dealer")

    def _post(self, message: Any) -> None:
        self.answers += 1

    def received(self, frames: tuple[bytes, ...]) -> None:
        messages = m.decode(frames[0])
        for position, message in enumerate(messages):
            blob = frames[1] if position == len(messages) - 1 and len(frames) > 1 else None
            if type(message) in BULK:
                self.bulk.received(message, blob)
            elif isinstance(message, m.PutShard):
                self.bulk.receiver.header(
                    message.transfer, message.nbytes, blob, self._took, checksum_given=message.checksum,
                    damaged=lambda given, found: None, session=message.session,
                )  # fmt: skip

    def _took(self, data: Any) -> None:
        self.came += 1


@in_two_sizes(8_000)
@pytest.mark.timeout(600)
def test_bulk(count: int) -> None:
    """What is announced and never sent, sent and never announced, damaged, doubled, out of order: one link each."""
    hostile, memory = Hostile(seed=12), TransferMemory()
    tracemalloc.start()
    try:
        sizes, came, refused = [], 0, 0
        link = Link(memory)
        for number in range(count):
            try:
                link.received(bulk(hostile, 1))
            except ProtocolError:
                refused += 1
                came += link.came
                link.bulk.close()
                link = Link(memory)
            if number in (count // 2, count - 1):
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
        memory.close()
    assert came > count / 50, "nothing that came was taken"
    assert refused > count / 10
    assert sizes[1] - sizes[0] < 1 << 20, sizes


# -- the scheduler's core ---------------------------------------------------------------------------------------------


class Mischief:
    """What clients ask for that is nearly right, executors that report what is not so, and administrators."""

    def __init__(self, world: World, hostile: Hostile) -> None:
        self.world = world
        self.hostile = hostile
        self.started = 0
        self.executors = [executor_of("east"), executor_of("west", 0), executor_of("west", 1)]

    def say(self, peer: str, message: m.Message) -> None:
        """As the daemon's router would have it: checked by the sender's role first."""
        known = self.world.core.peers.get(peer.encode())
        if known is not None:
            try:
                admit_to_scheduler(known.hello, None, None)(message)
            except PermissionDeniedError:
                return
        out = self.world.say(peer, message)
        self.started += sum(isinstance(one, Send) and isinstance(one.message, m.StartPart) for one in out)

    def step(self) -> None:
        draw = self.hostile.random
        chance = draw.random()
        if chance < 0.2:
            executor = draw.choice(self.executors)
            if self.world.core.peers.get(executor.encode()) is not None:
                self.say(executor, self.report())
        elif chance < 0.9:
            client = f"mallory{draw.randrange(3)}"
            peer = self.world.core.peers.get(client.encode())
            if peer is None:
                self.world.say(client, hello("client", name=client, weight=draw.choice((0.0, 2.0, float("nan")))))
            else:
                self.say(client, self.request(peer.session))
        elif chance < 0.905:
            self.order()
        elif chance < 0.93:
            role = draw.choice(("client", "observer", "worker", "executor", "admin", "peer", ""))
            stranger = f"stranger-{draw.randrange(4)}"
            if self.world.core.peers.get(stranger.encode()) is None:
                self.world.say(stranger, hello(role))
            else:
                kinds = sorted(MAY_SEND_TO_SCHEDULER["worker"] | {m.ExecutorReady, m.RequestSlice}, key=str)
                self.say(stranger, self.hostile.message(draw.choice(kinds)))
        else:
            self.world.wait(draw.choice((0.1, 0.1, 0.5)))
            for peer in ("honest", *self.executors, "worker-east-0", "worker-west-0", "worker-west-1"):
                self.world.say(peer, m.Ping(1))

    def order(self) -> None:
        draw = self.hostile.random
        if self.world.core.peers.get(b"admin") is None:
            self.world.say("admin", hello("admin"))
            return
        name = draw.choice(("mallory0", "mallory1", "nobody"))
        drain = m.DrainIsland(1, "west", draw.random() < 0.3)
        weight = m.SetWeight(1, name, self.hostile.value(float), self.hostile.number())
        self.say("admin", draw.choice((weight, drain, m.KillSession(1, name))))

    def report(self) -> m.Message:
        draw, runs = self.hostile.random, [
            (session.id, run) for session in self.world.core.clients.sessions.values() for run in session.runs
        ]  # fmt: skip

        def part() -> tuple[int, int]:
            """Of somebody who means harm: an executor's word on its own island's runs is believed."""
            if runs and draw.random() < 0.8:
                return draw.choice(runs)
            return draw.choice(NUMBERS), self.hostile.number()

        some = tuple(part() for _ in range(draw.randrange(4)))
        error = self.hostile.value(m.PartFailed).error
        match draw.randrange(6):
            case 0 | 1:
                return m.PartsFinished(some, self.hostile.number(), self.hostile.value(m.PartsFinished).part_us)
            case 2:
                return m.PartsLate(some)
            case 3:
                return m.PartFailed(*part(), error)
            case 4:
                return m.PartRefused(part()[0], draw.randrange(9), error)
            case _:
                return self.hostile.message(m.ExecutorReport)

    def request(self, session: Any) -> m.Message:
        draw, reach = self.hostile.random, session.reach()
        islands = sorted(reach) or ["east", "west"]
        island = draw.choice(islands if draw.random() < 0.95 else ["east", "west", "north"])
        number, buffer = draw.randrange(1, 4), draw.randrange(1, 9)
        plan = session.plan_numbers._up_to
        devices = tuple(sorted(reach.get(island, ())))[: draw.randrange(1, 3)] if draw.random() < 0.97 else (0, 3)
        mesh = (("d", len(devices)),)
        layout = Layout(Aval((draw.choice((0, 1, 4, 7)),), "float32"), Sharding(mesh, (("d",),)), devices)
        incarnation = self.world.core.cluster.islands["east"].incarnation
        chosen = draw.choice(([island], islands, [*islands, "east"]))
        payloads = tuple(m.PartPayload(each, incarnation, (), empty_part(each)) for each in chosen)
        if not reach and draw.random() < 0.8:
            return m.RequestSlice(number, draw.randrange(1, 3), (), draw.choice(("", "east", "west")), shared=True)
        options: list[Callable[[], m.Message]] = [
            lambda: m.RequestSlice(number, draw.randrange(4), (), island, shared=True, wait=draw.random() < 0.5),
            lambda: m.ReleaseSlice(number),
            lambda: m.RegisterPlan(plan + draw.choice((0, 1, 1, 1, 5)), "plan", payloads),
            lambda: m.StartRun(
                session.last_run + draw.choice((0, 1, 1, 1, 9)), plan, buffer * 100, (Raw(b"\x90"),) * len(chosen)
            ),
            lambda: m.PutBuffer(buffer, island, incarnation, layout, draw.choice((None, b"1234"))),
            lambda: m.AssembleBuffer(buffer, island, incarnation, layout, (1,) * draw.choice((len(devices), 1))),
            lambda: m.ReleaseBuffers(island, incarnation, (buffer, self.hostile.number())),
            lambda: m.CancelRun(session.last_run - draw.randrange(4)),
            lambda: m.ReleasePlan(plan),
            lambda: m.AskMemory(buffer, plan),
            lambda: m.RegisterScript(plan + 1, "script", msgspec.msgpack.encode(self.hostile.value(Script))),
            lambda: m.StartScript(session.last_run + 1, plan, buffer * 100, (1, b"1234")[: draw.randrange(3)]),
            lambda: m.StatusRequest(1),
            lambda: m.RegisterComputation(self.hostile.text(), b"", self.hostile.noise()),
            lambda: self.hostile.message(draw.choice(sorted(MAY_SEND_TO_SCHEDULER["client"], key=str))),
        ]
        return draw.choice(options)()


@in_two_sizes(4_000)
@pytest.mark.timeout(600)
def test_the_scheduler(count: int) -> None:
    """`World` validates the core after every event. When those who mean harm have gone, nothing of theirs is left."""
    started = 0
    for seed in range(count // 2_000):
        hostile = Hostile(seed, texts=("east", "west", "key", "d"))
        world = World()
        world.form("east")
        world.form("west", hosts=2, devices=2)
        honest = world.connect("honest")
        hostile.numbers = [1, 2, 3, 100, honest]
        world.slice("honest", 1, 2, island="east", shared=True)
        world.plan("honest", 1, "east")
        mischief = Mischief(world, hostile)
        for _ in range(2_000):
            mischief.step()
        started += mischief.started
        world.core.status(world.now)
        for peer in [key.decode() for key in world.core.peers]:
            if peer.startswith(("mallory", "stranger", "admin")):
                world.close(peer)
        for _ in range(30):
            world.wait(0.5)
            for peer in ("honest", *mischief.executors, "worker-east-0", "worker-west-0", "worker-west-1"):
                world.say(peer, m.Ping(1))
        assert set(world.core.clients.sessions) == {honest}
        assert world.core.clients.lanes.active == 0
        assert world.core.clients.plans.computation_count == 1
        world.start("honest", 1, 1)
        assert world.core.clients.lanes.active == 1
        world.say(executor_of("east"), m.PartsFinished(((honest, 1),)))
        assert world.core.clients.lanes.active == 0
    assert started > count // 1_000, "the mischief does not get far"
