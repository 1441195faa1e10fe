"""The authenticator: decides for every connection to a secured socket of this process whether its key may come in.

ZeroMQ asks during each CURVE handshake, over `inproc://zeromq.zap.01` (ZAP, RFC 27), and waits for the answer. For a
key of the allow-list the answer names the key as the connection's `User-Id`, which ZeroMQ attaches to each message that
the connection brings (K-5). pyzmq's own authenticators are not used: they know no roles, cannot end a connection,
and run in threads or asyncio.

The decision is a pure function, `decide`. `Access` is what a process believes at the moment, and whom to tell when it
changes; a scheduler keeps it equal to a file (`watch`), an executor to what the scheduler sends.
"""

from __future__ import annotations

import logging
import signal
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio
import zmq
from zmq.utils import z85

from pathway.errors import ConfigError
from pathway.transport.keys import AllowList, AllowListFile, Change, Entry, PublicKey, compare, fingerprint
from pathway.transport.readiness import Readiness
from pathway.transport.security import ZAP_DOMAIN, Identity

log = logging.getLogger(__name__)

ZAP_ADDRESS = "inproc://zeromq.zap.01"
RELOAD_S = 0.25
"""How often the allow-list's file is looked at: with this, a revoked key's connections end within a second."""

_REMEMBERED_REFUSALS = 1024


@dataclass(frozen=True, slots=True)
class Request:
    """One question of ZeroMQ: may this connection come in?"""

    version: bytes
    request_id: bytes
    domain: bytes
    address: str
    mechanism: bytes
    credentials: tuple[bytes, ...]

    @classmethod
    def parse(cls, frames: Sequence[bytes]) -> Request | None:
        """The request in a ZAP message's frames, or None if they are none."""
        if len(frames) < 6:
            return None
        version, request_id, domain, address, _routing_id, mechanism, *credentials = frames
        return cls(version, request_id, domain, address.decode("utf-8", "replace"), mechanism, tuple(credentials))

    @property
    def key(self) -> PublicKey | None:
        """The public key that the connection proved to have the secret of."""
        if self.mechanism != b"CURVE" or len(self.credentials) != 1 or len(self.credentials[0]) != 32:
            return None
        return PublicKey(z85.encode(self.credentials[0]).decode())


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer, with its reason. `status` is ZAP's: 200 in, 400 not in, 500 a question that makes no sense."""

    status: int
    reason: str
    entry: Entry | None = None

    def frames(self, request: Request) -> list[bytes]:
        user = self.entry.key.encode() if self.entry is not None else b""
        return [b"1.0", request.request_id, str(self.status).encode(), self.reason.encode(), user, b""]


def decide(request: Request, allow_list: AllowList) -> Decision:
    """Whether a connection may come in. What it may then do is decided by role, message by message (`permissions`)."""
    if request.version != b"1.0":
        return Decision(500, f"ZAP version {request.version!r} is not known")
    if request.domain != ZAP_DOMAIN:
        return Decision(500, f"the domain {request.domain!r} is not served")
    if request.mechanism != b"CURVE":
        return Decision(400, "a key is needed")
    key = request.key
    if key is None:
        return Decision(500, "malformed credentials")
    entry = allow_list.get(key)
    if entry is None:
        return Decision(400, "the key is not on the allow-list")
    return Decision(200, "welcome", entry)


