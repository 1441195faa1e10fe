"""The worker's process: one per host. Starts the executor, reaps it, says why it ended. `pathway worker`.

It imports no JAX and touches no device, so it lives on when the executor is ended by the system, by XLA, or by the
coordination service of `jax.distributed`, which aborts a process when another process of its island dies. What it
decides is in `supervision`; here are sockets, processes and signals.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from pathway.actor import Actor
from pathway.config import Settings
from pathway.errors import ConfigError, ConnectError, PathwayError
from pathway.executor.culprits import Culprits
from pathway.executor.supervision import (
    ChildExited,
    ChildPaused,
    CloseLink,
    Event,
    Exit,
    Instruction,
    KillChild,
    LinkFailed,
    LinkLost,
    LinkOpened,
    OpenLink,
    Received,
    Send,
    StartChild,
    StopRequested,
    TerminateChild,
    Tick,
    WorkerCore,
)
from pathway.executor.transfers import check_choice
from pathway.processes import ParentPipe, cause_of_exit, is_stopped, oom_kills
from pathway.transport.link import QUICK_SILENCE
from pathway.transport.messages import FormIsland, HostJoined, Message
from pathway.transport.security import KeyPaths, refuse_open_bind, split_endpoint
from pathway.transport.sockets import Dealer, Peer, PeerGone, hello

log = logging.getLogger(__name__)

LOOK_S = 0.5

XLA_THREADS = 32
"""XLA's pool of threads (NPROC), at least: with few, the collectives of many devices starve one another."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What this host offers, and to whom."""

    scheduler: str
    island: str
    hosts: int = 1
    host_index: int = 0
    devices: int = 1
    platform: str = "cpu"
    preload: tuple[str, ...] = ()
    device_memory_bytes: int = 0
    """Of each device, for programs; 0: what the devices say themselves."""
    host_address: str = ""
    """Where other hosts reach this one. Empty: the address that it reaches the scheduler from."""


async def supervise(options: WorkerOptions, settings: Settings) -> Exit:
    """Run the worker until it is told to stop or refused; how it ended."""
    keys = settings.key_paths("worker")
    listening = options.host_address or address_towards(options.scheduler)
    refuse_open_bind(f"tcp://{listening}:0", keys, settings.insecure, "this worker's address")
    check_choice(settings.transfer, keys is not None)
    return await Worker(options, settings, keys).run()


