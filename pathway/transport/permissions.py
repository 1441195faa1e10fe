"""Who may say what: roles, tokens, and the messages that each kind of peer may send. Pure: no sockets, no clock.

Invariants
  P-1  A session is that of the connection that a message came by; no message is believed about whose it is. Where one
       names a session (bulk, at executors), it must be the one that the link proved.
  P-2  A link proves its session to an executor with a token: a keyed hash of session and public key, with a secret that
       the scheduler gives to executors. So an executor needs no list of sessions, no message is needed per session and
       host, and a token that was stolen is of no use with another key.
  P-3  A peer's role is what its `Hello` claims, and its key must have it. What the role does not send, it may not send.
  P-4  A computation has the key of its content: what one session registers cannot run in another under a key of theirs.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from pathway.content import content_key
from pathway.errors import PermissionDeniedError
from pathway.transport import messages as m
from pathway.transport.keys import Entry, PublicKey, Role

CLIENT, ADMIN, OBSERVER, WORKER, EXECUTOR, PEER = "client", "admin", "observer", "worker", "executor", "peer"
"""What a `Hello` can claim to be. Admins and observers have no session and ask for the status; a peer opens a bulk link
to an executor, and is a client or another executor."""

Check = Callable[[m.Message], None]
"""Raises `PermissionDeniedError` for a message that may not come by the link that it came by."""

Admit = Callable[[m.Hello, PublicKey | None, Entry | None], Check]
"""What a listening socket asks for every connection: its Hello, its key and the key's entry (None: on no list, or,
where the key is None too, a cluster without keys). Raises `PermissionDeniedError`, or says what checks each message."""

_NEEDS_ONE_OF = {
    CLIENT: frozenset({Role.CLIENT, Role.ADMIN}),
    ADMIN: frozenset({Role.ADMIN}),
    OBSERVER: frozenset({Role.CLIENT, Role.ADMIN}),
    WORKER: frozenset({Role.WORKER}),
    EXECUTOR: frozenset({Role.WORKER}),
    PEER: frozenset({Role.CLIENT, Role.ADMIN, Role.WORKER}),
}

_ALWAYS: frozenset[type] = frozenset({m.Ping, m.Pong, m.Goodbye})

MAY_SEND_TO_SCHEDULER: dict[str, frozenset[type]] = {
    CLIENT: _ALWAYS
    | {
        m.RequestSlice,
        m.ReleaseSlice,
        m.RegisterComputation,
        m.RegisterPlan,
        m.RegisterScript,
        m.StartRun,
        m.StartScript,
        m.PutBuffer,
        m.AssembleBuffer,
        m.ReleaseBuffers,
        m.CancelRun,
        m.ReleasePlan,
        m.AskMemory,
        m.StatusRequest,
        m.RelayToHost,
    },
    ADMIN: _ALWAYS | {m.StatusRequest, m.SetWeight, m.DrainIsland, m.KillSession},
    OBSERVER: _ALWAYS | {m.StatusRequest},
    WORKER: _ALWAYS | {m.HostJoined, m.ExecutorExited, m.ExecutorPaused},
    EXECUTOR: _ALWAYS
    | {
        m.ExecutorReady,
        m.PartsFinished,
        m.PartsLate,
        m.PartFailed,
        m.PartRefused,
        m.ExecutorReport,
        m.Decided,
        m.ComputationsCompiled,
        m.Relayed,
    },
}

_BULK = {m.Chunk, m.Taken, m.TransferDropped, m.ShareOffer, m.ShareProof, m.ShareArena, m.Shared}
CLIENT_MAY_SEND_TO_EXECUTOR = _ALWAYS | _BULK | {m.PutShard, m.Fetch, m.TraceRequest, m.AskProgram, m.ProfileHost}
EXECUTOR_MAY_SEND_TO_EXECUTOR = (
    _ALWAYS
    | _BULK
    | {
        m.FollowerHello,
        m.EdgeArrived,
        m.BufferArrived,
        m.PartBound,
        m.GangsDone,
        m.GangFailed,
        m.EdgeShard,
        m.EdgeOffer,
        m.EdgeFailed,
    }
)


def check_role(claimed: str, entry: Entry | None) -> None:
    """Raise unless a key with this entry (None: on no list) may say Hello as `claimed` (P-3)."""
    if entry is None:
        raise PermissionDeniedError("this key is on no allow-list, or was revoked")
    needed = _NEEDS_ONE_OF.get(claimed)
    if needed is None:
        raise PermissionDeniedError(f"there is no role {claimed!r}")
    if not needed & entry.roles:
        raise PermissionDeniedError(
            f"the key {entry.name!r} may connect as {' or '.join(sorted(entry.roles))}, and not as {claimed}"
        )


def admit_to_scheduler(hello: m.Hello, key: PublicKey | None, entry: Entry | None) -> Check:
    """The scheduler's `Admit`."""
    may_send = MAY_SEND_TO_SCHEDULER.get(hello.role)
    if may_send is None:
        raise PermissionDeniedError(f"a {hello.role} has no business at a scheduler")
    if key is not None:
        check_role(hello.role, entry)

    def check(message: m.Message) -> None:
        if type(message) not in may_send:
            raise PermissionDeniedError(f"a {hello.role} may not send {type(message).__name__}")
        if type(message) is m.RegisterComputation and message.key != content_key(message.metadata, message.artifact):
            raise PermissionDeniedError("the key of a computation is not that of its content")  # P-4

    return check


