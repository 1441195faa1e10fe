"""Conditions and loops that data decide over several slices: a jaxpr, cut apart at them.

`pathway.cond`, `switch` and `while_loop` are JAX's own within a `jit` whose name marks them, so autodiff and batching
have their rules. So is any condition or loop of JAX's whose stages are on several slices. What is left of a program
between them falls into *segments*, which become a plan each.

  B-1  An equation belongs to the segment of the controls that it depends on, directly or not. So nothing waits for a
       decision that it does not need, and no segments wait for each other in a circle: what a segment reads depends on
       fewer controls.
  B-2  What is computed of host values and constants alone belongs nowhere: each reader has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from pathway.dataflow.jaxprs import (
    CALLS,
    Atom,
    Equation,
    Literal,
    Var,
    call_body,
    fresh,
    inner_jaxprs,
    make_jaxpr,
    opened,
    placed_slice,
    placed_slices,
    renewed,
    scan_counts,
    source_line,
    struct_of,
    substituted,
)
from pathway.dataflow.placed import pathway_array_p

MARK = "pathway:control"
"""The name of the `jit` around `pathway.cond`, `switch` and `while_loop`."""

ANCHOR = "pathway:anchor"
"""The name of the `jit` around a value that is to be on a slice, and computed once: B-2 is not for it."""

REFUSAL = "pathway:refuse:"
"""How the name of the `jit` around a branch begins that must not be taken; the reason follows."""

Deps = frozenset[int]


def marked(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, whose conditions and loops are controls wherever their stages are."""

    def control(*args: Any) -> Any:
        return fun(*args)

    control.__name__ = control.__qualname__ = MARK
    jitted: Callable[..., Any] = jax.jit(control)
    return jitted


def anchored(value: Any) -> Any:
    """`value`, which is on some slice from here on; what is already is not copied."""

    def anchor(value: Any) -> Any:
        return jnp.array(value, copy=True)

    anchor.__name__ = anchor.__qualname__ = ANCHOR
    return jax.jit(anchor)(value)


def refused(reason: str, like: Callable[..., Any]) -> Callable[..., Any]:
    """A branch with the results of `like` that fails the run for this reason when it is chosen."""

    def refusal(*operands: Any) -> Any:
        return jax.tree.map(lambda result: jnp.array(result, copy=True), like(*operands))

    refusal.__name__ = refusal.__qualname__ = REFUSAL + reason
    jitted: Callable[..., Any] = jax.jit(refusal)
    return jitted


def _is_anchor(equation: Equation) -> bool:
    return equation.primitive.name in ("jit", "pjit") and equation.params["name"] == ANCHOR


def reasons_of(control: Control) -> list[str]:
    """For each branch of a condition why it must not be taken; "" if it may."""

    def reason(branch: Any) -> str:
        names = [str(equation.params.get("name", "")) for equation in opened(branch)[0].eqns]
        return next((name.removeprefix(REFUSAL) for name in names if name.startswith(REFUSAL)), "")

    return [reason(branch) for branch in control.equation.params["branches"]]


def is_marked(equation: Equation) -> bool:
    return equation.primitive.name in ("jit", "pjit") and MARK in str(equation.params["name"])


def is_control(equation: Equation, within_mark: bool = False) -> bool:
    """Whether the equation is a condition or loop that no single slice decides by itself."""
    if equation.primitive.name not in ("cond", "while"):
        return False
    if within_mark or any(has_control(body) for body in inner_jaxprs(equation)):
        return True
    return len(frozenset[int]().union(*(placed_slices(body) for body in inner_jaxprs(equation)))) > 1


def has_control(jaxpr: Any, within_mark: bool = False) -> bool:
    """Whether a jaxpr has controls, at any depth. What is within a stage is the stage's own."""
    for equation in opened(jaxpr)[0].eqns:
        if placed_slice(equation) is not None:
            continue
        if is_control(equation, within_mark):
            return True
        inside = is_marked(equation) or (within_mark and equation.primitive.name in CALLS)
        if any(has_control(body, inside) for body in inner_jaxprs(equation)):
            return True
    return False


@dataclass(frozen=True, eq=False)
class Control:
    """One condition or loop. `deps`: the controls that its inputs depend on."""

    equation: Equation
    deps: Deps

    @property
    def is_loop(self) -> bool:
        return bool(self.equation.primitive.name == "while")

    @property
    def source(self) -> str:
        return source_line(self.equation)