class Worker:
    """The shell around `WorkerCore`."""

    def __init__(self, options: WorkerOptions, settings: Settings, keys: KeyPaths | None) -> None:
        self._options = options
        self._settings = settings
        self._keys = keys
        self._culprits = Culprits.create()
        self._identity = keys.identity() if keys is not None else None
        self._host = options.host_address or address_towards(options.scheduler)
        self._link: Dealer | None = None
        self._unreachable = ""  # why, as logged last
        self._child: _Child | None = None
        self._exit: Exit | None = None
        self._ended = trio.Event()
        core = WorkerCore(
            HostJoined(
                island=options.island,
                hosts=options.hosts,
                host_index=options.host_index,
                devices=options.devices,
                platform=options.platform,
                hostname=socket.gethostname(),
                pid=os.getpid(),
                coordinator_address=f"{self._host}:{free_port(self._host)}",
            )
        )
        self._actor: Actor[Event, Instruction] = Actor(core, self._perform, self._flush, tick=Tick())

    async def run(self) -> Exit:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._actor.run)
                self._nursery.start_soon(self._stop_when_told, signals)
                self._nursery.start_soon(self._open_link, 0.0)
                await self._ended.wait()
                self._nursery.cancel_scope.cancel()
        if self._link is not None:
            self._link.close()
        self._culprits.close()
        assert self._exit is not None
        return self._exit

    async def _stop_when_told(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            self._actor.deliver((StopRequested(f"the worker was ended by {signal.Signals(number).name}"),))

    # -- instructions -------------------------------------------------------------------------------------------------

    def _perform(self, instruction: Instruction) -> None:
        match instruction:
            case Send(message):
                if self._link is not None:
                    self._link.post(message)
            case OpenLink(delay_s):
                self._nursery.start_soon(self._open_link, delay_s)
            case CloseLink():
                if self._link is not None:
                    self._link.close()
                    self._link = None
            case StartChild(form):
                self._start_child(form)
            case TerminateChild():
                if self._child is not None:
                    self._child.terminate()
            case KillChild():
                if self._child is not None:
                    self._child.process.kill()
            case Exit():
                self._exit = instruction
                self._ended.set()

    def _flush(self) -> None:
        if self._link is not None:
            self._link.flush()

    # -- the link -----------------------------------------------------------------------------------------------------

    async def _open_link(self, delay_s: float) -> None:
        await trio.sleep(delay_s)
        options = self._options
        try:
            link, welcome = await Dealer.open(
                options.scheduler,
                hello("worker", name=f"{options.island}/{options.host_index}"),
                identity=self._identity,
                timeout_s=self._settings.connect_timeout_s,
                socket_options=QUICK_SILENCE,
            )
        except PathwayError as error:
            refused = not isinstance(error, ConnectError) or error.info is not None
            if not refused and str(error) != self._unreachable:
                log.warning("%s; trying again", error)
                self._unreachable = str(error)
            self._actor.deliver((LinkFailed(str(error), refused),))
            return
        self._unreachable = ""
        self._link = link
        log.info("joined the scheduler at %s", link.address)
        self._actor.deliver((LinkOpened(welcome),))
        await self._actor.run_link(link, self._received, partial(self._gone, link))

    def _received(self, peer: Peer, message: Message, blobs: tuple[memoryview, ...]) -> Event:
        return Received(message)

    def _gone(self, link: Dealer, gone: PeerGone) -> Event | None:
        if link is not self._link:
            return None  # closed by ourselves
        log.warning("lost the scheduler: %s", gone.reason)
        return LinkLost(gone.reason)

    # -- the child ----------------------------------------------------------------------------------------------------

    def _start_child(self, form: FormIsland) -> None:
        command = executor_command(self._options, form, self._host, self._keys, self._settings.transfer)
        try:
            self._child = _Child(command, executor_environment(self._options), self._culprits)
        except OSError as error:
            self._actor.deliver_soon(ChildExited(f"it could not be started: {error}"))
            return
        log.info("started the executor of incarnation %d, process %d", form.incarnation, self._child.process.pid)
        self._nursery.start_soon(self._reap, self._child, form)

    async def _reap(self, child: _Child, form: FormIsland) -> None:
        prefix = f"[{form.island}/{form.host_index}] " if sys.stderr.isatty() else ""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_for_stops, child)
            cause = await child.until_exit(prefix)
            nursery.cancel_scope.cancel()
        self._child = None
        log.info("the executor of incarnation %d ended: %s", form.incarnation, cause)
        # JAX aborts an island's other hosts when its first one is gone, whatever they do: only that one's end accuses.
        returncode = child.process.returncode if form.host_index == 0 else 0
        for key in self._culprits.ended(returncode, cause):
            log.warning("computation %s is refused from now on: the executor ended when it compiled it", key)
        self._actor.deliver((ChildExited(cause),))

    async def _watch_for_stops(self, child: _Child) -> None:
        """Who stops a process (SIGSTOP, a debugger) tells only its parent, by a signal or by a wait, and both are used
        for ends: so look, now and then."""
        paused = False
        while True:
            await trio.sleep(LOOK_S)
            if is_stopped(child.process.pid) != paused:
                paused = not paused
                log.warning("the executor %s", "is stopped" if paused else "goes on")
                self._actor.deliver((ChildPaused(paused),))


