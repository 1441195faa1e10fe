"""Runs of parts on this host: launching their gangs, and learning how they ended.

The launch loop is the inner loop of the system: per step one call into XLA, a list of arguments, a few list stores.
It runs on the trio thread when that is quick, and on the dispatcher's otherwise; which one changes nothing (O-1).

Invariants
  E-1  A gang is launched once, in the order of the core's instructions, and reported once: done, or failed.
  E-2  Everything that a failed gang would have written becomes the same error: its slots at once, where the next gang
       in the order finds it; its result cells too; and its sends that have not begun.
  E-3  An error is the first one: where an input turned out to be an error by now, that error is the gang's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from pathway.dataflow.layout import Layout
from pathway.errors import DeviceMemoryError, ErrorInfo
from pathway.executor import backend as xla
from pathway.executor.bind import LONG_US, BoundGang, BoundPart, BoundSend, Host, failure
from pathway.executor.completion import Dispatcher, Lanes, Outbox
from pathway.executor.spill import Spilled, brought_back
from pathway.executor.store import ABSENT, Cell, Fate, Poison, Store
from pathway.executor.trace import Recorder, TimedTokens


class Run:
    """One run's part on this host. `slots[i]` is an array, a `Poison`, a `Cell` that has no value yet, or None."""

    __slots__ = ("began_s", "cells", "device_us", "edges", "fates", "part", "run", "session", "slots")

    def __init__(self, session: int, run: int, part: BoundPart) -> None:
        self.session = session
        self.run = run
        self.part = part
        self.slots: list[Any] = [None] * part.slot_count
        self.cells: list[Cell] = []  # of the part's results, in order
        self.fates: list[tuple[int, Fate]] = []  # of arguments whose values were not known to be sound
        self.edges: dict[int, Any] = {}  # arrivals that are not complete
        self.began_s = 0.0  # when its first gang was launched
        self.device_us = 0.0  # how long it held devices of this host


class Reports(Protocol):
    """Who is told, in the trio thread, how a gang ended."""

    def decided(self, session: int, run: int, decisions: tuple[tuple[int, int], ...]) -> None: ...

    def gang_done(self, session: int, run: int, gang: int) -> None: ...

    def gang_failed(self, session: int, run: int, gang: int, error: ErrorInfo) -> None: ...


class Sender(Protocol):
    """What takes values on their way along edges."""

    def is_quick(self, send: BoundSend) -> bool:
        """Whether sending a computed value may be done in the trio thread."""

    def push(self, run: Run, send: BoundSend, value: Any) -> None:
        """Send a computed value. Trio thread."""

    def prepare(self, run: Run, send: BoundSend, value: Any) -> Callable[[], None]:
        """Wait for the value; return what sends it. Any thread."""

    def fail(self, run: Run, send: BoundSend, error: ErrorInfo) -> None:
        """Tell the other side that nothing will come. Trio thread."""


class _Poisoned(Exception):
    def __init__(self, error: ErrorInfo) -> None:
        self.error = error


