"""Arrays on their way, with real processes: by shared memory and by sockets, while processes are killed and sessions
end. `local_cluster` checks that nothing is left behind, in /dev/shm or anywhere else."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathway as pw
from pathway.testing.cluster import ClusterUnderTest, local_cluster

MIB = 1 << 20
ISLANDS = {"east": {"hosts": 1, "devices": 2}, "west": {"hosts": 2, "devices": 1}}
DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def shared() -> Iterator[ClusterUnderTest]:
    with local_cluster(ISLANDS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def separate() -> Iterator[ClusterUnderTest]:
    """A cluster whose executors are told to use sockets alone."""
    with local_cluster(ISLANDS, environment={"PATHWAY_SHARED_MEMORY": "no"}) as cluster:
        yield cluster


def lent_mappings(pid: int) -> list[str]:
    """The arenas of other processes that this one has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    arenas = {line.split("/memfd:", 1)[1] for line in lines if "/memfd:pathway-" in line and "-arena-" in line}
    return [arena for arena in arenas if not arena.startswith(f"pathway-{pid}-")]


def shared_bytes(pid: int) -> int:
    """What the process has of memory that can be shared."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssShmem")


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def values(rows: int, columns: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((rows, columns), np.float32)


def move_there_and_back(cluster: ClusterUnderTest) -> None:
    """From two devices of one host to two hosts, laid out the other way, and back: pieces that are not dense."""
    with pw.connect(cluster.address):
        east, west = pw.slice(2, mesh={"e": 2}, island="east"), pw.slice(2, mesh={"w": 2}, island="west")
        negate = pw.jit(west, in_specs=(P(None, "w"),), out_specs=P("w"))(lambda x: -x)
        double = pw.jit(east, in_specs=(P("e"),), out_specs=P(None, "e"))(lambda x: 2 * x)

        @pw.program
        def program(x: Any) -> Any:
            return double(negate(x))

        for seed in range(4):
            x = values(1030, 2050, seed)
            moved = program(pw.put(x, east, P("e")))
            np.testing.assert_array_equal(pw.get(moved), -2 * x)


def test_neighbours_share_memory(shared: ClusterUnderTest) -> None:
    move_there_and_back(shared)
    east, *west = (shared.executor_pid("east"), shared.executor_pid("west", 0), shared.executor_pid("west", 1))
    assert lent_mappings(east)
    assert all(lent_mappings(pid) for pid in west)


def test_without_shared_memory_sockets_do(separate: ClusterUnderTest) -> None:
    move_there_and_back(separate)
    for island, host in (("east", 0), ("west", 0), ("west", 1)):
        assert not lent_mappings(separate.executor_pid(island, host))


@pytest.mark.parametrize("wanted", ["yes", "no"])
def test_a_client_shares_memory_or_does_not(
    shared: ClusterUnderTest, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATHWAY_SHARED_MEMORY", wanted)
    x = values(1030, 2050)
    with pw.Client(shared.address) as client:
        got = client.get(client.put(x, client.slice(2, mesh={"e": 2}, island="east"), P("e")))
        np.testing.assert_array_equal(got, x)
        assert bool(lent_mappings(os.getpid())) == (wanted == "yes")


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_what_a_client_puts_may_change_at_once(kind: str, request: pytest.FixtureRequest) -> None:
    cluster: ClusterUnderTest = request.getfixturevalue(kind)
    with pw.connect(cluster.address):
        home = pw.slice(2, island="east")
        for nbytes in (100_000, 1 * MIB, 3 * MIB + 4, 20 * MIB):
            x = np.arange(nbytes // 4, dtype=np.int32)
            expected = x.copy()
            array = pw.put(x, home, P("data")) if nbytes % 8 == 0 else pw.put(x, home)
            x[:] = -1
            np.testing.assert_array_equal(pw.get(array), expected)


def test_what_a_client_got_stays_when_everything_else_has_gone() -> None:
    with local_cluster({"east": {"hosts": 1, "devices": 1}}) as cluster, pw.connect(cluster.address):
        x = values(2000, 2000)
        got = pw.get(pw.jit(pw.slice(1))(lambda x: x + 1)(x))
        cluster.kill_executor("east")
    np.testing.assert_array_equal(got, x + 1)
    assert not got.flags.writeable


def test_memory_comes_back_while_arrays_move(shared: ClusterUnderTest) -> None:
    """However many arrays have moved, no more is held than were alive at once, and what is kept warm."""
    with pw.connect(shared.address):
        east, west = pw.slice(1, island="east"), pw.slice(1, island="west")
        x = pw.put(np.ones(8 * MIB, np.uint8), east)
        last = pw.jit(west)(lambda x: x[-1:])
        for _ in range(60):
            last(x).block_until_ready()
        sender = shared.executor_pid("east")
        assert shared_bytes(sender) < 8 * 8 * MIB + 32 * MIB
        got = [pw.get(last(x)) for _ in range(3)]
        assert all(int(value[0]) == 1 for value in got)
        client = shared_bytes(sender)
        for _ in range(20):
            pw.get(pw.jit(east)(lambda x: x + 1)(x))
            gc.collect()
        assert shared_bytes(sender) < client + 6 * 8 * MIB


def test_a_session_that_ends_takes_its_transfers_with_it(separate: ClusterUnderTest) -> None:
    """A client that leaves in the midst of large puts and moves does no harm to the next one."""
    for _ in range(3):
        with pw.connect(separate.address):
            east, west = pw.slice(1, island="east"), pw.slice(1, island="west")
            last = pw.jit(west)(lambda x: x[-1:])
            x = pw.put(np.ones(64 * MIB, np.uint8), east)
            for _ in range(4):
                last(x)
    with pw.connect(separate.address):
        east, west = pw.slice(1, island="east"), pw.slice(1, island="west")
        x = values(1000, 1000)
        np.testing.assert_array_equal(pw.get(pw.jit(west)(lambda x: x + 1)(pw.put(x, east))), x + 1)


def until_it_fails(use: Callable[[], object]) -> None:
    while True:
        use()


def test_executors_killed_while_they_lend_and_borrow() -> None:
    with local_cluster({"east": {"hosts": 1, "devices": 1}, "west": {"hosts": 1, "devices": 1}}) as cluster:
        for victim in ("west", "east"):
            with pw.connect(cluster.address):
                east, west = pw.slice(1, island="east"), pw.slice(1, island="west")
                move = pw.jit(west)(lambda x: x + 1)
                x = pw.put(np.ones(16 * MIB, np.uint8), east)
                pw.get(move(x))
                under_way = [move(x) for _ in range(6)]
                cluster.kill_executor(victim)
                with pytest.raises(pw.IslandLostError):
                    until_it_fails(lambda: jax.block_until_ready([*under_way, move(x)]))  # noqa: B023
                cluster.wait_for_incarnation(victim, 2)
        with pw.connect(cluster.address):
            east, west = pw.slice(1, island="east"), pw.slice(1, island="west")
            x = values(2000, 2000)
            np.testing.assert_array_equal(pw.get(pw.jit(west)(lambda x: x * 2)(pw.put(x, east))), x * 2)
            # What dead borrowers had is free again: the lender keeps what is warm, and nothing else.
            assert eventually(lambda: shared_bytes(cluster.executor_pid("east")) < 160 * MIB)