class _Child:
    """The executor's process. Started in this thread, not in one of trio's, for PDEATHSIG's sake (see `processes`)."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], culprits: Culprits) -> None:
        self._parent = ParentPipe()
        self._oom_kills_before = oom_kills()
        self._quiet = False
        try:
            self.process = subprocess.Popen(
                [*command, *self._parent.arguments, "--culprits-fd", str(culprits.descriptor)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                pass_fds=[self._parent.child_end, culprits.descriptor],
            )
        except BaseException:
            self._parent.close()
            raise
        self._parent.started()
        assert self.process.stdout is not None
        self._output = self.process.stdout

    def terminate(self) -> None:
        """Ask it to end. What it says from now on is of no interest: for XLA, the end of an island's other hosts, which
        end at the same time, is fatal and worth many lines."""
        self._quiet = True
        self.process.terminate()

    async def until_exit(self, prefix: str) -> str:
        """Pass its output on until it ends, by the end of the process and not by a poll, and say why it ended."""
        tail: deque[str] = deque(maxlen=1)
        pidfd = os.pidfd_open(self.process.pid)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._pass_on, prefix, tail)
                await trio.lowlevel.wait_readable(pidfd)
                returncode = self.process.wait()
                nursery.cancel_scope.deadline = trio.current_time() + 0.1  # the pipe may be held open by others
        finally:
            if self.process.returncode is None:  # cancelled: leave nothing behind
                self.process.kill()
                self.process.wait()
            os.close(pidfd)
            self._parent.close()
        cause = cause_of_exit(returncode, self._oom_kills_before)
        ended_by_itself = returncode not in (0, -signal.SIGTERM, -signal.SIGKILL)
        return f"{cause} ({tail[0]})" if ended_by_itself and tail else cause

    async def _pass_on(self, prefix: str, tail: deque[str]) -> None:
        """`tail` is left with the last line that says something."""
        rest = b""
        async with trio.lowlevel.FdStream(os.dup(self._output.fileno())) as stream:
            self._output.close()
            async for piece in stream:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    self._pass_on_line(prefix, line, tail)
        self._pass_on_line(prefix, rest, tail)

    def _pass_on_line(self, prefix: str, line: bytes, tail: deque[str]) -> None:
        if self._quiet or not line.strip() or line.startswith(_CHATTER):
            return
        tail.append(line.decode(errors="replace").strip())
        with contextlib.suppress(OSError):  # nobody reads our stderr: no reason to end the executor
            os.write(2, prefix.encode() + line + b"\n")


_CHATTER = (b"[Gloo] Rank ",)
"""What libraries print, on stdout, at every start."""


def executor_command(
    options: WorkerOptions, form: FormIsland, host: str, keys: KeyPaths | None, transfer: str
) -> list[str]:
    """How the executor child is started. Paths of keys are passed, never keys (K-1)."""
    command = [sys.executable, "-m", "pathway.executor.main"]
    for flag, value in (
        ("--scheduler", options.scheduler),
        ("--island", form.island),
        ("--incarnation", form.incarnation),
        ("--hosts", form.hosts),
        ("--host-index", form.host_index),
        ("--devices", options.devices),
        ("--platform", options.platform),
        ("--coordinator", form.coordinator_address),
        ("--device-memory-bytes", options.device_memory_bytes),
        ("--peer-host", host),
        ("--transfer", transfer),
    ):
        command += [flag, str(value)]
    for module in options.preload:
        command += ["--preload", module]
    if keys is not None:
        command += ["--key", str(keys.own)]
        if keys.scheduler is not None:
            command += ["--scheduler-key", str(keys.scheduler)]
    return command


def executor_environment(options: WorkerOptions) -> dict[str, str]:
    """This process's environment, with what must be set before JAX is imported."""
    environment = dict(os.environ)
    environment["JAX_PLATFORMS"] = options.platform
    environment["NPROC"] = str(max(XLA_THREADS, 8 * options.devices))
    return environment


def address_towards(scheduler: str) -> str:
    """This machine's address on the way to `scheduler`: where others of the cluster can reach it."""
    address, _ = split_endpoint(scheduler)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)  # of a datagram socket: only chooses the way, sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot tell the way to the scheduler at {scheduler!r}: {error}") from None


def free_port(host: str) -> int:
    """A port that is free now on `host`."""
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])
