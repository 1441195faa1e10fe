"""Real sockets: order, loss, dying peers, garbage, versions."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import textwrap
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
import zmq

from pathway.dataflow.layout import Aval, Layout, Sharding
from pathway.errors import ConfigError, ConnectError, PathwayError
from pathway.transport.link import COALESCE_BYTES, frames_of
from pathway.transport.messages import (
    Chunk,
    Goodbye,
    Hello,
    Ping,
    Pong,
    PutBuffer,
    Refused,
    RegisterComputation,
    Welcome,
    decode,
)
from pathway.transport.readiness import Readiness
from pathway.transport.sockets import Dealer, Delivery, PeerGone, Router, hello
from pathway.version import PROTOCOL_VERSION, __version__

LOOPBACK = "tcp://127.0.0.1:0"


def run(test: Callable[[], Awaitable[None]], limit_s: float = 30) -> None:
    async def limited() -> None:
        with trio.fail_after(limit_s):
            await test()

    trio.run(limited)


async def next_message(link: Router | Dealer) -> tuple[bytes, Any]:
    """The only message that has come."""
    (item,) = await link.receive_batch()
    if isinstance(item, PeerGone):
        return item.peer, item
    (message,) = item.messages
    return item.peer, message


async def introduced(router: Router, **kwargs: Any) -> tuple[Dealer, bytes]:
    dealer = await Dealer.connect(router.address, hello("peer"), **kwargs)
    peer, message = await next_message(router)
    assert isinstance(message, Hello)
    return dealer, peer


def test_hello_welcome_and_what_follows() -> None:
    async def main() -> None:
        with Router.bind(LOOPBACK) as router:

            async def answer() -> None:
                peer, message = await next_message(router)
                assert message == hello("client", name="alice")
                router.post(peer, Welcome(PROTOCOL_VERSION, __version__, 7, session=9))
                router.post(peer, Ping(1))
                router.flush()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(answer)
                dealer, welcome = await Dealer.open(router.address, hello("client", name="alice"))
            assert (welcome.scheduler, welcome.session) == (7, 9)
            assert await next_message(dealer) == (b"", Ping(1))
            dealer.close()

    run(main)


def test_what_is_posted_leaves_as_one_frame_and_only_at_flush() -> None:
    async def main() -> None:
        with Router.bind(LOOPBACK) as router:
            dealer, peer = await introduced(router)
            for number in range(5):
                dealer.post(Ping(number))
            with trio.move_on_after(0.05):
                await router.receive_batch()
                pytest.fail("posted messages left before the flush")
            dealer.flush()
            assert await router.receive_batch() == [Delivery(peer, [Ping(number) for number in range(5)], ())]
            dealer.close()

    run(main)


def test_frames_of_splits_what_is_too_large_for_one() -> None:
    third = bytes(COALESCE_BYTES // 3)
    messages = [RegisterComputation(str(number), b"", third) for number in range(5)]
    frames = frames_of(messages)
    assert len(frames) > 1
    assert [message.key for frame in frames for message in decode(frame)] == ["0", "1", "2", "3", "4"]


def test_a_slow_receiver_loses_nothing_and_keeps_the_order() -> None:
    count = 50_000

    async def main() -> None:
        with Router.bind(LOOPBACK) as router:
            dealer, _ = await introduced(router)
            for number in range(count):
                dealer.post(Ping(number))
                if number % 3 == 0:
                    dealer.flush()
            dealer.flush()
            numbers: list[int] = []
            while len(numbers) < count:
                for item in await router.receive_batch():
                    assert isinstance(item, Delivery)
                    numbers += [message.number for message in item.messages]
                await trio.lowlevel.checkpoint()
            assert numbers == list(range(count))
            dealer.close()

    run(main)


def test_a_router_holds_back_what_a_full_peer_cannot_take() -> None:
    """T-3, with a high-water mark as bulk sockets may have."""
    count = 300
    piece = bytes(100_000)

    async def main() -> None:
        with Router.bind(LOOPBACK, socket_options={zmq.SNDHWM: 4}) as router:
            dealer, peer = await introduced(router, socket_options={zmq.RCVHWM: 4})
            for number in range(count):
                router.send_with_blob(peer, Chunk(number, 0), piece)
            router.post(peer, Goodbye("done"))
            router.flush()
            assert router._held_back, "the test needs a full pipe"

            async def keep_receiving() -> None:
                while True:
                    await router.receive_batch()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(keep_receiving)
                received: list[Any] = []
                while len(received) <= count:
                    for item in await dealer.receive_batch():
                        assert isinstance(item, Delivery)
                        received += item.messages
                await router.flushed()
                nursery.cancel_scope.cancel()
            assert received == [Chunk(number, 0) for number in range(count)] + [Goodbye("done")]
            dealer.close()

    run(main)


@pytest.mark.parametrize("size", [0, 10, 64 * 1024, 1024 * 1024])
def test_a_blob_belongs_to_the_last_message(size: int) -> None:
    data = os.urandom(size)

    async def main() -> None:
        with Router.bind(LOOPBACK) as router:
            dealer, peer = await introduced(router)
            dealer.post(Ping(1))
            dealer.send_with_blob(Chunk(5, 0), memoryview(data))
            dealer.post(Ping(2))
            dealer.flush()
            items: list[Any] = []
            while len(items) < 2:
                items += await router.receive_batch()
            first, second = items
            assert first.messages == [Ping(1), Chunk(5, 0)]
            assert [bytes(blob) for blob in first.blobs] == [data]
            assert second == Delivery(peer, [Ping(2)], ())
            router.send_with_blob(peer, Chunk(6, 0), data)
            (answer,) = await dealer.receive_batch()
            assert isinstance(answer, Delivery)
            assert bytes(answer.blobs[0]) == data
            dealer.close()

    run(main)


def test_a_send_wakes_a_parked_receiver_whose_edge_it_consumed() -> None:
    """T-1. Two tasks on one socket: one is parked, the other sends all the time."""

    async def main() -> None:
        with Router.bind(LOOPBACK) as router:
            dealer, peer = await introduced(router)
            pongs = 0

            async def count_pongs() -> None:
                nonlocal pongs
                while pongs < 2000:
                    for item in await dealer.receive_batch():
                        assert isinstance(item, Delivery)
                        pongs += len(item.messages)

            async def answer() -> None:
                while True:
                    for item in await router.receive_batch():
                        assert isinstance(item, Delivery)
                        for message in item.messages:
                            router.post(peer, Pong(message.number))
                        router.flush()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(answer)
                async with trio.open_nursery() as counting:
                    counting.start_soon(count_pongs)
                    for number in range(2000):
                        dealer.post(Ping(number))
                        dealer.flush()
                        if number % 7 == 0:
                            await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            dealer.close()

    run(main)


def test_a_peer_that_closes_is_reported_after_all_it_sent() -> None:
    async def main() -> None:
        with Router.bind(LOOPBACK) as router:
            for _ in range(20):
                dealer, peer = await introduced(router)
                for number in range(500):
                    dealer.post(Ping(number))
                    dealer.flush()
                dealer.close()
                received: list[int] = []
                gone: list[PeerGone] = []
                while not gone:
                    for item in await router.receive_batch():
                        if isinstance(item, PeerGone):
                            gone.append(item)
                        else:
                            received += [message.number for message in item.messages]
                assert received == list(range(500))
                assert [item.peer for item in gone] == [peer]

    run(main)


def test_sending_to_a_peer_that_has_gone_reports_it_once_and_raises_nothing() -> None:
    async def main() -> None:
        with Router.bind(LOOPBACK) as router:
            dealer, peer = await introduced(router)
            dealer.close()
            gone = []
            with trio.move_on_after(1):
                while True:
                    router.post(peer, Ping(1))
                    router.flush()
                    if gone:
                        await trio.testing.wait_all_tasks_blocked(0.05)
                        router.post(peer, Ping(2))
                        router.flush()
                        break
                    gone += await router.receive_batch()
            assert [item.peer for item in gone] == [peer]
            router.post(b"nobody", Ping(1))
            router.flush()
            with trio.move_on_after(0.1):
                pytest.fail(f"reported again: {await router.receive_batch()}")

    run(main)


def test_a_killed_process_is_noticed() -> None:
    script = textwrap.dedent("""
        import sys, trio
        from pathway.transport.sockets import Dealer, hello
        from pathway.transport.messages import Ping
        async def main():
            dealer = await Dealer.connect(sys.argv[1], hello("peer"))
            for number in range(1000):
                dealer.post(Ping(number))
            dealer.flush()
            await trio.sleep_forever()
        trio.run(main)
    """)

    async def main() -> None:
        with Router.bind(LOOPBACK) as router:
            dealer, _ = await introduced(router)
            process = await trio.lowlevel.open_process([sys.executable, "-c", script, router.address])
            received = 0
            while received < 1001:
                for item in await router.receive_batch():
                    assert isinstance(item, Delivery)
                    received += len(item.messages)
            process.send_signal(signal.SIGKILL)
            started = trio.current_time()
            _, gone = await next_message(router)
            assert isinstance(gone, PeerGone)
            assert trio.current_time() - started < 1
            await process.wait()
            dealer.post(Ping(5))
            dealer.flush()
            assert (await next_message(router))[1] == Ping(5)
            dealer.close()

    run(main)


def test_a_router_that_ends_ends_its_dealers() -> None:
    async def main() -> None:
        router = Router.bind(LOOPBACK)
        dealer, peer = await introduced(router)
        router.post(peer, Goodbye("stopping"))
        router.flush()
        router.close()
        items: list[Any] = []
        while len(items) < 2:
            items += await dealer.receive_batch()
        assert items[0].messages == [Goodbye("stopping")]
        assert isinstance(items[1], PeerGone)
        dealer.post(Ping(1))
        dealer.flush()  # goes nowhere, raises nothing
        with pytest.raises(trio.ClosedResourceError):
            await dealer.receive_batch()

    run(main)


def test_what_came_before_the_end_is_read_after_it() -> None:
    """T-4, at a dealer that was busy elsewhere while its router said much and closed."""

    async def main() -> None:
        router = Router.bind(LOOPBACK)
        dealer, peer = await introduced(router)
        for number in range(1000):
            router.post(peer, Ping(number))
            router.flush()
        router.close()
        other = Router.bind(LOOPBACK)
        others = [(await introduced(other))[0] for _ in range(20)]  # so the end of the connection has surely come
        received: list[int] = []
        while True:
            for item in await dealer.receive_batch():
                if isinstance(item, PeerGone):
                    assert received == list(range(1000))
                    for link in (*others, other):
                        link.close()
                    return
                received += [message.number for message in item.messages]

    run(main)


def test_closing_ends_a_waiting_receiver() -> None:
    async def main() -> None:
        router = Router.bind(LOOPBACK)

        async def receive() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await router.receive_batch()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            router.close()
            router.close()

    run(main)


def test_a_receiver_that_is_closed_as_it_wakes_up() -> None:
    """Something has come for the one that waits, and before it goes on another task, woken with it, closes the link."""

    async def main() -> None:
        closed_first = 0
        for _ in range(40):  # trio shuffles the tasks that wake up together
            reading, writing = os.pipe()
            readiness, other = Readiness(reading), Readiness(reading)
            woken = []

            async def wait(readiness: Readiness = readiness, woken: list[str] = woken) -> None:
                with contextlib.suppress(trio.ClosedResourceError):
                    await readiness.wait()
                    woken.append("woken")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
                os.write(writing, b"x")
                await other.wait()
                readiness.close()
                closed_first += not woken
            other.close()
            os.close(reading)
            os.close(writing)
        assert closed_first

    run(main)


def test_raw_garbage_harms_nobody() -> None:
    async def main() -> None:
        with Router.bind(LOOPBACK) as router:
            dealer, _ = await introduced(router)
            port = int(router.address.rsplit(":", 1)[1])
            for garbage in (
                b"GET / HTTP/1.1\r\n\r\n",
                os.urandom(4096),
                b"\xff" * 64,
                b"\xff\0\0\0\0\0\0\0\1\x7f" + bytes(54),
            ):
                with socket.create_connection(("127.0.0.1", port)) as raw:
                    raw.sendall(garbage)
            dealer.post(Ping(1))
            dealer.flush()
            assert (await next_message(router))[1] == Ping(1)
            dealer.close()

    run(main)


RUBBISH = [
    b"",
    b"\xc1",
    b"\x90",
    msgspec.msgpack.encode([]),
    msgspec.msgpack.encode([[4, 1]]),  # a Ping, but no Hello came before
    msgspec.msgpack.encode({"a": 1}),
    msgspec.msgpack.encode([[999, 1]]),
    msgspec.msgpack.encode([[1, "protocol", 5]]),
    b"\x91" * 5000,
    b"\xdd\xff\xff\xff\xff",
    bytes(range(256)),
]


@pytest.mark.parametrize("rubbish", RUBBISH, ids=range(len(RUBBISH)))
def test_rubbish_frames_are_refused_and_logged_once(rubbish: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        with Router.bind(LOOPBACK) as router, zmq.Context() as context, context.socket(zmq.DEALER) as raw:
            dealer, _ = await introduced(router)
            raw.linger = 0
            raw.connect(router.address)
            for _ in range(3):
                raw.send(rubbish)
            answer: list[Any] = []

            async def receive_answer() -> None:
                answer.extend(decode(await trio.to_thread.run_sync(raw.recv)))
                dealer.post(Ping(1))
                dealer.flush()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(receive_answer)
                assert (await next_message(router))[1] == Ping(1)
            assert [type(message) for message in answer] == [Refused]
            assert answer[0].kind == "ProtocolError"
            dealer.close()

    run(main)
    assert len([record for record in caplog.records if "refused" in record.message]) == 1


def test_rubbish_after_hello_ends_that_peer_alone() -> None:
    async def main() -> None:
        with Router.bind(LOOPBACK) as router:
            dealer, peer = await introduced(router)
            other, other_peer = await introduced(router)
            dealer._socket.send(b"rubbish")
            received = await next_message(router)
            assert received[0] == peer
            assert isinstance(received[1], PeerGone)
            other.post(Ping(3))
            other.flush()
            assert await next_message(router) == (other_peer, Ping(3))
            assert isinstance((await next_message(dealer))[1], Refused)
            dealer.close()
            other.close()

    run(main)


@pytest.mark.parametrize("extra_fields", [False, True])
def test_another_version_is_refused_and_both_are_named(extra_fields: bool) -> None:
    theirs = [1, PROTOCOL_VERSION + 1, "9.9.9", "client", "", 0, 0, *(["new"] if extra_fields else [])]

    async def main() -> None:
        with Router.bind(LOOPBACK) as router, zmq.Context() as context, context.socket(zmq.DEALER) as raw:
            raw.linger = 0
            raw.connect(router.address)
            raw.send(msgspec.msgpack.encode([theirs]))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(router.receive_batch)
                (refused,) = decode(await trio.to_thread.run_sync(raw.recv))
                nursery.cancel_scope.cancel()
            assert refused.kind == "ConnectError"
            for part in (__version__, "9.9.9", f"protocol {PROTOCOL_VERSION}", f"protocol {PROTOCOL_VERSION + 1}"):
                assert part in refused.reason

    run(main)


def test_open_raises_what_the_refusal_names() -> None:
    async def main() -> None:
        with Router.bind(LOOPBACK) as router:

            async def refuse() -> None:
                peer, _ = await next_message(router)
                router.disconnect(peer, "PermissionDeniedError", "not you")
                assert isinstance((await next_message(router))[1], PeerGone)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(refuse)
                with pytest.raises(PathwayError, match="not you") as caught:
                    await Dealer.open(router.address, hello("client"))
            assert type(caught.value).__name__ == "PermissionDeniedError"

    run(main)


def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]

    async def main() -> None:
        started = trio.current_time()
        with pytest.raises(ConnectError, match=f"127.0.0.1:{port}: nobody listens"):
            await Dealer.open(f"tcp://127.0.0.1:{port}", hello("client"), timeout_s=10)
        assert trio.current_time() - started < 1

    run(main)


def test_a_listener_that_does_not_answer() -> None:
    async def main() -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            with pytest.raises(ConnectError, match=r"no answer within 0\.2 s"):
                await Dealer.open(f"tcp://127.0.0.1:{listener.getsockname()[1]}", hello("client"), timeout_s=0.2)
        with Router.bind(LOOPBACK) as router, pytest.raises(ConnectError, match="no scheduler answered"):
            await Dealer.open(router.address, hello("client"), timeout_s=0.2)

    run(main)


@pytest.mark.parametrize("address", ["", "nonsense", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:notaport"])
def test_addresses_that_are_none(address: str) -> None:
    async def main() -> None:
        with pytest.raises(ConnectError):
            await Dealer.open(address, hello("client"), timeout_s=1)

    run(main)


def test_a_port_in_use_is_named() -> None:
    with Router.bind(LOOPBACK) as router:
        port = router.address.rsplit(":", 1)[1]
        with pytest.raises(ConfigError, match=f"{port}.*in use"):
            Router.bind(router.address)


def test_put_buffer_round_trips_with_raw_parts() -> None:
    message = PutBuffer(
        3, "east", 1, Layout(Aval((4,), "float32"), Sharding((("data", 2),), (("data",),)), (0, 1)), b"abcd"
    )
    assert decode(frames_of([message])[0]) == [message]
