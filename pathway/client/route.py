"""`pathway.route`: rows go to the experts that they chose, on whatever slices those are, and nowhere else.

The rows are sorted by expert where they are, and counted. Each expert's count decides by itself: none, and nothing is
sent, not even word of it; else as many rows as the next size holds go to the expert, and what it makes of them is added
up where they came from. So an expert waits for no other, and it knows how many rows to wait for before the first comes:
counting is done where the choice is made, and there is no end to announce. The sums are taken in the order of experts,
so they are the same bits in every run. Autodiff sees one function: the backward pass sends rows of the cotangent the
same ways, and computes the expert's forward pass anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from pathway.client import tracing
from pathway.client.control import switch
from pathway.client.operators import traced
from pathway.dataflow.control import anchored, refused
from pathway.dataflow.jaxprs import opened
from pathway.errors import ProgramError

LEAST_ROWS = 8
"""Fewer rows than these are sent as so many."""


def row_sizes(rows: int, choices: int, capacity: int | None = None) -> tuple[int, ...]:
    """The numbers of rows that experts are compiled for: powers of two up to what one expert may be chosen by."""
    most = rows * choices if capacity is None else min(capacity, rows * choices)
    ends = {most, min(rows, most)}  # no expert is chosen twice by a row, as a rule
    size = LEAST_ROWS
    while size < min(rows, most):
        ends.add(size)
        size *= 2
    return tuple(sorted(ends))


def route(
    x: Any,
    expert_index: Any,
    gates: Any,
    experts: Sequence[Callable[[Any], Any]],
    *,
    capacity: int | None = None,
) -> Any:
    """For each row of `x` the sum over its choices of gate times what the chosen expert makes of the row.

    Within a `pathway.program`. `x` has shape (rows, ...), `expert_index` and `gates` (rows, choices) or (rows,).
    `experts[i]` maps an array of rows to as many rows, each by itself, and is made of `pathway.jit` stages; all put out
    rows of one shape and dtype. What they close over, parameters say, has gradients too. With `capacity`, an expert
    takes so many rows at most, those that come first; the others' choice of it counts as nothing. An index that is no
    expert's fails the run.
    """
    if not tracing.is_on():
        raise ProgramError("pathway.route is a part of a program: call it within a pathway.program")
    x, expert_index, gates = (anchored(traced(each)) for each in (x, expert_index, gates))
    if expert_index.ndim == 1:
        expert_index = expert_index[:, None]
    if gates.ndim == 1:
        gates = gates[:, None]
    _check(x, expert_index, gates, experts, capacity)
    rows, choices = expert_index.shape
    if rows == 0:
        out = jax.eval_shape(experts[0], x)
        return jnp.zeros(out.shape, out.dtype)
    sizes = row_sizes(rows, choices, capacity)
    ready = [_Expert.of(expert, number, x, sizes) for number, expert in enumerate(experts)]
    outs = {(expert.out_shape, expert.out_dtype) for expert in ready}
    if len(outs) > 1:
        raise ProgramError(f"the experts of a route put out rows that differ: {sorted(map(str, outs))}")
    plan = _Plan(rows, choices, sizes, capacity, tuple(ready))
    return _routed(plan, x, expert_index, gates, [expert.closed_over for expert in ready])


def _check(x: Any, index: Any, gates: Any, experts: Sequence[Any], capacity: int | None) -> None:
    if not experts:
        raise ProgramError("a route has no experts")
    if x.ndim < 1 or index.ndim != 2 or index.shape[0] != x.shape[0] or index.shape != gates.shape:
        raise ProgramError(
            f"a route of x of shape {x.shape} takes expert_index and gates of shape ({(*x.shape, '?')[0]}, choices), "
            f"not {index.shape} and {gates.shape}"
        )
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise ProgramError(f"expert_index has integers, not {index.dtype}")
    if not jnp.issubdtype(gates.dtype, jnp.floating):
        raise ProgramError(f"gates are floating-point numbers, not {gates.dtype}")
    if capacity is not None and capacity < 1:
        raise ProgramError(f"an expert takes at least one row: capacity is {capacity}")


@dataclass(frozen=True, eq=False)
class _Expert:
    """`at[size]` is the expert as a function of what it closes over and of so many rows."""

    closed_over: list[Any]
    at: dict[int, Callable[[Sequence[Any], Any], Any]]
    out_shape: tuple[int, ...]
    out_dtype: Any

    @classmethod
    def of(cls, expert: Callable[[Any], Any], number: int, x: Any, sizes: Sequence[int]) -> _Expert:
        closed_over: dict[int, Any] = {}
        at = {}
        out: Any = None
        for size in sizes:
            rows = jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype)
            jaxpr, out = jax.make_jaxpr(lambda rows: traced(expert(rows)), return_shape=True)(rows)
            if not hasattr(out, "shape") or out.shape[:1] != (size,):
                raise ProgramError(f"expert {number} of a route makes {out} of {size} rows: one row for each was due")
            _, constants = opened(jaxpr)
            free = [each for each in constants if isinstance(each, jax.core.Tracer)]
            closed_over.update((id(each), each) for each in free)
            at[size] = (jaxpr, constants)
        order = {key: position for position, key in enumerate(closed_over)}

        def bound(jaxpr: Any, constants: Sequence[Any]) -> Callable[[Sequence[Any], Any], Any]:
            def call(given: Sequence[Any], rows: Any) -> Any:
                values = [given[order[id(each)]] if id(each) in order else each for each in constants]
                [result] = jex.jaxpr_as_fun(jex.ClosedJaxpr(opened(jaxpr)[0], values))(rows)
                return result

            return call

        functions = {size: bound(jaxpr, constants) for size, (jaxpr, constants) in at.items()}
        return cls(list(closed_over.values()), functions, tuple(out.shape[1:]), out.dtype)


@dataclass(frozen=True, eq=False)
class _Plan:
    rows: int
    choices: int
    sizes: tuple[int, ...]
    capacity: int | None
    experts: tuple[_Expert, ...]

    def ways(self, index: Any) -> tuple[Any, Any, Any]:
        """(choices sorted by expert; for each expert where its own begin and how many they are; for each the size that
        holds them: 0 for none, i for `sizes[i - 1]`, one past the end for all if some index is no expert's)."""
        count, flat = len(self.experts), index.reshape(-1)
        order = jnp.argsort(flat, stable=True).astype(jnp.int32)
        bounds = jnp.searchsorted(flat[order], jnp.arange(count + 1, dtype=flat.dtype)).astype(jnp.int32)
        begins, counts = bounds[:-1], bounds[1:] - bounds[:-1]
        if self.capacity is not None:
            counts = jnp.minimum(counts, self.capacity)
        sizes = jnp.asarray(self.sizes, jnp.int32)
        classes = jnp.where(counts > 0, 1 + jnp.searchsorted(sizes, counts), 0).astype(jnp.int32)
        wrong = jnp.any((flat < 0) | (flat >= count))
        spans = jnp.stack([begins, counts], axis=1)
        return order, spans, jnp.where(wrong, len(self.sizes) + 1, classes)

    def picked(self, size: int, order: Any, span: Any) -> tuple[Any, Any]:
        """(the rows, the choices) of an expert, `size` of each; those past the end where there are fewer."""
        begin, count = span[0], span[1]
        number = jnp.arange(size, dtype=jnp.int32)
        choice = jnp.take(order, begin + number, mode="clip")
        choice = jnp.where(number < count, choice, self.rows * self.choices)
        return choice // self.choices, choice

    def each(self, branch: Callable[[_Expert, int], Callable[..., Any]], skip: Any, wrong: str) -> list[list[Any]]:
        """For each expert its branches: none, one for each size, and the refusal."""
        return [[skip, *(branch(expert, size) for size in self.sizes), refused(wrong, skip)] for expert in self.experts]


def _forward(plan: _Plan, x: Any, index: Any, gates: Any, closed_over: Sequence[Sequence[Any]]) -> Any:
    order, spans, classes = plan.ways(index)
    expert = plan.experts[0]
    flat_gates = gates.reshape(-1)
    total = jnp.zeros((plan.rows + 1, *expert.out_shape), expert.out_dtype) + _nothing_of(x, expert.out_dtype)

    def branch(expert: _Expert, size: int) -> Callable[..., Any]:
        def run(total: Any, x: Any, flat_gates: Any, order: Any, span: Any, *given: Any) -> Any:
            row, choice = plan.picked(size, order, span)
            at, sent = row[:, None], jnp.take(x, row, axis=0, mode="clip")
            weights = _as_rows(jnp.take(flat_gates, choice, mode="clip"), total)
            made = expert.at[size](given, sent)
            return _added(total, at, made * weights)

        return run

    wrong = f"an expert index of a route is not within 0 .. {len(plan.experts) - 1}"
    for number, branches in enumerate(plan.each(branch, lambda total, *_: total, wrong)):
        operands = (x, flat_gates, order, spans[number], *closed_over[number])
        total = switch(classes[number], branches, total, *operands)
    return total[: plan.rows]


def _backward(plan: _Plan, kept: Any, cotangent: Any) -> Any:
    x, index, gates, closed_over = kept
    order, spans, classes = plan.ways(index)
    flat_gates = gates.reshape(-1)
    cotangent = jnp.concatenate([cotangent, jnp.zeros_like(cotangent[:1])])  # for the rows past the end
    of_x = jnp.zeros((plan.rows + 1, *x.shape[1:]), x.dtype) + _nothing_of(x, x.dtype)
    of_gates = jnp.zeros((plan.rows * plan.choices + 1,), gates.dtype) + _nothing_of(gates, gates.dtype)
    of_closed_over = []

    def branch(expert: _Expert, size: int) -> Callable[..., Any]:
        def run(
            of_x: Any, of_gates: Any, x: Any, cotangent: Any, flat_gates: Any, order: Any, span: Any,
            *given: Any,
        ) -> Any:  # fmt: skip
            row, choice = plan.picked(size, order, span)
            at, of_choice = row[:, None], choice[:, None]
            sent = jnp.take(x, row, axis=0, mode="clip")
            back = jnp.take(cotangent, row, axis=0, mode="clip")
            weights = _as_rows(jnp.take(flat_gates, choice, mode="clip"), cotangent)
            made, pull = jax.vjp(expert.at[size], given, sent)
            of_given, of_sent = pull(back * weights)
            of_weights = (made * back).reshape(size, -1).sum(-1).astype(of_gates.dtype)
            return _added(of_x, at, of_sent), _added(of_gates, of_choice, of_weights), of_given

        return run

    def skip(of_x: Any, of_gates: Any, *operands: Any) -> Any:
        given = operands[5:]
        return of_x, of_gates, tuple(_zero_cotangent(each) for each in given)

    wrong = f"an expert index of a route is not within 0 .. {len(plan.experts) - 1}"
    for number, branches in enumerate(plan.each(branch, skip, wrong)):
        operands = (x, cotangent, flat_gates, order, spans[number], *closed_over[number])
        of_x, of_gates, of_given = switch(classes[number], branches, of_x, of_gates, *operands)
        of_closed_over.append(list(of_given))
    return of_x[: plan.rows], None, of_gates[:-1].reshape(gates.shape), of_closed_over


def _as_rows(weights: Any, like: Any) -> Any:
    """A weight for each row of an array like this."""
    return weights.reshape(-1, *(1,) * (like.ndim - 1)).astype(like.dtype)


def _added(total: Any, at: Any, rows: Any) -> Any:
    """`total` with each of `rows` added at its place. Unlike `total.at[at].add(rows)` this computes nothing of `at`, so
    that all that the rows' own slice has to do comes before they leave it, and after they are back."""
    windows = tuple(range(1, total.ndim))
    numbers = jax.lax.ScatterDimensionNumbers(windows, (0,), (0,))
    return jax.lax.scatter_add(total, at, rows, numbers, mode="promise_in_bounds")


def _nothing_of(like: Any, dtype: Any) -> Any:
    """Zero, where `like` is."""
    return (like.reshape(-1)[:1].sum() * 0).astype(dtype)


def _zero_cotangent(value: Any) -> Any:
    return jnp.zeros(value.shape, value.dtype)


def _routed(plan: _Plan, x: Any, index: Any, gates: Any, closed_over: list[list[Any]]) -> Any:
    routed = jax.custom_vjp(lambda x, index, gates, closed_over: _forward(plan, x, index, gates, closed_over))
    routed.defvjp(
        lambda x, index, gates, closed_over: (
            _forward(plan, x, index, gates, closed_over),
            (x, index, gates, closed_over),
        ),
        lambda kept, cotangent: _backward(plan, kept, cotangent),
    )
    return routed(x, index, gates, closed_over)
