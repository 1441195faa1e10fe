"""From XLA's way of splitting an array, a grid of tiles with devices in it, to ours: a mesh, and axes that split. Pure.

A grid that comes from a mesh is digits in another order: the number of a device is written in mixed radix, and each
dimension of the grid counts some of the digits. `sharding_of_tiles` finds those digits and makes each an axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pathway.dataflow.layout import Sharding

DEVICES = "devices"
"""The one axis of a mesh over which nothing is split."""


def replicated(devices: int, rank: int) -> Sharding:
    """The whole array on each device."""
    return Sharding(((DEVICES, devices),), ((),) * rank)


def tile_grid(dimensions: Sequence[int], devices: Sequence[int] = (), reshape: Sequence[int] = (),
              transpose: Sequence[int] = ()) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:  # fmt: skip
    """The devices of a grid: listed, or an iota that is reshaped and transposed. Raises `ValueError` for what is no
    arrangement of so many devices."""
    if devices:
        flat = np.asarray(devices, np.int64)
    else:
        flat = np.arange(math.prod(reshape), dtype=np.int64).reshape(reshape).transpose(transpose)
    grid = flat.reshape(tuple(dimensions))
    if sorted(grid.flat) != list(range(grid.size)):
        raise ValueError(f"tiles that do not hold each of {grid.size} devices once: {grid.flatten().tolist()}")
    return grid


def sharding_of_tiles(grid: np.ndarray[tuple[int, ...], np.dtype[np.int64]], rank: int) -> Sharding:
    """The sharding of an array of this rank, whose dimensions are the first of the grid's; over the others it is
    replicated. Raises `ValueError` where no mesh over the devices, in their order, splits like that."""
    if grid.ndim < rank:
        raise ValueError(f"tiles of {grid.ndim} dimensions for an array of {rank}")
    digits: list[list[tuple[int, int]]] = []  # for each dimension of the grid: (stride, size), major first
    for dimension, size in enumerate(grid.shape):
        line = grid[tuple(slice(None) if other == dimension else 0 for other in range(grid.ndim))]
        digits.append(_digits((line - grid.flat[0]).tolist()) if size > 1 else [])
    strides = sorted((digit for each in digits for digit in each), reverse=True)
    mesh = tuple((str(stride), size) for stride, size in strides) or ((DEVICES, 1),)
    spec = tuple(tuple(str(stride) for stride, _ in each) for each in digits)
    numbers = np.zeros(grid.shape, np.int64)
    for dimension, each in enumerate(digits):
        if each:
            line = np.add.reduce(np.meshgrid(*(np.arange(n) * s for s, n in each), indexing="ij"), axis=0).reshape(-1)
            numbers += line.reshape([-1 if other == dimension else 1 for other in range(grid.ndim)])
    product = grid.size
    for stride, size in strides:
        product //= size
        if stride != product:
            raise ValueError(f"the tiles {grid.tolist()} come from no mesh")
    if not np.array_equal(numbers, grid):
        raise ValueError(f"the tiles {grid.tolist()} come from no mesh")
    return Sharding(mesh, spec[:rank])


def _digits(offsets: list[int]) -> list[tuple[int, int]]:
    """(stride, size) of the digits that count along a line, major first."""
    if len(offsets) == 1:
        return []
    stride, size = offsets[1], 2
    while size < len(offsets) and offsets[size] == size * stride:
        size += 1
    while len(offsets) % size:  # the run may go on by chance into the next digit
        size -= 1
    if size == 1:
        raise ValueError(f"no mesh axis counts {offsets}")
    return [*_digits(offsets[::size]), (stride, size)]
