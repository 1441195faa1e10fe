"""The state directory: durable, whole, locked, and never believed when it is damaged."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from sched_world import World, hello

from pathway.embedded import start_local_cluster
from pathway.errors import ConfigError, PathwayError
from pathway.observe import fetch_status, give_order, wait_for_islands
from pathway.sched.cluster import IslandRecord
from pathway.sched.core import SchedulerCore, SchedulerSettings
from pathway.sched.events import MessageReceived, Record, Send
from pathway.sched.journal import Journal
from pathway.sched.recorder import Recorder
from pathway.transport import messages as m

KINDS, KEYS = st.sampled_from(["island", "secret"]), st.sampled_from(["", "east", "west"])


@settings(max_examples=30, deadline=None)
@given(batches=st.lists(st.lists(st.tuples(KINDS, KEYS, st.none() | st.binary(max_size=9)), max_size=4), max_size=5))
def test_what_was_written_is_read_by_the_next_scheduler(
    batches: list[list[tuple[str, str, bytes | None]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("state")
    expected: dict[str, dict[str, bytes]] = {}
    for batch in batches:
        journal = Journal(directory)
        journal.write(Record(*entry) for entry in batch)
        for kind, key, value in batch:
            expected.setdefault(kind, {}).pop(key, None)
            if value is not None:
                expected[kind][key] = value
        journal.close()
    journal = Journal(directory)
    assert journal.read() == {kind: values for kind, values in expected.items() if values}
    journal.close()


def test_two_schedulers_do_not_share_a_directory(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(ConfigError, match=f"in use by another scheduler .process {os.getpid()}."):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path).close()


def test_the_lock_goes_with_the_process_and_a_half_written_batch_is_not_there(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from pathway.sched.journal import Journal\n"
        "from pathway.sched.events import Record\n"
        "journal = Journal(Path(sys.argv[1])); journal.write([Record('island', 'east', b'1')])\n"
        "journal._database.execute('BEGIN'); journal._database.execute('DELETE FROM remembered')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    journal = Journal(tmp_path)
    assert journal.read() == {"island": {"east": b"1"}}
    journal.close()


@pytest.mark.parametrize("seed", range(5))
def test_a_damaged_journal_is_refused_and_left_as_it_is(tmp_path: Path, seed: int) -> None:
    journal = Journal(tmp_path)
    journal.write(Record("island", f"east{number}", bytes(200)) for number in range(200))
    journal.close()
    path = tmp_path / "journal.sqlite3"
    content = bytearray(path.read_bytes())
    pick = random.Random(seed)
    cut = pick.randrange(100, len(content) // 2)
    damaged = bytes(content[:cut]) if seed % 2 else bytes(content[:cut] + pick.randbytes(4096) + content[cut + 4096 :])
    path.write_bytes(damaged)
    with pytest.raises(ConfigError, match="cannot be read"):
        Journal(tmp_path)
    assert path.read_bytes() == damaged


def test_what_is_not_ours_is_refused(tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "journal.sqlite3")
    other.execute("CREATE TABLE users (name TEXT)")
    other.commit()
    other.close()
    with pytest.raises(ConfigError, match="not a journal of Pathway"):
        Journal(tmp_path)
    newer = tmp_path / "newer"
    Journal(newer).close()
    other = sqlite3.connect(newer / "journal.sqlite3")
    other.execute("PRAGMA user_version=99")
    other.commit()
    other.close()
    with pytest.raises(ConfigError, match="has format 99"):
        Journal(newer)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        Journal(tmp_path / "file" / "state")


def test_a_full_disk_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write([Record("island", "east", b"1")])
    journal._database.execute("PRAGMA max_page_count=8")
    with pytest.raises(OSError, match="cannot be written"):
        journal.write([Record("island", "east", None), Record("island", "west", bytes(1 << 20))])
    assert journal.read() == {"island": {"east": b"1"}}
    journal.close()


# -- the recorder --------------------------------------------------------------------------------------------------


class SlowJournal:
    """Writes when it is told to."""

    def __init__(self) -> None:
        self.written: list[list[str]] = []
        self.may_write = trio.Event()
        self.fails = False

    def write(self, records: list[Record]) -> None:
        trio.from_thread.run(self.may_write.wait)
        if self.fails:
            raise OSError("the journal cannot be written: disk full")
        self.written.append([record.key for record in records])


def test_what_depends_on_a_record_leaves_when_it_is_written_and_in_order() -> None:
    trio.run(_records_and_messages)


async def _records_and_messages() -> None:
    posted: list[tuple[bytes, int]] = []
    journal = SlowJournal()
    recorder = Recorder(journal, lambda peer, message: posted.append((peer, message.number)), lambda: None)  # type: ignore[arg-type, attr-defined]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(recorder.run)
        recorder.record(Record("island", "east", b"1", (Send(b"a", m.Ping(1)),)))
        recorder.post(b"a", m.Ping(2))
        recorder.post(b"b", m.Ping(3))
        await trio.testing.wait_all_tasks_blocked(0.01)
        recorder.record(Record("island", "west", b"1", (Send(b"a", m.Ping(4)), Send(b"c", m.Ping(5)))))
        recorder.post(b"a", m.Ping(6))
        recorder.forget(b"c")
        assert posted == [(b"b", 3)]
        journal.may_write.set()
        while len(journal.written) < 2 or recorder._held:
            await trio.testing.wait_all_tasks_blocked(0.001)
        assert posted == [(b"b", 3), (b"a", 1), (b"a", 2), (b"a", 4), (b"a", 6)]
        assert journal.written == [["east"], ["west"]]
        nursery.cancel_scope.cancel()


def test_a_scheduler_that_cannot_remember_ends() -> None:
    journal = SlowJournal()
    journal.fails = True
    journal.may_write.set()
    recorder = Recorder(journal, lambda peer, message: None, lambda: None)  # type: ignore[arg-type]
    recorder.record(Record("island", "east", b"1"))
    with pytest.raises(PathwayError, match="disk full"):
        trio.run(recorder.run)


# -- what is remembered ----------------------------------------------------------------------------------------------


def test_incarnations_go_on_where_the_last_scheduler_left_them() -> None:
    world = World()
    world.form("east")
    core = SchedulerCore(SchedulerSettings(), random.Random(1), 0.0, islands={"east": IslandRecord(7, drained=True)})
    core.handle(MessageReceived(b"worker", hello("worker")), 0.0)
    out = core.handle(MessageReceived(b"worker", world.joined("east")), 0.0)
    [record] = [one for one in out if isinstance(one, Record)]
    assert msgspec.msgpack.decode(record.value, type=IslandRecord) == IslandRecord(8, drained=True)
    [form] = [send.message for send in record.then]
    assert isinstance(form, m.FormIsland)
    assert form.incarnation == 8
    assert core.status(0.0)["islands"][0]["drained"]


def test_a_scheduler_process_remembers(tmp_path: Path) -> None:
    """A scheduler is killed and started again at its address: the island comes back with a later incarnation, and what
    was drained is drained. A second scheduler is refused meanwhile."""
    state = {"PATHWAY_STATE_DIR": str(tmp_path)}
    with start_local_cluster({"east": {"devices": 1}}, environment=state) as cluster:
        assert trio.run(give_order, cluster.address, m.DrainIsland(1, "east", True), 10.0).startswith("island east")
        second = subprocess.run(
            [sys.executable, "-m", "pathway", "scheduler", "--bind", "tcp://127.0.0.1:0", "--state-dir", str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert second.returncode == 2
        assert "in use by another scheduler" in second.stderr
        assert cluster.scheduler is not None
        cluster.scheduler.process.kill()
        cluster.scheduler.process.wait()
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "pathway", "scheduler", "--bind", cluster.address, "--drain-s", "0"]
        command += ["--report-fd", str(writing)]
        with subprocess.Popen(command, env={**os.environ, **state}, pass_fds=(writing,)) as again:
            os.close(writing)
            try:
                assert os.read(reading, 100).decode().strip() == cluster.address
                assert trio.run(wait_for_islands, cluster.address, {"east"}, 30.0)
                [island] = trio.run(fetch_status, cluster.address, 10.0)["islands"]
                assert (island["incarnation"], island["drained"]) == (2, True)
            finally:
                os.close(reading)
                again.terminate()
