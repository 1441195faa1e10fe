"""What an array looks like and where its parts lie: avals, shardings, layouts. Plain frozen data that travels; no JAX.

A *layout* is an aval, a sharding over a logical mesh, and the devices that the mesh stands for. Devices are named by
their index within their island (host-major, 0 to devices-1): never by JAX's own ids, which are sparse on an island of
several processes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache

import ml_dtypes  # registers bfloat16, float8 and int4 with numpy
import numpy as np
from msgspec import Struct

Region = tuple[tuple[int, int], ...]
"""A box within an array: (start, stop) for every dimension."""


KEY_WORDS = {"key<fry>": 2, "key<rbg>": 4, "key<urbg>": 4}
"""Words of 32 bits in the state of each of JAX's typed PRNG keys."""


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """The numpy dtype of an aval's dtype name, `ml_dtypes` (bfloat16, float8_*, int4, ...) and `float0` included."""
    if name == "float0":
        return np.dtype([("float0", np.void, 0)])
    if hasattr(ml_dtypes, name):
        extended: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, name))
        return extended
    return np.dtype(name)


class Aval(Struct, frozen=True, array_like=True):
    """The shape and dtype of an array, as JAX's `ShapedArray`. `dtype` is numpy's name for it, for example `bfloat16`;
    a typed PRNG key has its extended name, for example `key<fry>`."""

    shape: tuple[int, ...]
    dtype: str
    weak_type: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array in host memory."""
        return self.size * numpy_dtype(self.dtype).itemsize

    @property
    def physical(self) -> Aval:
        """As it lies in memory and travels: a typed PRNG key is the uint32 words of its state (one dimension more),
        float0 is bool. Everything below the client speaks of physical arrays only."""
        if self.dtype in KEY_WORDS:
            return Aval((*self.shape, KEY_WORDS[self.dtype]), "uint32")
        return Aval(self.shape, "bool", self.weak_type) if self.dtype == "float0" else self

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Sharding(Struct, frozen=True, array_like=True):
    """A named sharding over a logical mesh, canonical so that equal shardings compare equal.

    `mesh` is the mesh's axes with their sizes, in order. `spec` has for each dimension of the array the mesh axes that
    split it, major first; `()` leaves the dimension whole. Trailing whole dimensions may be left out of a rank-less
    sharding, but `of_rank` fills them in: in a `Layout`, `len(spec)` is the rank.
    """

    mesh: tuple[tuple[str, int], ...]
    spec: tuple[tuple[str, ...], ...] = ()

    @property
    def axis_sizes(self) -> dict[str, int]:
        return dict(self.mesh)

    @property
    def device_count(self) -> int:
        return math.prod(size for _, size in self.mesh)

    @property
    def is_replicated(self) -> bool:
        sizes = self.axis_sizes
        return all(sizes[axis] == 1 for axes in self.spec for axis in axes)

    def of_rank(self, rank: int) -> Sharding:
        """The same sharding with exactly `rank` entries in its spec."""
        if len(self.spec) > rank:
            raise ValueError(f"a spec of {len(self.spec)} dimensions does not fit an array of rank {rank}")
        return Sharding(self.mesh, self.spec + ((),) * (rank - len(self.spec)))

    def strides(self, rank: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The canonical form: for each dimension, (stride, size) of the mesh positions along the axes that split it,
        major first, neighbours merged. Equal for two shardings over equally many devices exactly when every position
        holds the same part, whatever the axes are called."""
        steps, stride = {}, 1
        for axis, size in reversed(self.mesh):
            steps[axis], stride = (stride, size), stride * size
        canonical = []
        for axes in self.spec + ((),) * (rank - len(self.spec)):
            merged: list[tuple[int, int]] = []
            for step, size in (steps[axis] for axis in axes if steps[axis][1] > 1):
                if merged and merged[-1][0] == step * size:
                    merged[-1] = (step, merged[-1][1] * size)
                else:
                    merged.append((step, size))
            canonical.append(tuple(merged))
        return tuple(canonical)

    def parts(self, dimension: int) -> int:
        """Into how many parts `dimension` is split."""
        sizes = self.axis_sizes
        return math.prod(sizes[axis] for axis in self.spec[dimension]) if dimension < len(self.spec) else 1

    def __str__(self) -> str:
        entries = [(axes[0] if len(axes) == 1 else f"({','.join(axes)})") if axes else "-" for axes in self.spec]
        mesh = ",".join(f"{axis}={size}" for axis, size in self.mesh)
        return f"P({','.join(entries)}) over {{{mesh}}}"


class Layout(Struct, frozen=True, array_like=True):
    """An array on devices of one island: `devices[i]` is the island's device at mesh position i (row-major). `memory`
    is one of a device's memories, as JAX names its kinds; "" is the default one."""

    aval: Aval
    sharding: Sharding
    devices: tuple[int, ...]
    memory: str = ""

    @property
    def physical(self) -> Layout:
        """The layout of the array as it lies in memory (see `Aval.physical`)."""
        aval = self.aval.physical
        if aval is self.aval:
            return self
        return Layout(aval, self.sharding.of_rank(len(aval.shape)), self.devices, self.memory)

    def region(self, position: int) -> Region:
        """What part of the array the device at mesh position `position` holds. Uneven dimensions round up, so the
        last parts may be smaller, or empty, as in XLA."""
        return shard_regions(self.aval.shape, self.sharding)[position]

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of every shard of an evenly split array (of the first shard otherwise)."""
        return tuple(stop - start for start, stop in self.region(0))

    @property
    def shard_nbytes(self) -> int:
        return math.prod(self.shard_shape) * numpy_dtype(self.aval.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.aval} {self.sharding}"


@lru_cache(maxsize=4096)
def shard_regions(shape: tuple[int, ...], sharding: Sharding) -> tuple[Region, ...]:
    """The region held at every mesh position, in row-major order of the mesh."""
    return tuple(_regions(shape, sharding))


def _regions(shape: tuple[int, ...], sharding: Sharding) -> Iterator[Region]:
    sizes = sharding.axis_sizes
    for coordinates in itertools.product(*(range(size) for _, size in sharding.mesh)):
        at = dict(zip((axis for axis, _ in sharding.mesh), coordinates, strict=True))
        region = []
        for dimension, extent in enumerate(shape):
            axes = sharding.spec[dimension] if dimension < len(sharding.spec) else ()
            parts, part = 1, 0
            for axis in axes:
                parts, part = parts * sizes[axis], part * sizes[axis] + at[axis]
            step = -(-extent // parts)
            region.append((min(part * step, extent), min((part + 1) * step, extent)))
        yield tuple(region)
