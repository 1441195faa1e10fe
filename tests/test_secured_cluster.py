"""A real cluster with keys: members work, strangers and revoked keys do not, and no secret shows anywhere."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from jax.sharding import PartitionSpec as P

import pathway as pw
from pathway.transport import messages as m
from pathway.transport.handshake import refusal_to_exception
from pathway.transport.keys import AllowListFile, KeyPair, Role, generate, load_public_key, write_key_pair
from pathway.transport.permissions import PEER
from pathway.transport.security import KeyPaths
from pathway.transport.sockets import Dealer, Delivery
from pathway.version import PROTOCOL_VERSION, __version__

ISLANDS = {"east": {"devices": 2}, "west": {"hosts": 2, "devices": 1}}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster with keys of one's own for alice and bob."""
    from pathway.embedded import start_local_cluster

    keys = tmp_path_factory.mktemp("secured") / "keys"
    generate(keys)
    for name in ("alice", "bob"):
        made = generate(keys, name, [Role.CLIENT])
        with (keys / "allowed_keys").open("a") as file:
            file.write(made.lines[0] + "\n")
    with start_local_cluster(ISLANDS, keys=str(keys), log_level="info") as cluster:
        yield SimpleNamespace(address=cluster.address, keys=keys, cluster=cluster)


@contextlib.contextmanager
def connected(secured: Any, name: str) -> Iterator[pw.Client]:
    client = pw.Client(secured.address, keys=secured.keys, key=secured.keys / f"{name}.key")
    with client:
        yield client


def secrets_in(keys: Path) -> list[bytes]:
    return [path.read_bytes().strip() for path in keys.glob("*.key_secret")]


def every_key(*directories: Path) -> list[str]:
    """Secret and public."""
    return [path.read_text().strip() for directory in directories for path in directory.glob("*.key*")]


def descendants(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):  # that thread has ended
            for child in (task / "children").read_text().split():
                found += descendants(int(child))
    return found


