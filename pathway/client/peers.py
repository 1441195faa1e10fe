"""All bulk links of one client: to executors, one each, opened when first needed, straight past the scheduler."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import trio

from pathway.client.bindings import ArrayKind
from pathway.client.core import ClientCore
from pathway.client.fetch import ArrayFetch, host_regions, piece_of
from pathway.client.peer import AnyDealer, Peer, Soon
from pathway.client.pending import Pending
from pathway.client.relay import RelayedDealer
from pathway.config import load_settings
from pathway.errors import ErrorInfo, IslandLostError, PathwayError
from pathway.transport import messages as m
from pathway.transport.bulklink import TransferMemory
from pathway.transport.security import Identity
from pathway.transport.threads import ThreadSafeDealer
from pathway.version import PROTOCOL_VERSION, __version__

DIRECT_S, DIRECT_AGAIN_S = 3.0, 0.5
"""How long an executor may take to answer before the way by the scheduler is taken; where another did not answer."""

log = logging.getLogger(__name__)

LOST_GRACE_S = 2.0
"""How long the scheduler's word that an island is lost, with its cause, is waited for once a link to it has broken."""


class Peers:
    """See the module's docstring. `soon` and `start` bring calls, and the serving of a peer, to the trio thread."""

    def __init__(
        self,
        core: ClientCore,
        name: str,
        identity: Identity | None,
        soon: Soon,
        start: Callable[[Peer], None],
        send_to_scheduler: Callable[[m.Message], None],
    ) -> None:
        self._core = core
        self._name = name
        self._identity = identity
        self._soon = soon
        self._start = start
        self._memory = TransferMemory(share=load_settings().shared_memory)
        self._peers: dict[str, Peer] = {}
        self._send_to_scheduler = send_to_scheduler
        self._relayed: dict[tuple[str, int, int], RelayedDealer] = {}
        self._unreachable: dict[tuple[str, int, int], str] = {}  # why they are relayed
        self._said_slow = False
        self._lock = threading.Lock()
        self._transfers = itertools.count(1)

    def _peer(self, address: str) -> Peer:
        peer = self._peers.get(address)
        if peer is None:
            with self._lock:
                peer = self._peers.get(address)
                if peer is None:
                    peer = self._peers[address] = Peer(address, self._soon)
                    self._start(peer)
        return peer

    def _address(self, kind: ArrayKind, host: int) -> str:
        bound = kind.binding.bound
        entry = self._core.islands.get(bound.island)
        if entry is None or entry.incarnation != bound.incarnation:
            raise IslandLostError(f"island {bound.island!r} (incarnation {bound.incarnation}) is gone")
        return entry.hosts[host]

    # -- from users' threads ------------------------------------------------------------------------------------------

    def fetch(self, kind: ArrayKind, buffer: int, fetch: ArrayFetch | None = None) -> ArrayFetch:
        """Ask for every distinct region of a buffer once, of several hosts together where they share the work. `fetch`
        takes what comes, if an ordinary one will not do."""
        fetch = ArrayFetch(kind) if fetch is None else fetch
        if fetch.done:
            return fetch
        for host, devices in kind.fetch_from():
            peer = self._peer(self._address(kind, host))
            request = self._core.new_request()
            self._core.fetches[request] = (fetch, kind.binding)
            peer.fetching[request] = fetch
            fetch.add_waiter(functools.partial(self._forget, peer, request))
            peer.send(m.Fetch(request, self._core.session, buffer, devices))
            if peer.over is not None:
                fetch.fail(peer.over)
        if len(kind.fetch_from()) == 1:
            fetch.wait_at = peer.wait_for
        error = self._core.lost or kind.binding.error
        if error is not None:  # it was lost while the fetch was being entered (C-1)
            fetch.fail(error)
        return fetch

    def _forget(self, peer: Peer, request: int) -> None:
        self._core.fetches.pop(request, None)
        peer.fetching.pop(request, None)

    def put(self, kind: ArrayKind, buffer: int, value: np.ndarray[Any, Any]) -> None:
        """Send every region of a buffer to every host that holds it. `value` may be changed afterwards."""
        for host, region in host_regions(kind.physical, kind.binding.bound.devices_per_host):
            peer = self._peer(self._address(kind, host))
            part = value[tuple(slice(start, stop) for start, stop in region)]
            loan = peer.lend(part.nbytes)
            if loan is not None:
                loan.fill(part)
            header = m.PutShard(next(self._transfers), self._core.session, buffer, region, part.nbytes)
            peer.send_data(header, piece_of(part) if loan is None else loan)

    def ask(self, address: str, request: m.TraceRequest | m.AskProgram | m.ProfileHost) -> Pending:
        """Ask the executor at `address`; its answer, or the error in its place."""
        peer = self._peer(address)
        reply = peer.replies[request.request] = Pending()
        peer.send(request)
        error = self._core.lost or peer.over
        if error is not None:
            reply.fail(error)
        return reply

    # -- in the trio thread -------------------------------------------------------------------------------------------

    async def serve(self, peer: Peer, connect_timeout_s: float) -> None:
        """Open the link and receive from it until it ends."""
        introduction = m.Hello(
            PROTOCOL_VERSION, __version__, "peer", self._name, token=self._core.token, session=self._core.session
        )
        dealer: AnyDealer
        try:
            dealer = await ThreadSafeDealer.connect(
                peer.address,
                introduction,
                identity=self._identity,
                timeout_s=min(connect_timeout_s, DIRECT_AGAIN_S if self._said_slow else DIRECT_S),
            )
        except PathwayError as error:
            where = self._host_at(peer.address)
            if where is None:
                await self._ended(peer, f"no link to the executor at {peer.where}: {error}")
                return
            dealer = self._relayed[where] = RelayedDealer(*where, self._send_to_scheduler)
            self._unreachable[where] = str(error)
        reason = await peer.receive(dealer, introduction, self._memory)
        await self._ended(peer, f"the link to the executor at {peer.where} broke: {reason}")

    def _host_at(self, address: str) -> tuple[str, int, int] | None:
        """(island, incarnation, host) of the executor at an address."""
        for entry in self._core.islands.values():
            if address in entry.hosts:
                return entry.island, entry.incarnation, entry.hosts.index(address)
        return None

    def relayed(self, message: m.RelayFromHost) -> None:
        """The scheduler brings what an executor sends."""
        where = (message.island, message.incarnation, message.host)
        dealer = self._relayed.get(where)
        if dealer is None:
            return
        if not self._said_slow:
            self._said_slow = True
            log.warning(
                "%s: arrays go to and from the executors through the scheduler, which is slow; let this machine reach "
                "the addresses that `pathway status` shows (docs/transfers.md)",
                self._unreachable[where],
            )
        dealer.arrived(message)

    async def _ended(self, peer: Peer, reason: str) -> None:
        with self._lock:
            if self._peers.get(peer.address) is peer:
                del self._peers[peer.address]
        with trio.move_on_after(LOST_GRACE_S):  # the scheduler knows better why
            for fetch in list(peer.fetching.values()):
                await fetch.wait_trio()
        peer.fail(ErrorInfo("IslandLostError", reason))

    def drop(self, alive: frozenset[str]) -> None:
        """Executors at other addresses than these are gone: their links close."""
        with self._lock:
            gone = [self._peers.pop(address) for address in list(self._peers) if address not in alive]
        for peer in gone:
            if peer.dealer is not None:
                peer.dealer.close(linger_s=0)
        for where in [where for where, dealer in self._relayed.items() if dealer.closed]:
            del self._relayed[where], self._unreachable[where]

    def trim(self) -> None:
        """Let go of memory that is kept in vain; to be called now and then."""
        self._memory.trim()

    def close(self) -> None:
        """Close every link."""
        peers = list(self._peers.values())
        self.drop(frozenset())
        for peer in peers:
            peer.fail(self._core.lost or ErrorInfo("DisconnectedError", "the client was closed"))
        self._memory.close()
