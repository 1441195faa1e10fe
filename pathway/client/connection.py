"""The client's sockets, and the one thread that receives from them.

The thread runs trio. It opens the link to the scheduler, hands every message to the core, beats the heart, and serves
the bulk links. Users' threads send straight from where they are: a call that starts a run costs no switch of threads.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import trio

from pathway.client.core import ClientCore, CloseLink, DropPeers, Event, Instruction, LinkLost, Send, Tick
from pathway.client.peer import Peer
from pathway.client.peers import Peers
from pathway.client.pending import Pending
from pathway.errors import DisconnectedError, ErrorInfo, PathwayError
from pathway.transport import messages as m
from pathway.transport.handshake import hello
from pathway.transport.security import Identity
from pathway.transport.sockets import PeerGone
from pathway.transport.threads import ThreadSafeDealer

_of_parent: list[Any] = []
"""A forked child's copies of its parent's sockets: never closed, so never collected."""


class Connection:
    """One connection to a scheduler. `core` and `peers` are there once `open` has returned."""

    core: ClientCore
    peers: Peers

    def __init__(
        self,
        address: str,
        name: str,
        connect_timeout_s: float,
        identity: Identity | None = None,
        weight: float = 0.0,
        priority: int = 0,
    ) -> None:
        self.address = address
        self._identity = identity
        self._name = name
        self._weight = weight
        self._priority = priority
        self._connect_timeout_s = connect_timeout_s
        self._dealer: ThreadSafeDealer | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._opened = Pending()
        self._failure: BaseException | None = None
        self._stop: trio.Event | None = None
        self._thread = threading.Thread(target=self._run, name=f"pathway-client {address}", daemon=True)

    def open(self) -> None:
        """Connect; raises `ConnectError`."""
        self._thread.start()
        self._opened.wait()
        if self._failure is not None:
            raise self._failure

    # -- from any thread ----------------------------------------------------------------------------------------------

    def send(self, messages: Sequence[m.Message]) -> None:
        """Send to the scheduler, in order. The caller holds the core's lock, which keeps the order between threads."""
        dealer = self._dealer
        if dealer is None or not messages:
            return
        with contextlib.suppress(DisconnectedError):  # the receiver hears of it too, and ends every wait
            dealer.send_all(messages)

    def _send_one(self, message: m.Message) -> None:
        self.send((message,))

    def soon(self, function: Callable[..., Any], *args: Any) -> None:
        """Run `function` in the trio thread. Safe in signal handlers and finalizers."""
        token = self._token
        if token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(function, *args)

    def flush_releases_soon(self) -> None:
        """Send what has been released without waiting for the next message."""
        self.soon(self._flush_releases)

    def close(self, reason: str = "the client was closed") -> None:
        """Say goodbye and stop the thread. What anyone waits for ends with `DisconnectedError`."""
        with self.core.lock:
            if self.core.lost is None:
                self.send([m.Goodbye(reason)])
        self._perform(self.core.end(ErrorInfo("DisconnectedError", reason)))
        self.soon(self._set_stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def abandon(self, error: ErrorInfo) -> None:
        """In a forked child: leave the parent's sockets alone, for good."""
        _of_parent.append(self._dealer)
        self._dealer = None
        self._token = None
        self.core.abandon(error)

    # -- the trio thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:  # whoever waits must hear of it: nobody looks into this thread
            self._failed(error)
        finally:
            self._token = None

    def _failed(self, error: BaseException) -> None:
        if not self._opened.done:
            self._failure = error
            self._opened.resolve()

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._stop = trio.Event()
        try:
            dealer, welcome = await ThreadSafeDealer.open(
                self.address,
                hello("client", self._name, weight=self._weight, priority=self._priority),
                identity=self._identity,
                timeout_s=self._connect_timeout_s,
            )
        except PathwayError as error:
            self._failed(error)
            return
        self._dealer = dealer
        self.core = ClientCore(welcome, time.monotonic())
        self.peers = Peers(self.core, self._name, self._identity, self.soon, self._serve_peer, self._send_one)
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._receive, dealer)
                nursery.start_soon(self._heartbeat)
                self._opened.resolve()
                await self._stop.wait()
                nursery.cancel_scope.cancel()
        except Exception as error:
            self.core.end(ErrorInfo("DisconnectedError", f"the client's receiving thread failed: {error!r}"))
            raise
        finally:
            self._perform(self.core.end(ErrorInfo("DisconnectedError", "the client was closed")))
            self.peers.close()
            dealer.close()

    async def _receive(self, dealer: ThreadSafeDealer) -> None:
        while True:
            try:
                batch = await dealer.receive_batch()
            except DisconnectedError as error:
                self._handle(LinkLost(str(error)))
                return
            for item in batch:
                if isinstance(item, PeerGone):
                    self._handle(LinkLost(item.reason))
                    return
                for message in item.messages:
                    if type(message) is m.RelayFromHost:
                        self.peers.relayed(message)
                    else:
                        self._handle(message)

    async def _heartbeat(self) -> None:
        while True:
            await trio.sleep(self.core.heartbeat_s)
            self._handle(Tick())
            self.peers.trim()

    def _handle(self, event: Event) -> None:
        instructions = self.core.handle(event, time.monotonic())
        if instructions:
            self._perform(instructions)

    def _perform(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send():
                    with self.core.lock:
                        self.send(instruction.messages)
                case DropPeers():
                    self.peers.drop(instruction.alive)
                case CloseLink():
                    self.soon(self._set_stop)

    def _set_stop(self) -> None:
        assert self._stop is not None
        self._stop.set()

    def _flush_releases(self) -> None:
        with self.core.lock:
            self.send(self.core.take_releases())

    def _serve_peer(self, peer: Peer) -> None:
        self.soon(self._start_peer, peer)

    def _start_peer(self, peer: Peer) -> None:
        if self._nursery is not None and self.core.lost is None:
            self._nursery.start_soon(self.peers.serve, peer, self._connect_timeout_s)
