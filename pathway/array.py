"""`pathway.Array`: the future that users hold for an array on a cluster.

An array has a shape, a dtype, a sharding and a home from the moment it is named, and a value once its run has got so
far. Whatever needs the value waits for it, and raises there what went wrong on the way; nothing else waits, `repr`
included. An array is a leaf of JAX's pytrees. Its buffer is released when the last array that stands for it is gone.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np

from pathway.client import tracing
from pathway.client.bindings import ArrayKind, Run
from pathway.client.fetch import ArrayFetch
from pathway.client.hostvalues import jax_dtype
from pathway.client.operators import ArrayOperators
from pathway.dataflow import jaxtypes
from pathway.dataflow.placed import array_reference, mesh_without_devices
from pathway.errors import DeletedError, ErrorInfo, to_exception

if TYPE_CHECKING:
    from pathway.client.slices import Slice

CACHED_VALUE_BYTES = 1024 * 1024
"""A value that was fetched is kept with the array up to this size; a larger one is fetched again when it is needed."""


class Reference:
    """An array as traces know it: compared by identity, where `==` of arrays is their elements'."""

    __slots__ = ("array",)

    def __init__(self, array: Array) -> None:
        self.array = array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and other.array is self.array

    def __hash__(self) -> int:
        return hash(self.array)

    def __repr__(self) -> str:
        return repr(self.array)


