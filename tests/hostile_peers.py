"""Peers that mean harm, over real sockets: raw frames to a scheduler or an executor, and what becomes of the sender."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

from pathway.content import content_key
from pathway.transport import messages as m
from pathway.transport.checksum import checksum
from pathway.version import PROTOCOL_VERSION, __version__
from tests.hostile import Hostile

ANSWER_WITHIN_MS = 20_000


class RawPeer:
    """A ZeroMQ socket that says what it is told to."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 200
        self._socket.reconnect_ivl = -1
        self.refused = ""
        self._socket.connect(address)
        self._arrived: list[Any] = []

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def say(self, *messages: m.Message) -> None:
        self.send(m.encode(messages))

    def receive(self) -> Any:
        """The next message."""
        while not self._arrived:
            if not self._socket.poll(ANSWER_WITHIN_MS):
                raise AssertionError("no answer")
            self._arrived += m.decode(self._socket.recv_multipart()[0])
        return self._arrived.pop(0)

    def until(self, *kinds: type) -> Any:
        """The next message of one of these kinds."""
        while not isinstance(message := self.receive(), kinds):
            pass
        return message

    def outcome(self) -> str:
        """What became of all that was sent: "" if the peer is still welcome, else why not."""
        self.say(m.Ping(77))
        answer = self.until(m.Pong, m.Refused)
        while isinstance(answer, m.Pong) and answer.number != 77:
            answer = self.until(m.Pong, m.Refused)
        self.refused = f"{answer.kind}: {answer.reason}" if isinstance(answer, m.Refused) else ""
        return self.refused

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def raw_peer(address: str) -> Iterator[RawPeer]:
    peer = RawPeer(address)
    try:
        yield peer
    finally:
        peer.close()


def hello(role: str, **fields: Any) -> m.Hello:
    return m.Hello(PROTOCOL_VERSION, __version__, role, **fields)


class RawSession:
    """A client's connection to a scheduler, by hand: its session, its token, and where executors are."""

    def __init__(self, address: str) -> None:
        self.peer = RawPeer(address)
        self.peer.say(hello("client", name="mallory"))
        welcome = self.peer.until(m.Welcome)
        self.number, self.token = welcome.session, welcome.token
        self.islands = {entry.island: entry for entry in self.peer.until(m.Directory).islands}

    def introduction(self, **fields: Any) -> m.Hello:
        """What its links to executors begin with."""
        return hello(**{"role": "peer", "name": "mallory", "session": self.number, "token": self.token, **fields})

    def slice(self, island: str) -> m.SliceBound:
        self.peer.say(m.RequestSlice(1, 1, (), island=island, shared=True))
        bound = self.peer.until(m.SliceBound, m.SliceRefused)
        assert isinstance(bound, m.SliceBound), bound
        return bound

    def close(self) -> None:
        """End the session, if its connection is not over."""
        if not self.peer.refused:
            self.peer.say(m.Goodbye())
        self.peer.close()


def bulk(hostile: Hostile, session: int) -> tuple[bytes, ...]:
    """Frames of the bulk protocol as a client's link to an executor may bring them: nearly right, mostly."""
    draw = hostile.random
    own = session if draw.random() < 0.98 else hostile.number()
    transfer, buffer = draw.randrange(4), draw.randrange(6)
    match draw.randrange(12):
        case 0 | 1:
            data = draw.randbytes(draw.choice((0, 1, 4, 32, 4096)))
            given = draw.choice((checksum(data), 0, hostile.number()))
            region = ((0, len(data) // 4),) if draw.random() < 0.7 else hostile.value(m.PutShard).region
            nbytes = len(data) if draw.random() < 0.9 else hostile.number()
            return m.encode([m.PutShard(transfer, own, buffer, region, nbytes, given)]), data
        case 2:
            nbytes = draw.choice((5, m.CHUNK_BYTES + 1, 2 * m.CHUNK_BYTES, 1 << 40, 1 << 62, hostile.number()))
            return (m.encode([m.PutShard(transfer, own, buffer, ((0, nbytes),), nbytes)]),)
        case 3 | 4:
            size = draw.choice((0, 1, 5, m.CHUNK_BYTES)) if draw.random() < 0.1 else draw.choice((0, 1, 5))
            offset = draw.choice((0, m.CHUNK_BYTES, hostile.number()))
            return m.encode([m.Chunk(transfer, offset, hostile.number())]), bytes(size)
        case 5:
            return (m.encode([m.Taken(hostile.number()), m.TransferDropped(transfer)]),)
        case 6 | 7:
            devices = draw.choice(((0,), (1,), (0, 1), (0, 0), (), (99,), (-1,)))
            return (m.encode([m.Fetch(draw.randrange(9), own, buffer, devices)]),)
        case 8:
            metadata, artifact = hostile.noise(), draw.choice((hostile.noise(), b"ML\xefR" + hostile.noise()))
            key = content_key(metadata, artifact) if draw.random() < 0.9 else hostile.text()
            return (
                m.encode([m.AskProgram(1, key, metadata, artifact, hostile.value(m.AskProgram).devices, "report")]),
            )
        case 9:
            kind = draw.choice((m.ShareOffer, m.ShareProof, m.ShareArena, m.Shared, m.TraceRequest, m.Hello))
            return (m.encode([hostile.message(kind)]),)
        case 10:
            return (hostile.frame(), *(hostile.noise() for _ in range(draw.randrange(3))))
        case _:
            return (m.encode([hostile.message(draw.choice(m.CONTROL_MESSAGES))]),)


def requests(hostile: Hostile, session: int) -> bytes:
    """A frame of a client's requests to the scheduler: nearly right, mostly."""
    draw = hostile.random
    if draw.random() < 0.15:
        return hostile.frame()
    kinds = (m.RequestSlice, m.ReleaseSlice, m.RegisterComputation, m.RegisterPlan, m.StartRun, m.PutBuffer)
    more = (m.AssembleBuffer, m.ReleaseBuffers, m.CancelRun, m.ReleasePlan, m.StatusRequest)
    return m.encode([hostile.message(draw.choice(kinds + more)) for _ in range(draw.choice((1, 1, 3)))])


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))
