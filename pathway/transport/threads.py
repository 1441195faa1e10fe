"""A dealer that any thread sends on, straight from where it is, while one trio thread receives.

A hop to another thread costs more than a whole message. So the thread that submits takes the lock and sends, and one
that finds the lock taken leaves its frames to whoever holds it: nobody waits for anybody.

Invariants (in addition to those of `link`)
  T-6  `send` never waits for another thread. Whoever gives the lock back looks at the queue once more, so no frame
       stays behind.
  T-7  Messages of one thread keep their order; those of several threads get one order that agrees with each.
  T-8  Every use of the socket is under the lock, receiving too. A receiver that found nothing is marked as parked
       before it gives the lock back, so whoever sends next knows that it has to look for arrivals (T-1).
  T-9  A thread that waits for an answer may receive it itself (`receive_here`), which saves two changes of thread. One
       receives at a time: it starts only while the trio task is parked, and that task stays parked, or calls the link
       back, until the thread has given it back. The end of the link is the trio task's to see.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import zmq

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
        self._here_bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._received_here = False  # a thread receives, in the place of the trio task (T-9)
        self._called_back = False
        super().__init__(address, options, identity)
        self._descriptor = int(self._socket.FD)
        self._here = select.poll()
        self._here.register(self._descriptor, select.POLLIN)
        self._here.register(self._here_bell, select.POLLIN)

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

    def receive_here(
        self, take: Callable[[Batch], None], is_over: Callable[[], bool], timeout_s: float | None = None
    ) -> None:
        """Receive in this thread and hand what comes to `take`, until `is_over()`, which is asked after every batch and
        every `look_here`. Returns before that where another thread receives, the link ends or is called back by its
        trio task, or `timeout_s` passes: then the caller waits in another way."""
        with self._lock:
            taken = self._received_here or self._called_back or not self._readiness.parked or self.is_over
            if not taken:
                self._received_here = True
                self._readiness.ignore(self._descriptor)
        self._send_left_behind()
        if taken:
            return
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not is_over() and not self._called_back:
                batch: Batch = []
                with self._lock:
                    if not self.closed:
                        self._receive_into(batch)
                    self._called_back |= self.is_over
                self._send_left_behind()
                if batch:
                    take(batch)
                elif not self._wait_here(deadline):
                    return
        finally:
            with self._lock:
                self._received_here = False
                if self.closed:
                    os.close(self._here_bell)
                else:
                    self._readiness.heed(self._descriptor)
                    if self._called_back or int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:  # T-1
                        self._readiness.wake()
            self._send_left_behind()

    def _send_left_behind(self) -> None:
        """The lock was just given back: send what others queued meanwhile (T-6)."""
        if self._queue and not self.is_over:
            with contextlib.suppress(DisconnectedError):  # the receiver reports that
                self._send_queued()

    def _wait_here(self, deadline: float | None) -> bool:
        timeout_ms = None if deadline is None else 1000 * (deadline - time.monotonic())
        if timeout_ms is not None and timeout_ms <= 0:
            return False
        if any(descriptor == self._here_bell for descriptor, _ in self._here.poll(timeout_ms)):
            os.eventfd_read(self._here_bell)
        return True

    def look_here(self) -> None:
        """Have a thread in `receive_here` ask again whether it is over. From any thread."""
        if self._received_here and not self.closed:
            os.eventfd_write(self._here_bell, 1)

    def _after_send(self) -> None:
        if not self._received_here:
            super()._after_send()
        elif int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:  # T-1
            self.look_here()

    def _collect(self) -> Batch:
        batch: Batch = []
        with self._lock:
            self._called_back = self._received_here
            if self._called_back:
                self.look_here()
            else:
                batch = super()._collect()
            if not batch:
                self._readiness.parked = True
        self._send_left_behind()
        return batch

    def close(self, linger_s: float = 0.5) -> None:
        self.flush()
        with self._lock:
            self._shut(linger_s)

    def _shut(self, linger_s: float) -> None:
        if self.closed:
            return
        super()._shut(linger_s)
        if self._received_here:
            os.eventfd_write(self._here_bell, 1)  # that thread closes it
        else:
            os.close(self._here_bell)
