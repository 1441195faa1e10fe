"""From a traced program to a plan on this connection: place, fuse, schedule, lower, and register. The slow path."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from pathway.array import Array, Reference
from pathway.client.bindings import Binding
from pathway.client.hostvalues import aval_of, physical_value
from pathway.client.plans import BoundPlan, HostArgument, ResultSource, check_donated, check_usable
from pathway.client.slices import Slice, live_slices
from pathway.dataflow.computation import Computation, lower_graph
from pathway.dataflow.cost import cost_estimate
from pathway.dataflow.fuse import fuse
from pathway.dataflow.graph import BoundSlice, Graph
from pathway.dataflow.place import Resident, place
from pathway.dataflow.plan import Execute, Part, Plan
from pathway.dataflow.planner import build_plan, donations
from pathway.dataflow.schedule import Schedule, order
from pathway.dataflow.trace import Traced
from pathway.errors import ProgramError
from pathway.transport import messages as m

if TYPE_CHECKING:
    from pathway.client.client import Client

BIND_TIMEOUT_S = 60.0
"""How long a program waits for a slice whose island was lost to be bound again."""


@dataclass(frozen=True)
class LoweredPlan:
    """A program lowered onto bound slices, before anyone but the client knows of it."""

    client: Client
    traced: Traced
    graph: Graph
    schedule: Schedule
    plan: Plan
    computations: Mapping[int, Computation]
    bindings: Mapping[int, Binding]

    @property
    def plans(self) -> list[LoweredPlan]:
        return [self]

    @property
    def bound_slices(self) -> dict[int, BoundSlice]:
        return {number: binding.bound for number, binding in self.bindings.items()}


def lower_plan(
    traced: Traced,
    leaves: Sequence[Any],
    *,
    donated: Collection[int] = (),
    fused: bool = True,
    schedule: Any = None,
) -> LoweredPlan:
    """The plan for a program called with arguments like `leaves`, on the slices as they are bound now."""
    slices = live_slices()
    client = client_of(leaves)
    graph = place(
        traced,
        {number: handle.shape_for_graph for number, handle in slices.items()},
        [resident(Reference(leaf)) if isinstance(leaf, Array) else None for leaf in leaves],
        donated=donated,
        references=resident,
        default_slice=default_slice(client, slices),
    )
    client = client or client_of_slices(graph, slices)
    if client is None:
        raise ProgramError(
            f"{traced.name} uses no slice: place a part of it with pathway.jit, or pass it arrays that were put"
        )
    check_same_client(client, traced.name, leaves, graph, slices)
    check_donated(traced.name, leaves, donated, closed_over(graph))
    return lower_placed(client, traced, graph, fused=fused, schedule=schedule)


def lower_placed(
    client: Client,
    traced: Traced,
    graph: Graph,
    *,
    fused: bool = True,
    schedule: Any = None,
    decisions: Collection[int] = (),
) -> LoweredPlan:
    """The plan of a graph. `decisions`: positions of the results that the scheduler is told."""
    if fused:
        graph = fuse(graph)
    slices = live_slices()
    used = slices_of(graph)
    bindings = {number: slices[number].binding(BIND_TIMEOUT_S) for number in sorted(used)}
    bound = {number: binding.bound for number, binding in bindings.items()}
    sequence = order(
        graph, bound, cost=lambda node: cost_estimate(node, graph.slices[node.slice].mesh), schedule=schedule
    )
    donates = donations(graph, bound, sequence)
    computations = lower_graph(graph, donates)
    plan = build_plan(
        graph,
        bound,
        {node: computation.key for node, computation in computations.items()},
        sequence,
        kept={node: computation.kept for node, computation in computations.items()},
        donates=donates,
        inline_bytes=m.INLINE_BYTES,
        decisions=decisions,
    )
    return LoweredPlan(client, traced, graph, sequence, plan, computations, bindings)


def slices_of(graph: Graph) -> set[int]:
    """The slices that a graph uses."""
    return {node.slice for node in graph.nodes} | {value.slice for value in graph.values}


def client_of_slices(graph: Graph, slices: Mapping[int, Slice]) -> Client | None:
    """The connection that the graph's slices belong to."""
    return next((slices[number].client for number in slices_of(graph) if number in slices), None)


def bind_plan(lowered: LoweredPlan, leaves: Sequence[Any]) -> BoundPlan:
    """Register the plan with the scheduler, without waiting, and prepare its calls."""
    client, graph, plan = lowered.client, lowered.graph, lowered.plan
    count = len(graph.arguments)
    number = register(lowered)
    sources: list[list[int]] = [[-1] * len(part.arguments) for part in plan.parts]
    fixed: list[Array] = []
    captured = closed_over(graph)
    hosts = []
    for index, argument in enumerate(plan.arguments):
        if index < count:
            if not isinstance(leaves[index], Array):
                hosts += _host_argument(lowered, index)
            for part, slot in argument.entries:
                sources[part][slot] = index
        elif index < count + len(graph.constants):
            value = graph.constants[index - count][1]
            for part, slot in argument.entries:
                sources[part][slot] = count + len(fixed)
                fixed.append(constant(lowered, plan.parts[part], slot, value))
        else:
            for part, slot in argument.entries:
                sources[part][slot] = count + len(fixed)
                fixed.append(captured[index - count - len(graph.constants)])
    return BoundPlan(
        client=client,
        number=number,
        name=plan.name,
        result_count=plan.result_count,
        donated=plan.donated,
        bindings=tuple(lowered.bindings.values()),
        hosts=hosts,
        part_sources=sources,
        fixed=fixed,
        results=_results(lowered),
        assemble=assembler(lowered.traced),
    )


