"""What a worker decides: when its executor starts and ends, and what the scheduler is told. Pure.

A worker has at most one executor child. The scheduler says which incarnation it should be (`FormIsland`), or that there
should be none (`StopExecutor`); the worker says why a child ended (`ExecutorExited`).

Invariants
  W-1  At most one child. A newer incarnation's starts when the older one's has been reaped.
  W-2  Every order to stop, and every end of a child of this link's, is answered with one `ExecutorExited` per
       incarnation.
  W-3  A child belongs to the link that ordered it: when the link is lost, or its scheduler goes, the child is ended,
       whatever its incarnation is called.
  W-4  A refusal ends the worker, but for one: a worker whose link broke, and which came back before the scheduler
       noticed, or while it was ending, tries again for `REJOIN_S`.
"""

from __future__ import annotations

from msgspec import Struct

from pathway.processes import GRACE_S
from pathway.transport.messages import (
    ExecutorExited,
    ExecutorPaused,
    FormIsland,
    Goodbye,
    HostJoined,
    Message,
    Ping,
    Refused,
    StopExecutor,
    Welcome,
)

REJOIN_S = 5.0
FIRST_RETRY_S, LONGEST_RETRY_S = 0.05, 1.0


# -- events ------------------------------------------------------------------------------------------------------------


class LinkOpened(Struct, frozen=True):
    welcome: Welcome


class LinkFailed(Struct, frozen=True):
    """No link could be opened. `refused` if the scheduler did not want it."""

    reason: str
    refused: bool


class LinkLost(Struct, frozen=True):
    reason: str


class Received(Struct, frozen=True):
    message: Message


class ChildExited(Struct, frozen=True):
    cause: str


class ChildPaused(Struct, frozen=True):
    """The child has been stopped by a signal, or goes on."""

    paused: bool


class StopRequested(Struct, frozen=True):
    reason: str


class Tick(Struct, frozen=True):
    """The time of `next_deadline` has come."""


Event = LinkOpened | LinkFailed | LinkLost | Received | ChildExited | ChildPaused | StopRequested | Tick


# -- instructions ------------------------------------------------------------------------------------------------------


class OpenLink(Struct, frozen=True):
    """Connect to the scheduler, after `delay_s`."""

    delay_s: float


class CloseLink(Struct, frozen=True):
    pass


class Send(Struct, frozen=True):
    message: Message


class StartChild(Struct, frozen=True):
    form: FormIsland


class TerminateChild(Struct, frozen=True):
    pass


class KillChild(Struct, frozen=True):
    pass


class Exit(Struct, frozen=True):
    """The worker is done. `code` 0: as asked; 2: refused, with `reason`."""

    code: int
    reason: str


Instruction = OpenLink | CloseLink | Send | StartChild | TerminateChild | KillChild | Exit


class _Child:
    __slots__ = ("form", "kill_at", "orphaned")

    def __init__(self, form: FormIsland) -> None:
        self.form = form
        self.kill_at: float | None = None  # set when it has been told to end
        self.orphaned = False  # the link that ordered it is gone (W-3)


