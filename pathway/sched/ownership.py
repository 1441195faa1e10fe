"""What a session may reach: the devices of its own slices, and nothing else. Pure.

A plan's part and a buffer's layout name devices by their number within an island, and clients write them. So the
scheduler reads what a part reaches, once, when its plan is registered: executors then need to know of nobody's slices.

Invariants
  A-1  Every device that a plan names, in steps, values and edges, belongs to a slice that its session holds now, and
       every island that its edges name has a part of that plan.
  A-2  When a slice is released, plans that reach devices which the session no longer holds take no new runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from pathway.dataflow.layout import Layout
from pathway.dataflow.plan import Execute, Part
from pathway.dataflow.wellformed import check_layout, check_parts
from pathway.errors import PermissionDeniedError, ProtocolError
from pathway.transport.messages import PartPayload

Reach = Mapping[str, frozenset[int]]
"""Devices by island."""

_decoder = msgspec.msgpack.Decoder(Part)


def reach_of_plan(parts: Iterable[PartPayload]) -> Reach:
    """The devices that a plan names. Raises `ProtocolError` for parts that are none, or do not fit one another."""
    parts = tuple(parts)
    decoded: list[Part] = []
    islands = {part.island for part in parts}
    reach: dict[str, set[int]] = {island: set() for island in islands}
    for payload in parts:
        try:
            part = _decoder.decode(payload.payload)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(f"the part on island {payload.island} is not well-formed: {error}") from None
        if part.island != payload.island:
            raise ProtocolError(f"the part on island {payload.island} says that it is for {part.island}")
        decoded.append(part)
        for island, devices in _named(part):
            if island not in reach:
                raise ProtocolError(f"an edge leads to island {island}, on which the plan has no part")
            reach[island].update(devices)
    check_parts(decoded)
    return {island: frozenset(devices) for island, devices in reach.items()}


def check_buffer(what: str, island: str, layout: Layout, held: Reach) -> None:
    """Raise `ProtocolError` for a layout that is none, `PermissionDeniedError` for one on devices that are not
    `held`."""
    check_layout(layout)
    check_reach({island: frozenset(layout.devices)}, held, what)


def _named(part: Part) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Every group of devices in a part, with its island. Few groups are distinct, so they are met once each."""
    groups = {(part.island, slot.devices) for slot in part.slots}
    for gang in part.gangs:
        groups |= {(part.island, step.devices) for step in gang.steps if isinstance(step, Execute)}
    for edge in (*part.edges_in, *part.edges_out):
        groups.add((edge.source_island, edge.source.devices))
        groups.add((edge.target_island, edge.target.devices))
    return groups


def within(reach: Reach, held: Reach) -> bool:
    """Whether all of `reach` is held."""
    return all(island in held and devices <= held[island] for island, devices in reach.items())


def check_reach(reach: Reach, held: Reach, what: str) -> None:
    """Raise `PermissionDeniedError` where `what` reaches a device that is not `held` (A-1)."""
    for island, devices in reach.items():
        foreign = sorted(devices - held.get(island, frozenset()))
        if foreign or island not in held:
            those = f"device {foreign[0]} of island {island}" if foreign else f"island {island}"
            raise PermissionDeniedError(f"{what} names {those}, which no slice of this session has")
