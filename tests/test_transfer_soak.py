"""Arrays of all sizes moved for a long time, between islands and to and from clients, while executors and clients are
killed: what arrives is right, memory stays flat, and nothing is left behind. `PATHWAY_SOAK_GB` says how much (50)."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathway as pw
from pathway.embedded import in_thread
from pathway.errors import DeletedError, IslandLostError, PathwayError, TransferError
from pathway.observe import give_order
from pathway.testing.cluster import ClusterUnderTest, local_cluster
from pathway.transport import messages as m

MIB = 1 << 20
SOAK_BYTES = int(float(os.environ.get("PATHWAY_SOAK_GB", "50")) * 1e9)
ISLANDS = {"east": {"hosts": 1, "devices": 2}, "west": {"hosts": 2, "devices": 1}, "rest": {"hosts": 1, "devices": 1}}
SIZES = (8, 4096, 100_000, MIB, 3 * MIB + 64, 16 * MIB, 48 * MIB)
KILL_EVERY_BYTES = max(SOAK_BYTES // 40, 125_000_000)

A_CLIENT_WITHOUT_MANNERS = """
import sys
import numpy as np
import pathway as pw
with pw.connect(sys.argv[1]):
    home = pw.slice(1, island="rest", shared=True)
    add = pw.jit(home)(lambda x: x + 1)
    value = np.ones(12 << 20, np.float32)
    print("begun", flush=True)
    while True:
        pw.get(add(pw.put(value, home)))
"""


def anonymous_bytes(pid: int | str) -> int:
    """What a process has of its own, beside what it shares and what its files hold."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


class Soak:
    def __init__(self, cluster: ClusterUnderTest, seed: int) -> None:
        self.cluster = cluster
        self.random = random.Random(seed)
        self.moved = 0
        self.lost = 0
        self.kills = 0
        self.east = pw.slice(2, mesh={"e": 2}, island="east")
        self.west = pw.slice(2, mesh={"w": 2}, island="west")
        negate = pw.jit(self.west, in_specs=(P("w"),), out_specs=P("w"))(lambda x: -x)
        double = pw.jit(self.east, in_specs=(P(),), out_specs=P("e"))(lambda x: 2 * x)
        self.there_and_back = pw.program(lambda x: double(negate(x)))

    def move(self) -> None:
        """An array to east, from there to west, back to every device of east, and home again."""
        nbytes = self.random.choice(SIZES)
        value = np.full(nbytes // 4, self.random.randrange(1 << 20), np.int32)
        value[:: max(1, len(value) // 7)] += np.arange(len(value[:: max(1, len(value) // 7)]), dtype=np.int32)
        try:
            result: Any = pw.get(self.there_and_back(pw.put(value, self.east, P("e"))))
        except (IslandLostError, TransferError, DeletedError):
            if not self.kills:
                raise
            self.lost += 1
            return
        np.testing.assert_array_equal(result, -2 * value)
        self.moved += nbytes * (2 + 1 + 2)

    def kill(self) -> None:
        """An executor, in the midst of what the next arrays do, or a client that is in the midst of its own."""
        self.kills += 1
        victim = self.random.choice(("east", "west", "client"))
        if victim == "client":
            command = [sys.executable, "-c", A_CLIENT_WITHOUT_MANNERS, self.cluster.address]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
                assert client.stdout is not None
                assert client.stdout.readline() == "begun\n"
                self.move()
                client.send_signal(signal.SIGKILL)
            return
        before = int(self.cluster.island(victim)["incarnation"])
        value = np.ones(12 * MIB, np.int32)
        under_way = self.there_and_back(pw.put(value, self.east, P("e")))
        self.cluster.kill_executor(victim, self.random.randrange(int(ISLANDS[victim]["hosts"])))
        try:
            np.testing.assert_array_equal(pw.get(under_way), -2 * value)
        except PathwayError:
            self.lost += 1

        def formed() -> bool:
            """An island that is lost often rests, and one that is lost too often waits for somebody who says go on."""
            island = self.cluster.island(victim)
            if island["drained"]:
                in_thread(give_order, self.cluster.address, m.DrainIsland(1, victim, False), 5.0)
            return island["state"] == "formed" and int(island["incarnation"]) > before

        self.cluster.wait_until(formed, f"island {victim} is formed again", timeout_s=180)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "sockets"])
def test_arrays_move_while_processes_are_killed(shared: bool) -> None:
    environment = {"PATHWAY_SHARED_MEMORY": "yes" if shared else "no"}
    with local_cluster(ISLANDS, environment=environment, log_level="error") as cluster, pw.connect(cluster.address):
        soak = Soak(cluster, seed=7)
        stays = cluster.executor_pid("rest")  # nobody kills this one: it sees the clients come and go
        sizes: list[tuple[int, int, int]] = []
        while soak.moved < SOAK_BYTES // 2:
            due = (soak.kills + 1) * KILL_EVERY_BYTES
            while soak.moved < min(due, SOAK_BYTES // 2):
                soak.move()
            soak.kill()
            gc.collect()
            sizes.append((anonymous_bytes("self"), anonymous_bytes(stays), anonymous_bytes(cluster.scheduler_pid())))
        print(f"{soak.moved / 1e9:.1f} GB, {soak.kills} kills, {soak.lost} lost; {sizes}")
        early, late = sizes[len(sizes) // 2], sizes[-1]
        assert all(after < before + 64 * MIB for before, after in zip(early, late, strict=True)), sizes
        cluster.wait_until(lambda: len(cluster.status()["sessions"]) == 1, "the killed clients' sessions are closed")
        assert cluster.island("rest")["bytes"] == 0
