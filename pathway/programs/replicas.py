"""Data parallel over islands: a replica of the model on each, gradients reduced between them.

Each replica is a function `(params, *batch) -> (loss, gradients)` whose stages are on its own island: model parallel
stages of `pathway.jit`, a `Pipeline`, anything. Here the batch is dealt out, and the gradients are made one (Pathways,
section 5.3; PaLM, section 4):

  R-1  Every leaf has one owner among the replicas, such that all own about as much. The others send it their gradient;
       it adds them up, weighted by the shares of the batch, and sends the sum to all. So all replicas get the same
       bits, whatever their meshes and sizes are, and a replica sends and receives each gradient about once.
  R-2  Two replicas with equal shares send their gradients to each other and both add: a + b and b + a are the same
       bits, and one way is less far than two. (Not where products are added: which of them is merged with the sum, and
       so not rounded, is up to the compiler.)
  R-3  A transfer goes from every host to the hosts that hold the same indices, in the chunks of the transport. It
       starts when the gradient is there. Where a replica's backward pass is several computations (stages, or
       microbatches), the gradients of the last layers travel while those of the first are computed; compressed ones,
       which are computed from gradients, come after them.
  R-4  What travels may be smaller than what is added: bfloat16, or int8 with a scale for each leaf. What the rounding
       takes away is added to the next step's gradient (error feedback), so nothing is lost for good.

Where code runs follows from its operands (docs/programs.md): where they differ, on the slice of the largest, then of
the last. So nothing here needs to know slices, and a replica may spread its leaves over many.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import pathway as pw
from pathway.errors import ProgramError

Tree = Any
Compression = Literal["bfloat16", "int8"] | None
Replica = Callable[..., tuple[Any, Tree]]


def data_parallel(
    replicas: Sequence[Replica],
    *,
    shares: Sequence[int] | None = None,
    compress: Compression = None,
    name: str = "data_parallel",
) -> DataParallel:
    """A step over replicas of a model: `loss, gradients = step(params, *batch)`.

    `replicas[i](params[i], *part)` gives the mean loss of its part of the batch and the gradients. `params` is a
    sequence with the parameters of each replica, alike in structure, and so are the `gradients` that come out: those of
    the mean over the whole batch, the same bits in all. The batch is cut along its first dimension in proportion to
    `shares`, which for unequal islands are unequal.

    With `compress`, the step has a state: `loss, gradients, residue = step(params, residue, *batch)`, which begins as
    `step.no_residue(params)`. A step can be called, or be part of a larger program.
    """
    return DataParallel(replicas, shares, compress, name)


class DataParallel:
    """Made by `data_parallel`."""

    def __init__(
        self, replicas: Sequence[Replica], shares: Sequence[int] | None, compress: Compression, name: str
    ) -> None:
        if not replicas:
            raise ProgramError(f"{name} has no replica")
        if compress not in (None, "bfloat16", "int8"):
            raise ProgramError(f'{name}: compress is None, "bfloat16" or "int8", not {compress!r}')
        self.replicas, self.compress, self.name = tuple(replicas), compress, name
        self.shares = tuple(shares) if shares is not None else (1,) * len(self.replicas)
        if len(self.shares) != len(self.replicas) or any(share < 1 for share in self.shares):
            raise ProgramError(f"{name} has {len(self.replicas)} replicas, and shares {list(self.shares)}")
        self._program = pw.program(name=name)(self._step)
        self._checksums = pw.program(name=f"{name} checksums")(lambda params: [_checksum(tree) for tree in params])
        self._zeros = pw.program(name=f"{name} residue")(
            lambda params: jax.tree.map(lambda leaf: _brought(jnp.zeros_like(leaf), leaf), params)
        )

    def __call__(self, params: Sequence[Tree], *state_and_batch: Tree) -> Any:
        """The mean loss of the batch, and for each replica its gradient (and what rounding took away)."""
        return self._program(list(params), *self._dealt(state_and_batch))

    def on_parts(self, params: Sequence[Tree], parts: Sequence[tuple[Tree, ...]], residue: Any = None) -> Any:
        """The same for a batch that has been dealt out already: for each replica its arguments, on its own slices."""
        return self._program(list(params), residue, [tuple(part) for part in parts])

    def lower(self, params: Sequence[Tree], *state_and_batch: Tree) -> pw.Lowered:
        """As `pathway.Program.lower`."""
        lowered: pw.Lowered = self._program.lower(list(params), *self._dealt(state_and_batch))
        return lowered

    def no_residue(self, params: Sequence[Tree]) -> list[Tree]:
        """The state of a compressed step before the first: nothing has been taken away yet."""
        zeros: list[Tree] = self._zeros(list(params))
        return zeros

    def checksums(self, params: Sequence[Tree]) -> list[int]:
        """A checksum over every bit of each replica's parameters, made where they are: all equal, or something is
        wrong."""
        return [int(value) for value in self._checksums(list(params))]

    def _dealt(self, state_and_batch: tuple[Tree, ...]) -> tuple[Tree, list[tuple[Tree, ...]]]:
        """The state, and each replica's part of the batch."""
        residue, batch = (state_and_batch[0], state_and_batch[1:]) if self.compress else (None, state_and_batch)
        leaves, structure = jax.tree.flatten_with_path(batch)
        total = sum(self.shares)
        bounds = [sum(self.shares[:number]) for number in range(len(self.shares) + 1)]
        parts: list[list[Any]] = [[] for _ in self.shares]
        for path, leaf in leaves:
            shape = np.shape(leaf)
            if not shape or not shape[0] or shape[0] % total:
                raise ProgramError(
                    f"the batch of {self.name}{jax.tree_util.keystr(path)} has shape {shape}, which cannot be dealt "
                    f"out to {len(self.shares)} replicas in shares of {list(self.shares)}"
                )
            size = shape[0] // total
            for part, start, end in zip(parts, bounds, bounds[1:], strict=False):
                part.append(leaf[start * size : end * size])
        return residue, [structure.unflatten(part) for part in parts]

    def _step(self, params: Sequence[Tree], residue: Sequence[Tree] | None, parts: Sequence[tuple[Tree, ...]]) -> Any:
        if len(params) != len(self.replicas):
            raise ProgramError(f"{self.name} has {len(self.replicas)} replicas, and parameters for {len(params)}")
        value: Any = 0.0
        rows: list[list[Any]] = []
        trees: list[Any] = []
        for replica, mine, part, share in zip(self.replicas, params, parts, self.shares, strict=True):
            loss, gradient = replica(mine, *part)
            value = value + loss * (share / sum(self.shares))
            leaves, tree = jax.tree.flatten(gradient)
            if trees and tree != trees[0]:
                raise ProgramError(f"the gradients of {self.name}'s replicas differ in structure: {trees[0]}, {tree}")
            rows.append(leaves)
            trees.append(tree)
        rests: list[list[Any]] = []
        if residue is not None:
            before = [jax.tree.leaves(some) for some in residue]
            rows = [[rest + leaf for leaf, rest in zip(*both, strict=True)] for both in zip(rows, before, strict=True)]
        small = [[_Small(leaf, self.compress) for leaf in row] for row in rows]
        if residue is not None:
            rests = [
                [leaf - some.at(leaf) for leaf, some in zip(*both, strict=True)]
                for both in zip(rows, small, strict=True)
            ]
        owners = _owners([leaf.size for leaf in rows[0]], len(rows))
        columns = [
            self._reduced(list(leaves), list(some), owner)
            for leaves, some, owner in zip(zip(*rows, strict=True), zip(*small, strict=True), owners, strict=True)
        ]
        gradients = [tree.unflatten(row) for tree, row in zip(trees, zip(*columns, strict=True), strict=True)]
        if residue is None:
            return value, gradients
        return value, gradients, [tree.unflatten(row) for tree, row in zip(trees, rests, strict=True)]

    def _reduced(self, leaves: list[Any], small: list[_Small], owner: int) -> list[Any]:
        """The mean of one leaf's gradients, at every replica (R-1, R-2)."""
        if len(leaves) <= 2 and len(set(self.shares)) == 1:
            return [self._mean(small, place) for place in leaves]
        mean = self._mean(small, leaves[owner])
        return [mean if number == owner else _brought(mean, place) for number, place in enumerate(leaves)]

    def _mean(self, small: list[_Small], place: Any) -> Any:
        total = sum(self.shares)
        if len(set(self.shares)) == 1:
            return functools.reduce(jnp.add, [some.at(place) for some in small]) / len(small)
        terms = [some.at(place) * (share / total) for some, share in zip(small, self.shares, strict=True)]
        return functools.reduce(jnp.add, terms)

    def __repr__(self) -> str:
        return f"<data_parallel {self.name}: {len(self.replicas)} replicas, shares {list(self.shares)}>"


