"""From a graph, its bindings and an order to a plan: slots, edges, gangs, liveness. No JAX.

Where a value is, is a *site* (an island's devices in mesh order) and how it is split there. A value has one slot for
each such place; it is computed or comes in at its home and an edge carries it to every other place where it is read,
once, however many nodes read it there. Two slices over the same devices are one site, and two shardings that put the
same parts on the same devices are one place, so no edge joins them.

What enters without an edge: small host arrays ride in the run's message to every place that reads them; constants are
put once at every such place and stay. The invariants are `plan`'s (D-1 to D-4); `check.validate` tests them.

The work depends on nodes and values only, save for `cost_bytes`, which looks at the devices once per pair of layouts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from pathway.dataflow.gangs import Draft, DraftPart, GangCutter, free
from pathway.dataflow.graph import BoundSlice, Graph, Node
from pathway.dataflow.layout import Aval, Layout, Sharding
from pathway.dataflow.plan import Argument, Edge, Execute, Part, Plan, Result, Send
from pathway.dataflow.reshard import edge_bytes
from pathway.dataflow.schedule import Schedule

INLINE_BYTES = 64 * 1024
"""Host arrays up to this size ride in the run's message (the transport's own limit)."""

Strides = tuple[tuple[tuple[int, int], ...], ...]
Place = tuple[int, Strides]
"""A site's number, and the canonical form of the sharding there."""


def donations(graph: Graph, bindings: Mapping[int, BoundSlice], schedule: Schedule) -> dict[int, tuple[int, ...]]:
    """Which inputs each node may really take over: of those that it donates, the ones that nobody needs after it in
    `schedule`, and that are not on their way to another place. To be asked before lowering: donation is part of a
    computation."""
    places = _Places(graph, bindings)
    rank = {index: number for nodes in schedule.orders.values() for number, index in enumerate(nodes)}
    owned = {value for node in graph.nodes for value in node.outputs}
    owned |= {argument.value for argument in graph.arguments if argument.donated or not argument.resident}
    owned -= {result.value for result in graph.results}
    readers: dict[int, list[int]] = {}
    read_at: dict[int, set[Place]] = {}
    for node in graph.nodes:
        for position, value in enumerate(node.inputs):
            readers.setdefault(value, []).append(node.index)
            read_at.setdefault(value, set()).add(places.read(node, position))

    def is_safe(node: Node, value: int) -> bool:
        home = places.read(node, node.inputs.index(value)) if value in places.host_arguments else places.home(value)
        is_last = all(rank[other] < rank[node.index] for other in readers[value] if other != node.index)
        return value in owned and read_at[value] == {home} and is_last and node.inputs.count(value) == 1

    return {
        node.index: tuple(position for position in node.donates if is_safe(node, node.inputs[position]))
        for node in graph.nodes
    }


def build_plan(
    graph: Graph,
    bindings: Mapping[int, BoundSlice],
    keys: Mapping[int, str],
    schedule: Schedule,
    *,
    kept: Mapping[int, tuple[int, ...]] | None = None,
    donates: Mapping[int, tuple[int, ...]] | None = None,
    inline_bytes: int = INLINE_BYTES,
    decisions: Collection[int] = (),
) -> Plan:
    """The plan of `graph` on `bindings`.

    `keys`, `kept` and `donates` are for each node its computation's hash, the positions of the inputs that the
    computation takes (default: all) and of those it donates (default: none). The plan's arguments are the graph's
    arguments, then its constants, then its references. `decisions`: positions of the computed results, integers without
    dimensions, whose values decide what runs next."""
    return _Planner(graph, bindings, keys, schedule, kept, donates, inline_bytes, decisions).build()


@dataclass(frozen=True)
class _Site:
    island: str
    devices: tuple[int, ...]
    devices_per_host: int
    platform: str


class _Places:
    """Where values are and are read, with all that is asked often kept."""

    def __init__(self, graph: Graph, bindings: Mapping[int, BoundSlice]) -> None:
        self.values = graph.values
        self.host_arguments = {argument.value for argument in graph.arguments if not argument.resident}
        self.sites: list[_Site] = []
        self.site_of_slice: dict[int, int] = {}
        numbers: dict[tuple[str, tuple[int, ...]], int] = {}
        for index, bound in sorted(bindings.items()):
            number = numbers.setdefault((bound.island, bound.devices), len(self.sites))
            if number == len(self.sites):
                self.sites.append(_Site(bound.island, bound.devices, bound.devices_per_host, bound.platform))
            self.site_of_slice[index] = number
        self._strides: dict[tuple[Sharding, int], Strides] = {}
        self._layouts: dict[tuple[Aval, Sharding, int], Layout] = {}

    def place(self, site: int, sharding: Sharding, rank: int) -> Place:
        strides = self._strides.get((sharding, rank))
        if strides is None:
            strides = self._strides[sharding, rank] = sharding.strides(rank)
        return site, strides

    def home(self, index: int) -> Place:
        value = self.values[index]
        return self.place(self.site_of_slice[value.slice], value.sharding, len(value.aval.shape))

    def read(self, node: Node, position: int) -> Place:
        rank = len(self.values[node.inputs[position]].aval.shape)
        return self.place(self.site_of_slice[node.slice], node.in_shardings[position], rank)

    def layout(self, index: int, site: int, sharding: Sharding) -> Layout:
        aval = self.values[index].aval
        layout = self._layouts.get((aval, sharding, site))
        if layout is None:
            physical = aval.physical
            full = sharding.of_rank(len(physical.shape))
            layout = self._layouts[aval, sharding, site] = Layout(physical, full, self.sites[site].devices)
        return layout


