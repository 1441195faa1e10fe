"""Routers and dealers with keys: strangers, wrong roles, revoked keys, messages out of role, sessions of others."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing
import zmq

from pathway.errors import ConfigError, ConnectError, PathwayError, PermissionDeniedError
from pathway.executor.links import PeerLinks
from pathway.transport import messages as m
from pathway.transport.authenticator import Gate
from pathway.transport.bulklink import TransferMemory
from pathway.transport.endpoints import endpoint
from pathway.transport.handshake import hello, refusal_to_exception
from pathway.transport.keys import AllowListFile, KeyPair, Role, generate, load_public_key, parse_allow_list
from pathway.transport.link import process_context
from pathway.transport.permissions import (
    Admit,
    admit_to_executor,
    admit_to_scheduler,
    executor_token,
    new_secret,
    token,
)
from pathway.transport.security import Identity, KeyPaths
from pathway.transport.sockets import Dealer, Delivery, PeerGone, Router

SECRET = new_secret()
TIMEOUT_S = 20.0


class House:
    """A secured router, and who comes to it."""

    def __init__(self, directory: Path, router: Router, gate: Gate) -> None:
        self.directory = directory
        self.router = router
        self.gate = gate
        self.address = router.address
        self.entered: list[Dealer] = []

    def identity(self, name: str) -> Identity:
        return KeyPaths.in_directory(self.directory, name).identity()

    async def enter(self, name: str, role: str, **more: int) -> Dealer:
        introduction = m.Hello(*m_versions(), role, name, **more)
        dealer = await Dealer.connect(self.address, introduction, identity=self.identity(name), timeout_s=5.0)
        self.entered.append(dealer)
        return dealer

    def close(self) -> None:
        """Close what came in by `enter`."""
        for dealer in self.entered:
            dealer.close(linger_s=0)

    def allow(self, *names: str) -> None:
        """Leave only these keys on the list."""
        path = self.directory / "allowed_keys"
        lines = [line for line in path.read_text().splitlines() if line.startswith("# ") or line.split()[2] in names]
        path.write_text("\n".join(lines) + "\n")


def m_versions() -> tuple[int, str]:
    introduction = hello("")
    return introduction.protocol, introduction.version


@asynccontextmanager
async def house(directory: Path, admit: Admit = admit_to_scheduler) -> AsyncIterator[House]:
    if not (directory / "allowed_keys").exists():
        generate(directory)
    with trio.fail_after(TIMEOUT_S):
        gate = Gate(
            KeyPaths.in_directory(directory, "scheduler").identity(),
            process_context(),
            AllowListFile(directory / "allowed_keys"),
        )
        try:
            with Router.bind("tcp://127.0.0.1:0", gate=gate, admit=admit) as router:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(gate.run)
                    here = House(directory, router, gate)
                    try:
                        yield here
                    finally:
                        here.close()
                    nursery.cancel_scope.cancel()
        finally:
            gate.close()


async def refusal(dealer: Dealer) -> PathwayError:
    """What a refused peer would raise, once its connection has ended."""
    error = None
    while True:
        for item in await dealer.receive_batch():
            match item:
                case Delivery(_, [m.Refused() as refused], _):
                    error = refusal_to_exception(refused)
                case PeerGone(_, reason):
                    assert error is not None, f"gone without a word: {reason}"
                    return error


async def serve(router: Router, deliveries: trio.MemorySendChannel[Delivery | PeerGone]) -> None:
    while True:
        for item in await router.receive_batch():
            await deliveries.send(item)


def test_members_come_in_each_in_its_role(tmp_path: Path) -> None:
    async def main() -> None:
        async with house(tmp_path) as here:
            for name, role in (("client", "client"), ("worker", "worker"), ("worker", "executor"), ("admin", "admin")):
                dealer = await here.enter(name, role)
                [delivery] = await here.router.receive_batch()
                assert isinstance(delivery, Delivery)
                assert delivery.messages == [m.Hello(*m_versions(), role, name)]
                assert here.router.key_of(delivery.peer) == here.identity(name).own.public
                dealer.close()
                [gone] = await here.router.receive_batch()
                assert gone == PeerGone(delivery.peer, "the connection was closed")
                assert here.router.key_of(delivery.peer) is None

    trio.run(main)


def test_strangers_are_told_what_is_wrong_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with house(tmp_path) as here:
            scheduler = here.identity("client").scheduler
            for identity, complaint in (
                (None, "it wants a key, and none is set here"),
                (Identity(KeyPair.random(), scheduler), "refused our key"),
                (Identity(here.identity("client").own, KeyPair.random().public), "key"),
            ):
                with pytest.raises(ConnectError, match=complaint) as caught:
                    await Dealer.connect(here.address, hello("client"), identity=identity, timeout_s=15.0)
                assert here.address in str(caught.value)
                assert "no answer within" not in str(caught.value)

    trio.run(main)


def test_a_secured_client_does_not_talk_to_a_scheduler_without_keys(tmp_path: Path) -> None:
    generate(tmp_path)
    identity = KeyPaths.in_directory(tmp_path, "client").identity()

    async def main() -> None:
        with trio.fail_after(TIMEOUT_S), Router.bind("tcp://127.0.0.1:0") as router:
            with pytest.raises(ConnectError, match="one side uses keys"):
                await Dealer.connect(router.address, hello("client"), identity=identity)
            with pytest.raises(ConfigError, match="none are set here"):
                await Dealer.connect(endpoint(router.address, identity.own.public), hello("client"))

    trio.run(main)


@pytest.mark.parametrize(("name", "role"), [("client", "worker"), ("client", "executor"), ("worker", "client")])
def test_a_key_in_anothers_role_is_refused_and_cut(tmp_path: Path, name: str, role: str) -> None:
    async def main() -> None:
        async with house(tmp_path) as here:
            dealer = await here.enter(name, role)
            send, _ = trio.open_memory_channel[Delivery | PeerGone](0)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, here.router, send)
                error = await refusal(dealer)
                assert isinstance(error, PermissionDeniedError)
                assert str(error) == f"the key {name!r} may connect as {name}, and not as {role}"
                nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_message_out_of_role_ends_that_link_and_no_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with house(tmp_path) as here:
            send, arrivals = trio.open_memory_channel[Delivery | PeerGone](10)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, here.router, send)
                good, bad = await here.enter("client", "client"), await here.enter("admin", "client")
                peers = {(await arrivals.receive()).peer for _ in range(2)}
                bad.post(m.Ping(1))
                bad.post(m.PartsFinished(((1, 1),)))
                bad.flush()
                error = await refusal(bad)
                assert isinstance(error, PermissionDeniedError)
                assert "a client may not send PartsFinished" in str(error)
                gone = await arrivals.receive()
                assert isinstance(gone, PeerGone)  # the whole frame is refused: not even its Ping came through
                good.post(m.Ping(2))
                good.flush()
                delivery = await arrivals.receive()
                assert isinstance(delivery, Delivery)
                assert (delivery.messages, {delivery.peer}) == ([m.Ping(2)], peers - {gone.peer})
                nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_revoked_keys_connections_end_within_a_second(tmp_path: Path) -> None:
    async def main() -> None:
        async with house(tmp_path) as here:
            send, arrivals = trio.open_memory_channel[Delivery | PeerGone](10)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, here.router, send)
                stays, first, second = (
                    await here.enter("worker", "worker"),
                    await here.enter("client", "client"),
                    await here.enter("client", "client"),
                )
                for _ in range(3):
                    await arrivals.receive()
                here.allow("worker")
                started = trio.current_time()
                for dealer in (first, second):
                    error = await refusal(dealer)
                    assert isinstance(error, PermissionDeniedError)
                    assert "the key 'client' was revoked" in str(error)
                    assert isinstance(await arrivals.receive(), PeerGone)
                assert trio.current_time() - started < 1.0
                with pytest.raises(ConnectError, match="refused our key"):
                    await here.enter("client", "client")
                stays.post(m.Ping(1))
                stays.flush()
                delivery = await arrivals.receive()
                assert isinstance(delivery, Delivery)
                assert delivery.messages == [m.Ping(1)]
                nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_revoked_peer_that_stays_on_is_cut(tmp_path: Path) -> None:
    """It need not listen to what it is told: what it sends is ignored, and its connection ends all the same."""

    async def main() -> None:
        async with house(tmp_path) as here:
            send, arrivals = trio.open_memory_channel[Delivery | PeerGone](10)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, here.router, send)
                dealer = await here.enter("client", "client")
                await arrivals.receive()
                here.gate.access.replace(parse_allow_list(""))
                dealer.post(m.Ping(1))
                dealer.flush()
                assert isinstance(await arrivals.receive(), PeerGone)
                assert isinstance(await refusal(dealer), PermissionDeniedError)
                await trio.testing.wait_all_tasks_blocked()
                assert arrivals.statistics().current_buffer_used == 0
                nursery.cancel_scope.cancel()

    trio.run(main)


def test_links_to_executors_reach_their_own_session_only(tmp_path: Path) -> None:
    def admit(introduction: m.Hello, key: object, entry: object, secret: bytes) -> object:
        return admit_to_executor(introduction, key, entry, secret).check  # type: ignore[arg-type]

    async def main() -> None:
        async with house(tmp_path, partial(admit, secret=SECRET)) as here:  # type: ignore[arg-type]
            send, arrivals = trio.open_memory_channel[Delivery | PeerGone](10)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, here.router, send)
                clients = load_public_key(tmp_path / "client.key")
                ours = token(SECRET, 7, clients)
                link = await here.enter("client", "peer", session=7, token=ours)
                link.send_with_blob(m.PutShard(1, 7, 1, ((0, 4),), 4), b"data")
                assert (await arrivals.receive()).messages[0].session == 7  # type: ignore[union-attr]
                put = await arrivals.receive()
                assert isinstance(put, Delivery)
                assert bytes(put.blobs[0]) == b"data"
                for name, fields in (
                    ("client", {"session": 8, "token": ours}),  # a session of somebody else
                    ("admin", {"session": 7, "token": ours}),  # a stolen token, with another key
                    ("client", {"session": 7}),  # a guess
                    ("client", {"token": executor_token(SECRET)}),  # a client that plays executor
                ):
                    error = await refusal(await here.enter(name, "peer", **fields))  # type: ignore[arg-type]
                    assert isinstance(error, PermissionDeniedError), error
                other = await here.enter("worker", "peer", token=executor_token(SECRET))
                assert isinstance(await arrivals.receive(), Delivery)
                other.post(m.FollowerHello(1, 1))
                other.flush()
                assert (await arrivals.receive()).messages == [m.FollowerHello(1, 1)]  # type: ignore[union-attr]
                link.post(m.Fetch(1, 8, 1, (0,)))
                link.flush()
                error = await refusal(link)
                assert isinstance(error, PermissionDeniedError)
                assert re.search("Fetch names a session of somebody else", str(error))
                nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_peer_that_takes_nothing_is_cut_off_and_no_other() -> None:
    async def main() -> None:
        with (
            trio.fail_after(TIMEOUT_S),
            Router.bind(
                "tcp://127.0.0.1:0", max_undelivered_bytes=1 << 20, socket_options={zmq.SNDHWM: 4, zmq.SNDBUF: 1 << 16}
            ) as router,
        ):
            stuck: zmq.Socket[bytes] = process_context().socket(zmq.DEALER)
            for option, value in ((zmq.RCVHWM, 1), (zmq.RCVBUF, 1 << 16), (zmq.LINGER, 0)):
                stuck.setsockopt(option, value)
            stuck.connect(router.address)
            stuck.send(m.encode([hello("client")]))
            [delivery] = await router.receive_batch()
            other = await Dealer.connect(router.address, hello("client"))
            [honest] = await router.receive_batch()
            assert isinstance(delivery, Delivery)
            assert isinstance(honest, Delivery)
            sent = 0
            async with trio.open_nursery() as nursery:
                send, arrivals = trio.open_memory_channel[Delivery | PeerGone](10)
                nursery.start_soon(serve, router, send)
                while not arrivals.statistics().current_buffer_used:
                    assert sent < 1000
                    router.send_with_blob(delivery.peer, m.Ping(sent), bytes(1 << 18))
                    sent += 1
                    await trio.lowlevel.checkpoint()
                gone = await arrivals.receive()
                assert isinstance(gone, PeerGone)
                assert re.fullmatch(
                    r"[\d,]+ bytes wait for it, and it does not take them \(max_undelivered_mib\)", gone.reason
                )
                router.post(honest.peer, m.Ping(7))
                router.flush()
                [answer] = await other.receive_batch()
                assert isinstance(answer, Delivery)
                nursery.cancel_scope.cancel()
            other.close()
            stuck.close()

    trio.run(main)


def test_a_message_over_the_limit_ends_its_connection(tmp_path: Path) -> None:
    async def main() -> None:
        with (
            trio.fail_after(TIMEOUT_S),
            Router.bind("tcp://127.0.0.1:0", socket_options={zmq.MAXMSGSIZE: 1 << 16}) as router,
        ):
            dealer = await Dealer.connect(router.address, hello("client"))
            await router.receive_batch()
            async with trio.open_nursery() as nursery:
                send, arrivals = trio.open_memory_channel[Delivery | PeerGone](10)
                nursery.start_soon(serve, router, send)
                dealer.send_with_blob(m.Ping(1), bytes(1 << 17))
                assert isinstance(await arrivals.receive(), PeerGone)
                nursery.cancel_scope.cancel()
            dealer.close()

    trio.run(main)


def test_a_key_generated_later_is_added_with_its_line(tmp_path: Path) -> None:
    async def main() -> None:
        async with house(tmp_path) as here:
            made = generate(tmp_path, "carol", [Role.CLIENT])
            with pytest.raises(ConnectError, match="refused our key"):
                await here.enter("carol", "client")
            with (tmp_path / "allowed_keys").open("a") as file:
                file.write(made.lines[0] + "\n")
            dealer = await here.enter("carol", "client")
            [delivery] = await here.router.receive_batch()
            assert isinstance(delivery, Delivery)
            dealer.close()

    trio.run(main)


def test_links_between_executors_log_addresses_without_keys(caplog: pytest.LogCaptureFixture) -> None:
    """An executor's address is told with its key: whoever reads the log needs the address alone."""
    key = KeyPair.random()

    async def main() -> None:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
            async with trio.open_nursery() as nursery:
                memory = TransferMemory(share=False)
                identity = Identity(key, key.public)
                links = PeerLinks(nursery, lambda: hello("peer", "east/0"), memory, identity)
                links.learn(m.Directory((m.IslandEntry("west", 1, "cpu", 1, (endpoint(address, key.public),)),)))
                links.post("west", 0, m.Ping(1))

    with caplog.at_level(logging.DEBUG):
        trio.run(main)
    assert "no link to the executor at tcp://127.0.0.1:" in caplog.text
    assert key.public not in caplog.text
