"""Memory that processes share: M-1 to M-5, within this process and with others that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from pathway.errors import ProtocolError
from pathway.transport import messages as m
from pathway.transport.memory import MIB
from pathway.transport.shm import BOARD_CELLS, SharedMemory, SharingLink

REPOSITORY = Path(__file__).parent.parent


@dataclass
class End:
    """One end of a link, whose messages go nowhere until they are carried."""

    memory: SharedMemory
    name: str
    peer_name: str
    sent: list[m.Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.link = SharingLink(self.memory, self.name, self.peer_name, self.sent.append)


def carry(left: End, right: End) -> None:
    """Deliver what was sent, and what is sent because of it."""
    while left.sent or right.sent:
        for sender, receiver in ((left, right), (right, left)):
            messages = list(sender.sent)
            sender.sent.clear()
            for message in messages:
                receiver.link.received(m.decode(m.encode([message]))[0])


def lend(sender: End, receiver: End, data: np.ndarray) -> np.ndarray:
    """Send `data`; what the receiver gets."""
    loan = sender.link.lend(data.nbytes)
    assert loan is not None
    loan.memory[:] = data
    loan.send(7)
    *before, shared = sender.sent
    sender.sent.clear()
    for message in before:
        receiver.link.received(message)
    assert isinstance(shared, m.Shared)
    assert shared.transfer == 7
    return receiver.link.borrow(shared, data.nbytes)


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    left = End(SharedMemory(), "left", "right")
    right = End(SharedMemory(), "right", "left")
    left.link.open()
    right.link.open()
    carry(left, right)
    yield left, right
    left.link.close()
    right.link.close()
    left.memory.close()
    right.memory.close()


def test_bytes_arrive_without_a_copy_of_the_borrowers(ends: tuple[End, End]) -> None:
    left, right = ends
    assert left.link.can_lend
    assert right.link.can_lend
    data = np.random.default_rng(1).integers(0, 256, 3 * MIB + 5, dtype=np.uint8)
    there = lend(left, right, data)
    back = lend(right, left, data[::-1])
    np.testing.assert_array_equal(there, data)
    np.testing.assert_array_equal(back, data[::-1])
    assert not there.flags.writeable
    assert left.memory.lent_bytes == 4 * MIB


def test_a_block_is_returned_when_nothing_refers_to_it(ends: tuple[End, End]) -> None:
    left, right = ends
    received = lend(left, right, np.ones(MIB, np.uint8))
    view = received.view(np.float32).reshape(512, -1)[3:]
    del received
    assert left.memory.lent_bytes == MIB  # M-4
    del view
    assert left.memory.lent_bytes == 0
    again = left.link.lend(MIB)
    assert again is not None
    assert again.memory[5] == 1  # warm: the very same block


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "float8_e4m3fn", "bool"])
def test_arrays_are_put_in_their_order_whatever_they_are(ends: tuple[End, End], dtype: str) -> None:
    left, right = ends
    array = (np.arange(3 * 5 * 70_001) % 7).reshape(3, 5, -1).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    for part in (array, array[1:, ::2], array.T, array[:0], array, array[2, 4, 7]):
        expected = np.ascontiguousarray(part)
        loan = left.link.lend(part.nbytes)
        assert loan is not None
        loan.fill(part)
        np.testing.assert_array_equal(loan.memory, expected.reshape(-1).view(np.uint8))
        loan.withdraw()
    assert right.memory.lent_bytes == 0


def test_returns_need_no_link(ends: tuple[End, End]) -> None:
    left, right = ends
    received = lend(left, right, np.ones(MIB, np.uint8))
    left.link.close()
    right.link.close()
    assert left.memory.lent_bytes == MIB
    assert received.all()
    del received
    assert left.memory.lent_bytes == 0


def test_what_was_lent_but_never_arrived_comes_back_with_the_end_of_the_link(ends: tuple[End, End]) -> None:
    left, right = ends
    held = lend(left, right, np.ones(MIB, np.uint8))
    lost = left.link.lend(2 * MIB)
    assert lost is not None
    lost.send(8)
    left.sent.clear()
    left.link.close()
    assert left.memory.lent_bytes == 3 * MIB
    right.link.close()
    assert left.memory.lent_bytes == MIB  # M-5
    assert held.all()


def test_a_loan_that_is_not_wanted_is_withdrawn(ends: tuple[End, End]) -> None:
    left, _ = ends
    loan = left.link.lend(MIB)
    assert loan is not None
    loan.withdraw()
    assert left.memory.lent_bytes == 0


def test_nobody_lends_before_the_proof() -> None:
    left = End(SharedMemory(), "left", "right")
    right = End(SharedMemory(), "right", "left")
    right.link.open()
    assert left.link.lend(MIB) is None
    [offer] = right.sent
    left.link.received(offer)
    assert left.link.lend(MIB) is None  # it can borrow, but has had no proof itself
    assert [type(message) for message in left.sent] == [m.ShareProof]


def test_another_machine_is_no_neighbour() -> None:
    left, right = End(SharedMemory(), "left", "right"), End(SharedMemory(), "right", "left")
    right.memory.boot_id = "another"
    left.link.open()
    right.link.open()
    carry(left, right)
    assert left.link.is_settled
    assert left.link.lend(MIB) is None
    assert right.link.lend(MIB) is None


def test_a_process_of_another_namespace_is_no_neighbour() -> None:
    left, right = End(SharedMemory(), "left", "right"), End(SharedMemory(), "right", "left")
    offer = right.memory.new_link()
    left.link.received(m.ShareOffer(offer.boot_id, 2**22 + 5, offer.beacon, offer.board, 1))  # no such pid here
    assert left.sent == [m.ShareProof(b"")]


def test_a_proof_is_good_for_its_own_link_alone() -> None:
    """A peer far away passes an offer on to a neighbour of the lender's, and the neighbour's proof back (M-1)."""
    lender = End(SharedMemory(), "executor lender", "client thief")
    lender.link.open()
    [offer] = lender.sent
    neighbour = End(SharedMemory(), "executor neighbour", "client thief")
    neighbour.link.received(offer)
    [proof] = neighbour.sent
    lender.link.received(proof)
    assert lender.link.lend(MIB) is None


def test_arenas_are_mapped_only_by_their_whole_name(ends: tuple[End, End]) -> None:
    """Who does not know the name of another's arena cannot have it mapped, nor any other file (M-2)."""
    left, right = ends
    lend(left, right, np.ones(MIB, np.uint8))
    secret = os.open("/etc/hostname", os.O_RDONLY)
    try:
        arena = left.memory.pool.take(1)
        assert arena is not None
        descriptor = arena.arena.descriptor  # type: ignore[attr-defined]
        size = arena.arena.nbytes
        for file in (
            (descriptor, "pathway-1-arena-guess", size),
            (secret, "/etc/hostname", 1),
            (secret, "pathway-", os.fstat(secret).st_size),
            (descriptor, arena.arena.name, size + 4096),  # type: ignore[attr-defined]
            (descriptor, arena.arena.name, 1 << 60),  # type: ignore[attr-defined]
            (-5, "../../../etc/hostname", 4096),
        ):
            with pytest.raises(ProtocolError):
                right.link.received(m.ShareArena(file))
    finally:
        os.close(secret)


