"""Grids of tiles, and the shardings they mean: compared with what JAX makes of named shardings."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pathway.dataflow.layout import shard_regions
from pathway.dataflow.tiles import replicated, sharding_of_tiles, tile_grid


def tile_regions(grid: np.ndarray, shape: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    """By definition: for each device, the box of its tile."""
    found = {}
    for place in itertools.product(*map(range, grid.shape)):
        box = []
        for extent, tiles, at in zip(shape, grid.shape, place, strict=False):
            step = -(-extent // tiles)
            box.append((min(at * step, extent), min((at + 1) * step, extent)))
        found[int(grid[place])] = tuple(box)
    return [found[device] for device in range(grid.size)]


GRIDS = [
    tile_grid([2, 2], reshape=[4], transpose=[0]),
    tile_grid([2, 2], devices=[0, 2, 1, 3]),
    tile_grid([2, 1, 2], reshape=[4], transpose=[0]),
    tile_grid([4, 1, 2], reshape=[2, 2, 2], transpose=[2, 0, 1]),
    tile_grid([1, 8], reshape=[2, 4], transpose=[1, 0]),
    tile_grid([4, 2], reshape=[2, 2, 2], transpose=[0, 2, 1]),
    tile_grid([3, 2, 2], reshape=[2, 3, 2], transpose=[1, 2, 0]),
    tile_grid([1, 1, 4], reshape=[4], transpose=[0]),
    tile_grid([6], reshape=[2, 3], transpose=[1, 0]),
]


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: str(grid.tolist()))
@pytest.mark.parametrize("shape", [(24, 16), (5, 7)])
def test_every_device_has_its_tile(grid: np.ndarray, shape: tuple[int, ...]) -> None:
    shape = shape[: grid.ndim]
    assert list(shard_regions(shape, sharding_of_tiles(grid, len(shape)))) == tile_regions(grid, shape)


def test_arrangements_that_no_mesh_has_are_refused() -> None:
    with pytest.raises(ValueError, match="no mesh"):
        sharding_of_tiles(tile_grid([4], devices=[0, 2, 3, 1]), 1)
    with pytest.raises(ValueError, match="no mesh"):
        sharding_of_tiles(tile_grid([4], devices=[3, 2, 1, 0]), 1)
    with pytest.raises(ValueError, match="once"):
        tile_grid([2], devices=[0, 0])
    with pytest.raises(ValueError):
        tile_grid([3], devices=[0, 1])
    with pytest.raises(ValueError, match="dimensions"):
        sharding_of_tiles(tile_grid([2], devices=[0, 1]), 2)


def test_replicated() -> None:
    assert shard_regions((3, 2), replicated(2, 2)) == (((0, 3), (0, 2)),) * 2
