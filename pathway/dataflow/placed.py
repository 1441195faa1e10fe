"""What a `pathway.jit` call and a closed-over `pathway.Array` leave behind while JAX traces a program.

A call becomes an inner `jax.jit` whose name names the slice, with sharding constraints over the slice's abstract mesh
on its inputs and outputs. Autodiff and batching keep the name and transpose the constraints, so the backward stage
lands on its forward's slice, in its sharding. (Rejected: a primitive of our own for the call. It would need a rule for
every transformation, those of other libraries included; `jit` has them all.)
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from pathway.dataflow.graph import SliceShape
from pathway.dataflow.jaxprs import calling_line, placed_name
from pathway.errors import ProgramError

Mesh = tuple[tuple[str, int], ...]

pathway_array_p = jex.Primitive("pathway_array")
"""A closed-over `pathway.Array`: an equation without inputs, whose parameter `handle` says which."""

pathway_array_p.def_abstract_eval(
    lambda *, handle, shape, dtype, weak_type: jax.core.ShapedArray(shape, dtype, weak_type=weak_type)
)


def array_reference(handle: Hashable, shape: Sequence[int], dtype: Any, weak_type: bool = False) -> Any:
    """The traced array that stands for a resident array within the trace that is on. `handle` is kept by the trace, and
    by JAX's own caches of inner functions: an object that keeps its array alive is a good one."""
    return pathway_array_p.bind(handle=handle, shape=tuple(shape), dtype=dtype, weak_type=weak_type)


def abstract_mesh(slice_shape: SliceShape) -> AbstractMesh:
    """The slice's mesh without devices, for `with_sharding_constraint` and `shard_map` in the user's own functions."""
    return mesh_without_devices(slice_shape.mesh)


@functools.cache
def mesh_without_devices(mesh: Mesh) -> AbstractMesh:
    names, sizes = tuple(name for name, _ in mesh), tuple(size for _, size in mesh)
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(mesh))


