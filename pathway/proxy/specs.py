"""What the client says of arrays, in our terms: dtypes, shardings, layouts of device memory. Pure.

A sharding comes as an object of one of several classes, serialized. Parsing one costs as much as a request does
otherwise, and programs use few of them: they are remembered by their bytes.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from pathway.dataflow.layout import Sharding, numpy_dtype
from pathway.dataflow.tiles import replicated, sharding_of_tiles, tile_grid
from pathway.proxy import wire
from pathway.proxy.status import invalid, unimplemented

_KINDS = wire.DType.DESCRIPTOR.enum_types_by_name["Kind"].values_by_number

_NAMES = {
    "PRED": "bool", "BF16": "bfloat16", "C64": "complex64", "C128": "complex128",
    **{f"S{bits}": f"int{bits}" for bits in (1, 2, 4, 8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (1, 2, 4, 8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{
        f"F{kind}": f"float{kind[0]}_{kind[1:].lower()}"
        for kind in (
            "8E3M4", "8E4M3", "8E4M3FN", "8E4M3B11FNUZ", "8E4M3FNUZ", "8E5M2", "8E5M2FNUZ", "8E8M0FNU",
            "4E2M1FN", "6E2M3FN", "6E3M2FN",
        )
    },
}  # fmt: skip
"""numpy's names, by the protocol's without KIND_."""

_DTYPE_OF_KIND = {
    number: _NAMES[value.name.removeprefix("KIND_")]
    for number, value in _KINDS.items()
    if value.name.removeprefix("KIND_") in _NAMES
}
_KIND_OF_DTYPE = {name: number for number, name in _DTYPE_OF_KIND.items()}

DEFAULT_MEMORY = "device"

SUB_BYTE_BITS = {
    name: int(bits[0]) for name in _KIND_OF_DTYPE if (bits := re.findall(r"^(?:u?int|float)([1246])(?:_|$)", name))
}


def dtype_name(dtype: Any) -> str:
    """numpy's name of a DTypeProto."""
    name = _DTYPE_OF_KIND.get(dtype.kind)
    if name is None:
        known = _KINDS.get(dtype.kind)
        raise unimplemented(f"arrays of {known.name if known else f'dtype {dtype.kind}'} are not supported")
    return name


def dtype_kind(name: str) -> int:
    """The number that a DTypeProto has for numpy's name."""
    number: int = _KIND_OF_DTYPE[name]
    return number


MAX_RANK = 32
MAX_ELEMENTS = 1 << 44


def shape_of(shape: Any) -> tuple[int, ...]:
    """The dimensions of a ShapeProto. Raises INVALID_ARGUMENT for what no array can have."""
    dims = tuple(shape.dims)
    if len(dims) > MAX_RANK or any(extent < 0 for extent in dims):
        raise invalid(f"no array has the shape {list(dims)}")
    if math.prod(extent or 1 for extent in dims) > MAX_ELEMENTS:
        raise invalid(f"an array of shape {list(dims)} is too large")
    return dims


class Spread(NamedTuple):
    """A sharding, with devices as the client numbers them; `sharding` is over them in their order."""

    devices: tuple[int, ...]
    sharding: Sharding
    memory: str  # "" for the default one


def spread_of(sharding: Any, shape: tuple[int, ...]) -> Spread:
    """What a ShardingProto means for an array of this shape."""
    serialized = sharding.serialized_sharding
    try:
        return _spread(serialized.type_name, serialized.data, shape)
    except DecodeError:
        raise invalid(f"a sharding that cannot be read, of class {serialized.type_name}") from None


