"""Bulk data on links: transfers cut into chunks, with what is small going past what is large.

A transfer is a header, which any message with `transfer`, `nbytes` and `checksum` can be, and bytes. Up to
`CHUNK_BYTES` they travel in one frame right after the header; beyond that as `Chunk`s, or, between processes of one
machine, as one block of shared memory (`shm`).

Invariants
  B-1  At most `CREDIT_BYTES` of chunks per link have been sent and are not known to have come to where they belong. The
       rest waits here. So a small transfer is behind that much at most, and a receiver that does not keep up holds no
       more. (That ZeroMQ let go of a chunk would tell the sender sooner, at the price of two changes of thread each.)
  B-2  Data leaves without a copy, from memory that must not change before it has left; ZeroMQ keeps it alive until
       then.
  B-3  A received transfer goes straight to where it belongs: into one allocation, aligned as XLA likes its buffers. A
       chunk outside of its transfer, out of order, or of no transfer that was announced, is the sender's mistake:
       `ProtocolError`. So is announcing more than a host could take: an announcement costs its sender nothing.
  B-4  What travels over a socket has a checksum over all of it, which is looked at before anybody gets the data. Shared
       memory has none: it is the very memory that the array lives in, and crosses nothing that could damage it.
  B-5  Sessions take turns, and within a session its large transfers do, chunk by chunk.
  B-6  What is dropped is forgotten here with its memory, and the receiver is told, so that it forgets as well.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from pathway.errors import ProtocolError
from pathway.transport.checksum import RunningChecksum, checksum
from pathway.transport.memory import HostBytes as HostBytes
from pathway.transport.memory import Pool
from pathway.transport.messages import CHUNK_BYTES, Chunk, Message, Shared, Taken, TransferDropped
from pathway.transport.shm import Loan, SharingLink

CREDIT_BYTES = 16 * CHUNK_BYTES
RELAYED_CREDIT_BYTES = 8 * CHUNK_BYTES
"""Of links that go by the scheduler: it limits what waits there for one client, from all executors together."""

TELL_TAKEN_BYTES = 4 * CHUNK_BYTES
"""The receiver says what it has taken in steps of this."""

MAX_OPEN_TRANSFERS = 65_536
MAX_ANNOUNCED_BYTES = 1 << 41
"""What one link may have announced and not sent yet."""

ALIGNMENT_BYTES = 64
"""XLA takes host memory of this alignment as it is, and copies any other."""

POOLED_FROM_BYTES = 2 * CHUNK_BYTES
"""Received data of this size or more goes into memory of the pool, if there is one."""

log = logging.getLogger(__name__)

Post = Callable[[Message], None]
SendWithBlob = Callable[[Message, Any], None]
Done = Callable[[HostBytes], None]
Damaged = Callable[[int, int], None]
"""(the checksum that the sender gave, the one that was found)"""


def as_bytes(array: np.ndarray[Any, Any]) -> HostBytes:
    """The memory of a dense array, flat."""
    return array.reshape(-1).view(np.uint8)


def aligned_empty(nbytes: int) -> HostBytes:
    """Fresh memory that XLA can take as it is."""
    memory = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + nbytes]


def pooled_empty(pool: Pool, nbytes: int) -> HostBytes:
    """Memory that XLA can take as it is: of `pool`, which gets it back when nothing refers to it any more."""
    block = pool.take(nbytes) if nbytes >= POOLED_FROM_BYTES else None
    if block is None:
        return aligned_empty(nbytes)
    data = np.frombuffer(memoryview(block.memory)[:nbytes], np.uint8)  # type: ignore[arg-type]
    weakref.finalize(data, pool.give_back, block).atexit = False
    return data


class _Outgoing:
    """A transfer that has begun to leave, or will."""

    __slots__ = ("data", "header", "offset", "sum", "transfer")

    def __init__(self, header: Message, transfer: int, data: HostBytes) -> None:
        self.header = header
        self.transfer = transfer
        self.data = data
        self.offset = 0  # of the next chunk
        self.sum = RunningChecksum()


class BulkSender:
    """The way out of one link. Used in the link's thread, but for `lend`. `sharing` is the link's way to lend memory,
    if it has one."""

    def __init__(
        self,
        post: Post,
        send_with_blob: SendWithBlob,
        sharing: SharingLink | None = None,
        credit_bytes: int = CREDIT_BYTES,
    ) -> None:
        self._credit_bytes = credit_bytes
        self._post = post
        self._send_with_blob = send_with_blob
        self._sharing = sharing
        self._waiting: dict[int, deque[_Outgoing]] = {}  # by session, whose turn it is first
        self._not_taken = 0
        self._closed = False

    def lend(self, nbytes: int) -> Loan | None:
        """A block to put the data of a transfer in and `send` it, so that it is copied this once. None where it has to
        go over the socket. Any thread."""
        if self._sharing is None or nbytes <= CHUNK_BYTES:
            return None
        return self._sharing.lend(nbytes)

    def send(self, header: Message, transfer: int, data: HostBytes | Loan) -> None:
        """Send `header`, which names `transfer` and the size of `data`, and `data`. The caller flushes the link."""
        if isinstance(data, Loan):
            if self._closed or data.link is not self._sharing:
                data.withdraw()  # the link it was meant for has ended, and another would not know its cell
                return
            self._post(header)
            data.send(transfer)
        elif len(data) == 0:
            self._post(header)
        elif len(data) <= CHUNK_BYTES:
            self._send_with_blob(msgspec.structs.replace(header, checksum=checksum(data)), data)
        else:
            self._post(header)
            session = getattr(header, "session", 0)
            self._waiting.setdefault(session, deque()).append(_Outgoing(header, transfer, data))
            self._use_credit()

    def taken(self, nbytes: int) -> None:
        """The receiver has taken so many bytes of chunks."""
        self._not_taken = max(0, self._not_taken - nbytes)
        self._use_credit()

    def _use_credit(self) -> None:
        waiting = self._waiting
        while waiting and self._not_taken < self._credit_bytes:
            session = next(iter(waiting))
            transfers = waiting.pop(session)  # B-5
            outgoing = transfers.popleft()
            if self._send_chunk(outgoing):
                transfers.append(outgoing)
            if transfers:
                waiting[session] = transfers

    def _send_chunk(self, outgoing: _Outgoing) -> bool:
        """Send the transfer's next chunk; whether there are more."""
        offset, data = outgoing.offset, outgoing.data
        chunk = data[offset : offset + CHUNK_BYTES]
        outgoing.sum.add(chunk)
        outgoing.offset = offset + len(chunk)
        more = outgoing.offset < len(data)
        self._not_taken += len(chunk)
        self._send_with_blob(Chunk(outgoing.transfer, offset, 0 if more else outgoing.sum.value()), chunk)
        return more

    def drop(self, unwanted: Callable[[Any], bool]) -> None:
        """Forget the transfers under way whose header is `unwanted` (B-6)."""
        for session, transfers in list(self._waiting.items()):
            kept = deque(outgoing for outgoing in transfers if not unwanted(outgoing.header))
            for outgoing in transfers:
                if unwanted(outgoing.header):
                    self._post(TransferDropped(outgoing.transfer))
            if kept:
                self._waiting[session] = kept
            else:
                del self._waiting[session]

    def close(self) -> None:
        """The link is over: what waits goes nowhere."""
        self._closed = True
        self._waiting.clear()


