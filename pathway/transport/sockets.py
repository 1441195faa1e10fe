"""The two kinds of link: `Router`, bound, with many peers; `Dealer`, connected, with one. Invariants: see `link`."""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import trio
import zmq

from pathway.errors import ConfigError, ConnectError, LimitError, PermissionDeniedError, ProtocolError
from pathway.transport.authenticator import Gate
from pathway.transport.handshake import hello, reason_to_refuse, refusal_of_undecodable, refusal_to_exception
from pathway.transport.keys import Change, PublicKey
from pathway.transport.link import SOLE_PEER, Batch, Blob, Delivery, Link, Peer, PeerGone
from pathway.transport.messages import Hello, Message, Refused, Welcome, decode
from pathway.transport.permissions import Admit, Check
from pathway.transport.security import (
    Connection,
    Identity,
    handshake_failure,
    secure_client,
    secure_server,
    sender_key,
    split_endpoint,
)

__all__ = ["Batch", "Blob", "Dealer", "Delivery", "Peer", "PeerGone", "Router", "hello"]

CLOSED = "the connection was closed"

LIMITED_FRAMES = 1024
"""Frames for one peer that ZeroMQ takes from a router which limits undelivered bytes; the rest is held back here, and
counted."""

_NEVER_MS = 7 * 24 * 3600 * 1000

REFUSAL_GRACE_S = 0.25
"""A refused peer has this long to read why; then its connection is cut."""

log = logging.getLogger(__name__)


_UNNAMED = -1
"""The descriptor of a peer so old, or so little of a peer, that ZeroMQ tells nothing of it."""


def _descriptor_of(frame: zmq.Frame) -> int:
    try:
        return int(frame.get(zmq.MessageOption.SRCFD))
    except zmq.ZMQError:
        return _UNNAMED


@dataclass(slots=True)
class _Known:
    """What a router knows of one connection."""

    descriptor: int
    connection: Connection | None = None  # to cut it by
    key: PublicKey | None = None
    check: Check | None = None  # of every message (P-1, P-3)
    delivered: bool = False  # something of it was delivered, and its `PeerGone` not yet
    refused: bool = False  # kept until the connection closes, to be ignored and logged once