@pytest.mark.parametrize(
    "message",
    [
        m.Shared(1, 1, 0, 0),
        m.Shared(1, -1, 0, 0),
        m.Shared(1, 0, -4096, 0),
        m.Shared(1, 0, 1 << 40, 0),
        m.Shared(1, 0, 0, BOARD_CELLS),
        m.Shared(1, 0, 0, -1),
    ],
)
def test_blocks_outside_of_arenas_are_refused(ends: tuple[End, End], message: m.Shared) -> None:
    left, right = ends
    lend(left, right, np.ones(MIB, np.uint8))
    with pytest.raises(ProtocolError):
        right.link.borrow(message, MIB)


def test_beyond_the_limit_the_socket_has_to_do() -> None:
    memory = SharedMemory(limit_bytes=4 * MIB)
    left, right = End(memory, "left", "right"), End(SharedMemory(), "right", "left")
    left.link.open()
    right.link.open()
    carry(left, right)
    first = lend(left, right, np.ones(3 * MIB, np.uint8))
    assert left.link.lend(2 * MIB) is None
    del first
    assert left.link.lend(2 * MIB) is not None


def test_arenas_are_sealed_against_shrinking(ends: tuple[End, End]) -> None:
    left, _ = ends
    block = left.memory.pool.take(MIB)
    assert block is not None
    with pytest.raises(PermissionError):
        os.ftruncate(block.arena.descriptor, 0)  # type: ignore[attr-defined]


