"""A program that data control, as a script and the plans that it names: what is lowered, and its registration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from pathway.array import Array
from pathway.client.bindings import Binding
from pathway.client.build import LoweredPlan, assembler, constant, register
from pathway.client.plans import BoundPlan, HostArgument, ResultSource
from pathway.dataflow.script import RunPlan, Script
from pathway.dataflow.trace import Traced
from pathway.transport import messages as m

if TYPE_CHECKING:
    from pathway.client.client import Client


@dataclass(frozen=True)
class Constant:
    """A closed-over host array that a plan wants at one of its argument slots."""

    plan: int
    part: int
    slot: int
    value: Any = field(compare=False)


@dataclass
class LoweredScript:
    """A script and its plans, before anyone but the client knows of them. `plans[i]` is what the script's `RunPlan`s
    call plan i. `fixed` are the script's arguments behind the program's own. `results`: for each of the program's, the
    plan and position that make it, and the number among the run's buffers; or the argument that it is."""

    client: Client
    traced: Traced
    plans: list[LoweredPlan]
    script: Script
    fixed: list[Array | Constant]
    hosts: list[HostArgument]
    results: list[ResultSource]
    donated: tuple[int, ...]
    bindings: Mapping[int, Binding]

    @property
    def name(self) -> str:
        return self.traced.name


class BoundScript(BoundPlan):
    """A script that this connection has registered, with its plans. `start` runs it."""

    def _message(self, values: list[Any]) -> Any:
        number, arguments = self.number, tuple(values)
        return lambda run, first: m.StartScript(run, number, first, arguments)


def bind_script(lowered: LoweredScript) -> BoundScript:
    """Register the plans and the script with the scheduler, without waiting, and prepare their calls."""
    client = lowered.client
    numbers = [register(plan) for plan in lowered.plans]
    fixed = [
        each
        if isinstance(each, Array)
        else constant(lowered.plans[each.plan], lowered.plans[each.plan].plan.parts[each.part], each.slot, each.value)
        for each in lowered.fixed
    ]
    bodies = tuple(
        msgspec.structs.replace(
            body,
            tasks=tuple(
                msgspec.structs.replace(task, plan=numbers[task.plan]) if isinstance(task, RunPlan) else task
                for task in body.tasks
            ),
        )
        for body in lowered.script.bodies
    )
    payload = msgspec.msgpack.encode(msgspec.structs.replace(lowered.script, bodies=bodies))
    with client.core.lock:
        number = client.core.new_plan()
        client.connection.send([m.RegisterScript(number, lowered.name, payload)])
    bound = BoundScript(
        client=client,
        number=number,
        name=lowered.name,
        result_count=lowered.script.results,
        donated=lowered.donated,
        bindings=tuple(lowered.bindings.values()),
        hosts=lowered.hosts,
        part_sources=(),
        fixed=fixed,
        results=lowered.results,
        assemble=assembler(lowered.traced),
    )
    bound.plan_numbers = tuple(numbers)
    return bound
