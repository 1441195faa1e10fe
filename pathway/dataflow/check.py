"""Whether a plan keeps its invariants (D-1 to D-4). For tests, and for whoever writes another planner.

Gangs may overtake unless `Gang.after` forbids it, so "before" means here: in every order that edges and `after` allow,
not merely earlier in the list.
"""

from __future__ import annotations

from pathway.dataflow.plan import Edge, Execute, Part, Plan


def validate(plan: Plan) -> None:
    """Raises AssertionError with the invariant that `plan` breaks, and where."""
    edges = _check_edges(plan)
    for number, part in enumerate(plan.parts):
        _PartCheck(part).check()
        assert sorted(_positions(plan, number)) == list(range(len(part.arguments))), f"{part.island}: argument entries"
    numbers = sorted(number for part in plan.parts for number, _ in part.results)
    assert numbers == list(range(plan.result_count)), "every result is computed by exactly one part"
    for result in plan.results:
        if result.argument < 0:
            slot = dict(plan.parts[result.part].results)[result.number]
            assert plan.parts[result.part].slots[slot] == result.layout, "a result's layout is its slot's"
    _check_progress(plan, edges)


def _positions(plan: Plan, part: int) -> list[int]:
    return [position for argument in plan.arguments for number, position in argument.entries if number == part]


def _check_edges(plan: Plan) -> dict[int, Edge]:
    outgoing = {edge.index: edge for part in plan.parts for edge in part.edges_out}
    incoming = {edge.index: edge for part in plan.parts for edge in part.edges_in}
    assert outgoing == incoming, "an edge is known to both its parts"
    assert len(outgoing) == sum(len(part.edges_out) for part in plan.parts), "an edge's index is unique within the plan"
    for part in plan.parts:
        for edge in part.edges_out:
            assert edge.source_island == part.island
            assert part.slots[edge.source_slot] == edge.source
        for edge in part.edges_in:
            assert edge.target_island == part.island
            assert part.slots[edge.target_slot] == edge.target
        sent = sorted(step.edge for gang in part.gangs for step in gang.steps if not isinstance(step, Execute))
        assert sent == sorted(edge.index for edge in part.edges_out), f"{part.island}: every edge is sent once"
    return outgoing


class _PartCheck:
    def __init__(self, part: Part) -> None:
        self.part = part
        self.before: list[int] = []  # the gangs that surely come before each gang, itself included, as bit sets
        for number, gang in enumerate(part.gangs):
            bits = 1 << number
            for other in gang.after:
                assert other < number, f"D-4: gang {number} of {part.island} is after gang {other}"
                bits |= self.before[other]
            self.before.append(bits)
        self.where: dict[int, tuple[int, int]] = {}  # slot -> (gang, step) from which on it can be read
        self.reads: dict[int, list[tuple[int, int]]] = {}
        self.frees: dict[int, tuple[int, int]] = {}

    def precedes(self, first: tuple[int, int], second: tuple[int, int]) -> bool:
        if first[0] == second[0]:
            return first[1] <= second[1]
        return bool(self.before[second[0]] >> first[0] & 1)

    def check(self) -> None:
        part = self.part
        edge_slots = {edge.target_slot: edge.index for edge in part.edges_in}
        incoming = set(edge_slots) | set(part.arguments)
        assert len(incoming) == len(edge_slots) + len(part.arguments), f"D-1: {part.island}: a slot comes in twice"
        for number, gang in enumerate(part.gangs):
            fresh = set()
            for at, step in enumerate(gang.steps):
                reads = step.inputs if isinstance(step, Execute) else (step.slot,)
                for slot in reads:
                    if slot in incoming and slot not in self.where:
                        self.where[slot] = (number, -1)
                        fresh.add(slot)
                    self.reads.setdefault(slot, []).append((number, at))
                if isinstance(step, Execute):
                    for slot in step.outputs:
                        assert slot not in self.where, f"D-1: slot {slot} is written twice"
                        assert slot not in incoming, f"D-1: slot {slot} comes in and is written"
                        self.where[slot] = (number, at)
                    donated = {step.inputs[position] for position in step.donates}
                    assert donated <= set(step.frees), f"D-3: node {step.node} donates a slot that it does not free"
                for slot in step.frees:
                    assert slot not in self.frees, f"D-3: slot {slot} of {part.island} is freed twice"
                    self.frees[slot] = (number, at)
            waits = {edge_slots[slot] for slot in fresh if slot in edge_slots}
            assert set(gang.waits) == waits, f"D-2: gang {number} of {part.island} waits for {gang.waits}, not {waits}"
            assert set(gang.arguments) == fresh & set(part.arguments), f"gang {number} of {part.island}: its arguments"
        self._check_slots()

    def _check_slots(self) -> None:
        results = {slot for _, slot in self.part.results}
        for slot in range(len(self.part.slots)):
            label = f"slot {slot} of {self.part.island}"
            assert slot in self.where, f"D-1: {label} is never written, or comes in and is never read"
            for read in self.reads.get(slot, ()):
                assert self.precedes(self.where[slot], read), f"D-1: {label} may be read before it is written"
                if slot in self.frees:
                    assert self.precedes(read, self.frees[slot]), f"D-3: {label} may be freed before it is read"
            assert (slot in self.frees) != (slot in results), f"D-3: {label} is freed once, or is a result"
            if slot in self.frees:
                at = self.frees[slot]
                assert at in self.reads.get(slot, [self.where[slot]]), f"D-3: {label} is freed by a step that reads it"


def _check_progress(plan: Plan, edges: dict[int, Edge]) -> None:
    """D-4: start every gang that can start, again and again, until all have."""
    arrived: set[int] = set()
    waiting = {(part, number) for part in range(len(plan.parts)) for number in range(len(plan.parts[part].gangs))}
    while waiting:
        ready = [
            (part, number)
            for part, number in sorted(waiting)
            if arrived.issuperset(plan.parts[part].gangs[number].waits)
            and not any((part, other) in waiting for other in plan.parts[part].gangs[number].after)
        ]
        assert ready, "D-4: these gangs wait for each other: " + ", ".join(
            f"{plan.parts[part].island}/{number}" for part, number in sorted(waiting)
        )
        for part, number in ready:
            waiting.remove((part, number))
            for step in plan.parts[part].gangs[number].steps:
                if not isinstance(step, Execute):
                    arrived.add(step.edge)
    assert arrived == set(edges)