class WorkerCore:
    """`joined` is what this host offers. The shell opens the first link by itself."""

    def __init__(self, joined: HostJoined) -> None:
        self._joined = joined
        self._linked = False
        self._child: _Child | None = None
        self._wanted: FormIsland | None = None
        self._exit: Exit | None = None
        self._heartbeat_s = 0.0
        self._ping_at: float | None = None
        self._pings = 0
        self._retry_s = FIRST_RETRY_S
        self._rejoin_until: float | None = None

    def next_deadline(self) -> float | None:
        times = [self._ping_at, self._child.kill_at if self._child is not None else None]
        return min((time for time in times if time is not None), default=None)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        match event:
            case LinkOpened(welcome):
                self._link_opened(welcome, now, out)
            case LinkFailed(reason, refused):
                if refused:
                    self._refused(reason, now, out)
                else:
                    self._reopen(out)
            case LinkLost():
                self._link_ended(now, out)
            case Received(message):
                self._received(message, now, out)
            case ChildExited(cause):
                self._child_exited(cause, out)
            case ChildPaused(paused):
                self._child_paused(paused, out)
            case StopRequested(reason):
                self._end_worker(Exit(0, reason), now, out)
            case Tick():
                self._tick(now, out)
        return out

    # -- the link -----------------------------------------------------------------------------------------------------

    def _link_opened(self, welcome: Welcome, now: float, out: list[Instruction]) -> None:
        if self._exit is not None:
            return
        self._linked = True
        self._heartbeat_s = welcome.heartbeat_s
        self._ping_at = now + self._heartbeat_s
        out.append(Send(self._joined))

    def _link_ended(self, now: float, out: list[Instruction]) -> None:
        if self._linked:
            self._rejoin_until = now + REJOIN_S
            self._drop_link(now, out)

    def _drop_link(self, now: float, out: list[Instruction]) -> None:
        self._linked = False
        self._ping_at = None
        self._wanted = None
        out.append(CloseLink())
        if self._child is not None:
            self._child.orphaned = True
            self._end_child(now, out)
        self._reopen(out)

    def _reopen(self, out: list[Instruction]) -> None:
        if self._exit is None:
            out.append(OpenLink(self._retry_s))
            self._retry_s = min(self._retry_s * 2, LONGEST_RETRY_S)

    def _refused(self, reason: str, now: float, out: list[Instruction]) -> None:
        if self._rejoin_until is not None and now < self._rejoin_until:
            if self._linked:
                self._drop_link(now, out)
            else:
                self._reopen(out)
        else:
            self._end_worker(Exit(2, reason), now, out)

    def _received(self, message: Message, now: float, out: list[Instruction]) -> None:
        match message:
            case FormIsland() as form:
                self._rejoin_until = None
                self._retry_s = FIRST_RETRY_S
                self._form(form, now, out)
            case StopExecutor(_, incarnation):
                self._stop_executor(incarnation, now, out)
            case Refused("DisconnectedError"):  # it took us for lost, or has never heard of us
                self._link_ended(now, out)
            case Refused(_, reason):
                self._refused(reason, now, out)
            case Goodbye():
                self._link_ended(now, out)
            case _:
                pass  # an answer to a ping

    # -- the child ----------------------------------------------------------------------------------------------------

    def _form(self, form: FormIsland, now: float, out: list[Instruction]) -> None:
        if self._exit is not None:
            return
        self._wanted = form
        if self._child is None:
            self._child = _Child(form)
            out.append(StartChild(form))
        elif self._child.orphaned or self._child.form.incarnation != form.incarnation:
            self._end_child(now, out)

    def _stop_executor(self, incarnation: int, now: float, out: list[Instruction]) -> None:
        if self._wanted is not None and self._wanted.incarnation <= incarnation:
            self._wanted = None
        child = self._child
        if child is not None and not child.orphaned and child.form.incarnation <= incarnation:
            self._end_child(now, out)
        else:
            self._tell_exit(incarnation, "it was not running", out)

    def _end_child(self, now: float, out: list[Instruction]) -> None:
        if self._child is not None and self._child.kill_at is None:
            self._child.kill_at = now + GRACE_S
            out.append(TerminateChild())

    def _child_exited(self, cause: str, out: list[Instruction]) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        if not child.orphaned:
            self._tell_exit(child.form.incarnation, cause, out)
            if self._wanted is child.form:
                self._wanted = None
        if self._exit is not None:
            out.append(self._exit)
        elif self._wanted is not None:
            self._child = _Child(self._wanted)
            out.append(StartChild(self._wanted))

    def _child_paused(self, paused: bool, out: list[Instruction]) -> None:
        child, joined = self._child, self._joined
        if self._linked and child is not None and not child.orphaned:
            out.append(Send(ExecutorPaused(joined.island, child.form.incarnation, joined.host_index, paused)))

    def _tell_exit(self, incarnation: int, cause: str, out: list[Instruction]) -> None:
        if self._linked:
            joined = self._joined
            out.append(Send(ExecutorExited(joined.island, incarnation, joined.host_index, cause)))

    # -- the worker's own end, and time --------------------------------------------------------------------------------

    def _end_worker(self, exit_: Exit, now: float, out: list[Instruction]) -> None:
        if self._exit is not None:
            return
        self._exit = exit_
        self._wanted = None
        self._ping_at = None
        if self._linked and exit_.code == 0:
            out.append(Send(Goodbye(exit_.reason)))
            self._linked = False  # with that the scheduler has forgotten us
        if self._child is None:
            out.append(exit_)
        else:
            self._end_child(now, out)

    def _tick(self, now: float, out: list[Instruction]) -> None:
        if self._ping_at is not None and now >= self._ping_at:
            self._ping_at = now + self._heartbeat_s
            self._pings += 1
            out.append(Send(Ping(self._pings)))
        child = self._child
        if child is not None and child.kill_at is not None and now >= child.kill_at:
            child.kill_at = now + GRACE_S  # again, should it not go at once
            out.append(KillChild())
