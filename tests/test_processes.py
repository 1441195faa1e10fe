"""Children that die with their parents, and the words for how a process ended."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pathway.processes import cause_of_exit, oom_kills

CHILD = (
    "import signal, sys; from pathway.processes import become_child; become_child(int(sys.argv[2])); "
    "print('up', flush=True); "
)


@contextmanager
def family(child_code: str, how: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A parent that starts one child, from its main thread or from another; the child's pid."""
    script = textwrap.dedent(f"""
        import subprocess, sys, threading, time
        from pathway.processes import Child
        def start():
            child = Child([sys.executable, "-c", {child_code!r}], stdout=subprocess.PIPE)
            child.process.stdout.readline()
            print(child.pid, flush=True)
        if {how == "thread"}:
            thread = threading.Thread(target=start)
            thread.start()
            thread.join()
        else:
            start()
        time.sleep(60)
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        yield parent, int(parent.stdout.readline())
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def ends(pid: int, within_s: float) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], within_s)[0])
    finally:
        os.close(pidfd)


@pytest.mark.parametrize("how", ["main", "thread"])
def test_a_child_dies_with_a_killed_parent(how: str) -> None:
    with family(CHILD + "import time; time.sleep(60)", how) as (parent, child):
        assert not ends(child, 0.2)  # and not with the thread that started it
        parent.kill()
        assert ends(child, 2.0)


def test_a_child_that_ignores_sigterm_dies_with_its_parent_too() -> None:
    code = CHILD + "signal.signal(signal.SIGTERM, signal.SIG_IGN); import time; time.sleep(60)"
    with family(code, "thread") as (parent, child):
        parent.kill()
        assert ends(child, 3.0)


def test_a_fork_of_the_parent_does_not_keep_its_children_alive() -> None:
    script = textwrap.dedent(f"""
        import os, subprocess, sys, threading, time
        from pathway.processes import Child
        def start():  # not the main thread: no PDEATHSIG, so it is the pipe that is tested
            child = Child([sys.executable, "-c", {CHILD + "import time; time.sleep(60)"!r}], stdout=subprocess.PIPE)
            child.process.stdout.readline()
            print(child.pid, flush=True)
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        time.sleep(60)
    """)
    parent = subprocess.Popen([sys.executable, "-W", "ignore", "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert ends(child, 2.0)


@pytest.mark.parametrize(
    ("returncode", "words"),
    [(0, "exit code 0"), (3, "exit code 3"), (-9, "signal SIGKILL"), (-11, "signal SIGSEGV"), (-6, "signal SIGABRT")],
)
def test_causes_in_words(returncode: int, words: str) -> None:
    assert cause_of_exit(returncode, oom_kills()) == words


def test_a_kill_for_memory_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathway.processes.oom_kills", lambda: 3)
    assert cause_of_exit(-signal.SIGKILL, 2) == "signal SIGKILL: the kernel ended it for lack of memory"
    assert cause_of_exit(-signal.SIGKILL, 3) == "signal SIGKILL"
