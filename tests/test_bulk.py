"""Bulk: chunks in a window, small transfers past large ones, memory kept until it left, and senders that misbehave."""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from pathway.errors import ProtocolError
from pathway.transport.bulk import (
    ALIGNMENT_BYTES,
    TELL_TAKEN_BYTES,
    BulkReceiver,
    BulkSender,
    HostBytes,
    aligned_empty,
    as_bytes,
    pooled_empty,
)
from pathway.transport.memory import private_pool
from pathway.transport.messages import CHUNK_BYTES, Chunk, PutShard, Shared, TransferDropped
from pathway.transport.shm import SharedMemory, SharingLink
from pathway.transport.sockets import Dealer, Delivery, Router, hello

WIRE_CREDIT_BYTES = TELL_TAKEN_BYTES
"""The least with which everything still moves."""


class Wire:
    """A link on which nothing leaves until the test says so."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, Any]] = []
        self.told: list[Any] = []
        self.damaged: list[int] = []
        self.receiver = BulkReceiver(self.told.append)
        self.sender = BulkSender(
            lambda message: self.sent.append((message, None)),
            lambda message, blob: self.sent.append((message, blob)),
            credit_bytes=WIRE_CREDIT_BYTES,
        )

    def send(self, transfer: int, nbytes: int, session: int = 1) -> HostBytes:
        data = np.full(nbytes, transfer, np.uint8)
        self.sender.send(header(transfer, nbytes, session), transfer, data)
        return data

    def deliver(self, done: dict[int, HostBytes]) -> None:
        """All that was sent arrives, and the sender is told so."""
        sent, self.sent[:] = list(self.sent), []
        for message, blob in sent:
            self.receive(message, None if blob is None else bytes(blob), done)
        del sent, message, blob
        told, self.told[:] = list(self.told), []
        for message in told:
            self.sender.taken(message.nbytes)

    def receive(self, message: Any, blob: Any, done: dict[int, HostBytes]) -> None:
        match message:
            case Chunk():
                self.receiver.chunk(message, blob)
            case TransferDropped():
                self.receiver.dropped(message)
            case _:
                self.receiver.header(
                    message.transfer,
                    message.nbytes,
                    blob,
                    functools.partial(done.__setitem__, message.transfer),
                    checksum_given=message.checksum,
                    damaged=lambda given, found: self.damaged.append(message.transfer),
                    session=message.session,
                )


def header(transfer: int, nbytes: int, session: int = 1) -> PutShard:
    return PutShard(transfer, session, 1, ((0, nbytes),), nbytes)


def chunks(wire: Wire) -> list[Chunk]:
    return [message for message, _ in wire.sent if isinstance(message, Chunk)]


SIZES = [0, 1, 1000, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES, 9 * CHUNK_BYTES - 5]


@given(st.lists(st.sampled_from(SIZES), max_size=5))
@settings(max_examples=20, deadline=None)
def test_all_that_is_sent_arrives_whole(sizes: list[int]) -> None:
    wire, done = Wire(), {}
    for transfer, nbytes in enumerate(sizes):
        wire.send(transfer, nbytes)
    while wire.sent:
        wire.deliver(done)
    assert {transfer: len(data) for transfer, data in done.items()} == dict(enumerate(sizes))
    assert all((data == transfer).all() for transfer, data in done.items())


def test_so_many_chunks_are_under_way_and_no_more() -> None:
    wire = Wire()
    wire.send(1, 20 * CHUNK_BYTES)
    assert sum(len(blob) for _, blob in wire.sent if blob is not None) == WIRE_CREDIT_BYTES
    wire.sender.taken(3 * CHUNK_BYTES)
    assert len(chunks(wire)) * CHUNK_BYTES == WIRE_CREDIT_BYTES + 3 * CHUNK_BYTES
    wire.send(2, 10)  # B-1: what is small does not wait for what is large
    assert wire.sent[-1][0].transfer == 2


def test_large_transfers_take_turns() -> None:
    wire, done = Wire(), {}
    wire.send(1, 12 * CHUNK_BYTES)
    wire.send(2, 12 * CHUNK_BYTES)
    order: list[int] = []
    while wire.sent:
        order += [message.transfer for message in chunks(wire)]
        wire.deliver(done)
    assert len(order) == 24
    middle = order[6:18]
    assert all(first != second for first, second in itertools.pairwise(middle)), order


def test_data_leaves_without_a_copy() -> None:
    wire = Wire()
    data = wire.send(1, 2 * CHUNK_BYTES)
    assert all(np.shares_memory(blob, data) for _, blob in wire.sent if blob is not None)


def test_a_closed_sender_sends_no_more() -> None:
    wire = Wire()
    wire.send(1, 20 * CHUNK_BYTES)
    wire.sender.close()
    wire.sent.clear()
    wire.sender.taken(WIRE_CREDIT_BYTES)
    assert not wire.sent


def test_sessions_take_turns_whatever_each_of_them_sends() -> None:
    wire, done = Wire(), {}
    for transfer in range(5):
        wire.send(transfer, 4 * CHUNK_BYTES, session=1)
    wire.send(9, 4 * CHUNK_BYTES, session=2)
    order: list[int] = []
    while wire.sent:
        order += [message.transfer for message in chunks(wire)]
        wire.deliver(done)
    assert order.index(9) < 6
    assert len(order) - order[::-1].index(9) <= 4 + 8  # its four chunks among eight or so, not behind twenty (B-5)


@pytest.mark.parametrize("nbytes", [1000, 3 * CHUNK_BYTES + 5])
def test_damaged_data_is_not_delivered(nbytes: int) -> None:
    wire, done = Wire(), {}
    wire.send(1, nbytes)
    message, blob = wire.sent[-1]
    flipped = np.array(blob)
    flipped[3] ^= 4
    wire.sent[-1] = message, flipped
    wire.send(2, nbytes)
    del message, blob
    while wire.sent:
        wire.deliver(done)
    assert wire.damaged == [1]  # B-4
    assert list(done) == [2]


def test_damage_that_nobody_answers_for_ends_the_link() -> None:
    with pytest.raises(ProtocolError, match="checksum"):
        BulkReceiver().header(1, 4, b"abcd", lambda data: None, checksum_given=5)


def test_what_is_dropped_is_dropped_on_both_sides() -> None:
    wire, done = Wire(), {}
    first = wire.send(1, 20 * CHUNK_BYTES, session=1)
    wire.send(2, 6 * CHUNK_BYTES, session=2)
    wire.deliver(done)
    wire.sender.drop(lambda header: header.session == 1)
    reference = weakref.ref(first)
    del first
    while wire.sent:
        wire.deliver(done)
    assert list(done) == [2]
    assert reference() is None
    with pytest.raises(ProtocolError, match="not announced"):
        wire.receiver.chunk(Chunk(1, 0), bytes(1))  # forgotten there too


def test_a_receiver_drops_a_session_by_itself() -> None:
    wire, done = Wire(), {}
    wire.send(1, 6 * CHUNK_BYTES, session=1)
    wire.send(2, 6 * CHUNK_BYTES, session=2)
    wire.deliver(done)
    wire.receiver.drop_session(1)
    while wire.sent:
        wire.deliver(done)  # what is still coming does no harm
    assert list(done) == [2]


def test_received_data_goes_where_it_belongs() -> None:
    receiver = BulkReceiver()
    target = np.zeros(2 * CHUNK_BYTES, np.uint8)
    done: list[HostBytes] = []
    receiver.header(1, len(target), None, done.append, room=lambda: target)
    receiver.chunk(Chunk(1, 0), bytes([3]) * CHUNK_BYTES)
    receiver.chunk(Chunk(1, CHUNK_BYTES), bytes([4]) * CHUNK_BYTES)
    assert done[0] is target
    assert (target[0], target[-1]) == (3, 4)


def test_received_memory_comes_from_the_pool_and_goes_back() -> None:
    pool = private_pool()
    data = pooled_empty(pool, 3 * CHUNK_BYTES)
    where = data.ctypes.data
    view = data.view(np.float32).reshape(-1, 4)[1:]
    del data
    assert pool.used_bytes == 4 * CHUNK_BYTES
    del view
    assert pool.used_bytes == 0
    assert pooled_empty(pool, 3 * CHUNK_BYTES).ctypes.data == where
    assert where % ALIGNMENT_BYTES == 0


def test_neighbours_copy_once() -> None:
    """A whole transfer through a block of shared memory: the sender's only copy is the block, the receiver has none."""
    posted: list[Any] = []
    answers: list[Any] = []
    here, there = SharedMemory(), SharedMemory()
    lending = SharingLink(here, "here", "there", posted.append)
    borrowing = SharingLink(there, "there", "here", answers.append)
    lending.open()
    borrowing.open()
    while posted or answers:
        for messages, end in ((posted, borrowing), (answers, lending)):
            batch = list(messages)
            messages.clear()
            for message in batch:
                end.received(message)
    sender = BulkSender(posted.append, lambda message, blob: None, lending)
    receiver = BulkReceiver(sharing=borrowing)
    assert sender.lend(CHUNK_BYTES) is None  # small: the socket
    loan = sender.lend(3 * CHUNK_BYTES)
    assert loan is not None
    loan.memory[:] = 9
    sender.send(header(1, 3 * CHUNK_BYTES), 1, loan)
    done: list[HostBytes] = []
    for message in posted:
        match message:
            case PutShard():
                receiver.header(1, message.nbytes, None, done.append)
            case Shared():
                receiver.shared(message)
            case _:
                borrowing.received(message)
    assert len(done) == 1
    assert (done[0] == 9).all()
    assert here.lent_bytes == 4 * CHUNK_BYTES
    done.clear()
    assert here.lent_bytes == 0
    unsent = sender.lend(3 * CHUNK_BYTES)
    assert unsent is not None
    sender.close()
    sender.send(header(2, 3 * CHUNK_BYTES), 2, unsent)  # the link has ended meanwhile
    assert here.lent_bytes == 0


def test_received_memory_is_aligned() -> None:
    for nbytes in (1, 1000, CHUNK_BYTES + 7):
        memory = aligned_empty(nbytes)
        assert len(memory) == nbytes
        assert memory.ctypes.data % ALIGNMENT_BYTES == 0
    assert as_bytes(np.zeros((), np.float32)).nbytes == 4


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(-CHUNK_BYTES, CHUNK_BYTES), (1, CHUNK_BYTES), (CHUNK_BYTES, CHUNK_BYTES), (0, 5), (0, 0), (CHUNK_BYTES, 10)],
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
        with Router.bind("tcp://127.0.0.1:0") as router:
            dealer = await Dealer.connect(router.address, hello("peer"))
            sender = BulkSender(dealer.post, dealer.send_with_blob)
            large = np.random.default_rng(1).integers(0, 256, 40 * CHUNK_BYTES + 3, np.uint8)
            sender.send(header(1, len(large)), 1, large)
            sender.send(header(2, 9), 2, np.arange(9, dtype=np.uint8))
            dealer.flush()
            receiver = BulkReceiver(lambda taken: sender.taken(taken.nbytes))
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
