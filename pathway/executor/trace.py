"""Recording which step ran when, for timelines. Costs nothing while it is off: launching then uses a plain list."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from pathway.dataflow.plan import Part
from pathway.executor.bind import BoundGang
from pathway.transport.messages import TraceReply, TraceRequest

if TYPE_CHECKING:
    from pathway.executor.runs import Launcher

RECORDED_STEPS = 200_000
"""Older steps are forgotten when nobody collects them."""

Row = tuple[int, int, str, str, int, float, float]
"""(session, run, plan, node, gang, start, end), as in `TraceReply`."""


class TimedTokens(list[Any]):
    """A list of tokens which knows when each was appended, and so when its launch began: at the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.times_s = [time.monotonic()]
        self.ends_s: list[float] = []

    def append(self, token: Any) -> None:
        super().append(token)
        self.times_s.append(time.monotonic())

    def ended(self, index: int) -> None:
        """The device has done launch `index`, which had been seen to be under way until now."""
        self.ends_s.append(time.monotonic())


class Recorder:
    """Steps as they were seen: a step starts when it is launched and the one before it on its lane has ended."""

    def __init__(self) -> None:
        self._rows: deque[Row] = deque(maxlen=RECORDED_STEPS)
        self._lane_ends_s: dict[int, float] = {}

    def add(self, session: int, run: int, part: Part, gang: BoundGang, tokens: TimedTokens) -> None:
        """A gang has ended. Any thread, but one per lane."""
        previous_s = self._lane_ends_s.get(gang.lane, 0.0)
        for node, launched_s, ended_s in zip(gang.nodes, tokens.times_s, tokens.ends_s, strict=False):
            name = part.names[node] if node < len(part.names) else str(node)
            start_s = min(max(launched_s, previous_s), ended_s)
            self._rows.append((session, run, part.plan_name, name, gang.number, start_s, ended_s))
            previous_s = ended_s
        self._lane_ends_s[gang.lane] = previous_s

    def take(self, session: int) -> tuple[Row, ...]:
        """What was recorded of a session's runs since the last time."""
        taken: list[Row] = []
        kept: list[Row] = []
        while self._rows:
            row = self._rows.popleft()
            (taken if row[0] == session else kept).append(row)
        self._rows.extend(kept)
        return tuple(taken)


class Tracing:
    """Switches the recording on while some session wants it."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._wanted_by: set[int] = set()

    def request(self, session: int, request: TraceRequest) -> TraceReply:
        """Answer a session's request, and record for it or not from now on."""
        recorder = self._launcher.recorder
        steps = recorder.take(session) if recorder is not None else ()
        if request.record:
            self._wanted_by.add(session)
            if recorder is None:
                self._launcher.recorder = Recorder()
        else:
            self.close(session)
        return TraceReply(request.request, steps)

    def close(self, session: int) -> None:
        """The session wants no more of it."""
        self._wanted_by.discard(session)
        if not self._wanted_by:
            self._launcher.recorder = None
