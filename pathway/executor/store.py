"""The buffers that this host keeps, under (session, buffer): values, errors in place of values, and what is to come.

Invariants
  S-1  A buffer has one cell, made before the value: by the run that will produce it, the put that will bring it, or the
       fetch that came first. Whoever reads the buffer holds the cell, so a release never takes it from a reader.
  S-2  A cell's value is set once to an array, `ABSENT` or a `Poison`; later only an error may replace an array, when
       the computation turns out to have failed.
  S-3  A cell is settled once, when its value is computed and known to be sound, or is an error. Fetches are answered
       from settled cells; those that came earlier are kept in the cell, and each is answered once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pathway.dataflow.layout import Layout
from pathway.dataflow.memory import Use
from pathway.errors import ErrorInfo


class Poison:
    """An error in the place of a value. Whatever reads it becomes the same error."""

    __slots__ = ("error",)

    def __init__(self, error: ErrorInfo) -> None:
        self.error = error


class Absent:
    """Stands for a value of which this host holds no shard."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = Absent()


class Fate:
    """Whether a value turned out to be an error, for readers that began before it was known. Holds no memory of a
    device, as the cell would."""

    __slots__ = ("error",)

    def __init__(self) -> None:
        self.error: ErrorInfo | None = None


class Cell:
    """One buffer. `value` is None until it has one. `origin` says what it is, and where in the user's program it was
    made."""

    __slots__ = ("_fate", "is_source", "layout", "nbytes", "on_settled", "origin", "settled", "value")

    def __init__(self, layout: Layout | None = None, nbytes: int = 0, origin: tuple[str, str] = ("", "")) -> None:
        self.origin = origin
        self.layout = layout
        self.nbytes = nbytes  # of this host's shards
        self.value: Any = None
        self.is_source = False  # of a buffer that is assembled
        self.settled = False
        self.on_settled: list[Callable[[], None]] | None = None
        self._fate: Fate | None = None

    def fate(self) -> Fate:
        """To be asked for before `value` is looked at: then one of them tells of an error."""
        if self._fate is None:
            self._fate = Fate()
        return self._fate

    def spoil(self, poison: Poison) -> None:
        """The value is an error after all, or from the start. Any thread; `settle` follows in the trio thread."""
        self.value = poison
        if self._fate is not None:
            self._fate.error = poison.error

    def settle(self) -> None:
        """The value is sound, or an error (S-3)."""
        if not self.settled:
            self.settled = True
            if self.on_settled is not None:
                waiting, self.on_settled = self.on_settled, None
                for callback in waiting:
                    callback()

    def when_settled(self, callback: Callable[[], None]) -> None:
        if self.settled:
            callback()
        elif self.on_settled is None:
            self.on_settled = [callback]
        else:
            self.on_settled.append(callback)


CLOSED_SESSIONS_REMEMBERED = 1024


class Store:
    """The cells by session. Used in the trio thread only; the cells are filled by whichever thread launches."""

    def __init__(self) -> None:
        self._sessions: dict[int, dict[int, Cell]] = {}
        self._closed: dict[int, None] = {}

    def expect(
        self, session: int, buffer: int, layout: Layout, nbytes: int, origin: tuple[str, str] = ("", "")
    ) -> Cell:
        """The cell of a buffer that is announced now: with its layout, and with the fetches that came before it."""
        cells = self._sessions.get(session)
        if cells is None:
            cells = self._sessions[session] = {}
        cell = cells.get(buffer)
        if cell is None:
            cell = cells[buffer] = Cell(layout, nbytes, origin)
        elif cell.layout is None:
            cell.layout, cell.nbytes, cell.origin = layout, nbytes, origin
        return cell

    def find(self, session: int, buffer: int) -> Cell | None:
        """The buffer's cell, if it has been announced."""
        cells = self._sessions.get(session)
        cell = cells.get(buffer) if cells is not None else None
        return cell if cell is not None and cell.layout is not None else None

    def find_or_park(self, session: int, buffer: int) -> Cell | None:
        """The buffer's cell, made without a layout if it is not announced yet. None: the session is closed."""
        if session in self._closed:
            return None
        return self._sessions.setdefault(session, {}).setdefault(buffer, Cell())

    def free(self, session: int, buffers: tuple[int, ...]) -> None:
        """Forget buffers."""
        cells = self._sessions.get(session)
        if cells is not None:
            for buffer in buffers:
                cells.pop(buffer, None)
            if not cells:
                del self._sessions[session]

    def give_up(self, session: int, buffers: tuple[int, ...]) -> None:
        """Those of `buffers` that were never announced never will be: answer who asked for them."""
        for buffer in buffers:
            cell = self._sessions.get(session, {}).get(buffer)
            if cell is not None and cell.layout is None:
                self.free(session, (buffer,))
                cell.settle()

    def client_left(self, session: int) -> None:
        """Nobody is there to be answered: forget the buffers that were only asked for."""
        asked = [
            buffer
            for buffer, cell in self._sessions.get(session, {}).items()
            if cell.layout is None and not cell.is_source
        ]
        self.free(session, tuple(asked))

    def close(self, session: int) -> None:
        """Forget all buffers of a session, and ignore it from now on."""
        self._closed[session] = None
        if len(self._closed) > CLOSED_SESSIONS_REMEMBERED:
            del self._closed[next(iter(self._closed))]
        self._sessions.pop(session, None)

    def is_closed(self, session: int) -> bool:
        return session in self._closed

    def cells(self) -> Iterator[Cell]:
        """All of them."""
        for cells in self._sessions.values():
            yield from cells.values()

    def largest(self, session: int, count: int = 4) -> list[Use]:
        """The largest buffers of a session that have a value here. Any thread: what changes meanwhile may be missed."""
        cells = [cell for cell in list(self._sessions.get(session, {}).values()) if cell.value is not None]
        cells = sorted(cells, key=lambda cell: -cell.nbytes)[:count]
        return [Use(cell.nbytes, *cell.origin) for cell in cells if cell.nbytes]

    def usage(self) -> Iterator[tuple[int, int, int]]:
        """(session, buffers, bytes) of this host, for the report. The work is per buffer, and done per heartbeat."""
        for session, cells in self._sessions.items():
            yield session, len(cells), sum(cell.nbytes for cell in cells.values())
