"""Arithmetic on arrays: every operator is a small program that runs where the arrays live, traced once per kind.

Operands on different slices follow the rule for code outside of stages: the slice of the larger, then of the last.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pathway.client import tracing

_HOST_OPERANDS = (bool, int, float, complex, np.ndarray, np.generic, jax.Array)


@functools.cache
def _program(function: Callable[..., Any], static_argnums: tuple[int, ...] = ()) -> Callable[..., Any]:
    from pathway.client.program import Program  # operators are part of arrays, which programs return

    return Program(function, static_argnums=static_argnums)


def apply(function: Callable[..., Any], *operands: Any) -> Any:
    """`function` of arrays and host values: within a program part of it, elsewhere a program of its own."""
    if tracing.is_on():
        return function(*(traced(operand) for operand in operands))
    return _program(function)(*operands)


def traced(operand: Any) -> Any:
    """An operand as the trace that is on knows it."""
    return operand.__jax_array__() if isinstance(operand, ArrayOperators) else operand


def _binary(function: Callable[[Any, Any], Any], swapped: bool = False) -> Any:
    def operate(self: ArrayOperators, other: Any) -> Any:
        if not isinstance(other, (ArrayOperators, *_HOST_OPERANDS)):
            return NotImplemented
        return apply(function, other, self) if swapped else apply(function, self, other)

    return operate


def _unary(function: Callable[[Any], Any]) -> Any:
    return lambda self: apply(function, self)


def _method(name: str) -> Any:
    def call(array: Any, arguments: tuple[Any, ...], keywords: tuple[tuple[str, Any], ...]) -> Any:
        return getattr(array, name)(*arguments, **dict(keywords))

    call.__name__ = name

    def method(self: ArrayOperators, *arguments: Any, **keywords: Any) -> Any:
        if tracing.is_on():
            return getattr(traced(self), name)(*arguments, **keywords)
        return _program(call, (1, 2))(self, _hashable(arguments), tuple(sorted(keywords.items())))

    method.__name__ = name
    method.__doc__ = f"As `jax.Array.{name}`, where the array lives."
    return method


def _hashable(value: Any) -> Any:
    return tuple(_hashable(item) for item in value) if isinstance(value, (tuple, list)) else value


def _transposed(array: Any) -> Any:
    return array.T


def _index(array: Any, template: tuple[Any, ...], *dynamic: Any) -> Any:
    values = iter(dynamic)
    return array[tuple(next(values) if entry is _DYNAMIC else _unfrozen(entry) for entry in template)]


class _Dynamic:
    """Stands for an index that is an argument of the program: integers and arrays, so that x[0] and x[1] share one."""

    def __repr__(self) -> str:
        return "dynamic"


_DYNAMIC = _Dynamic()


def _frozen(entry: Any) -> Any:
    return ("slice", entry.start, entry.stop, entry.step) if isinstance(entry, slice) else entry


def _unfrozen(entry: Any) -> Any:
    return slice(*entry[1:]) if isinstance(entry, tuple) and entry[:1] == ("slice",) else entry


class ArrayOperators:
    """Python's operators, and the methods of `jax.Array` that are used like them."""

    __slots__ = ()

    __add__ = _binary(operator.add)
    __radd__ = _binary(operator.add, swapped=True)
    __sub__ = _binary(operator.sub)
    __rsub__ = _binary(operator.sub, swapped=True)
    __mul__ = _binary(operator.mul)
    __rmul__ = _binary(operator.mul, swapped=True)
    __truediv__ = _binary(operator.truediv)
    __rtruediv__ = _binary(operator.truediv, swapped=True)
    __floordiv__ = _binary(operator.floordiv)
    __rfloordiv__ = _binary(operator.floordiv, swapped=True)
    __mod__ = _binary(operator.mod)
    __rmod__ = _binary(operator.mod, swapped=True)
    __pow__ = _binary(operator.pow)
    __rpow__ = _binary(operator.pow, swapped=True)
    __matmul__ = _binary(operator.matmul)
    __rmatmul__ = _binary(operator.matmul, swapped=True)
    __and__ = _binary(operator.and_)
    __rand__ = _binary(operator.and_, swapped=True)
    __or__ = _binary(operator.or_)
    __ror__ = _binary(operator.or_, swapped=True)
    __xor__ = _binary(operator.xor)
    __rxor__ = _binary(operator.xor, swapped=True)
    __lshift__ = _binary(operator.lshift)
    __rlshift__ = _binary(operator.lshift, swapped=True)
    __rshift__ = _binary(operator.rshift)
    __rrshift__ = _binary(operator.rshift, swapped=True)
    __lt__ = _binary(operator.lt)
    __le__ = _binary(operator.le)
    __gt__ = _binary(operator.gt)
    __ge__ = _binary(operator.ge)
    __eq__ = _binary(operator.eq)
    __ne__ = _binary(operator.ne)
    __neg__ = _unary(operator.neg)
    __pos__ = _unary(operator.pos)
    __invert__ = _unary(operator.invert)
    __abs__ = _unary(jnp.abs)

    __hash__ = object.__hash__

    def __jax_array__(self) -> Any:
        """The array as JAX's functions take it."""
        raise NotImplementedError

    astype = _method("astype")
    reshape = _method("reshape")
    transpose = _method("transpose")
    sum = _method("sum")
    mean = _method("mean")
    max = _method("max")
    min = _method("min")
    T = property(_unary(_transposed), doc="The transposed array.")

    def __getitem__(self, index: Any) -> Any:
        """As `jax.Array`'s, where the array lives. Integers and arrays are arguments of the program, slices are not."""
        if tracing.is_on():
            return traced(self)[index]
        entries = index if isinstance(index, tuple) else (index,)
        dynamic = [e for e in entries if not isinstance(e, slice) and e is not None and e is not Ellipsis]
        template = tuple(
            _frozen(e) if isinstance(e, slice) or e is None or e is Ellipsis else _DYNAMIC for e in entries
        )
        return _program(_index, (1,))(self, template, *dynamic)


def _copy(array: Any) -> Any:
    return jnp.copy(array)


def copied(array: Any) -> Any:
    """A copy in a buffer of its own."""
    return apply(_copy, array)


@functools.lru_cache(maxsize=1024)
def _move(slice: Any, spec: Any) -> Callable[..., Any]:
    from pathway.client.program import jit

    return jit(slice, in_specs=(spec,), out_specs=spec)(_copy)


def moved(array: Any, slice: Any, spec: Any) -> Any:
    """A copy on another slice, or in another sharding, straight from executor to executor."""
    return _move(slice, spec)(array)
