"""How a computation's outputs are sharded, from how its inputs are: forward over its jaxpr.

Every output of a node needs a definite sharding before anything is compiled, because transfers and the next nodes are
planned by it (G-3). A sharding found here is a choice, never a question of correctness: XLA makes the output so. A
constraint decides; without one, an array is split as the operands it is made of, and whole where that is unclear.

Within this file a *spec* is a tuple with the mesh axes of every dimension, major first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from pathway.dataflow.jaxprs import CALLS, Equation, Literal, call_body, opened, scan_counts
from pathway.dataflow.layout import Sharding

Spec = tuple[tuple[str, ...], ...]
Mesh = tuple[tuple[str, int], ...]
Rule = Callable[[Equation, list[Spec], dict[str, int]], list[Spec]]


def output_shardings(jaxpr: Any, in_shardings: Sequence[Sharding], mesh: Mesh) -> tuple[Sharding, ...]:
    """The sharding of every output of a jaxpr that runs on a mesh of this shape."""
    sizes = dict(mesh)
    specs = _forward(jaxpr, [sharding.spec for sharding in in_shardings], sizes)
    outputs = opened(jaxpr)[0].outvars
    return tuple(
        Sharding(mesh, fitting(spec, atom.aval.shape, sizes)) for spec, atom in zip(specs, outputs, strict=True)
    )


def wanted_sharding(jaxpr: Any, position: int, mesh: Mesh, known: Sequence[Sharding | None] = ()) -> Sharding:
    """The sharding in which a jaxpr wants an input that is not on its slice yet: that of the constraint which stands on
    it, else that of an array of its shape which it meets first, else whole on every device. `known`: the inputs'
    shardings, as far as they are."""
    body = opened(jaxpr)[0]
    var, sizes = body.invars[position], dict(mesh)
    spec = _constraint_on(body, var, sizes)
    if spec is None and any(known):
        spec = _partner_of(body, var, known, sizes)
    return Sharding(mesh, fitting(spec or _whole(var.aval.shape), var.aval.shape, sizes))


def replicated(mesh: Mesh, rank: int) -> Sharding:
    """Whole on every device."""
    return Sharding(mesh, ((),) * rank)


def fitting(spec: Spec, shape: Sequence[int], sizes: dict[str, int]) -> Spec:
    """`spec` with exactly one entry per dimension, less what does not divide its dimension or is used twice."""
    used: set[str] = set()
    fit: list[tuple[str, ...]] = []
    for dimension, extent in enumerate(shape):
        axes = tuple(axis for axis in (spec[dimension] if dimension < len(spec) else ()) if axis in sizes)
        if used & set(axes) or len(set(axes)) < len(axes) or extent % _parts(axes, sizes):
            axes = ()
        used |= set(axes)
        fit.append(axes)
    return tuple(fit)


def spec_of(sharding: Any, rank: int, sizes: dict[str, int], under: Spec | None = None) -> Spec | None:
    """A JAX sharding as a spec; None where it speaks of another mesh. Dimensions left open are as in `under`."""
    if not isinstance(sharding, NamedSharding) or dict(sharding.mesh.shape) != sizes:
        return None
    return _spec_of_partition(sharding.spec, rank, under)


def _spec_of_partition(partition: PartitionSpec, rank: int, under: Spec | None = None) -> Spec:
    spec: list[tuple[str, ...]] = []
    for dimension in range(rank):
        entry = partition[dimension] if dimension < len(partition) else None
        if entry is PartitionSpec.UNCONSTRAINED:
            spec.append(under[dimension] if under is not None else ())
        else:
            spec.append(() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry))
    return tuple(spec)


def _parts(axes: Sequence[str], sizes: dict[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)


def _whole(shape: Sequence[int]) -> Spec:
    return ((),) * len(shape)


# The constraint that stands on an input ------------------------------------------------------------------------------


def _constraint_on(body: Any, var: Any, sizes: dict[str, int]) -> Spec | None:
    """The first constraint on `var` itself, in this jaxpr or in one that it is handed to as it is."""
    rank = len(var.aval.shape)
    for equation in body.eqns:
        for position, atom in enumerate(equation.invars):
            if atom is not var:
                continue
            spec, name = None, equation.primitive.name
            if name == "sharding_constraint":
                spec = spec_of(equation.params["sharding"], rank, sizes)
            elif name == "shard_map":
                if dict(equation.params["mesh"].shape) == sizes:
                    spec = _spec_of_partition(equation.params["in_specs"][position], rank)
            elif name in CALLS:
                inner = opened(call_body(equation))[0]
                spec = _constraint_on(inner, inner.invars[position], sizes)
            elif name == "scan":
                inner = opened(equation.params["jaxpr"])[0]
                spec = _constraint_on(inner, inner.invars[position], sizes)
                if spec is not None and position >= sum(scan_counts(equation)):
                    spec = ((), *spec)
            if spec is not None:
                return spec
    return None


_BESIDE_BY_SHAPE = frozenset({"optimization_barrier"})

# Forward -------------------------------------------------------------------------------------------------------------


def _forward(jaxpr: Any, specs: Sequence[Spec], sizes: dict[str, int]) -> list[Spec]:
    body = opened(jaxpr)[0]
    known: dict[Any, Spec] = dict(zip(body.invars, specs, strict=True))
    for equation in body.eqns:
        _follow(equation, known, sizes)
    return [_spec_in(known, atom) for atom in body.outvars]


def _follow(equation: Equation, known: dict[Any, Spec], sizes: dict[str, int]) -> None:
    """Enter the specs of an equation's outputs."""
    outputs = _rule(equation)(equation, [_spec_in(known, atom) for atom in equation.invars], sizes)
    for var, found in zip(equation.outvars, outputs, strict=True):
        known[var] = fitting(found, var.aval.shape, sizes)


