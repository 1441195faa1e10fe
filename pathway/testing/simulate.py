"""What would my cluster do? The real scheduler, with simulated workers, devices, clients and network, in virtual time.

    python -m pathway.testing.simulate --islands 64 --hosts 8 --clients 16 --weights 1,2,4,8 --draw out.svg

Prints what each client gets, how long its runs wait, and whether a rule of the scheduler was broken: see
docs/simulation.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pathway.errors import ConfigError
from pathway.sched.core import SchedulerSettings
from pathway.sched.events import Send
from pathway.sched.policies import Policy, load_policy
from pathway.testing.sim_picture import draw
from pathway.testing.sim_workload import Workload, WorkloadClient, workload_clients
from pathway.testing.simnet import Faults, SimNet, SimulationFailure
from pathway.transport.messages import PartsFinished, StartRun

RUNS = 30_000

SAMPLES = 120
"""Points of the curves in the picture."""


@dataclass(frozen=True)
class Scenario:
    """A cluster and what its clients do. Slices are whole islands. `weights` and `lengths_us` are the clients' in
    turns; `seconds` of virtual time are looked at, after all clients are at work. Without `lengths_us`, computations
    are as long as makes about RUNS runs, and 1 ms at least."""

    islands: int = 8
    hosts: int = 2
    devices: int = 4
    clients: int = 4
    policy: str | Policy = "fair"
    seed: int = 0
    seconds: float = 5.0
    weights: tuple[float, ...] = (1.0,)
    lengths_us: tuple[float, ...] = ()
    steady: bool = False
    ahead: int = 32
    spread: int = 1
    slices: int = 0
    credits: int = 16
    faults: bool = False

    @property
    def policy_name(self) -> str:
        return self.policy if isinstance(self.policy, str) else self.policy.name

    @property
    def lengths(self) -> tuple[float, ...]:
        """Microseconds."""
        return self.lengths_us or (max(1000.0, 1e6 * self.islands * self.seconds / RUNS),)

    @property
    def slices_each(self) -> int:
        """Islands on which each client has a slice: so many that two clients share each, or as it says."""
        return min(self.islands, self.slices or max(1, -(-2 * self.islands // self.clients)))


@dataclass
class ClientResult:
    """`device_s`: seconds for which it held an island's devices. `share`: of what was used where it had slices.
    `fair_share`: what its weight gives it there, beside those who have slices there too."""

    name: str
    weight: float
    length_us: float
    runs: int
    failed: int
    device_s: float
    share: float
    fair_share: float
    wait_median_ms: float
    wait_99_ms: float
    curve: list[float] = field(default_factory=list)  # its share of all device time, sample by sample


@dataclass
class Result:
    """What came of a scenario."""

    scenario: Scenario
    clients: list[ClientResult]
    virtual_s: float
    real_s: float
    runs_per_s: float
    busy: float  # of the devices of islands on which somebody has a slice
    islands_used: int
    share_error: float  # the largest difference between share and fair share, in parts of the fair share
    messages_per_run: float  # that the scheduler sent for it
    core_us_per_run: float
    islands_lost: int
    sessions_lost: int
    violations: list[str] = field(default_factory=list)
    sample_s: float = 0.0
    busy_curve: list[float] = field(default_factory=list)


def simulate(scenario: Scenario, progress: Callable[[float], None] = lambda part: None) -> Result:
    """Play it. `progress` is told how much of it (0 to 1) has been played. A rule that is broken ends it, and is in
    `violations`. Raises `ConfigError` for a scenario that cannot be."""
    _check(scenario)
    began = time.perf_counter()
    net = _net(scenario)
    clients = workload_clients(net)
    used: dict[str, dict[int, float]] = {}  # seconds, by island and session
    curves: list[dict[int, float]] = []
    violations: list[str] = []
    at_work_s = 0.0
    sent = core_s = 0.0
    meter = _Meter(net)
    try:
        net.run_until(lambda: all(client.finished for client in clients), 120.0)
        if not all(client.finished or client.ended for client in clients):
            net.fail("not every client is at work after 120 s:\n  " + "\n  ".join(net.waits()[:20]))
        at_work_s = net.now
        meter.start(clients)
        for sample in range(SAMPLES):
            net.run_until(lambda: False, at_work_s + scenario.seconds * (sample + 1) / SAMPLES)
            curves.append(meter.sample())
            progress((sample + 1) / SAMPLES)
        used, sent, core_s = meter.used, meter.messages, meter.core_s
        for client in clients:
            client.stop()
        net.run(limit_s=net.now + 120.0)
    except SimulationFailure as failure:
        violations.append(str(failure))
    return _result(scenario, net, clients, used, curves, violations, sent, core_s, meter, time.perf_counter() - began)


def _check(scenario: Scenario) -> None:
    for name in ("islands", "hosts", "devices", "clients", "ahead", "spread", "credits"):
        if getattr(scenario, name) < 1:
            raise ConfigError(f"{name} must be 1 or more")
    if scenario.spread > scenario.slices_each:
        raise ConfigError(
            f"a run over {scenario.spread} islands needs as many slices; each client has {scenario.slices_each}"
        )
    if scenario.seconds <= 0 or min(scenario.weights) <= 0 or min(scenario.lengths) <= 0:
        raise ConfigError("seconds, weights and lengths must be more than nothing")


def _policy(scenario: Scenario) -> Policy:
    return load_policy(scenario.policy) if isinstance(scenario.policy, str) else scenario.policy


def _net(scenario: Scenario) -> SimNet:
    names = [f"island{number}" for number in range(scenario.islands)]
    step = scenario.slices_each
    makers: list[Callable[[SimNet], WorkloadClient]] = []
    weights, lengths = itertools.cycle(scenario.weights), itertools.cycle(scenario.lengths)
    for number in range(scenario.clients):
        wanted = [names[(number * step + offset) % scenario.islands] for offset in range(step)]
        weight, length_us = next(weights), next(lengths)
        workload = Workload(
            step,
            scenario.spread,
            scenario.hosts * scenario.devices,
            scenario.ahead,
            length_us / 1e6,
            scenario.steady,
            weight,
        )
        makers.append(
            partial(
                WorkloadClient, name=f"client{number}", runs=0, weight=weight, workload=workload, wanted=wanted
            )
        )  # fmt: skip
    faults = None
    if scenario.faults:
        some = max(1, scenario.islands // 64)
        faults = Faults(2 * some, some, some, 0, max(1, scenario.clients // 8), span_s=scenario.seconds)
    settings = SchedulerSettings(credits=scenario.credits, policy=_policy(scenario))
    net = SimNet(
        scenario.seed, scenario.islands, scenario.hosts, scenario.devices, makers, faults=faults, settings=settings
    )
    lengths_s: dict[int, Workload] = {}

    def gang_s(session: int) -> float:
        workload = lengths_s.get(session)
        if workload is None:
            lengths_s.update((client.session, client.workload) for client in workload_clients(net))
            workload = lengths_s[session]
        return workload.length_s if workload.steady else net.random.expovariate(1 / workload.length_s)

    net.gang_s = gang_s
    return net


class _Meter:
    """Measures between `start` and the last `sample`. `core_s`: the processor time that the scheduler's core takes for
    runs, as they are submitted and as they end; `messages`: what it sends then."""

    def __init__(self, net: SimNet) -> None:
        self.used: dict[str, dict[int, float]] = {}
        self.core_s = 0.0
        self.messages = 0
        self.runs = 0
        self._net = net
        self._clients: Sequence[WorkloadClient] = ()
        self._of_session: dict[int, WorkloadClient] = {}
        self._sample: dict[int, float] = {}
        self._measuring = False
        self._since_s = 0.0
        self._first_run = 0
        net.gang_ran = self._gang_ran
        handle = net.scheduler.core.handle

        def timed(event: Any, now: float) -> Any:
            if not isinstance(getattr(event, "message", None), StartRun | PartsFinished):
                return handle(event, now)
            began = time.thread_time()
            instructions = handle(event, now)
            self.core_s += time.thread_time() - began
            self.messages += sum(isinstance(instruction, Send) for instruction in instructions)
            return instructions

        net.scheduler.core.handle = timed  # type: ignore[method-assign]

    def start(self, clients: Sequence[WorkloadClient]) -> None:
        self._clients = clients
        self._measuring = True
        self._since_s = self._net.now
        self.core_s = 0.0
        self.messages = 0
        self._first_run = sum(client.finished for client in clients)
        for client in clients:
            client.waited_s.clear()

    def sample(self) -> dict[int, float]:
        """Seconds of each session since the last sample."""
        taken, self._sample = self._sample, {}
        self.runs = sum(client.finished for client in self._clients) - self._first_run
        return taken

    def _gang_ran(self, island: str, run: tuple[int, int], began_s: float) -> None:
        session, number = run
        client = self._of_session.get(session)
        if client is None:
            self._of_session = {client.session: client for client in workload_clients(self._net)}
            client = self._of_session[session]
        client.gang_ran(number, began_s)
        if self._measuring:
            took_s = self._net.now - max(began_s, self._since_s)
            here = self.used.setdefault(island, {})
            here[session] = here.get(session, 0.0) + took_s
            self._sample[session] = self._sample.get(session, 0.0) + took_s


def _result(
    scenario: Scenario, net: SimNet, clients: Sequence[WorkloadClient], used: dict[str, dict[int, float]],
    curves: Sequence[dict[int, float]], violations: list[str], sent: float, core_s: float, meter: _Meter, real_s: float,
) -> Result:  # fmt: skip
    seconds = scenario.seconds
    weights: dict[str, float] = {}  # of all that have slices on an island
    for client in clients:
        for island in client.wanted:
            weights[island] = weights.get(island, 0.0) + client.workload.weight
    results = []
    for client in clients:
        held_s = sum(used.get(island, {}).get(client.session, 0.0) for island in client.wanted)
        there_s = sum(sum(used.get(island, {}).values()) for island in client.wanted)
        fair_s = sum(
            sum(used.get(island, {}).values()) * client.workload.weight / weights[island] for island in client.wanted
        )
        waits = sorted(client.waited_s)
        results.append(
            ClientResult(
                name=client.name,
                weight=client.workload.weight,
                length_us=client.workload.length_s * 1e6,
                runs=len(waits),
                failed=client.failures,
                device_s=held_s,
                share=held_s / there_s if there_s else 0.0,
                fair_share=fair_s / there_s if there_s else 0.0,
                wait_median_ms=_quantile_ms(waits, 0.5),
                wait_99_ms=_quantile_ms(waits, 0.99),
                curve=[curve.get(client.session, 0.0) / (sum(curve.values()) or 1.0) for curve in curves],
            )
        )
    sample_s = seconds / SAMPLES
    capacity_s = len(weights) * seconds
    runs = max(1, meter.runs)
    return Result(
        scenario=scenario,
        clients=results,
        virtual_s=net.now,
        real_s=real_s,
        runs_per_s=meter.runs / seconds,
        busy=sum(sum(here.values()) for here in used.values()) / capacity_s,
        islands_used=len(weights),
        share_error=max((abs(r.share - r.fair_share) / r.fair_share for r in results if r.fair_share), default=0.0),
        messages_per_run=sent / runs,
        core_us_per_run=1e6 * core_s / runs,
        islands_lost=sum(island.incarnation - 1 for island in net.scheduler.core.cluster.islands.values()),
        sessions_lost=sum(client.ended and not client.stopping for client in clients),
        violations=violations,
        sample_s=sample_s,
        busy_curve=[sum(curve.values()) / (len(weights) * sample_s) for curve in curves],
    )


def _quantile_ms(sorted_s: Sequence[float], q: float) -> float:
    return 1e3 * sorted_s[int(q * (len(sorted_s) - 1))] if sorted_s else 0.0


# -- the command -------------------------------------------------------------------------------------------------------


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers: 1,2,4") from None


def _parser() -> argparse.ArgumentParser:
    default = Scenario()
    parser = argparse.ArgumentParser(
        prog="python -m pathway.testing.simulate",
        description="What would my cluster do? Plays the real scheduler with simulated workers, devices, clients and "
        "network, in virtual time.",
        epilog="examples:\n"
        "  python -m pathway.testing.simulate --clients 4 --weights 1,2,4,8 --islands 1 --draw shares.svg\n"
        "  python -m pathway.testing.simulate --islands 4096 --hosts 8 --clients 64 --policy fair --seed 7 --faults\n"
        "  python -m pathway.testing.simulate --policy my_module:MyPolicy --lengths-us 300,5000",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--islands", type=int, default=default.islands, metavar="N", help=f"({default.islands})")
    add("--hosts", type=int, default=default.hosts, metavar="H", help=f"of each island ({default.hosts})")
    add("--devices", type=int, default=default.devices, metavar="D", help=f"of each host ({default.devices})")
    add("--clients", type=int, default=default.clients, metavar="C", help=f"({default.clients})")
    add("--policy", default=default.policy, metavar="P", help="fair, fifo, priority, or yours as module:object (fair)")
    add("--seed", type=int, default=default.seed, metavar="S", help="what is random comes from it (0)")
    add("--seconds", type=float, default=default.seconds, metavar="S", help="of virtual time to look at (5)")
    add("--weights", type=_numbers, default=default.weights, metavar="W,W", help="of the clients, in turns (1)")
    add("--lengths-us", type=_numbers, default=default.lengths_us, metavar="L,L",
        help="how long the clients' computations are on average, in turns (1000, more on large clusters)")  # fmt: skip
    add("--steady", action="store_true", help="every computation takes its average")
    add(
        "--ahead",
        type=int,
        default=default.ahead,
        metavar="N",
        help=f"runs that a client keeps under way ({default.ahead})",
    )
    add(
        "--slices", type=int, default=0, metavar="N", help="of each client (so many that two clients share each island)"
    )
    add("--spread", type=int, default=default.spread, metavar="N", help="islands of each run (1)")
    add("--credits", type=int, default=default.credits, metavar="K", help=f"of each island ({default.credits})")
    add("--faults", action="store_true", help="kill executors and workers, silence links, break connections")
    add("--draw", type=Path, metavar="FILE", help="write a picture (SVG)")
    add("--json", action="store_true", help="print the whole result as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = vars(_parser().parse_args(arguments))
    picture, as_json = options.pop("draw"), options.pop("json")
    try:
        with _bar() as bar:
            result = simulate(Scenario(**options), bar)
    except ConfigError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if picture is not None:
        picture.write_text(draw(result))
    print(json.dumps(asdict(result)) if as_json else describe(result))
    if picture is not None and not as_json:
        print(f"picture: {picture}")
    return 1 if result.violations else 0


def _bar() -> Any:
    if not sys.stderr.isatty():
        return nullcontext(lambda part: None)
    from rich.console import Console
    from rich.progress import Progress

    class Bar(Progress):
        def __enter__(self) -> Any:
            super().__enter__()
            task = self.add_task("virtual time", total=1.0)
            return lambda part: self.update(task, completed=part)

    return Bar(console=Console(stderr=True), transient=True)


def describe(result: Result) -> str:
    """The result for people."""
    s = result.scenario
    rows = [("client", "weight", "length", "runs", "failed", "device time", "share", "by weight", "wait", "99 %")]
    rows += [
        (
            client.name, f"{client.weight:g}", f"{client.length_us:g} us", f"{client.runs:,}", f"{client.failed:,}",
            f"{client.device_s:.2f} s", f"{100 * client.share:.1f} %", f"{100 * client.fair_share:.1f} %",
            f"{client.wait_median_ms:.2f} ms", f"{client.wait_99_ms:.2f} ms",
        )
        for client in result.clients
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    shown = rows if len(rows) <= 33 else [*rows[:33], ("...",) + ("",) * (len(rows[0]) - 1)]
    table = "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in shown)
    lines = [
        f"{s.islands:,} islands of {s.hosts} x {s.devices} devices, {s.clients} clients, policy {s.policy_name}, seed "
        f"{s.seed}",
        table,
        f"throughput   {result.runs_per_s:,.0f} runs/s; devices of the {result.islands_used:,} islands in use "
        f"{100 * result.busy:.1f} % busy",
        f"shares       at most {100 * result.share_error:.1f} % off what weights give",
        f"scheduler    {result.core_us_per_run:.1f} us of its core and {result.messages_per_run:.2f} messages a run",
        f"faults       {result.islands_lost} islands lost and formed again, {result.sessions_lost} sessions lost",
        f"violations   {len(result.violations) or 'none'}",
        *(f"  {violation}" for violation in result.violations),
        f"{s.seconds:g} s looked at, of {result.virtual_s:.1f} s, in {result.real_s:.1f} s",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
