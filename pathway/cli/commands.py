"""What the commands do. Each imports what it needs, so that none pays for another."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import threading
from collections.abc import Sequence

from pathway.config import Settings, load_settings


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run the command that was parsed; its exit code."""
    if options.command == "demo":
        from pathway.demo import main

        return main(rest) or 0
    if options.command == "train":
        from pathway.programs.llm.command import main as train

        return train(rest)
    if options.command == "keygen":
        return _keygen(options)
    names = {field.name for field in dataclasses.fields(Settings)}
    settings = load_settings({name: value for name, value in vars(options).items() if name in names})
    commands = {
        "scheduler": _scheduler,
        "worker": _worker,
        "up": _up,
        "proxy": _proxy,
        "status": _status,
    } | dict.fromkeys(("set-weight", "drain", "undrain", "kill"), _order)
    return commands[options.command](options, settings)


def _scheduler(options: argparse.Namespace, settings: Settings) -> int:
    from pathway.processes import become_child

    become_child(options.parent_fd, signal.SIGTERM)
    import trio

    from pathway import logs
    from pathway.sched.daemon import Announcement, serve

    logs.configure(settings.log_format, settings.log_level, process="scheduler")

    async def main() -> None:
        await serve(settings, Announcement(options.report_fd, options.address_file), options.listen_fd)

    trio.run(main)
    return 0


def _worker(options: argparse.Namespace, settings: Settings) -> int:
    from pathway.processes import become_child

    become_child(options.parent_fd, signal.SIGTERM)
    import trio

    from pathway import logs
    from pathway.executor.supervisor import WorkerOptions, supervise

    logs.configure(settings.log_format, settings.log_level, process=f"worker {options.island}/{options.host_index}")
    worker = WorkerOptions(
        scheduler=options.scheduler or settings.address,
        island=options.island,
        hosts=options.hosts,
        host_index=options.host_index,
        devices=options.devices,
        platform=options.platform,
        preload=tuple(options.preload),
        device_memory_bytes=settings.device_memory_bytes,
        host_address=options.host_address,
    )
    end = trio.run(supervise, worker, settings)
    if end.code:
        print(f"pathway worker: {end.reason}", file=sys.stderr)
    return end.code


def _up(options: argparse.Namespace, settings: Settings) -> int:
    from pathway.embedded import start_local_cluster
    from pathway.transport.security import refuse_open_bind

    refuse_open_bind(settings.bind, settings.key_paths("scheduler"), settings.insecure, "the scheduler's address")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with start_local_cluster(
        options.islands,
        options.hosts,
        options.devices,
        options.platform,
        options.preload,
        bind=settings.bind,
        keys=settings.keys,
        device_memory=settings.device_memory,
        spill=settings.spill,
        transfer=settings.transfer,
        environment={"PATHWAY_INSECURE": "1"} if settings.insecure else None,
        log_level=options.log_level or "info",
    ) as cluster:
        print(f"a cluster of {options.islands} islands with {options.hosts * options.devices} devices each is up at")
        print(f"  {cluster.address}")
        argument, flag = (f", keys={settings.keys!r}", f" --keys {settings.keys}") if settings.keys else ("", "")
        print(f"connect with   pathway.connect({cluster.address!r}{argument})   or   PATHWAY_ADDRESS={cluster.address}")
        if options.proxy:
            proxy = cluster.start_proxy(options.proxy)
            print(f"unchanged JAX  JAX_PLATFORMS=proxy JAX_BACKEND_TARGET={proxy} \\")
            print("               IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS=true python program.py")
        print(f"look at it     pathway status --address {cluster.address}{flag}")
        print("Ctrl-C stops it", flush=True)
        while not stop.wait(1.0):
            if ended := cluster.what_ended():
                print(f"pathway up: {ended}", file=sys.stderr)
                return 1
    return 0


def _proxy(options: argparse.Namespace, settings: Settings) -> int:
    from pathway.processes import become_child

    become_child(options.parent_fd, signal.SIGTERM)
    try:
        from pathway.proxy.daemon import check_bind, serve
    except ImportError as error:
        print(
            f"pathway proxy needs the packages of the extra: pip install pathway-jax[proxy] ({error})", file=sys.stderr
        )
        return 1
    from pathway import logs

    logs.configure(settings.log_format, settings.log_level, process="proxy")
    keys = settings.key_paths("client")
    serve(
        options.scheduler or settings.address,
        check_bind(options.proxy_bind),
        keys.identity() if keys is not None else None,
        options.transfer_directory,
        options.storage,
        settings.insecure,
        options.report_fd,
    )
    return 0


def _status(options: argparse.Namespace, settings: Settings) -> int:
    import trio

    from pathway.cli.status_view import show_status

    keys = settings.key_paths("client")
    return trio.run(
        show_status,
        settings.address,
        settings.connect_timeout_s,
        keys.identity() if keys is not None else None,
        options.json,
        options.watch,
    )


def _order(options: argparse.Namespace, settings: Settings) -> int:
    """What needs an administrator's key, in a cluster with keys."""
    import trio

    from pathway.observe import give_order
    from pathway.transport.messages import DrainIsland, KillSession, SetWeight

    order: SetWeight | DrainIsland | KillSession
    if options.command == "set-weight":
        order = SetWeight(1, options.session, options.weight, options.priority, options.of_key)
    elif options.command == "kill":
        order = KillSession(1, options.session)
    else:
        order = DrainIsland(1, options.island, options.command == "drain")
    keys = settings.key_paths("admin")
    identity = keys.identity() if keys is not None else None
    print(trio.run(give_order, settings.address, order, settings.connect_timeout_s, identity))
    return 0


def _keygen(options: argparse.Namespace) -> int:
    from pathway.transport.keys import Role, generate

    roles = [Role(role) for role in options.role or ["client"]]
    made = generate(options.directory, options.name, roles)
    for public, secret in zip(made.public_paths, made.secret_paths, strict=True):
        print(f"made {public} (public) and {secret} (secret: keep it to yourself)")
    if made.allow_list is not None:
        print(f"made {made.allow_list}: who may connect")
    else:
        print("add this line to the scheduler's allowed_keys:")
        print(*made.lines, sep="\n")
    return 0
