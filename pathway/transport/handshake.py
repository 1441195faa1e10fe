"""Who may speak: the first message of every peer, its version, and the refusal.

A peer of another protocol version may not even decode as one of our messages, so its Hello is looked at by hand: the
first three fields of `Hello` (tag, protocol, version) and all of `Refused` are the part of the protocol that never
changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pathway.errors import ErrorInfo, PathwayError, ProtocolError, to_exception
from pathway.transport.messages import Hello, Refused
from pathway.version import PROTOCOL_VERSION, __version__

HELLO_TAG = 1


def hello(role: str, name: str = "", resume: int = 0, token: int = 0, weight: float = 0.0, priority: int = 0) -> Hello:
    """A `Hello` of this version. `role` is client, worker, executor, peer, admin or observer."""
    return Hello(PROTOCOL_VERSION, __version__, role, name, resume, token, weight=weight, priority=priority)


def reason_to_refuse(messages: Sequence[Any]) -> Refused | None:
    """Why a peer that begins with `messages` may not go on; None if it may."""
    if not messages or not isinstance(messages[0], Hello):
        return Refused(ProtocolError.__name__, "the first message of a connection must be Hello")
    return _version_mismatch(messages[0].protocol, messages[0].version)


def refusal_of_undecodable(frame: bytes | memoryview, error: ProtocolError) -> Refused:
    """The refusal of a peer whose first frame is none of ours: perhaps it is the Hello of another version."""
    try:
        match msgspec.msgpack.decode(frame):
            case [[int(tag), int(protocol), str(version), *_], *_] if tag == HELLO_TAG:
                mismatch = _version_mismatch(protocol, version)
                if mismatch is not None:
                    return mismatch
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        pass
    return Refused(ProtocolError.__name__, str(error))


def refusal_to_exception(refused: Refused) -> PathwayError:
    """What the refused peer raises."""
    return to_exception(ErrorInfo(kind=refused.kind, message=refused.reason))


def _version_mismatch(protocol: int, version: str) -> Refused | None:
    if protocol == PROTOCOL_VERSION:
        return None
    return Refused(
        "ConnectError",
        f"versions do not match: this side is Pathway {__version__} (protocol {PROTOCOL_VERSION}), "
        f"the peer is Pathway {version} (protocol {protocol})",
    )
