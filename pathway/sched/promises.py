"""What a session is promised: buffers that no island knows yet, since data decide how they are made. Pure.

A client goes on at once, and uses what a script will make. A run that reads a promised buffer is held here until the
script has started what makes it; then it goes to the islands like any other.

Invariants
  O-3  Nothing else waits for a decision: only runs that read what is promised, or what such runs will make.
  O-4  Held runs keep their order, and have numbers of the scheduler's when they start: on each island either kind of
       number grows from run to run.
  X-4  A buffer that the client released is freed when no held run, and no script, can still read it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import Raw

from pathway.errors import ErrorInfo
from pathway.sched.events import Instruction
from pathway.sched.lanes import Lane
from pathway.transport import messages as m

Value = int | bytes
Start = m.StartRun | m.StartScript

_decode_arguments = msgspec.msgpack.Decoder(tuple[Value, ...]).decode


class Actions(Protocol):
    """What carries out what a session's scripts want."""

    def submit(
        self, run: int, plan: int, first: int, arguments: tuple[Raw, ...], now: float, out: list[Instruction]
    ) -> tuple[Lane, ...] | ErrorInfo:
        """Start a plan's run; returns the lanes of its parts, or why it cannot run."""

    def begin(self, message: Start, now: float, out: list[Instruction]) -> ErrorInfo | None:
        """Start what a client asked for; returns why it cannot run, if so."""

    def cancel(self, run: int, error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        """Cancel the run of a plan."""

    def free(self, lane: Lane, buffers: tuple[int, ...], out: list[Instruction]) -> None:
        """Give buffers of an island back, behind the session's runs there."""

    def release(self, plan: int, out: list[Instruction]) -> None:
        """Forget a plan."""

    def finished(self, run: int, now: float, out: list[Instruction]) -> None:
        """Tell the client."""

    def failed(self, run: int, error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        """Tell the client."""


class OwnNumbers:
    """The numbers of runs and buffers that the scheduler names in a session."""

    def __init__(self) -> None:
        self._next = m.OWN_RUNS

    def take(self, count: int = 1) -> int:
        """The first of so many numbers in a row."""
        first = self._next
        self._next += count
        return first


@dataclass(eq=False)
class HeldRun:
    """A client's run that reads what is not named yet. `missing`: how many such buffers."""

    message: Start
    read: tuple[int, ...]
    made: range
    missing: int
    since: float


class Promises:
    """Those of one session."""

    def __init__(self, actions: Actions, numbers: OwnNumbers) -> None:
        self._actions = actions
        self._numbers = numbers
        self.held: dict[int, HeldRun] = {}
        self._promised: dict[int, dict[int, None]] = {}  # buffer -> held runs that read it
        self._reading: Counter[int] = Counter()  # buffers that held runs and scripts may still read
        self._released: dict[int, Lane] = {}  # that the client released meanwhile
        self._renumbered: dict[int, int] = {}  # the client's runs that were held, by the number that they have now

    # -- what scripts say -------------------------------------------------------------------------------------------

    def promise(self, buffers: Iterable[int]) -> None:
        """These will be made, but do not exist yet."""
        for buffer in buffers:
            self._promised.setdefault(buffer, {})

    def read(self, buffers: Iterable[int]) -> None:
        """These may be read for some time."""
        self._reading.update(buffers)

    def cancel(self, number: int, error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        """End a run that is held, or was."""
        if number in self.held:
            self.fail_held([number], error, now, out)
        for renumbered in [own for own, clients in self._renumbered.items() if clients == number]:
            self._actions.cancel(renumbered, error, now, out)

    def run_finished(self, number: int, now: float, out: list[Instruction]) -> bool:
        """Whether the run was one that had been held; it is over."""
        if number not in self._renumbered:
            return False
        self._actions.finished(self._renumbered.pop(number), now, out)
        return True

    def run_failed(self, number: int, error: ErrorInfo, now: float, out: list[Instruction]) -> bool:
        """As `run_finished`; it has failed."""
        if number not in self._renumbered:
            return False
        self._actions.failed(self._renumbered.pop(number), error, now, out)
        return True

    # -- what the client says ---------------------------------------------------------------------------------------

    def hold(self, message: Start, results: int, now: float) -> bool:
        """Whether a run must wait, since it reads what is only promised. It starts as soon as it can, then."""
        if not self._promised:
            return False
        read = buffers_of(message)
        missing = [buffer for buffer in read if buffer in self._promised]
        if not missing:
            return False
        made = range(message.first_result, message.first_result + results)
        self.held[message.run] = HeldRun(message, read, made, len(missing), now)
        for buffer in missing:
            self._promised[buffer][message.run] = None
        for buffer in made:
            self._promised[buffer] = {}
        self._reading.update(read)
        return True

    def releasable(self, lane: Lane, buffers: tuple[int, ...]) -> tuple[int, ...]:
        """Those of the buffers that the client releases which can go at once; the others go later (X-4)."""
        if not self._reading and not self._promised:
            return buffers
        later = {buffer for buffer in buffers if buffer in self._reading or buffer in self._promised}
        self._released.update(dict.fromkeys(later, lane))
        return tuple(buffer for buffer in buffers if buffer not in later)

    def named(self, buffers: Iterable[int], now: float, out: list[Instruction]) -> None:
        """These exist from now on, at the leaders: what waited for them can start."""
        names = deque(buffers)
        while names:
            buffer = names.popleft()
            for number in self._promised.pop(buffer, ()):
                held = self.held[number]
                held.missing -= 1
                if held.missing:
                    continue
                del self.held[number]
                message = held.message
                if isinstance(message, m.StartRun):
                    own = self._numbers.take()
                    self._renumbered[own] = number
                    message = msgspec.structs.replace(message, run=own)
                error = self._actions.begin(message, now, out)
                self.stop_reading(held.read, out)
                if error is not None:
                    self._renumbered.pop(message.run, None)
                    self._actions.failed(number, error, now, out)
                    self.broken(held.made, error, now, out)
                elif isinstance(held.message, m.StartRun):
                    names += held.made
            self._let_go((buffer,), out)

    def broken(self, buffers: Iterable[int], error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        """These will never be."""
        for buffer in buffers:
            readers = self._promised.pop(buffer, None)
            if readers:
                self.fail_held(readers, error, now, out)
            self._let_go((buffer,), out)

    def fail_held(self, numbers: Iterable[int], error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        """These runs, and those that read what they would have made, cannot have their inputs."""
        for number in list(numbers):
            held = self.held.pop(number, None)
            if held is None:
                continue
            for buffer in held.read:
                self._promised.get(buffer, {}).pop(number, None)
            self.stop_reading(held.read, out)
            self._actions.failed(number, error, now, out)
            self.broken(held.made, error, now, out)

    def stop_reading(self, buffers: Iterable[int], out: list[Instruction]) -> None:
        """One less that may read these."""
        for buffer in buffers:
            self._reading[buffer] -= 1
            if not self._reading[buffer]:
                del self._reading[buffer]
                self._let_go((buffer,), out)

    def _let_go(self, buffers: Iterable[int], out: list[Instruction]) -> None:
        for buffer in buffers:
            if buffer not in self._reading and buffer not in self._promised and buffer in self._released:
                self._actions.free(self._released.pop(buffer), (buffer,), out)

    def waits(self) -> Iterator[tuple[int, str, float]]:
        """(run, why it is not over, since)."""
        for number, held in self.held.items():
            yield number, f"{held.missing} of the buffers that it reads wait for a decision", held.since


def buffers_of(message: Start) -> tuple[int, ...]:
    """The buffers that a run reads, each once."""
    if isinstance(message, m.StartScript):
        values: Iterable[Value] = message.arguments
    else:
        try:
            values = [value for part in message.arguments for value in _decode_arguments(part)]
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            values = ()  # the leader refuses such a run
    return tuple(dict.fromkeys(value for value in values if type(value) is int))