class BulkReceiver:
    """The way in of one link: transfers that are announced and not complete.

    `post` tells the sender what was taken; `sharing` maps what it lends; `empty` makes room for data.
    """

    def __init__(
        self,
        post: Post | None = None,
        sharing: SharingLink | None = None,
        empty: Callable[[int], HostBytes] = aligned_empty,
    ) -> None:
        self._post = post
        self._sharing = sharing
        self._empty = empty
        self._incoming: dict[int, _Incoming] = {}
        self._announced_bytes = 0  # of those
        self._taken_untold = 0

    def header(
        self,
        transfer: int,
        nbytes: int,
        blob: Any,
        done: Done,
        *,
        checksum_given: int = 0,
        damaged: Damaged | None = None,
        room: Callable[[], HostBytes] | None = None,
        session: int = 0,
        run: int = 0,
    ) -> None:
        """A header has come, with `blob` where it was small. `done` gets the bytes, now or with the last chunk; where
        their checksum is wrong, `damaged` is called in its place. `room` makes another place for chunks than usual, and
        raises `ProtocolError` where `nbytes` do not fit there."""
        if nbytes <= CHUNK_BYTES and (blob is not None or nbytes <= 0):
            data = np.frombuffer(blob, np.uint8) if blob is not None else np.empty(0, np.uint8)
            if len(data) != nbytes:
                raise ProtocolError(f"a transfer of {nbytes} bytes came with {len(data)}")
            _deliver(data, done, damaged, checksum_given, checksum(data) if checksum_given else 0)
            return
        if transfer in self._incoming:
            raise ProtocolError(f"transfer {transfer} was announced twice")
        if len(self._incoming) == MAX_OPEN_TRANSFERS or self._announced_bytes + nbytes > MAX_ANNOUNCED_BYTES:
            raise ProtocolError(
                f"a transfer of {nbytes:,} bytes is over the limit: {len(self._incoming):,} of {MAX_OPEN_TRANSFERS:,} "
                f"transfers are open, with {self._announced_bytes:,} of {MAX_ANNOUNCED_BYTES:,} bytes"
            )
        empty = room or functools.partial(self._empty, nbytes)
        self._incoming[transfer] = _Incoming(nbytes, session, run, empty, done, damaged)
        self._announced_bytes += nbytes

    def chunk(self, message: Chunk, blob: Any) -> None:
        """A chunk has come."""
        incoming = self._announced(message.transfer)
        if blob is None:
            raise ProtocolError(f"a chunk of transfer {message.transfer} came without data")
        if incoming.add(message, np.frombuffer(blob, np.uint8)):
            self._forget(message.transfer)
        self._took(len(blob))

    def _took(self, nbytes: int) -> None:
        self._taken_untold += nbytes
        if self._taken_untold >= TELL_TAKEN_BYTES and self._post is not None:
            self._post(Taken(self._taken_untold))
            self._taken_untold = 0

    def shared(self, message: Shared) -> None:
        """All data of a transfer is in memory that the sender lends."""
        incoming = self._announced(message.transfer)
        if self._sharing is None or incoming.has_begun:
            raise ProtocolError(f"transfer {message.transfer} cannot be in shared memory")
        self._forget(message.transfer)
        data = self._sharing.borrow(message, incoming.nbytes)
        if not incoming.discarded:
            incoming.done(data)

    def dropped(self, message: TransferDropped) -> None:
        """The rest of a transfer does not come."""
        self._announced(message.transfer)
        self._forget(message.transfer)

    def drop_session(self, session: int) -> None:
        """What comes for this session is not wanted any more (B-6)."""
        for incoming in self._incoming.values():
            if incoming.session == session:
                incoming.discard()

    def drop_run(self, session: int, run: int) -> None:
        """What comes for this run is not wanted any more (B-6)."""
        for incoming in self._incoming.values():
            if incoming.run == run and incoming.session == session:
                incoming.discard()

    def close(self) -> None:
        """The link is over: what is not complete never will be, and its memory goes now (B-6)."""
        self._incoming.clear()
        self._announced_bytes = 0

    def _announced(self, transfer: int) -> _Incoming:
        incoming = self._incoming.get(transfer)
        if incoming is None:
            raise ProtocolError(f"data of transfer {transfer}, which was not announced")
        return incoming

    def _forget(self, transfer: int) -> None:
        self._announced_bytes -= self._incoming.pop(transfer).nbytes


