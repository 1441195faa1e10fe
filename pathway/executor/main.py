"""`python -m pathway.executor.main`: the executor child. Started by the worker's supervisor, never by hand.

`--preload MODULE` imports a module after JAX and before its devices are made; where the module has a function
`register()`, it is called. That is where users register XLA FFI targets which their programs call.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from pathway.processes import become_child

SWITCH_INTERVAL_S = 0.0005
"""Threads hand the interpreter over this quickly: the ones here do little between waits."""

XLA_THREADS = 32
"""XLA's CPU client starves itself in collectives when its pool is as small as the core count (design, section 14)."""


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="pathway.executor.main", description=__doc__)
    arguments.add_argument("--scheduler", required=True, metavar="ADDRESS")
    arguments.add_argument("--island", required=True)
    arguments.add_argument("--incarnation", type=int, required=True)
    arguments.add_argument("--hosts", type=int, default=1)
    arguments.add_argument("--host-index", type=int, default=0)
    arguments.add_argument("--devices", type=int, required=True, help="of this host")
    arguments.add_argument("--platform", default="cpu")
    arguments.add_argument("--coordinator", default="", help="of the island's jax.distributed, if it has several hosts")
    arguments.add_argument("--parent-fd", type=int, default=-1)
    arguments.add_argument("--peer-host", default="", help="the interface to listen on")
    arguments.add_argument("--device-memory-bytes", type=int, default=0, help="of each device, for programs")
    arguments.add_argument("--transfer", default="auto", choices=("auto", "pathway", "jax"))
    arguments.add_argument("--preload", action="append", default=[], metavar="MODULE")
    arguments.add_argument("--cache-dir", default="", help="of compiled computations; - for none")
    arguments.add_argument("--culprits-fd", type=int, default=-1, help="see pathway.executor.culprits")
    arguments.add_argument("--key", metavar="FILE", help="our own key pair")
    arguments.add_argument("--scheduler-key", metavar="FILE", help="the scheduler's public key")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    become_child(options.parent_fd)
    logging.basicConfig(level=os.environ.get("PATHWAY_LOG", "WARNING").upper())
    threading.excepthook = _end_after
    os.environ["JAX_PLATFORMS"] = options.platform
    os.environ.setdefault("NPROC", str(max(XLA_THREADS, 8 * options.devices)))
    sys.setswitchinterval(SWITCH_INTERVAL_S)

    from pathway.executor.backend import Backend  # and with it JAX, with which the modules to preload register

    for name in options.preload:
        register = getattr(importlib.import_module(name), "register", None)
        if register is not None:
            register()

    import trio

    from pathway.config import load_settings
    from pathway.executor.bind import Host
    from pathway.executor.compile_cache import CompileCache, default_directory
    from pathway.executor.culprits import Culprits
    from pathway.executor.executor import LeaderLost, Settings
    from pathway.executor.transfers import choose_transfer
    from pathway.transport.memory import keep_heap_warm
    from pathway.transport.security import KeyPaths

    keep_heap_warm()
    identity = None
    if options.key:
        scheduler_key = Path(options.scheduler_key) if options.scheduler_key else None
        identity = KeyPaths(Path(options.key), scheduler_key).identity()
    peer_host = options.peer_host or interface_towards(options.scheduler)
    cache = None
    if options.cache_dir != "-":
        cache = CompileCache(Path(options.cache_dir) if options.cache_dir else default_directory())
    host = Host(options.island, options.incarnation, options.hosts, options.host_index, options.devices)
    backend = Backend(options.platform, options.devices, options.hosts, options.host_index, options.coordinator, cache)
    share = load_settings().shared_memory
    transfer = choose_transfer(options.transfer, options.platform, identity is not None)
    settings = Settings(
        options.scheduler,
        host,
        options.platform,
        peer_host,
        identity,
        share,
        options.device_memory_bytes,
        transfer,
        Culprits(options.culprits_fd) if options.culprits_fd >= 0 else None,
    )
    if cache is not None:
        threading.Thread(target=cache.prune, name="pathway-prune", daemon=True).start()
    gc.collect()
    gc.freeze()  # what is here now stays, and need not be looked through again
    code = 1
    try:
        trio.run(_serve, settings, backend)
        code = 0
    except* LeaderLost as lost:
        print(*lost.exceptions, sep="\n", file=sys.stderr)
    except* Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a clean shutdown of jax.distributed waits for hosts that may be gone


async def _serve(settings: object, backend: object) -> None:
    import trio

    from pathway.executor.backend import Backend
    from pathway.executor.executor import Executor, Settings
    from pathway.transport.authenticator import Gate
    from pathway.transport.link import process_context

    assert isinstance(settings, Settings)
    assert isinstance(backend, Backend)
    executor = None
    try:
        async with trio.open_nursery() as nursery:
            gate = None
            if settings.identity is not None:
                gate = Gate(settings.identity, process_context())
                nursery.start_soon(gate.run)
            executor = Executor(settings, backend, nursery, gate)
            nursery.start_soon(executor.run)
            with trio.open_signal_receiver(signal.SIGTERM) as signals:
                async for _ in signals:
                    break
            nursery.cancel_scope.cancel()
    finally:
        if executor is not None:
            executor.close()


def interface_towards(address: str) -> str:
    """The address of the interface from which `address` is reached: loopback stays loopback."""
    target = urlsplit(address.partition("#")[0])
    family = socket.AF_INET6 if ":" in (target.hostname or "") else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((target.hostname or "127.0.0.1", target.port or 1))  # UDP: nothing is sent
        name = str(probe.getsockname()[0])
    return f"[{name}]" if family == socket.AF_INET6 else name


def _end_after(arguments: threading.ExceptHookArgs) -> None:
    """A thread of ours that breaks would leave waits without an end: end the process, and let it be restarted."""
    traceback.print_exception(arguments.exc_value)
    sys.stderr.flush()
    os._exit(70)


if __name__ == "__main__":
    sys.exit(main())
