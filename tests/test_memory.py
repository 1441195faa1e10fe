"""Pools of warm memory: W-1 to W-3."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathway.transport.memory import (
    LARGE_STEP_BYTES,
    MIB,
    SMALL_STEP_BYTES,
    Block,
    Pool,
    PrivateArena,
    private_pool,
    rounded,
)
from pathway.transport.shm import SharedArena

KINDS = pytest.mark.parametrize("kind", [PrivateArena, SharedArena])


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_pool(kind: Callable[[int], PrivateArena | SharedArena] = PrivateArena, **settings: object) -> Pool:
    given = {"limit_bytes": 512 * MIB, "spare_bytes": 4 * MIB, **settings}
    return Pool(kind, 64 * MIB, **given)  # type: ignore[arg-type]


def address(block: Block) -> int:
    return int(block.memory.ctypes.data)


def resident_bytes(kind: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"Rss{kind}:"):
                return int(line.split()[1]) * 1024
    raise AssertionError(kind)


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        (0, SMALL_STEP_BYTES),
        (1, SMALL_STEP_BYTES),
        (SMALL_STEP_BYTES + 1, 2 * SMALL_STEP_BYTES),
        (LARGE_STEP_BYTES - SMALL_STEP_BYTES, LARGE_STEP_BYTES - SMALL_STEP_BYTES),
        (LARGE_STEP_BYTES - 1, LARGE_STEP_BYTES),
        (LARGE_STEP_BYTES + 1, 2 * LARGE_STEP_BYTES),
    ],
)
def test_sizes_of_blocks(asked: int, got: int) -> None:
    assert rounded(asked) == got


@KINDS
def test_what_is_given_back_is_used_again_as_it_is(kind: type) -> None:
    pool = make_pool(kind)
    block = pool.take(3 * MIB)
    assert block is not None
    block.memory[:] = 7
    where = address(block)
    pool.give_back(block)
    again = pool.take(3 * MIB)
    assert again is not None
    assert address(again) == where
    assert (again.memory == 7).all()


@KINDS
def test_large_blocks_are_aligned_to_huge_pages(kind: type) -> None:
    pool = make_pool(kind)
    assert pool.take(1) is not None
    block = pool.take(5 * MIB)
    assert block is not None
    assert block.offset % LARGE_STEP_BYTES == 0


def test_a_block_may_be_larger_than_an_arena() -> None:
    pool = make_pool()
    block = pool.take(100 * MIB)
    assert block is not None
    assert block.memory.nbytes == 100 * MIB


def test_nothing_beyond_the_limit() -> None:
    pool = make_pool(limit_bytes=8 * MIB)
    block = pool.take(6 * MIB)
    assert block is not None
    assert pool.take(4 * MIB) is None  # W-3
    pool.give_back(block)
    assert pool.take(4 * MIB) is not None


def test_what_is_kept_never_raises_the_peak_by_more_than_the_spare() -> None:
    pool = make_pool()
    first = pool.take(20 * MIB)
    assert first is not None
    pool.give_back(first)
    assert pool.warm_bytes == 20 * MIB
    assert pool.take(14 * MIB) is not None  # another size: 14 and 20 are more than 20 and the spare
    assert pool.warm_bytes == 0


def test_an_idle_pool_shrinks_to_its_spare() -> None:
    clock = Clock()
    pool = make_pool(clock=clock, keep_s=1.0)
    blocks = [pool.take(2 * MIB) for _ in range(8)]
    for block in blocks:
        assert block is not None
        pool.give_back(block)
    assert pool.warm_bytes == 16 * MIB
    clock.now += 1.0
    pool.trim()
    assert pool.warm_bytes == 16 * MIB  # in use within the last second
    clock.now += 1.0
    pool.trim()
    assert pool.warm_bytes == 4 * MIB
    clock.now += 10.0
    pool.trim()
    assert pool.warm_bytes == 4 * MIB


@pytest.mark.parametrize(("kind", "where"), [(PrivateArena, "Anon"), (SharedArena, "Shmem")])
def test_discarded_pages_go_back_to_the_system(kind: type, where: str) -> None:
    pool = make_pool(kind, spare_bytes=0)
    before = resident_bytes(where)
    block = pool.take(40 * MIB)
    assert block is not None
    block.memory[:] = 1
    assert resident_bytes(where) - before >= 39 * MIB
    pool.give_back(block)
    other = pool.take(2 * MIB)  # so the 40 go
    assert other is not None
    assert resident_bytes(where) - before < 8 * MIB


@given(st.lists(st.tuples(st.integers(1, 9 * MIB), st.integers(0, 20), st.floats(0, 1.5)), max_size=60))
@settings(deadline=None, max_examples=60)
def test_blocks_in_use_never_overlap(history: list[tuple[int, int, float]]) -> None:
    clock = Clock()
    pool = make_pool(clock=clock, limit_bytes=40 * MIB)
    used: list[Block] = []
    peaks = [(clock.now, 0)]
    for nbytes, choice, seconds in history:
        clock.now += seconds
        if choice < len(used):
            pool.give_back(used.pop(choice))
        else:
            block = pool.take(nbytes)
            if block is None:
                assert pool.used_bytes + rounded(nbytes) > 40 * MIB
                continue
            assert block.memory.nbytes >= nbytes
            used.append(block)
        spans = sorted((address(block), address(block) + block.nbytes) for block in used)
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))  # W-1
        assert pool.used_bytes == sum(block.nbytes for block in used)
        peaks.append((clock.now, pool.used_bytes))
        recent = max(used_bytes for when, used_bytes in peaks if when >= clock.now - 60)
        assert pool.used_bytes + pool.warm_bytes <= recent + 4 * MIB  # W-2
    while used:
        pool.give_back(used.pop())
    clock.now += 10
    pool.trim()
    clock.now += 10
    pool.trim()
    assert pool.warm_bytes <= 4 * MIB


def test_the_pool_of_received_data_is_writable_memory() -> None:
    block = private_pool().take(MIB)
    assert block is not None
    block.memory[:] = np.arange(MIB, dtype=np.uint8)
    assert block.memory[257] == 1
