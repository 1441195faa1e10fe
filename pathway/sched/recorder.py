"""Writes what the scheduler's core wants remembered, beside the trio thread, and lets go what had to wait for it.

Invariants
  J-5  A message that depends on a record leaves when the record is on the disk; what is sent to the same peer after it
       leaves after it.
  J-6  Records are written in their order. Those that came while the disk was busy are one batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import trio

from pathway.errors import PathwayError
from pathway.sched.events import PeerKey, Record, Send
from pathway.sched.journal import Journal
from pathway.transport.messages import Message

Post = Callable[[PeerKey, Message], object]


class Recorder:
    """`post` and `flush` are the router's. Without a journal nothing waits, and nothing is remembered."""

    def __init__(self, journal: Journal | None, post: Post, flush: Callable[[], object]) -> None:
        self._journal = journal
        self._post = post
        self._flush = flush
        self._pending: list[Record] = []
        self._held: dict[PeerKey, list[Send | Record]] = {}  # a Record: from here on, it must be written first
        self._wake = trio.Event()

    def record(self, record: Record) -> None:
        if self._journal is None:
            for send in record.then:
                self._post(send.peer, send.message)
            return
        self._pending.append(record)
        self._wake.set()
        for send in record.then:
            self._held.setdefault(send.peer, []).extend((record, send))

    def post(self, peer: PeerKey, message: Message) -> None:
        """Send, behind what waits for the disk (J-5)."""
        if self._held and peer in self._held:
            self._held[peer].append(Send(peer, message))
        else:
            self._post(peer, message)

    def forget(self, peer: PeerKey) -> None:
        """The peer is gone: nothing more for it."""
        self._held.pop(peer, None)

    async def run(self) -> None:
        """Until cancelled. Raises `PathwayError` where the journal cannot be written: a scheduler that forgets must not
        go on."""
        while self._journal is not None:
            await self._wake.wait()
            self._wake = trio.Event()
            await self._write(self._journal)

    async def _write(self, journal: Journal) -> None:
        batch, self._pending = self._pending, []
        try:
            await trio.to_thread.run_sync(partial(journal.write, batch), abandon_on_cancel=False)
        except OSError as error:
            raise PathwayError(str(error)) from None
        written = set(map(id, batch))
        for peer in dict.fromkeys(send.peer for record in batch for send in record.then):
            self._release(peer, written)
        self._flush()

    def _release(self, peer: PeerKey, written: set[int]) -> None:
        held = self._held.pop(peer, [])
        for position, entry in enumerate(held):
            if isinstance(entry, Send):
                self._post(peer, entry.message)
            elif id(entry) not in written:
                self._held[peer] = held[position:]
                return
