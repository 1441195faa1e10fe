"""Arrays of a proxied session: what its handles stand for, and where the shards are.

A *buffer* is one of the runtime's, with a count of the values that need it; it is released with the last one. A
*value* is what a handle holds: a whole buffer, or the shard that a buffer has on one device (a *view*). Views cost
nothing until something computes with them: only then do executors make them buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pathway.client.bindings import ArrayKind, Binding
from pathway.client.fetch import ArrayFetch, Room
from pathway.client.pending import Pending
from pathway.dataflow.layout import Aval, Layout, Region
from pathway.dataflow.tiles import replicated
from pathway.errors import ErrorInfo
from pathway.proxy.cluster import ClusterIsland, ClusterView
from pathway.proxy.specs import Spread
from pathway.proxy.status import StatusError, invalid, of_info
from pathway.proxy.waiting import all_of
from pathway.transport import messages as m
from pathway.transport.bulk import HostBytes

CACHED_KINDS = 4096


class Buffer:
    """One buffer on executors. `run`: what computes it (None: the client's data)."""

    __slots__ = ("deleted", "kind", "number", "pins", "references", "run")

    def __init__(self, kind: ArrayKind, number: int, run: Pending | None = None) -> None:
        self.kind = kind
        self.number = number
        self.run = run
        self.references = 0
        self.pins = 0  # so many read it yet, behind the session's back: who is given it gets a copy
        self.deleted = False


class Value:
    """What a handle holds. `device`: of which only the shard there is meant (-1: all of the buffer)."""

    __slots__ = ("buffer", "device", "island", "layout")

    def __init__(self, island: ClusterIsland, buffer: Buffer, layout: Layout, device: int = -1) -> None:
        self.island = island
        self.buffer = buffer
        self.layout = layout
        self.device = device
        buffer.references += 1

    @property
    def aval(self) -> Aval:
        return self.layout.aval

    @property
    def devices(self) -> tuple[int, ...]:
        """As the client numbers them."""
        first = self.island.first
        return tuple(first + device for device in self.layout.devices)


class Values:
    """Makes, moves and frees values. Used by the session's own thread, except `release`."""

    def __init__(self, cluster: ClusterView) -> None:
        self._cluster = cluster
        self._core = cluster.core
        self._kinds: dict[tuple[Binding, Layout], ArrayKind] = {}

    # -- kinds -------------------------------------------------------------------------------------------------------

    def kind(self, island: ClusterIsland, layout: Layout) -> ArrayKind:
        """What arrays of this layout share, on the island as it is now."""
        binding = island.binding()
        key = (binding, layout)
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= CACHED_KINDS:
                self._kinds.clear()
            kind = ArrayKind(binding, layout.aval, layout.sharding, layout.devices, layout.memory)
            self._kinds[key] = kind
        return kind

    def layout(self, dtype: str, shape: tuple[int, ...], spread: Spread) -> tuple[ClusterIsland, Layout]:
        """Where an array of this sharding is."""
        island, devices = self.locate(spread.devices)
        if spread.memory and spread.memory not in island.memories:
            raise invalid(f"devices of {island.name} have no memory of kind {spread.memory}")
        return island, Layout(Aval(shape, dtype), spread.sharding, devices, spread.memory)

    def locate(self, devices: tuple[int, ...]) -> tuple[ClusterIsland, tuple[int, ...]]:
        """The island of devices, and their indices there."""
        return self._cluster.locate(devices, "an array")

    # -- made by the client ------------------------------------------------------------------------------------------

    def put(self, island: ClusterIsland, layout: Layout, array: np.ndarray[Any, Any]) -> Value:
        """A new array from host memory."""
        kind = self.kind(island, layout)
        inline = np.ascontiguousarray(array).tobytes() if array.nbytes <= m.INLINE_BYTES else None
        buffer = self._new_buffer(kind)
        bound = kind.binding.bound
        self._cluster.send(m.PutBuffer(buffer.number, bound.island, bound.incarnation, kind.physical, inline))
        if inline is None:
            self._cluster.connection.peers.put(kind, buffer.number, array)
        return Value(island, buffer, layout)

    def _new_buffer(self, kind: ArrayKind, run: Pending | None = None) -> Buffer:
        with self._core.lock:
            return Buffer(kind, self._core.new_buffer(), run)

    # -- shards ------------------------------------------------------------------------------------------------------

    def shards(self, value: Value) -> list[Value]:
        """A value of one device for every device of the array."""
        if len(value.layout.devices) == 1:
            return [Value(value.island, value.buffer, value.layout, value.device)]
        return [self.shard(value, position) for position in range(len(value.layout.devices))]

    def shard(self, value: Value, position: int) -> Value:
        """The shard at one place of the array's device list."""
        layout = value.layout
        shape = tuple(stop - start for start, stop in layout.region(position))
        device = layout.devices[position]
        single = Layout(Aval(shape, layout.aval.dtype), replicated(1, len(shape)), (device,), layout.memory)
        return Value(value.island, value.buffer, single, device)

    def assembled(self, island: ClusterIsland, layout: Layout, sources: Sequence[tuple[Buffer, int]]) -> Value:
        """An array whose shard on `layout.devices[i]` is what buffer `sources[i]` has there. A source is (buffer,
        device): the device must be that one, since shards do not move."""
        for (buffer, device), wanted in zip(sources, layout.devices, strict=True):
            if device != wanted:
                raise invalid(
                    f"a shard on device {device} cannot become one on device {wanted}: shards stay where they are"
                )
            self._check(buffer)
        whole = sources[0][0]
        if whole.kind.layout == layout and all(buffer is whole for buffer, _ in sources):
            return Value(island, whole, layout)
        kind = self.kind(island, layout)
        if any(buffer.kind.binding is not kind.binding for buffer, _ in sources):
            raise self.loss(next(b for b, _ in sources if b.kind.binding is not kind.binding))
        runs = [buffer.run for buffer, _ in sources if buffer.run is not None and not buffer.run.done]
        made = self._new_buffer(kind, all_of(runs) if runs else _failed(sources))
        bound = kind.binding.bound
        numbers = tuple(buffer.number for buffer, _ in sources)
        self._cluster.send(m.AssembleBuffer(made.number, bound.island, bound.incarnation, kind.physical, numbers))
        return Value(island, made, layout)

    def whole(self, value: Value) -> Buffer:
        """The buffer that is exactly this value: a view becomes one, once."""
        if value.device < 0 or len(value.buffer.kind.layout.devices) == 1:
            self._check(value.buffer)
            return value.buffer
        made = self.assembled(value.island, value.layout, [(value.buffer, value.device)])
        old, value.buffer, value.device = value.buffer, made.buffer, -1
        self._drop(old)
        return value.buffer

    def source(self, value: Value, position: int = 0) -> tuple[Buffer, int]:
        """Where the shard at one place of the array's device list is."""
        return value.buffer, value.layout.devices[position]

    # -- out ---------------------------------------------------------------------------------------------------------

    def fetch(self, value: Value) -> ArrayFetch:
        """The array on its way to this process."""
        buffer = value.buffer
        self._check(buffer)
        peers = self._cluster.connection.peers
        if value.device >= 0:
            kind = self.kind(value.island, value.layout)
            fetch: ArrayFetch = peers.fetch(kind, buffer.number, _ShardFetch(kind))
        else:
            fetch = peers.fetch(buffer.kind, buffer.number)
        run = buffer.run
        if run is not None and (not run.done or run.error is not None):

            def run_ended() -> None:
                if run.error is not None:
                    fetch.fail(run.error)

            run.add_waiter(run_ended)
        return fetch

    def pinned(self, value: Value) -> Value:
        """The same, to be read later whatever becomes of the client's handles, until `unpin`."""
        self._check(value.buffer)
        value.buffer.pins += 1
        return Value(value.island, value.buffer, value.layout, value.device)

    def unpin(self, value: Value) -> None:
        """It was read. Any thread."""
        value.buffer.pins -= 1
        self.release(value)

    # -- their end ---------------------------------------------------------------------------------------------------

    def release(self, value: Value) -> None:
        """A handle goes."""
        self._drop(value.buffer)

    def _drop(self, buffer: Buffer) -> None:
        buffer.references -= 1
        if not buffer.references and not buffer.kind.binding.lost and self._core.release(buffer.kind, buffer.number):
            self._cluster.connection.flush_releases_soon()

    def _check(self, buffer: Buffer) -> None:
        if buffer.deleted:
            raise invalid("the array has been deleted or donated")
        if buffer.kind.binding.error is not None:
            raise self.loss(buffer)

    @staticmethod
    def loss(buffer: Buffer) -> StatusError:
        """Why a buffer is not there any more."""
        error = buffer.kind.binding.error
        if error is not None:
            return of_info(error)
        bound = buffer.kind.binding.bound
        return of_info(_lost(bound.island, bound.incarnation))


def _lost(island: str, incarnation: int) -> ErrorInfo:
    return ErrorInfo(
        "IslandLostError", f"incarnation {incarnation} of island {island} is gone, and what it held", island=island
    )


def _failed(sources: Sequence[tuple[Buffer, int]]) -> Pending | None:
    return next((b.run for b, _ in sources if b.run is not None and b.run.error is not None), None)


class _ShardFetch(ArrayFetch):
    """One shard by itself: what comes says where it is in the array that it belongs to."""

    __slots__ = ()

    def place(self, region: Region, data: HostBytes) -> None:
        super().place(_at_zero(region), data)

    def room(self, region: Region) -> Room:
        return super().room(_at_zero(region))


def _at_zero(region: Region) -> Region:
    return tuple((0, stop - start) for start, stop in region)
