"""The default client: what `pathway.connect()` opens and the module's functions use."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from pathway.client.client import DEFAULT_CONNECT_TIMEOUT_S, DEFAULT_SLICE_TIMEOUT_S, Client, open_clients
from pathway.client.recording import Recording
from pathway.client.slices import Device, Island, Slice
from pathway.errors import DisconnectedError

ADDRESS_VARIABLE = "PATHWAY_ADDRESS"

_lock = threading.Lock()
_default: Client | None = None


class EmbeddedClient(Client):
    """A client with a cluster of its own on this machine, which ends with it."""

    def __init__(self, cluster: Any, **options: Any) -> None:
        self.cluster = cluster
        try:
            super().__init__(cluster.address, **options)
        except BaseException:
            cluster.stop()
            raise

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.cluster.stop()


def connect(
    address: str | None = None,
    *,
    islands: int | Mapping[str, Mapping[str, Any]] | None = None,
    name: str = "",
    weight: float = 1.0,
    priority: int = 0,
    connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S,
    preload: Sequence[str] = (),
    transfer: str | None = None,
    keys: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
    scheduler_key: str | os.PathLike[str] | None = None,
) -> Client:
    """Connect, and use this connection for everything that follows. The client is a context manager.

    Without an address, and without `$PATHWAY_ADDRESS`, a cluster is started on this machine and stopped with the
    program: two islands of four CPU devices, or what `islands` says: a number of such islands, or
    `{"front": {"hosts": 2, "devices": 2}, "back": {"devices": 4}}` (devices are per host). `preload` names modules that
    its executors import, for FFI targets; `transfer` says how edges go between its islands
    (docs/transfers.md). `weight`, `priority`, `keys`, `key` and `scheduler_key`: see `Client`.
    """
    global _default
    with _lock:
        if _default is not None and not _default.is_closed:
            raise DisconnectedError(
                f"already connected to {_default.address}; call pathway.disconnect() first, "
                "or use pathway.Client for another connection"
            )
        address = address or os.environ.get(ADDRESS_VARIABLE)
        options = {
            "name": name,
            "weight": weight,
            "priority": priority,
            "connect_timeout_s": connect_timeout_s,
            "keys": keys,
            "key": key,
            "scheduler_key": scheduler_key,
        }
        if address is None:
            _default = _embedded(
                islands, preload, transfer, options | {"keys": keys or "", "key": "", "scheduler_key": ""}
            )
        else:
            _default = Client(address, **options)  # type: ignore[arg-type]
        return _default


def _embedded(
    islands: int | Mapping[str, Mapping[str, Any]] | None,
    preload: Sequence[str],
    transfer: str | None,
    options: Mapping[str, Any],
) -> Client:
    from pathway.embedded import start_local_cluster

    cluster = start_local_cluster(
        2 if islands is None else islands,
        preload=tuple(preload),
        keys=os.fspath(options["keys"]),
        transfer=transfer,
    )
    return EmbeddedClient(cluster, **options)


def disconnect() -> None:
    """Close the default client, and stop its cluster if it is an embedded one."""
    global _default
    with _lock:
        client, _default = _default, None
    if client is not None:
        client.close()


def default_client() -> Client:
    """The client that `connect` opened."""
    client = _default
    if client is None:
        raise DisconnectedError("not connected: call pathway.connect() first")
    client._check_open()
    return client


def slice(
    n: int,
    mesh: Mapping[str, int] | None = None,
    island: str | None = None,
    platform: str | None = None,
    shared: bool = False,
    memory: int | None = None,
    *,
    wait: bool = True,
    timeout_s: float = DEFAULT_SLICE_TIMEOUT_S,
) -> Slice:
    """See `Client.slice`: of the default client."""
    return default_client().slice(n, mesh, island, platform, shared, memory, wait=wait, timeout_s=timeout_s)


def put(tree: Any, slice: Slice, specs: Any = None) -> Any:
    """See `Client.put`: on the client of `slice`."""
    return slice.client.put(tree, slice, specs)


def islands() -> tuple[Island, ...]:
    """See `Client.islands`: of the default client."""
    return default_client().islands()


def devices() -> tuple[Device, ...]:
    """See `Client.devices`: of the default client."""
    return default_client().devices()


def record_steps() -> Recording:
    """See `Recording`: of the default client."""
    return Recording(default_client())


@atexit.register
def _close_at_exit() -> None:
    for client in open_clients():
        with contextlib.suppress(Exception):  # the interpreter is going: nobody can act on it
            client.close()
