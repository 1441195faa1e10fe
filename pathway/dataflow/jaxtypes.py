"""`pathway.Array` as a type that JAX's functions take within a program. Private names of JAX are used here; their test
is tests/test_jaxtypes.py.

JAX no longer converts arguments by `__jax_array__` when it abstracts them, so an array that is handed to a jitted
function, and hence to most of `jax.numpy`, has to be of a registered type. Where JAX then binds it, it asks for its
canonical value, which while a program is traced is a reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax._src import core, dtypes

from pathway.errors import PathwayError


def register(kind: type, is_tracing: Callable[[], bool]) -> None:
    """Let JAX take values of type `kind`, which have a shape, a dtype, a `weak_type` and `__jax_array__`, in traces of
    programs. (Elsewhere a jitted function would want to know devices of this process for them.)"""

    def aval(value: Any) -> Any:
        if not is_tracing():
            raise PathwayError(  # no TypeError: JAX would put another in its place
                f"a function of JAX was called with a pathway.{kind.__name__} outside of a program. To run it where "
                "the array lives, call it in a @pathway.program; to run it here, take the value with pathway.get"
            )
        return jax.core.ShapedArray(value.shape, value.dtype, weak_type=value.weak_type)

    core.pytype_aval_mappings[kind] = aval
    dtypes.canonicalize_value_handlers[kind] = lambda value: value.__jax_array__()
