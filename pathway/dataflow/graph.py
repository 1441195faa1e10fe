"""The graph: what a program computes and where, before it is known which devices its slices are bound to.

One node per computation, whatever the number of shards (paper, section 4.3). Graph, nodes and values are frozen; passes
(place, fuse, schedule) take a graph and return another. Values are numbered within the graph; a value is written by one
node, or is an argument, or a constant.

Invariants
  G-1  Nodes are in a topological order: a node reads only arguments, constants and outputs of nodes before it.
  G-2  A value has one home: a slice and a sharding over that slice's mesh. A node writes values of its own slice only.
  G-3  A node that reads a value of its own slice takes it in the value's sharding; of another slice, in the sharding it
       wants: `in_shardings` says which. The difference is a transfer, which the planner inserts.
  G-4  The number of nodes does not depend on the number of devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pathway.dataflow.layout import Aval, Sharding


@dataclass(frozen=True)
class SliceShape:
    """What a graph knows of a slice: its mesh axes with their sizes, in order, and its platform."""

    slice: int
    mesh: tuple[tuple[str, int], ...]
    platform: str = "cpu"


@dataclass(frozen=True)
class BoundSlice:
    """A slice on devices: `devices` are island indices in mesh order, `devices_per_host` tells hosts apart."""

    slice: int
    island: str
    incarnation: int
    devices: tuple[int, ...]
    devices_per_host: int
    mesh: tuple[tuple[str, int], ...]
    platform: str = "cpu"


@dataclass(frozen=True)
class Value:
    """A logical array: bookkept as one thing however many shards it has."""

    index: int
    aval: Aval
    slice: int
    sharding: Sharding


@dataclass(frozen=True)
class Node:
    """One computation on one slice. `jaxpr` is its body (a `jax.extend.core.ClosedJaxpr` without constants that are
    arrays above 1 KiB), compared by identity. `source` is the user's line. `placed`: it came from a `pathway.jit`."""

    index: int
    name: str
    slice: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    in_shardings: tuple[Sharding, ...]
    out_shardings: tuple[Sharding, ...]
    jaxpr: Any = field(repr=False)
    source: str = ""
    placed: bool = True
    donates: tuple[int, ...] = ()
    reason: str = ""  # why it is on this slice: printed by as_text()
    backward: bool = False  # it computes cotangents: schedules and drawings tell the passes apart by it


@dataclass(frozen=True)
class GraphArgument:
    """One flattened argument. `resident`: it is already an array on `value`'s slice in `value`'s sharding; otherwise it
    is a host array, which takes the home that its first reader wants. `donated`: the caller gives it up."""

    value: int
    resident: bool
    donated: bool = False


@dataclass(frozen=True)
class GraphResult:
    """One flattened output: a value, which may be an argument's."""

    value: int


@dataclass(frozen=True)
class Graph:
    """A whole program. `constants` map a value to the closed-over host array it stands for, sent once, by content; they
    follow the arguments in the plan. `references` map a value to the handle of a closed-over pathway Array."""

    name: str
    slices: Mapping[int, SliceShape]
    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    arguments: tuple[GraphArgument, ...]
    results: tuple[GraphResult, ...]
    constants: tuple[tuple[int, Any], ...] = ()
    references: tuple[tuple[int, Any], ...] = ()

    def __hash__(self) -> int:
        """Mappings and arrays have no hash; what is left tells graphs apart."""
        return hash((self.name, self.values, self.nodes, self.arguments, self.results))
