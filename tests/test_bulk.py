"""Bulk: chunks in a window, small transfers past large ones, memory kept until it left, and senders that misbehave."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from pathway.errors import ProtocolError
from pathway.transport.bulk import (
    ALIGNMENT_BYTES,
    WINDOW_BYTES,
    BulkReceiver,
    BulkSender,
    HostBytes,
    aligned_empty,
    as_bytes,
)
from pathway.transport.messages import CHUNK_BYTES, Chunk, PutShard
from pathway.transport.sockets import Dealer, Delivery, Router, hello


class Wire:
    """A link on which nothing leaves until the test says so."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, Any]] = []
        self.left: list[Any] = []
        self.sender = BulkSender(
            lambda message: self.sent.append((message, None)),
            lambda message, blob: self.sent.append((message, blob)),
            self.left.append,
        )

    def send(self, transfer: int, nbytes: int) -> HostBytes:
        data = np.full(nbytes, transfer, np.uint8)
        self.sender.send(header(transfer, nbytes), transfer, data)
        return data

    def deliver(self, receiver: BulkReceiver, done: dict[int, HostBytes]) -> None:
        """All that was sent arrives, and so leaves the sender."""
        sent, self.sent[:] = list(self.sent), []
        for message, blob in sent:
            copy = None if blob is None else bytes(blob)
            if isinstance(message, Chunk):
                receiver.chunk(message, copy)
            else:
                took = functools.partial(done.__setitem__, message.transfer)
                receiver.header(message.transfer, message.nbytes, copy, took)
        del sent, message, blob
        left, self.left[:] = list(self.left), []
        for callback in left:
            callback()


def header(transfer: int, nbytes: int) -> PutShard:
    return PutShard(transfer, 1, 1, ((0, nbytes),), nbytes)


SIZES = [0, 1, 1000, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES, 9 * CHUNK_BYTES - 5]


@given(st.lists(st.sampled_from(SIZES), max_size=5))
@settings(max_examples=20, deadline=None)
def test_all_that_is_sent_arrives_whole(sizes: list[int]) -> None:
    wire, receiver, done = Wire(), BulkReceiver(), {}
    for transfer, nbytes in enumerate(sizes):
        wire.send(transfer, nbytes)
    while wire.sent:
        wire.deliver(receiver, done)
    assert {transfer: len(data) for transfer, data in done.items()} == dict(enumerate(sizes))
    assert all((data == transfer).all() for transfer, data in done.items())


def test_a_window_of_chunks_is_under_way_and_no_more() -> None:
    wire = Wire()
    wire.send(1, 20 * CHUNK_BYTES)
    assert sum(len(blob) for _, blob in wire.sent if blob is not None) == WINDOW_BYTES
    wire.send(2, 10)  # B-1: what is small does not wait for what is large
    assert wire.sent[-1][0] == header(2, 10)


def test_large_transfers_take_turns() -> None:
    wire, receiver, done = Wire(), BulkReceiver(), {}
    wire.send(1, 12 * CHUNK_BYTES)
    wire.send(2, 12 * CHUNK_BYTES)
    order: list[int] = []
    while wire.sent:
        order += [message.transfer for message, _ in wire.sent if isinstance(message, Chunk)]
        wire.deliver(receiver, done)
    assert len(order) == 24
    middle = order[6:18]
    assert all(first != second for first, second in itertools.pairwise(middle)), order


def test_data_leaves_without_a_copy_and_is_let_go() -> None:
    wire = Wire()
    data = wire.send(1, 2 * CHUNK_BYTES)
    assert all(np.shares_memory(blob, data) for _, blob in wire.sent if blob is not None)
    assert not wire.left
    wire.sent.clear()
    assert len(wire.left) == 2


def test_a_closed_sender_sends_no_more() -> None:
    wire = Wire()
    wire.send(1, 20 * CHUNK_BYTES)
    wire.sender.close()
    wire.sent.clear()
    for callback in list(wire.left):
        callback()
    assert not wire.sent


def test_received_memory_is_aligned() -> None:
    for nbytes in (1, 1000, CHUNK_BYTES + 7):
        memory = aligned_empty(nbytes)
        assert len(memory) == nbytes
        assert memory.ctypes.data % ALIGNMENT_BYTES == 0
    assert as_bytes(np.zeros((), np.float32)).nbytes == 4


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-CHUNK_BYTES, CHUNK_BYTES), (1, CHUNK_BYTES), (CHUNK_BYTES, CHUNK_BYTES), (0, 5), (0, 0)]
)
def test_a_chunk_that_does_not_fit_is_refused(offset: int, nbytes: int) -> None:
    receiver = BulkReceiver()
    receiver.header(1, CHUNK_BYTES + 10, None, lambda data: None)
    with pytest.raises(ProtocolError):
        receiver.chunk(Chunk(1, offset), bytes(nbytes))


def test_transfers_that_were_not_announced_or_twice_are_refused() -> None:
    receiver = BulkReceiver()
    with pytest.raises(ProtocolError, match="not announced"):
        receiver.chunk(Chunk(1, 0), bytes(10))
    receiver.header(1, 2 * CHUNK_BYTES, None, lambda data: None)
    with pytest.raises(ProtocolError, match="twice"):
        receiver.header(1, 2 * CHUNK_BYTES, None, lambda data: None)
    receiver.chunk(Chunk(1, 0), bytes(CHUNK_BYTES))
    with pytest.raises(ProtocolError):
        receiver.chunk(Chunk(1, 0), bytes(CHUNK_BYTES))  # the same again
    with pytest.raises(ProtocolError, match="came with"):
        receiver.header(2, 100, bytes(99), lambda data: None)


def test_over_real_sockets_a_small_transfer_overtakes_a_large_one() -> None:
    async def main() -> None:
        token = trio.lowlevel.current_trio_token()
        with Router.bind("tcp://127.0.0.1:0") as router:
            dealer = await Dealer.connect(router.address, hello("peer"))
            sender = BulkSender(dealer.post, dealer.send_with_blob, token.run_sync_soon)
            large = np.random.default_rng(1).integers(0, 256, 40 * CHUNK_BYTES + 3, np.uint8)
            sender.send(header(1, len(large)), 1, large)
            sender.send(header(2, 9), 2, np.arange(9, dtype=np.uint8))
            dealer.flush()
            receiver = BulkReceiver()
            done: dict[int, HostBytes] = {}
            with trio.fail_after(30):
                while len(done) < 2:
                    for item in await router.receive_batch():
                        assert isinstance(item, Delivery)
                        for position, message in enumerate(item.messages):
                            blob = item.blobs[0] if item.blobs and position == len(item.messages) - 1 else None
                            if isinstance(message, PutShard):
                                took = functools.partial(done.__setitem__, message.transfer)
                                receiver.header(message.transfer, message.nbytes, blob, took)
                            elif isinstance(message, Chunk):
                                receiver.chunk(message, blob)
            assert list(done) == [2, 1]
            np.testing.assert_array_equal(done[1], large)
            dealer.close()

    trio.run(main)
