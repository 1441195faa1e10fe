"""Roles, tokens and permits, by themselves (P-1 to P-3)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pathway.content import content_key
from pathway.errors import ErrorInfo, PermissionDeniedError
from pathway.transport import messages as m
from pathway.transport.keys import Entry, KeyPair, Role
from pathway.transport.permissions import (
    CLIENT_MAY_SEND_TO_EXECUTOR,
    MAY_SEND_TO_SCHEDULER,
    PeerPermit,
    admit_to_executor,
    admit_to_scheduler,
    check_role,
    check_token,
    executor_token,
    new_secret,
    token,
)
from tests.hostile import Hostile

ALICE, BOB = KeyPair.random().public, KeyPair.random().public
SECRET = new_secret()


def entry(*roles: Role) -> Entry:
    return Entry(ALICE, frozenset(roles), "alice")


def peer(session: int, shown: int, role: str = "peer") -> m.Hello:
    return m.Hello(1, "0", role, token=shown, session=session)


@pytest.mark.parametrize(
    ("role", "may", "may_not"),
    [
        (Role.CLIENT, ["client", "observer", "peer"], ["worker", "executor", "", "admin", "scheduler"]),
        (Role.WORKER, ["worker", "executor", "peer"], ["client"]),
        (Role.ADMIN, ["client", "admin", "observer", "peer"], ["worker", "executor"]),
    ],
)
def test_a_key_speaks_only_in_its_roles(role: Role, may: list[str], may_not: list[str]) -> None:
    for claimed in may:
        check_role(claimed, entry(role))
    for claimed in may_not:
        with pytest.raises(PermissionDeniedError):
            check_role(claimed, entry(role))
    with pytest.raises(PermissionDeniedError, match="on no allow-list"):
        check_role(may[0], None)


def test_a_refusal_names_the_key_by_its_name() -> None:
    with pytest.raises(PermissionDeniedError, match="'alice' may connect as client, and not as worker") as caught:
        check_role("worker", entry(Role.CLIENT))
    assert ALICE not in str(caught.value)


def test_no_two_roles_share_a_message_but_the_heartbeat() -> None:
    client, worker, executor = (MAY_SEND_TO_SCHEDULER[role] for role in ("client", "worker", "executor"))
    always = {m.Ping, m.Pong, m.Goodbye}
    assert client & worker == client & executor == worker & executor == always
    for role, message in (("client", m.ReleaseSlice(1)), ("worker", m.ExecutorExited("east", 1, 0, "exit code 1"))):
        admit_to_scheduler(peer(0, 0, role), None, None)(message)
    for role, message in (
        ("client", m.ExecutorExited("east", 1, 0, "exit code 1")),
        ("client", m.PartsFinished(((1, 1),))),
        ("client", m.AccessList(b"")),
        ("worker", m.ReleaseSlice(1)),
        ("executor", m.CloseSession(1)),
        ("observer", m.ReleaseSlice(1)),
    ):
        with pytest.raises(PermissionDeniedError, match=type(message).__name__):
            admit_to_scheduler(peer(0, 0, role), None, None)(message)


def test_a_computation_has_the_key_of_its_content() -> None:
    check = admit_to_scheduler(peer(0, 0, "client"), None, None)
    key = content_key(b"metadata", b"artifact")
    check(m.RegisterComputation(key, b"metadata", b"artifact"))
    for forged in (
        m.RegisterComputation(key, b"metadata", b"another artifact"),
        m.RegisterComputation(key, b"other metadata", b"artifact"),
        m.RegisterComputation(key, b"metadataa", b"rtifact"),
    ):
        with pytest.raises(PermissionDeniedError, match="not that of its content"):
            check(forged)


def test_a_scheduler_admits_by_role_and_key() -> None:
    admit_to_scheduler(peer(0, 0, "client"), ALICE, entry(Role.CLIENT))
    with pytest.raises(PermissionDeniedError, match="not as worker"):
        admit_to_scheduler(peer(0, 0, "worker"), ALICE, entry(Role.CLIENT))
    with pytest.raises(PermissionDeniedError, match="on no allow-list"):
        admit_to_scheduler(peer(0, 0, "client"), ALICE, None)
    for nobody in ("peer", "king"):
        with pytest.raises(PermissionDeniedError, match="no business"):
            admit_to_scheduler(peer(0, 0, nobody), None, None)


def test_a_token_is_good_for_one_session_one_key_and_one_secret() -> None:
    shown = token(SECRET, 7, ALICE)
    assert 0 < shown < 1 << 63
    check_token(SECRET, 7, ALICE, shown)
    for secret, session, key, number in (
        (SECRET, 8, ALICE, shown),
        (SECRET, 7, BOB, shown),
        (SECRET, 7, None, shown),
        (new_secret(), 7, ALICE, shown),
        (SECRET, 7, ALICE, shown + 1),
        (SECRET, 7, ALICE, 0),
        (SECRET, 7, ALICE, -shown),
        (SECRET, 7, ALICE, shown + (1 << 64)),
    ):
        with pytest.raises(PermissionDeniedError, match="does not belong"):
            check_token(secret, session, key, number)


@pytest.mark.parametrize("key", [ALICE, None], ids=["key", "no key"])
def test_links_to_executors_prove_their_session(key: str | None) -> None:
    listed = entry(Role.CLIENT) if key else None
    assert admit_to_executor(peer(7, token(SECRET, 7, key)), key, listed, SECRET) == PeerPermit(7)  # type: ignore[arg-type]
    for hello in (
        peer(8, token(SECRET, 7, key)),  # type: ignore[arg-type]
        peer(7, 0),
        peer(0, 0),
        peer(0, token(SECRET, 7, key)),  # type: ignore[arg-type]
        peer(7, token(SECRET, 7, key), "client"),  # type: ignore[arg-type]
    ):
        with pytest.raises(PermissionDeniedError):
            admit_to_executor(hello, key, listed, SECRET)  # type: ignore[arg-type]


def test_executors_know_each_other_by_token_and_key() -> None:
    hello = peer(0, executor_token(SECRET))
    assert admit_to_executor(hello, None, None, SECRET) == PeerPermit(None)
    assert admit_to_executor(hello, ALICE, entry(Role.WORKER), SECRET) == PeerPermit(None)
    with pytest.raises(PermissionDeniedError, match="only a worker's key"):
        admit_to_executor(hello, ALICE, entry(Role.CLIENT, Role.ADMIN), SECRET)
    with pytest.raises(PermissionDeniedError, match="on no allow-list"):
        admit_to_executor(hello, ALICE, None, SECRET)


def test_a_link_reaches_its_own_session_only() -> None:
    permit, inside = PeerPermit(7), PeerPermit(None)
    permit.check(m.Fetch(1, 7, 1, (0,)))
    permit.check(m.PutShard(1, 7, 1, (), 4))
    permit.check(m.Chunk(1, 0))
    for guess in (m.Fetch(1, 8, 1, (0,)), m.PutShard(1, 8, 1, (), 4)):
        with pytest.raises(PermissionDeniedError, match="somebody else"):
            permit.check(guess)
    error = ErrorInfo("ExecutionError", "x")
    between_executors: list[m.Message] = [
        m.EdgeShard(1, 7, 1, 1, 0, (), 4),
        m.EdgeFailed(7, 1, 1, error),
        m.FollowerHello(1, 1),
        m.GangsDone(((7, 1, 0),)),
    ]
    for message in between_executors:
        inside.check(message)
        with pytest.raises(PermissionDeniedError, match="a client may not send"):
            permit.check(message)
    with pytest.raises(PermissionDeniedError, match="an executor may not send"):
        inside.check(m.Fetch(1, 7, 1, (0,)))


def test_every_message_that_names_a_session_is_checked_against_its_link() -> None:
    """All other ids (slices, buffers, plans, runs) are numbered within the session of the connection, so that what
    others have has no name there. A new message that names a session would be found by this test."""
    for kind in MAY_SEND_TO_SCHEDULER["client"]:
        assert "session" not in kind.__struct_fields__, f"{kind.__name__} is believed about whose it is"
    hostile, permit = Hostile(3), PeerPermit(7)
    for kind in sorted(CLIENT_MAY_SEND_TO_EXECUTOR, key=str):
        message = hostile.message(kind)
        if "session" not in kind.__struct_fields__:
            permit.check(message)
            continue
        permit.check(replace(message, session=7))
        for guess in (0, 6, 8, 1 << 62, -7):
            with pytest.raises(PermissionDeniedError, match="somebody else"):
                permit.check(replace(message, session=guess))


def test_the_access_list_hides_its_secret() -> None:
    assert repr(SECRET) not in repr(m.AccessList(SECRET, "text"))
