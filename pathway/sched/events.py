"""What goes into the scheduler's core and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from pathway.transport.messages import AccessList, Message, Refused
from pathway.transport.terms import Terms

PeerKey = bytes
"""What the transport calls a peer: opaque here."""


# -- events ----------------------------------------------------------------------------------------------------------


class MessageReceived(Struct, frozen=True):
    """Any message, `Hello` included: that is how a peer begins. `public_key` is the one that proved itself on the
    connection; it matters with `Hello` only."""

    peer: PeerKey
    message: Message
    public_key: str | None = None


class PeerClosed(Struct, frozen=True):
    """The transport noticed that a connection is gone. A peer that is merely silent is noticed by the core."""

    peer: PeerKey
    reason: str = ""


class Tick(Struct, frozen=True):
    """The time of `next_deadline` has come."""


class Drain(Struct, frozen=True):
    """Take no new runs; stop when those submitted have ended, at the latest after `deadline_s`. With `stop_workers`,
    executors are ended too."""

    deadline_s: float = 10.0
    stop_workers: bool = False


class AccessChanged(Struct, frozen=True):
    """Who may connect to executors: passed on to all of them, now and when they come. `keys`: the name and the terms of
    each key, in a cluster with keys."""

    access: AccessList
    keys: Mapping[str, tuple[str, Terms]] = {}


Event = MessageReceived | PeerClosed | Tick | Drain | AccessChanged


# -- instructions ----------------------------------------------------------------------------------------------------


class Send(Struct, frozen=True):
    peer: PeerKey
    message: Message


class Close(Struct, frozen=True):
    """Send `refused` if there is one, then forget the peer."""

    peer: PeerKey
    refused: Refused | None = None


class Record(Struct, frozen=True):
    """Remember `value` under `key` across this process's death (None: no longer), then send `then`: what must not leave
    before it is remembered."""

    kind: str
    key: str
    value: bytes | None
    then: tuple[Send, ...] = ()


class Stop(Struct, frozen=True):
    """The core has ended: nothing comes after this."""

    reason: str


Instruction = Send | Close | Record | Stop


# -- what waits (O-8) ------------------------------------------------------------------------------------------------


class Wait(Struct, frozen=True):
    """`what` waits because of `reason`, which is up to `on` (an island, a session), for `since_s` seconds now."""

    what: str
    reason: str
    on: str
    since_s: float
