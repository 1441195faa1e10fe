"""Mixtures of experts over slices: a router on one, experts on others, each row sent to the few that it chooses.

`experts` places copies of a function, one or several on a slice. Called within a program with rows and the router's
scores of them, it sends every row to its best experts (`pathway.route`) and adds up what they make of it. No row is
dropped unless a capacity says so.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import pathway as pw
from pathway.errors import ProgramError

Tree = Any


def top_k_choices(scores: Any, k: int) -> tuple[Any, Any]:
    """(the `k` best experts of each row, their gates): the gates are softmax over the chosen, so they add up to 1."""
    if not 1 <= k <= scores.shape[-1]:
        raise ProgramError(f"a row cannot choose {k} of {scores.shape[-1]} experts")
    best, index = jax.lax.top_k(scores, k)
    return index, jax.nn.softmax(best, axis=-1)


def load_balancing_loss(scores: Any, index: Any) -> Any:
    """What pushes a router to use all experts alike: the number of experts times the sum over them of the part of all
    choices that went to each and the mean probability that it was given. 1 when both are even, more when both lean to
    the same experts. The gradient is the probability's; add it to the loss with a small weight, 0.01 say."""
    count = scores.shape[-1]
    probability = jax.nn.softmax(scores, axis=-1).mean(axis=0)
    chosen = jnp.zeros(count, probability.dtype).at[index.reshape(-1)].add(1.0 / index.size)
    return count * (probability * jax.lax.stop_gradient(chosen)).sum()


class Experts:
    """Copies of one function on slices. Made by `experts`. Expert i is stage `stages[i]` of slice `slices[i]`."""

    def __init__(
        self,
        function: Callable[[Tree, Any], Any],
        slices: Sequence[pw.Slice],
        count: int,
        in_specs: Any,
        out_specs: Any,
    ) -> None:
        if count < 1 or not slices:
            raise ProgramError(f"{count} experts on {len(slices)} slices")
        self.function = function
        self.slices = tuple(slices[number % len(slices)] for number in range(count))
        stages: dict[pw.Slice, pw.Stage] = {}
        for slice in self.slices:
            if slice not in stages:
                stages[slice] = pw.jit(slice, in_specs=in_specs, out_specs=out_specs, name="expert")(function)
        self.stages = [stages[slice] for slice in self.slices]

    def __len__(self) -> int:
        return len(self.slices)

    def put(self, params: Sequence[Tree], specs: Any = None) -> list[Tree]:
        """Each expert's parameters on its slice."""
        self._check(params)
        return [pw.put(each, slice, specs) for each, slice in zip(params, self.slices, strict=True)]

    def __call__(
        self, params: Sequence[Tree], rows: Any, scores: Any, k: int, *, capacity_factor: float | None = None
    ) -> tuple[Any, Any]:
        """(for each row the sum of its `k` best experts' results, by gate; the load-balancing loss). `scores`: what the
        router says of each row and expert. `capacity_factor`: an expert takes at most so many times its even share."""
        self._check(params)
        if scores.shape != (rows.shape[0], len(self)):
            raise ProgramError(
                f"scores of shape {scores.shape} for {rows.shape[0]} rows and {len(self)} experts: each row has "
                "one score for each expert"
            )
        index, gates = top_k_choices(scores, k)
        capacity = None
        if capacity_factor is not None:
            capacity = max(1, math.ceil(capacity_factor * rows.shape[0] * k / len(self)))
        calls = [functools.partial(stage, each) for stage, each in zip(self.stages, params, strict=True)]
        made = pw.route(rows, index, gates.astype(rows.dtype), calls, capacity=capacity)
        return made, load_balancing_loss(scores, index)

    def dense(self, params: Sequence[Tree], rows: Any, scores: Any, k: int) -> tuple[Any, Any]:
        """The same with every expert computing every row, in plain JAX: what tests compare with."""
        self._check(params)
        index, gates = top_k_choices(scores, k)
        total: Any = 0
        for number, each in enumerate(params):
            weight = jnp.where(index == number, gates, 0).sum(axis=-1).astype(rows.dtype)
            total = total + self.function(each, rows) * weight.reshape(-1, *(1,) * (rows.ndim - 1))
        return total, load_balancing_loss(scores, index)

    def _check(self, params: Sequence[Tree]) -> None:
        if len(params) != len(self):
            raise ProgramError(f"parameters for {len(params)} experts, and there are {len(self)}")


def experts(
    function: Callable[[Tree, Any], Any],
    slices: Sequence[pw.Slice],
    count: int | None = None,
    *,
    in_specs: Any = PartitionSpec(),  # noqa: B008  (immutable)
    out_specs: Any = PartitionSpec(),  # noqa: B008
) -> Experts:
    """`count` copies of `function(params, rows)` on slices, one after the other (default: one on each slice).

    `function` maps rows to as many rows, each by itself. `in_specs` and `out_specs` are those of `pathway.jit`.
    """
    return Experts(function, slices, len(slices) if count is None else count, in_specs, out_specs)
