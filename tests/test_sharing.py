"""Several clients on a real cluster: shares, orders, cancelling, late inputs."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import pathway as pw
from pathway.client.client import Client
from pathway.embedded import LocalCluster, start_local_cluster


@pytest.fixture(scope="module")
def shared() -> Iterator[LocalCluster]:
    with start_local_cluster(
        {"east": {"devices": 1}, "west": {"devices": 1}}, preload=("bench.device_wait",)
    ) as cluster:
        yield cluster


def order(cluster: LocalCluster, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pathway", *words, "--address", cluster.address]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def waiting(client: Client, us: int) -> Any:
    """A computation that holds a device of east for so long."""
    from bench.device_wait import device_wait

    return pw.jit(client.slice(1, island="east", shared=True))(lambda x: device_wait(x, us))


def keep_busy(function: Any, window: int, stop: threading.Event) -> None:
    under_way: list[Any] = []
    while not stop.is_set():
        while len(under_way) < window:  # so many that the client never has nothing queued, however late it wakes
            under_way.append(function(np.float32(1)))
        under_way.pop(0).block_until_ready()
    for value in under_way:
        value.block_until_ready()


def device_us(client: Client) -> dict[str, int]:
    return {session["name"]: session["device_us"] for session in client.status()["sessions"]}


def test_weights_share_a_device_and_change_by_order(shared: LocalCluster) -> None:
    with Client(shared.address, name="ann") as ann, Client(shared.address, name="bob", weight=3.0) as bob:
        functions = [waiting(client, 1000) for client in (ann, bob)]
        for function in functions:
            function(np.float32(1)).block_until_ready()
        stop = threading.Event()
        threads = [threading.Thread(target=keep_busy, args=(function, 60, stop)) for function in functions]
        for thread in threads:
            thread.start()

        def ratio(seconds: float) -> float:
            before = device_us(ann)
            threading.Event().wait(seconds)
            after = device_us(ann)
            return (after["bob"] - before["bob"]) / (after["ann"] - before["ann"])

        try:
            ratio(0.5)
            assert ratio(2.0) == pytest.approx(3.0, rel=0.15)
            done = order(shared, "set-weight", "ann", "3")
            assert done.returncode == 0, done.stderr
            assert "session ann has weight 3" in done.stdout
            assert ratio(2.0) == pytest.approx(1.0, rel=0.15)
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_cancelling_ends_what_waits_and_leaves_the_session_well(shared: LocalCluster) -> None:
    with Client(shared.address) as client:
        function = waiting(client, 20_000)
        function(np.float32(1)).block_until_ready()
        first = function(np.float32(1))
        values = [function(np.float32(number)) for number in range(30)]
        began = time.monotonic()
        for value in values:
            value.cancel()
        with pytest.raises(pw.errors.Cancelled):
            values[-1].block_until_ready()
        assert time.monotonic() - began < 0.4  # the 30 would take 0.6 s
        assert float(first) == 1
        assert float(function(np.float32(5))) == 5


def test_a_killed_session_hears_of_it_and_the_others_go_on(shared: LocalCluster) -> None:
    with Client(shared.address, name="ann") as ann, Client(shared.address, name="eve") as eve:
        busy, other = waiting(eve, 50_000), waiting(ann, 100)
        values = [busy(np.float32(1)) for _ in range(100)]
        done = order(shared, "kill", "eve")
        assert done.returncode == 0, done.stderr
        with pytest.raises(pw.errors.SessionLostError, match="ended by an administrator"):
            values[-1].block_until_ready()
        assert float(other(np.float32(2))) == 2
        unknown = order(shared, "kill", "eve")
        assert unknown.returncode == 1
        assert "there is no session 'eve'" in unknown.stderr


def test_what_waits_for_another_island_holds_back_nobody(shared: LocalCluster) -> None:
    """A client fills west with work, and asks for results of it on east, again and again; another uses east alone."""
    from bench.device_wait import device_wait

    with Client(shared.address) as far, Client(shared.address) as near:
        west = pw.jit(far.slice(1, island="west", shared=True))(lambda x: device_wait(x, 30_000))
        east = pw.jit(far.slice(1, island="east", shared=True))(lambda x: x + 1)

        @pw.program
        def both(x: Any) -> Any:
            return east(west(x))

        quick = waiting(near, 100)
        quick(np.float32(1)).block_until_ready()
        both(jnp.float32(1)).block_until_ready()
        values = [both(jnp.float32(1)) for _ in range(40)]  # 1.2 s of west
        began = time.monotonic()
        for _ in range(10):
            quick(np.float32(1)).block_until_ready()
        assert time.monotonic() - began < 0.5
        assert not values[-1].is_ready()
        assert float(values[-1]) == 2


def test_draining_keeps_slices_away(shared: LocalCluster) -> None:
    assert order(shared, "drain", "east").returncode == 0
    with Client(shared.address) as client:
        with pytest.raises(pw.SliceError, match="drained: east"):
            client.slice(1, island="east", wait=False)
        assert client.slice(1, shared=True).island == "west"
        assert order(shared, "undrain", "east").returncode == 0
        assert client.slice(1, island="east", shared=True).island == "east"
