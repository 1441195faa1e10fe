"""A simulated executor of SimNet: the shell around the real leader's or follower's core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from pathway.dataflow.plan import Execute, Part
from pathway.errors import ErrorInfo
from pathway.executor import gangs as g
from pathway.executor.follower import FollowerCore
from pathway.executor.leader import LeaderCore
from pathway.testing.sim_devices import SimDevices
from pathway.testing.sim_programs import compute
from pathway.transport import messages as m
from pathway.version import PROTOCOL_VERSION, __version__

if TYPE_CHECKING:
    from pathway.testing.sim_island import SimWorker
    from pathway.testing.simnet import Link, SimNet

_decode_part = msgspec.msgpack.Decoder(Part).decode
_decode_arguments = msgspec.msgpack.Decoder(list[int | bytes]).decode


class SimEdge(Struct, frozen=True):
    """An edge's value from one of `senders` hosts."""

    session: int
    run: int
    edge: int
    sender: int
    senders: int
    value: int
    error: ErrorInfo | None


class SimPut(Struct, frozen=True):
    """A client's data for one buffer, straight to a host."""

    session: int
    buffer: int
    value: int


class Cell:
    """A value on one host. `error` may come late, when what should have computed it fails."""

    __slots__ = ("donated", "error", "value")

    def __init__(self, value: int = 0, error: ErrorInfo | None = None) -> None:
        self.value = value
        self.error = error
        self.donated = False


class _Run:
    __slots__ = ("arguments", "first_result", "info", "launched", "part", "slots")

    def __init__(self, part: Part, info: g.PartInfo, arguments: tuple[int | bytes, ...], first_result: int) -> None:
        self.part = part
        self.info = info
        self.arguments = arguments
        self.first_result = first_result
        self.slots: dict[int, Cell] = {}
        self.launched: dict[int, tuple[list[Cell], list[Cell], list[tuple[int, Cell]]]] = {}