# -- tokens (P-2) -----------------------------------------------------------------------------------------------------

_EXECUTORS = 0  # the session number that stands for the cluster's own executors; no session has it


def new_secret() -> bytes:
    """What a scheduler makes its tokens with."""
    return secrets.token_bytes(32)


def token(secret: bytes, session: int, key: PublicKey | None) -> int:
    """What proves that `session` was given to who holds `key` (None: a cluster without keys). 63 bits, never 0."""
    message = f"{session}:{key or ''}".encode()
    return int.from_bytes(hashlib.blake2b(message, key=secret, digest_size=8).digest(), "big") >> 1 or 1


def executor_token(secret: bytes) -> int:
    """What an executor shows to other executors of its cluster."""
    return token(secret, _EXECUTORS, None)


def check_token(secret: bytes, session: int, key: PublicKey | None, shown: int) -> None:
    """Raise unless `shown` is the token of `session` and `key`. Takes the same time wherever they differ."""
    expected = token(secret, session, key)
    if not 0 < shown < 1 << 63 or not hmac.compare_digest(expected.to_bytes(8, "big"), shown.to_bytes(8, "big")):
        raise PermissionDeniedError("the session does not belong to this connection")


@dataclass(frozen=True, slots=True)
class PeerPermit:
    """What a link to an executor may do: all that `session` may, or, where it is None, what executors do among
    themselves."""

    session: int | None
    admin: bool = False

    def check(self, message: m.Message) -> None:
        """Raise unless a message that came by this link may come by it (P-1, P-3)."""
        kind = type(message)
        if self.session is None:
            if kind not in EXECUTOR_MAY_SEND_TO_EXECUTOR:
                raise PermissionDeniedError(f"an executor may not send {kind.__name__} to another")
            return
        if kind not in CLIENT_MAY_SEND_TO_EXECUTOR:
            raise PermissionDeniedError(f"a client may not send {kind.__name__} to an executor")
        if (kind is m.Fetch or kind is m.PutShard) and message.session != self.session:  # type: ignore[attr-defined]
            raise PermissionDeniedError(f"{kind.__name__} names a session of somebody else")


def admit_to_executor(hello: m.Hello, key: PublicKey | None, entry: Entry | None, secret: bytes) -> PeerPermit:
    """The permit of a link to an executor; its `check` makes this an executor's `Admit`."""
    if hello.role != PEER:
        raise PermissionDeniedError(f"a {hello.role} has no business at an executor")
    if key is not None:
        check_role(hello.role, entry)
    if hello.session == _EXECUTORS:
        if key is not None and (entry is None or Role.WORKER not in entry.roles):
            raise PermissionDeniedError("only a worker's key may connect as an executor")
        check_token(secret, _EXECUTORS, None, hello.token)
        return PeerPermit(None)
    check_token(secret, hello.session, key, hello.token)
    return PeerPermit(hello.session, admin=entry is not None and Role.ADMIN in entry.roles)
