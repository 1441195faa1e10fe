"""Hosts and islands: who has joined, which islands are formed, and what is done when one is lost. Pure.

An island is *gathering* until all its hosts are there, *forming* from the order to start executors until all of them
are ready, *formed* until one of its hosts or executors is lost, *stopping* until every host has said that its executor
is gone, and perhaps *resting* before it is formed again. One that is lost again and again is *given up*: it is drained,
and not formed until an administrator takes it into use again.

Invariants
  C-1  At most one incarnation of an island exists: it is formed again only after every host has ended the last one.
  C-2  Incarnations only grow, whatever hosts come and go. With a journal this outlives the scheduler: that an island is
       in an incarnation is remembered before its hosts are told to form it.
  C-3  The hosts of an island agree on size, devices and platform; who does not is refused.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from pathway.errors import ErrorInfo
from pathway.sched.events import Close, Instruction, PeerKey, Record, Send
from pathway.sched.lanes import Lane
from pathway.sched.timers import Timers
from pathway.transport.messages import (
    ExecutorReady,
    FormIsland,
    HostJoined,
    IslandEntry,
    Refused,
    StopExecutor,
)

ISLAND_RECORD = "island"

MOST_HOSTS, MOST_DEVICES = 65_536, 4_096
"""Of an island, and of a host: what is announced costs its sender nothing, and the scheduler a list of so many."""


class IslandRecord(msgspec.Struct, frozen=True):
    """What is remembered of an island across the scheduler's death."""

    incarnation: int
    drained: bool = False


class State(enum.Enum):
    GATHERING = "gathering"
    FORMING = "forming"
    FORMED = "formed"
    STOPPING = "stopping"
    RESTING = "resting"
    GIVEN_UP = "given up"


@dataclass(eq=False, slots=True)
class Host:
    """A worker that has joined. `child`: the incarnation whose executor may be running there (0: none).
    `paused_since`: when that was stopped, if it is."""

    peer: PeerKey
    joined: HostJoined
    child: int = 0
    paused_since: float | None = None


@dataclass(eq=False, slots=True)
class Island:
    name: str
    size: int
    devices_per_host: int
    platform: str
    since: float
    state: State = State.GATHERING
    incarnation: int = 0
    hosts: dict[int, Host] = field(default_factory=dict)
    executors: dict[int, tuple[PeerKey, ExecutorReady]] = field(default_factory=dict)
    lane: Lane | None = None
    cause: str = ""  # why it was lost last
    losses: int = 0  # in a row, without a long life between them
    rests_until: float = 0.0
    damaged_transfers: int = 0  # that its hosts have received, in all
    drained: bool = False  # by an administrator: no slice is bound to it
    _entry: IslandEntry | None = None  # of the incarnation that is formed

    @property
    def devices(self) -> int:
        return self.size * self.devices_per_host

    @property
    def memory_bytes(self) -> int:
        """What each of its devices has for programs; 0 where that is not known, or it is not formed."""
        return min((ready.memory_bytes for _, ready in self.executors.values()), default=0)

    @property
    def entry(self) -> IslandEntry:
        if self._entry is not None and self._entry.incarnation == self.incarnation:
            return self._entry
        executors = [self.executors[index][1] for index in range(self.size)]
        self._entry = IslandEntry(
            island=self.name,
            incarnation=self.incarnation,
            platform=self.platform,
            devices_per_host=self.devices_per_host,
            hosts=tuple(ready.peer_address for ready in executors),
            device_kind=executors[0].device_kind,
            transfer=executors[0].transfer,
        )
        return self._entry

    def record(self, then: tuple[Send, ...] = ()) -> Record:
        """What is to be remembered of it."""
        value = msgspec.msgpack.encode(IslandRecord(self.incarnation, self.drained))
        return Record(ISLAND_RECORD, self.name, value, then)

    @property
    def missing(self) -> list[int]:
        return [index for index in range(self.size) if index not in self.hosts]

    def reason(self, now: float) -> str:
        """Why it is not formed, for people ("" if it is)."""
        if self.state is State.FORMED:
            return ""
        again = f" (it was lost: {self.cause})" if self.cause else ""
        if self.state is State.GATHERING:
            return f"waits for host {_listed(self.missing)} of {self.size} to join{again}"
        if self.state is State.FORMING:
            late = [index for index in range(self.size) if index not in self.executors]
            return f"waits for the executor of host {_listed(late)} to be ready{again}"
        if self.state is State.STOPPING:
            late = [index for index, host in self.hosts.items() if host.child]
            return f"waits for host {_listed(late)} to end its executor{again}"
        if self.state is State.GIVEN_UP:
            return (
                f"given up and drained after {self.losses} losses in a row{again}: `pathway undrain {self.name}` tries "
                "again"
            )
        return f"rests for {max(0.0, self.rests_until - now):.1f} s after {self.losses} losses in a row{again}"


