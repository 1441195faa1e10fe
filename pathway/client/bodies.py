"""Programs that data control, on their way to the cluster: a plan for every segment, and the script over them.

Bodies (the program, branches, steps of loops) are lowered from the outside in: what a body is given has a home before
the body is placed. What branches put out must have one home whichever is chosen, so a branch is placed once to see
where its results would be, and again with those moved that would be elsewhere. Loops find the homes of what they carry
in the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pathway.array import Array, Reference
from pathway.client.bindings import Binding
from pathway.client.build import (
    BIND_TIMEOUT_S,
    LoweredPlan,
    check_same_client,
    client_of,
    closed_over,
    default_slice,
    lower_placed,
    resident,
    slices_of,
)
from pathway.client.plans import HostArgument, ResultSource, check_donated
from pathway.client.scripts import Constant, LoweredScript
from pathway.client.slices import live_slices
from pathway.dataflow import jaxprs
from pathway.dataflow.control import Control, Cut, branches_of, cut, has_control, loop_of, reasons_of
from pathway.dataflow.place import Resident, place
from pathway.dataflow.placed import placed_call
from pathway.dataflow.script import Body, Choose, Repeat, RunPlan, Script, Task
from pathway.dataflow.sharding_rules import replicated
from pathway.dataflow.trace import Statics, Traced
from pathway.errors import ProgramError
from pathway.transport import messages as m

if TYPE_CHECKING:
    from pathway.client.client import Client

MOST_ROUNDS = 8
"""How often a loop's step is placed, at most, until what it carries stays where it is."""


@dataclass(frozen=True)
class Known:
    """What a body knows of a value: its register, and its home (None: a small host value)."""

    register: int
    home: Resident | None


def is_controlled(traced: Traced) -> bool:
    """Whether data decide, over slices, what of the program runs."""
    return has_control(traced.jaxpr)


def lower_script(
    traced: Traced, leaves: Sequence[Any], *, donated: Collection[int] = (), fused: bool = True, schedule: Any = None
) -> LoweredScript:
    """The plans and the script of a program called with arguments like `leaves`."""
    return _Lowering(traced, leaves, fused, schedule).lowered(donated)


