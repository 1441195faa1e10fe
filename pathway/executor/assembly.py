"""Buffers made of shards that other buffers have on the same devices: views of arrays, and arrays of views. No copies.

Invariants
  B-1  A buffer is assembled once, when all its sources have values, and is reported once. A source that is an error, or
       was freed before it had a value, makes it an error.
  B-2  Sources are found by number, also such as are not announced yet, and held from then on: that they are released
       right behind does not take them away (S-1).
"""

from __future__ import annotations

from collections.abc import Callable

from pathway.dataflow.layout import Layout
from pathway.errors import DeletedError, ErrorInfo
from pathway.executor.arrivals import BufferReport
from pathway.executor.backend import Backend, describe_failure
from pathway.executor.spill import brought_back
from pathway.executor.store import ABSENT, Cell, Poison, Store
from pathway.transport.messages import AssembleOnIsland


class Assemblies:
    """Used in the trio thread."""

    def __init__(
        self, backend: Backend, store: Store, report: BufferReport, nbytes_of: Callable[[Layout], int]
    ) -> None:
        self._backend = backend
        self._store = store
        self._report = report
        self._nbytes_of = nbytes_of

    def assemble(self, message: AssembleOnIsland) -> None:
        """Make the buffer now, or when its sources are there."""
        layout = message.layout.physical
        cell = self._store.expect(message.session, message.buffer, layout, self._nbytes_of(layout))
        local = self._backend.local
        sources: dict[int, Cell] = {}
        for device, buffer in zip(layout.devices, message.sources, strict=False):
            if device in local:
                source = self._store.find_or_park(message.session, buffer)
                if source is None:
                    return  # the session is closed
                source.is_source = True
                sources[device] = source
        if not sources:
            cell.value = ABSENT
            cell.settle()
            return
        waits = [source for source in dict.fromkeys(sources.values()) if source.value is None and not source.settled]
        left = len(waits)
        if not left:
            self._finish(message, layout, cell, sources)

        def one_settled() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._finish(message, layout, cell, sources)

        for source in waits:
            source.when_settled(one_settled)

    def _finish(self, message: AssembleOnIsland, layout: Layout, cell: Cell, sources: dict[int, Cell]) -> None:
        error = None
        arrays = {}
        for device, source in sources.items():
            try:
                value, where = brought_back(source), source.layout
            except Exception as caught:
                error = describe_failure(caught)
                break
            if type(value) is Poison:
                error = value.error
                break
            if value is None or value is ABSENT or where is None or device not in where.devices:
                error = ErrorInfo(DeletedError.__name__, f"device {device} has nothing of a buffer that it should have")
                break
            arrays[device] = (value, where)
        try:
            if error is None:
                cell.value = self._backend.assemble(layout, arrays)
        except Exception as caught:
            error = describe_failure(caught)
        if error is not None:
            cell.spoil(Poison(error))
        cell.settle()
        self._report(message.session, message.buffer, error)
