"""Checksums of transfers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathway.errors import TransferError, to_exception
from pathway.transport.checksum import RunningChecksum, checksum, mismatch


def test_the_value_is_xxh3_of_64_bits() -> None:
    assert checksum(b"") == 0x2D06800538D394C2  # from the specification
    assert RunningChecksum().value() == checksum(b"")


@given(st.binary(max_size=4096), st.lists(st.integers(0, 4096), max_size=8))
def test_piece_by_piece_is_the_same_as_at_once(data: bytes, cuts: list[int]) -> None:
    running = RunningChecksum()
    start = 0
    for cut in [*sorted(cuts), len(data)]:
        running.add(np.frombuffer(data, np.uint8)[start:cut])
        start = max(start, min(cut, len(data)))
    assert running.value() == checksum(data)


@given(st.binary(min_size=1, max_size=4096), st.data())
def test_every_flipped_bit_is_seen(data: bytes, drawn: st.DataObject) -> None:
    bit = drawn.draw(st.integers(0, 8 * len(data) - 1))
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    assert checksum(damaged) != checksum(data)


def test_swapped_pieces_are_seen() -> None:
    data = np.arange(4096, dtype=np.uint16).view(np.uint8)
    assert checksum(np.concatenate([data[4096:], data[:4096]])) != checksum(data)


def test_a_mismatch_names_the_edge_and_both_hosts() -> None:
    error = to_exception(mismatch("edge 3 of run 7", "front/0", "back/1", 1 << 20, 1, 2))
    with pytest.raises(TransferError, match=r"edge 3 of run 7, 1,048,576 bytes from front/0 to back/1"):
        raise error
