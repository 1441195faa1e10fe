"""What a session's scripts have done, in its name: `promises.Actions` over what clients may ask for. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Raw

from pathway.errors import ErrorInfo
from pathway.sched.events import Instruction
from pathway.sched.lanes import Lane
from pathway.sched.sessions import Session
from pathway.transport import messages as m

if TYPE_CHECKING:
    from pathway.sched.clients import Clients


class ScriptActions:
    """Of one session."""

    def __init__(self, clients: Clients, session: Session) -> None:
        self._clients, self._session = clients, session

    def submit(
        self, run: int, plan: int, first: int, arguments: tuple[Raw, ...], now: float, out: list[Instruction]
    ) -> tuple[Lane, ...] | ErrorInfo:
        return self._clients.submit(self._session, run, plan, first, arguments, now, out)

    def begin(self, message: m.StartRun | m.StartScript, now: float, out: list[Instruction]) -> ErrorInfo | None:
        return self._clients.begin(self._session, message, now, out)

    def cancel(self, run: int, error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        found = self._session.runs.get(run)
        if found is not None:
            self._clients.lanes.cancel(found, error, now, out)

    def free(self, lane: Lane, buffers: tuple[int, ...], out: list[Instruction]) -> None:
        if lane.error is None:
            session = self._session.id
            self._clients.lanes.send_behind(lane, session, m.FreeBuffers(session, buffers), out)

    def release(self, plan: int, out: list[Instruction]) -> None:
        self._clients.forget_plan(self._session, plan, out)

    def finished(self, run: int, now: float, out: list[Instruction]) -> None:
        self._session.tell_finished((run,), now, self._clients.lease_s, out)

    def failed(self, run: int, error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        self._session.tell(m.RunFailed(run, error), now, self._clients.lease_s, out)
