"""Hostile peers against real processes, while an honest client works: nobody crashes, nobody grows, nobody else
notices. Frames go through one real connection at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from msgspec.structs import replace

import pathway as pw
from pathway.dataflow.layout import Aval, Layout, Sharding
from pathway.dataflow.plan import Gang, Part
from pathway.embedded import in_thread
from pathway.observe import fetch_status
from pathway.transport import messages as m
from tests.hostile import Hostile
from tests.hostile_peers import RawSession, bulk, hello, raw, raw_peer, requests

MIB = 1 << 20
DEADLINE_S = 20.0


def status(cluster: Any) -> dict[str, Any]:
    shown: dict[str, Any] = in_thread(fetch_status, cluster.address, 5.0)
    return shown


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def processes(cluster: Any) -> dict[str, int]:
    """The pids of all that listens."""
    found = {"scheduler": cluster.scheduler.pid}
    for island in status(cluster)["islands"]:
        found |= {f"{island['island']}/{host['host']}": host["executor_pid"] for host in island["hosts"]}
    return found


def resident_bytes(pid: int) -> int:
    """What the process has of its own: not counting what it shares."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


class Honest:
    """A client that works on, and compares what it gets with what it should."""

    def __init__(self, address: str) -> None:
        self.done = 0
        self.failure: BaseException | None = None
        self._address = address
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def _work(self) -> None:
        try:
            with pw.Client(self._address) as client:
                east, west = client.slice(1, island="east", shared=True), client.slice(2, island="west", shared=True)
                add = pw.jit(east)(lambda x: x + 1)
                double = pw.jit(west, in_specs=P("data"), out_specs=P("data"))(lambda x: x * 2)
                program = pw.program(lambda x: double(add(x)))
                value = np.arange(40_000, dtype=np.float32)
                while not self._over.is_set():
                    put = client.put(value, east)
                    np.testing.assert_array_equal(pw.get(program(put)), (value + 1) * 2)
                    self.done += 1
        except BaseException as failure:
            self.failure = failure

    def __enter__(self) -> Honest:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60)
        if self.failure is not None:
            raise self.failure


class Attack:
    """One connection after another, each with some frames. `sent` counts them."""

    def __init__(self, address: str, seed: int) -> None:
        self.sent = 0
        self.welcome = 0
        self._address = address
        self._hostile = Hostile(seed, texts=("east", "west", "d"))
        self._session = RawSession(address)
        self._hostile.numbers = [self._session.number, 1, 2, 3]
        islands = self._session.islands
        self._executors = [host for island in islands.values() for host in island.hosts]

    def run(self, frames: int) -> None:
        """So many frames, to executors mostly."""
        until = self.sent + frames
        while self.sent < until:
            self._session.peer.say(m.Ping(1))  # it lives on: executors are told its token
            match self._hostile.random.randrange(10):
                case 0:
                    self._stranger()
                case 1 | 2:
                    self._client()
                case _:
                    self._peer()

    def _peer(self) -> None:
        draw = self._hostile.random
        with raw_peer(draw.choice(self._executors)) as peer:
            if draw.random() < 0.95:
                peer.say(self._session.introduction())
            elif draw.random() < 0.5:
                peer.say(self._session.introduction(session=0, role=draw.choice(("peer", "executor", "client"))))
            for _ in range(draw.choice((1, 4, 16))):
                peer.send(*bulk(self._hostile, self._session.number))
                self.sent += 1
            self.welcome += not peer.outcome()

    def _client(self) -> None:
        session = RawSession(self._address)
        session.slice("east")
        for _ in range(8):
            session.peer.send(requests(self._hostile, session.number))
            self.sent += 1
        session.peer.outcome()
        session.close()

    def _stranger(self) -> None:
        with raw_peer(self._address) as peer:
            if self._hostile.random.random() < 0.7:
                peer.say(hello(self._hostile.random.choice(("observer", "client", "executor", "king"))))
            peer.send(requests(self._hostile, 0))
            self.sent += 1
            peer.outcome()

    def close(self) -> None:
        self._session.close()