class Launcher:
    """Starts gangs. `launch` and `poison` are called in the trio thread, in the island's order."""

    def __init__(
        self, host: Host, store: Store, lanes: Lanes, outbox: Outbox, sender: Sender, reports: Reports
    ) -> None:
        self._host = host
        self._store = store
        self._lanes = lanes
        self._outbox = outbox
        self._sender = sender
        self._reports = reports
        self._dispatcher = Dispatcher()
        self.recorder: Recorder | None = None
        self._in_flight = 0
        self._held_until_s: dict[int, float] = {}  # by lane: the end of the last gang there
        self._busy_since_s = 0.0
        self._busy_s = 0.0

    # -- in the trio thread ------------------------------------------------------------------------------------------

    def begin(
        self, session: int, run_number: int, part: BoundPart, first_result: int,
        arguments: tuple[int | bytes, ...], array_of_bytes: Callable[[Layout, bytes], Any],
    ) -> Run:  # fmt: skip
        """Make a run's slots: its arguments, or the cells where they will be, and the cells of its results."""
        run = Run(session, run_number, part)
        slots = run.slots
        for (slot, layout), argument in zip(part.arguments, arguments, strict=True):
            if type(argument) is int:
                cell = self._store.find(session, argument)
                if cell is None:
                    slots[slot] = Poison(ErrorInfo("DeletedError", f"buffer {argument} is not on this island"))
                    continue
                if not cell.settled:
                    run.fates.append((slot, cell.fate()))
                value = cell.value
                slots[slot] = cell if value is None or type(value) is Spilled else value
            else:
                try:
                    slots[slot] = array_of_bytes(layout, argument)  # type: ignore[arg-type]
                except Exception as error:
                    slots[slot] = Poison(xla.describe_failure(error))
        expect = self._store.expect
        run.cells = [
            expect(session, first_result + number, layout, nbytes, origin)
            for (number, layout), nbytes, origin in zip(
                part.results, part.result_bytes, part.result_origins, strict=True
            )
        ]
        return run

    def launch(self, run: Run, number: int) -> None:
        """Start a gang: now, or behind those that the dispatcher has."""
        gang = run.part.gangs[number]
        if not self._in_flight:
            self._busy_since_s = time.monotonic()
        self._in_flight += 1
        if self._dispatcher.idle and gang.cost_us < LONG_US:
            ended = self._start(run, gang, in_trio_thread=True)
            if ended is not None:
                ended()
        else:
            self._dispatcher.submit(lambda: self._dispatch(run, gang))

    def poison(self, run: Run, number: int, error: ErrorInfo) -> None:
        """The gang's place in the order, without starting it."""
        gang = run.part.gangs[number]

        def poisoned() -> Callable[[], None]:
            self._spoil(run, gang, error)
            return lambda: self._settle_failed(run, gang, error, 0)

        if self._dispatcher.idle:
            poisoned()()
        else:
            self._dispatcher.submit(lambda: self._outbox.put(poisoned()))

    def in_order(self, job: Callable[[], None]) -> None:
        """Run a job in the thread that launches: behind the gangs that have their place, before later ones."""
        self._dispatcher.submit(job)

    def busy_us(self) -> int:
        """How long some gang of this host has been in flight, in all."""
        busy_s = self._busy_s
        if self._in_flight:
            busy_s += time.monotonic() - self._busy_since_s
        return int(busy_s * 1e6)

    # -- in the thread that launches ---------------------------------------------------------------------------------

    def _dispatch(self, run: Run, gang: BoundGang) -> None:
        ended = self._start(run, gang, in_trio_thread=False)
        if ended is not None:
            self._outbox.put(ended)

    def _start(self, run: Run, gang: BoundGang, in_trio_thread: bool) -> Callable[[], None] | None:
        """The launch loop. Returns what reports the gang's end, or None when a lane has been asked to."""
        began = time.perf_counter()
        if not run.began_s:
            run.began_s = began
        tokens: list[Any] = [] if self.recorder is None else TimedTokens()
        slots = run.slots
        sent = 0
        try:
            for slot in gang.external:
                value = slots[slot]
                if type(value) is Cell:
                    value = slots[slot] = brought_back(value)
                if type(value) is Poison:
                    raise _Poisoned(value.error)
            for steps, sends in gang.segments:
                for launch, inputs, outputs, frees in steps:
                    values = launch([slots[slot] for slot in inputs], tokens)
                    for slot, value in zip(outputs, values):  # noqa: B905 (as many as XLA returns, by construction)
                        slots[slot] = value
                    for slot in frees:
                        slots[slot] = None
                for send in sends:
                    self._send(run, send, slots[send.slot], gang.lane, in_trio_thread)
                    sent += 1
                    for slot in send.frees:
                        slots[slot] = None
        except _Poisoned as poisoned:
            return self._failed(run, gang, poisoned.error, sent)
        except Exception as error:
            return self._failed(run, gang, self._describe(run, gang, len(tokens), error), sent)
        cells = run.cells
        for index, slot in gang.results:
            value = slots[slot]
            cells[index].value = ABSENT if value is None else value
        gang.learn_cost((time.perf_counter() - began) * 1e6)
        if not tokens or (gang.watched and xla.is_ready([slots[slot] for slot in gang.watched])):
            return self._ended(run, gang, tokens, began)
        self._lanes.submit(gang.lane, lambda: self._ended(run, gang, tokens, began))
        return None

    def _send(self, run: Run, send: BoundSend, value: Any, lane: int, in_trio_thread: bool) -> None:
        if value is None or value is ABSENT:
            return
        if send.copies:
            value = xla.copy_on_device(value)
        if in_trio_thread and self._sender.is_quick(send) and xla.is_ready([value]):
            self._sender.push(run, send, value)
        else:
            self._lanes.submit(lane, lambda: self._sender.prepare(run, send, value))

    # -- in whichever thread sees the end ----------------------------------------------------------------------------

    def _ended(self, run: Run, gang: BoundGang, tokens: list[Any], began: float) -> Callable[[], None]:
        """Wait for the gang's launches. Returns what reports its end."""
        try:
            for index, token in enumerate(tokens):
                xla.wait_for(token)
                if type(tokens) is TimedTokens:
                    tokens.ended(index)
        except Exception as error:
            return self._failed(run, gang, self._describe(run, gang, index, error), len(gang.sends))
        if tokens:
            # Gangs of one lane run one after another, so the device is this gang's from its launch, or from the end of
            # the one before it. Both are seen late alike, so what a session is charged in all is right.
            now = time.perf_counter()
            run.device_us += (now - max(began, self._held_until_s.get(gang.lane, 0.0))) * 1e6
            self._held_until_s[gang.lane] = now
        if type(tokens) is TimedTokens and self.recorder is not None:
            self.recorder.add(run.session, run.run, run.part.part, gang, tokens)
        return lambda: self._settle_done(run, gang)

    def _describe(self, run: Run, gang: BoundGang, index: int, error: Exception) -> ErrorInfo:
        for slot in gang.external:  # E-3
            value = run.slots[slot]
            if type(value) is Poison:
                return value.error
        for slot, fate in run.fates:
            if fate.error is not None and slot in gang.external:
                return fate.error
        node = gang.nodes[index] if index < len(gang.nodes) else -1
        described = xla.describe_failure(error)
        if described.kind == DeviceMemoryError.__name__:
            described = self._with_largest(run.session, described)
        return failure(run.part, self._host, node, described)

    def _with_largest(self, session: int, error: ErrorInfo) -> ErrorInfo:
        """XLA has found no memory: say what is in the way."""
        largest = ", ".join(map(str, self._store.largest(session))) or "none"
        where = f"the session's largest buffers on host {self._host.name}: {largest}"
        return msgspec.structs.replace(error, message=f"{error.message.rstrip('. ')}; {where}")

    def _failed(self, run: Run, gang: BoundGang, error: ErrorInfo, sent: int) -> Callable[[], None]:
        self._spoil(run, gang, error)

        def report() -> None:
            self._count_end()
            self._settle_failed(run, gang, error, sent)
            self._reports.gang_failed(run.session, run.run, gang.number, error)

        return report

    def _spoil(self, run: Run, gang: BoundGang, error: ErrorInfo) -> None:
        poison = Poison(error)
        for slot in gang.writes:
            run.slots[slot] = poison
        for index, _ in gang.results:
            run.cells[index].spoil(poison)

    # -- in the trio thread again ------------------------------------------------------------------------------------

    def _settle_done(self, run: Run, gang: BoundGang) -> None:
        self._count_end()
        for index, _ in gang.results:
            run.cells[index].settle()
        if gang.decisions:
            values = tuple((number, xla.integer(run.slots[slot])) for number, slot in gang.decisions)
            self._reports.decided(run.session, run.run, values)
        self._reports.gang_done(run.session, run.run, gang.number)

    def _settle_failed(self, run: Run, gang: BoundGang, error: ErrorInfo, sent: int) -> None:
        for index, _ in gang.results:
            run.cells[index].settle()
        for send in gang.sends[sent:]:
            self._sender.fail(run, send, error)

    def _count_end(self) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self._busy_s += time.monotonic() - self._busy_since_s
