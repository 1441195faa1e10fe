"""Waiting for devices without holding up the trio thread, and telling it what ended: many at once, with one wake-up.

A *lane* is a thread that waits, in order, for what was launched on one set of devices: XLA runs it in about that order,
so waiting for the first never hides the second for long. Other devices' work has lanes of its own. Lanes sleep on a
queue or in XLA, without the interpreter's lock; nothing polls.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import trio

Job = Callable[[], Any]
"""Runs on a thread. What it returns is called in the trio thread."""


class Outbox:
    """What other threads have for the trio thread: callables, taken in batches."""

    def __init__(self, token: trio.lowlevel.TrioToken, after_batch: Callable[[], None]) -> None:
        self._token = token
        self._after_batch = after_batch
        self._queue: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._scheduled = False

    def put(self, callback: Callable[[], None]) -> None:
        """Have `callback` called in the trio thread. Any thread; never waits."""
        self._queue.append(callback)
        with self._lock:
            if self._scheduled:
                return
            self._scheduled = True
        try:
            self._token.run_sync_soon(self._drain)
        except trio.RunFinishedError:  # the process ends
            pass

    def _drain(self) -> None:
        with self._lock:
            self._scheduled = False
        queue = self._queue
        for _ in range(len(queue)):
            queue.popleft()()
        self._after_batch()


class Lanes:
    """Threads by name, each made when first used, each running its jobs in order."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._queues: dict[int, SimpleQueue[Job]] = {}
        self._lock = threading.Lock()

    def submit(self, lane: int, job: Job) -> None:
        """Run `job` on a lane; what it returns, unless None, is called in the trio thread. Any thread."""
        queue = self._queues.get(lane)
        if queue is None:
            with self._lock:
                queue = self._queues.get(lane)
                if queue is None:
                    queue = self._queues[lane] = SimpleQueue()
                    threading.Thread(target=self._run, args=(queue,), name=f"pathway-wait-{lane}", daemon=True).start()
        queue.put(job)

    def _run(self, queue: SimpleQueue[Job]) -> None:
        while True:
            callback = queue.get()()
            if callback is not None:
                self._outbox.put(callback)
                del callback  # an idle lane holds on to nothing


class Dispatcher:
    """The thread that launches gangs which would hold up the trio thread. While it has work, everything goes through
    it: that is how the order is kept (O-1)."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._submitted = 0
        self._finished = 0
        self._started = False

    @property
    def idle(self) -> bool:
        """Nothing is queued or running: the trio thread, which alone submits, may launch by itself."""
        return self._submitted == self._finished

    def submit(self, job: Callable[[], None]) -> None:
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, name="pathway-dispatch", daemon=True).start()
        self._submitted += 1
        self._queue.put(job)

    def _run(self) -> None:
        while True:
            job = self._queue.get()
            job()
            del job
            self._finished += 1