def run_pathway(*arguments: str, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PATHWAY_")}
    return subprocess.run(
        [sys.executable, "-m", "pathway", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        stdin=subprocess.DEVNULL,
    )


# -- members ----------------------------------------------------------------------------------------------------------


def test_a_program_over_two_islands_runs_with_keys_on_every_link(secured: Any) -> None:
    with connected(secured, "alice") as client:
        front = client.slice(2, island="east")
        back = client.slice(2, island="west")  # of two hosts: leader, follower, and edges between executors

        @pw.jit(front, in_specs=(P("data"),), out_specs=P("data"))
        def double(x):
            return x * 2

        @pw.jit(back, in_specs=(P("data"),), out_specs=P("data"))
        def add(x):
            return x + 1

        @pw.program
        def both(x):
            return add(double(x))

        value = np.arange(1 << 20, dtype=np.float32)  # 4 MiB: in chunks, straight to and from the executors
        there = client.put(value, front, P("data"))
        np.testing.assert_array_equal(np.asarray(both(there)), value * 2 + 1)


def test_the_status_is_for_members(secured: Any) -> None:
    for name in ("admin", "client"):
        shown = run_pathway(
            *("status", "--json", "--address", secured.address),
            *("--keys", str(secured.keys), "--key", f"{secured.keys}/{name}.key"),
        )
        assert shown.returncode == 0, shown.stderr
        assert '"east"' in shown.stdout
        assert not [key for key in AllowListFile(secured.keys / "allowed_keys").current.entries if key in shown.stdout]


# -- strangers and impostors ------------------------------------------------------------------------------------------


def test_strangers_are_refused_at_once(secured: Any, tmp_path: Path) -> None:
    write_key_pair(tmp_path, "mallory", KeyPair.random())
    for options, complaint in (
        ({}, "it wants a key, and none is set here"),
        ({"key": tmp_path / "mallory.key", "scheduler_key": secured.keys / "scheduler.key"}, "it refused our key"),
        ({"key": secured.keys / "alice.key", "scheduler_key": tmp_path / "mallory.key"}, "its key is another"),
    ):
        with pytest.raises(pw.ConnectError, match=complaint) as caught:
            pw.Client(secured.address, **options)  # type: ignore[arg-type]
        assert not [key for key in every_key(secured.keys, tmp_path) if key in repr(caught.getrepr(showlocals=True))]
    with pytest.raises(pw.errors.ConfigError, match="scheduler's public key"):
        pw.Client(secured.address, key=secured.keys / "alice.key")


def test_a_clients_key_cannot_bring_a_host(secured: Any) -> None:
    ended = run_pathway(
        *("worker", "--scheduler", secured.address, "--island", "north", "--devices", "1"),
        *("--keys", str(secured.keys), "--key", f"{secured.keys}/alice.key"),
    )
    assert ended.returncode == 2
    assert "the key 'alice' may connect as client, and not as worker" in ended.stderr
    with connected(secured, "bob") as client:
        assert {island.name for island in client.islands()} == {"east", "west"}


def test_guessing_somebody_elses_session_is_refused_by_executors(secured: Any) -> None:
    """bob knows alice's session, buffers, and even her token: not her key."""
    with connected(secured, "alice") as alice, connected(secured, "bob") as bob:
        held = alice.slice(1, island="east")
        secret = alice.put(np.arange(4.0, dtype=np.float32), held)
        np.testing.assert_array_equal(np.asarray(secret), np.arange(4.0))
        [host] = bob.core.islands["east"].hosts
        identity = KeyPaths(secured.keys / "bob.key", secured.keys / "scheduler.key").identity()

        async def answer(session: int, token: int, named: int) -> Exception:
            hello = m.Hello(PROTOCOL_VERSION, __version__, PEER, "bob", token=token, session=session)
            dealer = await Dealer.connect(host, hello, identity=identity)
            try:
                dealer.post(m.Fetch(1, named, 1, (0,)))
                dealer.flush()
                with trio.fail_after(10):
                    while True:
                        for item in await dealer.receive_batch():
                            match item:
                                case Delivery(_, [m.Refused() as refused, *_], _):
                                    return refusal_to_exception(refused)
                                case _:
                                    raise AssertionError(item)
            finally:
                dealer.close()

        for session, token, named in (
            (alice.core.session, alice.core.token, alice.core.session),  # her token, with his key
            (alice.core.session, bob.core.token, alice.core.session),
            (bob.core.session, bob.core.token, alice.core.session),  # his link, her buffer
        ):
            error = trio.run(answer, session, token, named)
            assert isinstance(error, pw.errors.PermissionDeniedError), error
            assert not [key for key in every_key(secured.keys) if key in repr(error)]
        np.testing.assert_array_equal(np.asarray(secret), np.arange(4.0))


def test_resuming_somebody_elses_session_is_refused(secured: Any) -> None:
    with connected(secured, "alice") as alice:
        identity = KeyPaths(secured.keys / "bob.key", secured.keys / "scheduler.key").identity()
        hello = m.Hello(
            PROTOCOL_VERSION, __version__, "client", "bob", resume=alice.core.session, token=alice.core.token
        )
        with pytest.raises(pw.errors.PermissionDeniedError, match="does not belong to this connection"):
            trio.run(partial(Dealer.open, secured.address, hello, identity=identity))
        assert alice.islands()


# -- revoking ---------------------------------------------------------------------------------------------------------


def test_a_revoked_key_is_out_within_a_second_and_nobody_else_is(secured: Any) -> None:
    listed = secured.keys / "allowed_keys"
    before = listed.read_text()
    with connected(secured, "bob") as bob, connected(secured, "alice") as alice:
        held = {client: client.slice(1, island="east") for client in (alice, bob)}
        arrays = {client: client.put(np.ones(1 << 17, np.float32), held[client]) for client in held}
        for array in arrays.values():
            assert np.asarray(array).sum() == 1 << 17  # their links to the executor are open
        key = load_public_key(secured.keys / "alice.key")
        try:
            listed.write_text("".join(line for line in before.splitlines(True) if not line.startswith(key)))
            started = time.monotonic()
            with pytest.raises(pw.errors.PermissionDeniedError, match="the key 'alice' was revoked"):
                alice.slice(2, island="east", timeout_s=10)  # would wait for bob's
            assert time.monotonic() - started < 1.0
            with pytest.raises(pw.errors.PermissionDeniedError, match="the key 'alice' was revoked"):
                alice.islands()
            with pytest.raises(pw.ConnectError, match="it refused our key"):
                connected(secured, "alice").__enter__()
            assert np.asarray(bob.put(np.ones(1 << 17, np.float32), held[bob])).sum() == 1 << 17
        finally:
            listed.write_text(before)
    with connected(secured, "alice") as alice:
        assert alice.islands()


# -- secrets stay secret ----------------------------------------------------------------------------------------------


def test_no_secret_in_an_argument_an_environment_or_a_status(secured: Any) -> None:
    secrets = secrets_in(secured.keys)
    assert len(secrets) == 6
    processes = descendants(os.getpid())
    shown = b""
    for pid in processes:
        shown += Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
    assert b"pathway.executor.main" in shown
    assert not [secret for secret in secrets if secret in shown]
    with connected(secured, "alice") as client:
        assert not [secret for secret in secrets if secret.decode() in str(client.status())]


def test_logs_name_keys_by_name_and_never_show_one(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert run_pathway("keygen", str(keys)).returncode == 0
    reading, writing = os.pipe()
    scheduler = subprocess.Popen(
        [
            *(sys.executable, "-m", "pathway", "scheduler", "--bind", "tcp://127.0.0.1:0", "--keys", str(keys)),
            *("--report-fd", str(writing), "--log-level", "debug"),
        ],
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[writing],
    )
    os.close(writing)
    assert scheduler.stdout is not None
    try:
        with os.fdopen(reading) as report:
            address = report.readline().strip()
        assert address, scheduler.stdout.read()
        worker = run_pathway(
            *("worker", "--scheduler", address, "--island", "north", "--keys", str(keys)),
            *("--key", str(keys / "client.key"), "--log-level", "debug"),
        )
        write_key_pair(tmp_path, "mallory", KeyPair.random())
        with pytest.raises(pw.ConnectError):
            pw.Client(address, key=tmp_path / "mallory.key", scheduler_key=keys / "scheduler.key")
        (keys / "allowed_keys").write_text("")
        text = worker.stdout + worker.stderr
        for line in scheduler.stdout:
            text += line
            if "'admin'" in line and "was revoked" in line:
                scheduler.terminate()
        assert scheduler.wait(10) == 0
    finally:
        scheduler.kill()
        scheduler.wait()
        scheduler.stdout.close()
    assert "the key 'client' may connect as client, and not as worker" in text
    assert re.search(
        r"refused a connection from 127\.0\.0\.1 \(key [0-9a-f]{12}\): the key is not on the allow-list", text
    )
    known = every_key(keys, tmp_path)
    assert len(known) == 10
    assert not [key for key in known if key in text]


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["scheduler", "--bind", "tcp://0.0.0.0:0"],
        ["up", "--bind", "tcp://0.0.0.0:0"],
        ["worker", "--scheduler", "tcp://127.0.0.1:1", "--island", "east", "--host-address", "192.0.2.1"],
    ],
    ids=["scheduler", "up", "worker"],
)
def test_nothing_listens_to_other_machines_without_keys(arguments: list[str]) -> None:
    ended = run_pathway(*arguments)
    assert ended.returncode == 2
    assert "can be reached from other machines, and no keys are set" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_keygen_and_up_work_out_of_the_box(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    made = run_pathway("keygen", str(keys))
    assert made.returncode == 0, made.stderr
    assert not [secret for secret in secrets_in(keys) if secret.decode() in made.stdout]
    again = run_pathway("keygen", str(keys))
    assert again.returncode == 2
    assert "has its keys already" in again.stderr
    up = subprocess.Popen(
        [
            *(sys.executable, "-m", "pathway", "up", "--islands", "1", "--devices", "1"),
            *("--bind", "tcp://127.0.0.1:0", "--keys", str(keys)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert up.stdout is not None
        lines = iter(up.stdout.readline, "")
        line = next(line for line in lines if "pathway.connect(" in line)
        found = re.search(r"pathway\.connect\('(.+?)', keys='(.+?)'\)", line)
        assert found is not None, line
        with pw.Client(found[1], keys=found[2]) as client:
            assert [island.name for island in client.islands()] == ["island0"]
        with pytest.raises(pw.ConnectError, match="it wants a key"):
            pw.Client(found[1])
    finally:
        up.terminate()
        assert up.wait(10) == 0
        up.stdout.close()
