"""Compiled computations on disk, so that an island that forms again, and tomorrow's program, do not compile again.

An entry's name is a hash of all that the executable depends on; its content is checked before XLA sees it, because XLA
aborts the process on an executable that it cannot read. Loading an executable runs its code: the directory is this
user's alone, and one that others can write to is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path

DIGEST_BYTES = 32

LIMIT_BYTES = 4 * 1024**3
"""Beyond this, the entries that were used least recently go."""


def default_directory() -> Path:
    """`$PATHWAY_CACHE_DIR`, or a place in the user's cache directory."""
    explicit = os.environ.get("PATHWAY_CACHE_DIR")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pathway" / "computations"


def entry_name(*parts: str | bytes) -> str:
    """The name of an entry that depends on `parts`."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def machine_features() -> str:
    """What code compiled for this machine's CPU may rely on: empty where the system does not say."""
    try:
        with open("/proc/cpuinfo") as file:
            return next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""


class CompileCache:
    """Entries by name. Every failure of the disk is a miss: a cache never fails a compile."""

    def __init__(self, directory: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self.usable = self._prepare()

    def _prepare(self) -> bool:
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self._directory.stat()
        except OSError:
            return False
        return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)

    def get(self, name: str) -> bytes | None:
        """The entry's content, unless there is none or it is damaged."""
        if not self.usable:
            return None
        path = self._directory / name
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        content = data[DIGEST_BYTES:]
        if hashlib.sha256(content).digest() == data[:DIGEST_BYTES]:
            return content
        self.drop(name)
        return None

    def put(self, name: str, content: bytes) -> None:
        """Keep `content`. Other processes see all of it or nothing."""
        if not self.usable:
            return
        try:
            handle, temporary = tempfile.mkstemp(dir=self._directory, prefix=".")
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(temporary, self._directory / name)
        except OSError:
            return

    def drop(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self._directory / name).unlink()

    def prune(self) -> None:
        """Drop the entries that were used least recently until the rest is within the limit."""
        if not self.usable:
            return
        entries = []
        with contextlib.suppress(OSError), os.scandir(self._directory) as found:
            for entry in found:
                with contextlib.suppress(OSError):
                    status = entry.stat()
                    entries.append((status.st_mtime, status.st_size, entry.name))
        excess = sum(size for _, size, _ in entries) - self._limit_bytes
        for _, size, name in sorted(entries):
            if excess <= 0:
                return
            self.drop(name)
            excess -= size
