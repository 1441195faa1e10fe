"""A part made ready to run on this host: everything that can be known before a run is looked up once, here (O-3).

A bound gang is tuples that the launch loop walks: no names, no dictionaries, no questions. Steps without a device on
this host are left out; so are the pieces of edges that do not concern it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pathway.dataflow.layout import Layout, Region, numpy_dtype
from pathway.dataflow.memory import origins
from pathway.dataflow.plan import Edge, Execute, Gang, Part, Send
from pathway.dataflow.reshard import Piece, edge_pieces
from pathway.errors import ErrorInfo, ExecutionError
from pathway.executor.backend import Launch
from pathway.executor.gangs import PartInfo

ASSUMED_STEP_US = 8.0

LONG_US = 250.0
"""Gangs whose launch takes longer than this keep the trio thread from its work: they have a thread of their own. A
change of threads costs a tenth of it."""

Wanted = tuple[str, tuple[int, ...]]
"""What has to be compiled: (content hash, devices)."""

Step = tuple[Launch, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""(launch, input slots, output slots, slots to free)"""


@dataclass(frozen=True, slots=True)
class Host:
    """Where this process stands in its island."""

    island: str
    incarnation: int
    hosts: int
    index: int
    devices_per_host: int

    @property
    def local(self) -> range:
        return range(self.index * self.devices_per_host, (self.index + 1) * self.devices_per_host)

    @property
    def name(self) -> str:
        return f"{self.island}/{self.index}"


class OutgoingPiece(NamedTuple):
    """What a local device sends to one host. `within`: the region in coordinates of the device's shard."""

    source: int
    target_host: int
    device: int  # names the piece together with its region: the first of the receiving devices
    region: Region
    within: tuple[slice, ...]
    nbytes: int


class BoundSend(NamedTuple):
    """An edge out of this part, as far as this host sends. `copies`: the slot is donated later, so what is sent is a
    copy."""

    edge: int
    slot: int
    frees: tuple[int, ...]
    source: Layout
    target_island: str
    target_hosts: tuple[int, ...]  # all that expect something of it, to be told should it fail
    pieces: tuple[OutgoingPiece, ...]
    copies: bool


class BoundArrival(NamedTuple):
    """An edge into this part, as far as it reaches this host. `pieces[device]`: what its shard is made of, by the names
    (first receiving device, region)."""

    edge: int
    slot: int
    target: Layout
    pieces: dict[int, tuple[tuple[int, Region], ...]]
    regions: dict[int, Region]  # of each local device's shard
    expected: frozenset[tuple[int, Region]]


