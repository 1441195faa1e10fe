"""The client's session as a state machine: events in, instructions out, time passed in. No sockets, no threads.

Events are the scheduler's messages, `Tick` and `LinkLost`; `handle` is their one door. What a user's thread asks for
(a slice, a run, a release) goes through the other methods, which number it and return what to send. A `Pending` that
ends is the core's word to whoever waits for it.

Invariants
  C-1  Whatever a thread can wait for ends: with its answer, or with an error once the scheduler is lost or the client
       closed. Nothing begins after that.
  C-2  Slices, plans, runs, buffers and requests are numbered from 1 up, and never reused.
  C-3  A buffer is released once, when the last array that stands for it goes.
  C-4  A binding that was lost stays lost; the slice's next binding is another object.

Threads: `lock` is held by the caller of every method that changes what two threads may see at once. `RunsFinished` is
handled without it: it only takes runs away, and it comes ten thousand times a second.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pathway.client.bindings import ArrayKind, Binding, Run
from pathway.client.pending import Pending
from pathway.dataflow.graph import BoundSlice
from pathway.errors import ErrorInfo
from pathway.transport import messages as m

MAX_UNFINISHED_RUNS = 16_384
"""A client with this many runs under way waits before it starts another."""

RELEASE_COUNT = 256
RELEASE_BYTES = 64 * 1024 * 1024
"""Released buffers leave with the next message to the scheduler, or by themselves once they are this many."""

_slice_numbers = itertools.count(1)
"""Slices are numbered over all clients of the process: the number is what a traced stage remembers of its slice, and
JAX caches traces across connections."""

SILENT_HEARTBEATS = 6
"""The scheduler counts as lost after this many heartbeats without a word from it."""


@dataclass(frozen=True)
class Tick:
    """A heartbeat is due."""


@dataclass(frozen=True)
class LinkLost:
    """The connection to the scheduler broke."""

    reason: str


@dataclass(frozen=True)
class Send:
    """Give these to the scheduler, in order."""

    messages: tuple[m.Message, ...]


@dataclass(frozen=True)
class CloseLink:
    """The session is over: close the sockets."""

    reason: str


@dataclass(frozen=True)
class DropPeers:
    """Executors at other addresses than these are gone: close the links to them."""

    alive: frozenset[str]


Event = m.Message | Tick | LinkLost
Instruction = Send | CloseLink | DropPeers


@dataclass(eq=False)
class SliceState:
    """One slice, from request to release. `answered` ends when it is first bound or refused; `bound_again` is ended and
    replaced at every later change."""

    request: m.RequestSlice
    answered: Pending = field(default_factory=Pending)
    bound_again: Pending = field(default_factory=Pending)
    binding: Binding | None = None
    released: bool = False
    handle: Any = None  # the Slice that users hold

    @property
    def number(self) -> int:
        return self.request.slice

    @property
    def mesh(self) -> tuple[tuple[str, int], ...]:
        return self.request.mesh


class ClientCore:
    """See the module's docstring."""

    def __init__(self, welcome: m.Welcome, now: float, max_unfinished_runs: int = MAX_UNFINISHED_RUNS) -> None:
        self.lock = threading.RLock()
        self.session = welcome.session
        self.token = welcome.token
        self.client: Any = None  # the Client that users hold
        self.heartbeat_s = welcome.heartbeat_s
        self.max_unfinished_runs = max_unfinished_runs
        self.lost: ErrorInfo | None = None
        self.slices: dict[int, SliceState] = {}
        self.runs: dict[int, Run] = {}
        self.islands: dict[str, m.IslandEntry] = {}
        self.directory_known = Pending()
        self.failed_plans: dict[int, ErrorInfo] = {}
        self.replies: dict[int, Pending] = {}
        self.fetches: dict[int, tuple[Pending, Binding]] = {}
        self.released: deque[tuple[ArrayKind, int]] = deque()
        self.released_bytes = 0
        self.released_plans: deque[int] = deque()
        self.flush_asked = False
        self.bindings_epoch = 0  # raised at every change of any binding: what was checked at this number still holds
        self.next_plan = 1
        self.next_run = 1
        self.next_buffer = 1
        self.next_request = 1
        self._room: Pending | None = None
        self._last_heard = now
        self._next_ping = 0

    # -- events -------------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event."""
        match event:
            case m.RunsFinished():
                self._last_heard = now
                self._runs_finished(event.runs)
                return []
            case Tick():
                return self._tick(now)
            case LinkLost():
                error = ErrorInfo("SchedulerLostError", f"the scheduler is lost: {event.reason}")
                return self.end(error)
            case _:
                self._last_heard = now
                with self.lock:
                    return self._handle_message(event)

    def _handle_message(self, event: m.Message) -> list[Instruction]:
        match event:
            case m.RunFailed():
                self._run_failed(event.run, event.error)
            case m.SliceBound():
                self._slice_bound(event)
            case m.SliceRefused():
                self._slice_refused(event)
            case m.PlanFailed():
                self.failed_plans[event.plan] = event.error
                for run in [run for run in self.runs.values() if run.plan == event.plan]:
                    self._run_failed(run.number, event.error)
            case m.IslandLost():
                self._island_lost(event)
            case m.Directory():
                self.islands = {entry.island: entry for entry in event.islands}
                self.directory_known.resolve()
                return [self._alive()]
            case m.DirectoryChange():
                for name in event.gone:
                    self.islands.pop(name, None)
                self.islands.update((entry.island, entry) for entry in event.formed)
                return [self._alive()] if event.gone else []
            case m.StatusReply():
                reply = self.replies.pop(event.request, None)
                if reply is not None:
                    reply.resolve(event.status)
            case m.MemoryAnswer():
                reply = self.replies.pop(event.request, None)
                if reply is not None and event.error is not None:
                    reply.fail(event.error)
                elif reply is not None:
                    reply.resolve(dict(event.temp_bytes))
            case m.Refused():
                return self.end(ErrorInfo(event.kind, event.reason))
            case m.Goodbye():
                reason = event.reason or "it was stopped"
                return self.end(ErrorInfo("SchedulerLostError", f"the scheduler said goodbye: {reason}"))
            case m.Ping():
                return [Send((m.Pong(event.number),))]
            case m.Pong():
                pass
            case _:
                reason = f"a client does not expect {type(event).__name__}"
                return self.end(ErrorInfo("ProtocolError", reason))
        return []

    def _runs_finished(self, numbers: Iterable[int]) -> None:
        take = self.runs.pop
        for number in numbers:
            run = take(number, None)
            if run is not None:
                run.resolve()
        room = self._room
        if room is not None and len(self.runs) < self.max_unfinished_runs:
            self._room = None
            room.resolve()

    def _alive(self) -> DropPeers:
        return DropPeers(frozenset(address for entry in self.islands.values() for address in entry.hosts))

    def _run_failed(self, number: int, error: ErrorInfo) -> None:
        run = self.runs.pop(number, None)
        if run is not None:
            run.fail(error)
        self._runs_finished(())

    def _slice_bound(self, event: m.SliceBound) -> None:
        state = self.slices.get(event.slice)
        if state is None or state.released:
            return
        bound = BoundSlice(
            slice=event.slice,
            island=event.island,
            incarnation=event.incarnation,
            devices=event.devices,
            devices_per_host=event.devices_per_host,
            mesh=state.mesh,
            platform=event.platform,
        )
        state.binding = Binding(self, state, bound)
        self._binding_changed(state)
        state.answered.resolve()

    def _slice_refused(self, event: m.SliceRefused) -> None:
        state = self.slices.pop(event.slice, None)
        if state is not None:
            state.released = True
            state.answered.fail(ErrorInfo(event.kind, event.reason, slice=event.slice))
            self._binding_changed(state)

    def _island_lost(self, event: m.IslandLost) -> None:
        def is_lost(binding: Binding | None) -> bool:
            return (
                binding is not None
                and binding.bound.island == event.island
                and binding.bound.incarnation == event.incarnation
            )

        for state in self.slices.values():
            binding = state.binding
            if binding is not None and is_lost(binding) and binding.error is None:
                binding.error = event.error
                binding.lost = True
                self._binding_changed(state)
        for pending, _ in [entry for entry in self.fetches.values() if is_lost(entry[1])]:
            pending.fail(event.error)

    def _binding_changed(self, state: SliceState) -> None:
        self.bindings_epoch += 1
        changed, state.bound_again = state.bound_again, Pending()
        changed.resolve()

    def _tick(self, now: float) -> list[Instruction]:
        if self.lost is not None:
            return []
        silence_s = now - self._last_heard
        if silence_s > SILENT_HEARTBEATS * self.heartbeat_s:
            reason = f"the scheduler is lost: not a word from it for {silence_s:.1f} s"
            return self.end(ErrorInfo("SchedulerLostError", reason))
        self._next_ping += 1
        return [Send((*self.take_releases(), m.Ping(self._next_ping)))]

    def abandon(self, error: ErrorInfo) -> None:
        """As `end`, in a forked child: the lock may be held by a thread that is not here, and nobody waits here."""
        self.lock = threading.RLock()
        self.lost = error
        self.bindings_epoch += 1

    def end(self, error: ErrorInfo) -> list[Instruction]:
        """The session is over: everything that anyone waits for ends with `error` (C-1)."""
        with self.lock:
            if self.lost is not None:
                return []
            self.lost = error
            self.bindings_epoch += 1
            waits: list[Pending] = [*self.runs.values(), *self.replies.values(), self.directory_known]
            waits += [pending for pending, _ in self.fetches.values()]
            for state in self.slices.values():
                waits += [state.answered, state.bound_again]
                if state.binding is not None and state.binding.error is None:
                    state.binding.error = error
            self.runs.clear()
            self.released.clear()
            room, self._room = self._room, None
            for pending in waits:
                pending.fail(error)
            if room is not None:
                room.resolve()
            return [CloseLink(error.message)]

    # -- what users' threads ask for: the caller holds `lock` and sends what is returned ------------------------------

    def request_slice(
        self,
        devices: int,
        mesh: tuple[tuple[str, int], ...],
        *,
        island: str = "",
        platform: str = "",
        shared: bool = False,
        memory_bytes: int = 0,
        wait: bool = True,
    ) -> SliceState:
        """A new slice; send its `request`. The answer ends `answered`."""
        taken = {s.binding.bound.island for s in self.slices.values() if s.binding is not None and not s.released}
        request = m.RequestSlice(
            slice=next(_slice_numbers),
            devices=devices,
            mesh=mesh,
            island=island,
            platform=platform,
            shared=shared,
            memory_bytes=memory_bytes,
            avoid=tuple(sorted(taken)),
            wait=wait,
        )
        state = SliceState(request)
        if self.lost is not None:
            state.answered.fail(self.lost)
        else:
            self.slices[state.number] = state
        return state

    def release_slice(self, state: SliceState) -> list[m.Message]:
        """Give the slice back. What lies on it can no longer be used, and is freed as its arrays go."""
        if state.released:
            return []
        state.released = True
        self.slices.pop(state.number, None)
        gone = ErrorInfo("DeletedError", f"slice {state.number} was released", slice=state.number)
        if state.binding is not None and state.binding.error is None:
            state.binding.error = gone
        self._binding_changed(state)
        state.answered.fail(gone)
        return [] if self.lost is not None else [*self.take_releases(), m.ReleaseSlice(state.number)]

    def new_run(self, plan: int, now: float, results: int, poison: ErrorInfo | None = None) -> tuple[Run, int]:
        """A run of `plan` and the number of its first result. With a poisoned argument, of a session that is over, or
        of a plan that failed, the run has failed already and nothing need be sent."""
        number = self.next_run
        self.next_run = number + 1
        first = self.next_buffer
        self.next_buffer = first + results
        run = Run(number, plan, now)
        error = self.lost or poison or (self.failed_plans.get(plan) if self.failed_plans else None)
        if error is not None:
            run.fail(error)
        else:
            self.runs[number] = run
        return run, first

    def room(self) -> Pending | None:
        """None when another run may start now; otherwise what ends when one may."""
        if len(self.runs) < self.max_unfinished_runs or self.lost is not None:
            return None
        with self.lock:
            if self._room is None:
                self._room = Pending()
            room = self._room
        self._runs_finished(())  # the last run may have ended in between
        return room

    def new_buffer(self) -> int:
        number = self.next_buffer
        self.next_buffer = number + 1
        return number

    def new_plan(self) -> int:
        number = self.next_plan
        self.next_plan = number + 1
        return number

    def new_request(self) -> int:
        with self.lock:
            number = self.next_request
            self.next_request = number + 1
            return number

    def take_releases(self) -> list[m.Message]:
        """One message per island for all buffers released since the last call, and the plans that went with them."""
        self.flush_asked = False
        self.released_bytes = 0
        if len(self.released) == 1 and not self.released_plans:  # a loop that replaces its state
            kind, buffer = self.released.popleft()
            bound = kind.binding.bound
            return [] if kind.binding.lost else [m.ReleaseBuffers(bound.island, bound.incarnation, (buffer,))]
        by_home: dict[tuple[str, int], list[int]] = {}
        with contextlib.suppress(IndexError):
            while True:
                kind, buffer = self.released.popleft()
                bound = kind.binding.bound
                if not kind.binding.lost:
                    by_home.setdefault((bound.island, bound.incarnation), []).append(buffer)
        messages: list[m.Message] = [
            m.ReleaseBuffers(island, incarnation, tuple(buffers)) for (island, incarnation), buffers in by_home.items()
        ]
        with contextlib.suppress(IndexError):
            while True:
                messages.append(m.ReleasePlan(self.released_plans.popleft()))
        return messages

    def release(self, kind: ArrayKind, buffer: int) -> bool:
        """Nobody holds this buffer any more. True: there is so much to release that it should be sent soon. Called by
        finalizers, so it takes no lock."""
        if self.lost is not None:  # at the interpreter's exit too, when little else can be relied on
            return False
        self.released.append((kind, buffer))
        self.released_bytes += kind.nbytes
        if self.flush_asked or (len(self.released) < RELEASE_COUNT and self.released_bytes < RELEASE_BYTES):
            return False
        self.flush_asked = True
        return True

    # -- questions ----------------------------------------------------------------------------------------------------

    def waits(self, now: float) -> Sequence[str]:
        """What this client waits for, for people (O-8)."""
        lines = [
            f"run {r.number} of plan {r.plan}, since {now - r.started_s:.1f} s" for r in [*self.runs.values()][:20]
        ]
        lines += [
            f"slice {s.number} ({s.request.devices} devices) to be bound"
            for s in [*self.slices.values()]
            if not s.answered.done
        ]
        return lines
