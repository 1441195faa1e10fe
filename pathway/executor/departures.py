"""Data on its way from this host: values along edges, to whatever host wants pieces of them, and shards to clients.

Between islands the sender pushes each piece as soon as the value is computed (design, section 7); the receiver needs
no negotiation, since both sides work out the same pieces. Between devices of this very host nothing touches a socket.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from pathway.dataflow.layout import Region
from pathway.errors import DeletedError, ErrorInfo
from pathway.executor import backend as xla
from pathway.executor.arrivals import EdgeArrivals
from pathway.executor.bind import BoundSend, Host, OutgoingPiece
from pathway.executor.completion import Lanes
from pathway.executor.links import PeerLinks
from pathway.executor.runs import Run
from pathway.executor.spill import Spilled
from pathway.executor.store import ABSENT, Cell, Poison, Store
from pathway.executor.transfers import EdgeTransfer
from pathway.transport import messages as m
from pathway.transport.bulk import BulkSender, HostBytes, as_bytes
from pathway.transport.shm import Loan


class BulkTransfer:
    """Pieces by the links of this package. An `EdgeTransfer`."""

    def __init__(self, backend: xla.Backend, links: PeerLinks) -> None:
        self._backend = backend
        self._links = links
        self._transfers = itertools.count(1)

    def is_quick(self, send: BoundSend) -> bool:
        """What is copied for it is small."""
        return self._backend.has_host_memory and sum(piece.nbytes for piece in send.pieces) <= m.CHUNK_BYTES

    def pack(self, send: BoundSend, pieces: list[OutgoingPiece], value: Any) -> list[Any]:
        packed_pieces: list[HostBytes | Loan] = []
        try:
            views = {piece.source: self._backend.view(value, send.source, piece.source) for piece in pieces}
            for piece in pieces:
                part = views[piece.source][piece.within]
                loan = self._links.lend(send.target_island, piece.target_host, part.nbytes)
                packed_pieces.append(packed(part, loan))
        except BaseException:
            withdraw(packed_pieces)
            raise
        return packed_pieces

    def send(self, run: Run, send: BoundSend, piece: OutgoingPiece, packed: Any) -> None:
        transfer = next(self._transfers)
        header = m.EdgeShard(
            transfer, run.session, run.run, send.edge, piece.device, piece.region, packed.nbytes
        )  # fmt: skip
        self._links.send_bulk(send.target_island, piece.target_host, header, transfer, packed)


class EdgeDepartures:
    """Sends values along edges. Implements `runs.Sender`. `by_jax` is what goes to islands that take it so."""

    def __init__(
        self,
        host: Host,
        backend: xla.Backend,
        links: PeerLinks,
        arrivals: EdgeArrivals,
        by_jax: EdgeTransfer | None = None,
    ) -> None:
        self._host = host
        self._backend = backend
        self._links = links
        self._arrivals = arrivals
        self._bulk = BulkTransfer(backend, links)
        self._by_jax = by_jax

    def _way(self, send: BoundSend) -> EdgeTransfer:
        if self._by_jax is not None and self._links.takes_by_jax(send.target_island):
            return self._by_jax
        return self._bulk

    def is_quick(self, send: BoundSend) -> bool:
        """Whether sending a computed value may be done in the trio thread."""
        return self._way(send).is_quick(send)

    def push(self, run: Run, send: BoundSend, value: Any) -> None:
        """Send a computed value. Trio thread."""
        self.prepare(run, send, value)()

    def prepare(self, run: Run, send: BoundSend, value: Any) -> Callable[[], None]:
        """Wait for the value; return what sends it. Any thread."""
        way = self._way(send)
        here = [piece for piece in send.pieces if self._is_here(send, piece)]
        away = [piece for piece in send.pieces if not self._is_here(send, piece)]
        try:
            views = {piece.source: self._backend.view(value, send.source, piece.source) for piece in here}
            data = way.pack(send, away, value) if away else []
        except Exception as caught:
            error = xla.describe_failure(caught)
            return lambda: self.fail(run, send, error)

        def post() -> None:
            for piece in here:
                name = (piece.device, piece.region)
                part = views[piece.source][piece.within]
                self._arrivals.array_came(run.session, run.run, send.edge, name, part)
            for piece, part in zip(away, data, strict=True):
                way.send(run, send, piece, part)

        return post

    def _is_here(self, send: BoundSend, piece: OutgoingPiece) -> bool:
        return send.target_island == self._host.island and piece.target_host == self._host.index

    def fail(self, run: Run, send: BoundSend, error: ErrorInfo) -> None:
        """Tell the other side that nothing will come. Trio thread."""
        for target in send.target_hosts:
            if send.target_island == self._host.island and target == self._host.index:
                self._arrivals.failed(run.session, run.run, send.edge, error)
            else:
                message = m.EdgeFailed(run.session, run.run, send.edge, error)
                self._links.post(send.target_island, target, message)


def packed(part: xla.HostArray, loan: Loan | None) -> HostBytes | Loan:
    """The elements next to one another: in the memory that is lent, or where they are if they are so already."""
    if loan is None:
        return as_bytes(xla.dense(part))
    try:
        loan.fill(part)
    except BaseException:
        loan.withdraw()
        raise
    return loan


def withdraw(data: Iterable[Any]) -> None:
    """What was packed is not sent after all."""
    for packed_data in data:
        if isinstance(packed_data, Loan):
            packed_data.withdraw()


class Fetches:
    """Answers clients that ask for shards."""

    def __init__(self, backend: xla.Backend, store: Store, lanes: Lanes) -> None:
        self._backend = backend
        self._store = store
        self._lanes = lanes
        self._transfers = itertools.count(1)

    def fetch(self, request: m.Fetch, post: Callable[[m.Message], None], sender: BulkSender) -> None:
        """Answer now, or when the buffer is settled. Trio thread."""
        cell = self._store.find_or_park(request.session, request.buffer)
        if cell is None:
            post(m.FetchFailed(request.request, _gone(request)))
        else:
            cell.when_settled(lambda: self._answer(request, cell, post, sender))

    def _answer(self, request: m.Fetch, cell: Cell, post: Callable[[m.Message], None], sender: BulkSender) -> None:
        value, layout = cell.value, cell.layout
        if type(value) is Poison:
            post(m.FetchFailed(request.request, value.error))
            return
        if value is None or value is ABSENT or layout is None or not set(request.devices) <= set(layout.devices):
            post(m.FetchFailed(request.request, _gone(request)))
            return

        def collect() -> Callable[[], None]:
            shards: list[tuple[int, Region, HostBytes | Loan]] = []
            try:
                for device in request.devices:
                    region = layout.region(layout.devices.index(device))
                    spilled = type(value) is Spilled
                    view = value.shards[device] if spilled else self._backend.view(value, layout, device)
                    shards.append((device, region, packed(view, sender.lend(view.nbytes))))
            except Exception as caught:
                error = xla.describe_failure(caught)
                withdraw(data for _, _, data in shards)
                return lambda: post(m.FetchFailed(request.request, error))
            return lambda: self._reply(request, shards, sender)

        at_once = cell.nbytes <= m.CHUNK_BYTES and self._is_there(value)
        if at_once or (type(value) is not Spilled and value.is_deleted()):
            collect()()
        else:  # on a lane of its own: not behind what was launched later
            self._lanes.submit(-1 - min(request.devices, default=0), collect)

    def _is_there(self, value: Any) -> bool:
        return type(value) is Spilled or (self._backend.has_host_memory and xla.is_ready([value]))

    def _reply(self, request: m.Fetch, shards: list[tuple[int, Region, HostBytes | Loan]], sender: BulkSender) -> None:
        for device, region, data in shards:
            transfer = next(self._transfers)
            header = m.FetchedShard(transfer, request.request, device, region, data.nbytes)
            sender.send(header, transfer, data)


def _gone(request: m.Fetch) -> ErrorInfo:
    return ErrorInfo(DeletedError.__name__, f"buffer {request.buffer} is not here any more")
