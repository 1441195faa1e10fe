"""Host buffers of one session: stored by one call of the client, used by another, in whichever order they come.

Invariants
  H-1  A handle is stored once; a second time is an error of the client's.
  H-2  Whoever asks for a handle waits for it until it is stored, deleted, or the session ends.
"""

from __future__ import annotations

import threading
from typing import Any

from pathway.client.pending import Pending
from pathway.errors import ErrorInfo
from pathway.proxy.status import Code, StatusError, invalid, of_info

STORE_TIMEOUT_S = 600.0
"""How long a request waits for the buffer that it names."""


class HostBuffers:
    """By handle. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: dict[int, Pending] = {}
        self._closed: ErrorInfo | None = None

    def store(self, handle: int, data: Any) -> None:
        """`data`: anything with a buffer."""
        pending = self.expect(handle)
        if pending.done:
            raise StatusError(Code.ALREADY_EXISTS, f"host buffer {handle} was stored before")
        pending.resolve(data)

    def fail(self, handle: int, error: ErrorInfo) -> None:
        """There will be no such buffer."""
        self.expect(handle).fail(error)

    def expect(self, handle: int) -> Pending:
        """The buffer, which is there or will be."""
        with self._lock:
            pending = self._buffers.get(handle)
            if pending is None:
                pending = self._buffers[handle] = Pending()
                if self._closed is not None:
                    pending.fail(self._closed)
            return pending

    def take(self, handle: int, timeout_s: float = STORE_TIMEOUT_S) -> Any:
        """The data of a buffer; waits for it. It is forgotten: one request uses it."""
        pending = self.expect(handle)
        if not pending.wait(timeout_s):
            raise invalid(f"host buffer {handle} was not stored within {timeout_s:g} s")
        self.delete(handle)
        if pending.error is not None:
            raise of_info(pending.error)
        return pending.value

    def delete(self, handle: int) -> None:
        with self._lock:
            self._buffers.pop(handle, None)

    def close(self) -> None:
        """The session is over: nobody waits any longer."""
        error = ErrorInfo("DisconnectedError", "the session is over")
        with self._lock:
            self._closed = error
            waiting = list(self._buffers.values())
            self._buffers.clear()
        for pending in waiting:
            pending.fail(error)