def _deliver(data: HostBytes, done: Done, damaged: Damaged | None, given: int, found: int) -> None:
    if given in (found, 0):
        done(data)
    elif damaged is not None:
        damaged(given, found)
    else:
        raise ProtocolError(f"{len(data):,} bytes have the checksum {found:016x}, not {given:016x}")


class _Incoming:
    """A transfer that was announced, until it is complete."""

    __slots__ = ("_damaged", "_data", "_empty", "_next", "_sum", "discarded", "done", "nbytes", "run", "session")

    def __init__(
        self,
        nbytes: int,
        session: int,
        run: int,
        empty: Callable[[], HostBytes],
        done: Done,
        damaged: Damaged | None,
    ) -> None:
        self.nbytes = nbytes
        self.session = session
        self.run = run
        self.done = done
        self.discarded = False
        self._damaged = damaged
        self._empty = empty
        self._data: HostBytes | None = None  # made with the first chunk, for what is shared needs none
        self._next = 0  # the offset of the next chunk
        self._sum = RunningChecksum()

    @property
    def has_begun(self) -> bool:
        return self._next > 0

    def discard(self) -> None:
        self.discarded = True
        self._data = None

    def add(self, message: Chunk, piece: HostBytes) -> bool:
        """Put a chunk in its place; whether it was the last."""
        offset, end = message.offset, message.offset + len(piece)
        if offset != self._next or len(piece) != min(CHUNK_BYTES, self.nbytes - offset):
            raise ProtocolError(f"a chunk of {len(piece)} bytes at {offset} is not the next one of its transfer")
        self._next = end
        if not self.discarded:
            if self._data is None:
                self._data = self._make_room()
            self._data[offset:end] = piece
            self._sum.add(self._data[offset:end])
        if end < self.nbytes:
            return False
        if self._data is not None:
            _deliver(self._data, self.done, self._damaged, message.checksum, self._sum.value())
        return True

    def _make_room(self) -> HostBytes:
        try:
            return self._empty()
        except MemoryError:
            raise ProtocolError(f"there is no memory for a transfer of {self.nbytes:,} bytes") from None
