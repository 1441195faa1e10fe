"""Bulk data on links: transfers cut into chunks, with what is small going past what is large.

A transfer is a header, which any message can be, and bytes. Up to `CHUNK_BYTES` they travel in one frame right after
the header; beyond that as `Chunk`s.

Invariants
  B-1  At most `WINDOW_BYTES` of chunks per link are with ZeroMQ and have not left yet. The rest waits here, so a small
       transfer is behind one window at most, and large ones take turns, chunk by chunk.
  B-2  Data leaves without a copy, from memory that must not change before it has left; it is kept alive until then.
       ZeroMQ lets go of a chunk once it is with the kernel: that is how it is known that it left, and no
       acknowledgement is needed.
  B-3  A received transfer goes straight to where it belongs: into one allocation, aligned as XLA likes its buffers. A
       chunk outside of its transfer, or of none that was announced, is the sender's mistake: `ProtocolError`. So is
       announcing more than a host could take: an announcement costs its sender nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from pathway.errors import ProtocolError
from pathway.transport.messages import CHUNK_BYTES, Chunk, Message

WINDOW_BYTES = 4 * CHUNK_BYTES

MAX_OPEN_TRANSFERS = 65_536
MAX_ANNOUNCED_BYTES = 1 << 41
"""What one link may have announced and not sent yet."""

ALIGNMENT_BYTES = 64
"""XLA takes host memory of this alignment as it is, and copies any other."""

HostBytes = np.ndarray[Any, np.dtype[np.uint8]]

Post = Callable[[Message], None]
SendWithBlob = Callable[[Message, Any], None]
InOwnThread = Callable[[Callable[[], None]], None]


def as_bytes(array: np.ndarray[Any, Any]) -> HostBytes:
    """The memory of a dense array, flat."""
    return array.reshape(-1).view(np.uint8)


def aligned_empty(nbytes: int) -> HostBytes:
    """Fresh memory that XLA can take as it is."""
    memory = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + nbytes]


class BulkSender:
    """The way out of one link. Used in the link's thread; `in_own_thread` brings a callable there from any other."""

    def __init__(self, post: Post, send_with_blob: SendWithBlob, in_own_thread: InOwnThread) -> None:
        self._post = post
        self._send_with_blob = send_with_blob
        self._in_own_thread = in_own_thread
        self._waiting: deque[tuple[int, HostBytes, int]] = deque()  # transfer, data, offset of the next chunk
        self._with_zeromq = 0
        self._closed = False

    def send(self, header: Message, transfer: int, data: HostBytes) -> None:
        """Send `header`, which names `transfer` and the size of `data`, and `data`. The caller flushes the link."""
        nbytes = len(data)
        if nbytes == 0:
            self._post(header)
        elif nbytes <= CHUNK_BYTES:
            self._send_with_blob(header, data)
        else:
            self._post(header)
            self._waiting.append((transfer, data, 0))
            self._fill_window()

    def _fill_window(self) -> None:
        while self._waiting and self._with_zeromq < WINDOW_BYTES:
            transfer, data, offset = self._waiting.popleft()
            chunk = data[offset : offset + CHUNK_BYTES]
            self._with_zeromq += len(chunk)
            left = functools.partial(self._chunk_left, len(chunk))
            weakref.finalize(chunk, self._in_own_thread, left).atexit = False  # B-2
            self._send_with_blob(Chunk(transfer, offset), chunk)
            if offset + CHUNK_BYTES < len(data):
                self._waiting.append((transfer, data, offset + CHUNK_BYTES))

    def _chunk_left(self, nbytes: int) -> None:
        self._with_zeromq -= nbytes
        if not self._closed:
            self._fill_window()

    def close(self) -> None:
        """The link is over: what waits goes nowhere."""
        self._closed = True
        self._waiting.clear()


class BulkReceiver:
    """The way in of one link: transfers that are announced and not complete."""

    def __init__(self) -> None:
        self._incoming: dict[int, _Incoming] = {}
        self._announced_bytes = 0  # of those

    def header(self, transfer: int, nbytes: int, blob: Any, done: Callable[[HostBytes], None]) -> None:
        """A header has come, with `blob` where it was small. `done` gets the bytes, now or with the last chunk."""
        if nbytes <= CHUNK_BYTES:
            data = np.frombuffer(blob, np.uint8) if blob is not None else np.empty(0, np.uint8)
            if len(data) != nbytes:
                raise ProtocolError(f"a transfer of {nbytes} bytes came with {len(data)}")
            done(data)
            return
        if transfer in self._incoming:
            raise ProtocolError(f"transfer {transfer} was announced twice")
        if len(self._incoming) == MAX_OPEN_TRANSFERS or self._announced_bytes + nbytes > MAX_ANNOUNCED_BYTES:
            raise ProtocolError(
                f"a transfer of {nbytes:,} bytes is over the limit: {len(self._incoming):,} of {MAX_OPEN_TRANSFERS:,} "
                f"transfers are open, with {self._announced_bytes:,} of {MAX_ANNOUNCED_BYTES:,} bytes"
            )
        try:
            self._incoming[transfer] = _Incoming(nbytes, done)
        except MemoryError:
            raise ProtocolError(f"there is no memory for a transfer of {nbytes:,} bytes") from None
        self._announced_bytes += nbytes

    def chunk(self, message: Chunk, blob: Any) -> None:
        """A chunk has come."""
        incoming = self._incoming.get(message.transfer)
        if incoming is None or blob is None:
            raise ProtocolError(f"a chunk of transfer {message.transfer}, which was not announced")
        if incoming.add(message.offset, np.frombuffer(blob, np.uint8)):
            del self._incoming[message.transfer]
            self._announced_bytes -= incoming.nbytes


class _Incoming:
    __slots__ = ("_chunks", "_data", "_done", "nbytes")

    def __init__(self, nbytes: int, done: Callable[[HostBytes], None]) -> None:
        self.nbytes = nbytes
        self._data = aligned_empty(nbytes)
        self._chunks = set(range(0, nbytes, CHUNK_BYTES))  # offsets of those to come
        self._done = done

    def add(self, offset: int, piece: HostBytes) -> bool:
        """Put a chunk in its place; whether it was the last."""
        expected = min(CHUNK_BYTES, len(self._data) - offset)
        if offset not in self._chunks or len(piece) != expected:
            raise ProtocolError(f"a chunk of {len(piece)} bytes at {offset} is not one of its transfer's")
        self._chunks.discard(offset)
        self._data[offset : offset + len(piece)] = piece
        if self._chunks:
            return False
        self._done(self._data)
        return True
