"""Long runs on real processes, under `make soak`: executors killed at random moments under load, and memory over time.

`SOAK_KILLS`, `SOAK_SEED` and `SOAK_MINUTES` in the environment say how many kills, from which seed, and how long.
"""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

import pathway as pw
from pathway.observe import give_order
from pathway.testing.cluster import ClusterUnderTest, local_cluster
from pathway.transport.messages import DrainIsland

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

ISLANDS = {
    "east": {"hosts": 1, "devices": 2},
    "west": {"hosts": 1, "devices": 2},
    "north": {"hosts": 2, "devices": 1},
}
CLIENTS = 4
STEPS = 8
STUCK_S = 120.0


class Tenant:
    """A client that computes over two islands, checks every value, and begins anew what a lost island has taken."""

    def __init__(self, address: str, number: int, seed: int) -> None:
        self._address = address
        self._number = number
        self._random = random.Random(seed * 1000 + number)
        self.right = 0
        self.lost = 0
        self.progressed_at = time.monotonic()
        self.failure: BaseException | None = None
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"tenant {number}")
        self.thread.start()

    def _run(self) -> None:
        try:
            with pw.Client(self._address, name=f"tenant {self._number}") as client:
                names = self._random.sample(sorted(ISLANDS), 2)
                here, there = (client.slice(2, island=name, shared=True, timeout_s=STUCK_S) for name in names)
                add = pw.jit(here)(lambda x, y: x + y)
                double = pw.jit(there)(lambda x: x * 2)
                while not self.stopped.is_set():
                    try:
                        self._round(add, double)
                        self.right += 1
                    except pw.IslandLostError:
                        self.lost += 1
                    self.progressed_at = time.monotonic()
        except BaseException as failure:
            self.failure = failure

    def _round(self, add: Any, double: Any) -> None:
        """A chain over both islands; all of it in integers, so that a value is right or wrong."""
        start = self._random.randrange(1000)
        x, expected = np.full(1024, start, np.int32), start
        acknowledged = []
        for step in range(STEPS):
            x = double(add(x, np.full(1024, step, np.int32)))
            expected = ((expected + step) * 2) % 2**31
            acknowledged.append((x, expected))
        for value, right in acknowledged:
            value.block_until_ready()
            np.testing.assert_array_equal(pw.get(value), np.full(1024, right, np.int64).astype(np.int32))


def executors(cluster: ClusterUnderTest) -> list[int]:
    """All that live now, also those that are just starting."""
    return sorted(pid for pid, command in cluster.processes().items() if "pathway.executor.main" in command)


def forgive(cluster: ClusterUnderTest) -> None:
    """These losses are meant: no island is to be given up for them."""
    for name in ISLANDS:
        trio.run(give_order, cluster.address, DrainIsland(1, name, False), 30.0)


def all_go_on(cluster: ClusterUnderTest, tenants: list[Tenant], seed: int) -> None:
    """Wait until every client has begun and ended a round."""
    before = [tenant.right for tenant in tenants]

    def went_on() -> bool:
        return all(
            tenant.failure is not None or tenant.right > was + 1 for tenant, was in zip(tenants, before, strict=True)
        )

    cluster.wait_until(went_on, f"all clients go on; seed {seed}; {cluster.status()['waits']}", STUCK_S)


def test_kills_at_random_moments_under_load() -> None:
    kills = int(os.environ.get("SOAK_KILLS", "100"))
    seed = int(os.environ.get("SOAK_SEED", "0")) or random.randrange(1, 1 << 30)
    print(f"{kills} kills, seed {seed} (SOAK_SEED)")
    chance = random.Random(seed)
    with local_cluster(ISLANDS, start_timeout_s=120.0, log_level="error") as cluster:
        tenants = [Tenant(cluster.address, number, seed) for number in range(CLIENTS)]
        try:
            for _ in range(kills):
                if chance.random() < 0.5:  # else islands that are just coming back are hit, too
                    all_go_on(cluster, tenants, seed)
                time.sleep(chance.uniform(0.0, 2.0))  # the random moment
                cluster.wait_until(lambda: bool(executors(cluster)), "an executor to kill", STUCK_S)
                os.kill(chance.choice(executors(cluster)), 9)
                forgive(cluster)
                for tenant in tenants:
                    assert tenant.failure is None, f"seed {seed}: {tenant.failure!r}"
                    assert time.monotonic() - tenant.progressed_at < STUCK_S, f"seed {seed}: {cluster.status()}"
            for name in ISLANDS:
                cluster.wait_for_incarnation(name, 1, STUCK_S)
            all_go_on(cluster, tenants, seed)
        finally:
            for tenant in tenants:
                tenant.stopped.set()
            for tenant in tenants:
                tenant.thread.join(STUCK_S)
        for tenant in tenants:
            assert not tenant.thread.is_alive(), f"seed {seed}: a client hangs"
            assert tenant.failure is None, f"seed {seed}: {tenant.failure!r}"
        print("rounds right and lost, of each client:", [(tenant.right, tenant.lost) for tenant in tenants])


# -- memory ------------------------------------------------------------------------------------------------------------


def resident_mib(cluster: ClusterUnderTest) -> dict[int, float]:
    """Of each process of the cluster."""
    found = {}
    for pid in cluster.processes():
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                found[pid] = int(line.split()[1]) / 1024
    return found


def a_users_work(cluster: ClusterUnderTest, number: int) -> None:
    """Comes, has two islands compute, moves some megabytes, cancels something, goes."""
    with pw.Client(cluster.address, name=f"user {number}") as client:
        here, there = client.slice(2, island="east", shared=True), client.slice(2, island="west", shared=True)
        add, double = pw.jit(here)(lambda x: x + 1), pw.jit(there)(lambda x: x * 2)
        large = client.put(np.full(1 << 18, number, np.int32), here)
        for step in range(50):
            small = double(add(np.float32(step)))
            assert float(small) == (step + 1) * 2
        assert int(pw.get(double(add(large)))[0]) == (number + 1) * 2
        add(large).cancel()


def test_memory_stays_flat() -> None:
    minutes = float(os.environ.get("SOAK_MINUTES", "30"))
    with local_cluster({name: ISLANDS[name] for name in ("east", "west")}, log_level="error") as cluster:
        began, number = time.monotonic(), 0
        marks: list[dict[int, float]] = []
        for third in (1, 2, 3):
            while time.monotonic() < began + third * minutes * 20:
                a_users_work(cluster, number)
                number += 1
            marks.append(resident_mib(cluster))
        print(f"{number} users; MiB of each process at 1/3, 2/3 and the end:")
        commands = cluster.processes()
        for pid, after in marks[-1].items():
            print(f"  {[round(mark[pid], 1) for mark in marks]} {commands[pid][:80]}")
            assert after < marks[0][pid] * 1.1 + 8.0, f"{commands[pid]} grows: {[mark[pid] for mark in marks]}"
