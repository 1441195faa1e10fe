"""What a scheduler remembers across its own death: a SQLite database in its state directory.

The core says what must be remembered (`Record`), and which of its messages may leave only when it is. The daemon gives
records to a `Journal` in batches, off its trio thread; this module knows files and no core.

Invariants
  J-1  A batch is written whole or not at all, and is on the disk before `write` returns (WAL, synchronous=FULL).
  J-2  One scheduler at a time: the directory is locked for as long as the process lives, however it ends.
  J-3  What cannot be read is an error that names the directory and what to do, never a guess: a database that is
       damaged, of another version, or not ours is left as it is.
  J-4  What was removed is gone: the database holds one row for each thing that is remembered now, so it does not grow
       with time.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from pathway.errors import ConfigError
from pathway.sched.events import Record

FORMAT = 1
_APPLICATION = 0x50415448  # "PATH", in the header of the database
_DATABASE, _LOCK = "journal.sqlite3", "lock"


class Journal:
    """The open state directory. `write` may be called from any thread, one at a time."""

    def __init__(self, directory: Path) -> None:
        """Open it, or make it. Raises `ConfigError`."""
        self.directory = directory
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"the state directory {directory} cannot be used: {error.strerror}") from None
        try:
            self._take_lock()
            self._database = self._open()
        except BaseException:
            os.close(self._lock)
            raise

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            raise ConfigError(
                f"the state directory {self.directory} is in use by another scheduler (process {owner or 'unknown'})"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _open(self) -> sqlite3.Connection:
        path = self.directory / _DATABASE
        database: sqlite3.Connection | None = None
        try:
            database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            [found] = database.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise sqlite3.DatabaseError(found)
            [application] = database.execute("PRAGMA application_id").fetchone()
            [version] = database.execute("PRAGMA user_version").fetchone()
            [tables] = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if tables and application != _APPLICATION:
                raise ConfigError(f"{path} is not a journal of Pathway's: choose another state_dir")
            if tables and version != FORMAT:
                raise ConfigError(f"{path} has format {version}, and this is Pathway with format {FORMAT}")
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=FULL")
            database.execute("BEGIN")
            database.execute(
                "CREATE TABLE IF NOT EXISTS remembered "
                "(kind TEXT, key TEXT, value BLOB NOT NULL, PRIMARY KEY (kind, key))"
            )
            database.execute(f"PRAGMA application_id={_APPLICATION}")
            database.execute(f"PRAGMA user_version={FORMAT}")
            database.execute("COMMIT")
        except (sqlite3.Error, ConfigError) as error:
            if database is not None:
                database.close()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"the journal {path} cannot be read ({error}). Restore it, or move it away and begin anew"
            ) from None
        return database

    def read(self) -> dict[str, dict[str, bytes]]:
        """All that is remembered, by kind and key."""
        found: dict[str, dict[str, bytes]] = {}
        for kind, key, value in self._database.execute("SELECT kind, key, value FROM remembered"):
            found.setdefault(kind, {})[key] = value
        return found

    def write(self, records: Iterable[Record]) -> None:
        """Remember, durably. Raises `OSError`, for example when the disk is full; nothing is changed then."""
        try:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                for record in records:
                    if record.value is None:
                        self._database.execute(
                            "DELETE FROM remembered WHERE kind = ? AND key = ?", (record.kind, record.key)
                        )
                    else:
                        self._database.execute(
                            "INSERT OR REPLACE INTO remembered VALUES (?, ?, ?)",
                            (record.kind, record.key, record.value),
                        )
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise OSError(f"the journal in {self.directory} cannot be written: {error}") from error

    def close(self) -> None:
        self._database.close()
        os.close(self._lock)  # which unlocks it
