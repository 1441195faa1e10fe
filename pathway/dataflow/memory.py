"""How many bytes a plan needs on each device at most, known before it runs, since its liveness is static."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pathway.dataflow.layout import Layout
from pathway.dataflow.plan import Execute, Part, Plan


def peak_bytes(plan: Plan, temp_bytes: Mapping[str, int] | None = None) -> dict[str, dict[int, int]]:
    """For each island and each of its devices that the plan uses, the most bytes held at once.

    Counted are arguments (to the end, unless donated, since their owner still holds them), what edges bring, what nodes
    write, and while a computation runs its temporary bytes per device (XLA's `memory_analysis`, by content hash).
    The gangs are taken in the plan's order; where they may overtake, one island's peak can be higher."""
    return {part.island: _peak_of_part(part, temp_bytes or {}) for part in plan.parts}


def _peak_of_part(part: Part, temp_bytes: Mapping[str, int]) -> dict[int, int]:
    devices = sorted({device for layout in part.slots for device in layout.devices})
    column = {device: number for number, device in enumerate(devices)}
    held = np.zeros(len(devices), np.int64)
    peak = held.copy()
    columns: dict[tuple[int, ...], np.ndarray] = {}

    def at(of: tuple[int, ...]) -> np.ndarray:
        if of not in columns:
            columns[of] = np.array([column[device] for device in of], np.intp)
        return columns[of]

    def hold(layout: Layout, sign: int = 1) -> None:
        held[at(layout.devices)] += sign * layout.shard_nbytes

    edge_slots = {edge.index: edge.target_slot for edge in part.edges_in}
    lent = set(part.arguments)
    for slot in part.arguments:
        hold(part.slots[slot])
    for gang in part.gangs:
        for edge in gang.waits:
            hold(part.slots[edge_slots[edge]])
        for step in gang.steps:
            donated: set[int] = set()
            if isinstance(step, Execute):
                # A donated buffer's memory becomes an output's: it is not needed twice.
                donated = {step.inputs[position] for position in step.donates}
                for slot in donated:
                    hold(part.slots[slot], -1)
                for slot in step.outputs:
                    hold(part.slots[slot])
                running = held.copy()
                running[at(step.devices)] += temp_bytes.get(step.computation, 0)
                np.maximum(peak, running, out=peak)
            else:
                np.maximum(peak, held, out=peak)
            for slot in step.frees:
                if slot not in lent and slot not in donated:
                    hold(part.slots[slot], -1)
    np.maximum(peak, held, out=peak)
    return {device: int(peak[column[device]]) for device in devices}