class SimExecutor:
    """One host's executor: the shell around the real leader's or follower's core."""

    def __init__(self, net: SimNet, worker: SimWorker, form: m.FormIsland) -> None:
        self.net = net
        self.worker = worker
        self.alive = True
        self.island, self.incarnation = form.island, form.incarnation
        self.hosts, self.host = form.hosts, form.host_index
        self.per_host = worker.devices
        self.address = f"sim://{form.island}/{form.incarnation}/{form.host_index}"
        self.core: LeaderCore | FollowerCore = (
            LeaderCore(self.hosts, self.per_host) if self.host == 0 else FollowerCore()
        )
        self.devices: SimDevices | None = None
        self.directory: dict[str, m.IslandEntry] = {}
        self.computations: set[str] = set()
        self.parts: dict[tuple[int, int], tuple[Part, g.PartInfo]] = {}
        self.runs: dict[tuple[int, int], _Run] = {}
        self.store: dict[tuple[int, int], Cell] = {}
        self.parked_edges: dict[tuple[int, int, int], dict[int, SimEdge]] = {}
        self.parked_puts: dict[tuple[int, int], SimPut] = {}
        self.expected_puts: set[tuple[int, int]] = set()
        self.last_begun: dict[int, int] = {}
        self.closed_sessions: set[int] = set()
        self.scheduler: Link | None = None
        self.leader: Link | None = None
        self.followers: dict[int, Link] = {}
        self._follower_hosts: dict[Link, int] = {}
        self._held: list[m.Message] = []  # for followers that are not connected yet, or for the leader
        self._bulk: dict[str, Link] = {}

    # -- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if not self.alive:
            return
        self.scheduler = self.net.link(self, self.net.scheduler)
        self.scheduler.send(self, m.Hello(PROTOCOL_VERSION, __version__, "executor"))
        ready = m.ExecutorReady(
            self.island, self.incarnation, self.host, self.address, "sim", self.per_host, self.incarnation
        )
        self.scheduler.send(self, ready)
        self._beat()

    def _beat(self) -> None:
        if self.alive and self.scheduler is not None:
            self.scheduler.send(self, m.Ping(0))
            self.net.after(2.0, self._beat)

    def kill(self) -> None:
        self.alive = False
        self.net.executors.pop(self.address, None)
        if self.scheduler is not None:
            self.scheduler.close("connection reset", by=self)

    def closed(self, link: Link, reason: str) -> None:
        if link is self.scheduler:
            self.worker.kill_child(f"lost its scheduler: {reason}")

    # -- what comes -------------------------------------------------------------------------------------------------

    def received(self, link: Link, message: Any) -> None:
        if isinstance(message, SimEdge):
            self._edge(message)
        elif isinstance(message, SimPut):
            self._put_data(message)
        elif isinstance(message, m.FollowerHello):
            self.followers[message.host_index] = link
            self._follower_hosts[link] = message.host_index
            if len(self.followers) == self.hosts - 1:
                held, self._held = self._held, []
                for earlier in held:
                    self._perform(g.SendToFollowers(earlier))
        elif link in self._follower_hosts:
            self.handle(g.HostReported(self._follower_hosts[link], message))
        elif link is self.leader:
            self._ordered(message)
        else:
            self._from_scheduler(message)

    def _ordered(self, message: Any) -> None:
        if isinstance(message, m.StartPart):
            self.handle(g.PartSubmitted(message, tuple(_decode_arguments(message.arguments))))
            if self.host == 0:
                self._check_expects(message)
            if isinstance(self.core, LeaderCore) and self.core.is_late(message.session, message.run):
                self._tell_scheduler(m.PartsLate(((message.session, message.run),)))
        else:
            self.handle(message)

    def _check_expects(self, message: m.StartPart) -> None:
        """A run's part is there from its message on, with all that it expects, whatever its inputs are up to (O-3)."""
        known = (message.session, message.plan) in self.parts
        if known and message.run > self.last_begun.get(message.session, 0):
            self.net.fail(f"O-3: run {message.run} waits to begin on {self.address}")

    def _from_scheduler(self, message: m.Message) -> None:
        if self.host and isinstance(message, m.StartPart | m.PutOnIsland | m.FreeBuffers | m.CancelPart):
            self.net.fail(f"O-5: the scheduler sends {type(message).__name__} to a follower, {self.address}")
        if isinstance(message, m.Directory):
            self.directory = {entry.island: entry for entry in message.islands}
            if self.devices is None:
                self._join(self.directory[self.island])
        elif isinstance(message, m.RegisterComputation):
            self.computations.add(message.key)
        elif isinstance(message, m.RegisterPart):
            self._register(message)
        elif isinstance(message, m.CloseSession) and self.host:
            self.handle(g.SessionClosed(message.session))
        elif isinstance(message, m.IslandLost):
            self.directory.pop(message.island, None)
            if self.host == 0:
                self.handle(message)
        elif not isinstance(message, m.Welcome | m.Pong | m.Refused | m.Goodbye) and message is not None:
            self._ordered(message)

    def _join(self, entry: m.IslandEntry) -> None:
        """The island is formed: find the leader and the devices."""
        leader = self.net.executors.get(entry.hosts[0])
        if leader is None:
            return
        if leader.devices is None:
            leader.devices = SimDevices(self.net, self.island, self.hosts)
            leader.devices.executors[0] = leader
        self.devices = leader.devices
        self.devices.executors[self.host] = self
        if self.host:
            self.leader = self.net.link(self, leader)
            self.leader.send(self, m.FollowerHello(self.host, self.incarnation))
            held, self._held = self._held, []
            for message in held:
                self.leader.send(self, message)

    def _register(self, message: m.RegisterPart) -> None:
        part = g.with_result_gangs(_decode_part(message.payload))
        key = (message.session, message.plan)
        for gang in part.gangs:
            for step in gang.steps:
                if isinstance(step, Execute) and step.computation not in self.computations:
                    self.net.fail(f"R-1: {self.address} has part {key} before {step.computation}")
        if message.session in self.closed_sessions and self.host == 0:
            self.net.fail(f"{self.address} gets a part of a session that is closed")
        self.parts[key] = (part, g.part_info(part, self.per_host))
        self.handle(g.PartRegistered(*key, self.parts[key][1]))
        error = None
        if self.net.random.random() < self.net.faults.compile_failure:
            error = ErrorInfo("CompileError", f"plan {message.plan} fails to compile by chance")
        self.net.after(self.net.random.random() * 0.02, self._report, m.PartBound(*key, error))

    def _report(self, message: m.Message) -> None:
        """Something has happened on this host."""
        if self.alive:
            self.handle(g.HostReported(0, message) if self.host == 0 else message)

    # -- what is done -----------------------------------------------------------------------------------------------

    def handle(self, event: Any) -> None:
        for instruction in self.core.handle(event, self.net.now):
            self._perform(instruction)
        if self.net.validating:
            self.core.validate()

    def _perform(self, instruction: g.Instruction) -> None:
        match instruction:
            case g.Launch(session, run, gang):
                self._launch(session, run, gang)
            case g.Begin(message, arguments):
                self._begin(message, arguments)
            case g.End(session, run):
                del self.runs[session, run]
                self._forget_edges(lambda key: key[:2] == (session, run))
            case g.SendToScheduler(message):
                if isinstance(message, m.PartsFinished):
                    assert self.devices is not None
                    used = tuple(int(self.devices.used_us.pop(part, 0.0)) for part in message.parts)
                    message = m.PartsFinished(message.parts, sum(used), used)
                elif isinstance(message, m.PartFailed) and self.devices is not None:
                    self.devices.used_us.pop((message.session, message.run), None)
                self._tell_scheduler(message)
            case g.SendToFollowers(message):
                if len(self.followers) < self.hosts - 1:
                    self._held.append(message)
                for link in self.followers.values() if len(self.followers) == self.hosts - 1 else ():
                    link.send(self, message)
            case g.SendToLeader(message):
                if self.leader is None:
                    self._held.append(message)
                else:
                    self.leader.send(self, message)
            case g.Free(session, buffers):
                for buffer in buffers:
                    self.store.pop((session, buffer), None)
            case g.Poison(session, run, gang, error):
                self._poison(session, run, gang, error)
            case g.Put(message):
                self._put(message)
            case g.ForgetPlan(session, plan):
                self.parts.pop((session, plan), None)
            case g.GiveUp(session, run):
                if (session, run) not in self.runs:
                    self._forget_edges(lambda key: key[:2] == (session, run))
            case g.DropSession(session):
                self._drop_session(session)

    def _tell_scheduler(self, message: m.Message) -> None:
        assert self.scheduler is not None
        self.scheduler.send(self, message)

    def _begin(self, message: m.StartPart, arguments: tuple[int | bytes, ...]) -> None:
        key = (message.session, message.run)
        if self.host == 0:
            begun = self.net.begun.setdefault(message.session, set())
            if (self.island, message.run) in begun:
                self.net.fail(f"run {key} begins twice on {self.island}")
            begun.add((self.island, message.run))
            settings = self.net.scheduler.core.settings
            shares = self.hosts * self.per_host + len(self.net.clients)  # groups, and sessions with parts that are late
            if len(self.runs) >= settings.credits * shares:
                self.net.fail(f"O-7: {len(self.runs) + 1} parts in flight on {self.island}")
        if message.run <= self.last_begun.get(message.session, 0):
            self.net.fail(f"O-4: run {key} begins after run {self.last_begun[message.session]} on {self.address}")
        self.last_begun[message.session] = message.run
        part, info = self.parts[message.session, message.plan]
        self.runs[key] = _Run(part, info, arguments, message.first_result)
        for edge in info.edges:
            self._look_at_edge((*key, edge))

    def _launch(self, session: int, number: int, gang: int) -> None:
        run = self.runs[session, number]
        where = f"gang {gang} of run {number} on {self.address}"
        for position in run.info.gangs[gang].reads:
            argument, slot = run.arguments[position], run.part.arguments[position]
            if slot not in run.slots:
                if isinstance(argument, bytes):
                    run.slots[slot] = Cell(int.from_bytes(argument, "big"))
                elif (session, argument) in self.store:
                    run.slots[slot] = self.store[session, argument]
        inputs: list[Cell] = []
        outputs: list[Cell] = []
        sends: list[tuple[int, Cell]] = []
        for step in run.part.gangs[gang].steps:
            if isinstance(step, Execute):
                if self.host in {device // self.per_host for device in step.devices}:
                    read = [self._read(run, slot, where) for slot in step.inputs]
                    inputs += read
                    for place, slot in enumerate(step.outputs):
                        value = compute(int(step.computation[1:]), place, [cell.value for cell in read])
                        run.slots[slot] = Cell(value)
                        outputs.append(run.slots[slot])
                    for place in step.donates:
                        read[place].donated = True
            else:
                edge = next(edge for edge in run.part.edges_out if edge.index == step.edge)
                if self.host in {device // self.per_host for device in edge.source.devices}:
                    sends.append((step.edge, self._read(run, step.slot, where)))
            for slot in step.frees:
                run.slots.pop(slot, None)
        for result, slot in run.part.results:
            if result in run.info.gangs[gang].results and slot in run.slots:
                self.store[session, run.first_result + result] = run.slots[slot]
        run.launched[gang] = (inputs, outputs, sends)
        assert self.devices is not None
        self.devices.launch(self.host, (session, number, gang))

    def _read(self, run: _Run, slot: int, where: str) -> Cell:
        cell = run.slots.get(slot)
        if cell is None:
            self.net.fail(f"O-2: {where} reads slot {slot}, which is not there")
        assert cell is not None
        if cell.donated:
            self.net.fail(f"{where} reads slot {slot}, which was donated")
        return cell

    def gang_ended(self, gang: tuple[int, int, int], error: ErrorInfo | None) -> None:
        """The devices have finished a gang on all hosts."""
        run = self.runs.get(gang[:2])
        if run is None:
            return  # its session is closed
        inputs, outputs, sends = run.launched.pop(gang[2])
        error = next((cell.error for cell in inputs if cell.error is not None), None) or error
        for cell in outputs:
            cell.error = error
        for edge, cell in sends:
            self._push(run, gang, edge, cell.value, cell.error)
        if error is None:
            self._report(m.GangsDone((gang,)))
        else:
            self._report(m.GangFailed(*gang, error))

    def _poison(self, session: int, number: int, gang: int, error: ErrorInfo) -> None:
        run = self.runs[session, number]
        for step in run.part.gangs[gang].steps:
            if isinstance(step, Execute):
                run.slots.update((slot, Cell(error=error)) for slot in step.outputs)
            else:
                edge = next(edge for edge in run.part.edges_out if edge.index == step.edge)
                if self.host in {device // self.per_host for device in edge.source.devices}:
                    self._push(run, (session, number, gang), step.edge, 0, error)
        for result in run.info.gangs[gang].results:
            self.store[session, run.first_result + result] = Cell(error=error)

    # -- edges and puts ---------------------------------------------------------------------------------------------

    def _push(self, run: _Run, gang: tuple[int, int, int], number: int, value: int, error: ErrorInfo | None) -> None:
        edge = next(edge for edge in run.part.edges_out if edge.index == number)
        entry = self.directory.get(edge.target_island)
        if entry is None:
            lane = self.net.scheduler.core.cluster.islands[edge.target_island].lane
            if lane is not None and lane.island in self.directory:
                self.net.fail(f"R-3: {self.address} does not know {edge.target_island}")
            return
        senders = len({device // self.per_host for device in edge.source.devices})
        message = SimEdge(gang[0], gang[1], number, self.host, senders, value, error)
        for host in {device // entry.devices_per_host for device in edge.target.devices}:
            self._send_bulk(entry.hosts[host], message)

    def _send_bulk(self, address: str, message: Any) -> None:
        target = self.net.executors.get(address)
        if target is None:
            self._bulk.pop(address, None)
        else:
            if address not in self._bulk:
                self._bulk = {other: link for other, link in self._bulk.items() if link.is_busy}
                self._bulk[address] = self.net.link(self, target)
            self._bulk[address].send(self, message)

    def _edge(self, message: SimEdge) -> None:
        key = (message.session, message.run, message.edge)
        late = message.run <= self.last_begun.get(message.session, 0) and key[:2] not in self.runs
        if message.session in self.closed_sessions or late:
            return
        self.parked_edges.setdefault(key, {})[message.sender] = message
        if key[:2] in self.runs:
            self._look_at_edge(key)

    def _look_at_edge(self, key: tuple[int, int, int]) -> None:
        pieces = self.parked_edges.get(key)
        if not pieces:
            return
        failed = next((piece.error for piece in pieces.values() if piece.error is not None), None)
        senders = next(iter(pieces.values())).senders
        if failed is None and len(pieces) < senders:
            return
        values = {piece.value for piece in pieces.values()}
        if failed is None and len(values) > 1:
            self.net.fail(f"edge {key} brings different values to {self.address}")
        run = self.runs[key[:2]]
        edge = next(edge for edge in run.part.edges_in if edge.index == key[2])
        run.slots[edge.target_slot] = Cell(values.pop(), failed)
        del self.parked_edges[key]
        # Never within the instruction that began the run: the core is not to be entered twice.
        self.net.after(0.0, self._report, m.EdgeArrived(*key, failed))

    def _forget_edges(self, match: Any) -> None:
        self.parked_edges = {key: value for key, value in self.parked_edges.items() if not match(key)}

    def _put(self, message: m.PutOnIsland) -> None:
        key = (message.session, message.buffer)
        if self.host not in {device // self.per_host for device in message.layout.devices}:
            return
        if message.data is not None:
            self.store[key] = Cell(int.from_bytes(message.data, "big"))
        elif key in self.parked_puts:
            self._store_put(self.parked_puts.pop(key))
        else:
            self.expected_puts.add(key)

    def _put_data(self, message: SimPut) -> None:
        key = (message.session, message.buffer)
        if message.session in self.closed_sessions:
            return
        if key in self.expected_puts:
            self.expected_puts.discard(key)
            self._store_put(message)
        else:
            self.parked_puts[key] = message

    def _store_put(self, message: SimPut) -> None:
        self.store[message.session, message.buffer] = Cell(message.value)
        self.net.after(0.0, self._report, m.BufferArrived(message.session, message.buffer))

    def _drop_session(self, session: int) -> None:
        self.closed_sessions.add(session)
        for table in (self.parts, self.runs, self.store, self.parked_puts):
            for key in [key for key in table if key[0] == session]:
                del table[key]
        self.expected_puts = {key for key in self.expected_puts if key[0] != session}
        self._forget_edges(lambda key: key[0] == session)
        self.last_begun.pop(session, None)
        if self.devices is not None:
            self.devices.forget(session)

    def client_gone(self, session: int) -> None:
        """A client's own link has ended: what it sent before its session told of it is not wanted any more."""
        for key in [key for key in self.parked_puts if key[0] == session]:
            del self.parked_puts[key]

    def check_waits(self) -> None:
        """Every run that is not over can be listed, with its reason (O-8)."""
        waits = self.core.waits(self.net.now)
        unlisted = self.runs.keys() - {(session, number) for session, number, _, _ in waits}
        if unlisted:
            self.net.fail(f"O-8: {self.address} does not list {sorted(unlisted)} among what waits")
        for session, number, reason, since_s in waits:
            if not reason or since_s < 0:
                self.net.fail(f"O-8: {self.address} does not say why {number} of session {session} waits")

    def check_nothing_left(self) -> None:
        if not self.core.is_idle:
            self.net.fail(f"the core of {self.address} keeps something: {self.core.waits(self.net.now)}")
        for name in ("parts", "runs", "store", "parked_edges", "parked_puts", "expected_puts"):
            if getattr(self, name):
                self.net.fail(f"{self.address} keeps {name}: {getattr(self, name)}")