@lru_cache(maxsize=4096)
def _spread(type_name: str, data: bytes, shape: tuple[int, ...]) -> Spread:
    rank = len(shape)
    match type_name.rpartition("::")[2]:
        case "HloSharding":
            hlo = wire.HloSharding.FromString(data)
            devices = tuple(hlo.devices.device_ids)
            return Spread(devices, op_sharding(hlo.xla_op_sharding, rank, len(devices)), _memory(hlo))
        case "SingleDeviceSharding":
            single = wire.SingleDeviceSharding.FromString(data)
            return Spread((single.device_id,), replicated(1, rank), _memory(single))
        case "ConcreteEvenSharding":
            even = wire.ConcreteEvenSharding.FromString(data)
            devices = tuple(even.devices.device_ids)
            if even.is_fully_replicated or len(devices) == 1:
                return Spread(devices, replicated(len(devices), rank), _memory(even))
            return Spread(
                devices, _even(tuple(even.shape.dims), tuple(even.shard_shape.dims), len(devices)), _memory(even)
            )
        case "ConcreteSharding":
            concrete = wire.ConcreteSharding.FromString(data)
            devices = tuple(concrete.devices.device_ids)
            shards = [tuple(shard.dims) for shard in concrete.shard_shapes]
            if all(shard == shape for shard in shards):
                return Spread(devices, replicated(len(devices), rank), _memory(concrete))
            if len(set(shards)) == 1:
                return Spread(devices, _even(shape, shards[0], len(devices)), _memory(concrete))
            raise unimplemented("an array with shards of several shapes")
        case other:
            raise unimplemented(f"shardings of class {other or 'none'} are not supported")


def _memory(sharding: Any) -> str:
    kind = sharding.memory_kind if sharding.HasField("memory_kind") else ""
    return "" if kind == DEFAULT_MEMORY else kind


