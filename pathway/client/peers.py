"""Bulk links to executors: one each, opened when first needed, straight past the scheduler.

Links are opened and received from in the connection's trio thread; fetches and puts are sent from the thread that asks.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import trio

from pathway.client.bindings import ArrayKind
from pathway.client.core import ClientCore
from pathway.client.fetch import ArrayFetch, Room, host_regions, piece_of
from pathway.client.pending import Pending
from pathway.errors import DisconnectedError, ErrorInfo, IslandLostError, PathwayError, ProtocolError, describe
from pathway.transport import messages as m
from pathway.transport.bulk import BulkReceiver, BulkSender, HostBytes, aligned_empty
from pathway.transport.checksum import checksum
from pathway.transport.endpoints import address_of
from pathway.transport.security import Identity
from pathway.transport.sockets import Delivery, PeerGone
from pathway.transport.threads import ThreadSafeDealer
from pathway.version import PROTOCOL_VERSION, __version__

LOST_GRACE_S = 2.0
"""How long the scheduler's word that an island is lost, with its cause, is waited for once a link to it has broken."""

Action = Callable[[ThreadSafeDealer], None]

Soon = Callable[..., None]
"""Calls its first argument with the others, in the trio thread."""


class Peer:
    """The link to one executor. Until it is open, what is to be sent waits in `backlog`."""

    __slots__ = ("address", "backlog", "bulk_in", "bulk_out", "dealer", "fetching", "lock", "replies", "where")

    def __init__(self, address: str) -> None:
        self.address = address
        self.where = address_of(address)
        self.dealer: ThreadSafeDealer | None = None
        self.bulk_out: BulkSender | None = None  # these two are for the trio thread alone
        self.bulk_in: BulkReceiver | None = None
        self.backlog: list[Action] = []
        self.lock = threading.Lock()
        self.fetching: dict[int, ArrayFetch] = {}  # by request
        self.replies: dict[int, Pending] = {}  # by request

    def do(self, action: Action) -> None:
        """Carry `action` out on the open link: now, from this thread, or as soon as the link is open."""
        if self.dealer is None:
            with self.lock:
                if self.dealer is None:
                    self.backlog.append(action)
                    return
        action(self.dealer)

    def opened(self, dealer: ThreadSafeDealer) -> None:
        """The link is open: do what has waited, in order, before anything else is done."""
        with self.lock:
            for action in self.backlog:
                action(dealer)
            self.backlog.clear()
            self.dealer = dealer


