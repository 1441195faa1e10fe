"""The scheduler's process: the core, a router, signals. `pathway scheduler`."""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import trio
import zmq

from pathway.actor import Actor
from pathway.config import Settings
from pathway.errors import ConfigError
from pathway.sched.clients import Limits
from pathway.sched.cluster import ISLAND_RECORD, IslandRecord
from pathway.sched.core import SchedulerCore, SchedulerSettings
from pathway.sched.events import (
    AccessChanged,
    Close,
    Drain,
    Event,
    Instruction,
    MessageReceived,
    PeerClosed,
    Record,
    Send,
    Stop,
    Tick,
)
from pathway.sched.journal import Journal
from pathway.sched.peers import PeerSettings
from pathway.sched.policies import load_policy
from pathway.sched.recorder import Recorder
from pathway.transport.authenticator import Gate
from pathway.transport.keys import AllowList, AllowListFile, PublicKey
from pathway.transport.link import process_context
from pathway.transport.messages import AccessList, Message
from pathway.transport.permissions import admit_to_scheduler, new_secret, token
from pathway.transport.security import refuse_open_bind
from pathway.transport.sockets import Peer, PeerGone, Router

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Announcement:
    """How others learn the address, when it was bound to port 0: on a file descriptor, in a file, or both."""

    descriptor: int = -1
    file: Path | None = None

    def make(self, address: str) -> None:
        line = address + "\n"
        if self.file is not None:
            draft = self.file.with_name(f"{self.file.name}.{os.getpid()}")
            draft.write_text(line)
            draft.replace(self.file)  # whoever reads it finds all of it or nothing
        if self.descriptor >= 0:
            os.write(self.descriptor, line.encode())
            os.close(self.descriptor)


async def serve(settings: Settings, announcement: Announcement, listener: int = -1) -> None:
    """Run the scheduler until it is told to stop. `listener` is the descriptor of a socket that listens at the address
    already, if there is one. Raises `ConfigError` where it cannot listen."""
    keys = settings.key_paths("scheduler")
    identity = keys.identity() if keys is not None else None
    refuse_open_bind(settings.bind, identity, settings.insecure, "the scheduler's address")
    gate: Gate | None = None
    if keys is not None and identity is not None:
        if keys.allow_list is None:
            raise ConfigError("a scheduler with keys needs a list of those it lets in: give keys or allowed_keys")
        gate = Gate(identity, process_context(), AllowListFile(keys.allow_list))
    router = Router.bind(
        settings.bind,
        gate=gate,
        admit=admit_to_scheduler,
        max_undelivered_bytes=settings.max_undelivered_mib << 20,
        socket_options={zmq.MAXMSGSIZE: settings.max_message_mib << 20, zmq.USE_FD: listener},
    )
    journal: Journal | None = None
    try:
        journal = Journal(settings.state_path) if settings.state_path is not None else None
        await Daemon(settings, router, gate, journal).run(announcement)
    finally:
        router.close()
        if journal is not None:
            journal.close()
        if gate is not None:
            gate.close()
        if announcement.file is not None:
            announcement.file.unlink(missing_ok=True)


class Daemon:
    """The shell around the core."""

    def __init__(self, settings: Settings, router: Router, gate: Gate | None, journal: Journal | None) -> None:
        self._settings = settings
        self._router = router
        self._gate = gate
        remembered = journal.read() if journal is not None else {}
        self._secret = remembered.get("secret", {}).get("", b"") or new_secret()
        self._recorder = Recorder(journal, router.post, router.flush)
        self._recorder.record(Record("secret", "", self._secret))
        self._stopped = trio.Event()
        core = SchedulerCore(
            SchedulerSettings(
                credits=settings.credits_per_island,
                policy=load_policy(settings.policy),
                peers=PeerSettings(
                    heartbeat_s=settings.heartbeat_s,
                    host_silence_s=settings.host_silence_s,
                    executor_silence_s=settings.executor_silence_s,
                    lease_s=settings.lease_s,
                ),
                limits=Limits(
                    settings.max_sessions, settings.max_plans_per_session, settings.max_program_mib_per_session << 20
                ),
                spill=settings.spill,
                memory_patience_s=3 * settings.heartbeat_s,
            ),
            random.SystemRandom(),
            time.monotonic(),
            token_of=lambda session, key: token(self._secret, session, PublicKey(key) if key else None),
            islands={
                name: msgspec.msgpack.decode(value, type=IslandRecord)
                for name, value in remembered.get(ISLAND_RECORD, {}).items()
            },
        )
        self._actor: Actor[Event, Instruction] = Actor(core, self._perform, router.flush, tick=Tick())
        self._post = router.post if journal is None else self._recorder.post

    async def run(self, announcement: Announcement) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with trio.open_nursery() as nursery:
                if self._gate is not None:
                    self._gate.access.subscribe(lambda _: self._access_changed())
                    nursery.start_soon(self._gate.run)
                self._access_changed()
                nursery.start_soon(self._actor.run)
                nursery.start_soon(self._actor.run_link, self._router, self._received, self._gone)
                nursery.start_soon(self._recorder.run)
                nursery.start_soon(self._drain_when_told, signals)
                log.info("listening on %s", self._router.address)
                announcement.make(self._router.address)
                await self._stopped.wait()
                nursery.cancel_scope.cancel()
        log.info("stopped")

    def _access_changed(self) -> None:
        listed = self._gate.access.allow_list if self._gate is not None else AllowList()
        keys = {str(entry.key): (entry.name, entry.terms) for entry in listed.entries.values()}
        self._actor.deliver((AccessChanged(AccessList(self._secret, listed.text()), keys),))

    async def _drain_when_told(self, signals: AsyncIterator[int]) -> None:
        """The first signal lets the runs end, the second does not."""
        async for number in signals:
            name = signal.Signals(number).name
            log.info("%s: stopping when the runs have ended, in %g s at the latest", name, self._settings.drain_s)
            self._actor.deliver((Drain(self._settings.drain_s),))
            break
        async for _ in signals:
            self._actor.deliver((Drain(0.0),))
            self._stopped.set()

    def _received(self, peer: Peer, message: Message, blobs: tuple[memoryview, ...]) -> Event:
        return MessageReceived(peer, message, self._router.key_of(peer))

    def _gone(self, gone: PeerGone) -> Event:
        return PeerClosed(gone.peer, gone.reason)

    def _perform(self, instruction: Instruction) -> None:
        if type(instruction) is Send:
            self._post(instruction.peer, instruction.message)
        elif isinstance(instruction, Record):
            self._recorder.record(instruction)
        elif isinstance(instruction, Close):
            self._recorder.forget(instruction.peer)
            if instruction.refused is not None:
                self._router.disconnect(instruction.peer, instruction.refused.kind, instruction.refused.reason)
        elif isinstance(instruction, Stop):
            log.info("stopping: %s", instruction.reason)
            self._stopped.set()