class Access:
    """The allow-list as this process knows it now, and whom to tell when it changes."""

    def __init__(self, allow_list: AllowList | None = None) -> None:
        self.allow_list = allow_list or AllowList()
        self._listeners: list[Callable[[Change], None]] = []

    def subscribe(self, listener: Callable[[Change], None]) -> Callable[[], None]:
        """Call `listener` with every change, in the thread that makes it. Returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def get(self, key: str | None) -> Entry | None:
        return self.allow_list.get(key)

    def replace(self, allow_list: AllowList) -> Change:
        """Believe `allow_list` from now on, and tell everybody what that changes."""
        change = compare(self.allow_list, allow_list)
        self.allow_list = allow_list
        if change.added or change.revoked:
            for entry in change.revoked:
                log.warning("the key %r (%s) was revoked", entry.name, fingerprint(entry.key))
            for listener in list(self._listeners):
                listener(change)
        return change


async def watch(file: AllowListFile, access: Access) -> None:
    """Keep `access` equal to `file`, until cancelled. SIGHUP makes it read at once, where this is the main thread."""
    try:
        with trio.open_signal_receiver(signal.SIGHUP) as hangups:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_poll, file, access)
                async for _ in hangups:
                    reload(file, access, force=True)
    except RuntimeError:  # not the main thread: signals are somebody else's
        await _poll(file, access)


async def _poll(file: AllowListFile, access: Access) -> None:
    while True:
        reload(file, access)
        await trio.sleep(RELOAD_S)


def reload(file: AllowListFile, access: Access, force: bool = False) -> None:
    """Read the file if it has changed. A file with a mistake changes nothing and is reported (K-3)."""
    change = file.refresh(force)
    if change is not None and change.error:
        log.error("the allow-list was not read, and the one before it stays in force: %s", change.error)
    elif change is not None:
        access.replace(file.current)


class Authenticator:
    """Answers ZeroMQ's questions for all secured sockets of a context. There can be one per context; make it before
    they bind. `refresh` is called before each answer, so that a key added a moment ago is let in."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        access: Access,
        refresh: Callable[[], None] = lambda: None,
    ) -> None:
        self.access = access
        self.refused_count = 0
        self._refresh = refresh
        self._reported: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        try:
            self._socket.bind(ZAP_ADDRESS)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(f"this ZeroMQ context has an authenticator already: {error}") from None
        self._readiness = Readiness(int(self._socket.FD))

    async def run(self) -> None:
        """Serve until cancelled, then close."""
        try:
            while True:
                self.answer_waiting()
                await self._readiness.wait()
        finally:
            self.close()

    def answer_waiting(self) -> None:
        """Answer all questions that are there."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if b"" not in frames:
                continue
            body = frames.index(b"") + 1
            request = Request.parse(frames[body:])
            if request is None:
                continue
            self._refresh()
            decision = decide(request, self.access.allow_list)
            self._note(request, decision)
            self._socket.send_multipart([*frames[:body], *decision.frames(request)], zmq.NOBLOCK)

    def _note(self, request: Request, decision: Decision) -> None:
        """Log each refused key and address once, however often it tries again."""
        if decision.status == 200:
            return
        self.refused_count += 1
        who = (request.address, fingerprint(request.key or ""))
        if who in self._reported:
            return
        self._reported[who] = None
        if len(self._reported) > _REMEMBERED_REFUSALS:
            self._reported.popitem(last=False)
        log.warning("refused a connection from %s (key %s): %s", request.address, who[1], decision.reason)

    def close(self) -> None:
        """From now on nobody is let in (K-4). Safe to call again."""
        if not self._socket.closed:
            self._readiness.close()
            self._socket.unbind(ZAP_ADDRESS)
            self._socket.close(0)


class Gate:
    """All that a process needs to listen with keys: who it is, who may come in, and the authenticator that sees to it.

    With a file, the file is watched, and read before each decision; without, `access` is replaced by whoever knows."""

    def __init__(
        self, identity: Identity, context: zmq.Context[zmq.Socket[bytes]], file: AllowListFile | None = None
    ) -> None:
        self.identity = identity
        self.access = Access(file.current if file is not None else None)
        self._file = file
        self._authenticator = Authenticator(context, self.access, self._refresh)

    def _refresh(self) -> None:
        if self._file is not None:
            reload(self._file, self.access)

    async def run(self) -> None:
        """Let in and keep out, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._authenticator.run)
            if self._file is not None:
                nursery.start_soon(watch, self._file, self.access)

    def close(self) -> None:
        """From now on nobody is let in. Safe to call again."""
        self._authenticator.close()
