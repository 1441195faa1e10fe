"""The simulated client of SimNet: submits random programs over its slices and checks what comes back.

It is also the reference for how a client survives a broken connection: it keeps what it sent until a Pong shows that it
arrived, resumes the session, and sends the rest again, in order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw

from pathway.dataflow.plan import Execute
from pathway.testing.sim_executor import SimPut
from pathway.testing.sim_programs import Program, evaluate, layout_of, random_program
from pathway.transport import messages as m
from pathway.version import PROTOCOL_VERSION, __version__

if TYPE_CHECKING:
    from pathway.testing.simnet import Link, SimNet

_encode = msgspec.msgpack.Encoder().encode
LARGEST_WINDOW = 40
"""Runs that a client has under way: more than an island's credits, so that queues form."""


@dataclass(eq=False)
class Buffer:
    """`value` None: an error, or what a run left that failed in part."""

    number: int
    slice: int
    island: str
    incarnation: int
    value: int | None
    pinned: int = 0  # runs under way that made it
    released: bool = False


@dataclass(eq=False)
class Submitted:
    program: Program
    results: list[Buffer]
    may_fail: bool
    cancelled: bool = False


@dataclass(eq=False)
class SimClient:
    net: SimNet
    name: str
    runs: int
    weight: float = 0.0
    priority: int = 0
    alive: bool = True
    ended: bool = False
    link: Link | None = None
    session: int = 0
    token: int = 0
    failures: int = 0  # runs that failed
    finished: int = 0
    slices: dict[int, m.SliceBound | None] = field(default_factory=dict)  # None: its island is lost, or not bound yet
    refused: int = 0
    directory: dict[str, m.IslandEntry] = field(default_factory=dict)
    plans: dict[int, Program] = field(default_factory=dict)
    failed_plans: set[int] = field(default_factory=set)
    under_way: dict[int, Submitted] = field(default_factory=dict)
    buffers: list[Buffer] = field(default_factory=list)
    last_run: int = 0
    last_plan: int = 0
    last_buffer: int = 0
    unacknowledged: deque[tuple[int, m.Message]] = field(default_factory=deque)  # with the Ping that follows it
    ping: int = 0
    working: bool = False
    welcome: bool = False

    # -- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.alive:
            self.welcome = False  # until then nothing is sent, or it would overtake what is to be sent again
            self.link = self.net.link(self, self.net.scheduler)
            hello = m.Hello(
                PROTOCOL_VERSION, __version__, "client", self.name, self.session, self.token,
                weight=self.weight, priority=self.priority,
            )  # fmt: skip
            self.link.send(self, hello)

    def _send(self, message: m.Message) -> None:
        self.unacknowledged.append((self.ping + 1, message))
        if self.link is not None and self.welcome:
            self.link.send(self, message)

    def _beat(self, link: Link) -> None:
        if self.alive and link is self.link:
            self.ping += 1
            link.send(self, m.Ping(self.ping))
            self.net.after(0.5, self._beat, link)

    def closed(self, link: Link, reason: str) -> None:
        if link is self.link:
            self.link = None
            self.net.after(0.2 * self.net.random.random(), self.start)

    def kill(self) -> None:
        self.alive = False
        self.ended = True
        self.net.after(0.1, self._tell_executors)
        if self.link is not None:
            self.link.close("connection reset", by=self)

    def state(self) -> str:
        return (
            f"{len(self.under_way)} runs under way (first {next(iter(self.under_way), None)}), {self.runs} to come, "
            f"slices {[bound and bound.island for bound in self.slices.values()]}, connected {self.link is not None}"
        )

    # -- what comes -------------------------------------------------------------------------------------------------

    def received(self, link: Link, message: Any) -> None:
        if link is not self.link:
            return
        match message:
            case m.RunsFinished(runs):
                for run in runs:
                    self._run_finished(run)
            case m.RunFailed(run, error):
                self._run_failed(run, f"{error.kind}: {error.message}")
            case m.Pong(number):
                while self.unacknowledged and self.unacknowledged[0][0] <= number:
                    self.unacknowledged.popleft()
            case m.Directory(islands):
                self.directory = {entry.island: entry for entry in islands}
            case m.DirectoryChange(formed, gone):
                for name in gone:
                    self.directory.pop(name, None)
                self.directory.update((entry.island, entry) for entry in formed)
            case m.SliceBound(number):
                if number in self.slices:
                    self.slices[number] = message
                    self._work()
            case m.SliceRefused(number):
                self.refused += 1
                if self.slices.pop(number, None) is None and not self.slices:
                    self._end()
                self._work()
            case m.IslandLost(island, incarnation):
                self._island_lost(island, incarnation)
            case m.PlanFailed(plan):
                self.failed_plans.add(plan)
                if not self.net.faults.any:
                    self.net.fail(f"{self.name}: plan {plan} failed without a fault: {message.error.message}")
            case m.Welcome():
                self._welcome(message, link)
            case m.Refused(kind, reason):
                if not self.net.faults.any:
                    self.net.fail(f"{self.name} is refused: {kind}: {reason}")
                self.link = None
                self.ended = True
                self.alive = False

    def _welcome(self, welcome: m.Welcome, link: Link) -> None:
        resumed = self.session == welcome.session
        self.welcome = True
        self.session, self.token = welcome.session, welcome.token
        if resumed:
            for _, message in self.unacknowledged:
                link.send(self, message)
        self._beat(link)  # after what is sent again: a Pong then says that all of it has arrived
        if resumed:
            return
        self._begin()

    def _begin(self) -> None:
        """The session is there: ask for slices."""
        for number in range(1, self.net.random.randint(1, 3) + 1):
            self.slices[number] = None
            devices = self.net.random.randint(1, 3)
            self._send(m.RequestSlice(number, devices, (("d", devices),), shared=True, wait=True))

    def _work(self) -> None:
        if not self.working and self.slices and all(self.slices.values()):
            self.working = True
            self._step()
        elif not self.slices:
            self._end()

    # -- what it does -----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        if not self.alive or self.ended:
            return
        random = self.net.random
        bound = [entry for entry in self.slices.values() if entry is not None]
        draw = random.random()
        if self.runs and bound and len(self.under_way) < LARGEST_WINDOW and draw < 0.7:
            self._submit(bound)
        elif bound and draw < 0.8:
            self._put(random.choice(bound))
        elif draw < 0.93:
            self._release_one()
        elif self.under_way:
            run = random.choice(list(self.under_way))
            self.under_way[run].cancelled = True
            self._send(m.CancelRun(run))
        if not self.runs and not self.under_way:
            self._end()
        else:
            self.net.after(random.expovariate(3000.0) if random.random() < 0.9 else 0.02, self._step)

    def _tell_executors(self) -> None:
        """Its links to executors end a little later than itself."""
        for executor in self.net.executors.values():
            executor.client_gone(self.session)

    def _end(self) -> None:
        self.ended = True
        self.net.after(0.1, self._tell_executors)
        if self.link is not None and self.net.random.random() < 0.8:
            self.link.finish(self, m.Goodbye())  # else its lease runs out
        elif self.link is not None:
            self.link.close("gone", by=self)
        self.alive = False

    def _program(self, bound: list[m.SliceBound]) -> int:
        """A plan over slices as they are bound now: an old one again, or a new one."""
        random = self.net.random
        current = {(entry.island, entry.incarnation) for entry in bound}
        slices = {entry.slice for entry in bound}  # one of them may have been lost with another island, or refused
        usable = [
            number
            for number, program in self.plans.items()
            if number not in self.failed_plans
            and current.issuperset(program.islands)
            and slices.issuperset(slice_number for slice_number, _ in program.results)
        ]
        if usable and random.random() < 0.7:
            return random.choice(usable)
        self.last_plan += 1
        chosen = random.sample(bound, random.randint(1, len(bound)))
        program = random_program(random, chosen, f"plan{self.last_plan}")
        for key in program.computations:
            self._send(m.RegisterComputation(key, b"", b""))
        payloads = []
        for part, (island, incarnation) in zip(program.parts, program.islands, strict=True):
            keys = tuple(
                {step.computation: None for gang in part.gangs for step in gang.steps if isinstance(step, Execute)}
            )
            payloads.append(m.PartPayload(island, incarnation, keys, _encode(part)))
        self._send(m.RegisterPlan(self.last_plan, f"plan{self.last_plan}", tuple(payloads)))
        self.plans[self.last_plan] = program
        if random.random() < 0.2:
            self._forget_plan()
        return self.last_plan

    def _forget_plan(self) -> None:
        number = next(iter(self.plans))
        if number != self.last_plan:
            del self.plans[number]
            self._send(m.ReleasePlan(number))

    def _submit(self, bound: list[m.SliceBound]) -> None:
        random = self.net.random
        number = self._program(bound)
        program = self.plans[number]
        used: set[Buffer] = set()
        taken: list[Buffer] = []
        values: dict[tuple[str, int], int] = {}
        lists: list[list[int | bytes]] = []
        uncertain = False  # an argument is, or may become, an error
        unknown = False
        for index, (island, incarnation) in enumerate(program.islands):
            arguments: list[int | bytes] = []
            for position, slice_number in enumerate(program.slices[index]):
                donated = (index, position) in program.donated
                usable = [
                    buffer
                    for buffer in self.buffers
                    if (buffer.slice, buffer.island, buffer.incarnation) == (slice_number, island, incarnation)
                    and buffer not in taken
                    and not (donated and buffer in used)
                    and (buffer.value is not None or random.random() < 0.3)
                ]
                if usable and random.random() < 0.8:
                    buffer = random.choice(usable)
                    used.add(buffer)
                    if donated:
                        taken.append(buffer)
                    unknown = unknown or buffer.value is None
                    uncertain = uncertain or buffer.value is None or buffer.pinned > 0
                    arguments.append(buffer.number)
                    values[island, position] = buffer.value or 0
                else:
                    value = random.randrange(256)
                    arguments.append(bytes([value]))
                    values[island, position] = value
            lists.append(arguments)
        self.runs -= 1
        self.last_run += 1
        first = self.last_buffer + 1
        self.last_buffer += len(program.results)
        results = []
        by_slice = {entry.slice: entry for entry in bound}
        for offset, (slice_number, formula) in enumerate(program.results):
            entry = by_slice[slice_number]
            expected = None if unknown else evaluate(formula, values)
            results.append(Buffer(first + offset, slice_number, entry.island, entry.incarnation, expected, pinned=1))
        self.under_way[self.last_run] = Submitted(program, results, may_fail=uncertain)
        self.buffers += results
        self._send(m.StartRun(self.last_run, number, first, tuple(Raw(_encode(entry)) for entry in lists)))
        for buffer in taken:
            self._release(buffer)

    def _put(self, bound: m.SliceBound) -> None:
        self.last_buffer += 1
        value = self.net.random.randrange(256)
        inline = self.net.random.random() < 0.5
        layout = layout_of(bound)
        self.buffers.append(Buffer(self.last_buffer, bound.slice, bound.island, bound.incarnation, value))
        data = bytes([value]) if inline else None
        self._send(m.PutBuffer(self.last_buffer, bound.island, bound.incarnation, layout, data))
        entry = self.directory.get(bound.island)
        if not inline and entry is not None:
            for host in {device // entry.devices_per_host for device in bound.devices}:
                target = self.net.executors.get(entry.hosts[host])
                if target is not None:
                    self.net.link(self, target).send(self, SimPut(self.session, self.last_buffer, value))

    def _release_one(self) -> None:
        if self.buffers:
            self._release(self.net.random.choice(self.buffers))

    def _release(self, buffer: Buffer) -> None:
        buffer.released = True
        self.buffers.remove(buffer)
        self._send(m.ReleaseBuffers(buffer.island, buffer.incarnation, (buffer.number,)))

    # -- how runs end -----------------------------------------------------------------------------------------------

    def _run_finished(self, run: int) -> None:
        submitted = self.under_way.pop(run, None)
        if submitted is None:
            if not self.net.faults.any:
                self.net.fail(f"{self.name}: run {run} has ended twice")
            return
        self.finished += 1
        for buffer in submitted.results:
            buffer.pinned = 0
            if not buffer.released and buffer.value is not None:
                self._check(run, buffer)

    def _check(self, run: int, buffer: Buffer) -> None:
        """The result is on all hosts of its slice, and is what the program computes."""
        entry, bound = self.directory.get(buffer.island), self.slices.get(buffer.slice)
        if entry is None or bound is None or entry.incarnation != buffer.incarnation:
            return
        for host in {device // entry.devices_per_host for device in bound.devices}:
            executor = self.net.executors.get(entry.hosts[host])
            if executor is None:
                continue
            cell = executor.store.get((self.session, buffer.number))
            if cell is None or cell.error is not None or cell.value != buffer.value:
                what = "is missing" if cell is None else f"is {cell.value} ({cell.error}), not {buffer.value}"
                self.net.fail(f"{self.name}: run {run} has finished, and buffer {buffer.number} on host {host} {what}")

    def _run_failed(self, run: int, why: str) -> None:
        submitted = self.under_way.pop(run, None)
        if submitted is None:
            if not self.net.faults.any:
                self.net.fail(f"{self.name}: run {run} has ended twice")
            return
        self.failures += 1
        if not (self.net.faults.any or submitted.may_fail or submitted.cancelled):
            self.net.fail(f"{self.name}: run {run} failed without a fault: {why}")
        for buffer in submitted.results:
            buffer.pinned = 0
            buffer.value = None

    def _island_lost(self, island: str, incarnation: int) -> None:
        for buffer in self.buffers:
            if (buffer.island, buffer.incarnation) == (island, incarnation):
                buffer.value = None
        for number, bound in self.slices.items():
            if bound is not None and (bound.island, bound.incarnation) == (island, incarnation):
                self.slices[number] = None
