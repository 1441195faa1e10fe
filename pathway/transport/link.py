"""What routers and dealers share: links that are FIFO and without gaps from their handshake until they end.

A `Router` is bound and has many peers; a `Dealer` is connected and has one (`transport.sockets`). Nothing reconnects
behind the user's back: when a connection breaks, both ends are told (`PeerGone`), and a new connection is a new
`Dealer` and a new peer. So a link never silently skips what was in flight when it broke (a ZeroMQ socket left to itself
would).

Invariants
  T-1  Before a task waits it has tried to receive after the last call on the socket (see `readiness`).
  T-2  `post` only appends; `flush` sends each peer's outbox as one frame (O-6). No timers.
  T-3  A send that would block is held back, in order, until it goes; it is never dropped while its peer lives.
  T-4  All that a peer sent is delivered before its `PeerGone`, which comes exactly once for each peer that was
       delivered.
  T-5  The first message delivered of any peer is a `Hello` of this protocol version. A peer that sends anything else,
       then or later, is refused, logged once, and ignored; no other peer notices.

The end of a router's connection is seen in two ways: the socket monitor names the file descriptor that closed (and the
first message of a peer named the one it came from), and a send to a peer that is gone fails. ZMTP heartbeats end a
connection whose other machine is silent; ZeroMQ's own thread answers them, so a busy peer is no dead peer. A stopped
one (SIGSTOP) is none either, until SILENCE_MS; lost machines are found sooner, by the scheduler and its workers.
"""

from __future__ import annotations

import errno
import os
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import trio
import zmq

from pathway.errors import ProtocolError
from pathway.transport.messages import MAX_MESSAGE_BYTES, Message, encode
from pathway.transport.readiness import Readiness

Peer = bytes
"""A router's name for one connection of a peer. A dealer's only peer is `SOLE_PEER`."""

SOLE_PEER: Peer = b""

Blob = bytes | bytearray | memoryview

ZERO_COPY_BYTES = 64 * 1024
"""Blobs from this size on leave without a copy; below it the bookkeeping of a zero-copy frame costs more."""

COALESCE_BYTES = 16 * 1024 * 1024
"""An outbox whose frame would be larger than this leaves as several."""

SILENCE_MS = 60_000
QUICK_SILENCE: Mapping[int, int] = {int(zmq.HEARTBEAT_TIMEOUT): 2000}
"""For links by which the loss of the other machine is to be noticed."""

RETRY_S = 0.01
"""How often a send that was held back is tried again, where nothing else happens on the socket."""

LOOK_FIRST = 4
"""So many times per batch it is asked whether there is something, before receiving is tried: a failed try is an
exception, and costs several times as much as a look."""

_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)  # enums are slow

RECEIVE_LIMIT = 4096
"""Frames taken in one batch at most, so that one busy socket does not starve the other tasks."""

_MONITORED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Delivery(NamedTuple):
    """Messages of one frame. `blobs` belong to the last of them and are views of memory that ZeroMQ owns: copying one
    to where it belongs is the only copy it needs."""

    peer: Peer
    messages: list[Any]
    blobs: tuple[memoryview, ...]


class PeerGone(NamedTuple):
    """The connection of `peer` is over. `reason` is for people."""

    peer: Peer
    reason: str


Batch = list[Delivery | PeerGone]


