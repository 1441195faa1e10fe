"""Announcements that no host could take cost their sender its link, and this host nothing."""

from __future__ import annotations

import numpy as np
import pytest

from pathway.errors import ProtocolError
from pathway.transport import bulk
from pathway.transport.bulk import BulkReceiver
from pathway.transport.messages import CHUNK_BYTES, Chunk


def nothing(data: object) -> None:
    raise AssertionError("nothing is complete")


@pytest.mark.parametrize("nbytes", [(1 << 41) + 1, 1 << 60, 1 << 63])
def test_a_transfer_that_is_too_large_is_refused(nbytes: int) -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        BulkReceiver().header(1, nbytes, None, nothing)


def test_a_transfer_of_less_than_nothing_is_refused() -> None:
    with pytest.raises(ProtocolError, match="-1 bytes came with 0"):
        BulkReceiver().header(1, -1, None, nothing)


def test_there_are_only_so_many_open_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MAX_OPEN_TRANSFERS", 2)
    receiver, done = BulkReceiver(), []
    receiver.header(1, CHUNK_BYTES + 1, None, done.append)
    receiver.header(2, CHUNK_BYTES + 1, None, done.append)
    with pytest.raises(ProtocolError, match="2 of 2 transfers are open"):
        receiver.header(3, CHUNK_BYTES + 1, None, nothing)
    receiver.chunk(Chunk(1, 0), bytes(CHUNK_BYTES))
    receiver.chunk(Chunk(1, CHUNK_BYTES), b"x")
    assert [len(data) for data in done] == [CHUNK_BYTES + 1]
    receiver.header(3, CHUNK_BYTES + 1, None, nothing)


def test_bytes_that_have_come_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MAX_ANNOUNCED_BYTES", 2 * CHUNK_BYTES)
    receiver, done = BulkReceiver(), []
    for transfer in range(4):
        receiver.header(transfer, 2 * CHUNK_BYTES, None, done.append)
        with pytest.raises(ProtocolError, match="over the limit"):
            receiver.header(99, CHUNK_BYTES + 1, None, nothing)
        for offset in (0, CHUNK_BYTES):
            receiver.chunk(Chunk(transfer, offset), np.full(CHUNK_BYTES, transfer, np.uint8))
    assert [int(data[-1]) for data in done] == [0, 1, 2, 3]
