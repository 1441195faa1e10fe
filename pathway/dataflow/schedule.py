"""In which order each island runs its nodes: a graph and its bindings in, one list of nodes per island out. No JAX.

By default the order comes from a simulation (list scheduling): every slice that is free takes, among its nodes whose
inputs have come, the one that stands first in the program. A microbatched program with its gradients thereby gets
something like 1F1B without having asked: a backward node stands before the next microbatch's forward node, so it is
taken as soon as its cotangent is there, and forward nodes fill the time until then.

A schedule may instead be given, as data: a predicate `before(first, second)` over two nodes of one island, or the
order itself. It is then kept strictly. So is the order in which the program calls its stages, if that is asked for
("program"), but device by device: what runs on other devices of the island does not wait for it. Prior art: jaxpp's and
shardy's pipeline schedules are such values; Pathways (section 4.4) enqueues in program order.

Invariants
  S-1  Every node is in the order of its island exactly once.
  S-2  All islands together can follow their orders: no island waits for itself (D-4 follows).
  S-3  The same input gives the same order, on every machine.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pathway.dataflow.graph import BoundSlice, Graph, Node
from pathway.errors import ProgramError

Before = Callable[[Node, Node], bool]
"""Whether the first node must run before the second; both are on the same island."""

PROGRAM: Literal["program"] = "program"

ScheduleSpec = Before | Mapping[str, Sequence[int]] | Sequence[int] | Literal["program"] | None
"""None: by simulation. "program": every device keeps to the order of the program's own calls. Otherwise a predicate,
each island's nodes in order, or the whole program's nodes in order."""

TRANSFER_LATENCY_S = 200e-6
TRANSFER_BYTES_PER_S = 4e9
DEFAULT_COST_S = 1e-3
"""What the simulation assumes. Only its proportions matter, and only where two nodes are ready at about one time."""


@dataclass(frozen=True)
class Schedule:
    """`orders`: each island's nodes. `strict`: an island must not depart from its order, even for a node that is ready
    earlier. `per_device`: even of a strict order may depart what shares no device. `spans`: when each node ran in
    the simulation, (start, end) in seconds, by node index."""

    orders: Mapping[str, tuple[int, ...]]
    strict: bool
    spans: tuple[tuple[float, float], ...]
    per_device: bool = False


def order(
    graph: Graph,
    bindings: Mapping[int, BoundSlice],
    cost: Callable[[Node], float] | None = None,
    schedule: ScheduleSpec = None,
) -> Schedule:
    """Order each island's nodes. `cost` estimates a node's seconds."""
    simulation = _Simulation(graph, bindings, cost or (lambda node: DEFAULT_COST_S))
    if schedule is None:
        simulation.let_donors_run_last()
    elif isinstance(schedule, str):
        if schedule != PROGRAM:
            raise ProgramError(f'a schedule is a predicate, an order of nodes, "program" or None, not {schedule!r}')
        simulation.keep_program_order()
    elif callable(schedule):
        simulation.constrain(_pairs(simulation.nodes_of, schedule))
    else:
        simulation.constrain(_chains(simulation.nodes_of, schedule))
    return simulation.run(strict=schedule is not None, per_device=schedule == PROGRAM)


@dataclass
class _State:
    """One node while the simulation runs."""

    node: Node
    lane: int
    data: list[tuple[int, float]] = field(default_factory=list)  # (reader, seconds that the transfer takes)
    first: set[int] = field(default_factory=set)  # nodes of the same island that must start later
    blockers: set[int] = field(default_factory=set)
    ready_s: float = 0.0


class _Simulation:
    def __init__(self, graph: Graph, bindings: Mapping[int, BoundSlice], cost: Callable[[Node], float]) -> None:
        self.graph, self.bindings, self.cost = graph, bindings, cost
        lanes = _lanes(bindings)
        self.states = [_State(node, lanes[node.slice]) for node in graph.nodes]
        self.nodes_of: dict[str, list[Node]] = {}
        for node in graph.nodes:
            self.nodes_of.setdefault(bindings[node.slice].island, []).append(node)
        writers = {value: node.index for node in graph.nodes for value in node.outputs}
        for node in graph.nodes:
            for position, value in enumerate(node.inputs):
                if value in writers:
                    writer = self.states[writers[value]]
                    writer.data.append((node.index, self._transfer_s(value, node, position)))
                    self.states[node.index].blockers.add(writer.node.index)

    def _transfer_s(self, index: int, reader: Node, position: int) -> float:
        value = self.graph.values[index]
        if reader.slice == value.slice and reader.in_shardings[position] == value.sharding:
            return 0.0
        return TRANSFER_LATENCY_S + value.aval.physical.nbytes / TRANSFER_BYTES_PER_S

    def constrain(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Let the first node of each pair start before the second."""
        for first, second in pairs:
            self.states[first].first.add(second)
            self.states[second].blockers.add(first)

    def keep_program_order(self) -> None:
        """On every device, nodes start in the order in which they stand in the program."""
        nodes_of: dict[int, list[int]] = {}
        for state in self.states:
            nodes_of.setdefault(state.lane, []).append(state.node.index)
        for indices in nodes_of.values():
            self.constrain(itertools.pairwise(indices))

    def let_donors_run_last(self) -> None:
        """A node that takes over a buffer runs after the others that read it."""
        readers: dict[int, list[int]] = {}
        for node in self.graph.nodes:
            for value in set(node.inputs):
                readers.setdefault(value, []).append(node.index)
        for node in self.graph.nodes:
            for position in node.donates:
                value = node.inputs[position]
                self.constrain(
                    (reader, node.index)
                    for reader in readers[value]
                    if reader < node.index and self.graph.nodes[reader].slice == node.slice
                )

    def run(self, *, strict: bool, per_device: bool = False) -> Schedule:
        orders: dict[str, list[int]] = {island: [] for island in self.nodes_of}
        spans = [(0.0, 0.0)] * len(self.states)
        waiting = [len(state.blockers) for state in self.states]
        queues: dict[int, list[int]] = {state.lane: [] for state in self.states}  # heaps of ready nodes
        free_s = dict.fromkeys(queues, 0.0)
        events = [(0.0, state.node.index, state.lane) for state in self.states if not state.blockers]
        heapq.heapify(events)  # (when, node that becomes ready or -1, lane to look at)

        def unblock(index: int, when_s: float) -> None:
            state = self.states[index]
            state.ready_s = max(state.ready_s, when_s)
            waiting[index] -= 1
            if waiting[index] == 0:
                heapq.heappush(events, (state.ready_s, index, state.lane))

        while events:
            now_s, touched = events[0][0], set()
            while events and events[0][0] == now_s:
                _, index, lane = heapq.heappop(events)
                touched.add(lane)
                if index >= 0:
                    heapq.heappush(queues[lane], index)
            for lane in sorted(touched):
                if not queues[lane] or free_s[lane] > now_s:
                    continue
                state = self.states[heapq.heappop(queues[lane])]
                node = state.node
                end_s = free_s[lane] = now_s + max(self.cost(node), 1e-9)
                spans[node.index] = (now_s, end_s)
                orders[self.bindings[node.slice].island].append(node.index)
                heapq.heappush(events, (end_s, -1, lane))
                arrivals: dict[int, float] = dict.fromkeys(state.first, now_s)
                for reader, transfer_s in state.data:
                    arrivals[reader] = max(arrivals.get(reader, 0.0), end_s + transfer_s)
                for reader in sorted(arrivals):
                    unblock(reader, arrivals[reader])
        placed = sum(map(len, orders.values()))
        if placed < len(self.states):
            raise ProgramError(self._describe_cycle(waiting))
        given = {island: tuple(nodes) for island, nodes in sorted(orders.items())}
        return Schedule(given, strict, tuple(spans), per_device)

    def _describe_cycle(self, waiting: list[int]) -> str:
        stuck = {index for index, count in enumerate(waiting) if count > 0}
        path = [min(stuck)]
        while path[-1] not in path[:-1]:
            path.append(min(self.states[path[-1]].blockers & stuck))
        cycle = path[path.index(path[-1]) :]
        lines = []
        for node, blocker in itertools.pairwise(cycle):
            reads = any(reader == node for reader, _ in self.states[blocker].data)
            why = "needs a result of" if reads else "is ordered after"
            lines.append(f"  {self._title(node)} {why} {self._title(blocker)}")
        return "the schedule waits for itself:\n" + "\n".join(lines)

    def _title(self, index: int) -> str:
        node = self.graph.nodes[index]
        return f"node {index} ({node.name}, island {self.bindings[node.slice].island})"


