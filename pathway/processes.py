"""Children that die with their parents, and how they end.

A child gets the reading end of a pipe whose writing end only its parent has. When the parent is gone, however it
ended, the pipe is at its end, and the child ends itself (L-1). PDEATHSIG is faster and works in a process that hangs,
but Linux sends it when the *thread* that started the child ends: it is asked for only where that is the parent's main
thread.

Invariants
  L-1  No child outlives its parent by more than `GRACE_S`.
  L-2  A child ends in two phases: SIGTERM, and SIGKILL after a grace.
  L-3  What ended a child is told in words, with the reason of the kernel where it gives one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GRACE_S = 1.0
"""Between SIGTERM and SIGKILL."""

_PR_SET_PDEATHSIG = 1
_MAIN_THREAD, _OTHER_THREAD = b"m", b"o"

_ends: set[int] = set()
"""Writing ends of this process's children's pipes."""


def _close_in_forked_child() -> None:
    for end in _ends:
        os.close(end)
    _ends.clear()


os.register_at_fork(after_in_child=_close_in_forked_child)  # a fork that lives on must not keep our children alive


class ParentPipe:
    """The parent's side. Use as `popen(args + pipe.arguments, pass_fds=[pipe.child_end])`, then `pipe.started()`."""

    def __init__(self) -> None:
        self.child_end, self._parent_end = os.pipe()  # neither is inherited unless it is passed on
        _ends.add(self._parent_end)
        main = threading.current_thread() is threading.main_thread()
        os.write(self._parent_end, _MAIN_THREAD if main else _OTHER_THREAD)

    @property
    def arguments(self) -> list[str]:
        return ["--parent-fd", str(self.child_end)]

    def started(self) -> None:
        """The child has its end: drop ours of it."""
        if self.child_end >= 0:
            os.close(self.child_end)
            self.child_end = -1

    def close(self) -> None:
        """From here on the child, if it still lives, ends itself. Safe to call again."""
        self.started()
        if self._parent_end in _ends:
            _ends.discard(self._parent_end)
            os.close(self._parent_end)


def become_child(parent_fd: int, death_signal: signal.Signals = signal.SIGKILL) -> None:
    """In a child, first thing: die with the parent (L-1), and leave Ctrl-C, which a terminal sends to everybody, to it.
    `parent_fd` is the argument `--parent-fd`; below 0 for a process that was started by hand: nothing is done."""
    if parent_fd < 0:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(parent_fd, False)
    if os.read(parent_fd, 1) == _MAIN_THREAD:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
    threading.Thread(target=_end_with_parent, args=(parent_fd,), name="parent watch", daemon=True).start()


def _end_with_parent(parent_fd: int) -> None:
    while os.read(parent_fd, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


class Child:
    """A child process of a program without trio: started, told its place, ended in two phases."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any) -> None:
        self._pipe = ParentPipe()
        pass_fds = (self._pipe.child_end, *options.pop("pass_fds", ()))
        try:
            self.process = subprocess.Popen(
                [*arguments, *self._pipe.arguments],
                env=None if environment is None else dict(environment),
                stdin=subprocess.DEVNULL,
                pass_fds=pass_fds,
                start_new_session=True,  # a group of its own, so that `kill` reaches its children too
                **options,
            )
        except BaseException:
            self._pipe.close()
            raise
        self._pipe.started()

    @property
    def pid(self) -> int:
        return self.process.pid

    def terminate(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()

    def kill(self) -> None:
        """End it and all that it started, now."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        self._pipe.close()
        if self.process.stderr is not None:
            self.process.stderr.close()


def end_children(children: Sequence[Child], grace_s: float) -> None:
    """End all of them together, in two phases (L-2). Returns when they are gone and reaped."""
    for child in children:
        child.terminate()
    deadline = time.monotonic() + grace_s
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
    for child in children:
        child.process.wait()
        child.close()


# -- why a child ended -------------------------------------------------------------------------------------------------


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(") ")[2][:1] in ("T", "t")
    except (FileNotFoundError, ProcessLookupError):
        return False


def cause_of_exit(returncode: int, oom_kills_before: int | None = None) -> str:
    """For people: "exit code 3", "signal SIGSEGV", "signal SIGKILL: the kernel ended it for lack of memory" (L-3)."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = str(-returncode)
    if -returncode == signal.SIGKILL and oom_kills_before is not None and (oom_kills() or 0) > oom_kills_before:
        return f"signal {name}: the kernel ended it for lack of memory"
    return f"signal {name}"


def oom_kills() -> int | None:
    """How many processes of this control group the kernel has ended for lack of memory; None where it does not tell."""
    for path in _memory_event_files():
        try:
            for line in path.read_text().splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
        except (OSError, ValueError):
            continue
    return None


def _memory_event_files() -> list[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    root = Path("/sys/fs/cgroup")
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files.append(root / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(root / "memory" / path.lstrip("/") / "memory.oom_control")
    return [*files, root / "memory.events", root / "memory" / "memory.oom_control"]
