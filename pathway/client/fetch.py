"""Arrays on their way between this process and executors: cut into regions, put together again. No sockets.

A fetched array is never held twice: a region that is one stretch of the result is received into its place; another is
collected by itself, and only while it is under way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pathway.client.bindings import ArrayKind
from pathway.client.pending import Pending
from pathway.dataflow.layout import Layout, Region, shard_regions
from pathway.errors import ErrorInfo
from pathway.transport.bulk import HostBytes, as_bytes

COPY_BYTES = 4096
"""A received array up to this size is copied out of its frame, so that a scalar does not hold a whole frame."""


class ArrayFetch(Pending):
    """One array under way to this process; it ends with a read-only numpy array of the physical array."""

    __slots__ = ("binding", "dtype", "missing", "out", "shape", "wait_at")

    def __init__(self, kind: ArrayKind) -> None:
        super().__init__()
        self.binding = kind.binding
        self.wait_at: Callable[[ArrayFetch], None] | None = None  # a quicker way to wait for it
        self.shape = kind.physical.aval.shape
        self.dtype = kind.numpy_dtype
        self.missing = len(kind.regions())
        self.out: np.ndarray[Any, Any] | None = None
        if self.missing == 0:
            self._complete(np.empty(self.shape, self.dtype))

    def wait_here(self) -> None:
        """Wait until it ends, in the quickest way there is."""
        if not self.done and self.wait_at is not None:
            self.wait_at(self)
        self.wait()

    def place(self, region: Region, data: HostBytes) -> None:
        """A region has come, in memory that will not change."""
        shape = tuple(stop - start for start, stop in region)
        if len(data) != math.prod(shape) * self.dtype.itemsize:
            self.fail(_damaged(f"{len(data)} bytes came for a region of shape {shape} of {self.dtype}"))
            return
        piece = np.frombuffer(data, self.dtype).reshape(shape)
        if shape == self.shape and self.missing == 1:
            self._complete(piece.copy() if piece.nbytes <= COPY_BYTES else piece)
        else:
            self._whole()[_slices(region)] = piece
            self._placed()

    def room(self, region: Region) -> Room:
        """Where a region that comes in pieces is to go."""
        view = self._whole()[_slices(region)]
        return Room(self, region, view if view.flags.c_contiguous else np.empty(view.shape, self.dtype))

    def _collected(self, room: Room) -> None:
        whole = self._whole()
        if not np.shares_memory(room.array, whole):
            whole[_slices(room.region)] = room.array
        self._placed()

    def _placed(self) -> None:
        self.missing -= 1
        if self.missing == 0:
            self._complete(self._whole())

    def _whole(self) -> np.ndarray[Any, Any]:
        if self.out is None:
            self.out = np.empty(self.shape, self.dtype)
        return self.out

    def _complete(self, value: np.ndarray[Any, Any]) -> None:
        value.flags.writeable = False
        self.out = None
        self.resolve(value)


class Room:
    """The place of a region that comes in pieces: in the result, if it is one stretch of it."""

    __slots__ = ("array", "fetch", "flat", "region")

    def __init__(self, fetch: ArrayFetch, region: Region, array: np.ndarray[Any, Any]) -> None:
        self.fetch = fetch
        self.region = region
        self.array = array
        self.flat = as_bytes(array)

    def filled(self) -> None:
        """All pieces have come."""
        self.fetch._collected(self)


def host_regions(layout: Layout, devices_per_host: int) -> Iterator[tuple[int, Region]]:
    """For every host with devices of the layout, every distinct non-empty region they hold: (host, region)."""
    seen = set()
    for device, region in zip(layout.devices, shard_regions(layout.aval.shape, layout.sharding), strict=True):
        key = (device // devices_per_host, region)
        if key not in seen and all(stop > start for start, stop in region):
            seen.add(key)
            yield key


def piece_of(part: np.ndarray[Any, Any]) -> HostBytes:
    """A part's elements, dense in C order, as bytes that later changes of the array do not reach."""
    if not part.flags.c_contiguous or _is_writable(part):
        part = np.array(part, order="C", copy=True)
    return as_bytes(part)


def _is_writable(array: np.ndarray[Any, Any]) -> bool:
    """Whether anybody can change these elements: the array itself may be, or what it is a view of."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return True
        owner = owner.base
    return False


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in region)


def _damaged(message: str) -> ErrorInfo:
    return ErrorInfo("TransferError", f"data from an executor is damaged: {message}")
