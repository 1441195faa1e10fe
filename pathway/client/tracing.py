"""Whether this thread is tracing a program: what tells a stage call within a program from one outside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _State(threading.local):
    depth = 0


_state = _State()


def is_on() -> bool:
    """Whether a program is being traced in this thread."""
    return _state.depth > 0


@contextmanager
def on() -> Iterator[None]:
    """While a program is traced."""
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1
