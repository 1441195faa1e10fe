"""The process `pathway proxy`: serves until it is told to stop."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import threading

from pathway.errors import ConfigError
from pathway.proxy.server import ProxyServer, ProxySettings
from pathway.transport.security import Identity, refuse_open_bind

SERVING = "proxy serves at "
"""How the line begins that says where it listens."""


def serve(
    scheduler: str,
    bind: str,
    identity: Identity | None,
    directory: str,
    storage: str,
    insecure: bool,
    report_fd: int = -1,
) -> None:
    """Serve until SIGTERM or Ctrl-C. The client of the open jaxlib has neither keys nor encryption, so an address that
    other machines can reach is refused unless `insecure`."""
    refuse_open_bind(f"tcp://{bind}", None, insecure, "the proxy's address")
    jaxlib = importlib.metadata.version("jaxlib")  # executors and the proxy are installed together; nothing is loaded
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    server = ProxyServer(ProxySettings(scheduler, bind, identity, directory, storage, jaxlib))
    server.start()
    address = f"grpc://{bind.rpartition(':')[0] or '127.0.0.1'}:{server.port}"
    print(f"{SERVING}{address}", flush=True)
    if report_fd >= 0:
        with os.fdopen(report_fd, "w") as report:
            report.write(address)
    stop.wait()
    server.stop()


def check_bind(bind: str) -> str:
    """`bind`, if it looks like HOST:PORT. Raises `ConfigError`."""
    host, colon, port = bind.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ConfigError(f"the proxy cannot listen at {bind!r}: it should look like 127.0.0.1:29000")
    return bind
