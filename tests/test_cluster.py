"""Real processes, killed: what is noticed, what comes back, and what is left behind (nothing)."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import pathway as pw
from pathway.embedded import local_islands, start_local_cluster
from pathway.errors import ConfigError, ConnectError
from pathway.testing.cluster import local_cluster


def test_a_killed_executor_is_noticed_by_its_exit_and_the_island_forms_again() -> None:
    with local_cluster({"east": {"hosts": 2, "devices": 1}}, start_timeout_s=60) as cluster:
        before = {host: cluster.executor_pid("east", host) for host in range(2)}
        cluster.kill_executor("east", host=1)
        cluster.wait_until(lambda: cluster.island("east")["state"] != "formed", "the loss was noticed", 2.0)
        cluster.wait_for_incarnation("east", 2)
        island = cluster.island("east")
        assert "SIGKILL" in island["last_loss"]
        assert all(cluster.executor_pid("east", host) != before[host] for host in range(2))


def test_an_executor_that_is_stopped_is_not_dead_and_goes_on() -> None:
    with local_cluster({"east": {"devices": 1}}) as cluster, pw.Client(cluster.address) as client:
        slice_ = client.slice(1)
        add = pw.jit(slice_)(lambda x: x + 1)
        x = add(client.put(np.float32(1), slice_))
        assert x.numpy() == 2
        executor = cluster.executor_pid("east")

        def wait() -> float:
            found = [wait for wait in cluster.status()["waits"] if "SIGSTOP" in wait["reason"]]
            return found[0]["since_s"] if found else -1.0

        os.kill(executor, signal.SIGSTOP)
        try:
            cluster.wait_until(lambda: wait() >= 0, "its worker says that it is stopped", 5.0)
            later = add(x)
            cluster.wait_until(lambda: wait() > 4, "longer than a silent machine is given", 10.0)
            assert not later.is_ready()
        finally:
            os.kill(executor, signal.SIGCONT)
        assert later.numpy() == 3
        cluster.wait_until(lambda: wait() < 0, "nothing is stopped any more", 5.0)
        assert cluster.island("east")["incarnation"] == 1
        assert cluster.executor_pid("east") == executor


def test_a_killed_worker_takes_its_executor_along_and_can_return() -> None:
    with local_cluster({"east": {"devices": 1}}) as cluster:
        executor = cluster.executor_pid("east")
        cluster.kill_worker("east")
        cluster.wait_until_gone(executor)
        cluster.wait_until(lambda: cluster.island("east")["state"] != "formed", "the loss was noticed", 3.0)
        cluster.cluster.start_worker("east")
        cluster.wait_for_incarnation("east", 2)


def test_nothing_outlives_a_program_that_is_killed() -> None:
    script = textwrap.dedent("""
        import json, sys, time
        from pathway.testing.cluster import ClusterUnderTest
        cluster = ClusterUnderTest({"east": {"devices": 1}}, {})
        print(json.dumps(list(cluster.processes())), flush=True)
        time.sleep(60)
    """)
    program = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    pids = [int(pid) for pid in program.stdout.readline().strip("[]\n").split(",")]
    assert len(pids) == 3
    pidfds = [os.pidfd_open(pid) for pid in pids]
    program.kill()
    program.wait()
    for pidfd in pidfds:
        ended, _, _ = select.select([pidfd], [], [], 4.0)
        os.close(pidfd)
        assert ended


def test_started_from_a_thread_that_ends_it_lives_on() -> None:
    """PDEATHSIG is of the thread that forked: the cluster must not die with that."""
    clusters = []
    thread = threading.Thread(target=lambda: clusters.append(start_local_cluster({"east": {"devices": 1}})))
    thread.start()
    thread.join()
    (cluster,) = clusters
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            cluster.workers["east", 0].process.wait(0.5)
        assert cluster.what_ended() == ""
    finally:
        started = time.monotonic()
        cluster.stop()
        cluster.stop()
    assert time.monotonic() - started < 2.0


def test_a_cluster_that_cannot_start_says_why() -> None:
    with pytest.raises(ConnectError, match="no_such_module"):
        start_local_cluster({"east": {"devices": 1}}, preload=["no_such_module"], start_timeout_s=6, log_level="error")


@pytest.mark.parametrize(
    ("islands", "message"),
    [
        (0, "needs an island"),
        ({}, "needs an island"),
        ({"east": {"device": 1}}, "there is no 'device'"),
        ({"east": {"hosts": 0}}, "cannot have 0 hosts"),
        ({"east": {"devices": "4"}}, "cannot have '4' devices"),
    ],
)
def test_islands_that_make_no_sense(islands: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        local_islands(islands, 1, 4, "cpu")  # type: ignore[arg-type]
