"""The gang scheduler: which run goes to the islands when. FIFO, all or nothing, with credits.

A *lane* is one incarnation of an island, as a queue of runs. A run stands in the lane of every island that it touches.

Invariants
  O-4  What one session sends to one island reaches it in that order: a put or a release stands behind the session's
       runs that are queued there, never before them.
  O-5  The work for a run is per island that it touches, never per shard, device, host or island of the cluster.
  O-7  At most `credits` parts are in flight past the leader of each island.
  S-1  All lanes hold their runs in the same order, that of arrival, and a run leaves for all its islands at once, when
       it is at the head of all its lanes and each has a credit. So no two runs wait for each other.
  S-2  A run ends exactly once for the client: finished when all its parts have, or failed with the first cause. The run
       itself is over when its last part is, so that every credit comes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from msgspec import Raw

from pathway.errors import ErrorInfo
from pathway.sched.events import Instruction, PeerKey, Send
from pathway.transport.messages import CancelPart, ExecutorReport, Message, StartPart


class Run:
    """`open` counts the parts in flight. `error` is what the client was told, if it was told of a failure."""

    __slots__ = ("arguments", "error", "first_result", "lanes", "number", "open", "plan", "session", "since")

    def __init__(
        self,
        session: int,
        number: int,
        plan: int,
        first_result: int,
        arguments: tuple[Raw, ...],
        lanes: tuple[Lane, ...],
        since: float,
    ) -> None:
        self.session = session
        self.number = number
        self.plan = plan
        self.first_result = first_result
        self.arguments = arguments
        self.lanes = lanes
        self.since = since
        self.open = 0
        self.error: ErrorInfo | None = None


class _Held:
    """A message that keeps its place behind the session's queued runs."""

    __slots__ = ("message", "session")

    def __init__(self, session: int, message: Message) -> None:
        self.session = session
        self.message = message


class Lane:
    """One formed incarnation of an island. `neighbours`: the islands, with their incarnations, that its executors were
    told of because they share plans. `error`: why it was lost."""

    __slots__ = (
        "computations",
        "error",
        "hosts",
        "incarnation",
        "island",
        "leader",
        "neighbours",
        "queue",
        "queued",
        "registered",
        "report",
        "running",
    )

    def __init__(self, island: str, incarnation: int, hosts: tuple[PeerKey, ...]) -> None:
        self.island = island
        self.incarnation = incarnation
        self.hosts = hosts
        self.leader = hosts[0]
        self.error: ErrorInfo | None = None
        self.queue: deque[Run | _Held] = deque()
        self.queued: dict[int, int] = {}  # how many of a session's entries stand in the queue
        self.running: dict[tuple[int, int], Run] = {}
        self.registered: set[tuple[int, int]] = set()
        self.computations: set[str] = set()
        self.neighbours: dict[str, int] = {}
        self.report: ExecutorReport | None = None

    def tell_all(self, message: Message, out: list[Instruction]) -> None:
        for host in self.hosts:
            out.append(Send(host, message))

    def _enqueue(self, entry: Run | _Held) -> None:
        self.queue.append(entry)
        self.queued[entry.session] = self.queued.get(entry.session, 0) + 1

    def _dequeued(self, session: int) -> None:
        left = self.queued[session] - 1
        if left:
            self.queued[session] = left
        else:
            del self.queued[session]

    def _remove(self, entries: set[Run]) -> None:
        if any(entry in entries for entry in self.queue):
            kept = [entry for entry in self.queue if entry not in entries]
            for entry in self.queue:
                if entry in entries:
                    self._dequeued(entry.session)
            self.queue = deque(kept)


