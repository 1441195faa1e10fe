"""A whole cluster on this machine, as children of this process: what `pathway.connect()` without an address starts.

For plain Python and from any thread: nothing here needs trio to run in the caller's thread. The children die with this
process, also when it is killed (see `processes`), and `stop` leaves nothing behind.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import trio

from pathway.config import size_bytes
from pathway.errors import ConfigError, ConnectError, PathwayError
from pathway.observe import fetch_status, wait_for_islands
from pathway.processes import Child, cause_of_exit, end_children
from pathway.transport.security import Identity, KeyPaths

WORKERS_GRACE_S, SCHEDULER_GRACE_S = 1.3, 0.4
"""Between asking and killing, at the end. A worker needs one second of it where its executor hangs."""

_MAX_HOSTS = 4096


@dataclass(frozen=True, slots=True)
class LocalIsland:
    """What is started for one island."""

    name: str
    hosts: int
    devices: int  # of each host
    platform: str
    device_memory: str = ""  # of each device, as for `pathway worker`


def start_local_cluster(
    islands: int | Mapping[str, Mapping[str, Any]] = 2,
    hosts_per_island: int = 1,
    devices_per_host: int = 4,
    platform: str = "cpu",
    preload: Sequence[str] = (),
    *,
    bind: str = "tcp://127.0.0.1:0",
    keys: str = "",
    transfer: str | None = None,
    start_timeout_s: float = 60.0,
    device_memory: str = "",
    spill: bool = False,
    environment: Mapping[str, str] | None = None,
    log_level: str = "warning",
) -> LocalCluster:
    """Start a scheduler and workers, and wait until all islands are formed. `islands` is their number, or what each is:
    `{"front": {"hosts": 2, "devices": 2}, "back": {"devices": 4, "device_memory": "1GiB"}}`. `keys` is a directory made
    by `pathway keygen`; without it the cluster has no keys, whatever the settings say. `device_memory` limits that of
    each device; with `spill`, cold buffers move to host memory when a run needs their room. `transfer` is how edges
    go from island to island, where the settings are not to say it: pathway, jax or auto (docs/transfers.md).
    `environment` is added to that of the children. Raises `ConnectError` with what kept the cluster from coming up."""
    wanted = local_islands(islands, hosts_per_island, devices_per_host, platform, device_memory)
    paths = KeyPaths.in_directory(Path(keys), "client") if keys else None
    key_settings = {"PATHWAY_KEYS": keys, "PATHWAY_KEY": "", "PATHWAY_SCHEDULER_KEY": "", "PATHWAY_ALLOWED_KEYS": ""}
    chosen = {"PATHWAY_TRANSFER": transfer} if transfer is not None else {}
    cluster = LocalCluster(
        wanted,
        preload,
        {**os.environ, **key_settings, **chosen, "PATHWAY_LOG_LEVEL": log_level, **(environment or {})},
        paths.identity() if paths is not None else None,
    )
    deadline = time.monotonic() + start_timeout_s
    try:
        cluster._start_scheduler(bind, spill)
        cluster._start_workers()
        cluster._until_formed(deadline)
    except BaseException:
        cluster.stop()
        raise
    return cluster


def local_islands(
    islands: int | Mapping[str, Mapping[str, Any]], hosts: int, devices: int, platform: str, device_memory: str = ""
) -> tuple[LocalIsland, ...]:
    """What `islands` asks for, checked."""
    if isinstance(islands, int):
        islands = {f"island{number}": {} for number in range(islands)}
    if not islands:
        raise ConfigError("a cluster needs an island")
    defaults = {"hosts": hosts, "devices": devices, "platform": platform, "device_memory": device_memory}
    found = []
    for name, asked in islands.items():
        unknown = asked.keys() - defaults
        if unknown:
            raise ConfigError(f"island {name!r}: there is no {sorted(unknown)[0]!r}; there are {', '.join(defaults)}")
        island = LocalIsland(name, **{**defaults, **asked})
        for what, number in (("hosts", island.hosts), ("devices", island.devices)):
            if type(number) is not int or not 1 <= number <= _MAX_HOSTS:
                raise ConfigError(f"island {name!r} cannot have {number!r} {what}")
        size_bytes(island.device_memory, f"island {name!r}: device_memory")
        found.append(island)
    return tuple(found)


class LocalCluster:
    """A running cluster. A context manager that stops it."""

    address: str
    """Of its scheduler."""

    def __init__(
        self,
        islands: Sequence[LocalIsland],
        preload: Sequence[str],
        environment: Mapping[str, str],
        identity: Identity | None = None,
    ) -> None:
        self.islands = tuple(islands)
        self.scheduler: Child | None = None
        self.workers: dict[tuple[str, int], Child] = {}
        """By island and host."""
        self.proxies: list[Child] = []
        self._preload = tuple(preload)
        self._environment = environment
        self._identity = identity
        self._host_address = ""  # where executors listen, if not where they reach the scheduler from
        self._owner = os.getpid()
        self._stopping = threading.Lock()
        atexit.register(self.stop)

    # -- start --------------------------------------------------------------------------------------------------------

    def _start_scheduler(self, bind: str, spill: bool) -> None:
        """Listen here and hand the socket over: so the address is known at once, and workers need not wait to start."""
        with _listener(bind) as listener:
            host, port = listener.getsockname()[:2]
            self.address = f"tcp://{host}:{port}"
            self._host_address = outward_address() if host in ("0.0.0.0", "::") else ""
            arguments = ["scheduler", "--bind", self.address, "--listen-fd", str(listener.fileno()), "--drain-s", "0"]
            arguments += ["--spill"] if spill else []
            self.scheduler = self._start(arguments, pass_fds=(listener.fileno(),))

    def _start_workers(self) -> None:
        for island in self.islands:
            for host in range(island.hosts):
                self.start_worker(island.name, host)

    def start_worker(self, island: str, host: int = 0) -> Child:
        """Start the worker of one host (again). For tests of failure, and for what comes after one."""
        spec = next(spec for spec in self.islands if spec.name == island)
        arguments = ["worker", "--scheduler", self.address, "--island", island, "--hosts", str(spec.hosts)]
        arguments += ["--host-index", str(host), "--devices", str(spec.devices), "--platform", spec.platform]
        if spec.device_memory:
            arguments += ["--device-memory", spec.device_memory]
        if self._host_address:
            arguments += ["--host-address", self._host_address]
        for module in self._preload:
            arguments += ["--preload", module]
        child = self.workers[island, host] = self._start(arguments)
        return child

    def start_proxy(self, bind: str = "127.0.0.1:0", *arguments: str) -> str:
        """Start `pathway proxy` beside the rest; its address, for JAX_BACKEND_TARGET."""
        reading, writing = os.pipe()
        try:
            command = ["proxy", "--scheduler", self.address, "--bind", bind, "--report-fd", str(writing), *arguments]
            self.proxies.append(self._start(command, pass_fds=(writing,)))
        finally:
            os.close(writing)
        with os.fdopen(reading) as report:
            address = report.read()
        if not address:
            raise ConnectError(f"the proxy did not start: {self.what_ended() or 'it says no address'}")
        return address

    def _start(self, arguments: Sequence[str], **options: Any) -> Child:
        command = [sys.executable, "-m", "pathway", *arguments]
        return Child(command, self._environment, stdout=subprocess.DEVNULL, **options)

    def _until_formed(self, deadline: float) -> None:
        names = {island.name for island in self.islands}
        try:
            remaining_s = deadline - time.monotonic()
            formed = in_thread(wait_for_islands, self.address, names, remaining_s, self.what_ended, self._identity)
        except PathwayError as error:
            raise ConnectError(f"the cluster did not start: {self.what_ended() or error}") from None
        if not formed:
            status = in_thread(fetch_status, self.address, 2.0, self._identity)
            reasons = "; ".join(f"{wait['what']} {wait['reason']}" for wait in status["waits"])
            raise ConnectError(
                f"the cluster did not start in time: {reasons or self.what_ended() or 'no reason given'}"
            )

    def what_ended(self) -> str:
        """A child that should run and does not, in words; "" if all do."""
        children = {"the scheduler": self.scheduler, "the proxy": self.proxies[-1] if self.proxies else None} | {
            f"the worker of host {host} of island {island}": child for (island, host), child in self.workers.items()
        }
        for name, child in children.items():
            if child is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return f"{name} ended with {cause_of_exit(child.process.wait(0))}"
        return ""

    # -- end ----------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End all processes, in two phases, and wait for them. Safe to call again, from any thread."""
        if os.getpid() != self._owner:
            return  # a forked child has a copy of this object, and no children
        with self._stopping:
            workers, self.workers = list(self.workers.values()), {}
            scheduler, self.scheduler = self.scheduler, None
            proxies, self.proxies = self.proxies, []
            end_children(proxies, WORKERS_GRACE_S)
            end_children(workers, WORKERS_GRACE_S)
            end_children([scheduler] if scheduler is not None else [], SCHEDULER_GRACE_S)
        atexit.unregister(self.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def _listener(bind: str) -> socket.socket:
    host, _, port = bind.removeprefix("tcp://").rpartition(":")
    try:
        return socket.create_server(("" if host == "*" else host, int(port)), backlog=1024)
    except OSError as error:
        reason = "the port is in use by another process" if error.errno == errno.EADDRINUSE else error.strerror
        raise ConfigError(f"cannot bind {bind}: {reason}") from None
    except (ValueError, OverflowError):
        raise ConfigError(f"cannot bind {bind}: it should look like tcp://127.0.0.1:7777") from None


def outward_address() -> str:
    """This machine's address on its way to others; "" where there is no such way, and only itself can reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))  # an address of nobody's, to which nothing is sent
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def in_thread(function: Any, *arguments: Any) -> Any:
    """`trio.run` in a thread of its own: the caller's may be running trio, or asyncio, already."""
    result: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(trio.run(function, *arguments))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="pathway-embedded")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]
