"""Edges through `jax.experimental.transfer`: from device to device, without this process's memory between.

The sender offers a piece to its transfer server under a random number, and says so on the link (`EdgeOffer`); the
receiver pulls it at once, to the device that is to have it, and says that it did (`OfferTaken`).

Invariants
  J-1  What is offered is a copy of its own on the device. The server holds no claim on an array: one that is donated
       meanwhile would be gone when it is pulled.
  J-2  Every offer is pulled, for that is the only way in which a server forgets it: by the receiver, whether anybody
       wants it any more or not, or by the sender itself where the link has broken before it heard that.
  J-3  A pull that fails becomes the edge's error, unless the sender's island turns out to be lost: the scheduler knows
       that, and says it within `LOST_GRACE_S`.
  J-4  Pulls from one server are waited for in a thread of its own: a server that is gone may not answer at all.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from pathway.dataflow.layout import numpy_dtype
from pathway.errors import ErrorInfo, ProtocolError, TransferError
from pathway.executor.arrivals import EdgeArrivals
from pathway.executor.backend import Backend
from pathway.executor.bind import BoundSend, OutgoingPiece
from pathway.executor.completion import Lanes, Outbox
from pathway.executor.links import PeerLinks
from pathway.executor.runs import Run
from pathway.transport import messages as m

LOST_GRACE_S = 2.0

Later = Callable[[float, Callable[[], None]], None]
"""Calls a function in the trio thread, after so many seconds."""


class JaxTransfer:
    """This process's transfer server, as an `EdgeTransfer`, and what it pulls from others."""

    def __init__(
        self, backend: Backend, interface: str, links: PeerLinks, arrivals: EdgeArrivals, outbox: Outbox, later: Later
    ) -> None:
        self._backend = backend
        self._links = links
        self._arrivals = arrivals
        self._later = later
        self._outbox = outbox
        anywhere = f"{interface}:0"
        client = backend.devices[backend.local[0]].client
        self._server = transfer.start_transfer_server(client, anywhere, [anywhere])
        self._offered: dict[str, dict[int, Any]] = {}  # by the receiver's address, by number: what to pull it as
        self._connections: dict[str, Any] = {}
        self._lanes = Lanes(outbox)
        self._lane_of: dict[str, int] = {}
        links.when_link_ends(self._link_ended, self._taken)

    # -- out ----------------------------------------------------------------------------------------------------------

    def is_quick(self, send: BoundSend) -> bool:
        return False

    def pack(self, send: BoundSend, pieces: list[OutgoingPiece], value: Any) -> list[Any]:
        shards: dict[int, Any] = {}
        for piece in pieces:
            if piece.source not in shards:
                shards[piece.source] = self._backend.shard(value, send.source, piece.source)
        packed = [self._backend.part_of_shard(shards[piece.source], piece.within) for piece in pieces]  # J-1
        jax.block_until_ready(packed)
        return packed

    def send(self, run: Run, send: BoundSend, piece: OutgoingPiece, packed: Any) -> None:
        uuid = secrets.randbits(62) + 1
        address = self._links.address(send.target_island, piece.target_host)
        if address is None:  # lost, and the scheduler has said so
            return
        self._server.await_pull(uuid, [packed])
        self._offered.setdefault(address, {})[uuid] = jax.ShapeDtypeStruct(
            packed.shape, packed.dtype, sharding=packed.sharding
        )
        offer = m.EdgeOffer(
            uuid,
            run.session,
            run.run,
            send.edge,
            piece.device,
            piece.region,
            send.source.aval.dtype,
            self._server.address(),
        )
        self._links.post(send.target_island, piece.target_host, offer)

    def _taken(self, address: str, uuid: int) -> None:
        """The receiver has pulled it."""
        self._offered.get(address, {}).pop(uuid, None)

    def _link_ended(self, address: str) -> None:
        """The receiver is gone: what it has not pulled is pulled from here, and dropped (J-2)."""
        for uuid, wanted in self._offered.pop(address, {}).items():
            self._pull(self._server.address(), uuid, wanted, lambda pulled: None, lambda error: None)

    # -- in -----------------------------------------------------------------------------------------------------------

    def received(self, offer: m.EdgeOffer, sender: str, post: Callable[[m.Message], None]) -> None:
        """Another executor offers a piece."""
        if offer.device not in self._backend.local:
            raise ProtocolError(f"a piece for device {offer.device}, which is not of this host")
        try:
            dtype = numpy_dtype(offer.dtype)
        except (TypeError, AttributeError, ValueError):
            raise ProtocolError(f"there is no dtype {offer.dtype!r}") from None
        sharding = SingleDeviceSharding(self._backend.devices[offer.device])
        shape = tuple(stop - start for start, stop in offer.region)
        name = (offer.device, offer.region)

        def came(piece: Any) -> None:
            post(m.OfferTaken(offer.uuid))
            self._arrivals.array_came(offer.session, offer.run, offer.edge, name, piece)

        def failed(error: Exception) -> None:
            message = f"a piece of edge {offer.edge} of run {offer.run} did not come from {sender} by JAX: {error}"
            info = ErrorInfo(TransferError.__name__, message)
            self._later(
                LOST_GRACE_S, lambda: self._arrivals.failed(offer.session, offer.run, offer.edge, info)
            )  # J-3  # fmt: skip

        self._pull(offer.address, offer.uuid, jax.ShapeDtypeStruct(shape, dtype, sharding=sharding), came, failed)

    def _pull(
        self,
        address: str,
        uuid: int,
        wanted: Any,
        came: Callable[[Any], None],
        failed: Callable[[Exception], None],
    ) -> None:
        def pull() -> Callable[[], None]:
            try:
                connection = self._connections.get(address)
                if connection is None:
                    connection = self._connections[address] = self._server.connect(address)
                [piece] = jax.block_until_ready(connection.pull(uuid, [wanted]))
            except Exception as caught:
                self._connections.pop(address, None)
                error = caught
                return lambda: failed(error)
            return lambda: came(piece)

        self._lanes.submit(self._lane_of.setdefault(address, len(self._lane_of)), pull)