class Link(ABC):
    """What routers and dealers share: the socket, its monitor, the way out and the wait."""

    _socket_is_router: bool

    def __init__(self, kind: int, options: Mapping[int, int | bytes]) -> None:
        self._socket: zmq.Socket[bytes] = process_context().socket(kind)
        for option, value in {
            zmq.SNDHWM: 0,  # control is bounded by credits (O-7), never by dropping
            zmq.RCVHWM: 0,
            zmq.LINGER: 500,
            zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
            zmq.HEARTBEAT_IVL: 500,
            zmq.HEARTBEAT_TIMEOUT: SILENCE_MS,
            **options,
        }.items():
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(_MONITORED)
        self._monitor_descriptor = int(self._monitor.FD)
        self._readiness = Readiness(int(self._socket.FD), self._monitor_descriptor)
        self._outboxes: dict[Peer, list[Message]] = {}
        self._held_back: dict[Peer, deque[list[Any]]] = {}  # T-3
        self._undelivered_bytes: dict[Peer, int] = {}  # of those
        self._flushed = trio.Event()
        self._arrived: Batch = []
        self._full_batch = True  # the last call returned without having waited: let the others run first
        self.closed = False

    # -- out ----------------------------------------------------------------------------------------------------------

    def _post(self, peer: Peer, message: Message) -> None:
        outbox = self._outboxes.get(peer)
        if outbox is None:
            self._outboxes[peer] = [message]
        else:
            outbox.append(message)

    def flush(self) -> None:
        """Send all that was posted, each peer's messages as one frame. Never waits and never drops (T-2, T-3)."""
        if not self._outboxes or self.closed:
            return
        outboxes, self._outboxes = self._outboxes, {}
        for peer, messages in outboxes.items():
            for frame in frames_of(messages):
                self._send(peer, [frame])
        self._after_send()

    def _send_with_blob(self, peer: Peer, message: Message, blob: Blob) -> None:
        *before, last = frames_of([*self._outboxes.pop(peer, ()), message])
        for frame in before:
            self._send(peer, [frame])
        self._send(peer, [last, blob])
        self._after_send()

    def _send(self, peer: Peer, frames: list[Any]) -> None:
        waiting = self._held_back.get(peer)
        if waiting is None:
            if self._transmit(peer, frames):
                return
            waiting = self._held_back[peer] = deque()
        waiting.append(frames)
        nbytes = self._undelivered_bytes[peer] = self._undelivered_bytes.get(peer, 0) + _nbytes(frames)
        self._hold_back(peer, nbytes)

    def _transmit(self, peer: Peer, frames: list[Any]) -> bool:
        """Whether the frames left, or never can. Only the first part of a message can be refused by ZeroMQ."""
        send = self._socket.send
        try:
            if peer:
                send(peer, zmq.SNDMORE | zmq.NOBLOCK)
            for frame in frames[:-1]:
                send(frame, zmq.SNDMORE | zmq.NOBLOCK)
            last = frames[-1]
            send(last, zmq.NOBLOCK, copy=len(frames) == 1 or memoryview(last).nbytes < ZERO_COPY_BYTES)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._unreachable(peer)
        return True

    def _retry_held_back(self) -> None:
        for peer, waiting in list(self._held_back.items()):
            while waiting and self._transmit(peer, waiting[0]):
                self._undelivered_bytes[peer] -= _nbytes(waiting.popleft())
            if not waiting:
                self._drop_held_back(peer)
        if not self._held_back:
            self._flushed.set()
            self._flushed = trio.Event()

    def _drop_held_back(self, peer: Peer) -> None:
        self._held_back.pop(peer, None)
        self._undelivered_bytes.pop(peer, None)

    def _after_send(self) -> None:
        if self._readiness.parked and int(self._socket.get(_EVENTS)) & _POLLIN:  # T-1
            self._readiness.wake()

    async def flushed(self) -> None:
        """Wait until nothing is held back. Some task must receive meanwhile, for that is where sends are retried."""
        await trio.lowlevel.checkpoint()
        while self._held_back and not self.closed:
            await self._flushed.wait()

    # -- in -----------------------------------------------------------------------------------------------------------

    async def receive_batch(self) -> Batch:
        """All that is there, after waiting until there is something. One task at a time."""
        if self._full_batch:
            await trio.lowlevel.checkpoint()
            if not self.closed:
                self._readiness.look()
        self._full_batch = True
        while True:
            if self.closed:
                raise trio.ClosedResourceError("the link is closed")
            batch = self._collect()
            if batch:
                return batch
            self._full_batch = False
            try:
                await self._wait()
            except trio.ClosedResourceError:
                if not self.closed:
                    raise

    async def _wait(self) -> None:
        if not self._held_back:
            await self._readiness.wait()
            return
        # A pipe's "there is room again" may be consumed by any call on the socket, and unlike POLLIN it cannot be asked
        # for afterwards: while something is held back, look again now and then.
        with trio.move_on_after(RETRY_S):
            await self._readiness.wait()

    def _collect(self) -> Batch:
        batch, self._arrived = self._arrived, []
        drained = self._receive_into(batch)
        if self._held_back:
            self._retry_held_back()
            drained = self._receive_into(batch)  # T-1
        if self._monitor_descriptor in self._readiness.ready:
            self._read_monitor()
        # What a peer sent before its connection closed was there before the monitor said so: look once more (T-4).
        if drained and self._has_ended() and self._receive_into(batch):
            self._report_ended(batch)
        return batch

    def _receive_into(self, batch: Batch) -> bool:
        """Take what is there; whether that was all."""
        recv, get = self._socket.recv, self._socket.get
        for taken in range(RECEIVE_LIMIT):
            if taken < LOOK_FIRST and not int(get(_EVENTS)) & _POLLIN:
                return True
            try:
                frame: Any = recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            peer = SOLE_PEER
            if self._socket_is_router:
                peer = frame.bytes
                frame = recv(zmq.NOBLOCK, copy=False)
            blobs: tuple[memoryview, ...] = ()
            control = frame
            while frame.more:
                frame = recv(zmq.NOBLOCK, copy=False)
                blobs = (*blobs, frame.buffer)
            self._take(peer, control, blobs, batch)
        return False

    def _read_monitor(self) -> None:
        while True:
            try:
                event, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._observe(*struct.unpack("=HI", event))

    @abstractmethod
    def _take(self, peer: Peer, frame: zmq.Frame, blobs: tuple[memoryview, ...], batch: Batch) -> None:
        """One message has come."""

    @abstractmethod
    def _observe(self, event: int, value: int) -> None:
        """The monitor says so."""

    def _hold_back(self, peer: Peer, nbytes: int) -> None:  # noqa: B027 (a link need not mind)
        """So many bytes wait for a peer that does not take them."""

    @abstractmethod
    def _unreachable(self, peer: Peer) -> None:
        """A send found that there is no such peer."""

    @abstractmethod
    def _has_ended(self) -> bool:
        """Whether `_report_ended` has something to say."""

    @abstractmethod
    def _report_ended(self, batch: Batch) -> None:
        """All that the peers which ended have sent is in `batch`: add their `PeerGone`."""

    # -- end ----------------------------------------------------------------------------------------------------------

    def close(self, linger_s: float = 0.5) -> None:
        """Close at once; what was flushed still leaves within `linger_s`. Whoever waits in `receive_batch` gets
        `trio.ClosedResourceError`. Safe to call again."""
        self.flush()
        self._shut(linger_s)

    def _shut(self, linger_s: float) -> None:
        if self.closed:
            return
        self.closed = True
        self._flushed.set()
        self._readiness.close()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=int(linger_s * 1000))

    def __del__(self) -> None:
        # A link that was forgotten, not closed: its monitor's receiving end goes now, and ZeroMQ's own thread would
        # block for ever, for all links of the process, on the next event that it reports there.
        if not getattr(self, "closed", True):
            self._socket.disable_monitor()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def frames_of(messages: Sequence[Message]) -> list[bytes]:
    """`messages` as one frame, or as several where one would be too large to be allocated and sent at once."""
    frame = encode(messages)
    if len(frame) <= COALESCE_BYTES or len(messages) == 1:
        if len(frame) > MAX_MESSAGE_BYTES:
            name = type(messages[0]).__name__
            raise ProtocolError(f"a {name} of {len(frame):,} bytes is over the limit of {MAX_MESSAGE_BYTES:,}")
        return [frame]
    half = len(messages) // 2
    return frames_of(messages[:half]) + frames_of(messages[half:])


def _nbytes(frames: Sequence[Any]) -> int:
    return sum(memoryview(frame).nbytes for frame in frames)


_contexts: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}


def process_context() -> zmq.Context[zmq.Socket[bytes]]:
    """This process's ZeroMQ context. Not pyzmq's shared instance, which a notebook's kernel also uses; and a forked
    child gets one of its own, because the parent's threads did not come along."""
    pid = os.getpid()
    if pid not in _contexts:
        _contexts[pid] = zmq.Context()
    return _contexts[pid]
