"""Profiling this executor for a session: from its request until the next one, or until the session ends.

XLA's profiler is one a process, so one session at a time has it. To start and to stop it takes long enough to be done
on a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from pathway.errors import LimitError, PathwayError, describe
from pathway.executor.backend import Profile
from pathway.executor.completion import Outbox
from pathway.transport.messages import ProfileHost, ProgramAnswer

Reply = Callable[[ProgramAnswer], None]


class Profiling:
    """`request` and `close` are called in the trio thread, and so is `reply`."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._session = 0  # who has the profiler
        self._jobs: SimpleQueue[Callable[[], None]] | None = None
        self._profile: Profile | None = None  # the thread's own

    def request(self, session: int, message: ProfileHost, reply: Reply) -> None:
        """Start or stop, and answer."""
        refused = ""
        if message.start and self._session:
            refused = "this executor is being profiled already"
        elif not message.start and self._session != session:
            refused = "this executor is not being profiled for this session"
        if refused:
            reply(ProgramAnswer(message.request, b"", describe(LimitError(refused))))
            return
        self._session = session if message.start else 0
        self._submit(lambda: self._do(message, reply))

    def close(self, session: int) -> None:
        """The session is over."""
        if self._session == session:
            self._session = 0
            self._submit(self._drop)

    def _submit(self, job: Callable[[], None]) -> None:
        if self._jobs is None:
            self._jobs = SimpleQueue()
            threading.Thread(target=self._run, args=(self._jobs,), name="pathway-profile", daemon=True).start()
        self._jobs.put(job)

    @staticmethod
    def _run(jobs: SimpleQueue[Callable[[], None]]) -> None:
        while True:
            jobs.get()()

    def _do(self, message: ProfileHost, reply: Reply) -> None:
        answer = ProgramAnswer(message.request, b"")
        try:
            if message.start:
                self._profile = Profile()
            elif self._profile is None:
                raise PathwayError("profiling had not started")
            else:
                profile, self._profile = self._profile, None
                answer = ProgramAnswer(message.request, profile.stop())
        except Exception as error:
            answer = ProgramAnswer(message.request, b"", describe(error))
        self._outbox.put(lambda: reply(answer))

    def _drop(self) -> None:
        if self._profile is not None:
            profile, self._profile = self._profile, None
            profile.stop()
