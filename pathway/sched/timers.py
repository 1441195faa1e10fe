"""Deadlines of a pure core: what to do when, without a clock."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from pathway.sched.events import Instruction

Action = Callable[[float, list[Instruction]], None]


class Timers:
    """A deadline is never taken back: its action looks at the state when it comes, and may find nothing to do. So what
    moves a deadline forth (each message of a peer) costs nothing."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Action]] = []
        self._count = 0

    def at(self, when: float, action: Action) -> None:
        self._count += 1
        heappush(self._heap, (when, self._count, action))

    def next_deadline(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def run_due(self, now: float, out: list[Instruction]) -> None:
        while self._heap and self._heap[0][0] <= now:
            heappop(self._heap)[2](now, out)
