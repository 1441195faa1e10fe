"""One link's bulk in both directions, and what all links of a process share: the memory that transfers live in.

Both kinds of link use it alike: the router's for each peer, and the dealer's for its only one. A dealer begins the
talk about shared memory; a router's end only answers, so that a link which carries no bulk never hears of it.
"""

from __future__ import annotations

import functools
from typing import Any

from pathway.errors import ProtocolError
from pathway.transport import messages as m
from pathway.transport.bulk import (
    CREDIT_BYTES,
    BulkReceiver,
    BulkSender,
    HostBytes,
    Post,
    SendWithBlob,
    aligned_empty,
    pooled_empty,
)
from pathway.transport.memory import private_pool
from pathway.transport.shm import SharedMemory, SharingLink

SHARING = (m.ShareOffer, m.ShareProof, m.ShareArena)
BULK = frozenset({m.Chunk, m.Taken, m.TransferDropped, m.Shared, *SHARING})
"""The messages that `BulkLink.received` takes; headers are their owner's."""


def dealer_end(introduction: m.Hello) -> str:
    """What the connecting end of a link is called in proofs of shared memory. Its session was checked."""
    return f"dealer {introduction.session} {introduction.name}"


def router_end(address: str) -> str:
    """What the listening end is called: by the address that the other end connected to, without its key."""
    return f"router {address}"


class TransferMemory:
    """The memory that this process's transfers come from. One for all links; `share=False` leaves them the sockets."""

    def __init__(self, *, share: bool = True) -> None:
        self.shared = SharedMemory() if share else None
        self._pool = private_pool()

    def empty(self, nbytes: int) -> HostBytes:
        """Room for received data."""
        return pooled_empty(self._pool, nbytes)

    def trim(self) -> None:
        """Let go of what is kept in vain; to be called now and then."""
        self._pool.trim()
        if self.shared is not None:
            self.shared.trim()

    def close(self) -> None:
        if self.shared is not None:
            self.shared.close()


class BulkLink:
    """One link's bulk. Used in the link's thread, but for `sender.lend`. Without `memory` there is nothing special
    about where data comes from and goes to."""

    def __init__(
        self,
        post: Post,
        send_with_blob: SendWithBlob,
        memory: TransferMemory | None = None,
        me: str = "",
        peer: str = "",
        credit_bytes: int = CREDIT_BYTES,
    ) -> None:
        self._post = post
        shared = memory.shared if memory is not None else None
        self._sharing = SharingLink(shared, me, peer, post) if shared is not None else None
        self._has_offered = False
        self.sender = BulkSender(post, send_with_blob, self._sharing, credit_bytes)
        self.receiver = BulkReceiver(post, self._sharing, memory.empty if memory is not None else aligned_empty)

    def offer_sharing(self) -> None:
        """Find out whether the peer is a process of this machine."""
        if self._sharing is not None and not self._has_offered:
            self._has_offered = True
            self._sharing.open()

    @property
    def is_settled(self) -> bool:
        """Whether it is known if data will go through shared memory."""
        return self._sharing is None or self._sharing.is_settled

    def received(self, message: m.Message, blob: Any) -> None:
        """A message of `BULK` has come. Raises `ProtocolError` for what no honest peer sends."""
        match message:
            case m.Chunk():
                self.receiver.chunk(message, blob)
            case m.Taken():
                self.sender.taken(message.nbytes)
            case m.TransferDropped():
                self.receiver.dropped(message)
            case m.Shared():
                self.receiver.shared(message)
            case m.ShareOffer() if self._sharing is None:
                self._post(m.ShareProof(b""))
            case m.ShareOffer() | m.ShareProof() | m.ShareArena() if self._sharing is not None:
                if isinstance(message, m.ShareOffer):
                    self.offer_sharing()
                self._sharing.received(message)
            case _:
                raise ProtocolError(f"{type(message).__name__} is not expected here")

    def drop_session(self, session: int) -> None:
        """Forget what is under way for a session, in both directions."""
        self.sender.drop(functools.partial(_is_of, session))
        self.receiver.drop_session(session)

    def drop_run(self, session: int, run: int) -> None:
        """Forget what is under way for a run, in both directions."""
        self.sender.drop(functools.partial(_is_of_run, session, run))
        self.receiver.drop_run(session, run)

    def close(self) -> None:
        """The link has ended, and all that came over it was seen."""
        self.sender.close()
        self.receiver.close()
        if self._sharing is not None:
            self._sharing.close()


def _is_of_run(session: int, run: int, header: Any) -> bool:
    return getattr(header, "run", None) == run and _is_of(session, header)


def _is_of(session: int, header: Any) -> bool:
    return getattr(header, "session", None) == session
