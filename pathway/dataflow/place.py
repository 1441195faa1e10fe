"""Where every equation of a program runs: from a traced program to a graph.

Stages (`pathway.jit` calls) say where they run. All other equations are placed here, in program order:

  P-1  An equation runs on the slice of its operands; where they differ, on that of the largest (in bytes), then of the
       last. Host arguments, literals and constants have no say. So an optimizer over many slices moves scalars only.
  P-2  An equation without an operand on any slice waits until something reads it, and runs on its reader's slice:
       cheap ones within the reader, others once per slice, before everything else of the slice (its *prologue*).
  P-3  A broadcast waits for its reader too: what it broadcasts travels, not what it makes of it.
  P-4  An equation joins the last node of its slice while that is open. A node closes when another slice reads from it,
       when a stage follows on its slice, or when an equation does that needs something else of other slices. No other
       slice has read from an open node, hence the graph has no cycles; and the sums over microbatches stay apart, each
       behind its own stage.
  P-5  Calls that contain stages are opened up. A loop or branch stays whole on its stages' one slice; a scan over
       stages of several slices is unrolled; other such loops and branches are refused.
  P-6  Slices and reshapes of arguments are part of the prologue, so that the stages of all microbatches have one body.
       So is what is computed of scalar arguments (step counts, say), so that nobody waits for it on another slice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pathway.dataflow.clusters import Clusters, winner
from pathway.dataflow.donate import assign_donations
from pathway.dataflow.drafts import Argument, Operation, Resident, complete
from pathway.dataflow.forward import forward_inputs
from pathway.dataflow.graph import Graph, SliceShape
from pathway.dataflow.jaxprs import (
    CALLS,
    REMATS,
    Atom,
    Equation,
    Literal,
    Var,
    aval_of,
    call_body,
    call_of,
    equation_name,
    every_equation,
    fresh,
    inner_jaxprs,
    make_jaxpr,
    nbytes,
    opened,
    placed_slice,
    placed_slices,
    renewed,
    scan_counts,
    source_line,
    struct_of,
    substituted,
    without_dead_code,
)
from pathway.dataflow.lift import Lifter, Reference
from pathway.dataflow.placed import pathway_array_p
from pathway.dataflow.sharding_rules import spec_of
from pathway.dataflow.trace import Traced
from pathway.errors import ProgramError

__all__ = ["Resident", "place"]

_VIEWS = frozenset({"slice", "squeeze", "reshape", "split", "transpose", "expand_dims"})
_EXPENSIVE = frozenset(
    {
        "dot_general",
        "ragged_dot_general",
        "conv_general_dilated",
        "sort",
        "scan",
        "while",
        "fft",
        "cholesky",
        "lu",
        "qr",
    }
    | {"eigh", "eig", "svd", "schur", "triangular_solve", "tridiagonal_solve", "householder_product"}
)
_SMALL_BYTES = 1024


def place(
    traced: Traced,
    slices: Mapping[int, SliceShape],
    arguments: Sequence[Resident | None],
    *,
    donated: Collection[int] = (),
    references: Callable[[Hashable], Resident] | None = None,
    default_slice: int | None = None,
) -> Graph:
    """The graph of a traced program, before fusion. `arguments` says for each flat argument where it is, None being the
    host; `donated` are flat arguments that the caller gives up; `references` finds closed-over arrays by handle;
    `default_slice` is for what nothing else in the program gives a place."""
    alive, live = without_dead_code(traced.jaxpr, [True] * len(traced.out_avals))
    clusters = Clusters(traced.name, slices, references, default_slice)
    given = [
        Argument(fresh(var), resident, number in donated)
        for number, (var, resident) in enumerate(zip(opened(traced.jaxpr)[0].invars, arguments, strict=True))
    ]
    for argument in given:
        clusters.give(argument)
    atoms = [argument.var for argument, lives in zip(given, live, strict=True) if lives]
    walk = _Walk(clusters, slices)
    outputs = substituted(alive, atoms, clusters.constant, walk.emit)
    results = [clusters.result(walk.settled(atom)) for atom in outputs]
    shared = Counter(r.handle for r in (*arguments, *clusters.references.values()) if r is not None)
    given = [replace(argument, donated=argument.donated and _is_alone(argument.resident, shared)) for argument in given]
    drafts, home = clusters.drafts(), clusters.home()
    graph = complete(traced.name, slices, home, drafts, given, clusters.constants, clusters.references, results)
    return assign_donations(forward_inputs(graph))


def _is_alone(resident: Resident | None, handles: Counter[Hashable]) -> bool:
    return resident is not None and (resident.handle is None or handles[resident.handle] == 1)


class _Walk:
    """Over a program's equations, in order."""

    def __init__(self, clusters: Clusters, slices: Mapping[int, SliceShape]) -> None:
        self._clusters, self._slices = clusters, slices
        self._lifter = Lifter()
        self._inner_slices: dict[tuple[int, ...], tuple[Equation, frozenset[int]]] = {}
        self._rows: dict[Var, list[Atom]] = {}  # what an unrolled loop has made, before anybody wants it in one piece
        self._stacked: dict[Var, Atom] = {}

    def emit(self, equation: Equation) -> Sequence[Atom]:
        """Place one equation. Returns the atoms that its outputs are from here on."""
        name, slice = equation.primitive.name, placed_slice(equation)
        if equation.primitive is pathway_array_p:
            return [self._clusters.capture(Reference(equation.params["handle"]), equation.outvars[0])]
        if name == "reshard":  # JAX's own, from one stage's mesh to another's: the graph's transfers do that
            return list(equation.invars)
        if equation.effects and name not in CALLS:
            raise ProgramError(f"{equation_name(equation)} has side effects, at {source_line(equation)}")
        if slice is not None:
            return self._stage(self._settled_inputs(equation), slice)
        within = self._slices_within(equation)
        if within:
            return self._around_stages(equation, within)
        return self._unplaced(equation)

    def settled(self, atom: Atom) -> Atom:
        """`atom` as an array in one piece."""
        if isinstance(atom, Literal) or atom not in self._rows:
            return atom
        if atom not in self._stacked:
            rows, like = self._rows[atom], struct_of(atom)
            self._stacked[atom] = (
                self._traced(lambda *rows: jnp.stack(rows), rows)
                if rows
                else self._traced(lambda: jnp.zeros(like.shape, like.dtype), [])
            )
        return self._stacked[atom]

    def _settled_inputs(self, equation: Equation) -> Equation:
        return equation.replace(invars=[self.settled(atom) for atom in equation.invars])

    def _slices_within(self, equation: Equation) -> frozenset[int]:
        key = tuple(id(inner) for inner in inner_jaxprs(equation))
        if key not in self._inner_slices:  # the equation is kept alive: ids are the key
            inner = frozenset[int]().union(*(placed_slices(body) for body in inner_jaxprs(equation)))
            self._inner_slices[key] = (equation, inner)
        return self._inner_slices[key][1]

    # Stages, and what is around them (P-5) ---------------------------------------------------------------------------

    def _stage(self, equation: Equation, slice: int) -> Sequence[Atom]:
        name = equation_name(equation)
        others = self._slices_within(equation) - {slice}
        if others:
            raise ProgramError(
                f"{name} is placed on slice {slice} and calls a function that is placed on slice {min(others)}, at "
                f"{source_line(equation)}: call that one from the program"
            )
        operation = self._operation(equation, equation.params["jaxpr"], name)
        self._clusters.whole(operation, slice, f"is a pathway.jit stage of slice {slice}", placed=True)
        return operation.outputs

    def _around_stages(self, equation: Equation, within: frozenset[int]) -> Sequence[Atom]:
        name = equation.primitive.name
        if name in CALLS:
            operands = {slice for slice, _ in self._clusters.votes(equation.invars)}
            if name not in REMATS or len(within) > 1 or not operands <= within:
                return self._opened_up(equation)
        if len(within) == 1:
            [slice] = within
            equation = self._settled_inputs(equation)
            operation = self._operation(equation, make_alone(equation), equation_name(equation))
            self._clusters.whole(operation, slice, f"all stages in this {name} are on slice {slice}", placed=True)
            return operation.outputs
        if name == "scan":
            return self._unrolled(equation)
        instead = {"while": "pathway.while_loop", "cond": "pathway.cond"}.get(name)
        raise ProgramError(
            f"this {name} has stages on slices {_listed(within)}, at {source_line(equation)}, "
            "and no one slice can run it: " + (f"use {instead}" if instead else "call the stages outside of it")
        )

    def _opened_up(self, equation: Equation) -> Sequence[Atom]:
        return substituted(call_body(equation), equation.invars, self._clusters.constant, self.emit)

    def _unrolled(self, equation: Equation) -> Sequence[Atom]:
        constants, carried = scan_counts(equation)
        body, length = equation.params["jaxpr"], equation.params["length"]
        fixed, carry = equation.invars[:constants], list(equation.invars[constants : constants + carried])
        columns = equation.invars[constants + carried :]
        made: list[list[Atom]] = [[] for _ in range(length)]
        for step in reversed(range(length)) if equation.params["reverse"] else range(length):
            row = [self._row(column, step) for column in columns]
            outputs = substituted(body, [*fixed, *carry, *row], self._clusters.constant, self.emit)
            carry, made[step] = outputs[:carried], outputs[carried:]
        stacks = [fresh(var) for var in equation.outvars[carried:]]
        for position, var in enumerate(stacks):
            self._rows[var] = [outputs[position] for outputs in made]
        return [*carry, *stacks]

    def _row(self, column: Atom, step: int) -> Atom:
        if not isinstance(column, Literal) and column in self._rows:  # made by an unrolled loop, row by row
            return self._rows[column][step]
        return self._traced(lambda x: jax.lax.index_in_dim(x, step, keepdims=False), [column])

    def _traced(self, fun: Callable[..., Any], atoms: Sequence[Atom]) -> Atom:
        """The result of a JAX function of these atoms, placed like the program's own equations."""
        jaxpr = jax.make_jaxpr(fun)(*[struct_of(atom) for atom in atoms])
        [result] = substituted(jaxpr, atoms, self._clusters.constant, self.emit)
        return result

    # Everything else (P-1, P-2, P-3, P-6) ----------------------------------------------------------------------------

    def _unplaced(self, equation: Equation) -> Sequence[Atom]:
        name, clusters = equation.primitive.name, self._clusters
        said = clusters.votes(equation.invars)
        slices = {slice for slice, _ in said}
        if name in CALLS and (len(slices) > 1 or (not slices and len(equation.outvars) > 1)):
            return self._opened_up(equation)
        equation = self._settled_inputs(equation)
        said = clusters.votes(equation.invars)
        if name == "sharding_constraint" and not self._is_constraint_of(equation, winner(said)[0] if said else None):
            return list(equation.invars)
        closed_over = any(self._lifter.captures(inner) for inner in inner_jaxprs(equation))
        if closed_over and name in CALLS:
            return self._opened_up(equation)
        body = make_alone(equation) if closed_over else None
        operation = self._operation(equation, body, equation_name(equation))
        said = clusters.votes(operation.inputs)
        if not said:
            clusters.wait(operation, within_reader=_is_cheap(equation), expensive=_is_expensive(equation))
        elif self._is_light(equation):
            clusters.wait(operation, within_reader=True)
        elif self._is_early(operation, equation):
            clusters.early(operation, winner(said)[0])
        else:
            slice, size = winner(said)
            largest = next(a for a in reversed(operation.inputs) if clusters.vote(a) == (slice, size))
            slices = {slice for slice, _ in said}
            choice = f", the largest of its operands on slices {_listed(slices)}" if len(slices) > 1 else ""
            clusters.join(operation, slice, f"{equation_name(equation)} follows {aval_of(largest)}{choice}")
        return operation.outputs

    def _is_constraint_of(self, equation: Equation, slice: int | None) -> bool:
        rank = len(equation.outvars[0].aval.shape)
        return slice is not None and (
            spec_of(equation.params["sharding"], rank, dict(self._slices[slice].mesh)) is not None
        )

    def _is_early(self, operation: Operation, equation: Equation) -> bool:
        """P-6."""
        slices = {slice for slice, _ in self._clusters.votes(operation.inputs)}
        if len(slices) > 1 or not all(self._clusters.is_early(atom) for atom in operation.inputs):
            return False
        scalars = all(atom.aval.shape == () for atom in (*equation.invars, *equation.outvars))
        return equation.primitive.name in _VIEWS or (scalars and not _is_expensive(equation))

    def _is_light(self, equation: Equation) -> bool:
        """P-3: broadcasts of what is on a slice, and what is computed elementwise from broadcasts alone."""
        if len(equation.outvars) > 1 or _has_body(equation) or _is_expensive(equation):
            return False
        if equation.primitive.name == "broadcast_in_dim" and len(equation.invars) == 1:
            return nbytes(equation.outvars[0]) > nbytes(equation.invars[0])
        shape = equation.outvars[0].aval.shape
        placed = [atom for atom in equation.invars if self._clusters.vote(atom) is not None]
        return (
            any(self._clusters.is_waiting(atom) for atom in placed)
            and all(self._clusters.is_waiting(atom) or atom.aval.shape == () != shape for atom in placed)
            and all(atom.aval.shape in ((), shape) for atom in equation.invars)
        )

    def _operation(self, equation: Equation, body: Any, name: str) -> Operation:
        """`equation` for a node. What its body (if it has one: the same computation as a jaxpr) closes over becomes
        inputs; the equation has no room for them, so a call of the body takes its place then."""
        outputs = [fresh(var) for var in equation.outvars]
        if body is None:
            alone = equation.replace(outvars=outputs)
            return Operation(name, (alone,), tuple(equation.invars), tuple(outputs))
        lifted, captures = self._lifter.lift(body)
        inputs = [*(self._clusters.capture(capture, var) for capture, var in captures), *equation.invars]
        if captures:
            equation = call_of(lifted, inputs, outputs, equation)
        else:
            equation = equation.replace(outvars=outputs)
        return Operation(name, (equation,), tuple(inputs), tuple(outputs), lifted)


def make_alone(equation: Equation) -> Any:
    """A jaxpr of just this equation."""
    inputs = [fresh(atom) for atom in equation.invars]
    alone = renewed(equation.replace(invars=inputs))
    return make_jaxpr(inputs, alone.outvars, [alone])


def _is_cheap(equation: Equation) -> bool:
    """Whether its readers may each compute it for themselves. (Not slices: readers that differ in them alone would
    not be equal any more.)"""
    if _has_body(equation) or len(equation.outvars) > 1 or equation.primitive.name in _VIEWS:
        return False
    if equation.primitive.name in ("broadcast_in_dim", "iota"):
        return True
    return all(nbytes(atom) <= _SMALL_BYTES for atom in (*equation.invars, *equation.outvars))


def _is_expensive(equation: Equation) -> bool:
    bodies = (inner for body in inner_jaxprs(equation) for inner in every_equation(body))
    return any(each.primitive.name in _EXPENSIVE for each in (equation, *bodies))


def _has_body(equation: Equation) -> bool:
    return any(True for _ in inner_jaxprs(equation))


def _listed(slices: Collection[int]) -> str:
    return ", ".join(map(str, sorted(slices)))