class Peers:
    """All bulk links of one client."""

    def __init__(
        self, core: ClientCore, name: str, identity: Identity | None, soon: Soon, start: Callable[[Peer], None]
    ) -> None:
        self._core = core
        self._name = name
        self._identity = identity
        self._soon = soon
        self._start = start  # run `serve(peer)` in the trio thread
        self._peers: dict[str, Peer] = {}
        self._lock = threading.Lock()
        self._transfers = itertools.count(1)

    def _peer(self, address: str) -> Peer:
        peer = self._peers.get(address)
        if peer is None:
            with self._lock:
                peer = self._peers.get(address)
                if peer is None:
                    peer = self._peers[address] = Peer(address)
                    self._start(peer)
        return peer

    def _address(self, kind: ArrayKind, host: int) -> str:
        bound = kind.binding.bound
        entry = self._core.islands.get(bound.island)
        if entry is None or entry.incarnation != bound.incarnation:
            raise IslandLostError(f"island {bound.island!r} (incarnation {bound.incarnation}) is gone")
        return entry.hosts[host]

    # -- from users' threads ------------------------------------------------------------------------------------------

    def fetch(self, kind: ArrayKind, buffer: int) -> ArrayFetch:
        """Ask for every distinct region of a buffer once, of several hosts together where they share the work."""
        fetch = ArrayFetch(kind)
        if fetch.done:
            return fetch
        for host, asked in kind.fetch_from():
            peer = self._peer(self._address(kind, host))
            request = self._core.new_request()
            self._core.fetches[request] = (fetch, kind.binding)
            peer.fetching[request] = fetch
            fetch.add_waiter(functools.partial(self._forget, peer, request))
            peer.do(functools.partial(_send, m.Fetch(request, self._core.session, buffer, asked)))
        if self._core.lost is not None:  # it was lost while the fetch was being entered (C-1)
            fetch.fail(self._core.lost)
        elif kind.binding.error is not None:
            fetch.fail(kind.binding.error)
        return fetch

    def _forget(self, peer: Peer, request: int) -> None:
        self._core.fetches.pop(request, None)
        peer.fetching.pop(request, None)

    def put(self, kind: ArrayKind, buffer: int, value: np.ndarray[Any, Any]) -> None:
        """Send every region of a buffer to every host that holds it."""
        for host, region in host_regions(kind.physical, kind.binding.bound.devices_per_host):
            peer = self._peer(self._address(kind, host))
            transfer = next(self._transfers)
            data = piece_of(value, region)
            header = m.PutShard(transfer, self._core.session, buffer, region, len(data))
            peer.do(functools.partial(self._send_put, peer, header, data))

    def _send_put(self, peer: Peer, header: m.PutShard, data: HostBytes, dealer: ThreadSafeDealer) -> None:
        """Small data leaves from here; large data takes turns with other large data, in the trio thread."""
        if len(data) <= m.CHUNK_BYTES:
            dealer.send_with_blob(msgspec.structs.replace(header, checksum=checksum(data)), data.data)
        elif peer.bulk_out is not None:
            self._soon(peer.bulk_out.send, header, header.transfer, data)

    def ask(self, address: str, request: m.TraceRequest | m.AskProgram) -> Pending:
        """Ask the executor at `address`; its answer, or the error in its place."""
        peer = self._peer(address)
        reply = peer.replies[request.request] = Pending()
        peer.do(functools.partial(_send, request))
        if self._core.lost is not None:
            reply.fail(self._core.lost)
        return reply

    # -- in the trio thread -------------------------------------------------------------------------------------------

    async def serve(self, peer: Peer, connect_timeout_s: float) -> None:
        """Open the link and receive from it until it breaks."""
        try:
            hello = m.Hello(
                PROTOCOL_VERSION, __version__, "peer", self._name, token=self._core.token, session=self._core.session
            )
            dealer = await ThreadSafeDealer.connect(
                peer.address, hello, identity=self._identity, timeout_s=connect_timeout_s
            )
        except PathwayError as error:
            await self._broken(peer, f"no link to the executor at {peer.where}: {error}")
            return
        try:
            peer.bulk_out = BulkSender(dealer.send, dealer.send_with_blob, self._soon)
            peer.bulk_in = BulkReceiver(dealer.send)
            peer.opened(dealer)
            while True:
                for item in await dealer.receive_batch():
                    if isinstance(item, PeerGone):
                        await self._broken(peer, f"the link to the executor at {peer.where} broke: {item.reason}")
                        return
                    self._received(peer, item)
        except DisconnectedError as error:
            await self._broken(peer, str(error))
        finally:
            if peer.bulk_out is not None:
                peer.bulk_out.close()
            dealer.close()

    def drop(self, alive: frozenset[str]) -> None:
        """Executors at other addresses than these are gone: their links close."""
        for address in [address for address in self._peers if address not in alive]:
            peer = self._peers.pop(address)
            if peer.dealer is not None:
                peer.dealer.close(linger_s=0)

    def close(self) -> None:
        """Close every link."""
        self.drop(frozenset())

    async def _broken(self, peer: Peer, reason: str) -> None:
        with self._lock:
            if self._peers.get(peer.address) is peer:
                del self._peers[peer.address]
        with trio.move_on_after(LOST_GRACE_S):  # the scheduler knows better why
            for fetch in list(peer.fetching.values()):
                await fetch.wait_trio()
        for reply in peer.replies.values():
            reply.fail(ErrorInfo("IslandLostError", reason))
        for fetch in list(peer.fetching.values()):
            bound = fetch.binding.bound
            fetch.fail(ErrorInfo("IslandLostError", reason, island=bound.island, incarnation=bound.incarnation))

    def _received(self, peer: Peer, delivery: Delivery) -> None:
        last = len(delivery.messages) - 1
        for index, message in enumerate(delivery.messages):
            blob = delivery.blobs[0] if index == last and delivery.blobs else None
            try:
                self._handle(peer, message, blob)
            except ProtocolError as error:
                self._fail_all(peer, describe(error))

    def _handle(self, peer: Peer, message: m.Message, blob: memoryview | None) -> None:
        bulk_in, bulk_out = peer.bulk_in, peer.bulk_out
        assert bulk_in is not None
        assert bulk_out is not None
        match message:
            case m.FetchedShard():
                _receive_shard(bulk_in, message, blob, peer.fetching.get(message.request))
            case m.Chunk():
                bulk_in.chunk(message, blob)
            case m.TransferDropped():
                bulk_in.dropped(message)
            case m.Taken():
                bulk_out.taken(message.nbytes)
            case m.FetchFailed():
                fetch = peer.fetching.get(message.request)
                if fetch is not None:
                    fetch.fail(message.error)
            case m.TraceReply() | m.ProgramAnswer():
                reply = peer.replies.pop(message.request, None)
                if reply is not None:
                    reply.resolve(message)
            case m.Refused():
                self._fail_all(peer, ErrorInfo(message.kind, message.reason))
            case _:
                pass

    @staticmethod
    def _fail_all(peer: Peer, error: ErrorInfo) -> None:
        for pending in (*peer.fetching.values(), *peer.replies.values()):
            pending.fail(error)


def _receive_shard(
    bulk: BulkReceiver, message: m.FetchedShard, blob: memoryview | None, fetch: ArrayFetch | None
) -> None:
    """A shard comes, or begins to. Nobody may want it any more; it has to be received all the same."""

    def damaged(given: int, found: int) -> None:
        if fetch is not None:
            reason = f"{message.nbytes:,} bytes from an executor have the checksum {found:016x}, not {given:016x}"
            fetch.fail(ErrorInfo("TransferError", reason))

    if blob is not None and message.nbytes <= m.CHUNK_BYTES:  # the way of scalars, for which one waits
        data = np.frombuffer(blob, np.uint8)
        found = checksum(data) if message.checksum else 0
        if found != message.checksum:
            damaged(message.checksum, found)
        elif fetch is not None and not fetch.done:
            fetch.place(message.region, data)
        return
    room: Room | None = None

    def make_room() -> HostBytes:
        nonlocal room
        if fetch is None or fetch.done:
            return aligned_empty(message.nbytes)
        room = fetch.room(message.region)
        if len(room.flat) != message.nbytes:
            raise ProtocolError(f"{message.nbytes} bytes are announced for a region of {len(room.flat)}")
        return room.flat

    def done(data: HostBytes) -> None:
        if fetch is not None and not fetch.done:
            if room is not None:
                room.filled()
            else:
                fetch.place(message.region, data)

    bulk.header(
        message.transfer,
        message.nbytes,
        blob,
        done,
        checksum_given=message.checksum,
        damaged=damaged,
        room=make_room,
    )


def _send(message: m.Message, dealer: ThreadSafeDealer) -> None:
    dealer.send(message)
