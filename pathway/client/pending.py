"""Something that ends once: a run, a slice request, a fetch. Waited for by threads and by trio tasks alike.

Ending takes no lock, for every run of a program ends here and hardly any is waited for: `resolve` first marks the end,
then takes the waiters; `add_waiter` first adds, then looks whether the end has come. Whichever order two threads run
in, a waiter is called at least once; hence waiters must tolerate a second call.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import trio

from pathway.errors import ErrorInfo, to_exception

_adding = threading.Lock()
"""Held while a waiter is added, so that two threads that wait for one thing do not lose one another's."""


class Pending:
    """The future under all of the client's waits. `error` is the end's story where it ended badly."""

    __slots__ = ("_waiters", "done", "error", "value")

    def __init__(self) -> None:
        self.done = False
        self.error: ErrorInfo | None = None
        self.value: Any = None
        self._waiters: list[Callable[[], None]] | None = None

    def resolve(self, value: Any = None) -> None:
        """It ended well. The first end counts; later ones are ignored."""
        if not self.done:
            self.value = value
            self._end()

    def fail(self, error: ErrorInfo) -> None:
        """It ended with an error."""
        if not self.done:
            self.error = error
            self._end()

    def _end(self) -> None:
        self.done = True
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            waiter()

    def add_waiter(self, waiter: Callable[[], None]) -> None:
        """Call `waiter` when it ends, from whichever thread ends it; at once if it has."""
        with _adding:
            if self._waiters is None:
                self._waiters = []
            waiters = self._waiters
        waiters.append(waiter)
        if self.done:
            waiter()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block this thread until it ends; False when `timeout_s` passed first. Ctrl-C interrupts it."""
        if self.done:
            return True
        gate = threading.Lock()
        gate.acquire()

        def open_gate() -> None:
            with contextlib.suppress(RuntimeError):  # it is open already
                gate.release()

        self.add_waiter(open_gate)
        return gate.acquire(timeout=-1 if timeout_s is None else max(timeout_s, 0.0))

    async def wait_trio(self) -> None:
        """Wait in a trio task, of any trio run in any thread."""
        if self.done:
            await trio.lowlevel.checkpoint()
            return
        event = trio.Event()
        token = trio.lowlevel.current_trio_token()

        def wake() -> None:
            with contextlib.suppress(trio.RunFinishedError):  # the waiting run has ended: nobody to wake
                token.run_sync_soon(event.set)

        self.add_waiter(wake)
        await event.wait()

    def result(self) -> Any:
        """What it ended with; raises its error."""
        if self.error is not None:
            raise to_exception(self.error)
        return self.value
