"""`pathway.Array` as a type that JAX's functions take. Private names of JAX: see tests/test_jaxtypes.py.

JAX no longer converts arguments by `__jax_array__` when it abstracts them, so an array that is handed to a jitted
function, and hence to most of `jax.numpy`, has to be of a registered type. Wherever JAX then binds it, it asks for its
canonical value: a reference while a program is traced, its value elsewhere.
"""

from __future__ import annotations

from typing import Any

import jax
from jax._src import core, dtypes


def register(kind: type) -> None:
    """Let JAX take values of type `kind`, which have a shape, a dtype, a `weak_type` and `__jax_array__`."""
    core.pytype_aval_mappings[kind] = _aval
    dtypes.canonicalize_value_handlers[kind] = _canonical


def _aval(value: Any) -> Any:
    return jax.core.ShapedArray(value.shape, value.dtype, weak_type=value.weak_type)


def _canonical(value: Any) -> Any:
    return value.__jax_array__()
