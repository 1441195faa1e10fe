"""A subject: one runtime under test, in a process of its own, measured by requests over a pipe.

So every runtime has the environment that it needs (devices, interpreter, processes), none disturbs another's
interpreter, and turns can be interleaved: a subject that is not asked is asleep.

The child's stdout carries the answers; what its libraries print there is sent to stderr instead.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class SubjectError(RuntimeError):
    """The subject failed, or did not answer in time."""


def serve(handlers: Mapping[str, Callable[..., Any]]) -> None:
    """The child's side: answer {"do": NAME, ...arguments} with {"answer": ...} or {"error": ...} until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"answer": handlers[request.pop("do")](**request)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


class Subject:
    """The parent's side: one child, or several that do everything together (the first one's answers count)."""

    def __init__(
        self,
        name: str,
        commands: Sequence[Sequence[str]],
        *,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        self.name = name
        self._timeout_s = timeout_s
        full = {**os.environ, **(environment or {})}
        full["PYTHONPATH"] = os.pathsep.join(filter(None, [REPOSITORY, full.get("PYTHONPATH")]))
        pipe = subprocess.PIPE
        self._children = [subprocess.Popen(command, stdin=pipe, stdout=pipe, env=full) for command in commands]

    def ask(self, do: str, **arguments: object) -> Any:
        """Have every child do it, at once; the first child's answer."""
        request = json.dumps({"do": do, **arguments}).encode() + b"\n"
        for child in self._children:
            assert child.stdin is not None
            try:
                child.stdin.write(request)
                child.stdin.flush()
            except BrokenPipeError:
                raise SubjectError(f"{self.name} has ended (exit code {child.wait()})") from None
        deadline = time.monotonic() + self._timeout_s
        replies = [self._reply(child, deadline) for child in self._children]
        for reply in replies:
            if "error" in reply:
                raise SubjectError(f"{self.name}: {reply['error']}")
        return replies[0]["answer"]

    def _reply(self, child: subprocess.Popen[bytes], deadline: float) -> dict[str, Any]:
        assert child.stdout is not None
        readable, _, _ = select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            self.close()
            raise SubjectError(f"{self.name} did not answer within {self._timeout_s:g} s")
        line = child.stdout.readline()
        if not line:
            raise SubjectError(f"{self.name} has ended (exit code {child.wait()})")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        """End of requests: the children stop by themselves, and are killed where they do not."""
        for child in self._children:
            if child.stdin is not None and not child.stdin.closed:
                try:
                    child.stdin.close()
                except BrokenPipeError:
                    pass
        for child in self._children:
            try:
                child.wait(timeout=15)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
