"""A scheduler's core with peers that speak to it, for the tests of its subjects. `validate` follows every event."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from msgspec import Raw

from pathway.dataflow.plan import Part
from pathway.sched.core import SchedulerCore, SchedulerSettings
from pathway.sched.events import Close, Instruction, MessageReceived, PeerClosed, Record, Send, Tick
from pathway.sched.validate import validate
from pathway.transport import messages as m
from pathway.version import PROTOCOL_VERSION

NO_ARGUMENTS = Raw(b"\x90")


def hello(role: str, **fields: Any) -> m.Hello:
    return m.Hello(PROTOCOL_VERSION, "test", role, **fields)


class World:
    def __init__(self, **settings: Any) -> None:
        self.now = 0.0
        self.core = SchedulerCore(SchedulerSettings(**settings), random.Random(0), self.now)

    def handle(self, event: Any) -> list[Instruction]:
        out = self.core.handle(event, self.now)
        validate(self.core)
        return unwrapped(out)

    def say(self, peer: str, message: m.Message) -> list[Instruction]:
        return self.handle(MessageReceived(peer.encode(), message))

    def close(self, peer: str, reason: str = "") -> list[Instruction]:
        return self.handle(PeerClosed(peer.encode(), reason))

    def wait(self, seconds: float) -> list[Instruction]:
        """Let the time pass, with every deadline on the way."""
        out: list[Instruction] = []
        end = self.now + seconds
        while (deadline := self.core.next_deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            out += self.handle(Tick())
        self.now = end
        return out

    # -- what comes up again and again --------------------------------------------------------------------------

    def joined(self, island: str, host: int = 0, hosts: int = 1, devices: int = 4, **fields: Any) -> m.HostJoined:
        given = {
            "platform": "cpu",
            "hostname": f"{island}-{host}",
            "pid": 7,
            "coordinator_address": f"{island}-{host}:1",
        }
        return m.HostJoined(island, hosts, host, devices, **{**given, **fields})

    def join(self, island: str, host: int = 0, hosts: int = 1, devices: int = 4, **fields: Any) -> list[Instruction]:
        worker = f"worker-{island}-{host}"
        self.say(worker, hello("worker"))
        return self.say(worker, self.joined(island, host, hosts, devices, **fields))

    def ready(
        self, island: str, host: int = 0, devices: int = 4, incarnation: int = 1, memory_bytes: int = 0
    ) -> list[Instruction]:
        executor = executor_of(island, host, incarnation)
        self.say(executor, hello("executor"))
        address = f"tcp://{island}-{host}-{incarnation}"
        ready = m.ExecutorReady(island, incarnation, host, address, "sim", devices, 8, memory_bytes)
        return self.say(executor, ready)

    def form(self, island: str, hosts: int = 1, devices: int = 4, memory_bytes: int = 0) -> None:
        for host in range(hosts):
            self.join(island, host, hosts, devices)
        for host in range(hosts):
            self.ready(island, host, devices, memory_bytes=memory_bytes)

    def connect(self, client: str = "client", **fields: Any) -> int:
        out = self.say(client, hello("client", name=client, **fields))
        return sent(out, client, m.Welcome)[0].session

    def slice(self, client: str, number: int, devices: int, **fields: Any) -> list[Instruction]:
        return self.say(client, m.RequestSlice(number, devices, (("d", devices),), **fields))

    def plan(self, client: str, number: int, *islands: str, incarnation: int = 1) -> list[Instruction]:
        self.say(client, m.RegisterComputation("key", b"", b"module"))
        parts = tuple(m.PartPayload(island, incarnation, ("key",), empty_part(island)) for island in islands)
        return self.say(client, m.RegisterPlan(number, f"plan{number}", parts))

    def start(self, client: str, run: int, plan: int, islands: int = 1) -> list[Instruction]:
        return self.say(client, m.StartRun(run, plan, run * 100, (NO_ARGUMENTS,) * islands))


def unwrapped(out: list[Instruction]) -> list[Instruction]:
    """With what follows a record in the record's place: the disk is quick here."""
    found: list[Instruction] = []
    for one in out:
        found += one.then if isinstance(one, Record) else [one]
    return found


def empty_part(island: str) -> bytes:
    """The payload of a part that does nothing."""
    return msgspec.msgpack.encode(Part("plan", island, "cpu", (), (), (), ()))


def executor_of(island: str, host: int = 0, incarnation: int = 1) -> str:
    return f"executor-{island}-{host}-{incarnation}"


def sent(out: list[Instruction], peer: str, kind: type | None = None) -> list[Any]:
    """The messages to a peer, of one type or of any."""
    messages = [one.message for one in out if isinstance(one, Send) and one.peer == peer.encode()]
    return [message for message in messages if kind is None or isinstance(message, kind)]


def refused(out: list[Instruction]) -> m.Refused:
    """The only refusal."""
    [close] = [one for one in out if isinstance(one, Close) and one.refused is not None]
    assert close.refused is not None
    return close.refused


def cluster_of(islands: int, hosts: int = 1, devices: int = 4) -> tuple[SchedulerCore, int, bytes]:
    """The core, a session with a slice of a whole island and a plan on it, and the island's leader."""
    core = SchedulerCore(SchedulerSettings(), random.Random(0), 0.0)

    def say(peer: bytes, message: m.Message) -> list[Instruction]:
        return core.handle(MessageReceived(peer, message), 0.0)

    for island in range(islands):
        for host in range(hosts):
            say(b"w%d-%d" % (island, host), hello("worker"))
            joined = m.HostJoined(f"i{island}", hosts, host, devices, "cpu", "h", 1, "h:1")
            say(b"w%d-%d" % (island, host), joined)
        for host in range(hosts):
            say(b"e%d-%d" % (island, host), hello("executor"))
            say(b"e%d-%d" % (island, host), m.ExecutorReady(f"i{island}", 1, host, "tcp://h", "sim", devices, 1))
    welcome = sent(say(b"client", hello("client")), "client", m.Welcome)[0]
    shards = hosts * devices
    bound = sent(say(b"client", m.RequestSlice(1, shards, (("d", shards),))), "client", m.SliceBound)[0]
    part = m.PartPayload(bound.island, 1, (), empty_part(bound.island))
    assert say(b"client", m.RegisterPlan(1, "plan", (part,)))
    return core, welcome.session, b"e%s-0" % bound.island[1:].encode()
