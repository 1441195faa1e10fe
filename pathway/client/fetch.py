"""Arrays on their way between this process and executors: cut into regions, put together again. No sockets.

A fetched array is never held twice: a region that is one stretch of the result is received into its place; another is
collected by itself, and only while it is under way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from pathway.client.bindings import ArrayKind
from pathway.client.pending import Pending
from pathway.dataflow.layout import Layout, Region, numpy_dtype, shard_regions
from pathway.errors import ErrorInfo
from pathway.transport.bulk import HostBytes, as_bytes

COPY_BYTES = 4096
"""A received array up to this size is copied out of its frame, so that a scalar does not hold a whole frame."""


class ArrayFetch(Pending):
    """One array under way to this process; it ends with a read-only numpy array of the physical array."""

    __slots__ = ("binding", "dtype", "missing", "out", "shape")

    def __init__(self, kind: ArrayKind) -> None:
        super().__init__()
        aval = kind.aval.physical
        self.binding = kind.binding
        self.shape = aval.shape
        self.dtype: np.dtype[Any] = numpy_dtype(aval.dtype)
        self.missing = len(kind.regions())
        self.out: np.ndarray[Any, Any] | None = None
        if self.missing == 0:
            self._complete(np.empty(self.shape, self.dtype))

    def place(self, region: Region, data: memoryview) -> None:
        """A region has come whole, in one frame."""
        shape = tuple(stop - start for start, stop in region)
        if len(data) != math.prod(shape) * self.dtype.itemsize:
            self.fail(_damaged(f"{len(data)} bytes came for a region of shape {shape} of {self.dtype}"))
            return
        piece = np.frombuffer(data, self.dtype).reshape(shape)
        if shape == self.shape and self.missing == 1:
            self._complete(piece.copy() if piece.nbytes <= COPY_BYTES else piece)
        else:
            self._whole()[_slices(region)] = piece
            self.placed()

    def room_for(self, region: Region) -> tuple[HostBytes, np.ndarray[Any, Any]]:
        """Where a region that comes in pieces goes: (its bytes, flat; the array to store with `place_collected`)."""
        view = self._whole()[_slices(region)]
        collected = view if view.flags.c_contiguous else np.empty(view.shape, self.dtype)
        return as_bytes(collected), collected

    def place_collected(self, region: Region, collected: np.ndarray[Any, Any]) -> None:
        """All pieces of a region have come into `collected`, as `room_for` returned it."""
        whole = self._whole()
        if not np.shares_memory(collected, whole):
            whole[_slices(region)] = collected
        self.placed()

    def placed(self) -> None:
        """One more region is there."""
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


class Incoming:
    """One transfer in chunks: what of it is still to come."""

    __slots__ = ("collected", "fetch", "flat", "left", "region")

    def __init__(self, fetch: ArrayFetch, region: Region, nbytes: int) -> None:
        self.fetch = fetch
        self.region = region
        self.left = nbytes
        self.flat, self.collected = fetch.room_for(region)
        if self.flat.nbytes != nbytes:
            fetch.fail(_damaged(f"{nbytes} bytes announced for a region of {self.flat.nbytes}"))

    def add(self, offset: int, data: memoryview) -> bool:
        """A chunk came; True when it was the last."""
        if self.fetch.done:
            return True
        if offset < 0 or offset + len(data) > self.flat.nbytes:
            self.fetch.fail(_damaged(f"a chunk of {len(data)} bytes at {offset} is outside of its transfer"))
            return True
        self.flat[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        self.left -= len(data)
        if self.left > 0:
            return False
        self.fetch.place_collected(self.region, self.collected)
        return True


def host_regions(layout: Layout, devices_per_host: int) -> Iterator[tuple[int, Region]]:
    """For every host with devices of the layout, every distinct non-empty region they hold: (host, region)."""
    seen = set()
    for device, region in zip(layout.devices, shard_regions(layout.aval.shape, layout.sharding), strict=True):
        key = (device // devices_per_host, region)
        if key not in seen and all(stop > start for start, stop in region):
            seen.add(key)
            yield key


def piece_of(value: np.ndarray[Any, Any], region: Region) -> HostBytes:
    """The region's elements, dense in C order, as bytes that later changes of `value` do not reach."""
    piece = value[_slices(region)]
    if not piece.flags.c_contiguous or _is_writable(piece):
        piece = np.array(piece, order="C", copy=True)
    return as_bytes(piece)


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
    return ErrorInfo("TransferError", f"an executor sent damaged data: {message}")
