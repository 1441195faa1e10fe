"""Buffers that were moved to the host's memory, and their way back.

The scheduler says which (see `sched.memory`); nobody has used them for long. Whoever reads one later finds it as it
was: a run brings it back to its devices at its launch, a fetch is answered from where it is.

Invariants
  H-1  A buffer is moved behind all gangs that have their place already, and before those that get one later: what comes
       free is there for them. So the copy is made by the thread that launches, in the island's order.
  H-2  Only what is known to be sound is moved; an error, or what was donated meanwhile, stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pathway.dataflow.layout import Layout
from pathway.executor import backend as xla
from pathway.executor.store import ABSENT, Cell, Poison, Store
from pathway.transport.messages import SpillBuffers

log = logging.getLogger(__name__)


class Spilled:
    """In the place of an array: its shards on this host's devices, in host memory, by island index."""

    __slots__ = ("_backend", "_layout", "shards")

    def __init__(self, backend: xla.Backend, layout: Layout, shards: Mapping[int, xla.HostArray]) -> None:
        self._backend = backend
        self._layout = layout
        self.shards = shards

    def array(self) -> xla.Array:
        """The array again, on its devices."""
        return self._backend.array(self._layout, self.shards)


def brought_back(cell: Cell) -> Any:
    """The cell's value, on devices again if it was moved. In the thread that launches, or with nothing in flight."""
    value = cell.value
    if type(value) is Spilled:
        value = cell.value = value.array()
    return value


class Spills:
    """Moves buffers. `in_order(job)` runs a job in the thread that launches, behind what it has."""

    def __init__(self, backend: xla.Backend, store: Store, in_order: Callable[[Callable[[], None]], None]) -> None:
        self._backend = backend
        self._store = store
        self._in_order = in_order

    def spill(self, message: SpillBuffers) -> None:
        """Move them, those that have no value yet when they have one. Trio thread."""
        for buffer in message.buffers:
            cell = self._store.find(message.session, buffer)
            if cell is not None:
                self._when_settled(cell)

    def _when_settled(self, cell: Cell) -> None:
        cell.when_settled(lambda: self._in_order(lambda: self._move(cell)))

    def _move(self, cell: Cell) -> None:
        value, layout = cell.value, cell.layout
        if value is None or value is ABSENT or isinstance(value, Poison | Spilled) or layout is None:
            return
        try:
            local = [device for device in layout.devices if device in self._backend.local]
            shards = {device: np.array(self._backend.view(value, layout, device)) for device in local}
        except Exception as error:  # H-2
            log.warning("a buffer stays on its devices: %s", error)
            return
        if cell.value is value:
            cell.value = Spilled(self._backend, layout, shards)

    def nbytes(self) -> int:
        """Of this host's shards in host memory."""
        return sum(cell.nbytes for cell in self._store.cells() if type(cell.value) is Spilled)
