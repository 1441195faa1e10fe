"""Bulk of clients that reach the scheduler and no executor: passed on, frame by frame. Slow, and counted. Pure.

Invariants
  Y-1  A frame goes to an executor as that of the session whose connection it came by, and back only to that session;
       the executor checks what is in it as it checks what comes on links of its own (P-1).
  Y-2  What is for an island or a session that is gone goes nowhere: who waits for it hears of the loss in the usual
       way.
"""

from __future__ import annotations

from typing import Any

from pathway.sched.clients import Clients
from pathway.sched.cluster import Cluster
from pathway.sched.events import Instruction, Send
from pathway.sched.peers import Peer
from pathway.transport import messages as m


class Relay:
    """Between the clients and the executors of one cluster."""

    def __init__(self, cluster: Cluster, clients: Clients) -> None:
        self._cluster = cluster
        self._clients = clients

    def from_client(self, peer: Peer, message: m.RelayToHost, now: float, out: list[Instruction]) -> None:
        island = self._cluster.islands.get(message.island)
        if peer.session is None or island is None or island.incarnation != message.incarnation:
            return
        executor = island.executors.get(message.host)
        if executor is not None and island.lane is not None:
            peer.session.relayed_bytes += len(message.blob)
            out.append(Send(executor[0], m.Relayed(peer.session.id, message.frame, message.blob)))

    def from_executor(self, peer: Peer, message: m.Relayed, now: float, out: list[Instruction]) -> None:
        session: Any = self._clients.sessions.get(message.session)
        if peer.executor is None or session is None or session.peer is None:
            return
        session.relayed_bytes += len(message.blob)
        out.append(Send(session.peer, m.RelayFromHost(*peer.executor, message.frame, message.blob)))