@dataclass(eq=False)
class Cut:
    """A jaxpr cut at its controls. `floating` are equations that belong nowhere (B-2), `hosts` the inputs among what
    they read."""

    inputs: list[Var]
    outputs: list[Atom]
    segments: dict[Deps, list[Equation]]
    controls: list[Control]
    constants: dict[Var, Any]
    floating: list[Equation]
    hosts: set[Var]
    deps: dict[Var, Deps] = field(default_factory=dict)

    def is_floating(self, atom: Atom) -> bool:
        """Whether the value needs no device: a literal, a constant, a host value or what is computed of them."""
        return isinstance(atom, Literal) or atom not in self.deps

    def deps_of(self, atom: Atom) -> Deps:
        return frozenset() if isinstance(atom, Literal) else self.deps.get(atom, frozenset())

    def add(self, equation: Equation, deps: Deps) -> None:
        """One more equation of a segment."""
        self.segments.setdefault(deps, []).append(equation)
        self.deps.update(dict.fromkeys(equation.outvars, deps))

    def append(self, fun: Callable[[Any], Any], atom: Atom) -> Var:
        """One more value, in the segment of `atom`: the result of a JAX function of it."""
        deps, made = self.deps_of(atom), []

        def emit(equation: Equation) -> Sequence[Atom]:
            new = renewed(equation)
            made.append(new)
            return list(new.outvars)

        jaxpr = jax.make_jaxpr(fun)(struct_of(atom))
        [result] = substituted(jaxpr, [atom], self._constant, emit)
        for equation in made:
            self.add(equation, deps)
        return result

    def _constant(self, value: Any, var: Var) -> Atom:
        new = fresh(var)
        self.constants[new] = value
        return new

    def closure(self, atoms: Iterable[Atom]) -> tuple[list[Equation], list[Var]]:
        """The floating equations behind `atoms`, in order, and the inputs among what those and the atoms are."""
        wanted = {atom for atom in atoms if not isinstance(atom, Literal)}
        found = []
        for equation in reversed(self.floating):
            if not wanted.isdisjoint(equation.outvars):
                found.append(equation)
                wanted.update(atom for atom in equation.invars if not isinstance(atom, Literal))
        return found[::-1], [var for var in self.inputs if var in wanted and var in self.hosts]

    def order(self) -> list[Deps | Control]:
        """Segments and controls, each behind what it reads (B-1)."""
        keyed: list[tuple[tuple[int, int], Deps | Control]] = [((len(deps), 0), deps) for deps in self.segments]
        keyed += [((len(control.deps), 1), control) for control in self.controls]
        return [entry for _, entry in sorted(keyed, key=lambda entry: entry[0])]

    def segment(self, deps: Deps, wanted: Collection[Atom]) -> tuple[Any, list[Var], list[Var]]:
        """(a closed jaxpr of a segment with what it reads of nobody but itself, its inputs, those of the `wanted` that
        it makes)."""
        own = self.segments[deps]
        read = [atom for equation in own for atom in equation.invars if not isinstance(atom, Literal)]
        equations = [*self.closure(read)[0], *own]
        made = {var for equation in own for var in equation.outvars}
        outputs = list(dict.fromkeys(var for var in wanted if not isinstance(var, Literal) and var in made))
        known = {var for equation in equations for var in equation.outvars}
        inputs: dict[Var, None] = {}
        constants: dict[Var, Any] = {}
        for equation in equations:
            for atom in equation.invars:
                if isinstance(atom, Literal) or atom in known:
                    continue
                if atom in self.constants:
                    constants[atom] = self.constants[atom]
                else:
                    inputs[atom] = None
        return make_jaxpr(list(inputs), outputs, equations, list(constants.items())), list(inputs), outputs


def cut(jaxpr: Any, on_hosts: Sequence[bool]) -> Cut:
    """Cut a jaxpr at its controls. `on_hosts`: which of its inputs are host values."""
    flat = _Flattening()
    inputs = [fresh(var) for var in opened(jaxpr)[0].invars]
    outputs = substituted(jaxpr, inputs, flat.constant, flat.emit)
    made = Cut(
        inputs, outputs, {}, [], flat.constants, [], {var for var, host in zip(inputs, on_hosts, strict=True) if host}
    )
    made.deps.update((var, frozenset()) for var in inputs if var not in made.hosts)
    others: dict[Var, Atom] = {}  # by an anchor's output: what it anchors, which is on a slice by itself
    for equation in flat.equations:
        controls = id(equation) in flat.controls
        equation = equation.replace(invars=[_read(others, atom) for atom in equation.invars])
        if _is_anchor(equation) and not made.is_floating(equation.invars[0]):
            others[equation.outvars[0]] = equation.invars[0]
            continue
        deps = frozenset[int]().union(*(made.deps_of(atom) for atom in equation.invars))
        if controls:
            number = len(made.controls)
            made.controls.append(Control(equation, deps))
            made.deps.update(dict.fromkeys(equation.outvars, deps | {number}))
        elif _has_place(equation) or not all(made.is_floating(atom) for atom in equation.invars):
            made.add(equation, deps)
        else:
            made.floating.append(equation)
    made.outputs = [_read(others, atom) for atom in outputs]
    return made


def _read(names: dict[Var, Atom], atom: Atom) -> Atom:
    return atom if isinstance(atom, Literal) else names.get(atom, atom)


def _has_place(equation: Equation) -> bool:
    if placed_slice(equation) is not None or equation.primitive is pathway_array_p or _is_anchor(equation):
        return True
    return any(_has_place(each) for body in inner_jaxprs(equation) for each in opened(body)[0].eqns)


