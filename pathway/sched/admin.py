"""What administrators order: weights, draining, ending sessions. Pure.

Invariants
  D-1  No slice is bound to a drained island. Those that are there stay until they are released, or are moved.
  D-2  A slice is moved only while nothing of its session is on the island: no run, no buffer, and no request within the
       last `SETTLE_S`, for what executors report is as old as a heartbeat. So nothing is lost by a move.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pathway.errors import ErrorInfo
from pathway.sched.clients import Clients
from pathway.sched.cluster import Cluster, Island
from pathway.sched.events import Close, Instruction, Send
from pathway.sched.ownership import within
from pathway.sched.peers import Peer, Peers
from pathway.sched.sessions import Session
from pathway.sched.slices import Slice
from pathway.transport import messages as m

SETTLE_S = 1.5


class Admin:
    """The handlers of a connection with the role `admin`."""

    def __init__(self, cluster: Cluster, clients: Clients, peers: Peers) -> None:
        self._cluster = cluster
        self._clients = clients
        self._peers = peers
        self.handlers: dict[type, Callable[[Peer, Any, float, list[Instruction]], None]] = {
            m.SetWeight: self._set_weight,
            m.DrainIsland: self._drain_island,
            m.KillSession: self._kill_session,
        }

    def _find(self, peer: Peer, request: int, name: str, out: list[Instruction]) -> Session | None:
        """The session that is meant by its number or its name; where it is not one session, the answer says so."""
        sessions = self._clients.sessions.values()
        found = [one for one in sessions if f"{one.id:x}" == name] or [one for one in sessions if one.name == name]
        if len(found) == 1:
            return found[0]
        if found:
            error = f"{len(found)} sessions are called {name!r}: " + ", ".join(f"{one.id:x}" for one in found)
        else:
            there = ", ".join(f"{one.id:x} ({one.name})" for one in sessions) or "none"
            error = f"there is no session {name!r}; there are: {there}"
        out.append(Send(peer.key, m.AdminReply(request, "", error)))
        return None

    # -- weights ----------------------------------------------------------------------------------------------------

    def _set_weight(self, peer: Peer, message: m.SetWeight, now: float, out: list[Instruction]) -> None:
        if message.weight is not None and not 0.0 < message.weight < math.inf:
            out.append(Send(peer.key, m.AdminReply(message.request, "", f"a weight of {message.weight}")))
            return
        if message.key:
            self._set_key_weight(peer, message, out)
            return
        session = self._find(peer, message.request, message.session, out)
        if session is None:
            return
        self._clients.set_weight(session, message.weight, message.priority)
        tenant = self._clients.lanes.tenant(session.id)
        text = f"session {session.name} has weight {tenant.weight:g} and priority {tenant.priority}"
        out.append(Send(peer.key, m.AdminReply(message.request, text)))

    def _set_key_weight(self, peer: Peer, message: m.SetWeight, out: list[Instruction]) -> None:
        account = self._clients.accounts.named(message.session)
        if account is None or message.weight is None or message.priority is not None:
            there = ", ".join(account.name for account in self._clients.accounts) or "none"
            error = (
                "a key has a weight to set, and no priority (priority=P in the allow-list is the most for a session)"
            )
            if account is None:
                error = f"there is no key {message.session!r}; there are: {there}"
            out.append(Send(peer.key, m.AdminReply(message.request, "", error)))
            return
        self._clients.set_key_weight(account, message.weight)
        text = f"key {account.name} has weight {account.weight:g}, and {len(account.sessions)} sessions"
        out.append(Send(peer.key, m.AdminReply(message.request, text)))

    # -- sessions ---------------------------------------------------------------------------------------------------

    def _kill_session(self, peer: Peer, message: m.KillSession, now: float, out: list[Instruction]) -> None:
        session = self._find(peer, message.request, message.session, out)
        if session is None:
            return
        client = session.peer
        runs = len(session.runs)
        self._clients.close(session, now, out)
        if client is not None:
            reason = f"session {session.name} was ended by an administrator"
            out.append(Close(client, m.Refused("SessionLostError", reason)))
            self._peers.closed(client, reason, now, out)
        text = f"session {session.name} is ended, with {runs} runs that it had"
        out.append(Send(peer.key, m.AdminReply(message.request, text)))

    # -- islands ----------------------------------------------------------------------------------------------------

    def _drain_island(self, peer: Peer, message: m.DrainIsland, now: float, out: list[Instruction]) -> None:
        island = self._cluster.islands.get(message.island)
        if island is None:
            there = ", ".join(self._cluster.islands) or "none"
            error = f"there is no island {message.island!r}; there are: {there}"
            out.append(Send(peer.key, m.AdminReply(message.request, "", error)))
            return
        if not message.drain:
            self._cluster.try_again(island, now, out)
            self._clients.bind_waiting(now, out)
            out.append(Send(peer.key, m.AdminReply(message.request, f"island {island.name} takes slices again")))
            return
        island.drained = True
        out.append(island.record())
        self.move_idle(island, now, out)
        slices = len(self._held(island))
        runs = len(island.lane.running) + len(island.lane.queue) if island.lane is not None else 0
        left = f"{slices} slices and {runs} runs are still there" if slices or runs else "nothing is there any more"
        text = f"island {island.name} takes no more slices; {left}"
        out.append(Send(peer.key, m.AdminReply(message.request, text)))

    def move_idle(self, island: Island, now: float, out: list[Instruction]) -> None:
        """Move what can be moved away from a drained island (D-2)."""
        if not island.drained or island.lane is None or island.lane.report is None:
            return
        lane = island.lane
        busy = {session for session, buffers, _ in lane.report.bytes_by_session if buffers}  # type: ignore[union-attr]
        busy |= {session for session, _ in lane.running} | set(lane.flows)
        for held in self._held(island):
            session = self._clients.sessions[held.session]
            if held.session not in busy and now - session.active_at > SETTLE_S and held.request.island == "":
                self._move(session, held, now, out)

    def _held(self, island: Island) -> list[Slice]:
        holders = self._clients.binder.holders.get(island.name, {})
        found = {held for slices in holders.values() for held in slices}
        return sorted(found, key=lambda held: (held.since, held.session, held.request.slice))

    def _move(self, session: Session, held: Slice, now: float, out: list[Instruction]) -> None:
        island, devices = held.island, held.devices
        self._clients.binder.release(held)
        if self._clients.binder.bind(held, now) is not None:
            self._clients.binder.hold(held, island, devices)  # nowhere else to go: it stays
            return
        reach = session.reach()
        for plan in session.plans.values():
            if plan.error is None and not within(plan.reach, reach):
                reason = f"slice {held.request.slice} was moved from island {island}, which is drained"
                plan.error = ErrorInfo("SliceError", reason, slice=held.request.slice)
        self._clients.tell_bound(session, held, now, out)