class _Small:
    """A gradient as it travels (R-4)."""

    def __init__(self, leaf: Any, compress: Compression) -> None:
        self.dtype = leaf.dtype
        self.scale: Any = None
        if compress is None:
            self.payload = leaf
        elif compress == "bfloat16":
            self.payload = leaf.astype(jnp.bfloat16)
        else:
            # A power of two: the products are then exact, and the sums the same bits everywhere.
            self.scale = jnp.ldexp(jnp.ones((), leaf.dtype), jnp.frexp(jnp.abs(leaf).max() / 127)[1])
            self.payload = jnp.round(leaf / self.scale).astype(jnp.int8)

    def at(self, place: Any) -> Any:
        """What it stands for, where the array `place` is."""
        payload = _brought(self.payload, place).astype(self.dtype)
        if self.scale is None:
            return payload
        return payload * _brought(self.scale, place)


def _brought(x: Any, place: Any) -> Any:
    """`x`, where the array `place` is and split as that is: code runs where its largest operand is, and the last of
    equals."""
    if x is place:
        return x
    brought, _ = jax.lax.optimization_barrier((x, place))
    return brought


def _owners(sizes: Sequence[int], replicas: int) -> list[int]:
    """For each leaf the replica that adds it up, such that all add up about as much."""
    owners, loads = [0] * len(sizes), [0] * replicas
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = min(range(replicas), key=lambda replica: loads[replica])
        loads[owners[index]] += sizes[index]
    return owners


def _checksum(tree: Tree) -> Any:
    """Wrapping integer arithmetic: the same for the same bits, however the arrays are split."""
    total = jnp.zeros((), jnp.uint32)
    for number, leaf in enumerate(jax.tree.leaves(tree)):
        unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}") if leaf.dtype != jnp.bool_ else jnp.dtype("uint8")
        bits = leaf.astype(unsigned) if leaf.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(leaf, unsigned)
        words = bits.astype(jnp.uint32) if unsigned.itemsize <= 4 else jax.lax.bitcast_convert_type(leaf, jnp.uint32)
        places = jax.lax.iota(jnp.uint32, words.size).reshape(words.shape) * jnp.uint32(2654435761)
        mixed = (words ^ (words >> 15)) * (places | jnp.uint32(1))
        leaf_sum = mixed.sum(dtype=jnp.uint32) * jnp.uint32(2 * number + 1)
        total = total * jnp.uint32(16777619) + leaf_sum
    return total
