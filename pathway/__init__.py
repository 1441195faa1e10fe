"""Pathway: one Python process drives every accelerator of a cluster with plain JAX.

The public names, and nothing else. They are loaded when first used: the scheduler and the workers' supervisors are
parts of this package too, and never import JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pathway.errors import (
    Cancelled,
    CompileError,
    ConfigError,
    ConnectError,
    DeletedError,
    DeviceMemoryError,
    DisconnectedError,
    ErrorInfo,
    ExecutionError,
    IslandLostError,
    LimitError,
    PathwayError,
    PermissionDeniedError,
    ProgramError,
    ProtocolError,
    SchedulerLostError,
    SessionLostError,
    SliceError,
    TransferError,
)
from pathway.version import __version__

if TYPE_CHECKING:
    from pathway.array import Array
    from pathway.client.client import Client, get
    from pathway.client.control import cond, switch, while_loop
    from pathway.client.default import connect, devices, disconnect, islands, put, record_steps, slice
    from pathway.client.program import Program, Stage, jit, program
    from pathway.client.recording import RecordedStep, Recording
    from pathway.client.route import route
    from pathway.client.slices import Device, Island, Slice
    from pathway.client.stages import Compiled, Lowered, LoweredControl, Traced

__all__ = [
    "Array",
    "Cancelled",
    "Client",
    "CompileError",
    "Compiled",
    "ConfigError",
    "ConnectError",
    "DeletedError",
    "Device",
    "DeviceMemoryError",
    "DisconnectedError",
    "ErrorInfo",
    "ExecutionError",
    "Island",
    "IslandLostError",
    "LimitError",
    "Lowered",
    "LoweredControl",
    "PathwayError",
    "PermissionDeniedError",
    "Program",
    "ProgramError",
    "ProtocolError",
    "RecordedStep",
    "Recording",
    "SchedulerLostError",
    "SessionLostError",
    "Slice",
    "SliceError",
    "Stage",
    "Traced",
    "TransferError",
    "__version__",
    "cond",
    "connect",
    "devices",
    "disconnect",
    "get",
    "islands",
    "jit",
    "program",
    "put",
    "record_steps",
    "route",
    "slice",
    "switch",
    "while_loop",
]

_HOME = {
    "Array": "array",
    "Client": "client.client",
    "Compiled": "client.stages",
    "Device": "client.slices",
    "Island": "client.slices",
    "Lowered": "client.stages",
    "LoweredControl": "client.stages",
    "Program": "client.program",
    "RecordedStep": "client.recording",
    "Recording": "client.recording",
    "Slice": "client.slices",
    "Stage": "client.program",
    "Traced": "client.stages",
    "cond": "client.control",
    "connect": "client.default",
    "devices": "client.default",
    "disconnect": "client.default",
    "get": "client.client",
    "islands": "client.default",
    "jit": "client.program",
    "program": "client.program",
    "put": "client.default",
    "record_steps": "client.default",
    "route": "client.route",
    "slice": "client.default",
    "switch": "client.control",
    "while_loop": "client.control",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'pathway' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"pathway.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
