"""Large blocks of memory that stay warm: what is given back is used again with its pages in place.

The first touch of a page costs several times what copying onto it does (on a virtual machine 2 us for 4 KiB: 1.4 GB/s
against 13), and a large block from malloc is new pages every time. So transfers take their memory from here. The same
pool serves memory that is shared with other processes, and memory of this one alone, which has huge pages.

A pool has a few arenas, each a mapping much larger than what is in use of it: address space is free, pages are not. A
block is a stretch of an arena.

Invariants
  W-1  Blocks in use do not overlap, and lie in their arenas.
  W-2  Blocks that were given back are kept warm while all pages of the pool are at most `spare_bytes` more than were in
       use at once within the last moments (`keep_s`, at most twice that). So what is kept never raises the peak of the
       process by more than `spare_bytes`, and an idle pool shrinks to that, once somebody calls `trim`.
  W-3  Nothing is in use beyond `limit_bytes`: then there is no block, and the caller goes another way.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

HostBytes = np.ndarray[Any, np.dtype[np.uint8]]

MIB = 1 << 20

SMALL_STEP_BYTES = 64 * 1024
"""Blocks are multiples of this, which is how many bytes Linux maps at a touch of a shared page."""

LARGE_STEP_BYTES = 2 * MIB
"""Blocks from this size on are multiples of it and aligned to it: a huge page."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _advise(address: int, nbytes: int, advice: int) -> bool:
    """`madvise`, without the interpreter's lock (Python's own keeps it, and giving pages back takes milliseconds)."""
    return bool(_libc.madvise(address, nbytes, advice) == 0)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_HEAP_SPARE_BYTES = 16 * MIB
_FROM_HEAP_BYTES = 4 * MIB


def keep_heap_warm() -> None:
    """Have malloc keep some MiB of what is freed, for ZeroMQ: it allocates every frame that comes, and a page that
    malloc gave back in between costs a fault again, 60 of them a MiB. For processes that are ours alone."""
    mallopt = getattr(_libc, "mallopt", None)  # glibc has it
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _HEAP_SPARE_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _FROM_HEAP_BYTES)


