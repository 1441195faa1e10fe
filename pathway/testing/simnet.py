"""SimNet: a whole cluster in one thread over virtual time, from one seed.

The scheduler's, leaders' and followers' cores are the real ones, with the real messages; clients, workers, devices and
the network are simulated. Links delay at random, so messages of different peers overtake each other while each link
stays FIFO; faults kill processes, break connections and silence them. Everything that is random comes from the seed, so
a failing seed replays exactly:

    net = SimNet(seed=7, faults=Faults.some())
    net.run()                      # raises SimulationFailure, with the seed, if an invariant is broken

A plain event loop over a heap, and not trio with its MockClock: the cores need no tasks, so a history costs a heap
operation per message instead of task switches, thousands of histories can be looked at, and the order of events depends
on nothing but the seed.

Checked: O-1 (all hosts of an island start the same gangs in the same order), O-2 (a gang starts when its
inputs are there), O-3 (a run leaves for all its islands at once, and is expected there), O-4 (a session's runs keep
their order), O-5 (the scheduler speaks to leaders alone), O-7 (credits), O-8 (all that waits is listed; looked at while
validating), no run happens twice, every run ends (nothing deadlocks), results are what the program computes on every
host, nobody reads what was freed or donated, and nothing is left anywhere once the sessions are closed.
tests/test_order.py breaks these rules on purpose.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Protocol

from pathway.sched import events as e
from pathway.sched.core import SchedulerCore, SchedulerSettings
from pathway.sched.status import RUNS_SHOWN
from pathway.sched.validate import validate as validate_scheduler
from pathway.testing.sim_client import SimClient
from pathway.testing.sim_executor import SimExecutor
from pathway.testing.sim_island import SimWorker
from pathway.transport.messages import Message, StartPart

WAITS_EVERY = 16
"""Events of the scheduler after which a simulation that validates looks at all that waits."""


class SimulationFailure(AssertionError):
    """An invariant is broken. The message names the seed, which replays it."""


@dataclass(frozen=True)
class Faults:
    """How many of each fault strike in one history, and how likely programs fail by themselves."""

    executor_kills: int = 0
    worker_kills: int = 0
    silences: int = 0  # a worker's link carries nothing for longer than the scheduler waits
    client_kills: int = 0
    client_breaks: int = 0  # a client's connection breaks; the client resumes its session
    span_s: float = 2.0  # they strike within so long, most of them early
    gang_failure: float = 0.0
    compile_failure: float = 0.0

    @classmethod
    def some(cls) -> Faults:
        """A few of everything."""
        return cls(2, 1, 1, 1, 2, gang_failure=0.02, compile_failure=0.02)

    @property
    def any(self) -> bool:
        return self != Faults(span_s=self.span_s)


class Endpoint(Protocol):
    """A simulated process."""

    alive: bool

    def received(self, link: Link, message: Any) -> None: ...

    def closed(self, link: Link, reason: str) -> None: ...


class Link:
    """A connection between two processes: FIFO both ways, until it is closed or cut."""

    def __init__(self, net: SimNet, first: Endpoint, second: Endpoint) -> None:
        self._net = net
        self._ends = (first, second)
        self._last = [0.0, 0.0]
        self.open = True
        self.silent = False

    def send(self, sender: Endpoint, message: Any) -> None:
        if not self.open or self.silent:
            return
        way = 0 if sender is self._ends[0] else 1
        when = self._last[way] = max(self._last[way], self._net.now + self._net.latency_s())
        self._net.at(when, self._deliver, 1 - way, message)

    def _deliver(self, way: int, message: Any) -> None:
        if self.open and not self.silent and self._ends[way].alive:
            self._ends[way].received(self, message)

    def close(self, reason: str = "closed", by: Endpoint | None = None) -> None:
        """What is under way is lost. The other end (both ends, if nobody closes) is told, a little later."""
        if self.open:
            self.open = False
            for end in self._ends:
                if end is not by:
                    self._net.after(self._net.latency_s(), self._tell_closed, end, reason)

    @property
    def is_busy(self) -> bool:
        """Something is under way."""
        return max(self._last) >= self._net.now

    def finish(self, sender: Endpoint, message: Any) -> None:
        """Close after what was sent, and a last message, have arrived."""
        self.send(sender, message)
        way = 0 if sender is self._ends[0] else 1
        self._net.at(max(self._last[way], self._net.now), self.close, "closed by the other side", sender)

    def _tell_closed(self, end: Endpoint, reason: str) -> None:
        if end.alive:
            end.closed(self, reason)


class SimScheduler:
    """The shell around the real core."""

    def __init__(self, net: SimNet, settings: SchedulerSettings) -> None:
        self.net = net
        self.alive = True
        self.core = SchedulerCore(settings, random.Random(net.random.getrandbits(32)), net.now)
        self.stopped = ""
        self._keys: dict[Link, bytes] = {}
        self._links: dict[bytes, Link] = {}
        self._connections = 0
        self._handled = 0
        self._next_tick = float("inf")
        self._arm()

    def received(self, link: Link, message: Message) -> None:
        key = self._keys.get(link)
        if key is None:
            self._connections += 1
            key = self._keys[link] = self._connections.to_bytes(4, "big")
            self._links[key] = link
        self.handle(e.MessageReceived(key, message))

    def closed(self, link: Link, reason: str) -> None:
        key = self._keys.pop(link, None)
        if key is not None:
            self.handle(e.PeerClosed(key, reason))
            del self._links[key]

    def _forget(self, link: Link) -> None:
        """The scheduler has closed it, so nothing tells of its end."""
        key = self._keys.pop(link, None)
        if key is not None:
            del self._links[key]

    def handle(self, event: e.Event) -> None:
        net = self.net
        instructions = self.core.handle(event, net.now)
        self._check_dispatch(instructions)
        for instruction in instructions:
            if isinstance(instruction, e.Send):
                self._send(instruction)
            elif isinstance(instruction, e.Record):  # the disk is quick
                for send in instruction.then:
                    self._send(send)
            elif isinstance(instruction, e.Close):
                link = self._links[instruction.peer]
                link.finish(self, instruction.refused)
                self.net.after(1.0, self._forget, link)
            else:
                self.stopped = instruction.reason
        if net.validating:
            validate_scheduler(self.core)
            self._handled += 1
            if self._handled % WAITS_EVERY == 0:
                net.check_waits()
        self._arm()

    def _check_dispatch(self, instructions: Sequence[e.Instruction]) -> None:
        """A run leaves for all of its islands at once: none waits for another's inputs (O-3)."""
        parts: dict[tuple[int, int], int] = {}
        for instruction in instructions:
            if isinstance(instruction, e.Send) and isinstance(instruction.message, StartPart):
                key = (instruction.message.session, instruction.message.run)
                parts[key] = parts.get(key, 0) + 1
        for (session, number), count in parts.items():
            run = self.core.clients.sessions[session].runs.get(number)
            if run is not None and count < len(run.lanes):
                self.net.fail(f"O-3: run {number} leaves for {count} of its {len(run.lanes)} islands")

    def _send(self, instruction: e.Send) -> None:
        self.net.messages += 1
        link = self._links.get(instruction.peer)
        if link is not None:  # else its connection has closed meanwhile
            link.send(self, instruction.message)

    def _arm(self) -> None:
        deadline = self.core.next_deadline()
        if deadline is not None and (deadline < self._next_tick or self._next_tick <= self.net.now):
            self._next_tick = max(deadline, self.net.now)
            self.net.at(self._next_tick, self._tick)

    def _tick(self) -> None:
        if self.net.now >= self._next_tick:
            self._next_tick = float("inf")
            self.handle(e.Tick())