class Router(Link):
    """A bound socket with many peers. With a `gate` it asks them for keys, and ends their connections when their keys
    are revoked; with `admit` it checks who may say what; with `max_undelivered_bytes` or `max_undelivered_messages` it
    ends the connection of a peer for which more than that waits, in addition to `LIMITED_FRAMES` that ZeroMQ has."""

    _socket_is_router = True

    @classmethod
    def bind(
        cls,
        address: str,
        *,
        gate: Gate | None = None,
        admit: Admit | None = None,
        max_undelivered_bytes: int | None = None,
        max_undelivered_messages: int | None = None,
        socket_options: Mapping[int, int | bytes] | None = None,
    ) -> Router:
        """Bind to `address`, for example `tcp://127.0.0.1:0`. Raises `ConfigError` if that cannot be."""
        return cls(address, socket_options or {}, gate, admit, max_undelivered_bytes, max_undelivered_messages)

    def __init__(
        self,
        address: str,
        options: Mapping[int, int | bytes],
        gate: Gate | None = None,
        admit: Admit | None = None,
        max_undelivered_bytes: int | None = None,
        max_undelivered_messages: int | None = None,
    ) -> None:
        is_limited = max_undelivered_bytes is not None or max_undelivered_messages is not None
        limits = {int(zmq.SNDHWM): LIMITED_FRAMES} if is_limited else {}
        super().__init__(zmq.ROUTER, {int(zmq.ROUTER_MANDATORY): 1, **limits, **options})
        self._max_undelivered_bytes = max_undelivered_bytes
        self._max_undelivered_messages = max_undelivered_messages
        self._gate = gate
        self._admit = admit
        self._cuts: dict[Peer, float] = {}  # refused peers, and when their connections are cut
        self._unsubscribe = gate.access.subscribe(self._access_changed) if gate is not None else None
        secure_server(self._socket, gate.identity if gate is not None else None)
        self._known: dict[Peer, _Known] = {}
        self._open_descriptors: set[int] = set()
        self._peer_of_descriptor: dict[int, Peer] = {}
        self._ended: dict[Peer, str] = {}
        self._closed: set[Peer] = set()  # of those that ended, the ones whose connection is no more
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close(linger_s=0)
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(f"cannot bind {address}: the port is in use by another process") from None
            raise ConfigError(f"cannot bind {address}: {error}") from None
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where it is bound, with the real port."""

    def post(self, peer: Peer, message: Message) -> None:
        """Append `message` to what the next `flush` sends to `peer`."""
        self._post(peer, message)

    def send_with_blob(self, peer: Peer, message: Message, blob: Blob) -> None:
        """Send what was posted to `peer`, `message`, and `blob` in a frame of its own, which must not change until it
        has left."""
        self._send_with_blob(peer, message, blob)

    def disconnect(self, peer: Peer, kind: str, reason: str) -> None:
        """Tell `peer`, after what was posted to it, that it is refused, hear nothing more from it, and end its
        connection: its `PeerGone` comes next. `kind` is a class of `pathway.errors`."""
        self._refuse(peer, Refused(kind, reason))
        self._readiness.wake()

    def key_of(self, peer: Peer) -> PublicKey | None:
        """The key that `peer` proved to have; None in a cluster without keys, and for a peer that is not known."""
        known = self._known.get(peer)
        return known.key if known is not None else None

    def _take(self, peer: Peer, frame: zmq.Frame, blobs: tuple[memoryview, ...], batch: Batch) -> None:
        known = self._known.get(peer)
        if known is None:
            known = self._introduce(peer, frame)
        if known.refused:
            return
        if self._gate is not None and sender_key(frame) != known.key:  # K-5
            self._refuse(peer, Refused(PermissionDeniedError.__name__, "this link is another key's"))
            return
        try:
            messages = decode(frame.buffer)
        except ProtocolError as error:
            refusal = Refused(ProtocolError.__name__, str(error))
            self._refuse(peer, refusal if known.delivered else refusal_of_undecodable(frame.buffer, error))
            return
        if not known.delivered:
            refused = reason_to_refuse(messages)
            if refused is not None:
                self._refuse(peer, refused)
                return
        try:
            if not known.delivered and self._admit is not None:
                entry = self._gate.access.get(known.key) if self._gate is not None else None
                known.check = self._admit(messages[0], known.key, entry)
            if known.check is not None:
                for message in messages if known.delivered else messages[1:]:
                    known.check(message)
        except PermissionDeniedError as error:
            self._refuse(peer, Refused(PermissionDeniedError.__name__, str(error)))
            return
        known.delivered = True
        batch.append(Delivery(peer, messages, blobs))

    def _introduce(self, peer: Peer, frame: zmq.Frame) -> _Known:
        """Remember a new connection and the descriptor it came from."""
        self._read_monitor()  # closings before openings: descriptors are used again
        descriptor = _descriptor_of(frame)
        previous = self._peer_of_descriptor.pop(descriptor, None)
        if previous is not None:
            self._connection_closed(previous)
        key = sender_key(frame) if self._gate is not None else None
        self._known[peer] = known = _Known(descriptor, Connection.of(frame), key)
        if descriptor == _UNNAMED:
            self._refuse(peer, Refused(ProtocolError.__name__, "this is no ZMTP 3 peer"))
        elif descriptor in self._open_descriptors:
            self._peer_of_descriptor[descriptor] = peer
        else:
            self._connection_closed(peer)
        return known

    def _refuse(self, peer: Peer, refused: Refused) -> None:
        known = self._known.get(peer)
        if known is None or known.refused:
            return
        known.refused = True
        log.warning("refused a peer: %s: %s", refused.kind, refused.reason)
        self._post(peer, refused)
        self.flush()
        self._ended.setdefault(peer, refused.reason)
        self._cuts[peer] = trio.current_time() + REFUSAL_GRACE_S

    def _access_changed(self, change: Change) -> None:
        revoked = {entry.key: entry.name for entry in change.revoked}
        for peer, known in list(self._known.items()):
            if known.key in revoked:
                self.disconnect(peer, PermissionDeniedError.__name__, f"the key {revoked[known.key]!r} was revoked")

    async def _wait(self) -> None:
        if not self._cuts:
            await super()._wait()
            return
        with trio.move_on_at(min(self._cuts.values())):
            await super()._wait()
        now = trio.current_time()
        for peer in [peer for peer, due in self._cuts.items() if due <= now]:
            del self._cuts[peer]
            known = self._known.get(peer)
            if known is not None and known.connection is not None:
                known.connection.cut()

    def _hold_back(self, peer: Peer, nbytes: int) -> None:
        limit = self._max_undelivered_bytes
        if limit is not None and nbytes > limit:
            reason = f"{nbytes:,} bytes wait for it, and it does not take them (max_undelivered_mib)"
            self._refuse(peer, Refused(LimitError.__name__, reason))
            self._readiness.wake()
        most = self._max_undelivered_messages
        if most is not None and len(self._held_back[peer]) > most:
            reason = f"{len(self._held_back[peer]):,} messages wait for it, and it does not take them"
            self._refuse(peer, Refused(LimitError.__name__, reason))
            self._readiness.wake()

    def _connection_closed(self, peer: Peer) -> None:
        self._ended.setdefault(peer, CLOSED)
        self._closed.add(peer)

    def _observe(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._open_descriptors.add(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._open_descriptors.discard(value)
            peer = self._peer_of_descriptor.pop(value, None)
            if peer is not None:
                self._connection_closed(peer)
            else:  # perhaps an unnamed one: should one of them still live, it is refused once more
                for unnamed in [peer for peer, known in self._known.items() if known.descriptor == _UNNAMED]:
                    self._connection_closed(unnamed)

    def _unreachable(self, peer: Peer) -> None:
        if peer in self._known:
            self._connection_closed(peer)
            self._readiness.wake()

    def _has_ended(self) -> bool:
        return bool(self._ended)

    def _report_ended(self, batch: Batch) -> None:
        for peer, reason in self._ended.items():
            known = self._known.get(peer)
            if known is not None and known.delivered:
                known.delivered = False
                batch.append(PeerGone(peer, reason))
        self._ended.clear()
        for peer in self._closed:
            known = self._known.pop(peer, None)
            if known is not None and self._peer_of_descriptor.get(known.descriptor) == peer:
                del self._peer_of_descriptor[known.descriptor]
            self._outboxes.pop(peer, None)
            self._drop_held_back(peer)
            self._cuts.pop(peer, None)
        self._closed.clear()

    def close(self, linger_s: float = 0.5) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        super().close(linger_s)


class Dealer(Link):
    """A connected socket with one peer. `PeerGone` is the last thing that it delivers."""

    _socket_is_router = False

    @classmethod
    async def connect(
        cls,
        address: str,
        introduction: Hello,
        *,
        identity: Identity | None = None,
        timeout_s: float = 10.0,
        socket_options: Mapping[int, int | bytes] | None = None,
    ) -> Self:
        """Connect and send `introduction`. Raises `ConnectError` naming the address: at once where nobody listens."""
        dealer = cls(address, socket_options or {}, identity)
        try:
            with trio.move_on_after(timeout_s):
                await dealer._until_connected()
            if dealer._end_reason is not None:
                raise ConnectError(f"cannot connect to {dealer.address}: {dealer._end_reason}")
            if not dealer._connected:
                raise ConnectError(f"cannot connect to {dealer.address}: no answer within {timeout_s:g} s")
        except BaseException:
            dealer.close(linger_s=0)
            raise
        dealer.post(introduction)
        dealer.flush()
        return dealer

    @classmethod
    async def open(
        cls,
        address: str,
        introduction: Hello,
        *,
        identity: Identity | None = None,
        timeout_s: float = 10.0,
        socket_options: Mapping[int, int | bytes] | None = None,
    ) -> tuple[Self, Welcome]:
        """Connect, introduce this process, and wait for the scheduler's `Welcome`. Raises what a refusal names, and
        `ConnectError` where no scheduler answers."""
        started = trio.current_time()
        dealer = await cls.connect(
            address, introduction, identity=identity, timeout_s=timeout_s, socket_options=socket_options
        )
        try:
            with trio.move_on_at(started + timeout_s):
                return dealer, await dealer._welcome()
            raise ConnectError(
                f"{dealer.address} accepts connections, but no scheduler answered within {timeout_s:g} s"
            )
        except BaseException:
            dealer.close(linger_s=0)
            raise

    def __init__(self, address: str, options: Mapping[int, int | bytes], identity: Identity | None = None) -> None:
        # One connection, ever. Not by RECONNECT_IVL = -1 or IMMEDIATE, with which ZeroMQ throws away, as soon as the
        # connection ends, what has come and was not read yet (T-4): it waits for a time that never comes.
        super().__init__(zmq.DEALER, {int(zmq.RECONNECT_IVL): _NEVER_MS, **options})
        self.address, listener_key = split_endpoint(address)
        if listener_key is None and identity is not None:
            listener_key = identity.scheduler
        self._connected = False
        self._has_keys = identity is not None
        self._end_reason: str | None = None
        try:
            secure_client(self._socket, identity, listener_key)
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            self.close(linger_s=0)
            raise ConnectError(f"cannot connect to {self.address!r}: {error}") from None
        except ConfigError:
            self.close(linger_s=0)
            raise

    def post(self, message: Message) -> None:
        """Append `message` to what the next `flush` sends."""
        self._post(SOLE_PEER, message)

    def send_with_blob(self, message: Message, blob: Blob) -> None:
        """Send what was posted, `message`, and `blob` in a frame of its own, which must not change until it left."""
        self._send_with_blob(SOLE_PEER, message, blob)

    @property
    def is_over(self) -> bool:
        """Whether the connection is known to have ended. What is sent from then on goes nowhere."""
        return self.closed or self._end_reason is not None

    async def _until_connected(self) -> None:
        while True:
            self._read_monitor()
            if self._connected or self._end_reason is not None:
                return
            # Nothing is received yet, so nobody else takes the socket's own signals, and they would be ready for ever.
            self._socket.getsockopt(zmq.EVENTS)
            await self._readiness.wait()

    async def _welcome(self) -> Welcome:
        batch = await self.receive_batch()
        match batch[0]:
            case Delivery(peer, [Welcome() as welcome, *rest], blobs):
                self._arrived = batch[1:]
                if rest:
                    self._arrived.insert(0, Delivery(peer, rest, blobs))
                return welcome
            case Delivery(_, [Refused() as refused, *_], _):
                raise refusal_to_exception(refused)
            case PeerGone(_, reason):
                raise ConnectError(f"cannot connect to {self.address}: {reason}")
            case _:
                raise ConnectError(f"{self.address} is no Pathway scheduler: it answered with something else")

    def _take(self, peer: Peer, frame: zmq.Frame, blobs: tuple[memoryview, ...], batch: Batch) -> None:
        if self.closed:
            return
        try:
            batch.append(Delivery(peer, decode(frame.buffer), blobs))
        except ProtocolError as error:
            log.warning("%s sent garbage: %s", self.address, error)
            self._end(f"it sent what is no message: {error}")

    def _observe(self, event: int, value: int) -> None:
        match event:
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
            case zmq.EVENT_CLOSED:
                self._end("nobody listens there")
            case zmq.EVENT_DISCONNECTED:
                self._end(CLOSED if self._connected else "what listens there is no Pathway process")
            case _:
                if reason := handshake_failure(event, value, self._has_keys):
                    self._end(reason)

    def _end(self, reason: str) -> None:
        if self._end_reason is None:
            self._end_reason = reason

    def _unreachable(self, peer: Peer) -> None:
        self._end(CLOSED)

    def _has_ended(self) -> bool:
        return self._end_reason is not None

    def _report_ended(self, batch: Batch) -> None:
        batch.append(PeerGone(SOLE_PEER, self._end_reason or CLOSED))
        self._outboxes.clear()
        self._held_back.clear()
        self._shut(linger_s=0)