class Array(ArrayOperators):
    """An array on a slice. Made by programs and `pathway.put`, never directly."""

    __slots__ = ("__weakref__", "_buffer", "_fetch", "_kind", "_run", "_shared")

    __array_priority__ = 100

    _buffer: int  # 0: deleted or donated
    _kind: ArrayKind
    _run: Run | None  # the run that computes it; None: it was put
    _fetch: ArrayFetch | None  # under way, or done and small enough to keep
    _shared: list[int] | None  # [how many arrays stand for the buffer], where more than one does (C-3)

    def __init__(self, kind: ArrayKind, buffer: int, run: Run | None = None) -> None:
        self._kind = kind
        self._buffer = buffer
        self._run = run
        self._fetch = None
        self._shared = None

    # -- what is known without waiting --------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return self._kind.shape

    @property
    def dtype(self) -> Any:
        """JAX's dtype."""
        kind = self._kind
        if kind.jax_dtype is None:
            kind.jax_dtype = jax_dtype(kind.aval.dtype)
        return kind.jax_dtype

    @property
    def weak_type(self) -> bool:
        """Whether the dtype gives way to others, as a Python scalar's does."""
        return self._kind.aval.weak_type

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._kind.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._kind.aval.size

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, counted once however many devices hold a copy."""
        return self._kind.nbytes

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return int(self.dtype.itemsize)

    @property
    def sharding(self) -> jax.sharding.NamedSharding:
        """How it lies on its slice: over the slice's abstract mesh."""
        kind = self._kind
        if kind.named_sharding is None:
            kind.named_sharding = jax.sharding.NamedSharding(
                mesh_without_devices(kind.sharding.mesh),
                jax.sharding.PartitionSpec(*(_spec_entry(axes) for axes in kind.sharding.spec)),
            )
        sharding: jax.sharding.NamedSharding = kind.named_sharding
        return sharding

    @property
    def slice(self) -> Slice:
        """Where it lives."""
        handle: Slice = self._kind.binding.owner.handle
        return handle

    def is_ready(self) -> bool:
        """Whether the value, or the error in its place, is there."""
        self._check_deleted()
        return self._run is None or self._run.done or self._kind.binding.error is not None

    def is_deleted(self) -> bool:
        """Whether it was deleted or donated."""
        return self._buffer == 0

    def __repr__(self) -> str:
        kind = self._kind
        bound = kind.binding.bound
        spec = ", ".join("/".join(axes) if axes else "-" for axes in kind.sharding.spec)
        return f"pathway.Array({kind.aval}, P({spec}) on slice {bound.slice} of {bound.island}, {self._state()})"

    def _state(self) -> str:
        if self._buffer == 0:
            return "deleted"
        error = self._error()
        if error is not None:
            return f"failed: {error.message.splitlines()[0]}"
        return "ready" if self._run is None or self._run.done else "pending"

    def cancel(self) -> None:
        """Cancel the run that computes it, if that is not over. Whoever needs a result of the run, of this array's or
        another's, gets `Cancelled`; what has begun on a device ends there first. Returns at once."""
        self._check_deleted()
        if self._run is not None and not self._run.done:
            handle: Any = self._kind.binding.core.client
            handle._cancel(self._run)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def block_until_ready(self) -> Array:
        """Wait until it is computed; raises what went wrong."""
        self._check()
        run = self._run
        if run is not None:
            try:
                run.wait()
            except KeyboardInterrupt:
                self._interrupted()
                raise
            self._check()
        return self

    def _interrupted(self) -> None:
        """Somebody who waited for it wants to wait no more (Ctrl-C): drop what it waits for."""
        run = self._run
        if run is not None and not run.done:
            handle: Any = self._kind.binding.core.client
            handle._cancel_up_to(run)

    def copy_to_host_async(self) -> None:
        """Start to fetch the value, so that it is there when it is asked for."""
        if self._buffer and self._error() is None and self._fetch is None:
            self._start_fetch()

    def numpy(self) -> np.ndarray[Any, Any]:
        """The value, read-only. Waits for it."""
        if self._kind.physical is not self._kind.layout:
            raise TypeError(f"an array of dtype {self._kind.aval.dtype} has no numpy value; see jax.random.key_data")
        return self._physical_value()

    def _physical_value(self) -> np.ndarray[Any, Any]:
        fetch = self._start_fetch()
        try:
            fetch.wait_here()
        except KeyboardInterrupt:
            self._interrupted()
            raise
        return self._fetched(fetch)

    def _start_fetch(self) -> ArrayFetch:
        fetch = self._fetch
        if fetch is not None and fetch.error is None:
            return fetch
        self._check()
        started: ArrayFetch = self._kind.binding.core.client._fetch(self._kind, self._buffer, self._run)
        self._fetch = started
        return started

    def _fetched(self, fetch: ArrayFetch) -> np.ndarray[Any, Any]:
        if self._kind.nbytes > CACHED_VALUE_BYTES:
            self._fetch = None
        if fetch.error is not None:
            raise to_exception(fetch.error)
        return fetch.value  # type: ignore[no-any-return]

    async def _value_async(self) -> np.ndarray[Any, Any]:
        fetch = self._start_fetch()
        await fetch.wait_trio()
        return self._fetched(fetch)

    def __await__(self) -> Generator[Any, Any, np.ndarray[Any, Any]]:
        """`await array` in a trio task: its numpy value."""
        return self._value_async().__await__()

    # -- the value, as Python and numpy ask for it --------------------------------------------------------------------

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        value = self.numpy()
        if dtype is not None and value.dtype != dtype:
            if copy is False:
                raise ValueError(f"an array of {value.dtype} cannot be had as {dtype} without a copy")
            return value.astype(dtype)
        return value.copy() if copy else value

    def item(self, *args: Any) -> Any:
        """The one element (or the one at an index) as a Python scalar."""
        return self.numpy().item(*args)

    def tolist(self) -> Any:
        """The value as nested lists of Python scalars."""
        return self.numpy().tolist()

    def __float__(self) -> float:
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __complex__(self) -> complex:
        return complex(self.numpy())

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def __index__(self) -> int:
        return self.numpy().__index__()

    def __format__(self, spec: str) -> str:
        return format(self.numpy()[()], spec) if spec and self.ndim == 0 else format(repr(self), spec)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        """Over the rows of the value, fetched once."""
        if not self.shape:
            raise TypeError("iteration over an array without dimensions")
        return iter(self.numpy())

    __hash__ = object.__hash__

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a pathway.Array cannot be pickled or copied: it stands for data on a cluster. Take pathway.get(array)"
        )

    # -- within JAX ---------------------------------------------------------------------------------------------------

    def __jax_array__(self) -> Any:
        """Within a program that closes over the array: a reference to it where it lies. Elsewhere: its value."""
        if tracing.is_on():
            self._check()
            return array_reference(Reference(self), self.shape, self.dtype, self.weak_type)
        return jax.numpy.asarray(self.numpy())

    # -- its end ------------------------------------------------------------------------------------------------------

    def delete(self) -> None:
        """Free it now. Whatever was started with it goes on."""
        self._give_up()

    def _give_up(self) -> None:
        """Let go of the buffer, which is released when no other array stands for it (C-3)."""
        buffer, self._buffer = self._buffer, 0
        if buffer == 0:
            return
        shared = self._shared
        if shared is not None:
            shared[0] -= 1
            if shared[0] > 0:
                return
        core = self._kind.binding.core
        if core.release(self._kind, buffer):
            core.client._flush_releases_soon()

    def _share(self) -> Array:
        """Another array for the same buffer."""
        if self._shared is None:
            self._shared = [1]
        self._shared[0] += 1
        other = Array(self._kind, self._buffer, self._run)
        other._shared = self._shared
        return other

    def __del__(self) -> None:
        if self._buffer:
            self._give_up()

    # -- errors -------------------------------------------------------------------------------------------------------

    def _error(self) -> ErrorInfo | None:
        run = self._run
        if run is not None and run.error is not None:
            return run.error
        return self._kind.binding.error

    def _check_deleted(self) -> None:
        if self._buffer == 0:
            raise DeletedError(f"the array ({self._kind.aval}) was deleted or donated")

    def _check(self) -> None:
        """Raise if it has no value and never will."""
        self._check_deleted()
        error = self._error()
        if error is not None:
            raise to_exception(error)


jaxtypes.register(Array, tracing.is_on)


def _spec_entry(axes: tuple[str, ...]) -> Any:
    return None if not axes else axes[0] if len(axes) == 1 else axes