class _Flattening:
    """The equations of a jaxpr with its controls on the surface: calls around them are opened, scans unrolled."""

    def __init__(self) -> None:
        self.equations: list[Equation] = []
        self.controls: set[int] = set()
        self.constants: dict[Var, Any] = {}

    def constant(self, value: Any, var: Var) -> Atom:
        new = fresh(var)
        self.constants[new] = value
        return new

    def emit(self, equation: Equation, within_mark: bool = False) -> Sequence[Atom]:
        name = equation.primitive.name
        if placed_slice(equation) is None and not is_control(equation, within_mark):
            inside = is_marked(equation) or (within_mark and name in CALLS)
            if any(has_control(body, inside) for body in inner_jaxprs(equation)):
                if name in CALLS:
                    return substituted(
                        call_body(equation), equation.invars, self.constant, lambda inner: self.emit(inner, inside)
                    )
                if name == "scan":
                    return self._unrolled(equation)
        new = renewed(equation)
        self.equations.append(new)
        if is_control(equation, within_mark) and placed_slice(equation) is None:
            self.controls.add(id(new))
        return list(new.outvars)

    def _unrolled(self, equation: Equation) -> Sequence[Atom]:
        constants, carried = scan_counts(equation)
        body, length = equation.params["jaxpr"], equation.params["length"]
        fixed, carry = equation.invars[:constants], list(equation.invars[constants : constants + carried])
        columns = equation.invars[constants + carried :]
        rows: list[list[Atom]] = [[] for _ in range(length)]
        for step in reversed(range(length)) if equation.params["reverse"] else range(length):
            row = [self._traced(lambda x, s=step: jax.lax.index_in_dim(x, s, keepdims=False), [c]) for c in columns]
            outputs = substituted(body, [*fixed, *carry, *row], self.constant, self.emit)
            carry, rows[step] = outputs[:carried], outputs[carried:]
        stacks = []
        for position, var in enumerate(equation.outvars[carried:]):
            like = struct_of(var)
            column = [row[position] for row in rows]
            stacks.append(
                self._traced(lambda *x: jnp.stack(x), column)
                if column
                else self._traced(lambda like=like: jnp.zeros(like.shape, like.dtype), [])
            )
        return [*carry, *stacks]

    def _traced(self, fun: Callable[..., Any], atoms: Sequence[Atom]) -> Atom:
        jaxpr = jax.make_jaxpr(fun)(*[struct_of(atom) for atom in atoms])
        [result] = substituted(jaxpr, atoms, self.constant, self.emit)
        return result


def branches_of(made: Cut, control: Control) -> list[tuple[Any, list[Var]]]:
    """For each branch of a condition a closed jaxpr and what it reads."""
    operands = control.equation.invars[1:]
    return [_called(made, branch, operands) for branch in control.equation.params["branches"]]


def loop_of(made: Cut, control: Control) -> tuple[Any, list[Var], Any, list[Var]]:
    """Of a loop: a closed jaxpr from what it begins with to (that, whether there is a step), what it reads; one from
    what is carried, then what stays the same, to (what is carried, whether there is another step), what stays."""
    params = control.equation.params
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    operands = control.equation.invars
    fixed, body_fixed = operands[:of_condition], operands[of_condition : of_condition + of_body]
    begin = operands[of_condition + of_body :]
    entry, entry_inputs = _called(made, condition, [*fixed, *begin], lead=begin)
    carried = [fresh(var) for var in opened(body)[0].invars[of_body:]]
    step, step_inputs = _called(made, body, [*body_fixed, *carried], first=carried, then=(condition, fixed))
    return entry, entry_inputs, step, step_inputs[len(carried) :]


def _called(
    made: Cut,
    jaxpr: Any,
    operands: Sequence[Atom],
    *,
    first: Sequence[Var] = (),
    lead: Sequence[Atom] = (),
    then: tuple[Any, Sequence[Atom]] | None = None,
) -> tuple[Any, list[Var]]:
    """(a closed jaxpr of a call, its inputs: `first`, then what it reads). Floating operands are computed within. It
    puts out `lead`, then the call's results, then those of the jaxpr `then[0]` of `then[1]` and the call's results."""
    inside = [atom for atom in operands if not isinstance(atom, Literal) and atom not in first]
    equations: list[Equation] = made.closure([*inside, *(then[1] if then else ())])[0]
    constants: dict[Var, Any] = {}

    def constant(value: Any, var: Var) -> Atom:
        new = fresh(var)
        constants[new] = value
        return new

    def emit(equation: Equation) -> Sequence[Atom]:
        equations.append(renewed(equation))
        return list(equations[-1].outvars)

    outputs = [*lead, *substituted(jaxpr, list(operands), constant, emit)]
    if then is not None:
        outputs += substituted(then[0], [*then[1], *outputs], constant, emit)
    computed = {var for equation in equations for var in equation.outvars}
    inputs: dict[Var, None] = dict.fromkeys(first)
    for atom in [*(atom for equation in equations for atom in equation.invars), *outputs]:
        if isinstance(atom, Literal) or atom in computed or atom in constants:
            continue
        if atom in made.constants:
            constants[atom] = made.constants[atom]
        else:
            inputs[atom] = None
    return make_jaxpr(list(inputs), outputs, equations, list(constants.items())), list(inputs)
