"""The executor child process: one host's devices, behind an island's leader or follower core.

This is the shell. Messages become events of the core, the core's instructions are carried out by the parts that own the
work: `runs` launches, `arrivals` and `departures` move data, `compiler` compiles, `store` keeps. Bulk does not pass
through the core. All state is the trio thread's; other threads only wait, compile and launch.

When the scheduler's connection breaks, the executor goes on serving what it has: whether it lives is the supervisor's
decision. A follower whose leader is gone ends, for its island is lost.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import trio

from pathway.dataflow.plan import Part
from pathway.errors import ErrorInfo, PathwayError, ProtocolError, describe
from pathway.executor import gangs as g
from pathway.executor.arrivals import EdgeArrivals, PutArrivals
from pathway.executor.assembly import Assemblies
from pathway.executor.backend import Backend
from pathway.executor.bind import BoundPart, Host, bind, bind_launches, failure, local_computations, local_nbytes
from pathway.executor.compiler import Compiler, Failures
from pathway.executor.completion import Lanes, Outbox
from pathway.executor.culprits import Culprits
from pathway.executor.departures import EdgeDepartures, Fetches
from pathway.executor.follower import FollowerCore
from pathway.executor.jax_transfer import JaxTransfer
from pathway.executor.leader import LeaderCore
from pathway.executor.links import PeerLinks
from pathway.executor.peers import PeerSocket
from pathway.executor.profiling import Profiling
from pathway.executor.runs import Launcher, Run
from pathway.executor.spill import Spills
from pathway.executor.store import Store
from pathway.executor.trace import Tracing
from pathway.executor.transfers import JAX, PATHWAY
from pathway.transport import messages as m
from pathway.transport.authenticator import Gate
from pathway.transport.bulk import BulkSender, HostBytes
from pathway.transport.bulklink import TransferMemory
from pathway.transport.checksum import mismatch
from pathway.transport.security import Identity
from pathway.transport.sockets import Dealer, PeerGone, hello

log = logging.getLogger(__name__)

_part_decoder = msgspec.msgpack.Decoder(Part)


class LeaderLost(Exception):
    """The island's leader is gone, and so is the island."""


@dataclass(frozen=True)
class Settings:
    """What the supervisor tells its child. `peer_host` is the interface that other executors and clients reach."""

    scheduler: str
    host: Host
    platform: str
    peer_host: str
    identity: Identity | None = None
    shared_memory: bool = True
    device_memory_bytes: int = 0  # of each device; 0: what the devices say themselves
    transfer: str = PATHWAY
    culprits: Culprits | None = None


