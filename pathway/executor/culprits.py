"""Computations that ended an executor while it compiled them: XLA aborts the process on some input. They cost their
island one restart, and are refused from then on.

The worker and its executor share a few pages of memory that no file stands for. The executor writes there what it is
compiling; when it dies of a crash, its worker finds what that was, and tells the next one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import msgspec

CRASHES = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE}
"""Return codes of a process that ended itself. One that was killed, for memory or by somebody, accuses nobody."""

_LENGTH_BYTES = 8


class _Record(msgspec.Struct):
    """`refused`: how an executor ended, by the key of the computation."""

    refused: dict[str, str] = {}
    compiling: list[str] = []


class Culprits:
    """Either end. `descriptor` is inherited by the executor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._lock = threading.Lock()
        self._record = self._read()

    @classmethod
    def create(cls) -> Culprits:
        return cls(os.memfd_create("pathway-compiling"))

    def close(self) -> None:
        os.close(self.descriptor)

    def why_refused(self, key: str) -> str:
        """How an executor ended when it compiled this (\"\": none did)."""
        return self._record.refused.get(key, "")

    @contextlib.contextmanager
    def compiling(self, key: str) -> Iterator[None]:
        """Should the process end within, it was this computation, or one that was compiled beside it."""
        with self._lock:
            self._record.compiling.append(key)
            self._write()
        try:
            yield
        finally:
            with self._lock:
                self._record.compiling.remove(key)
                self._write()

    def ended(self, returncode: int, cause: str) -> list[str]:
        """The executor has ended: what is refused because of that."""
        self._record = self._read()
        accused, self._record.compiling = self._record.compiling, []
        if returncode not in CRASHES:
            accused = []
        self._record.refused.update(dict.fromkeys(accused, cause))
        self._write()
        return accused

    def _read(self) -> _Record:
        length = int.from_bytes(os.pread(self.descriptor, _LENGTH_BYTES, 0), "big")
        content = os.pread(self.descriptor, length, _LENGTH_BYTES)
        return msgspec.msgpack.decode(content, type=_Record) if length else _Record()

    def _write(self) -> None:
        content = msgspec.msgpack.encode(self._record)
        os.pwrite(self.descriptor, len(content).to_bytes(_LENGTH_BYTES, "big") + content, 0)