def _spec_in(known: dict[Any, Spec], atom: Any) -> Spec:
    whole = _whole(atom.aval.shape)
    return whole if isinstance(atom, Literal) else known.get(atom, whole)


def _partner_of(body: Any, var: Any, given: Sequence[Sharding | None], sizes: dict[str, int]) -> Spec | None:
    """How the first array of its shape is split that stands beside `var` in an elementwise equation."""
    known = {atom: sharding.spec for atom, sharding in zip(body.invars, given, strict=True) if sharding is not None}
    if not var.aval.shape:
        return None
    for equation in body.eqns:
        if var in [atom for atom in equation.invars if not isinstance(atom, Literal)]:
            name = equation.primitive.name
            if name not in _BESIDE_BY_SHAPE and _rule(equation) is not _like_operands:
                return None
            shape = var.aval.shape
            partners = [a for a in equation.invars if a is not var and a.aval.shape == shape]
            return next((spec for spec in (_spec_in(known, atom) for atom in partners) if any(spec)), None)
        _follow(equation, known, sizes)
    return None


def _rule(equation: Equation) -> Rule:
    name = equation.primitive.name
    if name in CALLS:
        return lambda equation, inputs, sizes: _forward(call_body(equation), inputs, sizes)
    if name.startswith(("reduce_", "argm")) and "axes" in equation.params:
        return _reduce
    return _RULES.get(name, _like_operands)


def _join(specs: Sequence[Spec], rank: int) -> Spec:
    """Split as any of them is; the earlier ones decide where they differ."""
    joined: list[tuple[str, ...]] = [()] * rank
    used = set[str]()
    for spec in specs:
        for dimension, axes in enumerate(spec):
            if axes and not joined[dimension] and not used & set(axes):
                joined[dimension] = axes
                used |= set(axes)
    return tuple(joined)


def _like_operands(equation: Equation, inputs: list[Spec], sizes: dict[str, int]) -> list[Spec]:
    """Elementwise, and whatever else returns arrays of its operands' shapes."""
    del sizes
    outputs = []
    for var in equation.outvars:
        shape = var.aval.shape
        same = [spec for spec, atom in zip(inputs, equation.invars, strict=True) if atom.aval.shape == shape]
        outputs.append(_join(same, len(shape)))
    return outputs


def _constraint(equation: Equation, inputs: list[Spec], sizes: dict[str, int]) -> list[Spec]:
    spec = spec_of(equation.params["sharding"], len(inputs[0]), sizes, inputs[0])
    return [inputs[0] if spec is None else spec]


def _each_its_own(equation: Equation, inputs: list[Spec], sizes: dict[str, int]) -> list[Spec]:
    return list(inputs[: len(equation.outvars)])


def _transpose(equation: Equation, inputs: list[Spec], sizes: dict[str, int]) -> list[Spec]:
    return [tuple(inputs[0][dimension] for dimension in equation.params["permutation"])]


def _broadcast(equation: Equation, inputs: list[Spec], sizes: dict[str, int]) -> list[Spec]:
    shape = equation.outvars[0].aval.shape
    spec: list[tuple[str, ...]] = [()] * len(shape)
    operand = equation.invars[0].aval.shape
    for dimension, target in enumerate(equation.params["broadcast_dimensions"]):
        if operand[dimension] == shape[target]:
            spec[target] = inputs[0][dimension]
    return [tuple(spec)]


def _reduce(equation: Equation, inputs: list[Spec], sizes: dict[str, int]) -> list[Spec]:
    gone = set(equation.params["axes"])
    kept = tuple(axes for dimension, axes in enumerate(inputs[0]) if dimension not in gone)
    return [kept for _ in equation.outvars]


def _squeeze(equation: Equation, inputs: list[Spec], sizes: dict[str, int]) -> list[Spec]:
    gone = {dimension % len(inputs[0]) for dimension in equation.params["dimensions"]}
    return [tuple(axes for dimension, axes in enumerate(inputs[0]) if dimension not in gone)]


def _same_extents(equation: Equation, inputs: list[Spec], sizes: dict[str, int]) -> list[Spec]:
    """Slices and pads: a dimension of the operand that is still all there is split as it was."""
    operand = equation.invars[0].aval.shape
    outputs = []
    for var in equation.outvars:
        pairs = zip(inputs[0], operand, var.aval.shape, strict=True)
        outputs.append(tuple(axes if before == after else () for axes, before, after in pairs))
    return outputs


