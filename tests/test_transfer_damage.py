"""Data that did not arrive as it left, at a real executor: an error that names what, and between whom; nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pathway.dataflow.plan import Edge, Execute, Gang, Part
from pathway.transport import messages as m
from pathway.transport.bulk import CHUNK_BYTES
from pathway.transport.checksum import checksum
from pathway.transport.sockets import Dealer, hello
from tests.executor_tools import in_trio, layout, lowered
from tests.test_executor import SESSION, Client, islands

SIZES = (1000, CHUNK_BYTES // 4 + 100_000)
"""In one frame, and in several chunks."""


def pieces(data: np.ndarray[Any, Any], damaged: bool) -> tuple[int, Sequence[tuple[int, int, Any]]]:
    """(the checksum of a header, the chunks as (offset, checksum, data)), with a bit flipped on the way."""
    flat = data.reshape(-1).view(np.uint8).copy()
    given = checksum(flat)
    if damaged:
        flat[-3] ^= 0x10
    if flat.nbytes <= CHUNK_BYTES:
        return given, [(0, 0, flat)]
    offsets = range(0, flat.nbytes, CHUNK_BYTES)
    last = offsets[-1]
    return 0, [(at, given if at == last else 0, flat[at : at + CHUNK_BYTES]) for at in offsets]


def send(dealer: Dealer, header: Any, chunks: Sequence[tuple[int, int, Any]]) -> None:
    if len(chunks) == 1:
        dealer.send_with_blob(header, chunks[0][2])
        return
    dealer.post(header)
    for offset, given, data in chunks:
        dealer.send_with_blob(m.Chunk(header.transfer, offset, given), data)


@in_trio
async def test_a_damaged_edge_names_the_edge_and_both_hosts(tmp_path: Path) -> None:
    async with islands(tmp_path, east=(1, 1)) as scheduler:
        ghost = m.IslandEntry("ghost", 1, "cpu", 1, ("tcp://127.0.0.1:9",))
        scheduler.say("east", m.Directory((*scheduler.directory().islands, ghost)))
        other = await Dealer.connect(scheduler.addresses["east", 0], hello("peer", "ghost/0"))
        run = 0
        for plan, size in enumerate(SIZES, start=1):
            one = layout((size,), "float32", [0])
            increment = lowered(lambda x: (x + 1,), [one])
            edge = Edge(0, "ghost", "east", 1, 0, one, one)
            gang = Gang((Execute(0, increment[0], (0,), (0,), (1,), frees=(0,)),), waits=(0,))
            part = Part(
                "program", "east", "cpu", (one, one), (), ((0, 1),), (gang,), edges_in=(edge,), names=("increment",)
            )  # fmt: skip
            scheduler.plan(plan, [part], increment)
            data = np.arange(size, dtype=np.float32)
            for damaged in (False, True, False):
                run += 1
                scheduler.start("east", run, plan, 100 + run)
                given, chunks = pieces(data, damaged)
                header = m.EdgeShard(run, SESSION, run, 0, 0, ((0, size),), data.nbytes, given)
                send(other, header, chunks)
                if not damaged:
                    await scheduler.finished(run)
                    continue
                failed = (await scheduler.heard_of(m.PartFailed, plan))[-1]
                assert (failed.run, failed.error.kind) == (run, "TransferError")
                for what in (f"edge 0 of run {run}", "from ghost/0 to east/0", f"{data.nbytes:,} bytes", "checksum"):
                    assert what in failed.error.message
        await scheduler.until(lambda: any(getattr(x, "damaged_transfers", 0) == 2 for x in scheduler.heard))
        other.close()


@in_trio
async def test_a_damaged_put_is_an_error_in_its_buffer(tmp_path: Path) -> None:
    async with islands(tmp_path, east=(1, 1)) as scheduler:
        client = await Client.connect(scheduler.addresses["east", 0])
        for number, size in enumerate(SIZES):
            whole = layout((size,), "float32", [0])
            data = np.arange(size, dtype=np.float32)
            for buffer, damaged in ((10 + number, True), (20 + number, False)):
                scheduler.say("east", m.PutOnIsland(SESSION, buffer, whole))
                given, chunks = pieces(data, damaged)
                header = m.PutShard(buffer, SESSION, buffer, ((0, size),), data.nbytes, given)
                send(client.dealer, header, chunks)
            error = (await client.fails(client.ask(10 + number, 0))).error
            assert error.kind == "TransferError"
            assert f"a region of buffer {10 + number}" in error.message
            (value,) = await client.fetch(20 + number, np.float32, 0)
            np.testing.assert_array_equal(value, data)
        client.dealer.close()
