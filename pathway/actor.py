"""The thin shell that runs a state machine over trio and ZeroMQ: for the scheduler, the worker, leaders and followers.

A core takes events and gives instructions (`handle(event, now)`), and says when it wants to be woken (`next_deadline`).
The shell takes all messages that are there, hands them over one by one, performs what comes back, and flushes once: so
what a batch causes leaves as one frame per peer (O-6). Handling never awaits, so an event is never half done when the
next one comes, whatever the number of tasks that deliver.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

import trio

from pathway.transport.sockets import Batch, Peer, PeerGone

E = TypeVar("E")
I = TypeVar("I")  # noqa: E741
_Event = TypeVar("_Event", contravariant=True)
_Instruction = TypeVar("_Instruction", covariant=True)


class Core(Protocol[_Event, _Instruction]):
    """A state machine without input or output. Times are seconds of one clock."""

    def handle(self, event: _Event, now: float) -> Iterable[_Instruction]: ...

    def next_deadline(self) -> float | None: ...


class Receiving(Protocol):
    """A `Router` or a `Dealer`."""

    async def receive_batch(self) -> Batch: ...


class Actor(Generic[E, I]):
    """Runs `core`. `perform` carries out one instruction, without waiting: sends go into outboxes. `flush` empties the
    outboxes after each batch of events. `tick` is the event that a deadline is, for cores that have deadlines."""

    def __init__(
        self,
        core: Core[E, I],
        perform: Callable[[I], object],
        flush: Callable[[], object],
        *,
        tick: E,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = core
        self._perform = perform
        self._flush = flush
        self._tick = tick
        self._clock = clock
        self._soon: deque[E] = deque()
        self._token: trio.lowlevel.TrioToken | None = None
        self._alarm: trio.CancelScope | None = None
        self._alarm_at = math.inf

    def deliver(self, events: Iterable[E]) -> None:
        """Hand `events` to the core, in order, and do what it says. In the actor's own thread."""
        now = self._clock()
        handle, perform = self.core.handle, self._perform
        for event in events:
            for instruction in handle(event, now):
                perform(instruction)
        self._flush()
        deadline = self.core.next_deadline()
        if deadline is not None and deadline < self._alarm_at:
            self._set_alarm(deadline)

    def deliver_soon(self, event: E) -> None:
        """`deliver` from any thread. Events of one thread keep their order. After the actor's end: nothing."""
        self._soon.append(event)
        if self._token is not None:
            try:
                self._token.run_sync_soon(self._deliver_queued, idempotent=True)
            except trio.RunFinishedError:
                self._soon.clear()

    def _deliver_queued(self) -> None:
        events = [self._soon.popleft() for _ in range(len(self._soon))]
        self.deliver(events)

    async def run(self) -> None:
        """Deliver what comes from other threads, and ticks. Until cancelled; in a nursery beside `run_link`."""
        self._token = trio.lowlevel.current_trio_token()
        self._deliver_queued()
        while True:
            with trio.CancelScope() as self._alarm:
                self._alarm_at = math.inf
                deadline = self.core.next_deadline()
                if deadline is not None:
                    self._set_alarm(deadline)
                await trio.sleep_forever()
            self.deliver((self._tick,))

    def _set_alarm(self, deadline: float) -> None:
        """Wake `run` at `deadline` at the latest. That a deadline moved away is found when its alarm rings for nothing:
        cheaper than to move the alarm with every message."""
        if self._alarm is not None:
            self._alarm_at = deadline
            self._alarm.deadline = trio.current_time() + max(0.0, deadline - self._clock())

    async def run_link(
        self,
        link: Receiving,
        received: Callable[[Peer, Any, tuple[memoryview, ...]], E | None],
        gone: Callable[[PeerGone], E | None],
    ) -> None:
        """Deliver what `link` brings, until it ends or is closed. `received(peer, message, blobs)` and `gone` make the
        events; None is no event."""
        while True:
            try:
                batch = await link.receive_batch()
            except trio.ClosedResourceError:
                return
            events: list[E] = []
            for item in batch:
                if isinstance(item, PeerGone):
                    event = gone(item)
                    if event is not None:
                        events.append(event)
                    continue
                last = len(item.messages) - 1
                for position, message in enumerate(item.messages):
                    event = received(item.peer, message, item.blobs if position == last else ())
                    if event is not None:
                        events.append(event)
            self.deliver(events)
