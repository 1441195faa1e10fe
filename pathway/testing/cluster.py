"""A real cluster on this machine, for tests: find its processes, kill them, wait for what happens, look for leftovers.

with local_cluster({"east": {"hosts": 2, "devices": 2}}) as cluster:
    cluster.kill_executor("east", host=1)
    cluster.wait_for_incarnation("east", 2)
# leaving the block checks that nothing is left behind
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pathway.embedded import LocalCluster, in_thread, start_local_cluster
from pathway.observe import fetch_status

_MARK = "PATHWAY_TEST_MARK"
_LOOK_S = 0.02
_GONE_WITHIN_S = 2.5


class ClusterUnderTest:
    """A `LocalCluster` and the means to hurt it. Its processes, and theirs, carry a mark in their environment, which
    stays when their parent is gone."""

    def __init__(self, islands: int | Mapping[str, Mapping[str, Any]], options: Mapping[str, Any]) -> None:
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        self._temporary = tempfile.TemporaryDirectory(prefix="pathway-test-")
        self._shared_before = _shared_memory()
        name, _, value = self._mark.partition("=")
        environment = {**options.get("environment", {}), name: value, "TMPDIR": self._temporary.name}
        self.cluster: LocalCluster = start_local_cluster(islands, **{**options, "environment": environment})
        self.address = self.cluster.address

    # -- looking ------------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What `pathway status --json` shows."""
        status: dict[str, Any] = in_thread(fetch_status, self.address, 5.0)
        return status

    def island(self, name: str) -> dict[str, Any]:
        """The status of one island."""
        found: dict[str, Any] = next(island for island in self.status()["islands"] if island["island"] == name)
        return found

    def scheduler_pid(self) -> int:
        assert self.cluster.scheduler is not None
        return self.cluster.scheduler.pid

    def worker_pid(self, island: str, host: int = 0) -> int:
        return self.cluster.workers[island, host].pid

    def executor_pid(self, island: str, host: int = 0) -> int:
        """Of the executor that is ready; 0 if none is."""
        return int(self.island(island)["hosts"][host]["executor_pid"])

    def processes(self) -> dict[int, str]:
        """The command line of each living process that this cluster started, by pid."""
        found = {}
        for directory in Path("/proc").iterdir():
            if not directory.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if self._mark.encode() in (directory / "environ").read_bytes().split(b"\0"):
                    found[int(directory.name)] = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    # -- hurting ------------------------------------------------------------------------------------------------------

    def kill_executor(self, island: str, host: int = 0) -> int:
        """SIGKILL; the pid that it had."""
        return _kill(self.executor_pid(island, host))

    def kill_worker(self, island: str, host: int = 0) -> int:
        return _kill(self.worker_pid(island, host))

    def kill_scheduler(self) -> int:
        return _kill(self.scheduler_pid())

    # -- waiting ------------------------------------------------------------------------------------------------------

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
        """Wait until `condition` holds; `what` tells a failing test what it waited for."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout_s:g} s: {what}")
            time.sleep(_LOOK_S)

    def wait_for_incarnation(self, island: str, incarnation: int, timeout_s: float = 30.0) -> None:
        """Wait until the island is formed as `incarnation`, or a later one."""

        def formed() -> bool:
            now = self.island(island)
            return now["state"] == "formed" and int(now["incarnation"]) >= incarnation

        self.wait_until(formed, f"island {island} formed again, as incarnation {incarnation}", timeout_s)

    def wait_until_gone(self, pid: int, timeout_s: float = _GONE_WITHIN_S) -> None:
        """Wait until no process `pid` of this cluster lives."""
        self.wait_until(lambda: pid not in self.processes(), f"process {pid} is gone", timeout_s)

    # -- end ----------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        self.cluster.stop()

    def assert_no_leftovers(self, within_s: float = _GONE_WITHIN_S) -> None:
        """No process, no file in the temporary directory, no shared memory, of this cluster."""
        deadline = time.monotonic() + within_s
        while (left := self.leftovers()) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        assert not left, "left behind: " + "; ".join(left)

    def leftovers(self) -> list[str]:
        """All that is there now, in words."""
        processes = [f"process {pid}: {command}" for pid, command in self.processes().items()]
        files = [f"file {path}" for path in Path(self._temporary.name).rglob("*")]
        shared = [f"shared memory {name}" for name in sorted(_shared_memory() - self._shared_before)]
        return processes + files + shared

    def close(self) -> None:
        self.stop()
        self._temporary.cleanup()


@contextlib.contextmanager
def local_cluster(
    islands: int | Mapping[str, Mapping[str, Any]] = 2, *, check_leftovers: bool = True, **options: Any
) -> Iterator[ClusterUnderTest]:
    """A running cluster; `options` are those of `start_local_cluster`. At the end it is stopped and, where the block
    ended well, nothing may be left behind."""
    cluster = ClusterUnderTest(islands, options)
    try:
        yield cluster
        cluster.stop()
        if check_leftovers:
            cluster.assert_no_leftovers()
    finally:
        cluster.close()


def _kill(pid: int) -> int:
    assert pid > 0, "there is no such process"
    os.kill(pid, signal.SIGKILL)
    return pid


def _shared_memory() -> set[str]:
    with contextlib.suppress(OSError):
        return set(os.listdir("/dev/shm"))
    return set()
