"""The dealer that threads share: nothing lost, order kept, nobody waits for anybody."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing

from pathway.errors import DisconnectedError
from pathway.transport.messages import Chunk, Goodbye, Hello, Ping, Pong, Welcome
from pathway.transport.sockets import Delivery, PeerGone, Router, hello
from pathway.transport.threads import ThreadSafeDealer
from pathway.version import PROTOCOL_VERSION, __version__


def run(test: Callable[[], Awaitable[None]], limit_s: float = 60) -> None:
    async def limited() -> None:
        with trio.fail_after(limit_s):
            await test()

    trio.run(limited)


async def serve(router: Router, handle: Callable[[bytes, Any], None]) -> None:
    """Welcome everybody, hand every other message to `handle`."""
    while True:
        for item in await router.receive_batch():
            if isinstance(item, Delivery):
                for message in item.messages:
                    if isinstance(message, Hello):
                        router.post(item.peer, Welcome(PROTOCOL_VERSION, __version__, 1))
                    else:
                        handle(item.peer, message)
        router.flush()


def test_threads_lose_nothing_and_each_keeps_its_order() -> None:
    threads, count = 4, 3000
    received: list[list[int]] = [[] for _ in range(threads)]

    async def main() -> None:
        with Router.bind("tcp://127.0.0.1:0") as router:
            done = trio.Event()

            def handle(peer: bytes, message: Any) -> None:
                if isinstance(message, Goodbye):
                    done.set()
                else:
                    received[message.number // count].append(message.number % count)
                    router.post(peer, Pong(message.number))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, router, handle)
                dealer, _ = await ThreadSafeDealer.open(router.address, hello("client"))
                pongs = 0

                async def receive() -> None:
                    nonlocal pongs
                    while pongs < threads * count:
                        for item in await dealer.receive_batch():
                            assert isinstance(item, Delivery)
                            pongs += len(item.messages)

                def send(thread: int) -> None:
                    for number in range(count):
                        if number % 5:
                            dealer.send(Ping(thread * count + number))
                        else:
                            dealer.send_all([Ping(thread * count + number)])

                async with trio.open_nursery() as sending:
                    sending.start_soon(receive)
                    for thread in range(threads):
                        sending.start_soon(trio.to_thread.run_sync, send, thread)
                dealer.send(Goodbye())
                await done.wait()
                dealer.close()
                nursery.cancel_scope.cancel()

    run(main)
    assert received == [list(range(count))] * threads


def test_every_answer_comes_though_sends_consume_its_edge() -> None:
    """T-1 and T-8: a thread that sends and waits for the answer, many times, is never left without it."""

    async def main() -> None:
        with Router.bind("tcp://127.0.0.1:0") as router:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, router, lambda peer, message: router.post(peer, Pong(message.number)))
                dealer, _ = await ThreadSafeDealer.open(router.address, hello("client"))
                answered = threading.Semaphore(0)

                async def receive() -> None:
                    while True:
                        for item in await dealer.receive_batch():
                            if isinstance(item, Delivery):
                                answered.release(len(item.messages))

                def ask() -> None:
                    for number in range(3000):
                        for _ in range(number % 4 + 1):
                            dealer.send(Ping(number))
                        for _ in range(number % 4 + 1):
                            assert answered.acquire(timeout=10), f"no answer to {number}"

                nursery.start_soon(receive)
                await trio.to_thread.run_sync(ask)
                nursery.cancel_scope.cancel()
            dealer.close()

    run(main)


def test_blobs_keep_their_place_among_messages() -> None:
    received: list[Any] = []

    async def main() -> None:
        with Router.bind("tcp://127.0.0.1:0") as router:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, router, lambda _, message: received.append(message))
                dealer, _ = await ThreadSafeDealer.open(router.address, hello("client"))

                def send() -> None:
                    dealer.send(Ping(1))
                    dealer.send_with_blob(Chunk(2, 0), bytes(100_000))
                    dealer.send(Ping(3))

                await trio.to_thread.run_sync(send)
                while len(received) < 3:
                    await trio.lowlevel.checkpoint()
                dealer.close()
                nursery.cancel_scope.cancel()

    run(main)
    assert received == [Ping(1), Chunk(2, 0), Ping(3)]


def test_sending_after_the_end_raises() -> None:
    async def main() -> None:
        router = Router.bind("tcp://127.0.0.1:0")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, router, lambda _, message: None)
            dealer, _ = await ThreadSafeDealer.open(router.address, hello("client"))
            nursery.cancel_scope.cancel()
        router.close()
        (gone,) = await dealer.receive_batch()
        assert isinstance(gone, PeerGone)
        with pytest.raises(DisconnectedError, match="over"):
            await trio.to_thread.run_sync(dealer.send, Ping(1))
        dealer.close()

    run(main)


def test_a_waiting_thread_receives_for_itself_and_the_task_gets_the_rest() -> None:
    """Answers of 200 rounds, taken by the thread that waits or by the task: each once, in order, none forgotten."""
    rounds = 200

    async def main() -> None:
        with Router.bind("tcp://127.0.0.1:0") as router:
            pongs: list[int] = []
            taken_here = 0

            def handle(peer: bytes, message: Any) -> None:
                router.post(peer, Pong(message.number))
                if message.number % 3 == 0:
                    router.post(peer, Pong(-message.number))  # nobody waits for this one

            def take(batch: Any) -> None:
                pongs.extend(message.number for item in batch for message in item.messages)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, router, handle)
                dealer, _ = await ThreadSafeDealer.open(router.address, hello("client"))
                all_here = trio.Event()
                token = trio.lowlevel.current_trio_token()

                async def receive() -> None:
                    while True:
                        take(await dealer.receive_batch())
                        dealer.look_here()
                        if pongs[-1] == rounds:
                            all_here.set()

                def ask() -> None:
                    nonlocal taken_here
                    for number in range(1, rounds + 1):
                        dealer.send(Ping(number))
                        before = len(pongs)
                        while number not in pongs:
                            dealer.receive_here(take, lambda number=number: number in pongs, timeout_s=0.01)
                        taken_here += len(pongs) > before
                    token.run_sync_soon(all_here.set)

                nursery.start_soon(receive)
                await trio.to_thread.run_sync(ask)
                await all_here.wait()
                dealer.send(Ping(rounds + 1))
                while rounds + 1 not in pongs:  # the task receives as before
                    await trio.testing.wait_all_tasks_blocked(0.001)
                positive = [number for number in pongs if number > 0]
                assert positive == list(range(1, rounds + 2))
                assert taken_here > 0
                nursery.cancel_scope.cancel()
            dealer.close()

    run(main)


def test_nothing_stays_behind_when_one_thread_receives_and_another_sends() -> None:
    """T-6: who finds the lock taken leaves its frames to whoever receives in that moment."""

    async def main() -> None:
        messages = 3000
        arrived: list[int] = []
        all_there = trio.Event()

        def take(peer: Any, message: Any) -> None:
            if isinstance(message, Ping):
                router.post(peer, Pong(message.number))
                arrived.append(message.number)
                if len(arrived) == messages:
                    all_there.set()

        with Router.bind("tcp://127.0.0.1:0") as router:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, router, take)
                dealer, _ = await ThreadSafeDealer.open(router.address, hello("client"))
                over = threading.Event()

                async def receive() -> None:
                    while True:
                        await dealer.receive_batch()

                def receive_here() -> None:
                    while not over.is_set():
                        dealer.receive_here(lambda batch: None, over.is_set, timeout_s=0.0002)

                def send() -> None:
                    for number in range(messages):
                        dealer.send(Ping(number))

                nursery.start_soon(receive)
                nursery.start_soon(trio.to_thread.run_sync, receive_here)
                await trio.to_thread.run_sync(send)
                # From here on nobody sends any more: whatever stayed behind would stay for ever.
                await all_there.wait()
                over.set()
                dealer.look_here()
                assert arrived == list(range(messages))
                nursery.cancel_scope.cancel()
            dealer.close()

    run(main)


def test_the_end_of_a_link_ends_a_thread_that_receives() -> None:
    async def main() -> None:
        router = Router.bind("tcp://127.0.0.1:0")
        async with trio.open_nursery() as nursery:

            async def serve_until_closed() -> None:
                with contextlib.suppress(trio.ClosedResourceError):
                    await serve(router, lambda peer, message: None)

            nursery.start_soon(serve_until_closed)
            dealer, _ = await ThreadSafeDealer.open(router.address, hello("client"))
            ends: list[Any] = []

            async def receive() -> None:
                ends.extend(await dealer.receive_batch())

            def wait() -> None:
                dealer.receive_here(lambda batch: None, lambda: bool(ends))

            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            async with trio.open_nursery() as waiting:
                waiting.start_soon(trio.to_thread.run_sync, wait)
                await trio.testing.wait_all_tasks_blocked(0.01)
                router.close(linger_s=0)
            while not ends:
                await trio.testing.wait_all_tasks_blocked(0.001)
            assert isinstance(ends[0], PeerGone)
            nursery.cancel_scope.cancel()

    run(main)
