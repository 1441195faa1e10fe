"""A client that reaches the scheduler and no executor: in a network of its own, with one way out."""

from __future__ import annotations

import contextlib
import json
import selectors
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pathway as pw
from pathway.embedded import outward_address, start_local_cluster
from pathway.testing.cluster import ClusterUnderTest, local_cluster

UNSHARE = shutil.which("unshare") or ""
ALONE = [UNSHARE, "--user", "--map-root-user", "--net"]


def can_be_alone() -> bool:
    return bool(UNSHARE) and subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode == 0


CLIENT = """
import json, sys, numpy as np, jax, pathway as pw
from jax.sharding import PartitionSpec as P
with pw.connect(sys.argv[1]) as client:
    place = pw.slice(2, mesh={"d": 2}, island="west")
    large = np.random.default_rng(0).standard_normal((3000, 2000), np.float32)
    small = np.arange(30_000, dtype=np.int32)
    tree, specs = {"large": large, "small": small, "number": 3}, {"large": P("d"), "small": P(), "number": P()}
    placed = pw.put(tree, place, specs)
    double = pw.jit(place, in_specs=P("d"), out_specs=P(None, "d"))(lambda x: x + x)
    got = pw.get({**placed, "double": double(placed["large"])})
    assert got["number"] == 3, got["number"]
    assert np.array_equal(got["small"], small), got["small"]
    assert np.array_equal(got["large"], large), got["large"].dtype
    assert np.array_equal(got["double"], 2 * large)
    assert np.array_equal(got["small"], small) and got["number"] == 3
    arrays = pw.put([small + number for number in range(20)], place)
    assert all(np.array_equal(value, small + number) for number, value in enumerate(pw.get(arrays)))
    print(json.dumps([session["relayed_bytes"] for session in client.status()["sessions"]]))
"""


@contextlib.contextmanager
def way_out(path: Path, target: tuple[str, int]) -> Iterator[str]:
    """A socket in the file system, of which each connection is carried on to `target`; its address."""
    stop, stopping = socket.socketpair()

    def carry(listener: socket.socket) -> None:
        other: dict[socket.socket, socket.socket] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(stopping, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    ready = key.fileobj
                    assert isinstance(ready, socket.socket)
                    if ready is stopping:
                        for each in (*other, stopping):
                            each.close()
                        return
                    if ready is listener:
                        inner, outer = listener.accept()[0], socket.create_connection(target)
                        other |= {inner: outer, outer: inner}
                        for each in (inner, outer):
                            selector.register(each, selectors.EVENT_READ)
                    elif ready in other:
                        data = ready.recv(1 << 20)
                        if data:
                            other[ready].sendall(data)
                            continue
                        for each in (ready, other.pop(ready)):
                            other.pop(each, None)
                            selector.unregister(each)
                            each.close()

    with socket.socket(socket.AF_UNIX) as listener, stop:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=carry, args=(listener,))
        thread.start()
        try:
            yield f"ipc://{path}"
        finally:
            stop.send(b"x")
            thread.join()


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterUnderTest]:
    with local_cluster({"west": {"hosts": 2, "devices": 1}}) as cluster:
        yield cluster


@pytest.mark.skipif(not can_be_alone(), reason="this system lets nobody have a network of their own")
def test_arrays_go_by_the_scheduler_where_no_executor_can_be_reached(cluster: ClusterUnderTest, tmp_path: Path) -> None:
    host, _, port = cluster.address.removeprefix("tcp://").rpartition(":")
    with way_out(tmp_path / "way", (host, int(port))) as address:
        done = subprocess.run(
            [*ALONE, sys.executable, "-c", CLIENT, address], capture_output=True, text=True, check=False, timeout=90
        )
    assert done.returncode == 0, done.stderr
    (relayed_bytes,) = json.loads(done.stdout)
    assert relayed_bytes > 3 * 3000 * 2000 * 4
    assert done.stderr.count("through the scheduler, which is slow") == 1


def test_a_cluster_on_all_addresses_has_executors_that_others_can_reach() -> None:
    outward = outward_address()
    islands = {"only": {"hosts": 1, "devices": 1}}
    with (
        start_local_cluster(islands, bind="tcp://0.0.0.0:0", environment={"PATHWAY_INSECURE": "1"}) as cluster,
        pw.connect(cluster.address) as client,
    ):
        (island,) = client.status()["islands"]
        assert island["hosts"][0]["executor"].startswith(f"tcp://{outward or '127.0.0.1'}:")
        assert int(pw.put(np.int32(3), pw.slice(1))) == 3
