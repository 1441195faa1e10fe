"""A dealer that any thread sends on, straight from where it is, while one trio thread receives.

A hop to another thread costs more than a whole message. So the thread that submits takes the lock and sends, and one
that finds the lock taken leaves its frames to whoever holds it: nobody waits for anybody.

Invariants (in addition to those of `link`)
  T-6  `send` never waits for another thread. Whoever gives the lock back looks at the queue once more, so no frame
       stays behind.
  T-7  Messages of one thread keep their order; those of several threads get one order that agrees with each.
  T-8  Every use of the socket is under the lock, receiving too. A receiver that found nothing is marked as parked
       before it gives the lock back, so whoever sends next knows that it has to look for arrivals (T-1).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from pathway.errors import DisconnectedError
from pathway.transport.link import SOLE_PEER, Batch, Blob, frames_of
from pathway.transport.messages import Message
from pathway.transport.security import Identity
from pathway.transport.sockets import Dealer

__all__ = ["ThreadSafeDealer"]


class ThreadSafeDealer(Dealer):
    """Opened, received from and closed in one trio thread; `send`, `send_all` and `send_with_blob` are for all."""

    def __init__(self, address: str, options: Mapping[int, int | bytes], identity: Identity | None = None) -> None:
        self._lock = threading.Lock()
        self._queue: deque[list[Any]] = deque()  # frames, encoded by the thread that sends: its errors are its own
        super().__init__(address, options, identity)

    def send(self, message: Message) -> None:
        """Send `message` now. Raises `DisconnectedError` once the connection is known to have ended."""
        for frame in frames_of((message,)):
            self._queue.append([frame])
        self._send_queued()

    def send_all(self, messages: Iterable[Message]) -> None:
        """Send `messages` now, as one frame."""
        for frame in frames_of(tuple(messages)):
            self._queue.append([frame])
        self._send_queued()

    def send_with_blob(self, message: Message, blob: Blob) -> None:
        """Send `message` and, in a frame of its own, `blob`, which must not change until it left."""
        self._queue.append([*frames_of((message,)), blob])
        self._send_queued()

    def flush(self) -> None:
        with self._lock:
            super().flush()
        self._send_queued()

    def _send_queued(self) -> None:
        queue = self._queue
        while queue and self._lock.acquire(blocking=False):
            try:
                if self.is_over:
                    queue.clear()
                    raise DisconnectedError(f"the connection to {self.address} is over: {self._end_reason or 'closed'}")
                while queue:
                    self._send(SOLE_PEER, queue.popleft())
                self._after_send()
            finally:
                self._lock.release()

    def _collect(self) -> Batch:
        with self._lock:
            batch = super()._collect()
            if not batch:
                self._readiness.parked = True
        if self._queue and not self.is_over:
            self._send_queued()
        return batch

    def close(self, linger_s: float = 0.5) -> None:
        self.flush()
        with self._lock:
            self._shut(linger_s)
