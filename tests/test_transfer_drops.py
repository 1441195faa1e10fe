"""What nobody waits for any more goes with its memory, on both sides: at a real executor, with half of every transfer
under way. Where nothing were dropped, each of these would keep `ROUNDS` times a large array."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import trio
import zmq

from pathway.dataflow.plan import Edge, Execute, Gang, Part, Send
from pathway.errors import ErrorInfo
from pathway.transport import messages as m
from pathway.transport.bulk import CHUNK_BYTES, CREDIT_BYTES
from pathway.transport.sockets import Dealer, Delivery, Router, hello
from tests.executor_tools import in_trio, layout, lowered
from tests.test_executor import SESSION, Client, Scheduler, islands

MIB = 1 << 20
ROUNDS = 12
LARGE_BYTES = 32 * MIB
ELEMENTS = LARGE_BYTES // 4
CANCELLED = ErrorInfo("Cancelled", "by the user")
GHOST = m.IslandEntry("ghost", 1, "cpu", 1, ("tcp://127.0.0.1:9",))


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


@asynccontextmanager
async def one_executor(tmp_path: Path) -> AsyncIterator[tuple[Scheduler, int]]:
    """East, which has an edge from an island that is not there; and the pid of its executor."""
    async with islands(tmp_path, east=(1, 1)) as scheduler:
        scheduler.say("east", m.Directory((*scheduler.directory().islands, GHOST)))
        yield scheduler, scheduler.pids["east", 0]


async def half(dealer: Dealer, header: Any, chunk: bytes = bytes(CHUNK_BYTES)) -> None:
    """Announce a large transfer and send most of it."""
    dealer.post(header)
    for number in range(LARGE_BYTES // CHUNK_BYTES - 1):
        dealer.send_with_blob(m.Chunk(header.transfer, number * CHUNK_BYTES), chunk)
    dealer.post(m.Ping(header.transfer))
    dealer.flush()
    await pong(dealer, header.transfer)


async def pong(dealer: Dealer, number: int) -> None:
    """All that was sent before a Ping has been taken."""
    with trio.fail_after(30):
        while True:
            for item in await dealer.receive_batch():
                assert isinstance(item, Delivery), item
                if m.Pong(number) in item.messages:
                    return


def client_hello(session: int) -> m.Hello:
    return msgspec.structs.replace(hello("peer", "leaver"), session=session)


def waits_for_ghost() -> tuple[Part, Any]:
    one = layout((ELEMENTS,), "float32", [0])
    increment = lowered(lambda x: (x + 1,), [one])
    gang = Gang((Execute(0, increment[0], (0,), (0,), (1,), frees=(0,)),), waits=(0,))
    edge = Edge(0, "ghost", "east", 1, 0, one, one)
    part = Part("program", "east", "cpu", (one, one), (), ((0, 1),), (gang,), edges_in=(edge,), names=("increment",))
    return part, increment


def shard(run: int) -> m.EdgeShard:
    return m.EdgeShard(run, SESSION, run, 0, 0, ((0, ELEMENTS),), LARGE_BYTES)


@in_trio
async def test_a_run_that_is_over_takes_what_was_on_its_way(tmp_path: Path) -> None:
    """Every other one is cancelled; the rest never begin, for no plan of their number is known, and data come first."""
    async with one_executor(tmp_path) as (scheduler, pid):
        part, increment = waits_for_ghost()
        scheduler.plan(1, [part], increment)
        other = await Dealer.connect(scheduler.addresses["east", 0], hello("peer", "ghost/0"))
        before = 0
        for run in range(1, ROUNDS + 1):
            if run % 2:
                scheduler.start("east", run, 1, 100 + run)
                await half(other, shard(run))
                scheduler.say("east", m.CancelPart(SESSION, run, CANCELLED))
            else:
                await half(other, shard(run))
                scheduler.start("east", run, 2, 100 + run)
            await scheduler.heard_of(m.PartFailed, run)
            before = before or resident_bytes(pid)
        assert resident_bytes(pid) - before < 4 * LARGE_BYTES
        for run in range(1, ROUNDS + 1):  # what comes all the same does no harm
            other.send_with_blob(m.Chunk(run, LARGE_BYTES - CHUNK_BYTES), bytes(CHUNK_BYTES))
        other.post(m.Ping(99))
        other.flush()
        await pong(other, 99)
        other.close()


@in_trio
async def test_a_client_that_leaves_takes_what_it_had_begun_to_put(tmp_path: Path) -> None:
    """Also a client whose session nobody has told this executor of, so that nobody will tell it of its end."""
    async with one_executor(tmp_path) as (scheduler, pid):
        client = await Client.connect(scheduler.addresses["east", 0])
        before = 0
        for buffer in range(1, ROUNDS + 1):
            leaver = await Dealer.connect(scheduler.addresses["east", 0], client_hello(SESSION + 1 + buffer % 2))
            region = ((0, 1), (0, ELEMENTS))
            await half(leaver, m.PutShard(1, SESSION + 1 + buffer % 2, buffer, region, LARGE_BYTES))
            last = m.Chunk(1, LARGE_BYTES - CHUNK_BYTES)  # without a checksum: this region is complete
            leaver.send_with_blob(last, bytes(CHUNK_BYTES))
            leaver.post(m.Fetch(1, SESSION + 1 + buffer % 2, 10_000 + buffer, (0,)))
            leaver.post(m.TraceRequest(1, True))
            leaver.post(m.Ping(2))
            leaver.flush()
            await pong(leaver, 2)
            leaver.close()
            before = before or resident_bytes(pid)
        await client.receive(lambda: resident_bytes(pid) - before < 5 * LARGE_BYTES or client.dealer.post(m.Ping(1)))
        client.dealer.close()

        scheduler.say("east", m.PutOnIsland(SESSION, 5, layout((ELEMENTS,), "float32", [0])))
        leaver = await Dealer.connect(scheduler.addresses["east", 0], client_hello(SESSION))
        await half(leaver, m.PutShard(1, SESSION, 5, ((0, ELEMENTS),), LARGE_BYTES))
        leaver.close()
        client = await Client.connect(scheduler.addresses["east", 0])
        error = (await client.fails(client.ask(5, 0))).error  # a buffer that was announced is an error now
        assert error.kind == "TransferError"
        assert "the client's link ended before all of its data had come" in error.message
        client.dealer.close()


@in_trio
async def test_a_client_that_takes_no_answers_costs_no_memory(tmp_path: Path) -> None:
    """What it asks for again and again is not copied as often; and when it takes it after all, it is all there."""
    requests, size = 8_000, 15_000
    async with one_executor(tmp_path) as (scheduler, pid):
        scheduler.say("east", m.PutOnIsland(SESSION, 5, layout((size,), "float32", [0]), bytes(4 * size)))
        client = await Client.connect(scheduler.addresses["east", 0])
        await client.fetch(5, np.float32, 0)
        client.dealer.close()
        before = resident_bytes(pid)
        peer = zmq.Context.instance().socket(zmq.DEALER)
        peer.linger, peer.rcvhwm, peer.rcvbuf = 0, 1, 1 << 16
        with peer:
            peer.connect(scheduler.addresses["east", 0])
            asked = [m.Fetch(number, SESSION, 5, (0,)) for number in range(requests)]
            peer.send(m.encode([client_hello(SESSION), *asked]))
            other = await Client.connect(scheduler.addresses["east", 0])
            other.dealer.post(m.Ping(1))
            other.dealer.flush()
            await pong(other.dealer, 1)  # so all of them have been looked at
            grown = resident_bytes(pid) - before
            assert grown < 0.3 * requests * 4 * size, f"{grown:,} bytes"
            arrived = 0
            with trio.fail_after(60):
                while arrived < requests:
                    while peer.poll(0):
                        *_, blob = peer.recv_multipart()
                        arrived += len(blob) == 4 * size
                    other.dealer.post(m.Ping(2))  # for the executor to go on with
                    other.dealer.flush()
                    await pong(other.dealer, 2)
            other.dealer.close()


@in_trio
async def test_a_sender_drops_what_it_was_sending_for_a_cancelled_run(tmp_path: Path) -> None:
    """The receiver is this test, which takes nothing: the rest waits at the sender, until the run is cancelled."""
    async with islands(tmp_path, east=(1, 1)) as scheduler:
        with Router.bind("tcp://127.0.0.1:0") as router:
            entry = m.IslandEntry("ghost", 1, "cpu", 1, (router.address,))
            scheduler.say("east", m.Directory((*scheduler.directory().islands, entry)))
            one = layout((ELEMENTS,), "float32", [0])
            edge = Edge(0, "east", "ghost", 0, 0, one, one)
            gang = Gang((Send(0, 0, frees=(0,)),), arguments=(0,))
            scheduler.plan(1, [Part("program", "east", "cpu", (one,), (0,), (), (gang,), edges_out=(edge,))])
            scheduler.say("east", m.PutOnIsland(SESSION, 7, one, bytes(LARGE_BYTES)))
            scheduler.start("east", 1, 1, 100, 7)
            await scheduler.finished(1)  # its part is over, and its data are not
            heard: list[Any] = []
            arrived = 0
            with trio.fail_after(30):
                while not any(isinstance(message, m.TransferDropped) for message in heard):
                    for item in await router.receive_batch():
                        assert isinstance(item, Delivery), item
                        heard += item.messages
                        arrived += sum(len(blob) for blob in item.blobs)
                    if arrived == CREDIT_BYTES:
                        scheduler.say("east", m.CancelPart(SESSION, 1, CANCELLED))
            assert arrived == CREDIT_BYTES
            [announced] = [message for message in heard if isinstance(message, m.EdgeShard)]
            assert heard[-1] == m.TransferDropped(announced.transfer)
