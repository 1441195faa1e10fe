"""Links to other executors, opened when first needed: bulk along edges, and a follower's link to its leader.

Invariants
  L-1  What is sent before a link is open waits for it, in order. A link that cannot be opened, or breaks, takes what
       waits with it: the other side's island is lost or soon will be, and the scheduler tells who must know.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import trio

from pathway.errors import ConnectError, PathwayError
from pathway.executor.transfers import JAX
from pathway.transport import messages as m
from pathway.transport.bulk import HostBytes
from pathway.transport.bulklink import BULK, BulkLink, TransferMemory, dealer_end, router_end
from pathway.transport.endpoints import address_of
from pathway.transport.security import Identity
from pathway.transport.shm import Loan
from pathway.transport.sockets import Dealer, PeerGone

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0

Action = Callable[["OpenLink"], None]


@dataclass
class OpenLink:
    """A link that is open."""

    dealer: Dealer
    bulk: BulkLink


@dataclass
class _Peer:
    address: str
    open: OpenLink | None = None
    backlog: list[Action] = field(default_factory=list)


class PeerLinks:
    """The links by address, and the directory that says where each host of each island is."""

    def __init__(
        self,
        nursery: trio.Nursery,
        hello: Callable[[], m.Hello],
        memory: TransferMemory,
        identity: Identity | None = None,
    ) -> None:
        self._nursery = nursery
        self._hello = hello
        self._memory = memory
        self._identity = identity
        self._islands: dict[str, m.IslandEntry] = {}
        self._peers: dict[str, _Peer] = {}
        self._offer_taken: Callable[[str, int], None] | None = None
        self._link_ended: Callable[[str], None] | None = None

    def when_link_ends(self, ended: Callable[[str], None], taken: Callable[[str, int], None]) -> None:
        """Have `ended` called with the address of every link that ends, and `taken` for every `OfferTaken`."""
        self._link_ended, self._offer_taken = ended, taken

    # -- the directory -----------------------------------------------------------------------------------------------

    def learn(self, directory: m.Directory) -> None:
        """Take the directory. Links to addresses that are in it no longer close."""
        self._islands = {entry.island: entry for entry in directory.islands}
        known = {address for entry in directory.islands for address in entry.hosts}
        for address in [address for address in self._peers if address not in known]:
            peer = self._peers.pop(address)
            peer.backlog.clear()
            if peer.open is not None:
                peer.open.dealer.close(linger_s=0)

    def devices_per_host(self) -> Mapping[str, int]:
        return {name: entry.devices_per_host for name, entry in self._islands.items()}

    def takes_by_jax(self, island: str) -> bool:
        """Whether the island's executors pull what is offered through JAX."""
        entry = self._islands.get(island)
        return entry is not None and entry.transfer == JAX

    def address(self, island: str, host: int) -> str | None:
        entry = self._islands.get(island)
        return entry.hosts[host] if entry is not None and host < len(entry.hosts) else None

    # -- sending -----------------------------------------------------------------------------------------------------

    def post(self, island: str, host: int, message: m.Message) -> None:
        """Post `message`; it leaves with the next `flush`."""
        self._do(island, host, lambda link: link.dealer.post(message))

    def lend(self, island: str, host: int, nbytes: int) -> Loan | None:
        """Memory that is shared with that host, to put the data of a transfer in; None where there is none. Any
        thread."""
        peer = self._peers.get(self.address(island, host) or "")
        link = peer.open if peer is not None else None
        return link.bulk.sender.lend(nbytes) if link is not None else None

    def send_bulk(self, island: str, host: int, header: m.Message, transfer: int, data: HostBytes | Loan) -> None:
        """Send a transfer."""
        self._do(island, host, lambda link: link.bulk.sender.send(header, transfer, data))

    def drop_run(self, session: int, run: int) -> None:
        """What is under way for a run goes nowhere."""
        for peer in self._peers.values():
            if peer.open is not None:
                peer.open.bulk.drop_run(session, run)

    def drop_session(self, session: int) -> None:
        """What is under way for a session goes nowhere."""
        for peer in self._peers.values():
            if peer.open is not None:
                peer.open.bulk.drop_session(session)

    def flush(self) -> None:
        for peer in self._peers.values():
            if peer.open is not None:
                peer.open.dealer.flush()

    def close(self) -> None:
        for peer in self._peers.values():
            if peer.open is not None:
                peer.open.dealer.close(linger_s=0)
        self._peers.clear()

    def _do(self, island: str, host: int, action: Action) -> None:
        address = self.address(island, host)
        if address is None:  # lost, and the scheduler has said so
            log.info("dropped a message to %s/%d, which is not in the directory", island, host)
            return
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = _Peer(address)
            self._nursery.start_soon(self._serve, peer)
        if peer.open is None:
            peer.backlog.append(action)
        else:
            action(peer.open)

    async def _serve(self, peer: _Peer) -> None:
        introduction = self._hello()
        try:
            dealer = await Dealer.connect(
                peer.address, introduction, identity=self._identity, timeout_s=CONNECT_TIMEOUT_S
            )
        except ConnectError as error:
            log.warning("no link to the executor at %s: %s", address_of(peer.address), error)
            self._forget(peer)
            return
        if self._peers.get(peer.address) is not peer:  # it left the directory meanwhile
            dealer.close(linger_s=0)
            return
        bulk = BulkLink(
            dealer.post,
            dealer.send_with_blob,
            self._memory,
            dealer_end(introduction),
            router_end(address_of(peer.address)),
        )
        try:
            bulk.offer_sharing()
            peer.open = link = OpenLink(dealer, bulk)
            for action in peer.backlog:
                action(link)
            peer.backlog.clear()
            dealer.flush()
            await self._until_gone(peer, link)
        except (PathwayError, trio.ClosedResourceError) as error:
            log.info("the link to the executor at %s is over: %s", address_of(peer.address), error)
        finally:
            bulk.close()
            dealer.close(linger_s=0)
            self._forget(peer)

    async def _until_gone(self, peer: _Peer, link: OpenLink) -> None:
        while True:
            for item in await link.dealer.receive_batch():
                if isinstance(item, PeerGone):
                    log.info("the executor at %s is gone: %s", address_of(peer.address), item.reason)
                    return
                for message in item.messages:
                    if isinstance(message, m.Refused):
                        log.error("the executor at %s refuses this one: %s", address_of(peer.address), message.reason)
                    elif type(message) in BULK:
                        link.bulk.received(message, None)  # it sends no bulk, and so no blobs
                    elif isinstance(message, m.OfferTaken) and self._offer_taken is not None:
                        self._offer_taken(peer.address, message.uuid)
            link.dealer.flush()

    def _forget(self, peer: _Peer) -> None:
        if self._peers.get(peer.address) is peer:
            del self._peers[peer.address]
        if self._link_ended is not None:
            self._link_ended(peer.address)