def placed_call(
    fun: Callable[..., Any],
    slice_shape: SliceShape,
    in_specs: Any = PartitionSpec(),  # noqa: B008  (immutable)
    out_specs: Any = PartitionSpec(),  # noqa: B008
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    name: str | None = None,
) -> Callable[..., Any]:
    """`fun` as a stage on a slice, to be called while a program is traced.

    `in_specs` is one spec for all arguments, or a sequence with an entry for each positional argument that is not
    static (keyword-only arguments are left open then); an entry, like `out_specs`, is a spec or a prefix of the
    argument's pytree. `PartitionSpec()` means replicated, and None leaves the sharding open. Make the stage once and
    call it often: JAX caches the trace with it.
    """
    name = name or str(getattr(fun, "__name__", type(fun).__name__))
    numbers = {static_argnums} if isinstance(static_argnums, int) else set(static_argnums)
    names = {static_argnames} if isinstance(static_argnames, str) else set(static_argnames)
    in_specs = tuple(in_specs) if isinstance(in_specs, list) else in_specs
    signature = _signature(fun)
    if signature is not None:
        parameters = list(signature.parameters.values())
        names |= {parameters[i].name for i in numbers if -len(parameters) <= i < len(parameters)}
        numbers |= {i for i, parameter in enumerate(parameters) if parameter.name in names and _positional(parameter)}
        numbers = {i % len(parameters) if i < 0 else i for i in numbers}

    def stage(*args: Any, **kwargs: Any) -> Any:
        dynamic = [i for i in range(len(args)) if i not in numbers]
        inputs = constrained(tuple(args[i] for i in dynamic), in_specs, slice_shape, f"in_specs of {name}")
        positional = list(args)
        for i, value in zip(dynamic, inputs, strict=True):
            positional[i] = value
        if isinstance(in_specs, PartitionSpec):
            changing = {key: value for key, value in kwargs.items() if key not in names}
            kwargs |= constrained(changing, in_specs, slice_shape, f"in_specs of {name}")
        return constrained(fun(*positional, **kwargs), out_specs, slice_shape, f"out_specs of {name}")

    stage.__name__ = stage.__qualname__ = placed_name(slice_shape.slice, name)
    stage.__doc__ = fun.__doc__
    inner = jax.jit(stage, static_argnums=tuple(sorted(numbers)), static_argnames=tuple(sorted(names)))

    @functools.wraps(fun, assigned=("__doc__", "__module__"), updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _by_position(signature, args, kwargs)
        return inner(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call


def constrained(tree: Any, specs: Any, slice_shape: SliceShape, what: str) -> Any:
    """`tree` with the constraints of `specs`, a prefix of it. Raises `ProgramError` for a spec that cannot be."""
    leaves, structure = jax.tree.flatten(tree)
    spread: list[PartitionSpec | None] = []
    try:
        jax.tree.map(
            lambda spec, below: spread.extend([spec] * len(jax.tree.leaves(below))), specs, tree, is_leaf=_is_spec
        )
    except ValueError as error:
        raise ProgramError(
            f"{what} is no prefix of the pytree it is for ({structure}), at {calling_line()}: {error}"
        ) from error
    return structure.unflatten(
        [_constrained_leaf(leaf, spec, slice_shape, what) for leaf, spec in zip(leaves, spread, strict=True)]
    )


def _is_spec(value: object) -> bool:
    return value is None or isinstance(value, PartitionSpec)


def _constrained_leaf(leaf: Any, spec: PartitionSpec | None, slice_shape: SliceShape, what: str) -> Any:
    shape, dtype = jnp.shape(leaf), jax.typeof(leaf).dtype if hasattr(leaf, "dtype") else None
    if spec is None or dtype == jax.dtypes.float0 or not slice_shape.mesh:
        return leaf
    check_spec(spec, shape, slice_shape.mesh, f"slice {slice_shape.slice}", what)
    if dtype is None:
        leaf = jnp.asarray(leaf)
    sharding = NamedSharding(mesh_without_devices(slice_shape.mesh), spec)
    return jax.lax.with_sharding_constraint(leaf, sharding)


def check_spec(spec: Any, shape: tuple[int, ...], mesh: Mesh, where: str, what: str) -> None:
    """Raise `ProgramError`, with the user's line, for a spec that does not fit an array of this shape on this mesh."""

    def refuse(problem: str) -> None:
        axes = ", ".join(f"{axis}={size}" for axis, size in mesh)
        raise ProgramError(
            f"{what}: {problem}. The spec is {spec}, the array's shape {shape}, the mesh of {where} is {{{axes}}}; "
            f"at {calling_line()}"
        )

    if not isinstance(spec, PartitionSpec):
        refuse(f"a PartitionSpec was expected, not {spec!r}")
    if len(spec) > len(shape):
        refuse(f"it splits {len(spec)} dimensions of an array that has {len(shape)}")
    sizes, used = dict(mesh), set[str]()
    for dimension, entry in enumerate(spec):
        if entry is None or entry is PartitionSpec.UNCONSTRAINED:
            continue
        axes = (entry,) if isinstance(entry, str) else tuple(entry)
        for axis in axes:
            if axis not in sizes:
                refuse(f"the mesh has no axis {axis!r}")
            if axis in used:
                refuse(f"the axis {axis!r} splits two dimensions")
            used.add(axis)
        parts = math.prod(sizes[axis] for axis in axes)
        if shape[dimension] % parts:
            refuse(f"dimension {dimension} of length {shape[dimension]} cannot be split into {parts} by axis {axes}")


def _signature(fun: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fun)
    except (TypeError, ValueError):  # some callables of C have none
        return None


def _positional(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _by_position(
    signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Keyword arguments moved to their positions, so that `in_specs` can name them by position."""
    if signature is None or not kwargs:
        return args, kwargs
    bound = signature.bind(*args, **kwargs)
    return bound.args, bound.kwargs
