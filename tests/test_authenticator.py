"""Who gets in through a secured socket: the decision by itself, then with real sockets, and how one connection ends."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
import zmq
from zmq.utils import z85

from pathway.errors import ConfigError
from pathway.transport.authenticator import Access, Authenticator, Request, decide, reload, watch
from pathway.transport.endpoints import address_of, endpoint
from pathway.transport.keys import AllowList, AllowListFile, Change, Entry, KeyPair, Role
from pathway.transport.readiness import Readiness
from pathway.transport.security import (
    Connection,
    Identity,
    handshake_failure,
    refuse_open_bind,
    secure_client,
    secure_server,
    sender_key,
    split_endpoint,
)

SCHEDULER, ALICE, BOB = (KeyPair.random() for _ in range(3))


def entry(pair: KeyPair, name: str, *roles: Role) -> Entry:
    return Entry(pair.public, frozenset(roles or {Role.CLIENT}), name)


def in_trio(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    async def limited(kwargs: dict[str, Any]) -> None:
        with trio.fail_after(20):
            await test(**kwargs)

    @wraps(test)
    def run(**kwargs: Any) -> None:
        trio.run(limited, kwargs)

    return run


# -- the decision -----------------------------------------------------------------------------------------------------


def question(pair: KeyPair, **changes: Any) -> Request:
    raw = z85.decode(pair.public.encode())
    frames = {"version": b"1.0", "id": b"7", "domain": b"pathway", "address": b"10.0.0.1", "routing_id": b""}
    frames |= {"mechanism": b"CURVE", "credentials": raw} | changes
    request = Request.parse(list(frames.values()))
    assert request is not None
    return request


def test_a_key_of_the_list_comes_in_and_is_named() -> None:
    alice = entry(ALICE, "alice")
    decision = decide(question(ALICE), AllowList.of([alice]))
    assert (decision.status, decision.entry) == (200, alice)
    assert decision.frames(question(ALICE)) == [b"1.0", b"7", b"200", b"welcome", ALICE.public.encode(), b""]


@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        ({}, 400, "not on the allow-list"),
        ({"mechanism": b"NULL"}, 400, "a key is needed"),
        ({"mechanism": b"PLAIN"}, 400, "a key is needed"),
        ({"credentials": b"short"}, 500, "malformed"),
        ({"version": b"2.0"}, 500, "version"),
        ({"domain": b"other"}, 500, "domain"),
    ],
)
def test_everybody_else_stays_out_for_a_reason(changes: dict[str, bytes], status: int, reason: str) -> None:
    allowed = AllowList.of([entry(ALICE, "alice")] if changes else [])
    decision = decide(question(ALICE, **changes), allowed)
    assert (decision.status, decision.entry) == (status, None)
    assert reason in decision.reason
    assert decision.frames(question(ALICE))[4] == b""


def test_what_is_no_question_gets_no_answer() -> None:
    assert Request.parse([]) is None
    assert Request.parse([b"1.0", b"7"]) is None


# -- addresses --------------------------------------------------------------------------------------------------------


def test_endpoints_carry_the_listeners_key() -> None:
    for pair in (ALICE, BOB):
        assert split_endpoint(endpoint("tcp://10.0.0.1:7", pair.public)) == ("tcp://10.0.0.1:7", pair.public)
        assert address_of(endpoint("tcp://10.0.0.1:7", pair.public)) == "tcp://10.0.0.1:7"
    assert split_endpoint(endpoint("tcp://10.0.0.1:7", None)) == ("tcp://10.0.0.1:7", None)
    with pytest.raises(ConfigError, match="no public key"):
        split_endpoint("tcp://10.0.0.1:7#")


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://127.8.8.8:1", "tcp://[::1]:0", "tcp://localhost:7"])
def test_a_bind_that_only_this_machine_can_reach_needs_no_keys(address: str) -> None:
    refuse_open_bind(address, None, insecure=False)


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:0", "tcp://*:7777", "tcp://10.0.0.1:7", "tcp://eth0:7", "tcp://[::]:7"]
)
def test_any_other_bind_needs_keys_or_an_explicit_word(address: str) -> None:
    with pytest.raises(ConfigError, match=r"pathway keygen .*--insecure"):
        refuse_open_bind(address, None, insecure=False)
    refuse_open_bind(address, None, insecure=True)
    refuse_open_bind(address, Identity(ALICE), insecure=False)


# -- real sockets -----------------------------------------------------------------------------------------------------


class Doors:
    """A context with a secured ROUTER, and clients of all kinds."""

    def __init__(self, *entries: Entry) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.access = Access(AllowList.of(entries))
        self.router = self.context.socket(zmq.ROUTER)
        secure_server(self.router, Identity(SCHEDULER))

    def open(self) -> Authenticator:
        authenticator = Authenticator(self.context, self.access)
        self.bind()
        return authenticator

    def bind(self) -> None:
        self.address = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"

    def client(
        self, own: KeyPair | None, listener: KeyPair | None = SCHEDULER, routing_id: bytes = b""
    ) -> zmq.Socket[bytes]:
        dealer = self.context.socket(zmq.DEALER)
        secure_client(dealer, Identity(own) if own else None, listener.public if own else None)
        dealer.reconnect_ivl = -1
        if routing_id:
            dealer.routing_id = routing_id
        return dealer


@contextmanager
def doors(*entries: Entry) -> Iterator[Doors]:
    made = Doors(*entries)
    try:
        yield made
    finally:
        made.context.destroy(linger=0)


async def take(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    readiness = Readiness(int(socket.FD))
    try:
        while True:
            try:
                return list(socket.recv_multipart(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                await readiness.wait()
    finally:
        readiness.close()


async def fate(dealer: zmq.Socket[bytes], address: str) -> str:
    """Connect, and say how the handshake ended: "in", or the reason given to people."""
    events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    events |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    monitor = dealer.get_monitor_socket(events)
    dealer.connect(address)
    try:
        while True:
            event, value = struct.unpack("=HI", (await take(monitor))[0].bytes)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return "in"
            if event == zmq.EVENT_DISCONNECTED:
                return "closed"
            if reason := handshake_failure(event, value, dealer.mechanism == zmq.CURVE):
                return reason
    finally:
        dealer.disable_monitor()
        monitor.close(0)


@in_trio
async def test_with_a_key_of_the_list_every_message_names_it() -> None:
    with doors(entry(ALICE, "alice"), entry(BOB, "bob")) as here:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.open().run)
            for pair in (ALICE, BOB, ALICE):
                client = here.client(pair)
                client.connect(here.address)
                client.send_multipart([b"one", b"two"])
                frames = await take(here.router)
                assert [sender_key(frame) for frame in frames] == [pair.public] * 3
            nursery.cancel_scope.cancel()


@in_trio
async def test_strangers_fail_in_the_documented_way() -> None:
    with doors(entry(ALICE, "alice")) as here:
        authenticator = here.open()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(authenticator.run)
            assert await fate(here.client(ALICE), here.address) == "in"
            assert "refused our key" in await fate(here.client(BOB), here.address)
            assert "it wants a key" in await fate(here.client(None), here.address)
            assert await fate(here.client(ALICE, listener=BOB), here.address) != "in"
            assert authenticator.refused_count == 1
            nursery.cancel_scope.cancel()


@in_trio
async def test_without_an_authenticator_nobody_comes_in() -> None:
    with doors(entry(ALICE, "alice")) as here:
        here.bind()
        assert await fate(here.client(ALICE), here.address) != "in"


@in_trio
async def test_after_the_authenticator_closed_nobody_comes_in() -> None:
    with doors(entry(ALICE, "alice")) as here:
        authenticator = here.open()
        authenticator.close()
        authenticator.close()
        assert await fate(here.client(ALICE), here.address) != "in"


@in_trio
async def test_a_key_added_to_the_file_a_moment_ago_comes_in(tmp_path: Path) -> None:
    path = tmp_path / "allowed_keys"
    path.write_text(entry(ALICE, "alice").line())
    file = AllowListFile(path)
    with doors() as here:
        authenticator = Authenticator(here.context, here.access, partial(reload, file, here.access))
        here.access.replace(file.current)
        here.bind()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(authenticator.run)
            assert await fate(here.client(BOB), here.address) != "in"
            path.write_text(entry(BOB, "bob").line())
            assert await fate(here.client(BOB), here.address) == "in"
            assert await fate(here.client(ALICE), here.address) != "in"
            nursery.cancel_scope.cancel()


@in_trio
async def test_a_watched_file_tells_of_its_changes(tmp_path: Path) -> None:
    path = tmp_path / "allowed_keys"
    path.write_text(entry(ALICE, "alice").line())
    file = AllowListFile(path)
    access = Access(file.current)
    send, changes = trio.open_memory_channel[Change](10)
    end = access.subscribe(send.send_nowait)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, file, access)
        await trio.testing.wait_all_tasks_blocked()
        path.write_text(entry(BOB, "bob").line())
        os.kill(os.getpid(), signal.SIGHUP)
        change = await changes.receive()
        assert [revoked.name for revoked in change.revoked] == ["alice"]
        started = trio.current_time()
        path.write_text("")
        change = await changes.receive()
        assert [revoked.name for revoked in change.revoked] == ["bob"]
        assert trio.current_time() - started < 1.0
        nursery.cancel_scope.cancel()
    end()
    access.replace(AllowList.of([entry(ALICE, "alice")]))
    assert changes.statistics().current_buffer_used == 0


@in_trio
async def test_one_connection_of_many_is_cut_and_no_other() -> None:
    with doors(entry(ALICE, "alice"), entry(BOB, "bob")) as here:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.open().run)
            connections = {}
            clients = {pair: here.client(pair) for pair in (ALICE, BOB)}
            for pair, client in clients.items():
                client.connect(here.address)
                client.send(b"hello")
                connections[pair] = Connection.of((await take(here.router))[0])
            ended = clients[ALICE].get_monitor_socket(zmq.EVENT_DISCONNECTED)
            alices = connections[ALICE]
            assert alices is not None
            assert alices.cut()
            await take(ended)
            clients[ALICE].disable_monitor()
            ended.close(0)
            clients[BOB].send(b"still here")
            assert (await take(here.router))[1].bytes == b"still here"
            nursery.cancel_scope.cancel()


@in_trio
async def test_a_routing_id_is_no_identity_but_the_messages_key_is() -> None:
    """Why K-5: while a connection lives its routing id cannot be taken; after it anybody's can be."""
    with doors(entry(ALICE, "alice"), entry(BOB, "bob")) as here:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.open().run)
            alice, bob = here.client(ALICE, routing_id=b"same"), here.client(BOB, routing_id=b"same")
            alice.connect(here.address)
            alice.send(b"1")
            assert sender_key((await take(here.router))[0]) == ALICE.public
            assert await fate(bob, here.address) == "in"
            bob.send(b"2")
            alice.send(b"3")
            frames = await take(here.router)
            assert (frames[1].bytes, sender_key(frames[0])) == (b"3", ALICE.public)
            monitor = here.router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            for client in (alice, bob):
                client.close(0)
                await take(monitor)
            bob = here.client(BOB, routing_id=b"same")
            bob.connect(here.address)
            bob.send(b"4")
            frames = await take(here.router)
            assert (frames[0].bytes, sender_key(frames[0])) == (b"same", BOB.public)
            here.router.disable_monitor()
            monitor.close(0)
            nursery.cancel_scope.cancel()


def test_a_context_has_one_authenticator() -> None:
    with doors() as here:
        first = Authenticator(here.context, here.access)
        with pytest.raises(ConfigError, match="has an authenticator already"):
            Authenticator(here.context, here.access)
        first.close()


def test_one_side_with_keys_is_a_mistake_that_says_what_to_set() -> None:
    with doors() as here:
        dealer = here.context.socket(zmq.DEALER)
        with pytest.raises(ConfigError, match="none are set here"):
            secure_client(dealer, None, SCHEDULER.public)
        with pytest.raises(ConfigError, match="scheduler's public key is not known"):
            secure_client(dealer, Identity(ALICE), None)
        secure_client(dealer, None, None)