class _Lowering:
    def __init__(self, traced: Traced, leaves: Sequence[Any], fused: bool, schedule: Any) -> None:
        self.traced, self.leaves, self.fused, self.schedule = traced, leaves, fused, schedule
        self.slices = live_slices()
        self.shapes = {number: handle.shape_for_graph for number, handle in self.slices.items()}
        named = [s for s in map(jaxprs.placed_slice, jaxprs.every_equation(traced.jaxpr)) if s is not None]
        client = client_of(leaves)
        default = named[0] if named else default_slice(client, self.slices)
        if default is None:
            arrays = [leaf for leaf in leaves if isinstance(leaf, Array)]
            if not arrays:
                raise ProgramError(f"{traced.name} uses no slice: place a part of it with pathway.jit")
            default = arrays[0]._kind.binding.bound.slice
        if default not in self.slices:
            raise ProgramError(f"{traced.name} has a stage on slice {default}, which is not there any more")
        self.default = default
        self.client: Client = client or self.slices[default].client
        self.plans: list[LoweredPlan] = []
        self.bodies: list[Body | None] = []
        self.fixed: list[Array | Constant] = []
        self.fixed_index: dict[Any, int] = {}
        self.made = 0  # buffers that the client names
        self.makers: dict[int, tuple[LoweredPlan, int, int]] = {}  # main register -> plan, result position, number
        self.dry = 0
        self.known_homes: dict[Any, list[Resident | None]] = {}
        self.known_bodies: dict[Any, int] = {}
        self.interner = jaxprs.Interner()  # of all plans: what is alike is lowered once

    def lowered(self, donated: Collection[int]) -> LoweredScript:
        hosts, inputs = [], []
        for index, leaf in enumerate(self.leaves):
            home: Resident | None = None
            if isinstance(leaf, Array):
                home = resident(Reference(leaf))
            else:
                aval = self.traced.in_avals[index]
                kind = None
                if aval.physical.nbytes > m.INLINE_BYTES:
                    sharding = replicated(self.shapes[self.default].mesh, len(aval.shape))
                    home = Resident(self.default, sharding)
                    kind = self._binding(self.default).kind(aval, sharding)
                hosts.append(HostArgument(index, aval, kind))
            inputs.append(Known(-1 - index, home))
        _, outputs = self.body(self.traced.jaxpr, inputs, [None] * len(self.traced.out_avals), main=True)
        put_kinds = {host.position: host.kind for host in hosts if host.kind is not None}
        results = []
        for known in outputs:
            if known.register < 0:
                index = -1 - known.register
                array: Any = [*self.leaves, *self.fixed][index]
                kind = array._kind if isinstance(array, Array) else put_kinds[index]
                results.append(ResultSource(kind, -1, index))
            else:
                plan, position, number = self.makers[known.register]
                value = plan.graph.values[plan.graph.results[position].value]
                kind = plan.bindings[value.slice].kind(value.aval, value.sharding)
                results.append(ResultSource(kind, number, -1))
        used = set().union({self.default}, *(slices_of(plan.graph) for plan in self.plans))
        captured = [array for array in self.fixed if isinstance(array, Array)]
        check_donated(self.traced.name, self.leaves, donated, captured)
        return LoweredScript(
            client=self.client,
            traced=self.traced,
            plans=self.plans,
            script=Script(
                tuple(body for body in self.bodies if body is not None), len(self.leaves) + len(self.fixed), self.made
            ),
            fixed=self.fixed,
            hosts=hosts,
            results=results,
            donated=tuple(sorted(donated)),
            bindings={number: self._binding(number) for number in sorted(used)},
        )

    def _binding(self, slice: int) -> Binding:
        return self.slices[slice].binding(BIND_TIMEOUT_S)

    # -- bodies -----------------------------------------------------------------------------------------------------

    def body(
        self, jaxpr: Any, inputs: Sequence[Known], pins: Sequence[Resident | None], *, main: bool = False,
        decides: bool = False,
    ) -> tuple[int, list[Known]]:  # fmt: skip
        """Lower a body; returns its number and where its outputs are. `inputs` with a register are its first ones.
        `pins`: where outputs must be. `decides`: the last output is a decision. `main`: outputs are the client's."""
        number = len(self.bodies)
        self.bodies.append(None)
        made = cut(jaxpr, [known.home is None for known in inputs])
        scope = _Scope(number, main, 1 + max((known.register for known in inputs), default=-1))
        inputs_count = scope.registers
        scope.known.update(zip(made.inputs, inputs, strict=True))
        outputs = list(made.outputs)
        for position, (atom, pin) in enumerate(zip(outputs, [*pins, *([None] if decides else [])], strict=True)):
            if decides and position == len(outputs) - 1:
                outputs[position] = made.append(_told, atom)
            elif pin is not None:
                outputs[position] = made.append(self._mover(pin), atom)
            elif made.is_floating(atom) or (main and self._is_of_control(made, atom)):
                outputs[position] = made.append(_copied, atom)
        told = {outputs[-1]} if decides else set()
        decided = {
            control: made.append(_told, control.equation.invars[0]) for control in made.controls if not control.is_loop
        }
        told.update(decided.values())
        wanted = [*outputs, *told]
        wanted += [atom for control in made.controls for atom in control.equation.invars]
        parts = {deps: made.segment(deps, ()) for deps in made.segments}
        wanted += [var for _, read, _ in parts.values() for var in read]
        for entry in made.order():
            if isinstance(entry, Control):
                if entry.is_loop:
                    self._loop(scope, made, entry)
                else:
                    self._condition(scope, made, entry, decided[entry])
            else:
                jaxpr, read, results = made.segment(entry, wanted)
                self._segment(scope, jaxpr, read, results, told)
        known = [scope.known[atom] for atom in outputs]
        registers = [each.register for each in known]
        if decides and not self.dry:
            registers[-1] = scope.decisions[outputs[-1]]
        self.bodies[number] = Body(scope.registers, inputs_count, tuple(scope.tasks), tuple(registers))
        return number, known

    @staticmethod
    def _is_of_control(made: Cut, atom: Any) -> bool:
        return any(atom in control.equation.outvars for control in made.controls)

    def homes(self, jaxpr: Any, inputs: Sequence[Known], decides: bool = False) -> list[Resident | None]:
        """Where the outputs of a body would be; None for what can be anywhere."""
        jaxpr = self.interner.intern(jaxpr)
        key = (id(jaxpr), tuple(inputs), decides)
        if key not in self.known_homes:
            self.known_homes[key] = self._homes(jaxpr, inputs, decides)
        return self.known_homes[key]

    def _homes(self, jaxpr: Any, inputs: Sequence[Known], decides: bool) -> list[Resident | None]:
        made = cut(jaxpr, [known.home is None for known in inputs])
        floating = [made.is_floating(atom) for atom in made.outputs]
        with self._dry():
            _, known = self.body(jaxpr, inputs, [None] * (len(floating) - decides), decides=decides)
        return [None if anywhere else each.home for anywhere, each in zip(floating, known, strict=True)]

    @contextmanager
    def _dry(self) -> Iterator[None]:
        bodies = len(self.bodies)
        self.dry += 1
        try:
            yield
        finally:
            self.dry -= 1
            del self.bodies[bodies:]

    def settled(
        self, scope: _Scope, jaxpr: Any, inputs: Sequence[Known], natural: Sequence[Resident | None],
        wanted: Sequence[Resident], decides: bool = False,
    ) -> int:  # fmt: skip
        """The body of a jaxpr with its outputs, which would be at their `natural` homes, at the `wanted` ones."""
        pins = tuple(None if _same(now, then) else then for now, then in zip(natural, wanted))  # noqa: B905 (decisions)
        jaxpr = self.interner.intern(jaxpr)
        key = (id(jaxpr), tuple(inputs), pins, decides)
        found = self.known_bodies.get(key, 0)
        if found > scope.number:  # K-1
            return found
        number, known = self.body(jaxpr, inputs, pins, decides=decides)
        for each, home in zip(known, wanted):  # noqa: B905
            if not _same(each.home, home):
                raise ProgramError(f"{self.traced.name}: a result of a branch is at {each.home}, and not at {home}")
        self.known_bodies[key] = number
        return number

    # -- what bodies are made of ------------------------------------------------------------------------------------

    def _segment(
        self, scope: _Scope, jaxpr: Any, read: Sequence[Any], results: Sequence[Any], told: Collection[Any]
    ) -> None:
        """A plan for a segment."""
        if not results:
            return
        inputs = [scope.known[var] for var in read]
        body = jaxprs.opened(jaxpr)[0]
        traced = Traced(
            name=self.traced.name,
            jaxpr=jaxpr,
            in_tree=None,
            out_tree=None,
            in_avals=tuple(map(jaxprs.aval_of, body.invars)),
            out_avals=tuple(map(jaxprs.aval_of, body.outvars)),
            statics=Statics(),
        )
        graph = place(
            traced, self.shapes, [known.home for known in inputs], references=resident, default_slice=self.default
        )
        if self.dry:
            for var, result in zip(results, graph.results, strict=True):
                value = graph.values[result.value]
                scope.known[var] = Known(scope.register(), Resident(value.slice, value.sharding))
            return
        graph = replace(
            graph, nodes=tuple(replace(node, jaxpr=self.interner.intern(node.jaxpr)) for node in graph.nodes)
        )
        check_same_client(self.client, self.traced.name, self.leaves, graph, self.slices)
        decisions = [position for position, var in enumerate(results) if var in told]
        plan = lower_placed(self.client, traced, graph, fused=self.fused, schedule=self.schedule, decisions=decisions)
        self._run_plan(scope, plan, inputs, results, decisions)

    def _run_plan(
        self, scope: _Scope, lowered: LoweredPlan, inputs: Sequence[Known], results: Sequence[Any],
        decisions: Collection[int],
    ) -> None:  # fmt: skip
        number, plan, graph = len(self.plans), lowered.plan, lowered.graph
        self.plans.append(lowered)
        arguments = [[0] * len(part.arguments) for part in plan.parts]
        references = closed_over(graph)
        for index, argument in enumerate(plan.arguments):
            for part, slot in argument.entries:
                behind = index - len(inputs)
                if behind < 0:
                    register = inputs[index].register
                elif behind < len(graph.constants):
                    fixed = Constant(number, part, slot, graph.constants[behind][1])
                    register = self._fix(fixed, fixed)
                else:
                    array = references[behind - len(graph.constants)]
                    register = self._fix(id(array), array)
                arguments[part][slot] = register
        registers = [scope.register() for _ in range(plan.result_count)]
        homes = [0] * plan.result_count
        told = []
        first = self.made
        for position, (var, result) in enumerate(zip(results, plan.results, strict=True)):
            value = graph.values[graph.results[position].value]
            home = Resident(value.slice, value.sharding)
            if result.argument >= 0:
                behind = result.argument - len(inputs) - len(graph.constants)
                scope.known[var] = (
                    inputs[result.argument]
                    if behind < 0
                    else Known(self._fix(id(references[behind]), references[behind]), home)
                )
                continue
            homes[result.number] = result.part
            scope.known[var] = Known(registers[result.number], home)
            if scope.main:
                self.makers[registers[result.number]] = (lowered, position, first + result.number)
            if position in decisions:
                register = scope.register()
                scope.decisions[var] = register
                told.append((result.number, register))
        if scope.main:
            self.made += plan.result_count
        scope.tasks.append(
            RunPlan(
                number,
                tuple(map(tuple, arguments)),
                tuple(registers),
                tuple(homes),
                tuple(told),
                first if scope.main else 0,
            )
        )

    def _fix(self, key: Any, value: Array | Constant) -> int:
        index = self.fixed_index.setdefault(key, len(self.fixed))
        if index == len(self.fixed):
            self.fixed.append(value)
        return -1 - len(self.leaves) - index

    def _condition(self, scope: _Scope, made: Cut, control: Control, decided: Any) -> None:
        branches, reasons = branches_of(made, control), reasons_of(control)
        given = [_passed(scope, read) for _, read in branches]
        allowed = [number for number, reason in enumerate(reasons) if not reason]
        natural = {number: self.homes(branches[number][0], given[number][0]) for number in allowed}
        outputs = control.equation.outvars
        columns = [natural[number] for number in (allowed if len(branches) > 2 else reversed(allowed))]  # true first
        homes = [
            next((home for home in column if home is not None), None) or self._somewhere(var)
            for var, column in zip(outputs, zip(*columns, strict=True), strict=True)
        ]
        if not self.dry:
            numbers = [
                -1 if reason else self.settled(scope, jaxpr, inside, natural[number], homes)
                for number, ((jaxpr, _), (inside, _), reason) in enumerate(zip(branches, given, reasons, strict=True))
            ]
            passed = tuple(() if reason else outside for (_, outside), reason in zip(given, reasons, strict=True))
        registers = scope.set_outputs(outputs, homes)
        if not self.dry:
            decision = scope.decisions[decided]
            scope.tasks.append(Choose(decision, tuple(numbers), passed, registers, tuple(reasons)))

    def _loop(self, scope: _Scope, made: Cut, control: Control) -> None:
        entry, read, step, fixed = loop_of(made, control)
        outputs = control.equation.outvars
        inside, outside = _passed(scope, read)
        at_first = self.homes(entry, inside, decides=True)[:-1]
        homes = list(at_first)

        def step_inputs() -> tuple[list[Known], tuple[int, ...]]:
            carried = [
                Known(position, home or self._somewhere(var))
                for position, (var, home) in enumerate(zip(outputs, homes, strict=True))
            ]
            inside, outside = _passed(scope, fixed, len(carried))
            return [*carried, *inside], outside

        for _ in range(MOST_ROUNDS):
            found = self.homes(step, step_inputs()[0], decides=True)[:-1]
            moved = [now or before for now, before in zip(found, homes, strict=True)]
            if all(_same(now, before) for now, before in zip(moved, homes, strict=True)):
                break
            homes = moved
        settled = [home or self._somewhere(var) for var, home in zip(outputs, homes, strict=True)]
        if not self.dry:
            first = self.settled(scope, entry, inside, at_first, settled, decides=True)
            step_inside, step_outside = step_inputs()
            again = self.settled(scope, step, step_inside, found, settled, decides=True)
        registers = scope.set_outputs(outputs, settled)
        if not self.dry:
            scope.tasks.append(Repeat(first, again, outside, step_outside, registers))

    def _somewhere(self, var: Any) -> Resident:
        """A home for what could be anywhere."""
        return Resident(self.default, replicated(self.shapes[self.default].mesh, len(var.aval.shape)))

    def _mover(self, home: Resident) -> Any:
        spec = PartitionSpec(*(axes if axes else None for axes in home.sharding.spec))
        return placed_call(_copied, self.shapes[home.slice], in_specs=None, out_specs=spec, name="move")