@pytest.mark.parametrize("frames", [3_000, pytest.param(60_000, marks=pytest.mark.soak)])
@pytest.mark.timeout(900)
def test_hostile_peers_harm_nobody(cluster: Any, frames: int) -> None:
    before = processes(cluster)
    attack = Attack(cluster.address, seed=21)
    with Honest(cluster.address) as honest:
        attack.run(frames // 2)
        half = {name: resident_bytes(pid) for name, pid in before.items()}
        done = honest.done
        attack.run(frames // 2)
        attack.close()
        assert eventually(lambda: honest.failure is not None or honest.done > done), "the honest client works on"
    assert attack.welcome > 0
    assert processes(cluster) == before, "a process ended"
    grown = {name: resident_bytes(pid) - half[name] for name, pid in before.items()}
    assert all(growth < 16 * MIB for growth in grown.values()), grown
    assert eventually(lambda: not status(cluster)["sessions"]), "nothing is left of anybody"


def layout(*devices: int) -> Layout:
    return Layout(Aval((8,), "float32"), Sharding((("d", len(devices)),), ((),)), devices)


@pytest.mark.parametrize(
    "message",
    [
        m.PutBuffer(1, "east", 1, Layout(Aval((8,), "object"), Sharding((("d", 1),), ((),)), (0,)), b"x" * 64),
        m.PutBuffer(1, "east", 1, Layout(Aval((8,), "float32"), Sharding((("d", 1),), ((), ("x",))), (0,)), None),
        m.PutBuffer(1, "east", 1, Layout(Aval((1 << 40, 1 << 40), "int8"), Sharding((("d", 1),), ()), (0,)), None),
        m.AssembleBuffer(1, "east", 1, layout(0), ()),
    ],
    ids=["dtype", "rank", "size", "sources"],
)
def test_a_buffer_that_cannot_be_ends_its_senders_connection(cluster: Any, message: m.Message) -> None:
    before = processes(cluster)
    session = RawSession(cluster.address)
    devices = session.slice("east").devices
    session.peer.say(replace(message, layout=replace(message.layout, devices=devices)))  # type: ignore[attr-defined]
    assert session.peer.outcome().startswith("ProtocolError"), session.peer.refused
    session.close()
    assert processes(cluster) == before


def test_a_run_that_cannot_be_fails_alone(cluster: Any) -> None:
    """What a client writes where arguments should be is read by executors alone."""
    before = processes(cluster)
    session = RawSession(cluster.address)
    bound = session.slice("west")
    here = layout(*bound.devices)
    part = Part("plan", "west", "cpu", (here,), (0,), ((0, 0),), (Gang((), arguments=(0,)),))
    session.peer.say(m.RegisterPlan(1, "plan", (m.PartPayload("west", 1, (), msgspec.msgpack.encode(part)),)))
    session.peer.say(m.PutBuffer(7, "west", 1, here, bytes(32)))
    wrong = [raw(value) for value in ([], [7, 7], None, "x", [None], [[7]], [7.5], {"a": 7}, [b"short"], [99], [-1])]
    for number, arguments in enumerate([*wrong, raw([7]), raw([7])], 1):
        first = 7 if number == len(wrong) + 2 else 100 * number  # the last one names as its result what is there
        session.peer.say(m.StartRun(number, 1, first, (arguments,)))
    outcomes = {}
    while len(outcomes) < len(wrong) + 2:
        match session.peer.until(m.RunFailed, m.RunsFinished, m.PlanFailed):
            case m.RunFailed(number, error):
                outcomes[number] = error.kind
            case m.RunsFinished(numbers):
                outcomes |= dict.fromkeys(numbers, "")
            case failed:
                raise AssertionError(failed)
    assert outcomes.pop(len(wrong) + 1) == "", "the run that is right"
    assert set(outcomes.values()) <= {"ProtocolError", "DeletedError", "ExecutionError"}
    session.close()
    assert processes(cluster) == before