def check_same_client(
    client: Client, program: str, leaves: Sequence[Any], graph: Graph, slices: Mapping[int, Slice]
) -> None:
    if any(slices[number].client is not client for number in slices_of(graph)):
        raise ProgramError(f"{program} uses slices of different connections")
    for array in (*leaves, *closed_over(graph)):
        if isinstance(array, Array):
            check_usable(array, program)
            if array._kind.binding.core is not client.core:
                raise ProgramError(
                    f"{program} uses an array ({array._kind.aval}) of another connection; take it along with "
                    "pathway.get and put"
                )


def client_of(leaves: Sequence[Any]) -> Client | None:
    for leaf in leaves:
        if isinstance(leaf, Array):
            return leaf._kind.binding.core.client  # type: ignore[no-any-return]
    return None


def default_slice(client: Client | None, slices: Mapping[int, Any]) -> int | None:
    """Where a program goes that says nothing about places: to the only slice there is."""
    candidates = [number for number, handle in slices.items() if client is None or handle.client is client]
    return candidates[0] if len(candidates) == 1 else None


def resident(reference: Any) -> Resident:
    kind = reference.array._kind
    return Resident(kind.binding.bound.slice, kind.sharding, reference)


def closed_over(graph: Graph) -> list[Array]:
    """The arrays behind a graph's references, in order."""
    references: Sequence[Any] = graph.references
    return [handle.array for _, handle in references]


def register(lowered: LoweredPlan) -> int:
    client, plan = lowered.client, lowered.plan
    core = client.core
    incarnations = {binding.bound.island: binding.bound.incarnation for binding in lowered.bindings.values()}
    payloads = tuple(
        m.PartPayload(
            part.island,
            incarnations[part.island],
            _computations_of(part),
            msgspec.msgpack.encode(part),
        )
        for part in plan.parts
    )
    with core.lock:
        messages: list[m.Message] = []
        for computation in lowered.computations.values():
            if computation.key not in client.known_computations:
                client.known_computations.add(computation.key)
                messages.append(
                    m.RegisterComputation(computation.key, computation.metadata_bytes, computation.artifact)
                )
        number = core.new_plan()
        messages.append(m.RegisterPlan(number, plan.name, payloads, plan.result_count))
        client.connection.send(messages)
    return number


def _computations_of(part: Part) -> tuple[str, ...]:
    steps = [step for gang in part.gangs for step in gang.steps]
    return tuple(dict.fromkeys(step.computation for step in steps if isinstance(step, Execute)))


def _host_argument(lowered: LoweredPlan, index: int) -> list[HostArgument]:
    """How to send a host value: none at all if nobody reads it."""
    argument = lowered.plan.arguments[index]
    value = lowered.graph.values[lowered.graph.arguments[index].value]
    handed_back = any(result.argument == index for result in lowered.plan.results)
    if not argument.entries and not handed_back:
        return []
    put_first = handed_back or not argument.inline
    kind = lowered.bindings[value.slice].kind(value.aval, value.sharding) if put_first else None
    return [HostArgument(index, value.aval, kind)]


def constant(lowered: LoweredPlan, part: Part, slot: int, value: Any) -> Array:
    """A closed-over host array where this slot of this part wants it: put once per content, island and layout."""
    layout = part.slots[part.arguments[slot]]
    binding = next(
        binding
        for binding in lowered.bindings.values()
        if binding.bound.island == part.island and binding.bound.devices == layout.devices
    )
    aval = aval_of(value)
    physical = physical_value(value, aval)
    digest = hashlib.sha256(np.ascontiguousarray(physical).reshape(-1).view(np.uint8).data).digest()
    kind = binding.kind(layout.aval, layout.sharding)
    constants = lowered.client.constants
    array = constants.get((digest, kind))
    if array is None or array.is_deleted():
        array = constants[digest, kind] = lowered.client._put_value(kind, physical)
    return array


def _results(lowered: LoweredPlan) -> list[ResultSource]:
    graph, plan = lowered.graph, lowered.plan
    sources = []
    for graph_result, result in zip(graph.results, plan.results, strict=True):
        value = graph.values[graph_result.value]
        kind = lowered.bindings[value.slice].kind(value.aval, value.sharding)
        sources.append(ResultSource(kind, result.number, result.argument))
    return sources


def assembler(traced: Traced) -> Callable[[list[Array]], Any]:
    if traced.host_results:
        return traced.assemble
    return traced.out_tree.unflatten  # type: ignore[no-any-return]