class _Planner:
    def __init__(
        self,
        graph: Graph,
        bindings: Mapping[int, BoundSlice],
        keys: Mapping[int, str],
        schedule: Schedule,
        kept: Mapping[int, tuple[int, ...]] | None,
        donates: Mapping[int, tuple[int, ...]] | None,
        inline_bytes: int,
        decisions: Collection[int],
    ) -> None:
        self.graph, self.keys, self.schedule = graph, keys, schedule
        self.decisions = {graph.results[position].value for position in decisions}
        self.kept, self.donates, self.inline_bytes = kept, donates or {}, inline_bytes
        used = {node.slice for node in graph.nodes} | {value.slice for value in graph.values}
        self.places = _Places(graph, {index: bindings[index] for index in used})
        self.parts: dict[str, DraftPart] = {}
        self.slots: dict[tuple[int, Place], int] = {}
        self.entries: dict[int, list[tuple[str, int]]] = {}  # by value: (island, position in the part's arguments)
        self.edge_count = 0

    def build(self) -> Plan:
        self._enter_sources()
        self._write_outputs()
        self._carry()
        numbers = self._number_results()
        for island, nodes in self.schedule.orders.items():
            part = self._part_of(island)
            self._cutter(part).cut(self._sends_of_arguments(part), map(self._execute, nodes))
        for part in self.parts.values():
            if part.island not in self.schedule.orders:  # it only hands arguments on
                self._cutter(part).cut(self._sends_of_arguments(part), ())
            free(part)
        return self._finish(numbers)

    def _cutter(self, part: DraftPart) -> GangCutter:
        return GangCutter(part, strict=self.schedule.strict, per_device=self.schedule.per_device)

    # -- slots -----------------------------------------------------------------------------------------------------

    def _part_of(self, island: str) -> DraftPart:
        part = self.parts.get(island)
        if part is None:
            platform = next(site.platform for site in self.places.sites if site.island == island)
            part = self.parts[island] = DraftPart(island, platform)
        return part

    def _part_at(self, place: Place) -> DraftPart:
        return self._part_of(self.places.sites[place[0]].island)

    def _enter(self, value: int, place: Place, sharding: Sharding) -> None:
        """An argument slot for `value` at `place`."""
        part = self._part_at(place)
        slot = self.slots[value, place] = part.new_slot(self.places.layout(value, place[0], sharding))
        self.entries.setdefault(value, []).append((part.island, len(part.arguments)))
        part.arguments.append(slot)

    def _reads(self) -> Iterable[tuple[Node, int]]:
        for node in self.graph.nodes:
            for position in self._kept(node):
                yield node, position

    def _kept(self, node: Node) -> Iterable[int]:
        return range(len(node.inputs)) if self.kept is None else self.kept[node.index]

    def _enter_sources(self) -> None:
        """Arguments, constants and references: where each comes in."""
        homes = {argument.value for argument in self.graph.arguments if argument.resident}
        homes |= {value for value, _ in self.graph.references}
        everywhere = {value for value, _ in self.graph.constants}
        first_reader: set[int] = set()
        for argument in self.graph.arguments:
            if not argument.resident:
                (everywhere if self._is_small(argument.value) else first_reader).add(argument.value)
        entered = set()
        for node, position in self._reads():
            value = node.inputs[position]
            place = self.places.read(node, position)
            if value in everywhere:
                if (value, place) not in self.slots:
                    self._enter(value, place, node.in_shardings[position])
            elif value in first_reader:
                if value not in entered:
                    self._enter(value, place, node.in_shardings[position])
                    entered.add(value)
            elif value in homes and value not in entered:
                home = self.graph.values[value]
                self._enter(value, self.places.home(value), home.sharding)
                entered.add(value)

    def _write_outputs(self) -> None:
        for node in self.graph.nodes:
            for value in node.outputs:
                place = self.places.home(value)
                layout = self.places.layout(value, place[0], self.graph.values[value].sharding)
                self.slots[value, place] = self._part_at(place).new_slot(layout)

    def _carry(self) -> None:
        """An edge, with its slot, for every place where a value is read and is not yet."""
        origin: dict[int, Place] = {}
        for value, place in self.slots:
            origin.setdefault(value, place)
        for node, position in self._reads():
            value = node.inputs[position]
            place = self.places.read(node, position)
            if (value, place) in self.slots:
                continue
            source, target = self._part_at(origin[value]), self._part_at(place)
            source_slot = self.slots[value, origin[value]]
            layout = self.places.layout(value, place[0], node.in_shardings[position])
            slot = self.slots[value, place] = target.new_slot(layout)
            edge = Edge(
                self.edge_count, source.island, target.island, source_slot, slot, source.slots[source_slot], layout
            )
            self.edge_count += 1
            source.edges_out.append(edge)
            source.sends_of_slot.setdefault(source_slot, []).append(edge)
            target.edges_in.append(edge)
            target.edge_of_slot[slot] = edge.index

    def _number_results(self) -> dict[int, int]:
        """A number for each computed value that the program returns; returned twice, it is one result."""
        computed = {value for node in self.graph.nodes for value in node.outputs}
        numbers: dict[int, int] = {}
        for result in self.graph.results:
            if result.value in computed and result.value not in numbers:
                number = numbers[result.value] = len(numbers)
                place = self.places.home(result.value)
                part = self._part_at(place)
                part.results.append((number, self.slots[result.value, place]))
                if result.value in self.decisions:
                    part.decisions.append(number)
        return numbers

    # -- steps -----------------------------------------------------------------------------------------------------

    def _execute(self, index: int) -> Draft:
        node = self.graph.nodes[index]
        site = self.places.site_of_slice[node.slice]
        kept = tuple(self._kept(node))
        inputs = tuple(self.slots[node.inputs[position], self.places.read(node, position)] for position in kept)
        outputs = tuple(self.slots[value, self.places.home(value)] for value in node.outputs)
        donates = tuple(kept.index(position) for position in self.donates.get(index, ()) if position in kept)
        step = Execute(index, self.keys[index], self.places.sites[site].devices, inputs, outputs, donates)
        return Draft(step, inputs, outputs)

    def _sends_of_arguments(self, part: DraftPart) -> list[list[Draft]]:
        """What this part hands on without computing: a gang for each argument, since each may come at its own time."""
        return [
            [Draft(Send(slot, edge.index), (slot,)) for edge in part.sends_of_slot[slot]]
            for slot in part.arguments
            if slot in part.sends_of_slot
        ]

    # -- the end ---------------------------------------------------------------------------------------------------

    def _finish(self, numbers: Mapping[int, int]) -> Plan:
        graph, places = self.graph, self.places
        order = sorted(self.parts)
        index_of = {island: number for number, island in enumerate(order)}
        names = tuple(node.name for node in graph.nodes)
        sources = tuple(node.source for node in graph.nodes)
        slices = tuple(node.slice for node in graph.nodes)
        parts = tuple(self.parts[island].finished(graph.name, names, sources, slices) for island in order)
        sources_in_order = [*(entry.value for entry in graph.arguments)]
        sources_in_order += [value for value, _ in (*graph.constants, *graph.references)]

        def home_layout(value: int) -> Layout:
            return places.layout(value, places.home(value)[0], graph.values[value].sharding)

        def argument(value: int, *, inline: bool) -> Argument:
            entries = tuple((index_of[island], position) for island, position in self.entries.get(value, ()))
            layout = home_layout(value)
            if entries:
                part, position = entries[0]
                layout = parts[part].slots[parts[part].arguments[position]]
            return Argument(layout, entries, inline)

        arguments = [
            argument(entry.value, inline=not entry.resident and self._is_small(entry.value))
            for entry in graph.arguments
        ]
        arguments += [argument(value, inline=False) for value, _ in (*graph.constants, *graph.references)]
        argument_of: dict[int, int] = {}
        for number, value in enumerate(sources_in_order):
            argument_of.setdefault(value, number)
        results = []
        for result in graph.results:
            value = result.value
            home = graph.values[value]
            if value in numbers:
                part = index_of[places.sites[places.home(value)[0]].island]
                results.append(Result(home_layout(value), home.slice, part, numbers[value]))
            else:
                results.append(Result(home_layout(value), home.slice, argument=argument_of[value]))
        return Plan(
            graph.name,
            parts,
            tuple(arguments),
            tuple(results),
            len(numbers),
            tuple(number for number, entry in enumerate(graph.arguments) if entry.donated),
            tuple(sorted({self.keys[node.index] for node in graph.nodes})),
            self._cost_bytes(parts),
        )

    def _is_small(self, value: int) -> bool:
        return self.graph.values[value].aval.physical.nbytes <= self.inline_bytes

    def _cost_bytes(self, parts: Iterable[Part]) -> int:
        devices_per_host = {site.island: site.devices_per_host for site in self.places.sites}
        known: dict[tuple[str, str, int, int], int] = {}
        total = 0
        for part in parts:
            for edge in part.edges_out:
                # Layouts are shared between slots (`_Places.layout`), so their identity will do, at any device count.
                key = (edge.source_island, edge.target_island, id(edge.source), id(edge.target))
                if key not in known:
                    hosts = devices_per_host[edge.source_island], devices_per_host[edge.target_island]
                    known[key] = edge_bytes(edge, *hosts)
                total += known[key]
        return total