def rounded(nbytes: int) -> int:
    """The size of a block for so many bytes."""
    step = SMALL_STEP_BYTES if nbytes <= LARGE_STEP_BYTES - SMALL_STEP_BYTES else LARGE_STEP_BYTES
    return max(1, -(-nbytes // step)) * step


class Arena(ABC):
    """A large mapping, of which only what was touched and not discarded takes memory."""

    default_bytes: int

    def __init__(self, mapping: mmap.mmap, start: int, nbytes: int) -> None:
        self.memory: HostBytes = np.frombuffer(mapping, np.uint8, nbytes, start)
        self.nbytes = nbytes
        self._free = [(0, nbytes)]  # (start, stop), sorted, never adjacent
        self._address = int(self.memory.ctypes.data)
        _advise(self._address, nbytes, mmap.MADV_HUGEPAGE)  # where the kernel has them for this kind of memory

    def take(self, nbytes: int) -> int | None:
        """The offset of a new block of a `rounded` size; None if there is no room."""
        step = LARGE_STEP_BYTES if nbytes >= LARGE_STEP_BYTES else SMALL_STEP_BYTES
        for index, (start, stop) in enumerate(self._free):
            offset = -(-start // step) * step
            if offset + nbytes <= stop:
                self._free[index : index + 1] = [
                    piece for piece in ((start, offset), (offset + nbytes, stop)) if piece[0] < piece[1]
                ]
                return offset
        return None

    def discard(self, offset: int, nbytes: int) -> None:
        """The block is free, and its pages go back to the system."""
        _advise(self._address + offset, nbytes, self._discard_advice)
        free, start, stop = self._free, offset, offset + nbytes
        index = bisect_left(free, (start, stop))
        if index < len(free) and free[index][0] == stop:
            stop = free.pop(index)[1]
        if index > 0 and free[index - 1][1] == start:
            start = free.pop(index - 1)[0]
        insort(free, (start, stop))

    @property
    @abstractmethod
    def _discard_advice(self) -> int: ...


class PrivateArena(Arena):
    """Memory of this process alone, of huge pages where the system lets it."""

    default_bytes = 256 * MIB
    _discard_advice = mmap.MADV_DONTNEED

    def __init__(self, nbytes: int) -> None:
        no_reserve = 0x4000  # MAP_NORESERVE, which the module names from Python 3.13 on
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
        mapping = mmap.mmap(-1, nbytes + LARGE_STEP_BYTES, flags=flags)
        start = -int(np.frombuffer(mapping, np.uint8).ctypes.data) % LARGE_STEP_BYTES
        super().__init__(mapping, start, nbytes)


class Block:
    """Part of an arena: in use, or warm in the pool. `memory` is all of it, which may be more than was asked for."""

    __slots__ = ("arena", "is_fresh", "memory", "nbytes", "offset")

    def __init__(self, arena: Arena, offset: int, nbytes: int) -> None:
        self.arena = arena
        self.offset = offset
        self.nbytes = nbytes
        self.is_fresh = True  # it has no pages yet
        self.memory = arena.memory[offset : offset + nbytes]


class Pool:
    """Blocks of arenas of one kind. Usable from any thread."""

    def __init__(
        self,
        new_arena: Callable[[int], Arena],
        arena_bytes: int,
        *,
        limit_bytes: int,
        spare_bytes: int = 32 * MIB,
        keep_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._new_arena = new_arena
        self._arena_bytes = arena_bytes
        self._limit_bytes = limit_bytes
        self._spare_bytes = spare_bytes
        self._keep_s = keep_s
        self._clock = clock
        self._lock = threading.Lock()
        self._arenas: list[Arena] = []
        self._warm: dict[Block, None] = {}  # oldest first
        self._warm_by_size: dict[int, list[Block]] = {}
        self._given_back: deque[Block] = deque()
        self._peaks = (0, 0)  # of the bytes in use, in this period and the one before
        self._period_ends = clock() + keep_s
        self.used_bytes = 0
        self.warm_bytes = 0

    def take(self, nbytes: int) -> Block | None:
        """A block of at least `nbytes`, whose content is whatever it was; warm if one of that size is. None: W-3."""
        size = rounded(nbytes)
        with self._lock:
            self._sort_in()
            if self.used_bytes + size > self._limit_bytes:
                return None
            same = self._warm_by_size.get(size)
            if same:
                block = same[-1]
                self._cool(block)
                self._use(size)
                return block
            self._use(size)
            self._discard_beyond_peak()
            for arena in self._arenas:
                offset = arena.take(size)
                if offset is not None:
                    return Block(arena, offset, size)
            arena = self._new_arena(max(size, self._arena_bytes))
            self._arenas.append(arena)
            offset = arena.take(size)
            assert offset is not None
            return Block(arena, offset, size)

    def give_back(self, block: Block) -> None:
        """The block is not in use any more. Safe in finalizers: it neither waits nor calls the system."""
        self._given_back.append(block)
        if self._lock.acquire(blocking=False):  # who has it, perhaps this very thread, or the next to take, sorts it in
            try:
                self._sort_in()
            finally:
                self._lock.release()

    def trim(self) -> None:
        """Let go of what has been warm in vain. To be called now and then."""
        with self._lock:
            self._sort_in()
            self._discard_beyond_peak()

    def _sort_in(self) -> None:
        while self._given_back:
            block = self._given_back.popleft()
            block.is_fresh = False
            self.used_bytes -= block.nbytes
            self.warm_bytes += block.nbytes
            self._warm[block] = None
            self._warm_by_size.setdefault(block.nbytes, []).append(block)

    def _use(self, nbytes: int) -> None:
        self.used_bytes += nbytes
        now, before = self._peaks
        self._peaks = max(now, self.used_bytes), before

    def _cool(self, block: Block) -> None:
        del self._warm[block]
        same = self._warm_by_size[block.nbytes]
        if same[-1] is block:
            same.pop()
        else:
            same.remove(block)
        if not same:
            del self._warm_by_size[block.nbytes]
        self.warm_bytes -= block.nbytes

    def _discard_beyond_peak(self) -> None:  # W-2
        time_now = self._clock()
        if time_now >= self._period_ends:
            idle = time_now >= self._period_ends + self._keep_s
            self._peaks = self.used_bytes, self.used_bytes if idle else self._peaks[0]
            self._period_ends = time_now + self._keep_s
        bound = max(self._peaks) + self._spare_bytes
        while self._warm and self.used_bytes + self.warm_bytes > bound:
            block = next(iter(self._warm))
            self._cool(block)
            block.arena.discard(block.offset, block.nbytes)


def private_pool(**settings: Any) -> Pool:
    """Warm memory of this process, for what it receives."""
    return Pool(PrivateArena, PrivateArena.default_bytes, **{"limit_bytes": half_of_memory(), **settings})


def half_of_memory() -> int:
    """Half of the machine's memory, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