def _concatenate(equation: Equation, inputs: list[Spec], sizes: dict[str, int]) -> list[Spec]:
    along = equation.params["dimension"]
    joined = _join(inputs, len(inputs[0]))
    return [tuple(() if dimension == along else axes for dimension, axes in enumerate(joined))]


def _first(equation: Equation, inputs: list[Spec], sizes: dict[str, int]) -> list[Spec]:
    return [inputs[0]]


def _dot_general(equation: Equation, inputs: list[Spec], sizes: dict[str, int]) -> list[Spec]:
    (left_sum, right_sum), (left_batch, right_batch) = equation.params["dimension_numbers"]
    left, right = inputs
    spec = [left[i] or right[j] for i, j in zip(left_batch, right_batch, strict=True)]
    spec += [axes for i, axes in enumerate(left) if i not in left_sum and i not in left_batch]
    spec += [axes for i, axes in enumerate(right) if i not in right_sum and i not in right_batch]
    return [tuple(spec)]


def _convolution(equation: Equation, inputs: list[Spec], sizes: dict[str, int]) -> list[Spec]:
    numbers = equation.params["dimension_numbers"]
    spec: list[tuple[str, ...]] = [()] * len(inputs[0])
    spec[numbers.out_spec[0]] = inputs[0][numbers.lhs_spec[0]]
    spec[numbers.out_spec[1]] = inputs[1][numbers.rhs_spec[0]]
    return [tuple(spec)]


def _reshape(equation: Equation, inputs: list[Spec], sizes: dict[str, int]) -> list[Spec]:
    """Dimensions are matched in the smallest groups of equal size; within a group the major dimension's split stays,
    where it divides the new major dimension and nothing minor was split."""
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    spec: list[tuple[str, ...]] = [()] * len(after)
    if 0 in before:
        return [tuple(spec)]
    i = j = 0
    while i < len(before) and j < len(after):
        start, target, old, new = i, j, before[i], after[j]
        while old != new:
            if old < new:
                i += 1
                old *= before[i]
            else:
                j += 1
                new *= after[j]
        minor_whole = all(not axes for axes in inputs[0][start + 1 : i + 1])
        if minor_whole and after[target] % _parts(inputs[0][start], sizes) == 0:
            spec[target] = inputs[0][start]
        i, j = i + 1, j + 1
    return [tuple(spec)]


def _scan(equation: Equation, inputs: list[Spec], sizes: dict[str, int]) -> list[Spec]:
    constants, carried = scan_counts(equation)
    fixed, carry, rows = inputs[:constants], inputs[constants : constants + carried], inputs[constants + carried :]
    rows = [spec[1:] for spec in rows]
    carry = _fixed_point(lambda carry: _forward(equation.params["jaxpr"], [*fixed, *carry, *rows], sizes), carry)
    outputs = _forward(equation.params["jaxpr"], [*fixed, *carry, *rows], sizes)
    return [*carry, *(((), *spec) for spec in outputs[carried:])]


def _while(equation: Equation, inputs: list[Spec], sizes: dict[str, int]) -> list[Spec]:
    first = equation.params["cond_nconsts"]
    fixed = inputs[first : first + equation.params["body_nconsts"]]
    carry = inputs[first + len(fixed) :]
    return _fixed_point(lambda carry: _forward(equation.params["body_jaxpr"], [*fixed, *carry], sizes), carry)


def _fixed_point(step: Callable[[list[Spec]], list[Spec]], carry: list[Spec]) -> list[Spec]:
    """A loop's carry is split where it is so before the first step and after each."""
    for _ in range(2):
        after = step(carry)[: len(carry)]
        if after == carry:
            break
        carry = [_common([a, b]) for a, b in zip(carry, after, strict=True)]
    return carry


def _common(specs: Sequence[Spec]) -> Spec:
    return tuple(axes[0] if len(set(axes)) == 1 else () for axes in zip(*specs, strict=True))


def _cond(equation: Equation, inputs: list[Spec], sizes: dict[str, int]) -> list[Spec]:
    branches = [_forward(branch, inputs[1:], sizes) for branch in equation.params["branches"]]
    return [_common(outputs) for outputs in zip(*branches, strict=True)]


def _shard_map(equation: Equation, inputs: list[Spec], sizes: dict[str, int]) -> list[Spec]:
    if dict(equation.params["mesh"].shape) != sizes:
        return [_whole(var.aval.shape) for var in equation.outvars]
    pairs = zip(equation.params["out_specs"], equation.outvars, strict=True)
    return [_spec_of_partition(partition, len(var.aval.shape)) for partition, var in pairs]


_RULES: dict[str, Rule] = {
    "sharding_constraint": _constraint,
    "reshard": _first,
    "optimization_barrier": _each_its_own,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeeze,
    "slice": _same_extents,
    "dynamic_slice": _same_extents,
    "pad": _same_extents,
    "split": _same_extents,
    "concatenate": _concatenate,
    "dynamic_update_slice": _first,
    "scatter": _first,
    "scatter-add": _first,
    "scatter_add": _first,
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "reshape": _reshape,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}
