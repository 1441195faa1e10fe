"""Slices: which devices of which island a session's slice is bound to. Pure.

Invariants
  V-1  A device that an exclusive slice holds is held by no other slice.
  V-2  A slice keeps its island and devices while the island is lost; it is bound to the next incarnation as it was.
  V-3  A slice that cannot be bound is refused, or waits, and either has a reason that says what there is and who holds
       it.
  V-4  What slices were promised of a device's memory is together no more than it has, where that is known. Memory that
       a session was promised, and does not use, is given to no other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pathway.dataflow.memory import size as size_text
from pathway.sched.cluster import Cluster, Island, State
from pathway.sched.ledger import Charge, Ledger
from pathway.transport.messages import RequestSlice

LISTED = 12
"""Islands that a reason names: a reader wants some, and a large cluster has thousands."""


@dataclass(eq=False, slots=True)
class Slice:
    session: int
    session_name: str
    request: RequestSlice
    since: float
    island: str = ""  # "" while it waits
    devices: tuple[int, ...] = ()
    reason: str = ""  # why it waits
    promise: tuple[Ledger, Charge] | None = None  # of the memory that it was asked for with

    @property
    def who(self) -> str:
        return f"slice {self.request.slice} of session {self.session_name}"


@dataclass(frozen=True, slots=True)
class Refusal:
    """`final`: waiting would not help."""

    reason: str
    final: bool


@dataclass(eq=False, slots=True)
class SliceBinder:
    """`holders[island][device]` are the slices on a device, for devices that have any."""

    cluster: Cluster
    holders: dict[str, dict[int, list[Slice]]] = field(default_factory=dict)

    def bind(self, wanted: Slice, now: float, grace: bool = False) -> Refusal | None:
        """Bind a slice to devices, or say why not. `grace`: the cluster is young, and islands may still come."""
        request = wanted.request
        islands = self.cluster.islands
        named = islands.get(request.island)
        among = islands.values() if not request.island else () if named is None else (named,)
        fitting = [island for island in among if _fits(island, request)]
        if not fitting:
            return Refusal(self._what_there_is(request), final=not grace)
        best: tuple[tuple[bool, float, str], Island, tuple[int, ...]] | None = None
        for island in fitting:
            if island.state is not State.FORMED or island.drained:
                continue
            held = self.holders.get(island.name, {})
            devices = self._choose(island, request)
            if devices:
                load = sum(map(len, held.values())) / island.devices
                score = (island.name in request.avoid, load, island.name)
                if best is None or score < best[0]:
                    best = (score, island, devices)
        if best is not None:
            self.hold(wanted, best[1].name, best[2])
            return None
        coming = [island for island in fitting if island.state is not State.FORMED and not island.drained]
        if coming:
            reasons = [f"island {island.name} {island.reason(now)}" for island in coming[:LISTED]]
            return Refusal(_listed(reasons, len(coming), "; "), final=False)
        drained = [island.name for island in fitting if island.drained]
        if drained:
            return Refusal(
                f"{self._who_holds(request, fitting)}; drained: {_listed(drained[:LISTED], len(drained))}",
                final=not request.wait,
            )
        blocking = {
            holder for island in fitting for holders in self.holders.get(island.name, {}).values() for holder in holders
        }
        own = all(holder.session == wanted.session for holder in blocking)
        return Refusal(self._who_holds(request, fitting), final=own or not request.wait)

    def hold(self, bound: Slice, island: str, devices: tuple[int, ...]) -> None:
        bound.island, bound.devices, bound.reason = island, devices, ""
        held = self.holders.setdefault(island, {})
        for device in devices:
            held.setdefault(device, []).append(bound)
        self.promise(bound)

    def promise(self, bound: Slice) -> None:
        """Keep the memory that the slice was asked for with, on the island as it is now (V-4)."""
        lane = self.cluster.islands[bound.island].lane
        bound.promise = None
        if bound.request.memory_bytes and lane is not None and lane.ledger is not None:
            bound.promise = lane.ledger, Charge(((bound.devices, bound.request.memory_bytes),))
            lane.ledger.promise(bound.session, bound.promise[1])

    def release(self, bound: Slice) -> None:
        if bound.promise is not None:
            ledger, charge = bound.promise
            ledger.take_back(bound.session, charge)
            bound.promise = None
        held = self.holders.get(bound.island, {})
        for device in bound.devices:
            held[device].remove(bound)
            if not held[device]:
                del held[device]
        bound.island, bound.devices = "", ()

    def still_fits(self, bound: Slice, island: Island) -> bool:
        """After all its hosts were replaced, an island may have another shape."""
        return _fits(island, bound.request) and max(bound.devices) < island.devices

    def _choose(self, island: Island, request: RequestSlice) -> tuple[int, ...]:
        """The devices of an island that a slice could have. A shared slice, too, takes devices of its own if it can."""
        held = self.holders.get(island.name, {})
        if island.devices - len(held) >= request.devices:
            free = [device for device in range(island.devices) if device not in held]
        elif request.shared:
            free = [
                device
                for device in range(island.devices)
                if all(holder.request.shared for holder in held.get(device, ()))
            ]
            if request.memory_bytes and island.memory_bytes:  # V-4
                promised = {
                    device: sum(holder.request.memory_bytes for holder in held.get(device, ())) for device in free
                }
                free = [device for device in free if promised[device] + request.memory_bytes <= island.memory_bytes]
        else:
            return ()
        return choose_devices(request.devices, island, free)

    def _what_there_is(self, request: RequestSlice) -> str:
        islands = [island for island in self.cluster.islands.values() if island.hosts]
        asked = f"{request.devices} devices"
        if request.platform:
            asked += f" of platform {request.platform!r}"
        if request.memory_bytes:
            asked += f" with {size_text(request.memory_bytes)} of memory each"
        if request.island:
            asked += f" on island {request.island!r}"
        if not islands:
            return f"{asked}: no host has joined the cluster; start one with `pathway worker`"
        there = [f"{island.name} ({_described(island)})" for island in islands[:LISTED]]
        return f"{asked}: no island can ever have them; there are: {_listed(there, len(islands))}"

    def _who_holds(self, request: RequestSlice, fitting: Sequence[Island]) -> str:
        lines = []
        for island in fitting[:LISTED]:
            holders: dict[Slice, int] = {}
            for slices in self.holders.get(island.name, {}).values():
                for holder in slices:
                    holders[holder] = holders.get(holder, 0) + 1
            who = ", ".join(f"{holder.who} holds {count}{_promised(holder)}" for holder, count in holders.items())
            lines.append(f"island {island.name} has {island.devices} devices: {who or 'none is held'}")
        sharing = (
            "the others' slices are not shared"
            if request.shared
            else "slices share devices only if all of them are asked for with shared=True"
        )
        memory = f" with {size_text(request.memory_bytes)} of memory promised to nobody" if request.memory_bytes else ""
        return f"{request.devices} free devices{memory}: " + _listed(lines, len(fitting), "; ") + f" ({sharing})"

    def validate(self) -> None:
        """Assert V-1. For tests."""
        for held in self.holders.values():
            for device, holders in held.items():
                assert holders
                assert len(holders) == 1 or all(holder.request.shared for holder in holders), "V-1"
                assert all(device in holder.devices for holder in holders)


def why_invalid(request: RequestSlice) -> str:
    """What makes the request itself impossible ("" if nothing)."""
    size = math.prod(size for _, size in request.mesh)
    if request.devices < 1:
        return f"a slice of {request.devices} devices"
    if request.mesh and size != request.devices:
        axes = ", ".join(f"{axis}={size}" for axis, size in request.mesh)
        return f"the mesh ({axes}) has {size} places, the slice {request.devices} devices"
    return ""


def choose_devices(count: int, island: Island, free: list[int]) -> tuple[int, ...]:
    """`count` of the free devices, () if there are not as many. Neighbours are best: a block within the host that has
    the fewest left, or, for more than a host has, one that begins with a host; else any block, else any devices."""
    if len(free) < count:
        return ()
    per_host = island.devices_per_host
    available = set(free)
    if count < per_host:
        by_host: dict[int, list[int]] = {}
        for device in free:
            by_host.setdefault(device // per_host, []).append(device)
        for host in sorted(by_host, key=lambda host: (len(by_host[host]), host)):
            first = host * per_host
            starts = sorted(
                range(first, first + per_host - count + 1), key=lambda start: ((start - first) % count, start)
            )
            for start in starts:
                if all(device in available for device in range(start, start + count)):
                    return tuple(range(start, start + count))
    starts = sorted(range(island.devices - count + 1), key=lambda start: (start % per_host, start))
    for start in starts:
        if all(device in available for device in range(start, start + count)):
            return tuple(range(start, start + count))
    return tuple(free[:count])


def _listed(shown: Sequence[str], count: int, separator: str = ", ") -> str:
    """So many of `count` things."""
    more = [f"{count - len(shown):,} more"] if count > len(shown) else []
    return separator.join([*shown, *more])


def _described(island: Island) -> str:
    memory = f" of {size_text(island.memory_bytes)}" if island.memory_bytes else ""
    return f"{island.devices} {island.platform} devices{memory}"


def _promised(holder: Slice) -> str:
    return f" with {size_text(holder.request.memory_bytes)} each" if holder.request.memory_bytes else ""


def _fits(island: Island, request: RequestSlice) -> bool:
    """The island could hold the slice, now or when its hosts are back."""
    return (
        (bool(island.hosts) or island.incarnation > 0)
        and island.devices >= request.devices
        and request.island in ("", island.name)
        and request.platform in ("", island.platform)
        and (not island.memory_bytes or request.memory_bytes <= island.memory_bytes)
    )