class Executor:
    """One host of an island."""

    def __init__(self, settings: Settings, backend: Backend, nursery: trio.Nursery, gate: Gate | None) -> None:
        self._settings = settings
        self._host = host = settings.host
        self._backend = backend
        self._nursery = nursery
        self._scheduler: Dealer | None = None
        self._leader: Dealer | None = None
        self._leader_wanted = host.index > 0
        self._for_leader: list[m.Message] = []  # until the link is open
        self._core: Any = LeaderCore(host.hosts, host.devices_per_host) if host.index == 0 else FollowerCore()
        self._events: deque[Any] = deque()
        self._handling = False
        self._gangs_done: list[tuple[int, int, int]] = []
        self._parts_finished: list[tuple[int, int]] = []
        self._part_us: list[int] = []
        self._ended_us = 0  # how long the part that was ended last held its devices
        self._remote_until_s = 0.0
        self._reported_busy_us = 0
        self._plans: dict[tuple[int, int], BoundPart] = {}
        self._runs: dict[tuple[int, int], Run] = {}

        self._outbox = Outbox(trio.lowlevel.current_trio_token(), self.settle)
        self._lanes = Lanes(self._outbox)
        self._store = Store()
        self._compiler = Compiler(backend, self._outbox, settings.culprits)
        self._memory = TransferMemory(share=settings.shared_memory)
        self._damaged_transfers = 0
        self._peers = PeerSocket(self, host, settings.peer_host, gate, self._memory)
        self._links = PeerLinks(nursery, self._peers.own_hello, self._memory, settings.identity)
        self._edges = EdgeArrivals(backend, self._edge_arrived, self._store.is_closed)
        self._puts = PutArrivals(backend, self._store, self._buffer_arrived, partial(local_nbytes, host=host))
        self._assemblies = Assemblies(backend, self._store, self._buffer_arrived, partial(local_nbytes, host=host))
        self._by_jax: JaxTransfer | None = None
        if settings.transfer == JAX:
            self._by_jax = JaxTransfer(
                backend, settings.peer_host, self._links, self._edges, self._outbox, self._call_later
            )
        departures = EdgeDepartures(host, backend, self._links, self._edges, self._by_jax)
        self._fetches = Fetches(backend, self._store, self._lanes)
        self._launcher = Launcher(host, self._store, self._lanes, self._outbox, departures, self)
        self._spills = Spills(backend, self._store, self._launcher.in_order)
        self._tracing = Tracing(self._launcher)
        self._profiling = Profiling(self._outbox)
        self._perform: dict[type, Callable[[Any], None]] = {
            g.Launch: lambda i: self._launcher.launch(self._runs[i.session, i.run], i.gang),
            g.Begin: self._begin,
            g.End: self._end,
            g.SendToScheduler: lambda i: self._to_scheduler(i.message),
            g.SendToFollowers: lambda i: self._peers.to_followers(i.message),
            g.SendToLeader: self._to_leader,
            g.Poison: lambda i: self._launcher.poison(self._runs[i.session, i.run], i.gang, i.error),
            g.Put: lambda i: self._puts.announce(i.message),
            g.Spill: lambda i: self._spills.spill(i.message),
            g.Assemble: lambda i: self._assemblies.assemble(i.message),
            g.Free: self._free,
            g.ForgetPlan: self._forget_plan,
            g.DropSession: self._drop_session,
            g.GiveUp: self._give_up,
        }
        self._receive: dict[type, Callable[[Any], None]] = {
            m.StartPart: self._start_part,
            m.RegisterPart: self._register_part,
            m.RegisterComputation: self._compiler.register,
            m.CloseSession: self._close_session,
            m.FreeBuffers: self._free_buffers,
            m.Directory: self._directory,
            m.AccessList: self._peers.learn_access,
            m.Relayed: self._peers.relayed,
            m.Pong: lambda message: None,
            m.Goodbye: lambda message: log.info("the scheduler says goodbye: %s", message.reason),
        }

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Join the scheduler and serve until cancelled."""
        introduction = hello("executor", self._host.name)
        self._scheduler, welcome = await Dealer.open(
            self._settings.scheduler, introduction, identity=self._settings.identity
        )
        self._nursery.start_soon(self._peers.serve)
        self._scheduler.post(
            m.ExecutorReady(
                self._host.island,
                self._host.incarnation,
                self._host.index,
                self._peers.address,
                self._backend.device_kind,
                self._host.devices_per_host,
                os.getpid(),
                self._settings.device_memory_bytes or self._backend.memory_bytes,
                self._settings.transfer,
            )
        )
        self._scheduler.flush()
        self._nursery.start_soon(self._heartbeat, welcome.heartbeat_s)
        await self._serve_scheduler(self._scheduler)

    def close(self) -> None:
        """End all links; what was sent still leaves."""
        self.flush()
        for dealer in (self._scheduler, self._leader):
            if dealer is not None:
                dealer.close(linger_s=0.2)
        self._peers.close()
        self._links.close()
        self._memory.close()

    async def _serve_scheduler(self, dealer: Dealer) -> None:
        while True:
            for item in await dealer.receive_batch():
                if isinstance(item, PeerGone):
                    log.warning("the scheduler is gone (%s): going on with what is here", item.reason)
                    self._scheduler = None
                    return
                for message in item.messages:
                    handle = self._receive.get(type(message))
                    if handle is not None:
                        handle(message)
                    elif isinstance(message, m.Refused):
                        raise PathwayError(f"the scheduler refuses this executor: {message.kind}: {message.reason}")
                    elif self._host.index == 0:
                        self.handle(message)
            self.settle()

    async def _heartbeat(self, heartbeat_s: float) -> None:
        number = reported = 0
        while self._scheduler is not None:
            number += 1
            self._scheduler.post(m.Ping(number))
            if self._host.index == 0:
                self._scheduler.post(self._report())
            elif self._damaged_transfers > reported:
                reported = self._damaged_transfers
                self._scheduler.post(m.ExecutorReport((), (), 0, reported))
            self._scheduler.flush()
            self._memory.trim()
            await trio.sleep(heartbeat_s)

    def _report(self) -> m.ExecutorReport:
        waits = tuple(self._core.waits(time.monotonic()))
        usage = tuple(self._store.usage())
        return m.ExecutorReport(usage, waits, self._launcher.busy_us(), self._damaged_transfers, self._spills.nbytes())

    # -- events and instructions -------------------------------------------------------------------------------------

    def handle(self, event: Any) -> None:
        """Give the core an event and carry out what it says. Events that arise meanwhile come after it."""
        events = self._events
        events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            perform = self._perform
            while events:
                for instruction in self._core.handle(events.popleft(), time.monotonic()):
                    perform[type(instruction)](instruction)
                if self._gangs_done and not events:
                    done, self._gangs_done = tuple(self._gangs_done), []
                    events.append(self._own(m.GangsDone(done)))
        finally:
            self._handling = False

    def _own(self, report: m.Message) -> Any:
        return g.HostReported(0, report) if self._host.index == 0 else report

    def settle(self) -> None:
        """The end of a batch of anything: report what ended, and let all that was posted leave."""
        if self._gangs_done:
            done, self._gangs_done = tuple(self._gangs_done), []
            self.handle(self._own(m.GangsDone(done)))
        self.flush()

    def flush(self) -> None:
        if self._scheduler is not None:
            self._post_parts_finished(self._scheduler)
            self._scheduler.flush()
        if self._leader is not None:
            self._leader.flush()
        self._peers.flush()
        self._links.flush()

    def _to_scheduler(self, message: m.Message) -> None:
        if self._scheduler is None:
            return
        if isinstance(message, m.PartsFinished):
            self._parts_finished += message.parts
            self._part_us.append(self._ended_us)  # the core says `End` and this of one run, in this order
            return
        self._post_parts_finished(self._scheduler)
        self._scheduler.post(message)

    def _post_parts_finished(self, scheduler: Dealer) -> None:
        if self._parts_finished:
            parts, self._parts_finished = tuple(self._parts_finished), []
            part_us, self._part_us = tuple(self._part_us), []
            busy_us = self._launcher.busy_us()
            scheduler.post(m.PartsFinished(parts, busy_us - self._reported_busy_us, part_us))
            self._reported_busy_us = busy_us

    # -- runs --------------------------------------------------------------------------------------------------------

    def _start_part(self, message: m.StartPart) -> None:
        self.handle(g.submitted(message))
        if self._host.index == 0 and self._core.is_late(message.session, message.run):
            self._to_scheduler(m.PartsLate(((message.session, message.run),)))

    def _begin(self, instruction: g.Begin) -> None:
        message = instruction.message
        key = (message.session, message.run)
        part = self._plans[message.session, message.plan]
        run = self._runs[key] = self._launcher.begin(
            *key, part, message.first_result, instruction.arguments, self._backend.array_of_bytes
        )
        self._edges.begin(run)

    def _end(self, instruction: g.End) -> None:
        run = self._runs.pop((instruction.session, instruction.run), None)
        self._edges.end(instruction.session, instruction.run)
        if run is not None:
            if run.edges:  # it ended without them
                self._peers.drop_run(run.session, run.run)
            self._ended_us = int(run.device_us) or self._remote_us(run)

    def _remote_us(self, run: Run) -> int:
        """How long a run of which this host has no device held those of the others: as far as can be seen from here."""
        if not run.began_s or self._host.hosts == 1:
            return 0
        now = time.perf_counter()
        since_s, self._remote_until_s = max(run.began_s, self._remote_until_s), now
        return int((now - since_s) * 1e6)

    def decided(self, session: int, run: int, decisions: tuple[tuple[int, int], ...]) -> None:
        self._to_scheduler(m.Decided(session, run, decisions))

    def gang_done(self, session: int, run: int, gang: int) -> None:
        self._gangs_done.append((session, run, gang))

    def gang_failed(self, session: int, run: int, gang: int, error: ErrorInfo) -> None:
        self.handle(self._own(m.GangFailed(session, run, gang, error)))

    def _edge_arrived(self, session: int, run: int, edge: int, error: ErrorInfo | None) -> None:
        self.handle(self._own(m.EdgeArrived(session, run, edge, error)))

    def _buffer_arrived(self, session: int, buffer: int, error: ErrorInfo | None) -> None:
        self.handle(self._own(m.BufferArrived(session, buffer, error)))

    # -- plans -------------------------------------------------------------------------------------------------------

    def _register_part(self, message: m.RegisterPart) -> None:
        key = (message.session, message.plan)
        try:
            part = g.with_result_gangs(_part_decoder.decode(message.payload))
            info = g.part_info(part, self._host.devices_per_host)
            bound = bind(part, info, self._host, self._links.devices_per_host())
        except Exception as error:
            self._to_scheduler(m.PartRefused(*key, describe(error)))
            return
        self._plans[key] = bound
        wanted = local_computations(part, self._host)

        def compiled(failures: Failures) -> None:
            error = None
            if failures:
                item, cause = next(iter(failures.items()))
                error = failure(bound, self._host, wanted[item], cause)
            else:
                found = {item: self._compiler.compiled[item] for item in wanted}
                bind_launches(bound, self._host, {item: each.launch for item, each in found.items()})
                temp_bytes = {
                    item[0]: each.temp_bytes for item, each in found.items() if item[1][0] in self._host.local
                }
                if temp_bytes:
                    self._to_scheduler(m.ComputationsCompiled(*key, tuple(temp_bytes.items())))
            self.handle(self._own(m.PartBound(*key, error)))

        self.handle(g.PartRegistered(*key, info))
        self._compiler.ensure(wanted, compiled)

    def _forget_plan(self, instruction: g.ForgetPlan) -> None:
        self._plans.pop((instruction.session, instruction.plan), None)

    # -- buffers and sessions ----------------------------------------------------------------------------------------

    def _free_buffers(self, message: m.FreeBuffers) -> None:
        self._store.give_up(message.session, message.buffers)
        self.handle(message)

    def _free(self, instruction: g.Free) -> None:
        self._puts.free(instruction.session, instruction.buffers)
        self._store.free(instruction.session, instruction.buffers)

    def _close_session(self, message: m.CloseSession) -> None:
        self.handle(message if self._host.index == 0 else g.SessionClosed(message.session))

    def _give_up(self, instruction: g.GiveUp) -> None:
        self._edges.give_up(instruction.session, instruction.run)
        self._links.drop_run(instruction.session, instruction.run)
        self._peers.drop_run(instruction.session, instruction.run)

    def client_left(self, session: int) -> None:
        """The last link of a client's session has ended."""
        self._puts.client_left(session)
        self._store.client_left(session)
        self._tracing.close(session)
        self._profiling.close(session)

    def _drop_session(self, instruction: g.DropSession) -> None:
        session = instruction.session
        self._store.close(session)
        self._puts.close(session)
        self._edges.close(session)
        self._links.drop_session(session)
        self._peers.drop_session(session)
        self._tracing.close(session)
        self._profiling.close(session)
        for key in [key for key in self._plans if key[0] == session]:
            del self._plans[key]
        for key in [key for key in self._runs if key[0] == session]:
            del self._runs[key]

    # -- the leader and its followers, and the other islands ---------------------------------------------------------

    def _directory(self, message: m.Directory) -> None:
        self._links.learn(message)
        if self._leader_wanted:
            own = next((entry for entry in message.islands if entry.island == self._host.island), None)
            if own is not None and own.incarnation == self._host.incarnation:
                self._leader_wanted = False
                self._nursery.start_soon(self._follow, own.hosts[0])

    async def _follow(self, address: str) -> None:
        """A follower's link to its leader."""
        dealer = await Dealer.connect(address, self._peers.own_hello(), identity=self._settings.identity)
        self._leader = dealer
        dealer.post(m.FollowerHello(self._host.index, self._host.incarnation))
        for message in self._for_leader:
            dealer.post(message)
        self._for_leader.clear()
        dealer.flush()
        while True:
            for item in await dealer.receive_batch():
                if isinstance(item, PeerGone):
                    raise LeaderLost(f"the leader of island {self._host.island} is gone: {item.reason}")
                for message in item.messages:
                    if isinstance(message, m.StartPart):
                        self._start_part(message)
                    elif isinstance(message, m.Refused):
                        raise LeaderLost(f"the leader refuses this host: {message.reason}")
                    else:
                        self.handle(message)
            self.settle()

    def _to_leader(self, instruction: g.SendToLeader) -> None:
        if self._leader is None:
            self._for_leader.append(instruction.message)
        else:
            self._leader.post(instruction.message)

    # -- bulk, which the peer socket brings --------------------------------------------------------------------------

    def edge_piece_came(self, message: m.EdgeShard, data: HostBytes) -> None:
        name = (message.device, message.region)
        self._edges.bytes_came(message.session, message.run, message.edge, name, data)

    def edge_piece_damaged(self, message: m.EdgeShard, sender: str, given: int, found: int) -> None:
        what = f"a piece of edge {message.edge} of run {message.run} of session {message.session}"
        error = self._damage(what, sender, message.nbytes, given, found)
        self._edges.failed(message.session, message.run, message.edge, error)

    def _damage(self, what: str, sender: str, nbytes: int, given: int, found: int) -> ErrorInfo:
        self._damaged_transfers += 1
        error = mismatch(what, sender, self._host.name, nbytes, given, found)
        log.error("%s (the %d. of this process)", error.message, self._damaged_transfers)
        return error

    def edge_failed(self, message: m.EdgeFailed) -> None:
        self._edges.failed(message.session, message.run, message.edge, message.error)

    def edge_piece_offered(self, message: m.EdgeOffer, sender: str, post: Callable[[m.Message], None]) -> None:
        if self._by_jax is None:
            raise ProtocolError("this executor takes no edges by JAX")
        self._by_jax.received(message, sender, post)

    def _call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        async def call() -> None:
            await trio.sleep(delay_s)
            function()
            self.settle()

        self._nursery.start_soon(call)

    def put_region_came(self, message: m.PutShard, data: HostBytes) -> None:
        self._puts.bytes_came(message.session, message.buffer, message.region, data)

    def put_region_damaged(self, message: m.PutShard, sender: str, given: int, found: int) -> None:
        what = f"a region of buffer {message.buffer} of session {message.session}"
        error = self._damage(what, sender, message.nbytes, given, found)
        self._puts.failed(message.session, message.buffer, error)

    def send_relayed(self, message: m.Relayed) -> None:
        self._to_scheduler(message)

    def follower_reported(self, host: int, message: m.Message) -> None:
        self.handle(g.HostReported(host, message))

    def fetch(self, message: m.Fetch, post: Callable[[m.Message], None], sender: BulkSender) -> None:
        self._fetches.fetch(message, post, sender)

    def trace(self, session: int, message: m.TraceRequest) -> m.TraceReply:
        return self._tracing.request(session, message)

    def ask_program(self, message: m.AskProgram, post: Callable[[m.Message], None]) -> None:
        self._compiler.ask(message, post)

    def profile(self, session: int, message: m.ProfileHost, post: Callable[[m.Message], None]) -> None:
        self._profiling.request(session, message, post)
