"""How fast arrays move between islands, and to and from a client, beside what the machine itself can do.

`python -m bench.transfer [--quick]`. The floors are measured in the same run, in turns with ours: a raw ZeroMQ loop in
frames of 1 MiB over TCP loopback, into memory that is there, and memcpy between two warm arrays. So is
`jax.experimental.transfer`. Islands are one host of one CPU device each.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bench.dispatch import free_port
from bench.harness import Goal, Measure, interleaved_medians, note, note_machine, report
from bench.leftovers import Watched
from bench.subject import Subject, SubjectError

BENCH = "transfer"
KIB, MIB = 1 << 10, 1 << 20

SHARED, SOCKETS, CURVE = "shared memory", "TCP", "TCP with keys"
RAW_SOCKET, MEMCPY, JAX_TRANSFER = "raw ZeroMQ", "memcpy", "jax.experimental.transfer"

LARGE = (16 * MIB, 64 * MIB, 256 * MIB)
EVERY_SIZE = (4 * KIB, 64 * KIB, MIB, *LARGE)

STAGE_US = 20_000
MICROBATCHES = 16


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long is measured."""

    rounds: int
    round_s: float
    churn_s: float


FULL = Effort(rounds=7, round_s=0.5, churn_s=6.0)
QUICK = Effort(rounds=3, round_s=0.2, churn_s=2.0)


