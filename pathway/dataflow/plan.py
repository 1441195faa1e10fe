"""The plan: a graph lowered onto bound slices. For each island, gangs of steps in order. Plain data.

Words. A *part* is what one plan has to do on one island; a *gang* is a stretch of a part that starts as one on all the
island's hosts: its steps need nothing from elsewhere but what the gang waits for at its beginning (design, section 6).
A *slot* is a part's name for a value within one run. An *edge* moves one value from a part to a part: between islands,
or between two device sets of the same island.

Invariants
  D-1  Every slot is written once: by an argument, an edge or an Execute; and read only after.
  D-2  A gang waits exactly for the edges whose target slots its own steps are the first of its part to read.
  D-3  Every slot is freed exactly once, by the last step that reads it, unless it is a result; a result is never freed.
  D-4  Gangs are in an order that some execution of all parts together can follow without waiting for itself.
"""

from __future__ import annotations

from msgspec import Struct

from pathway.dataflow.layout import Layout


class Execute(Struct, frozen=True, array_like=True, tag=1):
    """Run a compiled computation on `devices` (island indices, in mesh order). `frees` are slots dropped afterwards."""

    node: int  # the graph's node: names[node] and sources[node] in the part tell the user what and where
    computation: str  # content hash
    devices: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donates: tuple[int, ...] = ()  # positions in inputs whose buffers the computation takes
    frees: tuple[int, ...] = ()


class Send(Struct, frozen=True, array_like=True, tag=2):
    """Start pushing the slot's shards along an edge as soon as they are computed."""

    slot: int
    edge: int
    frees: tuple[int, ...] = ()


Step = Execute | Send


class Gang(Struct, frozen=True, array_like=True):
    """Steps that start together, in this order, on every host of the island.

    `waits`: edges that must have arrived on all hosts that need them. `arguments`: the part's argument slots that this
    gang is the first to read. `after`: earlier gangs of this part that must have been given their place first (a
    schedule that is strict about its order lists the previous gang here; otherwise gangs may overtake).
    """

    steps: tuple[Step, ...]
    waits: tuple[int, ...] = ()
    arguments: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


class Edge(Struct, frozen=True, array_like=True):
    """One value's way from a slot of one part to a slot of another. `index` is unique within the plan."""

    index: int
    source_island: str
    target_island: str
    source_slot: int
    target_slot: int
    source: Layout
    target: Layout


class Part(Struct, frozen=True, array_like=True):
    """All that one island needs to know of a plan. `arguments` and `results` are slots; the k-th argument slot takes
    the k-th entry that the run's message brings for this part, and `results[k]` = (result number, slot)."""

    plan_name: str
    island: str
    platform: str  # the platform the computations are lowered for
    slots: tuple[Layout, ...]
    arguments: tuple[int, ...]
    results: tuple[tuple[int, int], ...]
    gangs: tuple[Gang, ...]
    edges_in: tuple[Edge, ...] = ()
    edges_out: tuple[Edge, ...] = ()
    names: tuple[str, ...] = ()  # by node index of the whole graph
    sources: tuple[str, ...] = ()  # "file.py:12 in step", by node index
    slices: tuple[int, ...] = ()  # the slice of each node
    decisions: tuple[int, ...] = ()  # numbers of the results whose values the scheduler is told (see script)


class Argument(Struct, frozen=True, array_like=True):
    """How one flattened argument of a program reaches its parts. `entries`: (part index, position in that part's
    arguments). `inline`: the value rides in the run's message (small host arrays); if not, it is a resident buffer."""

    layout: Layout
    entries: tuple[tuple[int, int], ...]
    inline: bool = False


class Result(Struct, frozen=True, array_like=True):
    """One flattened output of a program: result number `number` of the run on `part`, or, where `argument` >= 0, that
    argument itself handed back."""

    layout: Layout
    slice: int
    part: int = -1
    number: int = -1
    argument: int = -1


class Plan(Struct, frozen=True, array_like=True):
    """The whole plan, as the client keeps it. `donated` are flattened argument numbers. `cost_bytes` is what the edges
    move between devices, each element counted once per destination host."""

    name: str
    parts: tuple[Part, ...]
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    result_count: int  # results that are computed: buffers first_result .. first_result + result_count - 1
    donated: tuple[int, ...] = ()
    computations: tuple[str, ...] = ()  # content hashes, all parts
    cost_bytes: int = 0
