"""Nodes while they are being filled, and their completion to a graph.

Placement hands each equation to a *draft*. `complete` turns the drafts, in their order, into nodes: what nobody reads
is dropped, equal bodies become one object, and every value gets its home and sharding (G-2, G-3).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pathway.dataflow.graph import Graph, GraphArgument, GraphResult, Node, SliceShape, Value
from pathway.dataflow.jaxprs import (
    Atom,
    Equation,
    Interner,
    Literal,
    Var,
    aval_of,
    is_backward,
    make_jaxpr,
    opened,
    source_line,
    without_dead_code,
)
from pathway.dataflow.layout import Sharding
from pathway.dataflow.sharding_rules import output_shardings, replicated, wanted_sharding

Key = tuple[Var, int | None]
"""A value: a variable, and the slice it is on; None for host arguments and constants, which can be read anywhere."""


@dataclass(frozen=True)
class Resident:
    """An array that is on devices already: an argument, or what a closed-over array refers to."""

    slice: int
    sharding: Sharding
    handle: Hashable = None


@dataclass(frozen=True)
class Operation:
    """Equations that stay together. `body`: all of them as one jaxpr from `inputs`, where they have one."""

    name: str
    equations: tuple[Equation, ...]
    inputs: tuple[Atom, ...]
    outputs: tuple[Var, ...]
    body: Any = None


@dataclass(eq=False)
class Draft:
    """A node that is being filled. `defined` are the variables that it computes; `exported` those of them by which
    others may read its results (the rest are copies of something cheap, for its own use)."""

    slice: int
    reason: str
    placed: bool = False
    operations: list[Operation] = field(default_factory=list)
    reads: dict[Key, None] = field(default_factory=dict)
    constants: dict[Var, Any] = field(default_factory=dict)
    defined: set[Var] = field(default_factory=set)
    exported: dict[Var, None] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)

    def add(self, operation: Operation, export: bool = True) -> None:
        self.operations.append(operation)
        self.defined.update(operation.outputs)
        if export:
            self.exported.update(dict.fromkeys(operation.outputs))
            self.sources.append(source_line(operation.equations[0]))

    def name(self) -> str:
        """What people call it: its first few distinct operations."""
        local = self.defined - self.exported.keys()
        names = dict.fromkeys(op.name for op in self.operations if not local.issuperset(op.outputs))
        return "+".join(list(names)[:3]) + ("+..." if len(names) > 3 else "") if names else "constant"

    def source(self) -> str:
        return next((source for source in self.sources if source), "")

    def is_backward(self) -> bool:
        return any(is_backward(equation) for op in self.operations for equation in op.equations)

    def body(self, outputs: Sequence[Var], interner: Interner) -> tuple[Any, list[Key]]:
        """The node's jaxpr with these outputs, and what it reads for each of its inputs."""
        homes = {key[0]: key for key in self.reads}
        if len(self.operations) == 1 and self.operations[0].body is not None:
            stage = self.operations[0]
            if not any(isinstance(atom, Literal) or atom in self.constants for atom in stage.inputs):
                wanted = set(outputs)
                jaxpr, live = interner.pruned(
                    interner.intern(stage.body), tuple(var in wanted for var in stage.outputs)
                )
                inputs = [homes[atom] for atom, lives in zip(stage.inputs, live, strict=True) if lives]
                return jaxpr, inputs
        keys = list(self.reads)
        equations = [equation for operation in self.operations for equation in operation.equations]
        whole = make_jaxpr([var for var, _ in keys], outputs, equations, list(self.constants.items()))
        jaxpr, live = without_dead_code(whole, [True] * len(outputs))
        return interner.intern(jaxpr), [key for key, lives in zip(keys, live, strict=True) if lives]


@dataclass(frozen=True)
class Argument:
    """A flat argument of the program: its variable, where it is, and whether its caller gives it up."""

    var: Var
    resident: Resident | None
    donated: bool


@dataclass(frozen=True)
class _Finished:
    draft: Draft
    jaxpr: Any
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]


