"""What came of an XLA program: reads a compiled executable, for clients of the IFRT proxy. Imports no JAX.

An executable is only asked questions here (`Any`: it is XLA's object); the shapes are those of the module's main
function, since the compiled one has the shapes of shards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pathway.dataflow.layout import Aval, Sharding
from pathway.dataflow.tiles import replicated, sharding_of_tiles, tile_grid
from pathway.dataflow.xla_program import ProgramReport, XlaProgram
from pathway.errors import CompileError, ProtocolError

MEMORY_STATS = (
    "generated_code_size_in_bytes",
    "argument_size_in_bytes",
    "output_size_in_bytes",
    "alias_size_in_bytes",
    "temp_size_in_bytes",
    "peak_memory_in_bytes",
    "host_generated_code_size_in_bytes",
    "host_argument_size_in_bytes",
    "host_output_size_in_bytes",
    "host_alias_size_in_bytes",
    "host_temp_size_in_bytes",
    "total_allocation_bytes",
    "indefinite_allocations",
    "peak_unpadded_heap_bytes",
)

_SIMPLE = {"i1": "bool", "bf16": "bfloat16", "complex<f32>": "complex64", "complex<f64>": "complex128"}
_SMALL_FLOAT = re.compile(r"f(\d+)(E\w+)")
_NUMBER = re.compile(r"(u?)i(\d+)|f(\d+)")


def dtype_of_element(element: str) -> str:
    """numpy's name for MLIR's name of an element type. Raises `CompileError` for one that no array has."""
    if element in _SIMPLE:
        return _SIMPLE[element]
    if small := _SMALL_FLOAT.fullmatch(element):
        return f"float{small[1]}_{small[2].lower()}"
    if (number := _NUMBER.fullmatch(element)) is None:
        raise CompileError(f"UNIMPLEMENTED: the program takes or gives values of type {element}")
    unsigned, bits, float_bits = number.groups()
    return f"float{float_bits}" if float_bits else f"{'uint' if unsigned else 'int'}{bits}"


class Signature:
    """The types of a module's main function. `donated` are the parameters that it may take."""

    def __init__(self, inputs: Sequence[Aval], outputs: Sequence[Aval], donated: Sequence[int]) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.donated = tuple(donated)


def sharding_of(op: Any, aval: Aval, devices: int) -> Sharding:
    """Ours for XLA's OpSharding (None: whole, on each device)."""
    rank = len(aval.shape)
    dimensions = () if op is None else tuple(op.tile_assignment_dimensions)
    if not dimensions or devices == 1:
        return replicated(devices, rank)
    try:
        grid = tile_grid(
            dimensions, tuple(op.tile_assignment_devices), tuple(op.iota_reshape_dims), tuple(op.iota_transpose_perm)
        )
        return sharding_of_tiles(grid, rank)
    except ValueError as error:
        raise CompileError(f"UNIMPLEMENTED: an array of the program is split as {error}") from None


def report(name: str, signature: Signature, program: XlaProgram, executable: Any) -> ProgramReport:
    """All that a proxy must know."""
    devices = program.replicas * program.partitions
    ins = _each(executable.get_parameter_shardings, len(signature.inputs))
    outs = _each(executable.get_output_shardings, len(signature.outputs))
    kinds = executable.get_output_memory_kinds()
    stats = executable.get_compiled_memory_stats()
    return ProgramReport(
        name=name,
        in_avals=signature.inputs,
        out_avals=signature.outputs,
        in_shardings=tuple(sharding_of(op, aval, devices) for op, aval in zip(ins, signature.inputs, strict=True)),
        out_shardings=tuple(sharding_of(op, aval, devices) for op, aval in zip(outs, signature.outputs, strict=True)),
        parameter_shardings=_serialized(ins),
        output_shardings=_serialized(outs),
        parameter_layouts=tuple(map(str, executable.get_parameter_layouts())),
        output_layouts=tuple(map(str, executable.get_output_layouts())),
        output_memory_kinds=tuple(kinds[0]) if kinds else (),
        donated=signature.donated,
        memory={field: int(value) for field in MEMORY_STATS if (value := getattr(stats, field, None)) is not None},
        code_bytes=int(executable.size_of_generated_code_in_bytes()),
        fingerprint=executable.fingerprint or b"",
    )


def _each(get: Callable[[], Sequence[Any] | None], count: int) -> list[Any]:
    found = get()
    return [None] * count if found is None or len(found) != count else list(found)


def _serialized(shardings: list[Any]) -> tuple[bytes, ...]:
    if any(op is None for op in shardings):
        return ()
    return tuple(op.SerializeToString() for op in shardings)


def answer(what: str, made: ProgramReport, executable: Any) -> bytes:
    """The answer to one question about a program that is compiled."""
    match what:
        case "report":
            return msgspec.msgpack.encode(made)
        case "cost":
            costs = executable.cost_analysis()
            return msgspec.msgpack.encode({name: float(value) for name, value in (costs or {}).items()})
        case "text":
            return "\n\n".join(module.to_string() for module in executable.hlo_modules()).encode()
        case _:
            raise ProtocolError(f"nobody knows what {what!r} of a program is")
