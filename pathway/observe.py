"""Looking at a cluster from outside: its status, and waiting until islands are formed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

import msgspec
import trio

from pathway.errors import ConnectError, PathwayError
from pathway.transport.handshake import refusal_to_exception
from pathway.transport.messages import (
    AdminReply,
    Directory,
    DirectoryChange,
    DrainIsland,
    Goodbye,
    KillSession,
    Ping,
    Refused,
    SetWeight,
    StatusReply,
    StatusRequest,
)
from pathway.transport.security import Identity
from pathway.transport.sockets import Batch, Dealer, PeerGone, hello

_LOOK_S = 0.1


class Observer:
    """A connection that may ask for the status, as often as it likes, but at least once a lease."""

    def __init__(self, link: Dealer) -> None:
        self._link = link
        self._requests = 0

    async def status(self) -> dict[str, Any]:
        """What `pathway status --json` prints (docs/cli.md has its keys)."""
        self._requests += 1
        self._link.post(StatusRequest(self._requests))
        self._link.flush()
        while True:
            for message in _messages(self._link, await self._link.receive_batch()):
                if isinstance(message, StatusReply) and message.request == self._requests:
                    status: dict[str, Any] = msgspec.json.decode(message.status)
                    return status


@contextlib.asynccontextmanager
async def observe(address: str, timeout_s: float, identity: Identity | None = None) -> AsyncIterator[Observer]:
    """Connect as an observer. Raises `ConnectError`."""
    link, _ = await Dealer.open(address, hello("observer"), identity=identity, timeout_s=timeout_s)
    try:
        yield Observer(link)
    finally:
        link.post(Goodbye())
        link.close()


async def fetch_status(address: str, timeout_s: float, identity: Identity | None = None) -> dict[str, Any]:
    """The cluster's status, once."""
    async with observe(address, timeout_s, identity) as observer:
        with trio.move_on_after(timeout_s):
            return await observer.status()
    raise ConnectError(f"the scheduler at {address} did not tell its status within {timeout_s:g} s")


async def give_order(
    address: str, order: SetWeight | DrainIsland | KillSession, timeout_s: float, identity: Identity | None = None
) -> str:
    """Have the scheduler do what an administrator may order (with request number 1); what it says. Raises
    `ConnectError`, and `PathwayError` where it cannot be done."""
    link, _ = await Dealer.open(address, hello("admin"), identity=identity, timeout_s=timeout_s)
    try:
        link.post(order)
        link.flush()
        with trio.move_on_after(timeout_s):
            while True:
                for message in _messages(link, await link.receive_batch()):
                    if isinstance(message, AdminReply):
                        if message.error:
                            raise PathwayError(message.error)
                        return message.text
                    if isinstance(message, Refused):
                        raise refusal_to_exception(message)
    finally:
        link.post(Goodbye())
        link.close()
    raise ConnectError(f"the scheduler at {address} did not answer within {timeout_s:g} s")


async def wait_for_islands(
    address: str,
    names: Collection[str],
    timeout_s: float,
    given_up: Callable[[], str] = lambda: "",
    identity: Identity | None = None,
) -> bool:
    """Wait until all islands `names` are formed; False if they are not in time. `given_up`, asked now and then, says
    why there is no use in waiting; that is raised as `ConnectError`."""
    link, _ = await Dealer.open(address, hello("client", name="start"), identity=identity, timeout_s=timeout_s)
    number = 0
    formed: set[str] = set()
    try:
        with trio.move_on_after(timeout_s):
            while True:
                batch: Batch = []
                with trio.move_on_after(_LOOK_S):
                    batch = await link.receive_batch()
                for message in _messages(link, batch):
                    match message:
                        case Directory(islands):
                            formed = {entry.island for entry in islands}
                        case DirectoryChange(islands, gone):
                            formed = (formed | {entry.island for entry in islands}) - set(gone)
                if formed.issuperset(names):
                    return True
                if not batch:
                    reason = given_up()
                    if reason:
                        raise ConnectError(reason)
                    number += 1
                    link.post(Ping(number))
                    link.flush()
        return False
    finally:
        link.post(Goodbye())
        link.close()


def _messages(link: Dealer, batch: Batch) -> list[Any]:
    messages: list[Any] = []
    for item in batch:
        if isinstance(item, PeerGone):
            raise ConnectError(f"lost the scheduler at {link.address}: {item.reason}")
        messages += item.messages
    return messages