class BoundGang:
    """`segments`: steps, and the sends after them. `external`: the slots that the gang reads and did not write.
    `decisions`: those of its results that this host tells the scheduler. `watched`: slots that are computed only when
    all of the gang is (none: only the tokens know). `nodes[k]`: the node of the k-th launch."""

    __slots__ = (
        "cost_us", "decisions", "external", "lane", "nodes", "number", "results", "segments", "watched", "writes"
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        self.number = number
        self.segments: tuple[tuple[tuple[Step, ...], tuple[BoundSend, ...]], ...] = ()
        self.external: tuple[int, ...] = ()
        self.watched: tuple[int, ...] = ()
        self.writes: tuple[int, ...] = ()
        self.nodes: tuple[int, ...] = ()
        self.results: tuple[tuple[int, int], ...] = ()  # (index in the part's results, slot)
        self.decisions: tuple[tuple[int, int], ...] = ()  # (result number, slot)
        self.lane = 0
        self.cost_us = 0.0  # of launching it, as seen lately

    def learn_cost(self, seen_us: float) -> None:
        """One slow launch is an accident, several are a habit; one quick launch shows that it can be quick."""
        seen_us = min(seen_us, 2 * LONG_US)
        self.cost_us += (seen_us - self.cost_us) * (0.15 if seen_us > self.cost_us else 0.5)

    @property
    def sends(self) -> tuple[BoundSend, ...]:
        return tuple(send for _, sends in self.segments for send in sends)


class BoundPart:
    """A part on this host."""

    __slots__ = (
        "arguments",
        "arrivals",
        "gangs",
        "info",
        "part",
        "result_bytes",
        "result_origins",
        "results",
        "sends",
        "slot_count",
    )

    def __init__(self, part: Part, info: PartInfo) -> None:
        self.part = part
        self.info = info
        self.slot_count = len(part.slots)
        self.arguments = tuple((slot, part.slots[slot]) for slot in part.arguments)
        self.results: tuple[tuple[int, Layout], ...] = ()  # (result number, layout)
        self.result_bytes: tuple[int, ...] = ()  # on this host
        self.result_origins: tuple[tuple[str, str], ...] = ()  # what they are, and the user's lines
        self.arrivals: tuple[BoundArrival, ...] = ()
        self.sends: dict[int, BoundSend] = {}  # by edge
        self.gangs: tuple[BoundGang, ...] = ()

    def where(self, host: Host, node: int) -> dict[str, Any]:
        """The story of a node, for an error."""
        part = self.part
        known = 0 <= node < len(part.names)
        return {
            "program": part.plan_name,
            "node": part.names[node] if known else "",
            "source": part.sources[node] if known and node < len(part.sources) else "",
            "slice": part.slices[node] if known and node < len(part.slices) else -1,
            "island": host.island,
            "host": host.name,
            "incarnation": host.incarnation,
        }


def local_computations(part: Part, host: Host) -> dict[Wanted, int]:
    """What this host must compile for the part: (content hash, devices), with the first node that needs it."""
    local = host.local
    found: dict[Wanted, int] = {}
    for gang in part.gangs:
        for step in gang.steps:
            if isinstance(step, Execute) and any(device in local for device in step.devices):
                found.setdefault((step.computation, step.devices), step.node)
    return found


def bind(part: Part, info: PartInfo, host: Host, devices_per_host: Mapping[str, int]) -> BoundPart:
    """Bind a part. `devices_per_host`: of every island that it has an edge with. Its computations may still be under
    way: all but its gangs' launches is known without them, and `bind_launches` adds those."""
    bound = BoundPart(part, info)
    bound.arrivals = tuple(
        _bind_arrival(edge, host, devices_per_host)
        for edge in part.edges_in
        if any(device in host.local for device in edge.target.devices)
    )
    bound.results = tuple((number, part.slots[slot]) for number, slot in part.results)
    made = origins(part)
    bound.result_origins = tuple(made[slot] for _, slot in part.results)
    bound.result_bytes = tuple(local_nbytes(layout, host) for _, layout in bound.results)
    donated = {
        step.inputs[position]
        for gang in part.gangs
        for step in gang.steps
        if isinstance(step, Execute)
        for position in step.donates
    }
    bound.sends = {
        edge.index: _bind_send(edge, host, devices_per_host, edge.source_slot in donated) for edge in part.edges_out
    }
    bind_launches(bound, host, {})
    return bound


def bind_launches(bound: BoundPart, host: Host, launches: Mapping[Wanted, Launch]) -> None:
    """Make the part's gangs with `launches`. One whose launches are missing can only be poisoned."""
    bound.gangs = tuple(_bind_gang(number, gang, bound, host, launches) for number, gang in enumerate(bound.part.gangs))


def _bind_gang(number: int, gang: Gang, whole: BoundPart, host: Host, launches: Mapping[Wanted, Launch]) -> BoundGang:
    local = host.local
    part = whole.part
    edge_slots = {edge.index: edge.target_slot for edge in part.edges_in}
    index_of_result = {number: index for index, (number, _) in enumerate(part.results)}
    bound = BoundGang(number)
    external: dict[int, None] = dict.fromkeys(gang.arguments)
    external.update((edge_slots[edge], None) for edge in gang.waits)
    segments: list[tuple[tuple[Step, ...], tuple[BoundSend, ...]]] = []
    steps: list[Step] = []
    here: list[BoundSend] = []
    written: dict[int, None] = {}
    read: set[int] = set()
    freed: set[int] = set()
    executed: list[Execute] = []
    for step in gang.steps:
        inputs = step.inputs if isinstance(step, Execute) else (step.slot,)
        external.update((slot, None) for slot in inputs if slot not in written)
        freed.update(step.frees)
        if isinstance(step, Send):
            send = whole.sends[step.edge]._replace(frees=step.frees)
            if send.pieces or any(device in local for device in send.source.devices):
                here.append(send)
            continue
        written.update(dict.fromkeys(step.outputs))
        if not any(device in local for device in step.devices):
            continue
        if here:
            segments.append((tuple(steps), tuple(here)))
            steps, here = [], []
        read.update(step.inputs)
        executed.append(step)
        steps.append(
            (launches.get((step.computation, step.devices), _not_compiled), step.inputs, step.outputs, step.frees)
        )
    segments.append((tuple(steps), tuple(here)))
    slot_of_result = dict(part.results)
    bound.segments = tuple(segments)
    bound.external = tuple(external)
    bound.writes = tuple(written)
    bound.nodes = tuple(step.node for step in executed)
    last = [step.outputs for step in executed if not read.intersection(step.outputs)]
    if not any(freed.issuperset(outputs) for outputs in last):
        bound.watched = tuple(next(slot for slot in outputs if slot not in freed) for outputs in last)
    bound.results = tuple((index_of_result[n], slot_of_result[n]) for n in whole.info.gangs[number].results)
    bound.decisions = tuple(
        (n, slot_of_result[n])
        for n in whole.info.gangs[number].results
        if n in part.decisions and min(part.slots[slot_of_result[n]].devices) in local
    )
    bound.cost_us = ASSUMED_STEP_US * len(executed)
    bound.lane = min((d for step in executed for d in step.devices if d in local), default=local[0])
    return bound


def _not_compiled(arguments: Sequence[Any], tokens: list[Any]) -> list[Any]:
    raise ExecutionError("the computation is not compiled")


def _bind_send(edge: Edge, host: Host, devices_per_host: Mapping[str, int], copies: bool) -> BoundSend:
    per_target = devices_per_host[edge.target_island]
    outgoing = []
    shards = {device: edge.source.region(position) for position, device in enumerate(edge.source.devices)}
    for piece in _pieces(edge, devices_per_host):
        if piece.source in host.local:
            shard = shards[piece.source]
            within = tuple(
                slice(start - at, stop - at) for (start, stop), (at, _) in zip(piece.region, shard, strict=True)
            )
            outgoing.append(
                OutgoingPiece(
                    piece.source, piece.targets[0] // per_target, piece.targets[0], piece.region, within, piece.nbytes
                )
            )
    return BoundSend(
        edge.index,
        edge.source_slot,
        (),
        edge.source,
        edge.target_island,
        tuple(sorted({device // per_target for device in edge.target.devices})),
        tuple(outgoing),
        copies,
    )


def _bind_arrival(edge: Edge, host: Host, devices_per_host: Mapping[str, int]) -> BoundArrival:
    local = host.local
    regions = {
        device: edge.target.region(position) for position, device in enumerate(edge.target.devices) if device in local
    }
    pieces: dict[int, list[tuple[int, Region]]] = {device: [] for device in regions}
    expected = set()
    for piece in _pieces(edge, devices_per_host):
        if piece.targets[0] in local:
            name = (piece.targets[0], piece.region)
            expected.add(name)
            for device in piece.targets:
                pieces[device].append(name)
    return BoundArrival(
        edge.index,
        edge.target_slot,
        edge.target,
        {device: tuple(names) for device, names in pieces.items()},
        regions,
        frozenset(expected),
    )


def _pieces(edge: Edge, devices_per_host: Mapping[str, int]) -> tuple[Piece, ...]:
    return edge_pieces(edge, devices_per_host[edge.source_island], devices_per_host[edge.target_island])


def local_nbytes(layout: Layout, host: Host) -> int:
    """Bytes of the layout's shards on this host."""
    itemsize = numpy_dtype(layout.aval.dtype).itemsize
    total = 0
    for position, device in enumerate(layout.devices):
        if device in host.local:
            count = itemsize
            for start, stop in layout.region(position):
                count *= stop - start
            total += count
    return total


def failure(bound: BoundPart, host: Host, node: int, error: ErrorInfo) -> ErrorInfo:
    """`error`, found at a node: with the node's story where the error does not tell one already."""
    if error.node or error.program:
        return error
    where = bound.where(host, node)
    return ErrorInfo(error.kind, error.message, error.original, error.traceback, cause=error.cause, **where)
