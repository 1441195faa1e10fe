"""Runs that cannot be what their clients asked for: found by the leader, before anything is kept for them. Pure.

The scheduler passes a run's arguments on unseen, so a client can write anything there, and number its results as it
likes. Such a run is not dropped, for others may wait for its edges: all its gangs are poisoned, in their places (L-5).
"""

from __future__ import annotations

from collections.abc import Container

import msgspec
from msgspec import Raw

from pathway.errors import ErrorInfo
from pathway.executor.gangs import PartInfo, PartSubmitted

NOWHERE = -(1 << 62)
"""Below this are numbers of results that nobody can name: those of runs which named what exists already."""


def why_refused(event: PartSubmitted, info: PartInfo, buffers: Container[int]) -> ErrorInfo | None:
    """What makes the run impossible as its client asked for it: its numbers of arguments and of results (L-5)."""
    message = event.message
    first = message.first_result
    if info.arguments is not None and len(event.arguments) != info.arguments:
        reason = f"it brings {len(event.arguments)} arguments, and takes {info.arguments}"
    elif not 0 <= first < 1 << 62:
        reason = f"its results cannot be numbered from {first}"
    elif (taken := next((first + number for number in info.results if first + number in buffers), None)) is not None:
        reason = f"buffer {taken}, which it names as a result, exists already"
    else:
        return None
    return ErrorInfo("ProtocolError", f"run {message.run} of {info.name!r}: {reason}")


def without_inputs(event: PartSubmitted, info: PartInfo, seq: int) -> PartSubmitted:
    """The same run with arguments that hosts find to be errors, and with results that are nobody's."""
    arguments = (b"",) * (info.arguments or 0)
    message = msgspec.structs.replace(
        event.message,
        arguments=Raw(msgspec.msgpack.encode(arguments)),
        first_result=NOWHERE - (seq % (1 << 29) << 32),
    )
    return PartSubmitted(message, arguments)