FORK = """
import gc, os
from pathway.transport import messages as m
from pathway.transport.shm import SharedMemory, SharingLink

sent = {"left": [], "right": []}
left = SharingLink(SharedMemory(), "left", "right", sent["left"].append)
memory = left._memory
right = SharingLink(SharedMemory(), "right", "left", sent["right"].append)
left.open()
right.open()
for _ in range(2):
    for name, end in (("left", right), ("right", left)):
        while sent[name]:
            end.received(sent[name].pop(0))
loan = left.lend(1 << 20)
loan.memory[:] = 1
loan.send(1)
right.received(sent["left"].pop(0))
received = right.borrow(sent["left"].pop(0), 1 << 20)
child = os.fork()
if child == 0:
    del received
    gc.collect()
    os._exit(0)
os.waitpid(child, 0)
print(memory.lent_bytes, bool(received.all()))
"""


def test_a_forked_child_returns_nothing() -> None:
    result = subprocess.run([sys.executable, "-c", FORK], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    assert result.stdout.split() == [str(MIB), "True"]


PEER = """
import sys
from pathway.transport import messages as m
from pathway.transport.shm import SharedMemory, SharingLink
import numpy as np

def post(message):
    frame = m.encode([message])
    sys.stdout.buffer.write(len(frame).to_bytes(4, "big") + frame)
    sys.stdout.buffer.flush()

link = SharingLink(SharedMemory(), "child", "test", post)
link.open()
held = []
while header := sys.stdin.buffer.read(4):
    [message] = m.decode(sys.stdin.buffer.read(int.from_bytes(header, "big")))
    if isinstance(message, m.Shared):
        held.append(link.borrow(message, message.transfer))
        total = int(held[-1].sum(dtype=np.int64))
        post(m.Ping(total))
        loan = link.lend(1 << 20)
        loan.memory[:] = 5
        loan.send(1 << 20)
    elif isinstance(message, m.Ping):
        held.clear()
        post(m.Pong(0))
    else:
        link.received(message)
"""


class Process:
    """Another process at the other end of a link."""

    def __init__(self) -> None:
        self.memory = SharedMemory()
        self.child = subprocess.Popen(
            [sys.executable, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY
        )
        self.link = SharingLink(self.memory, "test", "child", self.post)
        self.link.open()
        while not self.link.can_lend:
            self.link.received(self.read())

    def post(self, message: m.Message) -> None:
        frame = m.encode([message])
        assert self.child.stdin is not None
        self.child.stdin.write(len(frame).to_bytes(4, "big") + frame)
        self.child.stdin.flush()

    def read(self) -> m.Message:
        assert self.child.stdout is not None
        size = int.from_bytes(self.child.stdout.read(4), "big")
        [message] = m.decode(self.child.stdout.read(size))
        return message  # type: ignore[no-any-return]

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process()
    yield process
    process.close()


def exchange(process: Process) -> np.ndarray:
    """Lend a block to the other process and borrow one of its own."""
    loan = process.link.lend(2 * MIB)
    assert loan is not None
    loan.memory[:] = 3
    loan.send(2 * MIB)
    total = process.read()
    assert total == m.Ping(3 * 2 * MIB)
    arena = process.read()
    process.link.received(arena)
    shared = process.read()
    assert isinstance(shared, m.Shared)
    return process.link.borrow(shared, MIB)


def test_between_processes(process: Process) -> None:
    borrowed = exchange(process)
    assert (borrowed == 5).all()
    assert process.memory.lent_bytes == 2 * MIB
    process.post(m.Ping(0))
    assert process.read() == m.Pong(0)
    assert process.memory.lent_bytes == 0


def test_a_killed_borrower_has_nothing_any_more(process: Process) -> None:
    before = set(os.listdir("/dev/shm"))
    borrowed = exchange(process)
    process.child.send_signal(signal.SIGKILL)
    process.child.wait()
    assert process.memory.lent_bytes == 2 * MIB
    process.link.close()
    assert process.memory.lent_bytes == 0  # M-5
    assert (borrowed == 5).all()  # and what it lent lives as long as it is used
    assert set(os.listdir("/dev/shm")) == before


def test_a_living_borrower_keeps_what_it_has_after_the_link(process: Process) -> None:
    exchange(process)
    process.link.close()
    process.memory.trim()
    assert process.memory.lent_bytes == 2 * MIB
    process.child.send_signal(signal.SIGKILL)
    process.child.wait()
    process.memory.trim()
    assert process.memory.lent_bytes == 0
