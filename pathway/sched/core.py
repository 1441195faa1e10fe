"""The scheduler's core: events in, instructions out, time passed in. One door, `SchedulerCore.handle`.

The subjects have files of their own, with their invariants: connections (`peers`), islands (`cluster`), `slices`,
`plans`, `sessions`, and runs (`lanes`); `clients` is what clients may ask for. Here is who may say what, and what each
thing that happens to one subject means to the others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pathway.errors import ErrorInfo, PermissionDeniedError, ProtocolError
from pathway.sched import status
from pathway.sched.admin import Admin
from pathway.sched.clients import Clients, Limits, TokenOf
from pathway.sched.cluster import Cluster, ClusterSettings, Island, IslandRecord
from pathway.sched.events import (
    AccessChanged,
    Close,
    Drain,
    Event,
    Instruction,
    MessageReceived,
    PeerClosed,
    Send,
    Stop,
    Tick,
    Wait,
)
from pathway.sched.lanes import Lane
from pathway.sched.memory import Memory
from pathway.sched.peers import Peer, Peers, PeerSettings
from pathway.sched.policies import Fifo, Policy
from pathway.sched.relay import Relay
from pathway.sched.timers import Timers
from pathway.transport import messages as m
from pathway.transport.endpoints import endpoint
from pathway.version import PROTOCOL_VERSION, __version__


@dataclass(frozen=True)
class SchedulerSettings:
    """`credits`: K of O-7. `policy`: whose run goes next. `grace_s`: how long after its start a scheduler lets slices
    wait for islands that nobody has announced yet. `exit_grace_s`: how long after an executor's connection its worker
    may take to say why it ended. `spill`: see `memory`. `memory_patience_s`: how long a run may wait for memory that
    only its own session could release."""

    credits: int = 16
    policy: Policy = field(default_factory=Fifo)
    grace_s: float = 10.0
    exit_grace_s: float = 0.5
    spill: bool = False
    memory_patience_s: float = 1.5
    peers: PeerSettings = field(default_factory=PeerSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    limits: Limits = field(default_factory=Limits)


class SchedulerCore:
    """`numbers` gives session ids: the operating system's randomness in a daemon, a seeded one in a simulation.
    `token_of` makes what proves a session; without it, tokens are random numbers. `islands` is what an earlier
    scheduler of the same state directory remembered of them."""

    def __init__(
        self,
        settings: SchedulerSettings,
        numbers: random.Random,
        now: float,
        token_of: TokenOf | None = None,
        islands: Mapping[str, IslandRecord] | None = None,
    ) -> None:
        self.settings = settings
        self.started_at = now
        self.timers = Timers()
        self.scheduler = numbers.getrandbits(62) + 1
        self.cluster = Cluster(settings.cluster, self.timers, self, islands)
        self.clients = Clients(
            self.cluster,
            self.timers,
            numbers,
            settings.credits,
            settings.peers.lease_s,
            now + settings.grace_s,
            token_of,
            settings.limits,
            settings.policy,
            Memory(settings.spill),
            settings.memory_patience_s,
        )
        self.peers = Peers(settings.peers, self.timers, self)
        self.admin = Admin(self.cluster, self.clients, self.peers)
        self.relay = Relay(self.cluster, self.clients)
        self.access: m.AccessList | None = None
        self.stopped = False
        self._stop_workers = False
        self._everybody: m.Directory | None = None
        self._handlers: dict[str, dict[type, Callable[[Peer, Any, float, list[Instruction]], None]]] = {
            "client": self.clients.handlers
            | {m.RelayToHost: self.relay.from_client}
            | {m.StatusRequest: self._status_request},
            "worker": {
                m.HostJoined: self._host_joined,
                m.ExecutorExited: self._executor_exited,
                m.ExecutorPaused: self._executor_paused,
            },
            "executor": {
                m.PartsFinished: self._parts_finished,
                m.PartsLate: self._parts_late,
                m.PartFailed: self._part_failed,
                m.PartRefused: self._part_refused,
                m.Decided: self._decided,
                m.Relayed: self.relay.from_executor,
                m.ComputationsCompiled: self._computations_compiled,
                m.ExecutorReport: self._executor_report,
                m.ExecutorReady: self._executor_ready,
            },
            "admin": self.admin.handlers | {m.StatusRequest: self._status_request},
            "observer": {m.StatusRequest: self._status_request},
        }
        for handlers in self._handlers.values():
            handlers |= {m.Ping: self._ping, m.Pong: self._pong, m.Goodbye: self._goodbye}

    # -- the door ---------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        if self.stopped:
            return out
        if type(event) is MessageReceived:
            peer = self.peers.get(event.peer)
            message = event.message
            if peer is None:
                self.peers.first_message(event, now, out)
            else:
                peer.last_heard = now
                handler = self._handlers[peer.role].get(type(message))
                if handler is None:
                    self._refuse(
                        peer, "PermissionDeniedError", f"a {peer.role} may not send {type(message).__name__}", now, out
                    )
                else:
                    try:
                        handler(peer, message, now, out)
                    except (PermissionDeniedError, ProtocolError) as error:
                        self._refuse(peer, type(error).__name__, str(error), now, out)
        elif isinstance(event, PeerClosed):
            self.peers.closed(event.peer, event.reason or "its connection is closed", now, out)
        elif isinstance(event, Tick):
            self.timers.run_due(now, out)
        elif isinstance(event, Drain):
            self._drain(event, now, out)
        elif isinstance(event, AccessChanged):
            self.access = event.access
            self.clients.listed(event.keys, out)
            out += [Send(peer.key, event.access) for peer in self.peers.of_role("executor")]
        self.clients.settle(now, out)
        if self.clients.lanes.memory.waiting:
            self.clients.memory.look(now)
        if self.clients.ending and not self.clients.lanes.active:
            self._stop(self.clients.ending, out)
        return out

    def next_deadline(self) -> float | None:
        """When `handle(Tick(), now)` is due."""
        return None if self.stopped else self.timers.next_deadline()

    # -- peers ------------------------------------------------------------------------------------------------------

    def welcome(self, peer: Peer, now: float, out: list[Instruction]) -> None:
        """A peer has said a Hello that can be accepted (called by `Peers`)."""
        session = self.clients.open(peer, self.peers, now, out) if peer.role == "client" else None
        if peer.role == "client" and session is None:
            return  # refused
        self.peers.add(peer, now)
        settings = self.settings.peers
        out.append(
            Send(
                peer.key,
                m.Welcome(
                    protocol=PROTOCOL_VERSION,
                    version=__version__,
                    scheduler=self.scheduler,
                    session=session.id if session else 0,
                    lease_s=settings.lease_s if session else 0.0,
                    heartbeat_s=settings.heartbeat_s,
                    token=session.token if session else 0,
                ),
            )
        )
        if session is not None:
            out.append(Send(peer.key, self._directory()))
            if peer.hello.resume:
                self.clients.resumed(session, out)
        elif peer.role == "executor" and self.access is not None:
            out.append(Send(peer.key, self.access))

    def peer_gone(self, peer: Peer, reason: str, silent: bool, now: float, out: list[Instruction]) -> None:
        """A peer's connection is over (called by `Peers`). What that means depends on what it was."""
        if peer.session is not None and peer.session.peer == peer.key:
            self.clients.detached(peer.session, peer.last_heard)
        elif peer.host is not None:
            self.cluster.host_lost(peer.host, reason, now, out)
        elif peer.executor is not None:
            island, incarnation, index = peer.executor

            def unexplained(now: float, out: list[Instruction]) -> None:
                self.cluster.executor_gone(island, incarnation, f"the executor of host {index}: {reason}", now, out)

            if silent:
                unexplained(now, out)
            else:
                self.timers.at(now + self.settings.exit_grace_s, unexplained)

    def _refuse(self, peer: Peer, kind: str, reason: str, now: float, out: list[Instruction]) -> None:
        out.append(Close(peer.key, m.Refused(kind, reason)))
        self.peers.closed(peer.key, reason, now, out)

    def _ping(self, peer: Peer, message: m.Ping, now: float, out: list[Instruction]) -> None:
        out.append(Send(peer.key, m.Pong(message.number)))

    def _pong(self, peer: Peer, message: m.Pong, now: float, out: list[Instruction]) -> None:
        """Any message shows that the peer lives, and that is noted already."""

    def _goodbye(self, peer: Peer, message: m.Goodbye, now: float, out: list[Instruction]) -> None:
        if peer.session is not None and peer.session.peer == peer.key:
            self.clients.close(peer.session, now, out)
        self.peers.closed(peer.key, message.reason or "it said goodbye", now, out)
        out.append(Close(peer.key))

    def _status_request(self, peer: Peer, message: m.StatusRequest, now: float, out: list[Instruction]) -> None:
        out.append(Send(peer.key, m.StatusReply(message.request, msgspec.json.encode(self.status(now)))))

    # -- hosts and executors ----------------------------------------------------------------------------------------

    def _host_joined(self, peer: Peer, message: m.HostJoined, now: float, out: list[Instruction]) -> None:
        if peer.host is not None:
            self._refuse(peer, "ProtocolError", "a worker joins one island, once", now, out)
            return
        peer.host = self.cluster.join(peer.key, message, now, out)
        if peer.host is None:
            self.peers.closed(peer.key, "refused", now, out)

    def _executor_exited(self, peer: Peer, message: m.ExecutorExited, now: float, out: list[Instruction]) -> None:
        if peer.host is not None:
            self.cluster.executor_exited(peer.host, message.incarnation, message.cause, now, out)

    def _executor_paused(self, peer: Peer, message: m.ExecutorPaused, now: float, out: list[Instruction]) -> None:
        if peer.host is not None:
            key = self.cluster.executor_paused(peer.host, message.incarnation, message.paused, now)
            executor = self.peers.get(key) if key is not None else None
            if executor is not None:
                executor.vouched = message.paused
                executor.last_heard = now

    def _executor_ready(self, peer: Peer, message: m.ExecutorReady, now: float, out: list[Instruction]) -> None:
        if peer.executor is not None:
            self._refuse(peer, "ProtocolError", "an executor is ready once", now, out)
            return
        message = msgspec.structs.replace(message, peer_address=endpoint(message.peer_address, peer.public_key))
        if self.cluster.executor_ready(peer.key, message, now, out):
            peer.executor = (message.island, message.incarnation, message.host_index)
        else:
            self.peers.closed(peer.key, "refused", now, out)

    def _executor_report(self, peer: Peer, message: m.ExecutorReport, now: float, out: list[Instruction]) -> None:
        if peer.lane is None or peer.executor is None:
            return
        island, _, host = peer.executor
        self.cluster.islands[island].damaged_transfers += max(0, message.damaged_transfers - peer.damaged_transfers)
        peer.damaged_transfers = message.damaged_transfers
        if host == 0:
            peer.lane.report = message
            self.clients.accounts.reported(peer.lane, message.bytes_by_session)
            self.admin.move_idle(self.cluster.islands[island], now, out)

    def _parts_finished(self, peer: Peer, message: m.PartsFinished, now: float, out: list[Instruction]) -> None:
        if peer.lane is not None:
            self.clients.parts_finished(peer.lane, message, now, out)

    def _parts_late(self, peer: Peer, message: m.PartsLate, now: float, out: list[Instruction]) -> None:
        if peer.lane is not None:
            self.clients.lanes.parts_late(peer.lane, message.parts, out)

    def _part_failed(self, peer: Peer, message: m.PartFailed, now: float, out: list[Instruction]) -> None:
        if peer.lane is not None:
            part = (message.session, message.run)
            self.clients.lanes.part_failed(peer.lane, part, message.error, now, out)

    def _decided(self, peer: Peer, message: m.Decided, now: float, out: list[Instruction]) -> None:
        if peer.lane is not None:
            self.clients.decided(message, now, out)

    def _part_refused(self, peer: Peer, message: m.PartRefused, now: float, out: list[Instruction]) -> None:
        if peer.lane is not None:
            self.clients.part_refused(peer.lane, message, now, out)

    def _computations_compiled(
        self, peer: Peer, message: m.ComputationsCompiled, now: float, out: list[Instruction]
    ) -> None:
        if peer.lane is not None:
            self.clients.memory.compiled(peer.lane, message, now, out)

    # -- islands (called by `Cluster`) -------------------------------------------------------------------------------

    def island_formed(self, island: Island, lane: Lane, now: float, out: list[Instruction]) -> None:
        self._set_lane(lane, lane)
        self.clients.plans.send_directory(lane, out)
        self._tell_directory(m.DirectoryChange(formed=(island.entry,)), out)
        self.clients.island_formed(island, lane, now, out)

    def island_lost(self, lane: Lane, error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        self._set_lane(lane, None)
        self.clients.island_lost(lane, error, now, out)
        self._tell_directory(m.DirectoryChange(gone=(lane.island,)), out)

    def island_changed(self, island: Island, now: float, out: list[Instruction]) -> None:
        self.clients.bind_waiting(now, out, island.name)

    def _set_lane(self, lane: Lane, value: Lane | None) -> None:
        for key in lane.hosts:
            peer = self.peers.get(key)
            if peer is not None:
                peer.lane = value

    def _tell_directory(self, change: m.DirectoryChange, out: list[Instruction]) -> None:
        self._everybody = None
        for peer in self.peers.of_role("client"):
            out.append(Send(peer.key, change))

    def _directory(self) -> m.Directory:
        if self._everybody is None:
            islands = self.cluster.islands.values()
            self._everybody = m.Directory(tuple(island.entry for island in islands if island.lane is not None))
        return self._everybody

    # -- the end ----------------------------------------------------------------------------------------------------

    def _drain(self, event: Drain, now: float, out: list[Instruction]) -> None:
        self._stop_workers = event.stop_workers
        if self.clients.ending:
            return
        self.clients.ending = "it is shutting down"
        self.cluster.draining = True
        self.clients.refuse_waiting(now, out)

        def too_long(now: float, out: list[Instruction]) -> None:
            self._stop(f"{self.clients.lanes.active} runs were not over after {event.deadline_s:g} s", out)

        self.timers.at(now + event.deadline_s, too_long)

    def _stop(self, reason: str, out: list[Instruction]) -> None:
        if self.stopped:
            return
        self.stopped = True
        if self._stop_workers:
            self.cluster.stop_all(out)
        out += [Send(key, m.Goodbye(f"the scheduler has stopped: {reason}")) for key in self.peers]
        out.append(Stop(reason))

    # -- for people and tests ---------------------------------------------------------------------------------------

    def status(self, now: float) -> dict[str, Any]:
        """What there is and what happens, as plain data for JSON (docs/cli.md)."""
        return status.status(self, now)

    def waits(self, now: float) -> list[Wait]:
        """Everything that waits, with its reason (O-8)."""
        return status.waits(self, now)
