"""A computation that comes as an XLA program with compile options, as the IFRT proxy's clients send it. Pure data.

What `computation.ComputationMetadata` says of our own computations (avals, shardings, donation) nobody knows of these
before an executor has compiled them: it answers with a `ProgramReport`.
"""

from __future__ import annotations

from msgspec import Struct

from pathway.dataflow.layout import Aval, Sharding


class XlaProgram(Struct, frozen=True, array_like=True, tag="xla"):
    """The metadata of such a computation. The artifact is a StableHLO portable artifact; `options` is XLA's
    CompileOptionsProto, in which the devices are left out: they are the step's."""

    platform: str
    options: bytes
    replicas: int = 1
    partitions: int = 1


class ProgramReport(Struct, frozen=True, array_like=True):
    """What a compiled program takes and gives. `parameter_shardings` and `output_shardings` are XLA's OpSharding (empty
    where XLA names none: a program of one device), `in_shardings` and `out_shardings` the same as ours. Layouts are
    XLA's text, `{1,0}`. `memory` has the fields of CompiledMemoryStatsProto."""

    name: str
    in_avals: tuple[Aval, ...]
    out_avals: tuple[Aval, ...]
    in_shardings: tuple[Sharding, ...]
    out_shardings: tuple[Sharding, ...]
    parameter_shardings: tuple[bytes, ...]
    output_shardings: tuple[bytes, ...]
    parameter_layouts: tuple[str, ...]
    output_layouts: tuple[str, ...]
    output_memory_kinds: tuple[str, ...]
    donated: tuple[int, ...]
    memory: dict[str, int]
    code_bytes: int
    fingerprint: bytes
