"""How a device is shared between clients: the paper's Figures 8, 9 and 11.

`python -m bench.sharing [--quick]`. Every client is a process of its own. Computations hold their device and use no
core (`bench.device_wait`), so what is measured is the runtime. Shares are counted at the clients, by what ended there.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.harness import Goal, note, note_machine, report
from bench.subject import Subject
from pathway.dataflow.draw import draw_timeline
from pathway.embedded import start_local_cluster

BENCH = "sharing"
SHARE_WINDOW_S = 5.0
LATE_MS = 1.0
SHOWN_S = 0.15


@contextmanager
def clients_of(address: str, weights: Sequence[float]) -> Iterator[list[Subject]]:
    """One process for each weight."""
    clients = []
    try:
        for number, weight in enumerate(weights):
            command = [sys.executable, "-m", "bench.sharing_client", "--address", address]
            command += ["--name", f"client{number}", "--weight", str(weight)]
            clients.append(Subject(f"client{number}", [command]))
        yield clients
    finally:
        for client in clients:
            client.close()


def counts(clients: Sequence[Subject]) -> list[int]:
    return [client.ask("count") for client in clients]


def worst_share_error(clients: Sequence[Subject], weights: Sequence[float], seconds: float) -> float:
    """The largest relative error of any client's share over any window of SHARE_WINDOW_S."""
    samples = [(time.perf_counter(), counts(clients))]
    while samples[-1][0] - samples[0][0] < seconds:
        time.sleep(0.5)
        samples.append((time.perf_counter(), counts(clients)))
    worst = 0.0
    for began, before in samples:
        after = next((count for when, count in samples if when - began >= SHARE_WINDOW_S), None)
        if after is None:
            break
        ended = [late - early for early, late in zip(before, after, strict=True)]
        for count, weight in zip(ended, weights, strict=True):
            share = weight / sum(weights)
            worst = max(worst, abs(count / sum(ended) - share) / share)
    return worst


def shares(address: str, seconds: float) -> None:
    for weights in ((1.0, 1.0, 1.0, 1.0), (1.0, 2.0, 4.0, 8.0)):
        with clients_of(address, weights) as clients:
            for wait_us in (300, 1000, 5000):
                for client in clients:
                    client.ask("begin", wait_us=wait_us, window=64)
                time.sleep(1.0)
                error = worst_share_error(clients, weights, seconds)
                for client in clients:
                    client.ask("end")
                named = ":".join(f"{weight:g}" for weight in weights)
                case = f"{named}, {wait_us / 1000:g} ms: worst error of a share over {SHARE_WINDOW_S:g} s"
                report(BENCH, case, error, "fraction", goal=Goal("value", "<=", 0.02))


def aggregates(address: str, seconds: float, most: int) -> None:
    raw = Subject("raw JAX", [[sys.executable, "-m", "bench.raw_jax", "--devices", "1"]])
    try:
        for number in [number for number in (1, 4, 16) if number <= most]:
            with clients_of(address, [1.0] * number) as clients:
                for client in clients:
                    client.ask("begin", wait_us=300, window=64)
                time.sleep(1.0)
                began, before = time.perf_counter(), sum(counts(clients))
                time.sleep(seconds)
                rate = (sum(counts(clients)) - before) / (time.perf_counter() - began)
                for client in clients:
                    client.ask("end")
            calls = int(seconds / 2 / 0.0004)
            raw_rate = max(calls / raw.ask("measure", case="O", calls=calls, wait_us=300) for _ in range(2))
            goal = Goal("ratio", ">=", 0.95 if number == 1 else 0.98)
            case = f"aggregate of {number} clients, 0.3 ms"
            report(BENCH, case, rate, "computations/s", rival="raw JAX", rival_value=raw_rate, goal=goal)
    finally:
        raw.close()


def waits(address: str, calls: int) -> None:
    with clients_of(address, [1.0, 1.0]) as (greedy, modest):
        alone = statistics.median(modest.ask("waits", wait_us=1000, calls=calls))
        greedy.ask("begin", wait_us=1000, window=10_000)
        time.sleep(2.0)
        behind = statistics.median(modest.ask("waits", wait_us=1000, calls=calls))
        greedy.ask("end")
    waited_ms = (behind - alone) * 1e3
    goal = Goal("value", "<=", 1.0 + LATE_MS)
    report(BENCH, "1 ms behind a client that queues 10,000: wait", waited_ms, "ms", goal=goal)


def picture(address: str, path: Path) -> None:
    """Four clients at 1:2:4:8, as their island has recorded them: a lane for each."""
    weights = (1.0, 2.0, 4.0, 8.0)
    with clients_of(address, weights) as clients:
        for client in clients:
            client.ask("begin", wait_us=1000, window=64)
        time.sleep(2.0)
        for client in clients:
            client.ask("record")
        time.sleep(2.0)
        recorded = [client.ask("recorded") for client in clients]
        for client in clients:
            client.ask("end")
    begin = max(steps[0][0] for steps in recorded) + 0.5  # all of them are recorded by then
    named = zip(("ann", "bob", "cy", "dee"), weights, recorded, strict=True)
    steps = [
        (f"weight {weight:g}", name, number, start, end)
        for name, weight, mine in named
        for number, (start, end) in enumerate(mine)
        if begin <= start and end <= begin + SHOWN_S
    ]
    path.write_text(draw_timeline(steps, "one device, four clients with weights 1, 2, 4 and 8, computations of 1 ms"))
    note(f"{len(steps)} computations drawn in {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less time, fewer clients")
    parser.add_argument("--only", choices=["shares", "aggregates", "waits"], help="one part")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="only draw 1:2:4:8 from a real run (SVG)")
    options = parser.parse_args()
    note_machine("jax", "pyzmq", "trio")
    with start_local_cluster({"island": {"devices": 1}}, preload=("bench.device_wait",)) as cluster:
        note(f"a cluster at {cluster.address}")
        if options.draw is not None:
            picture(cluster.address, options.draw)
            return
        if options.only in (None, "waits"):
            waits(cluster.address, 30 if options.quick else 200)
        if options.only in (None, "aggregates"):
            aggregates(cluster.address, 2.0 if options.quick else 6.0, 4 if options.quick else 16)
        if options.only in (None, "shares"):
            shares(cluster.address, 6.0 if options.quick else 12.0)


if __name__ == "__main__":
    main()
