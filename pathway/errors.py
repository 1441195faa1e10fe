"""Every exception that a user of Pathway can catch, and how one travels between processes.

An error tells the story: what failed, at which node, slice, island and host, at which line of the user's program, with
the remote traceback and the root cause first. `ErrorInfo` is that story as data; `to_exception` makes it raisable, with
the original exception's type where this process has it.
"""

from __future__ import annotations

import builtins
import functools
import traceback as traceback_module

from msgspec import Struct


class PathwayError(Exception):
    """The base of all errors of Pathway. `info` is the full story where it came from another process."""

    info: ErrorInfo | None = None


class ConnectError(PathwayError):
    """No scheduler could be reached, or it refused the connection (another version, a bad key)."""


class DisconnectedError(PathwayError):
    """The connection that this object belongs to is closed or lost."""


class SchedulerLostError(DisconnectedError):
    """The scheduler has gone while its answer was needed."""


class SessionLostError(DisconnectedError):
    """The scheduler no longer knows this session: its lease ran out, or it was ended by an operator."""


class SliceError(PathwayError, ValueError):
    """A slice that cannot be had or used: more devices than any island has, a mesh of another size, released."""


class IslandLostError(PathwayError):
    """The island that held the data, or should have computed it, was lost. Names the island and the cause."""


class DeletedError(PathwayError, RuntimeError):
    """The array was deleted or donated, or its slice released."""


class ProgramError(PathwayError, TypeError):
    """The program cannot be traced or placed: shapes, specs, side effects, code that is not JAX."""


class CompileError(PathwayError):
    """XLA refused the computation."""


class ExecutionError(PathwayError):
    """A computation failed while it ran."""


class DeviceMemoryError(ExecutionError, MemoryError):
    """The devices' memory does not suffice."""


class TransferError(PathwayError):
    """Data was damaged or lost on its way."""


class PermissionDeniedError(PathwayError, PermissionError):
    """The session, key or role may not do that."""


class LimitError(PathwayError):
    """A limit that the cluster's operator has set is reached. The message names the setting."""


class Cancelled(PathwayError):
    """The run was cancelled before its result was there."""


class ProtocolError(PathwayError):
    """A peer sent something that is no valid message."""


class ConfigError(PathwayError, ValueError):
    """A setting that makes no sense."""


class ErrorInfo(Struct, frozen=True, array_like=True):
    """An error as it travels. `kind` is a class name of this module; `original` the qualified name of the exception
    that was raised, for example `builtins.ValueError`. Empty fields are unknown."""

    kind: str
    message: str
    original: str = ""
    traceback: str = ""
    program: str = ""
    node: str = ""
    slice: int = -1
    island: str = ""
    host: str = ""
    incarnation: int = -1
    source: str = ""  # the user's line: "train.py:12 in step"
    cause: ErrorInfo | None = None

    def story(self) -> str:
        """The error for people, root cause first, then where, then the remote traceback."""
        root = self
        while root.cause is not None:
            root = root.cause
        lines = [root.message]
        if root is not self:
            lines.append(f"  so: {self.message}")
        where = [
            f"{label} {value}"
            for label, value in (
                ("program", self.program),
                ("node", self.node),
                ("slice", self.slice if self.slice >= 0 else ""),
                ("island", self.island),
                ("incarnation", self.incarnation if self.incarnation >= 0 else ""),
                ("host", self.host),
            )
            if value != ""
        ]
        if where:
            lines.append("  in " + ", ".join(where))
        if self.source:
            lines.append(f"  at {self.source}")
        if root.traceback:
            lines += ["  remote traceback:", *("    " + line for line in root.traceback.rstrip().splitlines())]
        return "\n".join(lines)


def describe(error: BaseException, kind: type[PathwayError] = ExecutionError, **where: object) -> ErrorInfo:
    """`error` as data, to be sent to whoever needs the result. A `PathwayError` keeps its own kind."""
    if isinstance(error, PathwayError):
        if error.info is not None:
            return error.info
        kind = type(error)
    original = type(error)
    return ErrorInfo(
        kind=kind.__name__,
        message=str(error) or original.__name__,
        original=f"{original.__module__}.{original.__qualname__}",
        traceback="".join(traceback_module.format_exception(error)),
        **where,  # type: ignore[arg-type]
    )


def to_exception(info: ErrorInfo) -> PathwayError:
    """The exception that `info` describes: of its own Pathway type and, where it was raised as one of Python's built-in
    exceptions, of that type too, so that `except ValueError` works across processes."""
    kind = globals().get(info.kind)
    if not (isinstance(kind, type) and issubclass(kind, PathwayError)):
        kind = PathwayError
    error: PathwayError = raisable(kind, info.original)(info.story())
    error.info = info
    if info.cause is not None:
        error.__cause__ = to_exception(info.cause)
    return error


@functools.cache
def raisable(kind: type[PathwayError], original: str) -> type[PathwayError]:
    """`kind`, which is also a built-in exception if `original` names one, for example "builtins.ValueError"."""
    module, _, name = original.rpartition(".")
    base = getattr(builtins, name, None) if module == "builtins" else None
    if not (isinstance(base, type) and issubclass(base, Exception)) or issubclass(kind, base):
        return kind
    try:
        return type(kind.__name__, (kind, base), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    except TypeError:  # bases whose memory layouts do not combine (OSError's and ImportError's, for example)
        return kind
