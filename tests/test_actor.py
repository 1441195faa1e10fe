"""The shell around a core: order, one flush a batch, deadlines, events from threads."""

from __future__ import annotations

import threading

import trio
import trio.testing

from pathway.actor import Actor
from pathway.transport.messages import Ping
from pathway.transport.sockets import Delivery, PeerGone


class Recorder:
    """A core that repeats every event as an instruction, and whose deadline is set by the events that are numbers."""

    def __init__(self) -> None:
        self.deadline: float | None = None
        self.seen: list[tuple[object, float]] = []

    def handle(self, event: object, now: float) -> list[object]:
        self.seen.append((event, now))
        if event == "tick":
            self.deadline = None
        elif isinstance(event, float):
            self.deadline = event
        return [event]

    def next_deadline(self) -> float | None:
        return self.deadline


def recording() -> tuple[Recorder, Actor[object, object], list[object]]:
    core, done = Recorder(), []
    actor = Actor(core, done.append, lambda: done.append("flush"), tick="tick", clock=trio.current_time)
    return core, actor, done


def run(test: object) -> None:
    trio.run(test, clock=trio.testing.MockClock(autojump_threshold=0))  # type: ignore[arg-type]


def test_a_batch_is_handled_in_order_and_flushed_once() -> None:
    async def main() -> None:
        _, actor, done = recording()
        actor.deliver(["a", "b", "c"])
        assert done == ["a", "b", "c", "flush"]

    run(main)


def test_the_deadline_rings_when_it_is_due_and_follows_when_it_moves_nearer() -> None:
    async def main() -> None:
        core, actor, _ = recording()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(actor.run)
            await trio.testing.wait_all_tasks_blocked()
            start = trio.current_time()
            actor.deliver([start + 10.0])
            actor.deliver([start + 3.0])
            await trio.sleep(20)
            assert [now - start for event, now in core.seen if event == "tick"] == [3.0]
            nursery.cancel_scope.cancel()

    run(main)


def test_events_of_another_thread_come_in_order_also_those_before_the_start() -> None:
    async def main() -> None:
        core, actor, _ = recording()
        actor.deliver_soon("early")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(actor.run)
            await trio.testing.wait_all_tasks_blocked()
            thread = threading.Thread(target=lambda: [actor.deliver_soon(number) for number in range(1000)])
            thread.start()
            await trio.to_thread.run_sync(thread.join)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        actor.deliver_soon("late")
        assert [event for event, _ in core.seen] == ["early", *range(1000)]

    trio.run(main)


def test_a_links_messages_and_its_end_become_events() -> None:
    batches = [[Delivery(b"a", [Ping(1), Ping(2)], (memoryview(b"x"),)), PeerGone(b"a", "closed")]]

    class Link:
        async def receive_batch(self) -> list[Delivery | PeerGone]:
            await trio.lowlevel.checkpoint()
            if not batches:
                raise trio.ClosedResourceError
            return batches.pop()

    async def main() -> None:
        _, actor, done = recording()
        await actor.run_link(
            Link(),
            lambda peer, message, blobs: (peer, message.number, [bytes(blob) for blob in blobs]),
            lambda gone: gone.reason,
        )
        assert done == [(b"a", 1, []), (b"a", 2, [b"x"]), "closed", "flush"]

    run(main)
