"""What a process tree leaves behind: processes, files in its temporary directory, shared memory.

The tree is told by a mark in its environment, which children inherit even when their parent is gone.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from tempfile import TemporaryDirectory

_MARK = "PATHWAY_BENCH_MARK"


class Watched:
    """`environment` is what the watched processes must be started with."""

    def __init__(self) -> None:
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        self._temporary = TemporaryDirectory(prefix="pathway-bench-")
        self._shared_before = _shared_memory()
        name, _, value = self._mark.partition("=")
        self.environment = {name: value, "TMPDIR": self._temporary.name}

    def processes(self) -> dict[int, str]:
        """The command line of every living process of the tree, by pid."""
        found = {}
        for directory in Path("/proc").iterdir():
            if not directory.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if self._mark.encode() in (directory / "environ").read_bytes().split(b"\0"):
                    found[int(directory.name)] = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def leftovers(self) -> list[str]:
        """All that is there now, in words."""
        processes = [f"process {pid}: {command}" for pid, command in self.processes().items()]
        files = [f"file {path}" for path in Path(self._temporary.name).rglob("*")]
        shared = [f"shared memory {name}" for name in sorted(_shared_memory() - self._shared_before)]
        return processes + files + shared

    def close(self) -> None:
        self._temporary.cleanup()


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def peak_rss_mb(pid: int) -> float:
    """The most memory that the process ever held, in megabytes (10^6 bytes)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ValueError(f"process {pid} has no VmHWM")
