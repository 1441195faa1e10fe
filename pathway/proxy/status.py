"""Errors as the protocol has them: a code of gRPC, and a message. Which of ours is which of theirs.

A user's error is never INTERNAL: elastic training takes INTERNAL, as it takes DATA_LOSS, for the loss of an island.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Any

from pathway.errors import ErrorInfo, PathwayError, describe


class Code(IntEnum):
    """The codes of gRPC."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


_OF_KIND = {
    "IslandLostError": Code.DATA_LOSS,
    "TransferError": Code.DATA_LOSS,
    "DeletedError": Code.INVALID_ARGUMENT,
    "ProgramError": Code.INVALID_ARGUMENT,
    "ProtocolError": Code.INVALID_ARGUMENT,
    "SliceError": Code.FAILED_PRECONDITION,
    "DeviceMemoryError": Code.RESOURCE_EXHAUSTED,
    "LimitError": Code.RESOURCE_EXHAUSTED,
    "PermissionDeniedError": Code.PERMISSION_DENIED,
    "Cancelled": Code.CANCELLED,
    "ConnectError": Code.UNAVAILABLE,
    "DisconnectedError": Code.UNAVAILABLE,
    "SchedulerLostError": Code.UNAVAILABLE,
    "SessionLostError": Code.UNAVAILABLE,
    "CompileError": Code.INVALID_ARGUMENT,
    "ExecutionError": Code.INVALID_ARGUMENT,
}

_SAID_BY_XLA = re.compile(rf"\b({'|'.join(code.name for code in Code if code not in (Code.OK, Code.INTERNAL))}): ")


class StatusError(Exception):
    """What a request ends with, and what its results then are."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def fill(self, status: Any) -> None:
        """Write it into a StatusProto."""
        status.code = int(self.code)
        status.message = self.message


def of_info(info: ErrorInfo) -> StatusError:
    """A story of ours as a status. Where XLA has said what it is, its word counts."""
    if info.kind in Code.__members__:  # as `info_of` has it
        return StatusError(Code[info.kind], info.message)
    root = info
    while root.cause is not None:
        root = root.cause
    code = _OF_KIND.get(root.kind, Code.UNKNOWN)
    if root.kind in ("CompileError", "ExecutionError") and (said := _SAID_BY_XLA.search(root.message)):
        code = Code[said[1]]
    return StatusError(code, info.story())


def info_of(error: StatusError) -> ErrorInfo:
    """A status as a story of ours, for what waits; `of_info` finds it again."""
    return ErrorInfo(error.code.name, error.message)


def of_exception(error: BaseException) -> StatusError:
    """Whatever was raised, as a status. What nobody expected is INTERNAL: it is ours."""
    if isinstance(error, StatusError):
        return error
    if isinstance(error, PathwayError):
        return of_info(describe(error))
    return StatusError(Code.INTERNAL, f"the proxy failed: {type(error).__name__}: {error}")


def invalid(message: str) -> StatusError:
    """The client's own mistake."""
    return StatusError(Code.INVALID_ARGUMENT, message)


def unimplemented(message: str) -> StatusError:
    """What this server does not do."""
    return StatusError(Code.UNIMPLEMENTED, message)
