"""The real executor process, driven by a scheduler that is only a socket: runs, edges, puts, fetches, errors."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
import trio
from msgspec import Raw

from pathway.dataflow.layout import Layout
from pathway.dataflow.plan import Edge, Execute, Gang, Part, Send
from pathway.transport import messages as m
from pathway.transport.bulk import CHUNK_BYTES, as_bytes
from pathway.transport.bulklink import BULK, BulkLink
from pathway.transport.sockets import Dealer, Delivery, PeerGone, Router, hello
from pathway.version import PROTOCOL_VERSION, __version__
from tests.executor_tools import in_trio, layout, lowered, wide  # noqa: F401

SESSION = 77
WAIT_S = 20.0


class Scheduler:
    """Says what a test wants said, and keeps what it hears."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.router = Router.bind("tcp://127.0.0.1:0")
        self.heard: list[Any] = []
        self.peers: dict[tuple[str, int], bytes] = {}
        self.addresses: dict[tuple[str, int], str] = {}
        self.pids: dict[tuple[str, int], int] = {}
        self.shapes: dict[str, tuple[int, int]] = {}  # island -> hosts, devices
        self._changed = trio.Event()
        nursery.start_soon(self._serve)

    async def _serve(self) -> None:
        while True:
            for item in await self.router.receive_batch():
                if isinstance(item, PeerGone):
                    self.heard.append(item)
                    continue
                for message in item.messages:
                    if isinstance(message, m.Hello):
                        self.router.post(item.peer, m.Welcome(PROTOCOL_VERSION, __version__, 1, heartbeat_s=0.2))
                    elif isinstance(message, m.Ping):
                        self.router.post(item.peer, m.Pong(message.number))
                    elif isinstance(message, m.ExecutorReady):
                        key = (message.island, message.host_index)
                        self.peers[key] = item.peer
                        self.addresses[key] = message.peer_address
                        self.pids[key] = message.pid
                    else:
                        self.heard.append(message)
            self.router.flush()
            self._changed.set()
            self._changed = trio.Event()

    async def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until `condition()` is true of what was heard."""
        with trio.move_on_after(WAIT_S):
            while not (found := condition()):
                await self._changed.wait()
            return found
        raise AssertionError(f"nothing more was heard than {self.heard}")

    async def heard_of(self, kind: type, count: int = 1) -> list[Any]:
        def found() -> list[Any]:
            messages = [message for message in self.heard if isinstance(message, kind)]
            return messages if len(messages) >= count else []

        return await self.until(found)

    async def finished(self, *runs: int) -> None:
        await self.until(lambda: self.finished_runs() >= set(runs))

    def finished_runs(self) -> set[int]:
        return {run for message in self.heard if isinstance(message, m.PartsFinished) for _, run in message.parts}

    def say(self, island: str, *messages: m.Message, host: int = 0) -> None:
        for message in messages:
            self.router.post(self.peers[island, host], message)
        self.router.flush()

    def say_all(self, island: str, *messages: m.Message) -> None:
        for host in range(self.shapes[island][0]):
            self.say(island, *messages, host=host)

    def directory(self) -> m.Directory:
        return m.Directory(
            tuple(
                m.IslandEntry(name, 1, "cpu", devices, tuple(self.addresses[name, host] for host in range(hosts)))
                for name, (hosts, devices) in self.shapes.items()
            )
        )

    def plan(self, number: int, parts: Sequence[Part], *programs: tuple[Any, Any, bytes]) -> None:
        for part in parts:
            for key, metadata, artifact in programs:
                encoded = msgspec.msgpack.encode(metadata)
                self.say_all(part.island, m.RegisterComputation(key, encoded, artifact))
            self.say_all(part.island, m.RegisterPart(SESSION, number, msgspec.msgpack.encode(part)))

    def start(self, island: str, run: int, plan: int, first_result: int, *arguments: int | bytes) -> None:
        encoded = Raw(msgspec.msgpack.encode(arguments))
        self.say(island, m.StartPart(SESSION, run, plan, first_result, encoded))


class Client:
    """A bulk link to one executor."""

    def __init__(self, dealer: Dealer) -> None:
        self.dealer = dealer
        self.bulk = BulkLink(dealer.post, dealer.send_with_blob)
        self.shards: dict[int, dict[int, np.ndarray[Any, Any]]] = {}
        self.others: list[Any] = []
        self.requests = 0

    @classmethod
    async def connect(cls, address: str) -> Client:
        introduction = msgspec.structs.replace(hello("peer", "test"), session=SESSION)
        return cls(await Dealer.connect(address, introduction))

    async def receive(self, done: Callable[[], Any]) -> Any:
        with trio.fail_after(WAIT_S):
            while not (found := done()):
                for item in await self.dealer.receive_batch():
                    assert isinstance(item, Delivery), item
                    for position, message in enumerate(item.messages):
                        last = position == len(item.messages) - 1
                        self._take(message, item.blobs[0] if last and item.blobs else None)
                self.dealer.flush()
        return found

    def _take(self, message: Any, blob: Any) -> None:
        if isinstance(message, m.FetchedShard):
            shards = self.shards.setdefault(message.request, {})
            self.bulk.receiver.header(
                message.transfer, message.nbytes, blob, lambda data: shards.update({message.device: data.copy()})
            )
        elif type(message) in BULK:
            self.bulk.received(message, blob)
        else:
            self.others.append(message)

    def ask(self, buffer: int, *devices: int) -> int:
        self.requests += 1
        self.dealer.post(m.Fetch(self.requests, SESSION, buffer, devices))
        self.dealer.flush()
        return self.requests

    async def shards_of(self, request: int, count: int) -> dict[int, np.ndarray[Any, Any]]:
        await self.receive(lambda: len(self.shards.get(request, ())) == count)
        return self.shards[request]

    async def fetch(self, buffer: int, dtype: Any, *devices: int) -> list[np.ndarray[Any, Any]]:
        shards = await self.shards_of(self.ask(buffer, *devices), len(devices))
        return [shards[device].view(dtype) for device in devices]

    async def fails(self, request: int) -> m.FetchFailed:
        def found() -> Any:
            failures = [x for x in self.others if isinstance(x, m.FetchFailed) and x.request == request]
            return failures[0] if failures else None

        failure: m.FetchFailed = await self.receive(found)
        return failure

    def put(self, transfer: int, buffer: int, region: Any, data: np.ndarray[Any, Any]) -> None:
        flat = as_bytes(data)
        self.bulk.sender.send(m.PutShard(transfer, SESSION, buffer, region, len(flat)), transfer, flat)
        self.dealer.flush()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def children(
    address: str, island: str, hosts: int, devices: int, cache: Path, *more: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    coordinator = f"127.0.0.1:{free_port()}"
    reading, writing = os.pipe()
    os.write(writing, b"m")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests", *sys.path]), "NPROC": "32"}
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    processes = []
    try:
        for index in range(hosts):
            arguments = ["--scheduler", address, "--island", island, "--incarnation", "1", "--hosts", str(hosts)]
            arguments += ["--host-index", str(index), "--devices", str(devices), "--platform", "cpu"]
            arguments += ["--coordinator", coordinator, "--cache-dir", str(cache), *more]
            if index == 0:
                arguments += ["--parent-fd", str(reading)]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "pathway.executor.main", *arguments], env=environment, pass_fds=[reading]
                )
            )
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(10)
        os.close(reading)
        os.close(writing)


@contextlib.asynccontextmanager
async def running_scheduler() -> AsyncIterator[Scheduler]:
    scheduler = None
    try:
        async with trio.open_nursery() as nursery:
            scheduler = Scheduler(nursery)
            yield scheduler
            nursery.cancel_scope.cancel()
    finally:
        if scheduler is not None:
            scheduler.router.close()


@contextlib.asynccontextmanager
async def islands(tmp_path: Path, *more: str, **shapes: tuple[int, int]) -> AsyncIterator[Scheduler]:
    async with running_scheduler() as scheduler:
        scheduler.shapes = shapes
        with contextlib.ExitStack() as stack:
            for name, (hosts, devices) in shapes.items():
                stack.enter_context(children(scheduler.router.address, name, hosts, devices, tmp_path, *more))
            await scheduler.until(lambda: len(scheduler.peers) == sum(hosts for hosts, _ in shapes.values()))
            directory = scheduler.directory()
            for name in shapes:
                scheduler.say_all(name, directory)
            yield scheduler


def one_step_part(program: Any, inputs: Sequence[Layout], outputs: Sequence[Layout], **more: Any) -> Part:
    """A part of one gang of one step: its arguments in, its results out."""
    ins, outs = tuple(range(len(inputs))), tuple(range(len(inputs), len(inputs) + len(outputs)))
    step = Execute(0, program[0], inputs[0].devices, ins, outs, frees=ins, **more)
    return Part(
        "program", "east", "cpu", (*inputs, *outputs), ins, tuple(enumerate(outs)),
        (Gang((step,), arguments=ins),), names=("increment",), sources=("train.py:7 in step",), slices=(3,),
    )  # fmt: skip


def f32(values: Any) -> bytes:
    return np.asarray(values, np.float32).tobytes()


@in_trio
async def test_runs_puts_fetches_and_errors_of_one_host(tmp_path: Path) -> None:
    async with islands(tmp_path, east=(1, 4)) as scheduler:
        client = await Client.connect(scheduler.addresses["east", 0])
        one = layout((3,), "float32", [1])
        increment = lowered(lambda x: (x + 1,), [one])
        scheduler.plan(1, [one_step_part(increment, [one], [one])], increment)

        early = client.ask(100, 1)  # before the run is known
        scheduler.start("east", 1, 1, 100, f32([1, 2, 3]))
        for run in range(2, 30):
            scheduler.start("east", run, 1, 99 + run, 98 + run)  # each reads the one before
        await scheduler.finished(*range(1, 30))
        (value,) = await client.fetch(128, np.float32, 1)
        np.testing.assert_array_equal(value, [30, 31, 32])
        shards = await client.shards_of(early, 1)
        np.testing.assert_array_equal(shards[1].view(np.float32), [2, 3, 4])

        # A buffer that is not there poisons the run at once, and the run after it.
        scheduler.start("east", 40, 1, 200, 9999)
        scheduler.start("east", 41, 1, 201, 200)
        failed = await scheduler.heard_of(m.PartFailed, 2)
        assert {message.run for message in failed} == {40, 41}
        assert (await client.fails(client.ask(201, 1))).error == failed[0].error

        # A put of several chunks, some of it before it is announced; every device of a region gets it.
        split = layout((2, 1 << 19), "float32", [0, 1, 2, 3], {"d": 2, "r": 2}, [("d",), ()])
        data = np.random.default_rng(5).standard_normal((2, 1 << 19), np.float32)
        assert data[0].nbytes > CHUNK_BYTES
        client.put(1, 300, split.region(0), data[0])
        scheduler.say("east", m.PutOnIsland(SESSION, 300, split))
        client.put(2, 300, split.region(2), data[1])
        sums = layout((2,), "float32", [0, 1, 2, 3], {"d": 2, "r": 2}, [("d",)])
        total = lowered(lambda x: (x.sum(1),), [split], [sums])
        scheduler.plan(2, [one_step_part(total, [split], [sums])], total)
        scheduler.start("east", 50, 2, 301, 300)
        for device, row in ((0, 0), (3, 1)):
            (value,) = await client.fetch(300, np.float32, device)
            np.testing.assert_array_equal(value, data[row])
            (value,) = await client.fetch(301, np.float32, device)
            np.testing.assert_allclose(value, data[row].sum(keepdims=True), rtol=1e-3, atol=1e-2)

        # An inline put, a release, the report.
        scheduler.say("east", m.PutOnIsland(SESSION, 400, one, f32([7, 8, 9])), m.FreeBuffers(SESSION, (300, 301)))
        (value,) = await client.fetch(400, np.float32, 1)
        np.testing.assert_array_equal(value, [7, 8, 9])
        parked = client.ask(555, 1)
        reports = len(scheduler.heard)
        await scheduler.until(lambda: any(isinstance(x, m.ExecutorReport) for x in scheduler.heard[reports:]))
        report = [x for x in scheduler.heard if isinstance(x, m.ExecutorReport)][-1]
        ((session, buffers, nbytes),) = report.bytes_by_session
        assert (session, nbytes) == (SESSION, 12 * (buffers - 1))  # one is only asked for
        scheduler.say("east", m.FreeBuffers(SESSION, (555,)))
        assert (await client.fails(parked)).error.kind == "DeletedError"

        scheduler.say("east", m.CloseSession(SESSION))
        reports = len(scheduler.heard)
        await scheduler.until(
            lambda: any(isinstance(x, m.ExecutorReport) and not x.bytes_by_session for x in scheduler.heard[reports:])
        )
        assert (await client.fails(client.ask(400, 1))).error.kind == "DeletedError"


@in_trio
async def test_a_computation_that_xla_refuses_fails_its_plan(tmp_path: Path) -> None:
    async with islands(tmp_path, east=(1, 1)) as scheduler:
        one = layout((3,), "float32", [0])
        key, metadata, artifact = lowered(lambda x: (x + 1,), [one])
        broken = (key, metadata, artifact[:-20])
        scheduler.plan(1, [one_step_part(broken, [one], [one])], broken)
        scheduler.start("east", 1, 1, 100, f32([1, 2, 3]))
        (refused,) = await scheduler.heard_of(m.PartRefused)
        assert refused.error.kind == "CompileError"
        assert (refused.error.node, refused.error.source) == ("increment", "train.py:7 in step")
        assert (refused.error.island, refused.error.slice) == ("east", 3)
        (failed,) = await scheduler.heard_of(m.PartFailed)
        assert failed.error == refused.error


@in_trio
async def test_steps_and_edges_within_a_host_and_between_islands(tmp_path: Path) -> None:
    """east: double on devices 0,1, and triple on 2,3 of what 0,1 made; the sum goes to west, which sends it back."""
    async with islands(tmp_path, east=(1, 4), west=(1, 2)) as scheduler:
        size = 1 << 19  # shards of several chunks
        front = layout((4, size), "float32", [0, 1], {"d": 2}, [("d",), ()])
        back = layout((4, size), "float32", [2, 3], {"d": 2}, [(), ("d",)])
        west = layout((4, size), "float32", [1], {"d": 1})
        double = lowered(lambda x: (x * 2,), [front])
        triple = lowered(lambda x: (x * 3,), [back])
        negate = lowered(lambda x: (-x,), [west])
        within = Edge(0, "east", "east", 1, 2, front, back)
        there = Edge(1, "east", "west", 3, 0, back, west)
        home = Edge(2, "west", "east", 1, 4, west, front)
        east_part = Part(
            "program", "east", "cpu", (front, front, back, back, front, front), (0,), ((0, 5),),
            (
                Gang((Execute(0, double[0], (0, 1), (0,), (1,), frees=(0,)), Send(1, 0, frees=(1,))), arguments=(0,)),
                Gang((Execute(1, triple[0], (2, 3), (2,), (3,), frees=(2,)), Send(3, 1, frees=(3,))), waits=(0,)),
                Gang((Execute(2, double[0], (0, 1), (4,), (5,), frees=(4,)),), waits=(2,)),
            ),
            edges_in=(within, home), edges_out=(within, there), names=("double", "triple", "again"),
        )  # fmt: skip
        west_part = Part(
            "program", "west", "cpu", (west, west), (), (),
            (Gang((Execute(3, negate[0], (1,), (0,), (1,), frees=(0,)), Send(1, 2, frees=(1,))), waits=(1,)),),
            edges_in=(there,), edges_out=(home,), names=("double", "triple", "again", "negate"),
        )  # fmt: skip
        scheduler.plan(1, [east_part], double, triple)
        scheduler.plan(1, [west_part], negate)
        data = np.random.default_rng(3).standard_normal((4, size), np.float32)
        client = await Client.connect(scheduler.addresses["east", 0])
        scheduler.say("east", m.PutOnIsland(SESSION, 10, front))
        client.put(1, 10, front.region(0), data[:2])
        client.put(2, 10, front.region(1), data[2:])
        for run in (1, 2, 3):
            scheduler.start("east", run, 1, 100 + run, 10)
        for run in (1, 2, 3):  # bulk may come before the run does
            scheduler.start("west", run, 1, 200 + run)
        for run in (1, 2, 3):
            (low, high) = await client.fetch(100 + run, np.float32, 0, 1)
            np.testing.assert_array_equal(np.concatenate([low, high]).reshape(data.shape), data * -12)
        await scheduler.until(lambda: sum(len(x.parts) for x in scheduler.heard if isinstance(x, m.PartsFinished)) == 6)

        # An error travels along the edges, and back.
        scheduler.start("east", 4, 1, 104, 4242)
        scheduler.start("west", 4, 1, 204)
        failed = await scheduler.heard_of(m.PartFailed, 2)
        assert failed[0].error == failed[1].error
        assert "4242" in failed[0].error.message


@in_trio
async def test_an_island_of_two_hosts(tmp_path: Path) -> None:
    async with islands(tmp_path, east=(2, 2)) as scheduler:
        split = layout((4,), "float32", [0, 1, 2, 3], {"d": 4}, [("d",)])
        whole = layout((4,), "float32", [0, 1, 2, 3], {"d": 4})
        total = lowered(lambda x: (x + x.sum(),), [split])
        scheduler.plan(1, [one_step_part(total, [split], [split])], total)
        scheduler.start("east", 1, 1, 100, f32([1, 2, 3, 4]))
        for run in range(2, 6):
            scheduler.start("east", run, 1, 99 + run, 98 + run)
        await scheduler.finished(1, 2, 3, 4, 5)
        expected = np.array([1, 2, 3, 4], np.float32)
        for _ in range(5):
            expected = expected + expected.sum()
        for host in (0, 1):
            client = await Client.connect(scheduler.addresses["east", host])
            values = await client.fetch(104, np.float32, 2 * host, 2 * host + 1)
            np.testing.assert_allclose(np.concatenate(values), expected[2 * host : 2 * host + 2])

        # A put: each host gets what it holds, the leader orders the run when both have it.
        follower = await Client.connect(scheduler.addresses["east", 1])
        leader = await Client.connect(scheduler.addresses["east", 0])
        scheduler.say("east", m.PutOnIsland(SESSION, 500, split))
        scheduler.start("east", 6, 1, 501, 500)
        for device, sender in ((3, follower), (2, follower), (0, leader), (1, leader)):
            sender.put(device, 500, split.region(device), np.array([device], np.float32))
        (value,) = await follower.fetch(501, np.float32, 3)
        np.testing.assert_allclose(value, [9])

        # A step on the follower's devices alone, fed by an edge from the leader's, and back to all.
        here = layout((4,), "float32", [0], {"d": 1})
        there = layout((4,), "float32", [3], {"d": 1})
        increment = lowered(lambda x: (x + 1,), [here])
        one = Edge(0, "east", "east", 1, 2, here, there)
        two = Edge(1, "east", "east", 3, 4, there, whole)
        part = Part(
            "program", "east", "cpu", (here, here, there, there, whole), (0,), ((0, 4),),
            (
                Gang((Execute(0, increment[0], (0,), (0,), (1,), frees=(0,)), Send(1, 0, frees=(1,))), arguments=(0,)),
                Gang((Execute(1, increment[0], (3,), (2,), (3,), frees=(2,)), Send(3, 1, frees=(3,))), waits=(0,)),
            ),
            edges_in=(one, two), edges_out=(one, two),
        )  # fmt: skip
        scheduler.plan(2, [part], increment)
        scheduler.start("east", 7, 2, 600, f32([1, 2, 3, 4]))
        await scheduler.finished(7)
        for host, peer in ((0, leader), (1, follower)):
            for value in await peer.fetch(600, np.float32, 2 * host, 2 * host + 1):
                np.testing.assert_array_equal(value, [3, 4, 5, 6])


BOOM = """
#include <thread>
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
static ffi::Error Boom(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  return ffi::Error(ffi::ErrorCode::kInternal, "the device caught fire");
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(boom, Boom, ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
"""

PRELOAD = """
import ctypes, pathlib, jax
def register():
    library = ctypes.CDLL(str(pathlib.Path(__file__).with_name("boom.so")))
    jax.ffi.register_ffi_target("boom", jax.ffi.pycapsule(library.boom), platform="cpu")
"""


@in_trio
async def test_a_preloaded_target_that_fails_names_its_node_and_traces(tmp_path: Path) -> None:
    import jax

    (tmp_path / "boom.cc").write_text(BOOM)
    (tmp_path / "boom_targets.py").write_text(PRELOAD)
    command = ["g++", "-w", "-shared", "-fPIC", "-std=c++17", f"-I{jax.ffi.include_dir()}", "boom.cc", "-o", "boom.so"]
    try:
        await trio.run_process(command, cwd=tmp_path)
    except FileNotFoundError:
        pytest.skip("no C++ compiler")
    sys.path.append(str(tmp_path))
    try:
        async with islands(tmp_path / "cache", "--preload", "boom_targets", east=(1, 2)) as scheduler:
            split = layout((2,), "float32", [0, 1], {"d": 2}, [("d",)])
            increment = lowered(lambda x: (x + 1,), [split])
            mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
            spec = jax.sharding.PartitionSpec("d")

            def explode(x: Any) -> tuple[Any]:
                call = jax.ffi.ffi_call("boom", jax.ShapeDtypeStruct((1,), jnp.float32))
                return (jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x),)

            boom = lowered(explode, [split])
            part = Part(
                "program", "east", "cpu", (split,) * 4, (0,), ((0, 3),),
                (
                    Gang(
                        (
                            Execute(0, increment[0], (0, 1), (0,), (1,), frees=(0,)),
                            Execute(1, boom[0], (0, 1), (1,), (2,), frees=(1,)),
                            Execute(2, increment[0], (0, 1), (2,), (3,), frees=(2,)),
                        ),
                        arguments=(0,),
                    ),
                ),
                names=("before", "boom", "after"), sources=("a:1", "a:2", "a:3"), slices=(1, 2, 3),
            )  # fmt: skip
            scheduler.plan(1, [part], increment, boom)
            fine = one_step_part(increment, [split], [split])
            scheduler.plan(2, [fine], increment)
            client = await Client.connect(scheduler.addresses["east", 0])
            client.dealer.post(m.TraceRequest(1, True))
            client.dealer.flush()
            await client.receive(lambda: any(isinstance(x, m.TraceReply) for x in client.others))
            scheduler.start("east", 1, 1, 100, f32([1, 2]))
            scheduler.start("east", 2, 2, 101, 100)  # launched on what turns out to be an error
            scheduler.start("east", 3, 2, 102, f32([1, 2]))
            await scheduler.finished(3)
            failed = await scheduler.heard_of(m.PartFailed, 2)
            assert "the device caught fire" in failed[0].error.message
            assert (failed[0].error.kind, failed[0].error.node) == ("ExecutionError", "boom")
            assert (failed[0].error.source, failed[0].error.slice) == ("a:2", 2)
            assert failed[1].error == failed[0].error  # the root cause is kept
            assert (await client.fails(client.ask(101, 0))).error == failed[0].error
            client.dealer.post(m.TraceRequest(2, False))
            client.dealer.flush()
            reply = await client.receive(
                lambda: [x for x in client.others if isinstance(x, m.TraceReply) and x.request == 2]
            )
            assert [(row[1], row[3]) for row in reply[0].steps] == [(3, "increment")]
            assert all(row[5] <= row[6] for row in reply[0].steps)
    finally:
        sys.path.remove(str(tmp_path))


@in_trio
async def test_the_executor_ends_with_its_parent(tmp_path: Path) -> None:
    async with running_scheduler() as scheduler:
        reading, writing = os.pipe()
        os.write(writing, b"o")
        arguments = ["--scheduler", scheduler.router.address, "--island", "east", "--incarnation", "1"]
        arguments += ["--devices", "1", "--parent-fd", str(reading), "--cache-dir", "-"]
        command = [sys.executable, "-m", "pathway.executor.main", *arguments]
        process = subprocess.Popen(command, pass_fds=[reading])  # noqa: ASYNC220 (it does not wait)
        os.close(reading)
        await scheduler.until(lambda: scheduler.peers)
        os.close(writing)
        with trio.fail_after(5):
            await trio.to_thread.run_sync(process.wait)
