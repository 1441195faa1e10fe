"""Endpoints: an address and, where a cluster has keys, the public key of who listens there. Pure.

`tcp://10.0.0.7:41233#KEY`. The scheduler adds the key of each executor to its address in the directory, from the
connection that the executor came by: so nobody can pass for an executor without the key of the worker that started it.
"""

from __future__ import annotations

import ipaddress


def endpoint(address: str, key: str | None) -> str:
    """`address` with its listener's key."""
    return address if key is None else f"{address}#{key}"


def address_of(endpoint: str) -> str:
    """An endpoint without its key: for people."""
    return endpoint.partition("#")[0]


def key_in(endpoint: str) -> str | None:
    """An endpoint's key. It may have a # of its own: the first one ends the address."""
    _, hash_sign, key = endpoint.partition("#")
    return key if hash_sign else None


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach what is bound at `address`."""
    if not address.startswith("tcp://"):
        return address.startswith(("ipc://", "inproc://"))
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name, an interface, or *
