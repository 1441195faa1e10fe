"""Data on its way to this host: edges from other parts, and what clients put. Assembled here, parked when early.

Invariants
  A-1  Only bulk may come before the message that explains it. It is parked by key; the end of its session drops it, and
       so does a later run of the session, for runs of one session begin in the order of their numbers, those that the
       client numbers and those that the scheduler does each for themselves.
  A-3  What a client began to put and cannot complete, because its link has ended, is an error in the buffer; or, where
       nobody has announced the buffer, it is dropped.
  A-2  An edge is reported once: when all pieces for this host's devices are here and its array is made, or as the
       first error. A put likewise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pathway.dataflow.layout import Layout, Region, numpy_dtype
from pathway.errors import ErrorInfo, TransferError, to_exception
from pathway.executor.backend import Array, Backend, HostArray, as_shard, describe_failure
from pathway.executor.bind import BoundArrival
from pathway.executor.runs import Run
from pathway.executor.store import ABSENT, Cell, Poison, Store
from pathway.transport.bulk import HostBytes, aligned_empty
from pathway.transport.messages import OWN_RUNS, PutOnIsland

PieceName = tuple[int, Region]
"""The first receiving device, and the region."""

EdgeReport = Callable[[int, int, int, ErrorInfo | None], None]
"""(session, run, edge, error): the edge is here, or never will be."""

BufferReport = Callable[[int, int, ErrorInfo | None], None]


class _Edge:
    """An edge of one run, until it is complete."""

    __slots__ = ("bound", "pieces")

    def __init__(self, bound: BoundArrival) -> None:
        self.bound = bound
        self.pieces: dict[PieceName, HostArray | Array] = {}


class EdgeArrivals:
    """The edges into the runs of this host."""

    def __init__(self, backend: Backend, report: EdgeReport, is_closed: Callable[[int], bool]) -> None:
        self._backend = backend
        self._report = report
        self._is_closed = is_closed
        self._runs: dict[tuple[int, int], Run] = {}
        self._last_begun: dict[tuple[int, bool], int] = {}  # by session, and who numbers the run
        self._parked: dict[int, dict[int, list[Callable[[Run], None]]]] = {}  # session -> run -> what to do with it

    def begin(self, run: Run) -> None:
        """The run exists: expect its edges, and take what has come for them."""
        session, number = run.session, run.run
        for arrival in run.part.arrivals:
            run.edges[arrival.edge] = _Edge(arrival)
        if run.part.arrivals:
            self._runs[session, number] = run
        kind = number >= OWN_RUNS
        self._last_begun[session, kind] = max(number, self._last_begun.get((session, kind), 0))
        for arrival in run.part.arrivals:
            if not arrival.expected:
                self._complete(run, run.edges[arrival.edge])
        parked = self._parked.get(session)
        if parked is not None:
            before = range(OWN_RUNS if kind else 0, number)
            for late in [other for other in parked if other in before and (session, other) not in self._runs]:
                del parked[late]
            for action in parked.pop(number, ()):
                action(run)
            if not parked:
                del self._parked[session]

    def end(self, session: int, run: int) -> None:
        self._runs.pop((session, run), None)

    def give_up(self, session: int, run: int) -> None:
        """The run was cancelled, or never begins: what has come for it goes, and what comes is not kept."""
        parked = self._parked.get(session)
        if parked is not None and parked.pop(run, None) is not None and not parked:
            del self._parked[session]
        if not self._is_closed(session):
            kind = run >= OWN_RUNS
            self._last_begun[session, kind] = max(run, self._last_begun.get((session, kind), 0))

    def close(self, session: int) -> None:
        """Drop all that the session has under way."""
        self._parked.pop(session, None)
        for kind in (False, True):
            self._last_begun.pop((session, kind), None)
        for key in [key for key in self._runs if key[0] == session]:
            del self._runs[key]

    def bytes_came(self, session: int, run: int, edge: int, name: PieceName, data: HostBytes) -> None:
        """A piece has come from another executor."""
        self._when_begun(session, run, lambda run: self._take_bytes(run, edge, name, data))

    def array_came(self, session: int, run: int, edge: int, name: PieceName, data: HostArray | Array) -> None:
        """A piece has come from a device of this very host, or to the device that is to have it."""
        self._when_begun(session, run, lambda run: self._take(run, edge, name, data))

    def failed(self, session: int, run: int, edge: int, error: ErrorInfo) -> None:
        """Nothing will come on this edge."""
        self._when_begun(session, run, lambda run: self._fail(run, edge, error))

    def _when_begun(self, session: int, run_number: int, action: Callable[[Run], None]) -> None:
        run = self._runs.get((session, run_number))
        if run is not None:
            action(run)
        elif not self._is_closed(session) and run_number > self._last_begun.get((session, run_number >= OWN_RUNS), 0):
            self._parked.setdefault(session, {}).setdefault(run_number, []).append(action)

    def _take_bytes(self, run: Run, edge_index: int, name: PieceName, data: HostBytes) -> None:
        edge = run.edges.get(edge_index)
        if edge is None:
            return
        shape = tuple(stop - start for start, stop in name[1])
        try:
            piece = data.view(numpy_dtype(edge.bound.target.aval.dtype)).reshape(shape)
        except (ValueError, OverflowError):
            message = f"{len(data)} bytes came for a piece of shape {shape} of {edge.bound.target.aval}"
            self._fail(run, edge_index, ErrorInfo(TransferError.__name__, message))
            return
        self._take(run, edge_index, name, piece)

    def _take(self, run: Run, edge_index: int, name: PieceName, piece: HostArray | Array) -> None:
        edge = run.edges.get(edge_index)
        if edge is None or name not in edge.bound.expected:
            return
        edge.pieces[name] = piece
        if len(edge.pieces) == len(edge.bound.expected):
            self._complete(run, edge)

    def _complete(self, run: Run, edge: _Edge) -> None:
        del run.edges[edge.bound.edge]
        error = None
        try:
            run.slots[edge.bound.slot] = self._backend.array(edge.bound.target, _assemble(edge.bound, edge.pieces))
        except Exception as caught:
            error = describe_failure(caught)
            run.slots[edge.bound.slot] = Poison(error)
        self._report(run.session, run.run, edge.bound.edge, error)

    def _fail(self, run: Run, edge_index: int, error: ErrorInfo) -> None:
        edge = run.edges.pop(edge_index, None)
        if edge is not None:
            run.slots[edge.bound.slot] = Poison(error)
            self._report(run.session, run.run, edge_index, error)


def _assemble(bound: BoundArrival, pieces: dict[PieceName, HostArray | Array]) -> dict[int, HostArray | Array]:
    dtype = numpy_dtype(bound.target.aval.dtype)
    shards: dict[int, HostArray | Array] = {}
    for device, region in bound.regions.items():
        names = bound.pieces[device]
        if len(names) == 1 and names[0][1] == region:
            shards[device] = as_shard(pieces[names[0]])
            continue
        shape = tuple(stop - start for start, stop in region)
        whole = aligned_empty(int(np.prod(shape)) * dtype.itemsize).view(dtype).reshape(shape)
        for name in names:
            within = tuple(slice(start - at, stop - at) for (start, stop), (at, _) in zip(name[1], region, strict=True))
            whole[within] = pieces[name]
        shards[device] = whole
    return shards


class _Put:
    """A buffer that a client puts, until it is complete. `layout` is None until the put is announced."""

    __slots__ = ("cell", "error", "layout", "regions")

    def __init__(self) -> None:
        self.error: ErrorInfo | None = None
        self.layout: Layout | None = None
        self.cell: Cell | None = None
        self.regions: dict[Region, HostBytes] = {}


class PutArrivals:
    """What clients put on this host's devices."""

    def __init__(
        self, backend: Backend, store: Store, report: BufferReport, nbytes_of: Callable[[Layout], int]
    ) -> None:
        self._backend = backend
        self._store = store
        self._report = report
        self._nbytes_of = nbytes_of
        self._puts: dict[int, dict[int, _Put]] = {}  # by session, by buffer

    def announce(self, message: PutOnIsland) -> None:
        """The put is in the island's order: store its data or its error, or expect the client's regions."""
        session, buffer, layout, data = message.session, message.buffer, message.layout.physical, message.data
        origin = (f"{layout.aval} that was put", message.source)
        cell = self._store.expect(session, buffer, layout, 0 if message.error else self._nbytes_of(layout), origin)
        if message.error is not None:
            self._drop(session, buffer)
            cell.spoil(Poison(message.error))
            cell.settle()
            return
        if data is not None:
            self._fill(cell, layout, lambda: self._backend.array_of_bytes(layout, data))
            return
        if not self._backend.holds(layout):
            self._drop(session, buffer)
            self._fill(cell, layout, lambda: None)
            return
        put = self._puts.setdefault(session, {}).setdefault(buffer, _Put())
        put.layout, put.cell = layout, cell
        self._finish_if_complete(session, buffer, put)

    def bytes_came(self, session: int, buffer: int, region: Region, data: HostBytes) -> None:
        """A region has come from the client."""
        put = self._under_way(session, buffer)
        if put is not None:
            put.regions[region] = data
            self._finish_if_complete(session, buffer, put)

    def failed(self, session: int, buffer: int, error: ErrorInfo) -> None:
        """A region has come, and is not what the client sent."""
        put = self._under_way(session, buffer)
        if put is not None:
            put.error = error
            self._finish_if_complete(session, buffer, put)

    def _under_way(self, session: int, buffer: int) -> _Put | None:
        if self._store.is_closed(session):
            return None
        cell = self._store.find(session, buffer)
        if cell is not None and cell.value is not None:
            return None
        return self._puts.setdefault(session, {}).setdefault(buffer, _Put())

    def _finish_if_complete(self, session: int, buffer: int, put: _Put) -> None:
        layout, cell = put.layout, put.cell
        if layout is None or cell is None:
            return
        local = self._backend.local
        wanted = {device: layout.region(p) for p, device in enumerate(layout.devices) if device in local}
        empty = {region for region in wanted.values() if any(start == stop for start, stop in region)}
        strange = put.regions.keys() - set(wanted.values())
        if not (strange or put.error or put.regions.keys() >= set(wanted.values()) - empty):
            return
        self._drop(session, buffer)
        dtype = numpy_dtype(layout.aval.dtype)

        def array() -> Any:
            if put.error is not None:
                raise to_exception(put.error)
            if strange:
                raise TransferError(f"no device of this host holds {next(iter(strange))} of {layout}")
            return self._backend.array(
                layout,
                {
                    device: put.regions.get(region, np.empty(0, np.uint8))
                    .view(dtype)
                    .reshape([stop - start for start, stop in region])
                    for device, region in wanted.items()
                },
            )

        self._report(session, buffer, self._fill(cell, layout, array))

    def _fill(self, cell: Cell, layout: Layout, make: Callable[[], Any]) -> ErrorInfo | None:
        error = None
        try:
            value = make() if self._backend.holds(layout) else None
            cell.value = ABSENT if value is None else value
        except Exception as caught:
            error = describe_failure(caught)
            cell.value = Poison(error)
        cell.settle()
        return error

    def _drop(self, session: int, buffer: int) -> None:
        puts = self._puts.get(session)
        if puts is not None:
            puts.pop(buffer, None)
            if not puts:
                del self._puts[session]

    def free(self, session: int, buffers: tuple[int, ...]) -> None:
        """Released before it was complete. The leader frees only what is defined, so this is what came too late."""
        for buffer in buffers:
            self._drop(session, buffer)

    def client_left(self, session: int) -> None:
        """The links that the session's regions came by have ended: what is not complete never will be."""
        puts = self._puts.get(session, {})
        for buffer, put in list(puts.items()):
            if put.layout is None:
                self._drop(session, buffer)
            else:
                message = f"buffer {buffer}: the client's link ended before all of its data had come"
                put.error = ErrorInfo(TransferError.__name__, message)
                self._finish_if_complete(session, buffer, put)

    def close(self, session: int) -> None:
        self._puts.pop(session, None)
