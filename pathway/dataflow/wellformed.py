"""Whether what a client sent can be what it says it is: layouts and parts, before anybody works with them. Pure.

Messages are decoded strictly, so every field has its type; what the types do not say is said here. Whoever gets past
this can still ask for nonsense, which then fails as its own run: it cannot make an executor look for a slot, a gang or
a mesh axis that is not there, nor reserve more bytes than any machine has.
`check` says whether a plan is *right* (D-1 to D-4); this, whether it is safe to look at, at a fraction of the cost.

Invariants
  W-1  A layout has as many devices, each once, as its mesh has places; it splits each dimension along axes that the
       mesh has, each once; its dtype is one that arrays have; and its bytes can be counted.
  W-2  Every slot, edge, gang and position that a part names is there; a gang comes after gangs before it; what comes in
       or goes out (arguments, results, edges) has a number once.
  W-3  Both parts of an edge say the same of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import ml_dtypes
import numpy as np

from pathway.dataflow.layout import KEY_WORDS, Layout, numpy_dtype
from pathway.dataflow.plan import Edge, Execute, Part
from pathway.errors import ProtocolError

MOST_BYTES = 1 << 50
"""Of one array."""

MOST_AXES = 64
"""Of a mesh. NumPy arrays have as many dimensions at most."""

_PLAIN = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "float0"),
)
INTEGERS = frozenset(name for name in _PLAIN if name.startswith(("int", "uint")))

DTYPES = frozenset(
    (
        *_PLAIN,
        *KEY_WORDS,
        *(
            name
            for name in dir(ml_dtypes)
            if isinstance(kind := getattr(ml_dtypes, name), type) and issubclass(kind, np.generic)
        ),
    )
)
"""The names of all dtypes that an array can have."""


@lru_cache(maxsize=4096)
def check_layout(layout: Layout) -> None:
    """Raise `ProtocolError` unless W-1 holds."""
    aval, sharding = layout.aval, layout.sharding
    if aval.dtype not in DTYPES:
        raise ProtocolError(f"there is no dtype {aval.dtype!r}")
    shape, mesh = aval.shape, sharding.mesh
    if len(shape) > MOST_AXES or len(mesh) > MOST_AXES:
        raise ProtocolError(f"an array of rank {len(shape)} over a mesh of {len(mesh)} axes: {MOST_AXES} are the most")
    if any(extent < 0 for extent in shape) or math.prod(extent or 1 for extent in shape) > MOST_BYTES:
        raise ProtocolError(f"an array of shape {shape} cannot be")
    if math.prod(max(1, extent) for extent in shape) * numpy_dtype(aval.physical.dtype).itemsize > MOST_BYTES:
        raise ProtocolError(f"an array of {aval.physical.nbytes:,} bytes cannot be")
    sizes = sharding.axis_sizes
    if len(sizes) != len(mesh) or any(size < 1 for size in sizes.values()):
        raise ProtocolError(f"the mesh {mesh} is none")
    if len(layout.devices) != sharding.device_count or len(set(layout.devices)) != len(layout.devices):
        raise ProtocolError(f"{len(layout.devices)} devices for a mesh of {sharding.device_count} places")
    axes = [axis for names in sharding.spec for axis in names]
    if len(sharding.spec) > len(shape) or len(set(axes)) != len(axes) or not sizes.keys() >= set(axes):
        raise ProtocolError(f"an array of rank {len(shape)} cannot be split as {sharding.spec} over the mesh {mesh}")


def check_parts(parts: Sequence[Part]) -> None:
    """Raise `ProtocolError` unless the parts of a plan keep W-1 to W-3."""
    outgoing: dict[int, Edge] = {}
    incoming: dict[int, Edge] = {}
    for part in parts:
        _check_part(part)
        _enter_edges(outgoing, part.edges_out)
        _enter_edges(incoming, part.edges_in)
    if outgoing != incoming:
        strange = min(number for number in outgoing | incoming if outgoing.get(number) != incoming.get(number))
        raise ProtocolError(f"the two sides of edge {strange} do not say the same")


def _enter_edges(known: dict[int, Edge], edges: Iterable[Edge]) -> None:
    for edge in edges:
        if edge.index in known:
            raise ProtocolError(f"there are two edges {edge.index}")
        known[edge.index] = edge


def _check_part(part: Part) -> None:
    for layout in part.slots:
        check_layout(layout)
    slots, gangs = len(part.slots), len(part.gangs)
    _within(part.arguments, slots, "slot")
    _within((slot for _, slot in part.results), slots, "slot")
    _once((number for number, _ in part.results), "result")
    _once((*part.arguments, *(edge.target_slot for edge in part.edges_in)), "slot that something comes into")
    if any(not 0 <= number < 1 << 32 for number, _ in part.results):
        raise ProtocolError("a result has a number that it cannot have")
    slot_of_result = dict(part.results)
    for number in part.decisions:
        aval = part.slots[slot_of_result[number]].aval if number in slot_of_result else None
        if aval is None or aval.shape or aval.dtype not in INTEGERS:
            raise ProtocolError(f"result {number} cannot decide what runs next")
    for edge in part.edges_in:
        _check_edge(edge, edge.target_island, part, edge.target_slot, edge.target)
    for edge in part.edges_out:
        _check_edge(edge, edge.source_island, part, edge.source_slot, edge.source)
    edges_in, edges_out = ({edge.index for edge in edges} for edges in (part.edges_in, part.edges_out))
    written = {*part.arguments, *(edge.target_slot for edge in part.edges_in)}
    for number, gang in enumerate(part.gangs):
        _within(gang.arguments, slots, "slot")
        _within(gang.after, number, "earlier gang")
        if not edges_in.issuperset(gang.waits):
            raise ProtocolError(f"gang {number} of {gangs} waits for an edge that does not come in")
        for step in gang.steps:
            _within(step.frees, slots, "slot")
            if not isinstance(step, Execute):
                _within((step.slot,), slots, "slot")
                if step.edge not in edges_out:
                    raise ProtocolError(f"gang {number} of {gangs} sends edge {step.edge}, which does not go out")
                continue
            _within(step.inputs, slots, "slot")
            _within(step.outputs, slots, "slot")
            _within(step.donates, len(step.inputs), "input")
            if not step.devices or len(set(step.devices)) != len(step.devices):
                raise ProtocolError(f"a step on the devices {step.devices}")
            if len(set(step.outputs)) != len(step.outputs) or not written.isdisjoint(step.outputs):
                raise ProtocolError("a slot is written twice")
            written.update(step.outputs)


def _check_edge(edge: Edge, island: str, part: Part, slot: int, layout: Layout) -> None:
    _within((slot,), len(part.slots), "slot")
    check_layout(edge.source)
    check_layout(edge.target)
    avals = {(each.aval.shape, each.aval.dtype) for each in (edge.source, edge.target, part.slots[slot], layout)}
    if island != part.island or len(avals) > 1:
        raise ProtocolError(f"edge {edge.index} does not fit slot {slot} of the part on island {part.island}")


def _within(numbers: Iterable[int], count: int, what: str) -> None:
    for number in numbers:
        if not 0 <= number < count:
            raise ProtocolError(f"there is no {what} {number}: there are {count}")


def _once(numbers: Iterable[int], what: str) -> None:
    seen: set[int] = set()
    for number in numbers:
        if number in seen:
            raise ProtocolError(f"{what} {number} is there twice")
        seen.add(number)