def _lanes(bindings: Mapping[int, BoundSlice]) -> dict[int, int]:
    """A number for each slice, equal for slices of one island that share a device: those take turns."""
    lanes: dict[int, int] = {}
    owner: dict[tuple[str, int], int] = {}
    for index, bound in sorted(bindings.items()):
        lane = index
        met = {owner[(bound.island, device)] for device in bound.devices if (bound.island, device) in owner}
        for other, its_lane in lanes.items():
            if its_lane in met:
                lanes[other] = lane
        lanes[index] = lane
        for device, its_lane in owner.items():
            if its_lane in met:
                owner[device] = lane
        owner.update(((bound.island, device), lane) for device in bound.devices)
    return lanes


def _pairs(nodes_of: Mapping[str, list[Node]], before: Before) -> Iterable[tuple[int, int]]:
    for nodes in nodes_of.values():
        for first in nodes:
            for second in nodes:
                if first is not second and before(first, second):
                    yield first.index, second.index


def _chains(
    nodes_of: Mapping[str, list[Node]], given: Mapping[str, Sequence[int]] | Sequence[int]
) -> Iterable[tuple[int, int]]:
    home = {node.index: island for island, nodes in nodes_of.items() for node in nodes}
    if not isinstance(given, Mapping):
        by_island: dict[str, list[int]] = {island: [] for island in nodes_of}
        for index in given:
            if index not in home:
                raise ProgramError(f"the schedule names node {index}, which the program does not have")
            by_island[home[index]].append(index)
        given = by_island
    for island, indices in given.items():
        expected = sorted(node.index for node in nodes_of.get(island, ()))
        if sorted(indices) != expected:
            missing, extra = sorted(set(expected) - set(indices)), sorted(set(indices) - set(expected))
            raise ProgramError(
                f"the schedule of island {island} must name each of its nodes once; missing: {missing}, "
                f"not of this island: {extra}" + ("" if missing or extra else "; some are named twice")
            )
        yield from itertools.pairwise(indices)
