"""The bulk link to one executor: what is sent over it, what comes, and who waits for that.

Opened and received from in the connection's trio thread; fetches and small puts are sent from the thread that asks, and
a thread that waits for one fetch receives itself meanwhile. What is to be sent before the link is open waits in a
backlog, in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import numpy as np
import trio

from pathway.client.fetch import ArrayFetch, Room
from pathway.client.pending import Pending
from pathway.client.relay import RelayedDealer
from pathway.errors import DisconnectedError, ErrorInfo, ProtocolError, describe
from pathway.transport import messages as m
from pathway.transport.bulk import CREDIT_BYTES, RELAYED_CREDIT_BYTES, HostBytes, aligned_empty
from pathway.transport.bulklink import BULK, BulkLink, TransferMemory, dealer_end, router_end
from pathway.transport.checksum import checksum
from pathway.transport.endpoints import address_of
from pathway.transport.link import Batch
from pathway.transport.shm import Loan
from pathway.transport.sockets import Delivery, PeerGone
from pathway.transport.threads import ThreadSafeDealer

SETTLE_S = 0.5
"""How long a new link may take to find out whether it can share memory, before it is used without."""

Soon = Callable[..., None]
"""Calls its first argument with the others, in the trio thread."""

AnyDealer = ThreadSafeDealer | RelayedDealer

Action = Callable[[AnyDealer], None]


class Peer:
    """See the module's docstring. `over` is why nothing can come any more."""

    def __init__(self, address: str, soon: Soon) -> None:
        self.address = address
        self.where = address_of(address)  # for people: without the key
        self.dealer: AnyDealer | None = None
        self.bulk: BulkLink | None = None  # used under `_bulk_lock`, but for its `sender.lend`
        self.is_open = Pending()
        self.over: ErrorInfo | None = None
        self.fetching: dict[int, ArrayFetch] = {}  # by request
        self.replies: dict[int, Pending] = {}  # by request
        self._soon = soon
        self._backlog: list[Action] = []
        self._lock = threading.Lock()
        self._bulk_lock = threading.Lock()

    # -- sending: any thread ------------------------------------------------------------------------------------------

    def send(self, message: m.Message) -> None:
        """Send now, or as soon as the link is open."""
        self._do(lambda dealer: dealer.send(message))

    def send_data(self, header: m.PutShard, data: HostBytes | Loan) -> None:
        """Send a transfer: what is small leaves from here, and what is large takes turns, in the trio thread."""
        if not isinstance(data, Loan) and len(data) <= m.CHUNK_BYTES:
            small, summed = data.data, msgspec.structs.replace(header, checksum=checksum(data))
            self._do(lambda dealer: dealer.send_with_blob(summed, small))
        else:
            self._do(lambda dealer: self._soon(self._send_large, header, data))

    def lend(self, nbytes: int) -> Loan | None:
        """Memory to put a large transfer in, if the executor shares this machine's. Waits until the link is open."""
        if nbytes <= m.CHUNK_BYTES:
            return None
        self.is_open.wait()
        return self.bulk.sender.lend(nbytes) if self.bulk is not None else None

    def _do(self, action: Action) -> None:
        if self.dealer is None:
            with self._lock:
                if self.dealer is None:
                    self._backlog.append(action)
                    return
        try:
            action(self.dealer)
        except DisconnectedError as error:
            self.fail(ErrorInfo("IslandLostError", f"the link to the executor at {self.where} is over: {error}"))

    def _send_large(self, header: m.PutShard, data: HostBytes | Loan) -> None:
        assert self.bulk is not None
        with self._bulk_lock:
            self.bulk.sender.send(header, header.transfer, data)

    def fail(self, error: ErrorInfo) -> None:
        """Nothing more comes. Whoever waits, or will, is told so."""
        self.over = error
        for pending in (*self.fetching.values(), *self.replies.values(), self.is_open):
            pending.fail(error)

    # -- receiving ----------------------------------------------------------------------------------------------------

    def wait_for(self, fetch: ArrayFetch) -> None:
        """Wait until a fetch ends, receiving in this thread as long as nobody else does: an answer that one waits for
        then comes without a change of threads."""
        dealer = self.dealer
        if dealer is not None and not fetch.done:
            me = threading.get_ident()

            def ended() -> None:
                if threading.get_ident() != me:
                    dealer.look_here()

            fetch.add_waiter(ended)
            dealer.receive_here(self._take, lambda: fetch.done)
        fetch.wait()

    def _take(self, batch: Batch) -> None:
        for item in batch:
            if isinstance(item, Delivery) and self.bulk is not None:
                self._received(item, self.bulk)

    async def receive(self, dealer: AnyDealer, introduction: m.Hello, memory: TransferMemory) -> str:
        """Use the link, which has just been opened, until it ends; why it did."""
        bulk = self.bulk = BulkLink(
            dealer.send,
            dealer.send_with_blob,
            memory,
            dealer_end(introduction),
            router_end(self.where),
            RELAYED_CREDIT_BYTES if isinstance(dealer, RelayedDealer) else CREDIT_BYTES,
        )
        try:
            if not isinstance(dealer, RelayedDealer):
                bulk.offer_sharing()
            with trio.move_on_after(SETTLE_S):
                while not (bulk.is_settled or isinstance(dealer, RelayedDealer)):
                    if reason := await self._receive_batch(dealer, bulk):
                        return reason
            self._opened(dealer)
            while True:
                if reason := await self._receive_batch(dealer, bulk):
                    return reason
        except DisconnectedError as error:
            return str(error)
        except trio.ClosedResourceError:
            return "it was closed"
        finally:
            with self._bulk_lock:
                bulk.close()
            dealer.close()

    def _opened(self, dealer: AnyDealer) -> None:
        with self._lock:
            for action in self._backlog:
                action(dealer)
            self._backlog.clear()
            self.dealer = dealer
        self.is_open.resolve()

    async def _receive_batch(self, dealer: AnyDealer, bulk: BulkLink) -> str:
        """Take what comes next; why the link ended, if it did."""
        for item in await dealer.receive_batch():
            if isinstance(item, PeerGone):
                return item.reason
            self._received(item, bulk)
        return ""

    def _received(self, delivery: Delivery, bulk: BulkLink) -> None:
        last = len(delivery.messages) - 1
        with self._bulk_lock:
            for index, message in enumerate(delivery.messages):
                blob = delivery.blobs[0] if index == last and delivery.blobs else None
                try:
                    self._handle(message, blob, bulk)
                except ProtocolError as error:
                    self.fail(describe(error))

    def _handle(self, message: m.Message, blob: memoryview | None, bulk: BulkLink) -> None:
        match message:
            case m.FetchedShard():
                _receive_shard(bulk, message, blob, self.fetching.get(message.request))
            case _ if type(message) in BULK:
                bulk.received(message, blob)
            case m.FetchFailed():
                fetch = self.fetching.get(message.request)
                if fetch is not None:
                    fetch.fail(message.error)
            case m.TraceReply() | m.ProgramAnswer():
                reply = self.replies.pop(message.request, None)
                if reply is not None:
                    reply.resolve(message)
            case m.Refused():
                self.fail(ErrorInfo(message.kind, message.reason))
            case _:
                pass


def _receive_shard(bulk: BulkLink, message: m.FetchedShard, blob: memoryview | None, fetch: ArrayFetch | None) -> None:
    """A shard comes, or begins to. Nobody may want it any more; it has to be received all the same."""

    def damaged(given: int, found: int) -> None:
        if fetch is not None:
            reason = f"{message.nbytes:,} bytes from an executor have the checksum {found:016x}, not {given:016x}"
            fetch.fail(ErrorInfo("TransferError", reason))

    if blob is not None and message.nbytes <= m.CHUNK_BYTES:  # the way of scalars, for which somebody waits
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

    bulk.receiver.header(
        message.transfer,
        message.nbytes,
        blob,
        done,
        checksum_given=message.checksum,
        damaged=damaged,
        room=make_room,
    )
