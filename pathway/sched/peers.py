"""Connections: how a peer begins, who it is, and how its silence is noticed. Pure.

Invariants
  P-3  A peer's first message is a Hello of our protocol; its role decides what it may say.
  P-4  Every message counts as a sign of life. A worker that is silent for `host_silence_s` is lost, an executor for
       `executor_silence_s` (its process is watched by its worker, so this is for broken links only, and not for one
       that its worker says is stopped), and a client keeps its session for `lease_s`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from pathway.sched.cluster import Host
from pathway.sched.events import Close, Instruction, MessageReceived, PeerKey
from pathway.sched.lanes import Lane
from pathway.sched.sessions import Session
from pathway.sched.timers import Timers
from pathway.transport.messages import Hello, Refused
from pathway.version import PROTOCOL_VERSION, __version__

ROLES = ("client", "worker", "executor", "admin", "observer")


@dataclass(frozen=True)
class PeerSettings:
    heartbeat_s: float = 0.5
    host_silence_s: float = 2.0
    executor_silence_s: float = 10.0
    lease_s: float = 10.0

    def silence_s(self, role: str) -> float:
        """How long a peer of this role may be silent."""
        return {"worker": self.host_silence_s, "executor": self.executor_silence_s}.get(role, self.lease_s)


class Peer:
    """One connection. Its role decides which of `session`, `host` and `executor` (island, incarnation, host) is set."""

    __slots__ = (
        "damaged_transfers",
        "executor",
        "hello",
        "host",
        "key",
        "lane",
        "last_heard",
        "public_key",
        "role",
        "session",
        "vouched",
    )

    def __init__(self, key: PeerKey, hello: Hello, public_key: str | None, now: float) -> None:
        self.key = key
        self.hello = hello
        self.role = hello.role
        self.public_key = public_key
        self.last_heard = now
        self.vouched = False  # an executor whose worker says that it lives, but is stopped
        self.session: Session | None = None
        self.host: Host | None = None
        self.executor: tuple[str, int, int] | None = None
        self.damaged_transfers = 0  # that an executor has reported
        self.lane: Lane | None = None  # of an executor, while its island is formed


class Greeter(Protocol):
    """What the rest of the scheduler does when peers come and go."""

    def welcome(self, peer: Peer, now: float, out: list[Instruction]) -> None: ...

    def peer_gone(self, peer: Peer, reason: str, silent: bool, now: float, out: list[Instruction]) -> None: ...


class Peers:
    def __init__(self, settings: PeerSettings, timers: Timers, greeter: Greeter) -> None:
        self._settings = settings
        self._timers = timers
        self._greeter = greeter
        self._peers: dict[PeerKey, Peer] = {}
        self._of_role: dict[str, dict[PeerKey, Peer]] = {role: {} for role in ROLES}
        self.get = self._peers.get

    def __iter__(self) -> Iterator[PeerKey]:
        return iter(self._peers)

    def of_role(self, role: str) -> list[Peer]:
        return list(self._of_role[role].values())

    def first_message(self, event: MessageReceived, now: float, out: list[Instruction]) -> None:
        hello = event.message
        if not isinstance(hello, Hello):
            reason = f"{type(hello).__name__} from a peer that is not known (any more): begin again with Hello"
            out.append(Close(event.peer, Refused("DisconnectedError", reason)))
        elif hello.protocol != PROTOCOL_VERSION:
            reason = (
                f"the scheduler speaks protocol {PROTOCOL_VERSION} (pathway {__version__}), "
                f"this {hello.role or 'peer'} protocol {hello.protocol} (pathway {hello.version})"
            )
            out.append(Close(event.peer, Refused("ConnectError", reason)))
        elif hello.role not in ROLES:
            reason = f"the scheduler has no role {hello.role!r}; there are {', '.join(ROLES)}"
            out.append(Close(event.peer, Refused("ConnectError", reason)))
        else:
            self._greeter.welcome(Peer(event.peer, hello, event.public_key, now), now, out)

    def add(self, peer: Peer, now: float) -> None:
        self._peers[peer.key] = self._of_role[peer.role][peer.key] = peer
        silence_s = self._settings.silence_s(peer.role)

        def look(now: float, out: list[Instruction]) -> None:
            if self._peers.get(peer.key) is not peer:
                return
            due = (now if peer.vouched else peer.last_heard) + silence_s
            if now < due:
                self._timers.at(due, look)
            else:
                reason = f"nothing was heard of it for {silence_s:g} s"
                out.append(Close(peer.key, Refused("DisconnectedError", reason)))
                self._gone(peer, reason, True, now, out)

        self._timers.at(now + silence_s, look)

    def closed(self, key: PeerKey, reason: str, now: float, out: list[Instruction]) -> None:
        peer = self._peers.get(key)
        if peer is not None:
            self._gone(peer, reason, False, now, out)

    def _gone(self, peer: Peer, reason: str, silent: bool, now: float, out: list[Instruction]) -> None:
        del self._peers[peer.key], self._of_role[peer.role][peer.key]
        self._greeter.peer_gone(peer, reason, silent, now, out)
