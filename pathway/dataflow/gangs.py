"""How one part's steps are cut into gangs, what each step frees, and which gangs must keep their order.

The planner drafts steps in the island's order; here they become gangs that fulfil D-2 and D-3 (see `plan`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pathway.dataflow.layout import Layout
from pathway.dataflow.plan import Edge, Execute, Gang, Part, Send, Step


@dataclass
class Draft:
    """A step before it is known what it frees."""

    step: Execute | Send
    reads: tuple[int, ...]
    writes: tuple[int, ...] = ()
    frees: list[int] = field(default_factory=list)

    def finished(self) -> Step:
        frees = tuple(sorted(self.frees))
        if isinstance(self.step, Send):
            return Send(self.step.slot, self.step.edge, frees)
        step = self.step
        return Execute(step.node, step.computation, step.devices, step.inputs, step.outputs, step.donates, frees)


@dataclass
class DraftGang:
    waits: list[int] = field(default_factory=list)
    steps: list[Draft] = field(default_factory=list)
    arguments: list[int] = field(default_factory=list)
    after: set[int] = field(default_factory=set)

    def finished(self) -> Gang:
        steps = tuple(draft.finished() for draft in self.steps)
        return Gang(steps, tuple(self.waits), tuple(self.arguments), tuple(sorted(self.after)))


@dataclass
class DraftPart:
    island: str
    platform: str
    slots: list[Layout] = field(default_factory=list)
    arguments: list[int] = field(default_factory=list)
    results: list[tuple[int, int]] = field(default_factory=list)
    decisions: list[int] = field(default_factory=list)
    edge_of_slot: dict[int, int] = field(default_factory=dict)
    edges_in: list[Edge] = field(default_factory=list)
    edges_out: list[Edge] = field(default_factory=list)
    sends_of_slot: dict[int, list[Edge]] = field(default_factory=dict)
    gangs: list[DraftGang] = field(default_factory=list)

    def new_slot(self, layout: Layout) -> int:
        self.slots.append(layout)
        return len(self.slots) - 1

    def finished(
        self, plan_name: str, names: tuple[str, ...], sources: tuple[str, ...], slices: tuple[int, ...]
    ) -> Part:
        return Part(
            plan_name,
            self.island,
            self.platform,
            tuple(self.slots),
            tuple(self.arguments),
            tuple(self.results),
            tuple(gang.finished() for gang in self.gangs),
            tuple(self.edges_in),
            tuple(self.edges_out),
            names,
            sources,
            slices,
            tuple(self.decisions),
        )


class GangCutter:
    """Cuts a part's steps into gangs: a new one where a step is the first to need an edge (D-2), and where a step on
    other devices would wait for edges that it does not need. `strict`: gangs keep their order; `per_device`: only those
    do that share a device."""

    def __init__(self, part: DraftPart, *, strict: bool, per_device: bool = False) -> None:
        self.part, self.strict, self.per_device = part, strict, per_device
        self.gang = DraftGang()
        self.first = 0  # the first gang that computes
        self.arrived: set[int] = set()
        self.written_here: set[int] = set()
        self.devices_here: set[int] = set()
        self.device_sets: dict[tuple[int, ...], frozenset[int]] = {}
        self.last_gang: dict[int, int] = {}  # by device

    def cut(self, sends: list[list[Draft]], computes: Iterable[Draft]) -> None:
        """Gangs of `sends`, as they stand, then of `computes` with the sends of what they write."""
        for drafts in sends:
            self.part.gangs.append(DraftGang(steps=drafts))
        self.first = len(self.part.gangs)
        for draft in computes:
            assert isinstance(draft.step, Execute)
            needs = {self.part.edge_of_slot[slot] for slot in draft.reads if slot in self.part.edge_of_slot}
            needs -= self.arrived
            devices = self.device_sets.setdefault(draft.step.devices, frozenset(draft.step.devices))
            if self.gang.steps and (needs or self._would_wait_for_nothing(draft, devices)):
                self._close()
            self.gang.waits += sorted(needs)
            self.arrived |= needs
            self.gang.steps.append(draft)
            self.written_here.update(draft.writes)
            self.devices_here |= devices
            for slot in draft.writes:
                for edge in self.part.sends_of_slot.get(slot, ()):
                    self.gang.steps.append(Draft(Send(slot, edge.index), (slot,)))
        self._close()

    def _would_wait_for_nothing(self, draft: Draft, devices: frozenset[int]) -> bool:
        if (self.strict and not self.per_device) or not self.gang.waits:
            return False
        return self.devices_here.isdisjoint(devices) and self.written_here.isdisjoint(draft.reads)

    def _close(self) -> None:
        if self.gang.steps:
            number = len(self.part.gangs)
            if self.per_device:
                self.gang.after.update(self.last_gang[device] for device in self.devices_here & self.last_gang.keys())
                self.last_gang.update(dict.fromkeys(self.devices_here, number))
            elif self.strict and number > self.first:
                self.gang.after.add(number - 1)
            self.part.gangs.append(self.gang)
        self.gang = DraftGang()
        self.written_here, self.devices_here = set(), set()


def free(part: DraftPart) -> None:
    """Liveness (D-3), and with it the order that gangs must keep although they may overtake: after those that write
    what they read, that first read what they read, and that read what they free."""
    results = {slot for _, slot in part.results}
    incoming = set(part.arguments) | set(part.edge_of_slot)
    brought_by: dict[int, int] = {}  # slot -> the gang that writes it, or is the first to read it if it comes in
    readers: dict[int, list[int]] = {}
    last: dict[int, Draft] = {}
    arguments = set(part.arguments)
    for number, gang in enumerate(part.gangs):
        for draft in gang.steps:
            for slot in draft.reads:
                if slot not in brought_by:
                    assert slot in incoming, f"slot {slot} of island {part.island} is read before it is written (D-1)"
                    brought_by[slot] = number
                    if slot in arguments:
                        gang.arguments.append(slot)
                readers.setdefault(slot, []).append(number)
                last[slot] = draft
            for slot in draft.writes:
                brought_by[slot] = number
                last[slot] = draft
    for slot, draft in last.items():
        if slot not in results:
            draft.frees.append(slot)
    ancestors: list[int] = []  # as bit sets
    for number, gang in enumerate(part.gangs):
        needed = set(gang.after)
        for draft in gang.steps:
            needed.update(brought_by[slot] for slot in draft.reads)
            for slot in draft.frees:
                needed.update(readers.get(slot, ()))
        needed.discard(number)
        seen, gang.after = 0, set()
        for other in sorted(needed, reverse=True):  # only those that do not follow from others
            if not seen >> other & 1:
                gang.after.add(other)
                seen |= ancestors[other]
        ancestors.append(seen | 1 << number)