def size_text(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


# -- subjects ---------------------------------------------------------------------------------------------------------


def pathway_subject(name: str, environment: Mapping[str, str]) -> Subject:
    flags = {SHARED: [], SOCKETS: ["--sockets"], CURVE: ["--sockets", "--keys"]}[name]
    return Subject(name, [[sys.executable, "-m", "bench.pathway_transfer", *flags]], environment=environment)


def raw_subject() -> Subject:
    command = [sys.executable, "-m", "bench.raw_transfer"]
    port = str(free_port())
    return Subject("raw", [[*command, role, port] for role in ("send", "receive")])


def jax_subject(directory: str) -> Subject:
    command = [sys.executable, "-m", "bench.jax_transfer"]
    meeting_point = str(Path(directory) / "address")
    return Subject(JAX_TRANSFER, [[*command, role, meeting_point] for role in ("pull", "offer")])


def asking(subject: Subject, do: str, **arguments: object) -> Measure:
    """Has the subject do something so many times."""

    def measure(calls: int) -> float:
        seconds: float = subject.ask(do, count=calls, **arguments)
        return seconds

    return measure


def pulling(subject: Subject, uuids: Iterator[int], nbytes: int, at_once: int) -> Measure:
    """Has JAX transfer arrays, `at_once` of them together: a call is so many transfers."""

    def measure(calls: int) -> float:
        seconds = 0.0
        for _ in range(calls):
            first = next(itertools.islice(uuids, at_once - 1, None)) - at_once + 1
            subject.ask("prepare", first=first, nbytes=nbytes, count=at_once)
            seconds += subject.ask("measure", first=first, nbytes=nbytes, count=at_once, at_once=True)
        return seconds

    return measure


# -- what is measured -------------------------------------------------------------------------------------------------


class Bench:
    """The subjects, and a method for each thing that is promised."""

    def __init__(self, effort: Effort, ours: Mapping[str, Subject], raw: Subject, jax: Subject) -> None:
        self.effort = effort
        self.ours = ours
        self.raw = raw
        self.jax = jax
        self._uuids = iter(range(1 << 60))

    def medians(self, measures: Mapping[str, Measure]) -> dict[str, float]:
        return interleaved_medians(measures, rounds=self.effort.rounds, round_s=self.effort.round_s)

    def beside_floors(self) -> None:
        """Island to island, by either way, beside the floor of that way; and what keys cost."""
        for nbytes in LARGE:
            measures = {name: asking(subject, "edge", nbytes=nbytes) for name, subject in self.ours.items()}
            measures[RAW_SOCKET] = asking(self.raw, "socket", nbytes=nbytes)
            measures[MEMCPY] = asking(self.raw, "memcpy", nbytes=nbytes)
            seconds = self.medians(measures)
            rates = {name: nbytes / median / 1e9 for name, median in seconds.items()}
            for way, rival, goal in (
                (SHARED, MEMCPY, Goal("ratio", ">=", 0.8)),
                (SOCKETS, RAW_SOCKET, Goal("ratio", ">=", 0.85)),
                (CURVE, SOCKETS, None),
            ):
                case = f"island to island, {way}, {size_text(nbytes)}"
                report(BENCH, case, rates[way], "GB/s", rival=rival, rival_value=rates[rival], goal=goal)

    def beside_jax(self) -> None:
        """Several arrays at once, from island to island, beside as many of JAX's own transfers."""
        for nbytes in EVERY_SIZE:
            arrays = max(2, min(16, 256 * MIB // nbytes))
            measures = {
                SHARED: asking(self.ours[SHARED], "edges", nbytes=nbytes, arrays=arrays),
                JAX_TRANSFER: pulling(self.jax, self._uuids, nbytes, arrays),
            }
            rates = {name: arrays * nbytes / median / 1e9 for name, median in self.medians(measures).items()}
            case = f"{arrays} arrays of {size_text(nbytes)}, island to island"
            goal = Goal("ratio", ">=", 1.0)
            report(
                BENCH, case, rates[SHARED], "GB/s", rival=JAX_TRANSFER, rival_value=rates[JAX_TRANSFER], goal=goal
            )  # fmt: skip

    def hops(self) -> None:
        """From device to device, inside a program whose every hop needs the one before."""
        for name in (SHARED, SOCKETS):
            runs = max(5, int(self.effort.rounds * self.effort.round_s * 10))
            hop_s: list[float] = self.ours[name].ask("hops", nbytes=4 * KIB, count=runs)
            goal = Goal("value", "<=", 250)
            report(BENCH, f"a hop of 4 KiB, {name}", statistics.median(hop_s) * 1e6, "us", goal=goal)

    def clients(self) -> None:
        """What a client puts and gets."""
        nbytes = 256 * MIB
        for do in ("put", "get"):
            measures = {name: asking(self.ours[name], do, nbytes=nbytes) for name in (SHARED, SOCKETS)}
            measures[RAW_SOCKET] = asking(self.raw, "socket", nbytes=nbytes)
            measures[MEMCPY] = asking(self.raw, "memcpy", nbytes=nbytes)
            rates = {name: nbytes / median / 1e9 for name, median in self.medians(measures).items()}
            for way, rival in ((SHARED, MEMCPY), (SOCKETS, RAW_SOCKET)):
                case = f"pw.{do} of {size_text(nbytes)}, {way}"
                goal = Goal("ratio", ">=", 0.7)
                report(BENCH, case, rates[way], "GB/s", rival=rival, rival_value=rates[rival], goal=goal)
        many = asking(self.ours[SHARED], "put many", nbytes=4 * KIB, arrays=1000)
        median = self.medians({SHARED: many})[SHARED]
        report(BENCH, "1,000 arrays of 4 KiB in one pw.put", median * 1e3, "ms", goal=Goal("value", "<=", 20))

    def overlap(self) -> None:
        """Two stages of a known length on two islands: with transfers that count, beside transfers of nothing."""
        for name in (SHARED, SOCKETS):
            measures = {
                size_text(nbytes): asking(
                    self.ours[name], "stages", nbytes=nbytes, wait_us=STAGE_US, microbatches=MICROBATCHES
                )
                for nbytes in (4 * KIB, 16 * MIB)
            }
            rates = {size: MICROBATCHES / median for size, median in self.medians(measures).items()}
            report(
                BENCH,
                f"stages of {STAGE_US // 1000} ms with 16 MiB between them, {name}",
                rates["16 MiB"],
                "microbatches/s",
                rival="the same with 4 KiB",
                rival_value=rates["4 KiB"],
                goal=Goal("ratio", ">=", 0.97),
            )

    def memory(self, watched: Mapping[str, Watched]) -> None:
        """What executors hold at most while arrays move, beyond those arrays: the mean of the two."""
        nbytes, in_flight = 32 * MIB, 4
        for name in (SHARED, SOCKETS):
            executors = [pid for pid, line in watched[name].processes().items() if "pathway.executor.main" in line]
            self.ours[name].ask("edge", nbytes=nbytes, count=1)
            before = sum(pss_bytes(pid) for pid in executors)
            with sampling(lambda pids=executors: sum(pss_bytes(pid) for pid in pids)) as samples:  # type: ignore[misc]
                moved = self.ours[name].ask("churn", nbytes=nbytes, in_flight=in_flight, seconds=self.effort.churn_s)
            beyond = max(samples) - before - in_flight * nbytes
            note(f"{moved} arrays moved by {name} while memory was looked at {len(samples)} times")
            case = f"memory beyond the arrays, {name}"
            goal = Goal("value", "<=", 64)
            report(BENCH, case, beyond / max(1, len(executors)) / MIB, "MiB a process", goal=goal)


def pss_bytes(pid: int) -> int:
    """The process's memory, with its share of what it shares."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * KIB
    return 0


@contextlib.contextmanager
def sampling(read: Callable[[], int], every_s: float = 0.02) -> Iterator[list[int]]:
    """What `read` gives, again and again while the block runs."""
    samples = [read()]
    over = threading.Event()

    def sample() -> None:
        while not over.wait(every_s):
            samples.append(read())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


PARTS = ("beside_floors", "beside_jax", "hops", "clients", "overlap", "memory")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fraction of the time, for less exact figures")
    parser.add_argument("--only", choices=PARTS, action="append", help="leave out the others")
    options = parser.parse_args(argv)
    note_machine("jax", "pyzmq", "trio", "xxhash")
    with contextlib.ExitStack() as running:
        watched = {name: running.enter_context(contextlib.closing(Watched())) for name in (SHARED, SOCKETS, CURVE)}
        ours = {
            name: running.enter_context(pathway_subject(name, watch.environment)) for name, watch in watched.items()
        }
        raw = running.enter_context(raw_subject())
        jax = running.enter_context(jax_subject(running.enter_context(tempfile.TemporaryDirectory())))
        bench = Bench(QUICK if options.quick else FULL, ours, raw, jax)
        for part in options.only or PARTS:
            try:
                if part == "memory":
                    bench.memory(watched)
                else:
                    getattr(bench, part)()
            except SubjectError as error:
                note(f"{part} is left out: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
