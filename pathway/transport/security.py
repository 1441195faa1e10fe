"""CURVE on sockets: what a listening and a connecting socket need, where keys come from, and who may listen where.

Invariants
  K-4  With keys, every socket has CURVE on, both ways: the listener proves its key to whoever connects, and whoever
       connects proves a key that the allow-list has. A listener without an authenticator lets nobody in.
  K-5  Who sent a message is read from the message (the `User-Id` that the authenticator gave its connection), and never
       from the routing id: that one is chosen by the peer, and free again as soon as its connection is gone.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from pathway.errors import ConfigError
from pathway.transport.endpoints import address_of, is_loopback, key_in
from pathway.transport.keys import (
    ALLOW_LIST_NAME,
    PUBLIC_SUFFIX,
    SCHEDULER_NAME,
    KeyPair,
    PublicKey,
    load_key_pair,
    load_public_key,
    parse_public_key,
)

ZAP_DOMAIN = b"pathway"
HANDSHAKE_TIMEOUT_S = 10.0
"""A connection that has not proved its key by then is closed."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a process connects with: its own keys, and the key it expects of the scheduler."""

    own: KeyPair
    scheduler: PublicKey | None = field(default=None, repr=False)

    @classmethod
    def load(cls, key_file: Path, scheduler_key_file: Path | None) -> Identity:
        """From key files; without the second the scheduler's key is not known."""
        return cls(load_key_pair(key_file), load_public_key(scheduler_key_file) if scheduler_key_file else None)


@dataclass(frozen=True, slots=True)
class KeyPaths:
    """Where the keys of a process are: what travels in settings, arguments and environments, in place of keys (K-1)."""

    own: Path
    scheduler: Path | None = None
    allow_list: Path | None = None

    @classmethod
    def in_directory(cls, directory: Path, name: str) -> KeyPaths:
        """The paths in a directory that `pathway keygen DIR` made, for the process that uses the key `name`."""
        directory = directory.expanduser().absolute()
        if not directory.is_dir():
            raise ConfigError(f"{directory} is no directory with keys: make one with pathway keygen {directory}")
        return cls(
            directory / (name + PUBLIC_SUFFIX),
            directory / (SCHEDULER_NAME + PUBLIC_SUFFIX),
            directory / ALLOW_LIST_NAME,
        )

    def identity(self) -> Identity:
        return Identity.load(self.own, self.scheduler)


# -- where to listen and connect --------------------------------------------------------------------------------------


def split_endpoint(text: str) -> tuple[str, PublicKey | None]:
    """The address and the key of an endpoint. Raises `ConfigError` for a key that is none."""
    key = key_in(text)
    return address_of(text), None if key is None else parse_public_key(key)


def refuse_open_bind(
    address: str, keys: Identity | KeyPaths | None, insecure: bool, what: str = "this address"
) -> None:
    """Raise `ConfigError` where `address` could be reached from other machines and nothing would keep them out."""
    if keys is None and not insecure and not is_loopback(address):
        raise ConfigError(
            f"{what}, {address}, can be reached from other machines, and no keys are set: anybody there could run "
            "code on this cluster. Make keys with pathway keygen DIR and give --keys DIR, or accept the risk with "
            "--insecure"
        )


# -- sockets ----------------------------------------------------------------------------------------------------------


def secure_server(listener: zmq.Socket[bytes], identity: Identity | None) -> None:
    """Make `listener` ask for keys, before it binds. Nothing happens without an identity."""
    if identity is None:
        return
    listener.curve_server = True
    listener.curve_secretkey = identity.own.secret.reveal()
    listener.curve_publickey = identity.own.public.encode()
    listener.zap_domain = ZAP_DOMAIN
    listener.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an authenticator: nobody, instead of everybody (K-4)
    listener.handshake_ivl = int(HANDSHAKE_TIMEOUT_S * 1000)


def secure_client(connector: zmq.Socket[bytes], identity: Identity | None, listener_key: PublicKey | None) -> None:
    """Give `connector` our keys, before it connects to who must have `listener_key`."""
    if identity is None:
        if listener_key is not None:
            raise ConfigError("this cluster uses keys, and none are set here: give --keys DIR, keys=, or PATHWAY_KEYS")
        return
    if listener_key is None:
        raise ConfigError(
            "the scheduler's public key is not known: it belongs into the directory keys, as scheduler.key"
        )
    connector.curve_serverkey = listener_key.encode()
    connector.curve_secretkey = identity.own.secret.reveal()
    connector.curve_publickey = identity.own.public.encode()


def sender_key(frame: zmq.Frame) -> PublicKey | None:
    """The key of who sent `frame`, a frame received with copy=False from a secured listener (0.6 us)."""
    try:
        return PublicKey(str(frame.get("User-Id")))
    except zmq.ZMQError:  # no such property: the connection has no keys
        return None


def handshake_failure(event: int, value: int, with_keys: bool) -> str:
    """Why a handshake failed, from a monitor's event on the connecting side; "" where the event is another."""
    failed = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    if event & failed and not with_keys:
        return "it ended the handshake: it wants a key, and none is set here, or it is no Pathway process"
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "it refused our key: the key is not on its allow-list, or was revoked"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return "one side uses keys and the other does not"
        return "it speaks another protocol, or its key is another than the one expected here"
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return "it ended the handshake: its key is another than the one expected here, or it does not take ours"
    return ""


# -- ending one connection of many ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connection:
    """The TCP connection that a frame came by, so that it can be ended: ZeroMQ ends a peer only by ending the socket.

    The descriptor is ZeroMQ's and may be closed and given to another connection at any time; the pair of addresses
    tells them apart, because no two connections of a machine share it.
    """

    descriptor: int
    addresses: tuple[object, object]

    @classmethod
    def of(cls, frame: zmq.Frame) -> Connection | None:
        try:
            descriptor = int(frame.get(zmq.SRCFD))
            with _borrowed(descriptor) as borrowed:
                return cls(descriptor, (borrowed.getsockname(), borrowed.getpeername()))
        except (zmq.ZMQError, OSError, ValueError):  # not from a socket, or closed since
            return None

    def cut(self) -> bool:
        """End the connection now, whatever is under way on it. False if it had ended already."""
        try:
            with _borrowed(self.descriptor) as borrowed:
                if (borrowed.getsockname(), borrowed.getpeername()) != self.addresses:
                    return False
                borrowed.shutdown(socket.SHUT_RDWR)
                return True
        except OSError:
            return False


def _borrowed(descriptor: int) -> socket.socket:
    return socket.socket(fileno=os.dup(descriptor))