@dataclass
class _Scope:
    """A body while it is lowered."""

    number: int
    main: bool
    registers: int
    known: dict[Any, Known] = field(default_factory=dict)
    decisions: dict[Any, int] = field(default_factory=dict)
    tasks: list[Task] = field(default_factory=list)

    def register(self) -> int:
        self.registers += 1
        return self.registers - 1

    def set_outputs(self, outputs: Sequence[Any], homes: Sequence[Resident]) -> tuple[int, ...]:
        """Registers for what a condition or loop puts out."""
        registers = tuple(self.register() for _ in outputs)
        for var, number, home in zip(outputs, registers, homes, strict=True):
            self.known[var] = Known(number, home)
        return registers


def _passed(scope: _Scope, read: Sequence[Any], start: int = 0) -> tuple[list[Known], tuple[int, ...]]:
    """What a body within knows of what it reads, and the registers here that it is given, its own from `start` on."""
    inside, outside = [], []
    for var in read:
        known = scope.known[var]
        outside.append(known.register)
        home = known.home
        inside.append(Known(start + len(outside) - 1, home and Resident(home.slice, home.sharding)))
    return inside, tuple(outside)


def _same(one: Resident | None, other: Resident | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.slice == other.slice and one.sharding == other.sharding


def _copied(value: Any) -> Any:
    """The same, as an array of its own."""
    return jnp.array(value, copy=True)


def _told(value: Any) -> Any:
    """What decides, as the scheduler is told it."""
    return jnp.array(value, jnp.int32, copy=True)
