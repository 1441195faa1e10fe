"""Waiting for what ends once (`pathway.client.pending`): for several of them, and with a waiter that is called once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pathway.client.pending import Pending


def once(function: Callable[[], None]) -> Callable[[], None]:
    """A waiter may be called twice (see `Pending`); this one does its work the first time."""
    lock = threading.Lock()

    def call() -> None:
        if lock.acquire(blocking=False):
            function()

    return call


def done() -> Pending:
    """What has ended well."""
    pending = Pending()
    pending.resolve()
    return pending


def all_of(waits: Sequence[Pending]) -> Pending:
    """What ends when all of these have, with the first error among them."""
    if len(waits) == 1:
        return waits[0]
    together = Pending()

    def look() -> None:
        if all(pending.done for pending in waits):
            error = next((pending.error for pending in waits if pending.error is not None), None)
            if error is not None:
                together.fail(error)
            else:
                together.resolve()

    for pending in waits:
        pending.add_waiter(look)
    if not waits:
        look()
    return together
