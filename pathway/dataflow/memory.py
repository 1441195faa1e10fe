"""How many bytes a plan needs on each device at most, known before it runs, since its liveness is static.

Counted are arguments (to the end, unless donated, since their owner still holds them), what edges bring, what nodes
write, and while a computation runs its temporary bytes per device (XLA's `memory_analysis`, by content hash). The gangs
are taken in the plan's order; where they may overtake, one island's peak can be higher.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pathway.dataflow.layout import Layout
from pathway.dataflow.plan import Execute, Part, Plan

Span = tuple[tuple[int, ...], int]
"""Devices of an island, and bytes on each of them."""


def peak_bytes(plan: Plan, temp_bytes: Mapping[str, int] | None = None) -> dict[str, dict[int, int]]:
    """For each island and each of its devices that the plan uses, the most bytes held at once."""
    return {part.island: dict(part_memory(part, temp_bytes or {}).peak) for part in plan.parts}


@dataclass(frozen=True, slots=True)
class PartMemory:
    """What one part of a plan needs. `arguments[i]` and `results[i]` are those of the part, in its order; `donated` are
    positions in its arguments."""

    peak: Mapping[int, int]
    """By device, with its arguments."""
    beyond: Mapping[int, int]
    """By device, the peak without its arguments."""
    arguments: tuple[Span, ...]
    results: tuple[Span, ...]
    donated: tuple[int, ...]


def part_memory(part: Part, temp_bytes: Mapping[str, int]) -> PartMemory:
    """The needs of a part, with `temp_bytes` of each computation."""
    steps = [step for gang in part.gangs for step in gang.steps if isinstance(step, Execute)]
    named = {layout.devices for layout in part.slots} | {step.devices for step in steps}
    devices = sorted({device for group in named for device in group})
    column = {device: number for number, device in enumerate(devices)}
    held = np.zeros(len(devices), np.int64)
    columns: dict[tuple[int, ...], np.ndarray] = {}

    def at(of: tuple[int, ...]) -> np.ndarray:
        if of not in columns:
            columns[of] = np.array([column[device] for device in of], np.intp)
        return columns[of]

    peak = held.copy()
    given = held.copy()
    for change in _changes(part):
        for slot, sign in change.slots:
            layout = part.slots[slot]
            held[at(layout.devices)] += sign * layout.shard_nbytes
        if change.step is not None:
            running = held.copy()
            running[at(change.step.devices)] += temp_bytes.get(change.step.computation, 0)
            np.maximum(peak, running, out=peak)
        else:
            np.maximum(peak, held, out=peak)
        if change.begins:
            given = held.copy()
    donated = _donated(part)
    return PartMemory(
        peak={device: int(peak[column[device]]) for device in devices},
        beyond={device: int(peak[column[device]] - given[column[device]]) for device in devices},
        arguments=tuple(_span(part.slots[slot]) for slot in part.arguments),
        results=tuple(_span(part.slots[slot]) for _, slot in part.results),
        donated=tuple(position for position, slot in enumerate(part.arguments) if slot in donated),
    )


@dataclass(frozen=True, slots=True)
class Use:
    """One of the arrays, or the temporaries, that a part holds at its peak. `source` is the user's line."""

    nbytes: int
    what: str
    source: str = ""

    def __str__(self) -> str:
        return f"{size(self.nbytes)} {self.what}{f' ({self.source})' if self.source else ''}"


def largest_at_peak(part: Part, temp_bytes: Mapping[str, int], count: int = 4) -> list[Use]:
    """What the fullest device of a part holds at its peak: the largest arrays, and where they are made."""
    peak = part_memory(part, temp_bytes).peak
    fullest = max(peak, key=lambda device: peak[device], default=0)
    makers = origins(part)
    held: dict[int, Use] = {}
    best: list[Use] = []
    best_nbytes = -1
    for change in _changes(part):
        for slot, sign in change.slots:
            layout = part.slots[slot]
            if fullest in layout.devices:
                if sign < 0:
                    held.pop(slot, None)
                else:
                    held[slot] = Use(layout.shard_nbytes, *makers[slot])
        uses = list(held.values())
        step = change.step
        if step is not None and fullest in step.devices and temp_bytes.get(step.computation, 0):
            name, source = _node(part, step.node)
            uses.append(Use(temp_bytes[step.computation], f"temporaries of {name}", source))
        nbytes = sum(use.nbytes for use in uses)
        if nbytes > best_nbytes:
            best, best_nbytes = uses, nbytes
    return sorted(best, key=lambda use: -use.nbytes)[:count]


def origins(part: Part) -> list[tuple[str, str]]:
    """What each slot is, for people, and the user's line where it is made ("" for what comes from outside)."""
    found = [(str(layout.aval), "") for layout in part.slots]
    for number, slot in enumerate(part.arguments):
        found[slot] = (f"{part.slots[slot].aval}, argument {number}", "")
    for edge in part.edges_in:
        found[edge.target_slot] = (f"{part.slots[edge.target_slot].aval} from island {edge.source_island}", "")
    for gang in part.gangs:
        for step in gang.steps:
            if isinstance(step, Execute):
                name, source = _node(part, step.node)
                for slot in step.outputs:
                    found[slot] = (f"{part.slots[slot].aval} of {name}", source)
    return found


def size(nbytes: int) -> str:
    """Bytes for people, in decimal units: "3.1 GB"."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"


def spans(by_device: Mapping[int, int]) -> tuple[Span, ...]:
    """The same as few groups of devices."""
    groups: dict[int, list[int]] = {}
    for device, nbytes in by_device.items():
        if nbytes:
            groups.setdefault(nbytes, []).append(device)
    return tuple((tuple(devices), nbytes) for nbytes, devices in groups.items())


# -- the walk through a part -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Change:
    """What is held more (+1) or less (-1) from here on. `step`: the computation that runs now."""

    slots: tuple[tuple[int, int], ...]
    step: Execute | None = None
    begins: bool = False


def _changes(part: Part) -> Iterator[_Change]:
    edge_slots = {edge.index: edge.target_slot for edge in part.edges_in}
    lent = dict.fromkeys(part.arguments)
    yield _Change(_signed(lent, 1), begins=True)
    for gang in part.gangs:
        yield _Change(_signed((edge_slots[edge] for edge in gang.waits), 1))
        for step in gang.steps:
            donated: set[int] = set()
            if isinstance(step, Execute):
                # A donated buffer's memory becomes an output's: it is not needed twice.
                donated = {step.inputs[position] for position in step.donates}
                yield _Change(_signed(donated, -1) + _signed(step.outputs, 1), step)
            yield _Change(_signed((slot for slot in step.frees if slot not in lent and slot not in donated), -1))


def _signed(slots: Iterable[int], sign: int) -> tuple[tuple[int, int], ...]:
    return tuple((slot, sign) for slot in slots)


def _donated(part: Part) -> set[int]:
    steps = (step for gang in part.gangs for step in gang.steps if isinstance(step, Execute))
    return {step.inputs[position] for step in steps for position in step.donates}


def _node(part: Part, node: int) -> tuple[str, str]:
    name = part.names[node] if 0 <= node < len(part.names) else "a node"
    return name, part.sources[node] if 0 <= node < len(part.sources) else ""


def _span(layout: Layout) -> Span:
    return layout.devices, layout.shard_nbytes