class Watcher(Protocol):
    """What the rest of the scheduler does when islands come and go."""

    def island_formed(self, island: Island, lane: Lane, now: float, out: list[Instruction]) -> None: ...

    def island_lost(self, lane: Lane, error: ErrorInfo, now: float, out: list[Instruction]) -> None: ...

    def island_changed(self, island: Island, now: float, out: list[Instruction]) -> None: ...


@dataclass(frozen=True)
class ClusterSettings:
    """`form_timeout_s`: how long executors may take until they are ready. After several losses in a row an island rests
    before it is formed again: not at all after the first, then `rest_s`, twice that, ..., at most `longest_rest_s`.
    After `most_losses` in a row it is given up. A life of `long_life_s` clears the count."""

    form_timeout_s: float = 300.0
    rest_s: float = 1.0
    longest_rest_s: float = 60.0
    long_life_s: float = 60.0
    most_losses: int = 8


class Cluster:
    def __init__(
        self,
        settings: ClusterSettings,
        timers: Timers,
        watcher: Watcher,
        remembered: Mapping[str, IslandRecord] | None = None,
    ) -> None:
        self.islands: dict[str, Island] = {}
        self._remembered = dict(remembered or {})
        self.draining = False
        self._settings = settings
        self._timers = timers
        self._watcher = watcher

    def lane(self, island: str, incarnation: int) -> Lane | None:
        """The lane of this incarnation, if it is the formed one."""
        found = self.islands.get(island)
        if found is None or found.lane is None or found.incarnation != incarnation:
            return None
        return found.lane

    # -- hosts ------------------------------------------------------------------------------------------------------

    def join(self, peer: PeerKey, joined: HostJoined, now: float, out: list[Instruction]) -> Host | None:
        """The host takes its place in its island, or is refused (C-3)."""
        island = self.islands.get(joined.island)
        reason = _why_not(island, joined)
        if reason:
            out.append(Close(peer, Refused("ConfigError", reason)))
            return None
        if island is None:
            island = Island(joined.island, joined.hosts, joined.devices, joined.platform, since=now)
            before = self._remembered.get(joined.island)
            if before is not None:
                island.incarnation, island.drained = before.incarnation, before.drained
            self.islands[joined.island] = island
        elif not island.hosts:
            island.size, island.devices_per_host = joined.hosts, joined.devices
            island.platform = joined.platform
        host = Host(peer, joined)
        island.hosts[joined.host_index] = host
        self._go_on(island, now, out)
        self._watcher.island_changed(island, now, out)
        return host

    def host_lost(self, host: Host, cause: str, now: float, out: list[Instruction]) -> None:
        island = self.islands[host.joined.island]
        if island.hosts.get(host.joined.host_index) is not host:
            return
        del island.hosts[host.joined.host_index]
        self.lose(island, f"host {host.joined.host_index} ({host.joined.hostname}): {cause}", now, out)
        self._go_on(island, now, out)
        self._watcher.island_changed(island, now, out)

    # -- executors --------------------------------------------------------------------------------------------------

    def executor_ready(self, peer: PeerKey, ready: ExecutorReady, now: float, out: list[Instruction]) -> bool:
        island = self.islands.get(ready.island)
        if island is None or island.state is not State.FORMING or island.incarnation != ready.incarnation:
            reason = f"island {ready.island!r} is not forming incarnation {ready.incarnation}"
        elif ready.host_index not in island.hosts or ready.host_index in island.executors:
            reason = f"island {ready.island!r} expects no executor for host {ready.host_index}"
        elif ready.devices != island.devices_per_host:
            reason = f"the executor found {ready.devices} devices, its worker announced {island.devices_per_host}"
            out.append(Close(peer, Refused("ConfigError", reason)))
            self.lose(island, f"host {ready.host_index}: {reason}", now, out)
            return False
        else:
            island.executors[ready.host_index] = (peer, ready)
            if len(island.executors) == island.size:
                island.state, island.since = State.FORMED, now
                hosts = tuple(island.executors[index][0] for index in range(island.size))
                island.lane = Lane(island.name, island.incarnation, hosts)
                self._watcher.island_formed(island, island.lane, now, out)
            return True
        out.append(Close(peer, Refused("ConfigError", reason)))
        return False

    def executor_exited(self, host: Host, incarnation: int, cause: str, now: float, out: list[Instruction]) -> None:
        island = self.islands[host.joined.island]
        if host.child != incarnation:
            return
        host.child = 0
        host.paused_since = None
        if incarnation == island.incarnation:
            self.lose(island, f"host {host.joined.host_index} ({host.joined.hostname}): {cause}", now, out)
        self._go_on(island, now, out)

    def executor_paused(self, host: Host, incarnation: int, paused: bool, now: float) -> PeerKey | None:
        """An executor is stopped, or goes on. Returns its connection, if it has one."""
        island = self.islands[host.joined.island]
        if host.child != incarnation:
            return None
        host.paused_since = now if paused else None
        executor = island.executors.get(host.joined.host_index)
        return executor[0] if executor is not None else None

    def executor_gone(self, island: str, incarnation: int, cause: str, now: float, out: list[Instruction]) -> None:
        """An executor's connection is over, and its worker has not told why."""
        found = self.islands[island]
        if found.incarnation == incarnation:
            self.lose(found, cause, now, out)

    # -- one island's life ------------------------------------------------------------------------------------------

    def lose(self, island: Island, cause: str, now: float, out: list[Instruction]) -> None:
        """End the current incarnation, on all hosts (C-1)."""
        if island.state not in (State.FORMING, State.FORMED):
            return
        settings = self._settings
        if island.state is State.FORMED and now - island.since >= settings.long_life_s:
            island.losses = 0
        island.losses += 1
        if island.losses >= settings.most_losses and not island.drained:
            island.drained = True
            out.append(island.record())
        rest_s = min(settings.rest_s * 2 ** (island.losses - 2), settings.longest_rest_s) if island.losses > 1 else 0.0
        island.rests_until = now + rest_s
        island.state, island.since, island.cause = State.STOPPING, now, cause
        lane, island.lane = island.lane, None
        island.executors.clear()
        for host in island.hosts.values():
            if host.child:
                out.append(Send(host.peer, StopExecutor(island.name, island.incarnation)))
        if lane is not None:
            error = ErrorInfo(
                "IslandLostError",
                f"island {island.name} (incarnation {island.incarnation}) was lost: {cause}",
                island=island.name,
                incarnation=island.incarnation,
            )
            self._watcher.island_lost(lane, error, now, out)
        self._go_on(island, now, out)

    def _go_on(self, island: Island, now: float, out: list[Instruction]) -> None:
        """Take the next step to the next incarnation, if nothing stands against it."""
        if island.state in (State.FORMING, State.FORMED) or self.draining:
            return
        if any(host.child for host in island.hosts.values()):
            return
        if island.missing:
            island.state = State.GATHERING
        elif island.losses >= self._settings.most_losses:
            island.state = State.GIVEN_UP
        elif now < island.rests_until:
            if island.state is not State.RESTING:
                island.state = State.RESTING
                self._timers.at(island.rests_until, lambda now, out: self._go_on(island, now, out))
        else:
            self._form(island, now, out)

    def _form(self, island: Island, now: float, out: list[Instruction]) -> None:
        island.state, island.since = State.FORMING, now
        island.incarnation += 1
        coordinator = island.hosts[0].joined.coordinator_address
        orders = []
        for index in range(island.size):
            host = island.hosts[index]
            host.child = island.incarnation
            orders.append(Send(host.peer, FormIsland(island.name, island.incarnation, coordinator, island.size, index)))
        out.append(island.record(tuple(orders)))
        incarnation = island.incarnation

        def too_late(now: float, out: list[Instruction]) -> None:
            if island.state is State.FORMING and island.incarnation == incarnation:
                self.lose(
                    island, f"not formed within {self._settings.form_timeout_s:g} s: {island.reason(now)}", now, out
                )

        self._timers.at(now + self._settings.form_timeout_s, too_late)

    def try_again(self, island: Island, now: float, out: list[Instruction]) -> None:
        """An administrator wants it back: what was is forgotten."""
        island.drained = False
        out.append(island.record())
        island.losses, island.rests_until = 0, 0.0
        self._go_on(island, now, out)

    def stop_all(self, out: list[Instruction]) -> None:
        """End every executor, for good."""
        for island in self.islands.values():
            for host in island.hosts.values():
                if host.child:
                    out.append(Send(host.peer, StopExecutor(island.name, host.child)))

    def validate(self) -> None:
        """Assert what must hold between events. For tests."""
        for island in self.islands.values():
            assert (island.lane is not None) == (island.state is State.FORMED)
            assert all(host.child in (0, island.incarnation) for host in island.hosts.values()), "C-1"
            if island.state in (State.FORMED, State.FORMING):
                assert not island.missing
                assert all(host.child for host in island.hosts.values())
            if island.state is State.FORMED:
                assert len(island.executors) == island.size
            for host in island.hosts.values():
                assert host.joined.hosts == island.size, "C-3"
                assert host.joined.devices == island.devices_per_host, "C-3"
                assert host.joined.platform == island.platform, "C-3"


