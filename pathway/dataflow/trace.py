"""A Python function, traced: from a user's call to a closed jaxpr and the trees around it.

Tracing is `jax.make_jaxpr`'s, so all of JAX that is pure works. What is not pure, or not JAX, is refused here, with the
line of the user's program: a graph that runs far away and later can have no effect on the client's process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pathway.dataflow.jaxprs import aval_of, every_equation, is_extended, opened, raising_line, source_line
from pathway.dataflow.layout import Aval
from pathway.errors import PathwayError, ProgramError, raisable

_IMPURE = frozenset({"debug_print", "infeed", "outfeed"})


@dataclass(frozen=True)
class Statics:
    """Which arguments of a function are Python values that it is traced anew for."""

    numbers: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()

    @classmethod
    def of(cls, fun: Callable[..., Any], numbers: int | Sequence[int], names: str | Sequence[str]) -> Statics:
        """Named by either, known by both, as with `jax.jit`."""
        by_number = {numbers} if isinstance(numbers, int) else set(numbers)
        by_name = {names} if isinstance(names, str) else set(names)
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (TypeError, ValueError):  # some callables of C have no signature
            return cls(frozenset(by_number), frozenset(by_name))
        count = len(parameters)
        by_number = {number + count if number < 0 else number for number in by_number}
        by_name |= {parameters[number].name for number in by_number if number < count}
        by_number |= {
            number
            for number, parameter in enumerate(parameters)
            if parameter.name in by_name and parameter.kind != inspect.Parameter.KEYWORD_ONLY
        }
        return cls(frozenset(by_number), frozenset(by_name))

    def split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that are not static."""
        dynamic = tuple(arg for number, arg in enumerate(args) if number not in self.numbers)
        return dynamic, {key: value for key, value in kwargs.items() if key not in self.names}

    def merge(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic: Sequence[Any], dynamic_kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`args` and `kwargs` with those of their values replaced that are not static."""
        rest = iter(dynamic)
        merged = tuple(arg if number in self.numbers else next(rest) for number, arg in enumerate(args))
        return merged, {**kwargs, **dynamic_kwargs}


@dataclass(frozen=True, eq=False)
class Traced:
    """A program for one structure and one set of shapes. `jaxpr` has an input for each flat argument that is not static
    and an output for each flat result that is an array on a device: `float0` leaves exist on the host alone."""

    name: str
    jaxpr: Any
    in_tree: Any
    out_tree: Any
    in_avals: tuple[Aval, ...]
    out_avals: tuple[Aval, ...]
    statics: Statics
    host_results: tuple[tuple[int, Any], ...] = ()  # (flat position in out_tree, the value)

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The flat arguments of another call with the same structure."""
        leaves: list[Any]
        leaves, tree = jax.tree.flatten(self.statics.split(args, kwargs))
        if tree != self.in_tree:
            raise ProgramError(f"{self.name} was traced for arguments {self.in_tree}, not {tree}")
        return leaves

    def assemble(self, results: Iterable[Any]) -> Any:
        """The program's result from the graph's flat results."""
        leaves = list(results)
        for position, value in self.host_results:
            leaves.insert(position, value)
        return jax.tree.unflatten(self.out_tree, leaves)

    def donated_leaves(self, donate_argnums: int | Sequence[int], argument_count: int) -> frozenset[int]:
        """The flat arguments that belong to positional arguments `donate_argnums` of a call with `argument_count`
        positional arguments, static ones counted."""
        numbers = {donate_argnums} if isinstance(donate_argnums, int) else set(donate_argnums)
        numbers = {number % argument_count if number < 0 else number for number in numbers}
        dynamic = [number for number in range(argument_count) if number not in self.statics.numbers]
        donated, start = set[int](), 0
        for number, tree in zip(dynamic, self.in_tree.children()[0].children(), strict=True):
            if number in numbers:
                donated.update(range(start, start + tree.num_leaves))
            start += tree.num_leaves
        return frozenset(donated)


def trace(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    name: str | None = None,
) -> Traced:
    """Trace `fun` as it is called with these arguments: arrays, Python scalars, or anything else with a shape and a
    dtype. Raises `ProgramError` for what a program cannot do; other exceptions of the user's code pass through."""
    kwargs = kwargs or {}
    name = name or str(getattr(fun, "__name__", type(fun).__name__))
    statics = Statics.of(fun, static_argnums, static_argnames)
    paths, in_tree = jax.tree_util.tree_flatten_with_path(statics.split(args, kwargs))
    structs = [_struct(leaf, name, path) for path, leaf in paths]
    out_tree: Any = None
    host_results: list[tuple[int, Any]] = []

    def flat(*leaves: Any) -> list[Any]:
        nonlocal out_tree
        call_args, call_kwargs = statics.merge(args, kwargs, *jax.tree.unflatten(in_tree, leaves))
        results, out_tree = jax.tree.flatten(fun(*call_args, **call_kwargs))
        host_results[:] = [(i, leaf) for i, leaf in enumerate(results) if _is_float0(leaf)]
        return [leaf for leaf in results if not _is_float0(leaf)]

    flat.__name__ = flat.__qualname__ = name
    try:
        closed = jax.make_jaxpr(flat)(*structs)
    except PathwayError:
        raise
    except (TypeError, ValueError, jax.errors.JAXTypeError) as error:
        line, users_own = raising_line(error)
        if users_own:
            raise
        kind = raisable(ProgramError, f"builtins.{type(error).__name__}")
        raise kind(f"{name} cannot be traced, at {line or 'an unknown line'}: {error}") from error
    _refuse_effects(closed, name)
    body = opened(closed)[0]
    return Traced(
        name=name,
        jaxpr=closed,
        in_tree=in_tree,
        out_tree=out_tree,
        in_avals=tuple(aval_of(var) for var in body.invars),
        out_avals=tuple(aval_of(var) for var in body.outvars),
        statics=statics,
        host_results=tuple(host_results),
    )


def _struct(leaf: Any, name: str, path: Any) -> jax.ShapeDtypeStruct:
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        try:
            leaf = jax.typeof(leaf)
        except TypeError as error:
            positional = isinstance(path[0], jax.tree_util.SequenceKey) and path[0].idx == 0
            where = ("args" if positional else "kwargs") + jax.tree_util.keystr(path[1:])
            raise ProgramError(
                f"{name}: {where} is neither an array nor a number, but {type(leaf).__qualname__}; "
                "name it in static_argnums or static_argnames if the program is to be traced for its value"
            ) from error
    dtype = leaf.dtype if is_extended(leaf.dtype) else jax.dtypes.canonicalize_dtype(leaf.dtype)
    return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype, weak_type=bool(getattr(leaf, "weak_type", False)))


def _is_float0(leaf: Any) -> bool:
    return bool(getattr(leaf, "dtype", None) == jax.dtypes.float0)


def _refuse_effects(closed: Any, name: str) -> None:
    for equation in every_equation(closed):
        primitive = equation.primitive.name
        if primitive in _IMPURE or "callback" in primitive:
            raise ProgramError(
                f"{name} calls back into Python ({primitive}), at {source_line(equation)}. A program runs away "
                "from this process: return the value, and print or handle it where it is returned"
            )
    for equation in opened(closed)[0].eqns:
        if equation.effects:
            effects = ", ".join(sorted(str(effect) for effect in equation.effects))
            raise ProgramError(
                f"{name} has side effects ({effects}), at {source_line(equation)}. A program is a pure function"
            )
    if opened(closed)[0].effects:
        raise ProgramError(f"{name} has side effects: a program is a pure function")
