"""A backward pass cut in two: the part that gives a stage's input gradient, and the rest, which gives its weights'.

Autodiff makes both in one go, and much of the work is shared: the chain of cotangents through the stage's layers. It
goes to the first part, which hands the cotangents that the second part needs on to it, so that nothing is computed
twice. What autodiff leaves as one equation (a loop over layers) cannot be cut, and stays whole in the first part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex

_CALLS = ("jit", "pjit", "closed_call")


@dataclass(frozen=True)
class SplitBackward:
    """`first(*residuals, *cotangents)` gives the first results, then what is `handed_on`; `second(*residuals,
    *cotangents, *handed_on)` the others."""

    first: Callable[..., list[Any]]
    second: Callable[..., list[Any]]
    first_results: int


def split(backward: Callable[..., Sequence[Any]], arguments: Sequence[Any], first_results: int) -> SplitBackward:
    """Cut a function of flat arguments, of whose results the first so many are wanted before the others."""
    inlined = _Inlined(jax.make_jaxpr(backward)(*arguments))
    inputs, equations = inlined.inputs, inlined.equations
    early, late = inlined.outputs[:first_results], inlined.outputs[first_results:]
    wanted = _variables(early)
    in_first = [False] * len(equations)
    for number in reversed(range(len(equations))):
        if wanted.intersection(equations[number].outvars):
            in_first[number] = True
            wanted |= _variables(equations[number].invars)
    one = [equation for equation, first in zip(equations, in_first, strict=True) if first]
    two = [equation for equation, first in zip(equations, in_first, strict=True) if not first]
    read = _variables(late).union(*(_variables(equation.invars) for equation in two))
    handed_on = [var for equation in one for var in equation.outvars if var in read]
    return SplitBackward(
        _function(inputs, [*early, *handed_on], one, inlined.constants),
        _function([*inputs, *handed_on], late, two, inlined.constants),
        first_results,
    )


class _Inlined:
    """A closed jaxpr without inner calls: every variable is written once."""

    def __init__(self, closed: Any) -> None:
        self.equations: list[Any] = []
        self.constants: dict[Any, Any] = {}
        self.inputs = list(_body(closed).invars)
        self.outputs = self._written_out(closed, self.inputs)

    def _written_out(self, closed: Any, inputs: Sequence[Any]) -> list[Any]:
        body = _body(closed)
        names: dict[Any, Any] = dict(zip(body.invars, inputs, strict=True))
        for var, value in zip(body.constvars, getattr(closed, "consts", ()), strict=True):
            names[var] = jex.Var(var.aval)
            self.constants[names[var]] = value

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, jex.Literal) else names[atom]

        for equation in body.eqns:
            equation = equation.replace(invars=[read(atom) for atom in equation.invars])
            if equation.primitive.name in _CALLS:
                inner = equation.params["jaxpr" if "jaxpr" in equation.params else "call_jaxpr"]
                outputs = self._written_out(inner, equation.invars)
            else:
                outputs = [jex.Var(var.aval) for var in equation.outvars]
                self.equations.append(equation.replace(outvars=outputs))
            names.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in body.outvars]


def _body(jaxpr: Any) -> Any:
    """JAX 0.10 has an open jaxpr inside a closed one; from 0.12 on one class is both."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def _variables(atoms: Sequence[Any]) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, jex.Literal)}


def _function(
    inputs: Sequence[Any], outputs: Sequence[Any], equations: Sequence[Any], constants: Mapping[Any, Any]
) -> Callable[..., list[Any]]:
    names = tuple(f"argument{number}" for number in range(len(inputs)))
    results = tuple(f"result{number}" for number in range(len(outputs)))
    debug_info = jex.DebugInfo("backward", "backward", names, results)
    body = jex.Jaxpr(list(constants), list(inputs), list(outputs), list(equations), frozenset(), debug_info)
    run: Callable[..., list[Any]] = jex.jaxpr_as_fun(jex.ClosedJaxpr(body, list(constants.values())))
    return run