def _why_not(island: Island | None, joined: HostJoined) -> str:
    """Why the host cannot join ("" if it can)."""
    who = f"host {joined.host_index} of island {joined.island!r}"
    if not joined.island:
        return "an island needs a name"
    sizes_fit = 1 <= joined.hosts <= MOST_HOSTS and 1 <= joined.devices <= MOST_DEVICES
    if not sizes_fit or not 0 <= joined.host_index < joined.hosts:
        return (
            f"{who}: {joined.hosts} hosts of {joined.devices} devices with host index {joined.host_index} make no sense"
        )
    if island is None or not island.hosts:
        return ""
    for label, mine, theirs in (
        ("hosts", joined.hosts, island.size),
        ("devices a host", joined.devices, island.devices_per_host),
        ("platform", joined.platform, island.platform),
    ):
        if mine != theirs:
            return f"{who} says {label}: {mine}, but the island's other hosts say {theirs}"
    if not island.missing:
        names = ", ".join(island.hosts[index].joined.hostname for index in sorted(island.hosts))
        return f"{who}: the island is already complete with its {island.size} hosts ({names})"
    if joined.host_index in island.hosts:
        other = island.hosts[joined.host_index].joined
        return f"{who} has already joined, from {other.hostname} (process {other.pid})"
    return ""


def _listed(indices: list[int]) -> str:
    return ", ".join(map(str, indices)) or "-"
