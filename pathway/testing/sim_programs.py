"""Random sharded programs for the simulation, with what they compute: plans like those of the planner, over any slices.

Values are integers; a computation's value is a hash of its name and inputs, so that a value read too late, too early or
from another run shows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from pathway.dataflow.layout import Aval, Layout, Sharding
from pathway.dataflow.plan import Edge, Execute, Gang, Part, Send, Step
from pathway.transport.messages import SliceBound

Formula = tuple[object, ...]
"""("argument", island, position) or ("node", number, output, *formulas)."""


@dataclass
class _Draft:
    """A part that is being made. `gangs` are lists of steps, with the edges that each waits for."""

    bound: SliceBound
    slots: list[Layout] = field(default_factory=list)
    arguments: list[int] = field(default_factory=list)
    argument_slices: list[int] = field(default_factory=list)
    gangs: list[list[Step]] = field(default_factory=list)
    waits: list[list[int]] = field(default_factory=list)
    results: list[tuple[int, int]] = field(default_factory=list)
    edges_in: list[Edge] = field(default_factory=list)
    edges_out: list[Edge] = field(default_factory=list)

    def slot(self, layout: Layout) -> int:
        self.slots.append(layout)
        return len(self.slots) - 1


@dataclass(frozen=True)
class _Value:
    bound: SliceBound
    slot: int
    gang: int  # of its part; -1: an argument
    formula: Formula


@dataclass(frozen=True)
class Program:
    """`slices[i]` is, for each argument of part i, the slice on which it must live; `donated` are (part, position).
    `results[n]` is where result n lives and what it is."""

    parts: tuple[Part, ...]
    islands: tuple[tuple[str, int], ...]  # of the parts, with the incarnations that they are made for
    slices: tuple[tuple[int, ...], ...]
    donated: frozenset[tuple[int, int]]
    results: tuple[tuple[int, Formula], ...]
    computations: tuple[str, ...]


def evaluate(formula: Formula, arguments: dict[tuple[str, int], int]) -> int:
    """What the formula gives for these arguments, by (island, position)."""
    if formula[0] == "argument":
        return arguments[formula[1], formula[2]]  # type: ignore[index]
    inputs = [evaluate(inner, arguments) for inner in formula[3:]]  # type: ignore[arg-type]
    return compute(formula[1], formula[2], inputs)  # type: ignore[arg-type]


def compute(node: int, output: int, inputs: list[int]) -> int:
    """What a simulated computation gives."""
    return hash((node, output, *inputs))


def layout_of(bound: SliceBound) -> Layout:
    return Layout(Aval((), "int64"), Sharding((("d", len(bound.devices)),), ()), bound.devices)


def random_program(rng: random.Random, slices: list[SliceBound], name: str, largest: int = 7) -> Program:
    """A program over some of the slices, which are bound to formed islands."""
    drafts: dict[str, _Draft] = {}
    values: list[_Value] = []
    sent: dict[tuple[int, int, str], int] = {}  # (slot, target slice, source island) -> target slot
    for bound in slices:
        draft = drafts.setdefault(bound.island, _Draft(bound))
        for _ in range(rng.randint(0, 2)):
            slot = draft.slot(layout_of(bound))
            formula: Formula = ("argument", bound.island, len(draft.arguments))
            draft.arguments.append(slot)
            draft.argument_slices.append(bound.slice)
            values.append(_Value(bound, slot, -1, formula))
    edge_count = 0
    first_node = rng.randrange(1 << 30)
    node_count = rng.randint(1, largest)
    for node in range(first_node, first_node + node_count):
        bound = rng.choice(slices)
        draft = drafts[bound.island]
        inputs: list[int] = []
        waits: list[int] = []
        chosen = rng.sample(values, min(len(values), rng.randint(0, 3)))
        for value in chosen:
            if value.bound.slice == bound.slice:
                inputs.append(value.slot)
                continue
            key = (value.slot, bound.slice, value.bound.island)
            if key not in sent:
                target_slot = draft.slot(layout_of(bound))
                source = drafts[value.bound.island]
                edge = Edge(
                    index=edge_count,
                    source_island=value.bound.island,
                    target_island=bound.island,
                    source_slot=value.slot,
                    target_slot=target_slot,
                    source=layout_of(value.bound),
                    target=layout_of(bound),
                )
                edge_count += 1
                source.edges_out.append(edge)
                draft.edges_in.append(edge)
                if value.gang < 0:
                    source.gangs.append([Send(value.slot, edge.index)])
                    source.waits.append([])
                else:
                    source.gangs[value.gang].append(Send(value.slot, edge.index))
                sent[key] = target_slot
                waits.append(edge.index)
            inputs.append(sent[key])
        # A node may join the part's last gang unless it reads an edge that the gang did not wait for.
        edge_slots = {edge.target_slot: edge.index for edge in draft.edges_in}
        needs = {edge_slots[slot] for slot in inputs if slot in edge_slots}
        if not (draft.gangs and needs <= set(draft.waits[-1]) and rng.random() < 0.5):
            draft.gangs.append([])
            draft.waits.append(waits)
        outputs = tuple(draft.slot(layout_of(bound)) for _ in range(rng.randint(1, 2)))
        draft.gangs[-1].append(Execute(node - first_node, f"k{node}", bound.devices, tuple(inputs), outputs))
        for number, slot in enumerate(outputs):
            made: Formula = ("node", node, number, *(value.formula for value in chosen))
            values.append(_Value(bound, slot, len(draft.gangs) - 1, made))
    return _finish(rng, name, drafts, values, sent, {bound.slice: bound.island for bound in slices})


def _finish(
    rng: random.Random,
    name: str,
    drafts: dict[str, _Draft],
    values: list[_Value],
    sent: dict[tuple[int, int, str], int],
    homes: dict[int, str],
) -> Program:
    """Choose the results, free every slot at its last reader, and donate some arguments."""
    results: list[tuple[int, Formula]] = []
    by_slice = {(value.slot, value.bound.island): value for value in values}
    read = {
        (slot, island)
        for island, draft in drafts.items()
        for gang in draft.gangs
        for step in gang
        for slot in (step.inputs if isinstance(step, Execute) else (step.slot,))
    }
    for (slot, island), value in by_slice.items():
        if value.gang >= 0 and ((slot, island) not in read or rng.random() < 0.2):
            drafts[island].results.append((len(results), slot))
            results.append((value.bound.slice, value.formula))
    for (source_slot, target_slice, source_island), target_slot in sent.items():
        if rng.random() < 0.1:
            island = homes[target_slice]
            drafts[island].results.append((len(results), target_slot))
            results.append((target_slice, by_slice[source_slot, source_island].formula))
    parts: list[Part] = []
    islands: list[tuple[str, int]] = []
    slices: list[tuple[int, ...]] = []
    donated: set[tuple[int, int]] = set()
    strict = rng.random() < 0.3
    for island, draft in drafts.items():
        if not draft.gangs and not draft.results:
            continue
        kept = {slot for _, slot in draft.results}
        last: dict[int, tuple[int, int]] = {}
        for gang_number, gang in enumerate(draft.gangs):
            for step_number, step in enumerate(gang):
                for slot in step.inputs if isinstance(step, Execute) else (step.slot,):
                    last[slot] = (gang_number, step_number)
        frees: dict[tuple[int, int], list[int]] = {}
        for slot, at in last.items():
            if slot not in kept:
                frees.setdefault(at, []).append(slot)
        gangs = []
        for gang_number, gang in enumerate(draft.gangs):
            steps: list[Step] = []
            for step_number, step in enumerate(gang):
                freed = tuple(frees.get((gang_number, step_number), ()))
                if isinstance(step, Execute):
                    given = [s for s in freed if s in draft.arguments and rng.random() < 0.4]
                    donated.update((len(parts), draft.arguments.index(slot)) for slot in given)
                    donates = tuple(step.inputs.index(slot) for slot in given)
                    steps.append(
                        Execute(step.node, step.computation, step.devices, step.inputs, step.outputs, donates, freed)
                    )
                else:
                    steps.append(Send(step.slot, step.edge, freed))
            after = (gang_number - 1,) if strict and gang_number else ()
            gangs.append(Gang(tuple(steps), waits=tuple(draft.waits[gang_number]), after=after))
        parts.append(
            Part(
                plan_name=name,
                island=island,
                platform="cpu",
                slots=tuple(draft.slots),
                arguments=tuple(draft.arguments),
                results=tuple(draft.results),
                gangs=tuple(gangs),
                edges_in=tuple(draft.edges_in),
                edges_out=tuple(draft.edges_out),
            )
        )
        islands.append((island, draft.bound.incarnation))
        slices.append(tuple(draft.argument_slices))
    computations = tuple(
        step.computation for part in parts for gang in part.gangs for step in gang.steps if isinstance(step, Execute)
    )
    return Program(tuple(parts), tuple(islands), tuple(slices), frozenset(donated), tuple(results), computations)