def complete(
    name: str,
    slices: Mapping[int, SliceShape],
    home: int,
    drafts: Sequence[Draft],
    arguments: Sequence[Argument],
    constants: Mapping[Var, Any],
    references: Mapping[Var, Resident],
    results: Sequence[Key],
) -> Graph:
    """The graph of these drafts. `home` is where an argument goes that nobody reads."""
    finished = _without_dead_drafts(drafts, results)
    read = {key for part in finished for key in part.reads}
    constants = {var: value for var, value in constants.items() if (var, None) in read}
    references = {var: resident for var, resident in references.items() if (var, resident.slice) in read}
    homes: dict[Key, tuple[int, Sharding]] = {}
    for argument in arguments:
        if argument.resident is not None:
            homes[argument.var, argument.resident.slice] = _home(argument.var, argument.resident)
    for var, resident in references.items():
        homes[var, resident.slice] = _home(var, resident)

    shardings: list[tuple[tuple[Sharding, ...], tuple[Sharding, ...]]] = []
    rules: dict[Any, tuple[Sharding, ...]] = {}
    for part in finished:
        slice, mesh = part.draft.slice, slices[part.draft.slice].mesh
        known = [homes[key][1] if key in homes and homes[key][0] == slice else None for key in part.reads]
        inputs = []
        for position, key in enumerate(part.reads):
            if key not in homes:  # a host array takes the home that its first reader wants
                homes[key] = (slice, wanted_sharding(part.jaxpr, position, mesh, known))
            at, sharding = homes[key]
            inputs.append(sharding if at == slice else wanted_sharding(part.jaxpr, position, mesh, known))
        rule = (id(part.jaxpr), tuple(inputs), mesh)
        if rule not in rules:
            rules[rule] = output_shardings(part.jaxpr, inputs, mesh)
        outputs = rules[rule]
        homes.update((key, (slice, sharding)) for key, sharding in zip(part.writes, outputs, strict=True))
        shardings.append((tuple(inputs), outputs))

    keys: list[Key] = [
        (argument.var, None if argument.resident is None else argument.resident.slice) for argument in arguments
    ]
    for key in keys:
        homes.setdefault(key, (home, replicated(slices[home].mesh, len(key[0].aval.shape))))
    keys += [(var, None) for var in constants]
    keys += [(var, resident.slice) for var, resident in references.items()]
    keys += [key for part in finished for key in part.writes]
    numbers = {key: number for number, key in enumerate(keys)}
    return Graph(
        name=name,
        slices=dict(slices),
        values=tuple(Value(number, aval_of(key[0]), *homes[key]) for key, number in numbers.items()),
        nodes=tuple(
            Node(
                index=index,
                name=part.draft.name(),
                slice=part.draft.slice,
                inputs=tuple(numbers[key] for key in part.reads),
                outputs=tuple(numbers[key] for key in part.writes),
                in_shardings=inputs,
                out_shardings=outputs,
                jaxpr=part.jaxpr,
                source=part.draft.source(),
                placed=part.draft.placed,
                reason=part.draft.reason,
                backward=part.draft.is_backward(),
            )
            for index, (part, (inputs, outputs)) in enumerate(zip(finished, shardings, strict=True))
        ),
        arguments=tuple(
            GraphArgument(number, argument.resident is not None, argument.donated)
            for number, argument in enumerate(arguments)
        ),
        results=tuple(GraphResult(numbers[key]) for key in results),
        constants=tuple((numbers[var, None], value) for var, value in constants.items()),
        references=tuple((numbers[var, resident.slice], resident.handle) for var, resident in references.items()),
    )


def _home(var: Var, resident: Resident) -> tuple[int, Sharding]:
    return resident.slice, resident.sharding.of_rank(len(var.aval.shape))


def _without_dead_drafts(drafts: Sequence[Draft], results: Sequence[Key]) -> list[_Finished]:
    """Backwards, so that a node is known to be read by those that are themselves read."""
    needed, interner = set(results), Interner()
    finished = []
    for draft in reversed(drafts):
        outputs = [var for var in draft.exported if (var, draft.slice) in needed]
        if outputs:
            jaxpr, reads = draft.body(outputs, interner)
            if len(opened(jaxpr)[0].outvars) != len(outputs):
                raise AssertionError(f"{draft.name()} lost an output")
            needed.update(reads)
            finished.append(_Finished(draft, jaxpr, tuple(reads), tuple((var, draft.slice) for var in outputs)))
    finished.reverse()
    return finished
