"""Closed-over arrays, out of the bodies that close over them.

A stage that uses a `pathway.Array` or a large constant of its surroundings has it inside its inner jaxpr. A node takes
all its arrays as inputs (`Node.jaxpr` holds no constant above 1 KiB), so they are lifted: the body gets more inputs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex

from pathway.dataflow.jaxprs import (
    BAKED_BYTES,
    CALLS,
    Atom,
    Equation,
    Var,
    call_body,
    equation_name,
    fresh,
    inner_jaxprs,
    is_extended,
    make_jaxpr,
    nbytes,
    opened,
    renewed,
    scan_counts,
    source_line,
    struct_of,
    substituted,
)
from pathway.dataflow.placed import pathway_array_p
from pathway.errors import ProgramError


@dataclass(frozen=True)
class Reference:
    """A closed-over `pathway.Array`."""

    handle: Hashable


@dataclass(frozen=True)
class Constant:
    """A closed-over host array, known by identity."""

    array: Any

    def __hash__(self) -> int:
        return id(self.array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and other.array is self.array


Capture = Reference | Constant


def is_baked(value: Any, var: Var) -> bool:
    """Whether a constant stays within the computation. (A typed PRNG key does: its host form is JAX's own secret.)"""
    return nbytes(var) <= BAKED_BYTES or is_extended(var.aval.dtype)


class Lifter:
    """Lifts; the same body gives the same object, so that its lowering is shared."""

    def __init__(self) -> None:
        self._captures: dict[int, tuple[Any, dict[Capture, Var]]] = {}
        self._lifted: dict[tuple[int, tuple[Capture, ...]], tuple[Any, Any]] = {}

    def lift(self, jaxpr: Any) -> tuple[Any, tuple[tuple[Capture, Var], ...]]:
        """The jaxpr with an input more, at the front, for each capture; and the captures, each with an example of a
        variable that stood for it. The same object where there is none."""
        captures = self.captures(jaxpr)
        return self.lifted(jaxpr, captures), tuple(captures.items())

    def captures(self, jaxpr: Any) -> dict[Capture, Var]:
        """What a body closes over, at any depth, in order."""
        if id(jaxpr) not in self._captures:
            body, values = opened(jaxpr)
            found: dict[Capture, Var] = {}
            for var, value in zip(body.constvars, values, strict=False):
                if not is_baked(value, var):
                    found.setdefault(Constant(value), var)
            for equation in body.eqns:
                if equation.primitive is pathway_array_p:
                    found.setdefault(Reference(equation.params["handle"]), equation.outvars[0])
                for inner in inner_jaxprs(equation):
                    for capture, var in self.captures(inner).items():
                        if _liftable(equation):
                            found.setdefault(capture, var)
                        elif isinstance(capture, Reference):
                            raise ProgramError(
                                f"a pathway.Array is closed over within {equation_name(equation)}, at "
                                f"{source_line(equation)}: pass it in as an argument"
                            )
            self._captures[id(jaxpr)] = (jaxpr, found)  # the jaxpr is kept alive: its id is the key
        return self._captures[id(jaxpr)][1]

    def lifted(self, jaxpr: Any, captures: dict[Capture, Var]) -> Any:
        """The jaxpr with exactly these captures, some of which it may not read, as its first inputs."""
        if not captures:
            return jaxpr
        key = (id(jaxpr), tuple(captures))
        if key not in self._lifted:
            self._lifted[key] = (jaxpr, self._lift(jaxpr, captures))
        return self._lifted[key][1]

    def _lift(self, jaxpr: Any, captures: dict[Capture, Var]) -> Any:
        inputs = {capture: fresh(var) for capture, var in captures.items()}
        baked: list[tuple[Var, Any]] = []
        equations: list[Equation] = []

        def constant(value: Any, var: Var) -> Atom:
            if Constant(value) in inputs:
                return inputs[Constant(value)]
            baked.append((fresh(var), value))
            return baked[-1][0]

        def keep(equation: Equation) -> Sequence[Atom]:
            equations.append(renewed(equation))
            return list(equations[-1].outvars)

        def emit(equation: Equation) -> Sequence[Atom]:
            if equation.primitive is pathway_array_p:
                return [inputs[Reference(equation.params["handle"])]]
            inner: dict[Capture, Var] = {}
            if _liftable(equation):
                for body in inner_jaxprs(equation):
                    inner |= self.captures(body)
            if not inner:
                return keep(equation)
            extra = [inputs[capture] for capture in inner]
            name, params = equation.primitive.name, equation.params
            if name in ("remat2", "checkpoint"):
                body = opened(self.lifted(params["jaxpr"], inner))[0]
                return keep(equation.replace(invars=[*extra, *equation.invars], params={**params, "jaxpr": body}))
            if name in CALLS:
                return substituted(call_body(equation), equation.invars, constant, emit)
            if name == "cond":
                branches = tuple(self.lifted(branch, inner) for branch in params["branches"])
                invars = [equation.invars[0], *extra, *equation.invars[1:]]
                return keep(equation.replace(invars=invars, params={**params, "branches": branches}))
            if name == "while":
                split = params["cond_nconsts"]
                invars = [*extra, *equation.invars[:split], *extra, *equation.invars[split:]]
                changed = {
                    "cond_jaxpr": self.lifted(params["cond_jaxpr"], inner),
                    "body_jaxpr": self.lifted(params["body_jaxpr"], inner),
                    "cond_nconsts": split + len(extra),
                    "body_nconsts": params["body_nconsts"] + len(extra),
                }
                return keep(equation.replace(invars=invars, params={**params, **changed}))
            again = _scan_again(equation, extra, self.lifted(params["jaxpr"], inner))
            return substituted(again, [*extra, *equation.invars], constant, keep)

        body = opened(jaxpr)[0]
        arguments = [fresh(var) for var in body.invars]
        outputs = substituted(jaxpr, arguments, constant, emit)
        return make_jaxpr([*inputs.values(), *arguments], outputs, equations, baked)


def _liftable(equation: Equation) -> bool:
    return equation.primitive.name in CALLS | {"cond", "while", "scan"}


def _scan_again(equation: Equation, extra: Sequence[Var], body: Any) -> Any:
    """A scan traced again over a body with more constants: its parameters differ between JAX versions."""
    constants, carried = scan_counts(equation)
    params, first = equation.params, len(extra) + constants

    def run(*values: Any) -> list[Any]:
        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            results = jex.jaxpr_as_fun(body)(*values[:first], *carry, *x)
            return list(results[:carried]), list(results[carried:])

        carry, rows = jax.lax.scan(
            step,
            list(values[first : first + carried]),
            list(values[first + carried :]),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *rows]

    return jax.make_jaxpr(run)(*[struct_of(atom) for atom in (*extra, *equation.invars)])
