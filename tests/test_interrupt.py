"""Ctrl-C in a call that waits: raised at once, what the call waited for is dropped, and the session goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import pathway as pw

QUEUED = 30


@contextlib.contextmanager
def interrupts(*functions: str, once: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Sends this process SIGINT when its main thread is in one of these functions and `once()` holds."""
    main = threading.main_thread().ident
    stopped = threading.Event()

    def waits_in(name: str) -> bool:
        frame = sys._current_frames().get(main or 0)
        while frame is not None:
            if frame.f_code.co_name == name:
                return True
            frame = frame.f_back
        return False

    def watch() -> None:
        while not stopped.wait(0.01):
            if any(waits_in(name) for name in functions) and once():
                os.kill(os.getpid(), signal.SIGINT)
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        stopped.set()
        watcher.join()


def chain(slice: Any) -> tuple[Any, list[Any]]:
    """Runs of some tenths of a second each, of which every one needs the one before."""

    @pw.jit(slice)
    def slow(x):
        return jax.lax.fori_loop(0, 30_000_000, lambda i, x: x * 0.5 + 1.0, x)

    x = pw.put(np.float32(3), slice)
    results = [x]
    for _ in range(QUEUED):
        results.append(slow(results[-1]))
    return slow, results[1:]


@pytest.mark.parametrize("wait", ["block_until_ready", "get", "float"])
def test_ctrl_c_drops_what_the_call_waits_for(client, wait):
    slice = pw.slice(1, island="east", shared=True)
    _, results = chain(slice)
    waits: dict[str, Callable[[], Any]] = {
        "block_until_ready": lambda: results[-1].block_until_ready(),
        "get": lambda: pw.get(results),
        "float": lambda: float(results[-1]),
    }
    with pytest.raises(KeyboardInterrupt), interrupts("block_until_ready", "_physical_value"):
        waits[wait]()
    with pytest.raises(pw.Cancelled):
        results[-1].block_until_ready()
    with pytest.raises(pw.Cancelled):
        results[QUEUED // 2].block_until_ready()
    again = pw.jit(slice)(lambda x: x + 1)
    np.testing.assert_array_equal(pw.get(again(np.float32(1))), 2)


def test_ctrl_c_while_a_slice_is_waited_for_takes_the_request_back(cluster, client):
    with pw.Client(cluster.address) as other:
        held = other.slice(4, island="east")
        waits = lambda: bool(other.status()["waits"])  # noqa: E731
        with pytest.raises(KeyboardInterrupt), interrupts("wait", once=waits):
            client.slice(4, island="east")
        assert not [wait for wait in other.status()["waits"] if "slice" in wait["what"]]
        held.release()
    assert client.slice(4, island="east").island == "east"