class LaneScheduler:
    """`failed(run, error, now, out)` is called when a run fails, once for each."""

    def __init__(self, credits: int, failed: Callable[[Run, ErrorInfo, float, list[Instruction]], None]) -> None:
        self.credits = credits
        self.active = 0  # runs that are not over
        self._failed = failed

    # -- in ---------------------------------------------------------------------------------------------------------

    def submit(self, run: Run, out: list[Instruction]) -> None:
        self.active += 1
        credits = self.credits
        for lane in run.lanes:
            if lane.queue or len(lane.running) >= credits:
                break
        else:
            self._dispatch(run, out)
            return
        for lane in run.lanes:
            lane._enqueue(run)

    def send_behind(self, lane: Lane, session: int, message: Message, out: list[Instruction]) -> None:
        """Send to the lane's leader what must not overtake the session's queued runs (O-4)."""
        if session in lane.queued:
            lane._enqueue(_Held(session, message))
        else:
            out.append(Send(lane.leader, message))

    def cancel(self, run: Run, error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        """Drop a queued run. One in flight is cancelled at the leaders, which say when it is over, and how."""
        if not run.open:
            self._drop_queued({run}, error, now, out)
        else:
            for lane in run.lanes:
                if (run.session, run.number) in lane.running:
                    out.append(Send(lane.leader, CancelPart(run.session, run.number, error)))

    def fail_queued(self, runs: Iterable[Run], error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        self._drop_queued({run for run in runs if not run.open}, error, now, out)

    def _drop_queued(self, runs: set[Run], error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        lanes = dict.fromkeys(lane for run in sorted(runs, key=_order) for lane in run.lanes)
        for lane in lanes:
            lane._remove(runs)
        for run in sorted(runs, key=_order):
            self.active -= 1
            self._fail(run, error, now, out)
        self._pump(list(lanes), out)

    # -- out --------------------------------------------------------------------------------------------------------

    def _dispatch(self, run: Run, out: list[Instruction]) -> None:
        session, number, plan, first = run.session, run.number, run.plan, run.first_result
        key = (session, number)
        run.open = len(run.lanes)
        for lane, arguments in zip(run.lanes, run.arguments, strict=True):
            lane.running[key] = run
            out.append(Send(lane.leader, StartPart(session, number, plan, first, arguments)))

    def _pump(self, lanes: list[Lane], out: list[Instruction]) -> None:
        credits = self.credits
        while lanes:
            lane = lanes.pop()
            while lane.queue:
                head = lane.queue[0]
                if isinstance(head, _Held):
                    lane.queue.popleft()
                    lane._dequeued(head.session)
                    out.append(Send(lane.leader, head.message))
                    continue
                if not all(other.queue[0] is head and len(other.running) < credits for other in head.lanes):
                    break
                for other in head.lanes:
                    other.queue.popleft()
                    other._dequeued(head.session)
                    if other is not lane:
                        lanes.append(other)
                self._dispatch(head, out)

    # -- back -------------------------------------------------------------------------------------------------------

    def parts_finished(self, lane: Lane, parts: Iterable[tuple[int, int]], out: list[Instruction]) -> list[Run]:
        """The runs that are over and did not fail."""
        finished = []
        running = lane.running
        for part in parts:
            run = running.pop(part, None)
            if run is not None:
                run.open -= 1
                if not run.open:
                    self.active -= 1
                    if run.error is None:
                        finished.append(run)
        if lane.queue:
            self._pump([lane], out)
        return finished

    def part_failed(
        self, lane: Lane, part: tuple[int, int], error: ErrorInfo, now: float, out: list[Instruction]
    ) -> None:
        run = lane.running.pop(part, None)
        if run is not None:
            self._part_over(run, error, now, out)
            self._pump([lane], out)

    def _part_over(self, run: Run, error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        run.open -= 1
        if not run.open:
            self.active -= 1
        self._fail(run, error, now, out)

    def _fail(self, run: Run, error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        if run.error is None:
            run.error = error
            self._failed(run, error, now, out)

    # -- ends -------------------------------------------------------------------------------------------------------

    def lane_lost(self, lane: Lane, error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        """All runs that touch the lane fail. Their parts elsewhere are still awaited, as their edges are poisoned."""
        lane.error = error
        running, lane.running = list(lane.running.values()), {}
        queued = {entry for entry in lane.queue if isinstance(entry, Run)}
        for run in running:
            self._part_over(run, error, now, out)
        self._drop_queued(queued, error, now, out)
        lane.queue.clear()
        lane.queued.clear()

    def session_closed(self, session: int, lanes: Iterable[Lane], out: list[Instruction]) -> None:
        """The session's queued runs go, and so do its credits: leaders forget its parts before any new one comes."""
        lanes = list(lanes)
        gone: set[Run] = set()
        for lane in lanes:
            for part in [part for part in lane.running if part[0] == session]:
                gone.add(lane.running.pop(part))
            gone.update(entry for entry in lane.queue if isinstance(entry, Run) and entry.session == session)
            lane.queue = deque(entry for entry in lane.queue if entry.session != session)
            lane.queued.pop(session, None)
        self.active -= len(gone)
        self._pump(lanes, out)

    # -- waits (O-8) ------------------------------------------------------------------------------------------------

    def reason(self, run: Run) -> tuple[str, str]:
        """Why a run is not over yet, and on which islands that is."""
        if run.open:
            on = [lane.island for lane in run.lanes if (run.session, run.number) in lane.running]
            return f"{len(on)} of its {len(run.lanes)} parts are in flight", ", ".join(on)
        for lane in run.lanes:
            position = list(lane.queue).index(run)
            if position:
                return f"{position} before it in the queue of island {lane.island}", lane.island
        full = [lane.island for lane in run.lanes if len(lane.running) >= self.credits]
        return f"all {self.credits} credits of island {', '.join(full)} are in use", ", ".join(full)


def validate(scheduler: LaneScheduler, lanes: Iterable[Lane]) -> None:
    """Assert what must hold between events. For tests."""
    lanes = list(lanes)
    runs: dict[Run, None] = {}
    for lane in lanes:
        assert len(lane.running) <= scheduler.credits, "O-7"
        counted: dict[int, int] = {}
        for entry in lane.queue:
            counted[entry.session] = counted.get(entry.session, 0) + 1
        assert counted == lane.queued
        assert not lane.queue or isinstance(lane.queue[0], Run)
        for key, run in lane.running.items():
            assert key == (run.session, run.number)
            assert run.open
            runs[run] = None
        for entry in lane.queue:
            if isinstance(entry, Run):
                assert not entry.open
                assert all(entry in other.queue for other in entry.lanes), "S-1"
                runs[entry] = None
        if lane.queue:
            head = lane.queue[0]
            assert isinstance(head, Run)
            can_go = all(other.queue[0] is head and len(other.running) < scheduler.credits for other in head.lanes)
            assert not can_go, "a run waits for nothing"
    for run in runs:
        assert not run.open or run.open == sum((run.session, run.number) in lane.running for lane in run.lanes), "S-2"
    assert scheduler.active == len(runs)


def _order(run: Run) -> tuple[float, int, int]:
    return run.since, run.session, run.number
