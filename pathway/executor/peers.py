"""The executor's own socket: where clients put and fetch, other executors send along edges, and followers report.

A peer is known by its connection. What it announces and does not finish goes with it. What it may send is checked by
the router before it gets here (`permissions`); a peer that breaks the protocol of bulk is shown the door, alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import trio

from pathway.errors import PermissionDeniedError, ProtocolError
from pathway.executor.bind import Host
from pathway.transport import messages as m
from pathway.transport.authenticator import Gate
from pathway.transport.bulk import RELAYED_CREDIT_BYTES, BulkSender, HostBytes
from pathway.transport.bulklink import BULK, BulkLink, TransferMemory, dealer_end, router_end
from pathway.transport.handshake import hello
from pathway.transport.keys import Entry, PublicKey, parse_allow_list
from pathway.transport.permissions import Check, PeerPermit, admit_to_executor, executor_token
from pathway.transport.sockets import Peer, PeerGone, Router

log = logging.getLogger(__name__)

MOST_UNDELIVERED = 1 << 18
"""Messages that wait for a peer which does not take them. What waits refers to data that are here anyway, and ZeroMQ,
which copies what is small, has a few of them only: so this bounds what a client can have an executor keep."""

Post = Callable[[m.Message], None]


class Owner(Protocol):
    """The executor, as its peer socket sees it."""

    def edge_piece_came(self, message: m.EdgeShard, data: HostBytes) -> None: ...

    def edge_piece_damaged(self, message: m.EdgeShard, sender: str, given: int, found: int) -> None: ...

    def edge_failed(self, message: m.EdgeFailed) -> None: ...

    def edge_piece_offered(self, message: m.EdgeOffer, sender: str, post: Post) -> None: ...

    def put_region_came(self, message: m.PutShard, data: HostBytes) -> None: ...

    def put_region_damaged(self, message: m.PutShard, sender: str, given: int, found: int) -> None: ...

    def fetch(self, message: m.Fetch, post: Post, sender: BulkSender) -> None: ...

    def trace(self, session: int, message: m.TraceRequest) -> m.TraceReply: ...

    def ask_program(self, message: m.AskProgram, post: Post) -> None: ...

    def profile(self, session: int, message: m.ProfileHost, post: Post) -> None: ...

    def follower_reported(self, host: int, message: m.Message) -> None: ...

    def client_left(self, session: int) -> None: ...

    def send_relayed(self, message: m.Relayed) -> None: ...

    def settle(self) -> None: ...


class _Peer:
    """One connection."""

    __slots__ = ("bulk", "host", "name", "post", "session")

    def __init__(self, introduction: m.Hello, post: Post, bulk: BulkLink, session: int) -> None:
        self.session = session  # of a client; 0 for an executor
        self.name = introduction.name
        self.host = -1  # of a follower
        self.post = post
        self.bulk = bulk


def _relayed_name(session: int) -> Peer:
    """Longer than any name that a router gives."""
    return b"relayed " + session.to_bytes(8, "big")


class PeerSocket:
    """The router, its peers, and the leader's way to its followers."""

    def __init__(
        self,
        owner: Owner,
        host: Host,
        interface: str,
        gate: Gate | None,
        memory: TransferMemory,
    ) -> None:
        self._owner = owner
        self._memory = memory
        self._host = host
        self._gate = gate
        self._secret: bytes | None = None
        self._router = Router.bind(
            f"tcp://{interface}:0", gate=gate, admit=self._admit, max_undelivered_messages=MOST_UNDELIVERED
        )
        self.address = self._router.address
        self._peers: dict[Peer, _Peer] = {}
        self._followers: dict[int, Peer] = {}
        self._backlogs: dict[int, list[m.Message]] = {index: [] for index in range(1, host.hosts)}

    # -- who may come in ---------------------------------------------------------------------------------------------

    def learn_access(self, message: m.AccessList) -> None:
        """The scheduler says who may connect, and what tokens are made with."""
        self._secret = message.secret
        if self._gate is not None:
            self._gate.access.replace(parse_allow_list(message.allow_list))

    def own_hello(self) -> m.Hello:
        """How this executor introduces itself to others of its cluster."""
        return hello("peer", self._host.name, token=executor_token(self._secret) if self._secret is not None else 0)

    def _admit(self, introduction: m.Hello, key: PublicKey | None, entry: Entry | None) -> Check:
        if self._secret is not None:
            return admit_to_executor(introduction, key, entry, self._secret).check
        if key is not None:
            raise PermissionDeniedError("this executor has not been told yet who may connect")
        return PeerPermit(introduction.session or None).check

    # -- in ----------------------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Take what peers send, until cancelled or closed."""
        while True:
            try:
                batch = await self._router.receive_batch()
            except trio.ClosedResourceError:
                return
            for item in batch:
                if isinstance(item, PeerGone):
                    self._gone(item)
                    continue
                last = len(item.messages) - 1
                try:
                    for position, message in enumerate(item.messages):
                        blob = item.blobs[0] if position == last and item.blobs else None
                        self._received(item.peer, message, blob)
                except ProtocolError as error:
                    self._router.disconnect(item.peer, ProtocolError.__name__, str(error))
            self._owner.settle()

    def _received(self, name: Peer, message: Any, blob: memoryview | None) -> None:
        peer = self._peers.get(name)
        if peer is None:
            if isinstance(message, m.Hello):
                post = partial(self._post, name)
                bulk = BulkLink(
                    post,
                    partial(self._send_with_blob, name),
                    self._memory,
                    router_end(self.address),
                    dealer_end(message),
                )
                self._peers[name] = _Peer(message, post, bulk, message.session)
            return
        owner = self._owner
        if type(message) in BULK:
            peer.bulk.received(message, blob)
            return
        match message:
            case m.Fetch():
                owner.fetch(message, peer.post, peer.bulk.sender)
            case m.EdgeShard():
                self._header(peer, message, blob, owner.edge_piece_came, owner.edge_piece_damaged)
            case m.EdgeOffer():
                owner.edge_piece_offered(message, peer.name, peer.post)
            case m.PutShard():
                self._header(peer, message, blob, owner.put_region_came, owner.put_region_damaged)
            case m.EdgeFailed():
                owner.edge_failed(message)
            case m.EdgeArrived() | m.BufferArrived() | m.PartBound() | m.GangsDone() | m.GangFailed():
                if peer.host < 0:
                    raise ProtocolError(f"{type(message).__name__} from a peer that is no follower")
                owner.follower_reported(peer.host, message)
            case m.FollowerHello():
                self._follower(name, peer, message)
            case m.TraceRequest():
                peer.post(owner.trace(peer.session, message))
            case m.AskProgram():
                owner.ask_program(message, peer.post)
            case m.ProfileHost():
                owner.profile(peer.session, message, peer.post)
            case m.Ping():
                peer.post(m.Pong(message.number))
            case _:
                pass

    def relayed(self, message: m.Relayed) -> None:
        """The scheduler brings what a client sends that cannot reach this socket (Y-1)."""
        name = _relayed_name(message.session)
        if name not in self._peers:
            self._peers[name] = self._relayed_peer(message.session)
        permit = PeerPermit(message.session)
        try:
            received = m.decode(message.frame)
            for position, each in enumerate(received):
                permit.check(each)
                last = position == len(received) - 1
                self._received(name, each, memoryview(message.blob) if last and message.blob else None)
        except (ProtocolError, PermissionDeniedError) as error:
            log.warning("what session %x sent by the scheduler is refused: %s", message.session, error)
            self._peers[name].post(m.Refused(type(error).__name__, str(error)))

    def _relayed_peer(self, session: int) -> _Peer:
        def send_with_blob(message: m.Message, blob: Any) -> None:
            self._owner.send_relayed(m.Relayed(session, m.encode((message,)), bytes(blob)))

        def post(message: m.Message) -> None:
            send_with_blob(message, b"")

        bulk = BulkLink(post, send_with_blob, credit_bytes=RELAYED_CREDIT_BYTES)
        return _Peer(hello("peer", f"the client of session {session:x}"), post, bulk, session)

    @staticmethod
    def _header(peer: _Peer, message: Any, blob: Any, came: Callable[..., None], damaged: Callable[..., None]) -> None:
        peer.bulk.receiver.header(
            message.transfer,
            message.nbytes,
            blob,
            partial(came, message),
            checksum_given=message.checksum,
            damaged=partial(damaged, message, peer.name),
            session=message.session,
            run=getattr(message, "run", 0),
        )

    def _follower(self, name: Peer, peer: _Peer, message: m.FollowerHello) -> None:
        if message.incarnation != self._host.incarnation or message.host_index not in self._backlogs:
            raise ProtocolError(f"{message} does not fit host {self._host}")
        peer.host = message.host_index
        self._followers[peer.host] = name
        backlog = self._backlogs[peer.host]
        for waiting in backlog:
            self._router.post(name, waiting)
        backlog.clear()

    def _gone(self, gone: PeerGone) -> None:
        peer = self._peers.pop(gone.peer, None)
        if peer is not None:
            peer.bulk.close()
            if peer.session and all(other.session != peer.session for other in self._peers.values()):
                self._owner.client_left(peer.session)
            if self._followers.get(peer.host) == gone.peer:
                log.warning("follower %d of island %s is gone: %s", peer.host, self._host.island, gone.reason)
                del self._followers[peer.host]

    # -- out ---------------------------------------------------------------------------------------------------------

    def to_followers(self, message: m.Message) -> None:
        """Post to every follower; for one whose link is not there yet, keep it."""
        for host, backlog in self._backlogs.items():
            follower = self._followers.get(host)
            if follower is None:
                backlog.append(message)
            else:
                self._router.post(follower, message)

    def _post(self, name: Peer, message: m.Message) -> None:
        if name in self._peers:
            self._router.post(name, message)

    def _send_with_blob(self, name: Peer, message: m.Message, blob: Any) -> None:
        if name in self._peers:
            self._router.send_with_blob(name, message, blob)

    def drop_run(self, session: int, run: int) -> None:
        """What is under way for a run goes nowhere."""
        for peer in self._peers.values():
            peer.bulk.drop_run(session, run)

    def drop_session(self, session: int) -> None:
        """What is under way for a session goes nowhere."""
        for peer in self._peers.values():
            peer.bulk.drop_session(session)
        relayed = self._peers.pop(_relayed_name(session), None)
        if relayed is not None:
            relayed.bulk.close()

    def flush(self) -> None:
        self._router.flush()

    def close(self) -> None:
        self._router.close(linger_s=0.2)
