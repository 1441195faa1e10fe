"""Host values as arguments: what JAX would make of them, their bytes, and a key to find a traced program by."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pathway.dataflow.layout import Aval, numpy_dtype
from pathway.errors import ProgramError

_SCALARS = (bool, int, float, complex)

KEY_IMPLEMENTATIONS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}
"""The name by which JAX knows the implementation of a typed PRNG key."""


def kind_key(leaf: Any) -> Any:
    """Equal for host values that trace alike: hashable and cheap."""
    kind = type(leaf)
    if kind in _SCALARS:
        return kind
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.shape, leaf.dtype
    if isinstance(leaf, jax.core.Tracer):
        raise ProgramError(
            "a program or stage was called while JAX traces something else: use jax.grad, jax.vmap and jax.jit inside "
            "of a pathway.program, and call the stage there"
        )
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)  # typed keys have none
    raise ProgramError(
        f"an argument of a program must be an array or a number, not {kind.__qualname__}; name it in static_argnums "
        "or static_argnames if the program is to be traced for its value"
    )


def aval_of(leaf: Any) -> Aval:
    """The aval that JAX gives the value: canonical dtype, weak type."""
    try:
        aval = jax.typeof(leaf)
    except TypeError as error:
        raise ProgramError(f"{type(leaf).__qualname__} is neither an array nor a number") from error
    return Aval(tuple(aval.shape), str(aval.dtype), bool(aval.weak_type))


def physical_value(leaf: Any, aval: Aval) -> np.ndarray[Any, Any]:
    """The value as the physical array that travels for `aval`. Shares the memory of `leaf` where it can."""
    if aval.dtype.startswith("key<"):
        leaf = jax.random.key_data(leaf)
    elif aval.dtype == "float0":
        return np.zeros(aval.shape, np.bool_)
    return np.asarray(leaf, dtype=numpy_dtype(aval.physical.dtype))


def logical_value(value: np.ndarray[Any, Any], aval: Aval) -> Any:
    """What users get for a physical array: the array itself, but a typed key array for a key's words."""
    if aval.dtype.startswith("key<"):
        return jax.random.wrap_key_data(jax.numpy.asarray(value), impl=KEY_IMPLEMENTATIONS[aval.dtype])
    return np.zeros(aval.shape, jax.dtypes.float0) if aval.dtype == "float0" else value


def jax_dtype(name: str) -> Any:
    """JAX's dtype of an aval's dtype name."""
    if name.startswith("key<"):
        return jax.eval_shape(lambda: jax.random.key(0, impl=KEY_IMPLEMENTATIONS[name])).dtype
    return numpy_dtype(name)
