"""From one layout to another: which parts of which shards travel from where to where. Pure arithmetic; no JAX.

Invariants
  R-1  Only intersections of index ranges travel: the pieces that reach one host cover each element that the host's
       devices want exactly once.
  R-2  What a target device already holds does not travel: such a piece is `local`.
  R-3  A piece leaves from a device on its target's own host where one holds it; else the replicas share the sending,
       by bytes: first over their hosts, then over the devices of a host.
  R-4  Sender and receiver find the same pieces in the same order from the same arguments: nothing is negotiated.

A sharding cuts each dimension on its own, so the distinct shards form a grid, and the cells of two grids meet in a
product of one-dimensional overlaps. That is why the work here is proportional to the number of pieces, not to the
number of pairs of shards.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

from msgspec import Struct

from pathway.dataflow.layout import Layout, Region, Sharding, numpy_dtype
from pathway.dataflow.plan import Edge

Cell = tuple[int, ...]
"""A distinct shard: the number of its part along every dimension."""


class Piece(Struct, frozen=True, array_like=True):
    """A box of the array on its way from a device to devices that all sit on one host. Devices are island indices.
    `local`: the only target is the source itself, so nothing travels."""

    source: int
    targets: tuple[int, ...]
    region: Region
    nbytes: int
    local: bool = False


@lru_cache(maxsize=4096)
def pieces(
    source: Layout, target: Layout, source_devices_per_host: int, target_devices_per_host: int, same_island: bool
) -> tuple[Piece, ...]:
    """The pieces that make `target` out of `source`, by target host, then by region. Empty shards need none."""
    shape = source.aval.shape
    if shape != target.aval.shape:
        raise ValueError(f"an array of shape {shape} cannot become one of shape {target.aval.shape}")
    itemsize = numpy_dtype(source.aval.dtype).itemsize
    holders = _Holders(source, source_devices_per_host)
    overlaps = [
        _overlaps(extent, source.sharding.parts(dimension), target.sharding.parts(dimension))
        for dimension, extent in enumerate(shape)
    ]
    found = []
    for (host, cell), devices in sorted(_wanted(target, target_devices_per_host).items()):
        for combination in itertools.product(*(overlaps[d][part] for d, part in enumerate(cell))):
            from_cell = tuple(part for part, _ in combination)
            region = tuple(interval for _, interval in combination)
            nbytes = itemsize * math.prod(stop - start for start, stop in region)
            missing = devices
            if same_island:
                held = holders.devices[from_cell]
                found += [Piece(device, (device,), region, nbytes, local=True) for device in devices if device in held]
                missing = tuple(device for device in devices if device not in held)
            if missing:
                sender = holders.choose(from_cell, nbytes, host if same_island else -1)
                found.append(Piece(sender, missing, region, nbytes))
    return tuple(found)


def edge_pieces(edge: Edge, source_devices_per_host: int, target_devices_per_host: int) -> tuple[Piece, ...]:
    """The pieces of one edge of a plan."""
    same_island = edge.source_island == edge.target_island
    return pieces(edge.source, edge.target, source_devices_per_host, target_devices_per_host, same_island)


def cost_bytes(moved: tuple[Piece, ...]) -> int:
    """What `moved` sends between devices: each element once per destination host."""
    return sum(piece.nbytes for piece in moved if not piece.local)


def edge_bytes(edge: Edge, source_devices_per_host: int, target_devices_per_host: int) -> int:
    """`cost_bytes` of the edge's pieces without finding them, which may be many more than the devices."""
    source, target = edge.source, edge.target
    rank, total = len(source.aval.shape), 0
    held: dict[int, Cell] = {}
    if edge.source_island == edge.target_island:
        held = dict(zip(source.devices, cells(source.sharding, rank), strict=True))
    for (_, cell), devices in _wanted(target, target_devices_per_host).items():
        wanted = _box(target, cell)
        total += _size(wanted)
        # Only what all of them hold stays at home. Cells of one grid are disjoint, so it must be one cell.
        in_place = {held.get(device) for device in devices}
        if len(in_place) == 1 and (common := in_place.pop()) is not None:
            total -= _size(tuple(map(_meet, wanted, _box(source, common))))
    return total * numpy_dtype(source.aval.dtype).itemsize


def _box(layout: Layout, cell: Cell) -> Region:
    box = []
    for dimension, (extent, part) in enumerate(zip(layout.aval.shape, cell, strict=True)):
        step = -(-extent // layout.sharding.parts(dimension))
        box.append((min(part * step, extent), min((part + 1) * step, extent)))
    return tuple(box)


def _meet(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    return max(first[0], second[0]), min(first[1], second[1])


def _size(box: Region) -> int:
    return math.prod(max(0, stop - start) for start, stop in box)


class _Holders:
    """Who holds each cell of the source, and how much each has been asked to send so far."""

    def __init__(self, source: Layout, devices_per_host: int) -> None:
        self.devices: dict[Cell, dict[int, int]] = {}  # cell -> device -> bytes to send
        self._by_host: dict[Cell, dict[int, list[int]]] = {}
        self._host_bytes: dict[int, int] = {}
        for device, cell in zip(source.devices, cells(source.sharding, len(source.aval.shape)), strict=True):
            self.devices.setdefault(cell, {})[device] = 0
            host = device // devices_per_host
            self._by_host.setdefault(cell, {}).setdefault(host, []).append(device)
            self._host_bytes[host] = 0

    def choose(self, cell: Cell, nbytes: int, near: int) -> int:
        """The sender of a piece of `cell` to host `near` of the same island (-1: of another one)."""
        hosts = self._by_host[cell]
        host = near if near in hosts else min(hosts, key=lambda host: (self._host_bytes[host], host))
        sent = self.devices[cell]
        device = min(hosts[host], key=sent.__getitem__)
        sent[device] += nbytes
        if host != near:
            self._host_bytes[host] += nbytes
        return device


def _wanted(target: Layout, devices_per_host: int) -> dict[tuple[int, Cell], tuple[int, ...]]:
    wanted: dict[tuple[int, Cell], list[int]] = {}
    for device, cell in zip(target.devices, cells(target.sharding, len(target.aval.shape)), strict=True):
        wanted.setdefault((device // devices_per_host, cell), []).append(device)
    return {key: tuple(devices) for key, devices in wanted.items()}


@lru_cache(maxsize=1024)
def cells(sharding: Sharding, rank: int) -> tuple[Cell, ...]:
    """The cell that each mesh position holds, in row-major order of the mesh."""
    strides = sharding.strides(rank)
    found = []
    for position in range(sharding.device_count):
        cell = []
        for axes in strides:
            part = 0
            for stride, size in axes:
                part = part * size + position // stride % size
            cell.append(part)
        found.append(tuple(cell))
    return tuple(found)


def _overlaps(extent: int, source_parts: int, target_parts: int) -> list[list[tuple[int, tuple[int, int]]]]:
    """For each part of the target: the parts of the source that meet it, with the interval in which they do."""
    source_step, target_step = -(-extent // source_parts), -(-extent // target_parts)
    found = []
    for part in range(target_parts):
        start, stop = min(part * target_step, extent), min((part + 1) * target_step, extent)
        meets = []
        if start < stop:
            for other in range(start // source_step, -(-stop // source_step)):
                meets.append((other, (max(start, other * source_step), min(stop, (other + 1) * source_step))))
        found.append(meets)
    return found