def _even(shape: tuple[int, ...], shard: tuple[int, ...], devices: int) -> Sharding:
    """Equal shards in row-major order: what an array is that was put together of arrays of one device."""
    tiles = [-(-extent // part) if part else 1 for extent, part in zip(shape, shard, strict=True)]
    if math.prod(tiles) != devices:
        raise invalid(f"{devices} shards of shape {shard} are not an array of shape {shape}")
    return sharding_of_tiles(np.arange(devices).reshape(tiles), len(shape)) if shape else replicated(devices, 0)


def op_sharding(op: Any, rank: int, devices: int) -> Sharding:
    """Ours for XLA's OpSharding over so many devices."""
    if op.HasField("named_sharding"):
        return _named(op.named_sharding, rank, devices)
    dimensions = tuple(op.tile_assignment_dimensions)
    if not dimensions or devices == 1:
        if op.type == op.MAXIMAL and devices > 1:
            raise unimplemented("an array on one device of many")
        return replicated(devices, rank)
    return _of_tiles(
        dimensions,
        tuple(op.tile_assignment_devices),
        tuple(op.iota_reshape_dims),
        tuple(op.iota_transpose_perm),
        rank,
        devices,
    )


def _of_tiles(dimensions: Any, listed: Any, reshape: Any, transpose: Any, rank: int, devices: int) -> Sharding:
    try:
        if math.prod(dimensions) != devices:
            raise ValueError(f"{math.prod(dimensions)} tiles for {devices} devices")
        return sharding_of_tiles(tile_grid(dimensions, listed, reshape, transpose), rank)
    except ValueError as error:
        raise unimplemented(f"an array is split in a way that is not supported: {error}") from None


def _named(named: Any, rank: int, devices: int) -> Sharding:
    """A sharding over a mesh: its axes, or parts of them, are the dimensions of a grid of devices."""
    sizes = [axis.size for axis in named.mesh.axes]
    if math.prod(sizes) != devices:
        if not any(each.axes for each in named.dim_shardings):
            return replicated(devices, rank)
        raise invalid(f"a mesh of {math.prod(sizes)} devices for {devices}")
    wanted = [[_part(axis, sizes) for axis in each.axes] for each in named.dim_shardings]
    cuts: list[set[int]] = [{1, size} for size in sizes]
    for number, before, size in (part for each in wanted for part in each):
        cuts[number] |= {before, before * size}
    parts = [(n, a, b // a) for n, cut in enumerate(cuts) for a, b in zip(sorted(cut), sorted(cut)[1:], strict=False)]
    grid = _mesh_devices(named.mesh, devices).reshape([size for _, _, size in parts])
    order: list[int] = []
    tiles: list[int] = []
    for each in wanted:
        within = [
            position
            for number, before, size in each
            for position, (axis, start, _) in enumerate(parts)
            if axis == number and before <= start < before * size
        ]
        order += within
        tiles.append(math.prod(parts[position][2] for position in within))
    order += [position for position in range(len(parts)) if position not in order]
    tiles += [1] * (rank - len(tiles))
    flat = tuple(grid.transpose(order).reshape(-1).tolist())
    return _of_tiles((*tiles, devices // math.prod(tiles)), flat, (), (), rank, devices)


def _part(axis: Any, sizes: list[int]) -> tuple[int, int, int]:
    """(axis, how many parts of it are before this one, its size)."""
    number = axis.mesh_axis_index
    if axis.HasField("sub_axis_info"):
        return number, axis.sub_axis_info.pre_size, axis.sub_axis_info.size
    return number, 1, sizes[number]


def _mesh_devices(mesh: Any, devices: int) -> np.ndarray[Any, Any]:
    if mesh.device_ids:
        return np.asarray(mesh.device_ids)
    if mesh.HasField("iota_transform"):
        iota = mesh.iota_transform
        return np.arange(devices).reshape(tuple(iota.reshape_dims)).transpose(tuple(iota.transpose_perm)).reshape(-1)
    return np.arange(devices)


# -- host buffers ------------------------------------------------------------------------------------------------------


def host_array(data: Any, dtype: str, shape: tuple[int, ...], strides: Any) -> np.ndarray[Any, Any]:
    """A host buffer as an array; `strides` in bytes, None where it is dense. Raises INVALID_ARGUMENT for a buffer that
    is shorter than that."""
    kind = numpy_dtype(dtype)
    size = len(data)
    if strides is None or not shape:
        needed = math.prod(shape) * kind.itemsize
    else:
        strides = tuple(strides)
        if len(strides) != len(shape):
            raise invalid(f"{len(strides)} strides for {len(shape)} dimensions")
        if any(stride < 0 for stride in strides):
            raise unimplemented("host buffers with negative strides")
        needed = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) + kind.itemsize
        needed = 0 if 0 in shape else needed
    if size < needed:
        raise invalid(f"a host buffer of {size} bytes is too short for {dtype}{list(shape)}, which needs {needed}")
    if strides is None or not shape or 0 in shape:
        return np.frombuffer(data, kind, math.prod(shape)).reshape(shape)
    return np.ndarray(shape, kind, data, strides=strides)


def laid_out(array: np.ndarray[Any, Any], strides: Any) -> np.ndarray[Any, Any]:
    """The array's bytes, in C order or with these strides."""
    if strides is None or not array.shape or array.size == 0 or tuple(strides) == _dense_strides(array):
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    strides = tuple(strides)
    if len(strides) != array.ndim or any(stride < 0 for stride in strides):
        raise invalid(f"strides {strides} for an array of shape {array.shape}")
    nbytes = sum((extent - 1) * stride for extent, stride in zip(array.shape, strides, strict=True)) + array.itemsize
    if nbytes > 2 * array.nbytes + 4096:
        raise invalid(f"strides {strides} spread an array of {array.nbytes} bytes over {nbytes}")
    out = np.zeros(nbytes, np.uint8)
    np.ndarray(array.shape, array.dtype, out.data, strides=strides)[...] = array
    return out


def _dense_strides(array: np.ndarray[Any, Any]) -> tuple[int, ...]:
    strides, step = [], array.itemsize
    for extent in reversed(array.shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


# -- layouts of device memory ------------------------------------------------------------------------------------------

_LAYOUT = re.compile(r"\{([\d,]*)(?::(.*))?\}")


def fill_layout(text: str, layout: Any) -> None:
    """XLA's text of a layout, {1,0:T(8,128)E(4)S(5)}, into a LayoutProto."""
    match = _LAYOUT.fullmatch(text.strip())
    if match is None:
        raise unimplemented(f"a layout that is not understood: {text}")
    layout.minor_to_major.extend(int(number) for number in match[1].split(",") if number)
    for letter, group in re.findall(r"([A-Z]?)\(([^()]*)\)", match[2] or ""):
        if letter in ("T", ""):
            layout.tiles.add().dimensions.extend(
                int(number) for number in group.split(",") if number.lstrip("-").isdigit()
            )
        elif letter == "E":
            layout.element_size_in_bits = int(group)
        elif letter == "S":
            layout.memory_space = int(group)


def default_layout(dtype: str, rank: int) -> str:
    """The text of the layout that arrays have when nobody asks for another."""
    order = ",".join(map(str, reversed(range(rank))))
    bits = SUB_BYTE_BITS.get(dtype)
    return f"{{{order}:E({bits})}}" if bits else f"{{{order}}}"
