"""Google's client library for Pathways, unmodified, on top of a proxy. Skipped where it is not installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("grpc")
pytest.importorskip("pathwaysutils")

from pathway.testing.cluster import ClusterUnderTest, local_cluster
from tests.proxy_client import JaxProcess


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterUnderTest]:
    with local_cluster({"east": {"hosts": 1, "devices": 4}, "west": {"hosts": 1, "devices": 4}}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: ClusterUnderTest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JaxProcess]:
    with JaxProcess(cluster.cluster.start_proxy(), tmp_path_factory.mktemp("client")) as client:
        client.run("import pathwaysutils; pathwaysutils.initialize()")
        client.run("first, second = jax.devices()[:4], jax.devices()[4:]")
        yield client


def test_initialize(client: JaxProcess) -> None:
    assert client.run("pathwaysutils.is_pathways_backend_used()") is True
    assert client.run("len(jax.devices())") == 8


def test_reshard(client: JaxProcess) -> None:
    client.run("from pathwaysutils import reshard")
    client.run("x = jax.device_put(np.arange(16.0).reshape(8, 2), NamedSharding(Mesh(first, 'x'), P('x')))")
    client.run("y = reshard.reshard({'a': x}, NamedSharding(Mesh(second, 'x'), P(None)))['a']")
    assert client.run("np.array_equal(y, x), set(y.devices()) == set(second)") == [True, True]


def test_split_by_mesh_axis(client: JaxProcess) -> None:
    client.run("from pathwaysutils.experimental import split_by_mesh_axis as split")
    client.run("mesh = Mesh(np.array(first).reshape(2, 2), ('a', 'b'))")
    client.run("x = jax.device_put(np.arange(16.0).reshape(8, 2), NamedSharding(mesh, P('a', 'b')))")
    halves = client.run("split.split_by_mesh_axis(x, 'a', 2)")
    assert halves == [[[2.0 * i, 2.0 * i + 1] for i in range(4)], [[2.0 * i, 2.0 * i + 1] for i in range(4, 8)]]


@pytest.mark.timeout(180)
def test_elastic_training_goes_through_the_loss_of_an_island(cluster: ClusterUnderTest, client: JaxProcess) -> None:
    client.run("from pathwaysutils.elastic import manager; elastic = manager.Manager()")
    assert client.run("sorted(elastic.slice_to_devices)") == [0, 1]
    pid = cluster.executor_pid("west")
    client.run(
        "import os, signal\n"
        "attempts = []\n"
        "@elastic.elastic_retry(minimum_slice_count=1, poll_interval=0.2, timeout=60)\n"
        "def train():\n"
        "    attempts.append(sorted(elastic.active_slice_indices))\n"
        "    devices = [d for i in elastic.active_slice_indices for d in elastic.slice_to_devices[i]][-4:]\n"
        "    sharding = NamedSharding(Mesh(devices, 'x'), P('x'))\n"
        "    step = jax.jit(lambda x: x + 1, donate_argnums=0)\n"
        "    x = jax.device_put(np.zeros(8, np.float32), sharding)\n"
        "    for number in range(20):\n"
        f"        if number == 10 and len(attempts) == 1: os.kill({pid}, signal.SIGKILL)\n"
        "        x = jax.block_until_ready(step(x))\n"
        "    return np.asarray(x)\n"
        "result = train()"
    )
    assert client.run("result") == [20.0] * 8
    attempts = client.run("attempts")
    assert attempts[0] == [0, 1]
    assert len(attempts) >= 2
