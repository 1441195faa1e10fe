"""The way to an executor that cannot be reached: through the scheduler. In the place of a `ThreadSafeDealer`."""

from __future__ import annotations

import math
from collections.abc import Callable

import trio

from pathway.errors import DisconnectedError
from pathway.transport import messages as m
from pathway.transport.link import SOLE_PEER, Batch, Blob, Delivery


class RelayedDealer:
    """What `Peer` asks of a link, by messages to the scheduler. `send_to_scheduler` is for any thread."""

    def __init__(
        self, island: str, incarnation: int, host: int, send_to_scheduler: Callable[[m.Message], None]
    ) -> None:
        self._where = (island, incarnation, host)
        self._send_to_scheduler = send_to_scheduler
        self._arrived, self._arrivals = trio.open_memory_channel[m.RelayFromHost](math.inf)
        self.closed = False

    def send(self, message: m.Message) -> None:
        self.send_with_blob(message, b"")

    def send_with_blob(self, message: m.Message, blob: Blob) -> None:
        if self.closed:
            raise DisconnectedError("it was closed")
        self._send_to_scheduler(m.RelayToHost(*self._where, m.encode((message,)), bytes(blob)))

    def arrived(self, message: m.RelayFromHost) -> None:
        """The scheduler brings something. Trio thread."""
        if not self.closed:
            self._arrived.send_nowait(message)

    async def receive_batch(self) -> Batch:
        """As of a link."""
        try:
            message = await self._arrivals.receive()
        except trio.EndOfChannel:
            raise trio.ClosedResourceError from None
        blobs = (memoryview(message.blob),) if message.blob else ()
        return [Delivery(SOLE_PEER, m.decode(message.frame), blobs)]

    def receive_here(self, take: Callable[[Batch], None], is_over: Callable[[], bool]) -> None:
        """Nothing comes to this thread: it has to wait in another way."""

    def look_here(self) -> None:
        """No thread is there to look."""

    def close(self, linger_s: float = 0.0) -> None:
        self.closed = True
        self._arrived.close()