class SimNet:
    """A cluster of `islands` islands of `hosts` hosts with `devices` devices each, and `clients` clients that each
    start `runs` random runs, or clients of your own (see `sim_workload`). `validate`: check the state of every core
    after every event (slow)."""

    def __init__(
        self,
        seed: int,
        islands: int = 2,
        hosts: int = 2,
        devices: int = 2,
        clients: int | Sequence[Callable[[SimNet], SimClient]] = 2,
        runs: int = 20,
        faults: Faults | None = None,
        settings: SchedulerSettings | None = None,
        validate: bool = False,
    ) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.faults = faults or Faults()
        self.validating = validate
        self.now = 0.0
        self.messages = 0  # that the scheduler has sent
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self.executors: dict[str, SimExecutor] = {}  # by address; living ones
        self.begun: dict[int, set[tuple[str, int]]] = {}  # by session: (island, run)
        self.scheduler = SimScheduler(self, settings or SchedulerSettings(credits=self.random.randint(1, 6)))
        self.workers = [
            SimWorker(self, f"island{island}", hosts, host, devices)
            for island in range(islands)
            for host in range(hosts)
        ]
        self.gang_s: Callable[[int], float] = lambda session: self.random.expovariate(5000.0)
        """How long a session's gang holds its devices."""
        self.gang_ran: Callable[[str, tuple[int, int], float], None] = lambda island, run, began_s: None
        """Told of every gang that has ended: where, of which (session, run), and when it began."""
        self.clients = (
            [SimClient(self, f"client{number}", runs) for number in range(clients)]
            if isinstance(clients, int)
            else [make(self) for make in clients]
        )
        for worker in self.workers:
            self.after(self.random.random() * 0.2, worker.start)
        for client in self.clients:
            self.after(self.random.random() * 0.5, client.start)
        self._plan_faults()

    # -- the loop ---------------------------------------------------------------------------------------------------

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        if when < self.now:
            self.fail(f"something is to happen at {when:.6f} s, in the past")
        self._count += 1
        heappush(self._heap, (when, self._count, call, arguments))

    def after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + delay_s, call, *arguments)

    def latency_s(self) -> float:
        """Mostly tens of microseconds, sometimes much more: the tail is what reorders."""
        draw = self.random.random()
        return 20e-6 + 80e-6 * draw if draw < 0.95 else 20e-6 + draw * 5e-3

    def link(self, first: Endpoint, second: Endpoint) -> Link:
        return Link(self, first, second)

    def fail(self, reason: str) -> None:
        raise SimulationFailure(f"seed {self.seed}, at {self.now:.6f} s: {reason}")

    def run(self, limit_s: float = 600.0) -> None:
        """Run until every client has ended, then until every lease has, and check that nothing is left."""
        try:
            self.run_until(lambda: all(client.ended for client in self.clients), limit_s)
            if not all(client.ended for client in self.clients):
                self.fail(f"not over after {limit_s:g} s:\n  " + "\n  ".join(self.waits()))
            settled = self.now + self.scheduler.core.settings.peers.lease_s + 5.0
            self.run_until(lambda: False, settled)
            self._check_nothing_left()
        except SimulationFailure:
            raise
        except Exception as error:
            raise SimulationFailure(f"seed {self.seed}, at {self.now:.6f} s: {error!r}") from error

    def run_until(self, done: Callable[[], bool], limit_s: float) -> None:
        """Go on until `done`, at `limit_s` of virtual time at the latest."""
        while self._heap and not done() and self._heap[0][0] <= limit_s:
            self.now, _, call, arguments = heappop(self._heap)
            call(*arguments)

    def waits(self) -> list[str]:
        """Everything that waits, anywhere, with its reason (O-8)."""
        found = [f"{wait.what}: {wait.reason}" for wait in self.scheduler.core.waits(self.now)]
        for executor in self.executors.values():
            found += [
                f"{executor.address}: {number}: {reason}" for _, number, reason, _ in executor.core.waits(self.now)
            ]
        found += [f"{client.name}: {client.state()}" for client in self.clients if not client.ended]
        return found

    def check_waits(self) -> None:
        """Every run that is not over is listed, with what it waits for and since when (O-8)."""
        core = self.scheduler.core
        waits = core.waits(self.now)
        listed = {wait.what for wait in waits}
        for session in core.clients.sessions.values():
            for number in itertools.islice(session.runs, RUNS_SHOWN):
                if f"run {number} of session {session.name}" not in listed:
                    self.fail(f"O-8: run {number} of {session.name} is not listed among what waits")
        for wait in waits:
            if not wait.reason or wait.since_s < 0:
                self.fail(f"O-8: the scheduler does not say why {wait.what} waits")
        for executor in self.executors.values():
            executor.check_waits()

    def _check_nothing_left(self) -> None:
        core = self.scheduler.core
        validate_scheduler(core)
        if core.clients.sessions:
            self.fail(f"sessions are left: {[session.name for session in core.clients.sessions.values()]}")
        for island in core.cluster.islands.values():
            lane = island.lane
            if lane is not None and (lane.running or lane.queue or lane.registered):
                self.fail(f"island {island.name} keeps {len(lane.running)} runs, {len(lane.registered)} parts")
        if core.clients.plans.computation_count:
            self.fail("computations are left")
        for executor in self.executors.values():
            executor.check_nothing_left()

    # -- faults -----------------------------------------------------------------------------------------------------

    def _plan_faults(self) -> None:
        faults = self.faults
        for count, strike in (
            (faults.executor_kills, self._kill_executor),
            (faults.worker_kills, self._kill_worker),
            (faults.silences, self._silence_worker),
            (faults.client_kills, self._kill_client),
            (faults.client_breaks, self._break_client),
        ):
            for _ in range(count):
                self.after(0.3 + faults.span_s * self.random.random() ** 2, strike)

    def _kill_executor(self) -> None:
        if self.executors:
            self.random.choice(list(self.executors.values())).worker.kill_child("signal SIGKILL")

    def _kill_worker(self) -> None:
        worker = self.random.choice(self.workers)
        if worker.alive:
            worker.kill()
            self.workers.remove(worker)
            again = SimWorker(self, worker.island, worker.hosts, worker.host_index, worker.devices)
            self.workers.append(again)
            self.after(0.1 + 3.0 * self.random.random(), again.start)

    def _silence_worker(self) -> None:
        worker = self.random.choice(self.workers)
        if worker.alive and worker.scheduler is not None:
            worker.scheduler.silent = True

    def _kill_client(self) -> None:
        living = [client for client in self.clients if not client.ended]
        if living:
            self.random.choice(living).kill()

    def _break_client(self) -> None:
        living = [client for client in self.clients if not client.ended and client.link is not None]
        if living:
            link = self.random.choice(living).link
            assert link is not None
            link.close("connection reset")
