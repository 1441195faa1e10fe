"""Islands and clients that go, seen through a proxy; and what two islands cannot do together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("grpc")

from pathway.testing.cluster import ClusterUnderTest, local_cluster
from tests.proxy_client import JaxProcess, RemoteFailure

ISLANDS = {"east": {"hosts": 1, "devices": 2}, "west": {"hosts": 1, "devices": 2}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterUnderTest]:
    with local_cluster(ISLANDS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def proxy(cluster: ClusterUnderTest) -> str:
    return cluster.cluster.start_proxy()


@pytest.fixture
def client(proxy: str, tmp_path: Path) -> Iterator[JaxProcess]:
    with JaxProcess(proxy, tmp_path) as client:
        yield client


def sessions(cluster: ClusterUnderTest) -> int:
    return len(cluster.status()["sessions"])


def test_devices_of_all_islands_are_the_clients_own(client: JaxProcess) -> None:
    assert client.run("[(d.id, d.slice_index, d.process_index) for d in jax.devices()]") == [
        [0, 0, 0], [1, 0, 0], [2, 1, 0], [3, 1, 0],
    ]  # fmt: skip
    assert client.run("jax.process_count(), jax.local_device_count(), jax.devices()[0].platform") == [1, 4, "cpu"]


def test_arrays_move_between_islands(client: JaxProcess) -> None:
    client.run("east, west = (Mesh(np.array(jax.devices()[i:i + 2]), 'x') for i in (0, 2))")
    client.run("x = jax.device_put(np.arange(8.0), NamedSharding(east, P('x')))")
    client.run("y = jax.device_put(x * 2, NamedSharding(west, P('x')))")
    client.run("z = jax.device_put(y + 1, NamedSharding(east, P()))")
    assert client.run("z") == [2 * i + 1.0 for i in range(8)]
    assert client.run("jax.device_put(y, jax.devices()[1])") == [2.0 * i for i in range(8)]
    assert client.run("y.sharding.device_set == set(jax.devices()[2:])") is True


def test_a_program_over_two_islands_is_refused_with_advice(client: JaxProcess) -> None:
    with pytest.raises(RemoteFailure, match=r"INVALID_ARGUMENT.*several islands \(east, west\).*jax.device_put"):
        client.run(
            "both = NamedSharding(Mesh(np.array(jax.devices()), 'x'), P('x'))\n"
            "jax.jit(lambda: jnp.arange(8.0), out_shardings=both)()"
        )


@pytest.mark.timeout(180)
def test_a_lost_island_is_data_loss_and_the_others_go_on(cluster: ClusterUnderTest, client: JaxProcess) -> None:
    client.run("f = jax.jit(lambda x: x + 1)")
    client.run("east, west = (jax.device_put(np.float32(1), jax.devices()[i]) for i in (0, 2)); f(east), f(west)")
    client.run("jax.block_until_ready((east, west))")
    before = int(cluster.island("west")["incarnation"])
    cluster.kill_executor("west")
    with pytest.raises(RemoteFailure, match="JaxRuntimeError: DATA_LOSS"):
        client.run("for _ in range(10**6): jax.block_until_ready(f(west))")
    with pytest.raises(RemoteFailure, match="JaxRuntimeError: DATA_LOSS"):
        client.run("np.asarray(f(f(west)) * 2)")
    assert client.run("f(east)") == 2
    cluster.wait_for_incarnation("west", before + 1)
    assert (
        client.run(
            "import time\n"
            "for _ in range(200):\n"
            "    try:\n"
            "        again = float(f(jax.device_put(np.float32(5), jax.devices()[2])))\n"
            "        break\n"
            "    except jax.errors.JaxRuntimeError as error:\n"
            "        assert 'DATA_LOSS' in str(error), error\n"
            "        time.sleep(0.05)\n"
            "again"
        )
        == 6
    )
    with pytest.raises(RemoteFailure, match="DATA_LOSS"):
        client.run("np.asarray(f(west))")


def test_what_a_dead_client_had_is_freed(cluster: ClusterUnderTest, proxy: str, tmp_path: Path) -> None:
    cluster.wait_until(lambda: sessions(cluster) == 0, "earlier clients are gone")
    with JaxProcess(proxy, tmp_path) as client:
        client.run("x = jax.block_until_ready(jax.device_put(np.ones(1 << 20, np.float32), jax.devices()[0]))")
        assert sessions(cluster) == 1
        client.kill()
        cluster.wait_until(lambda: sessions(cluster) == 0, "the dead client's session is closed", timeout_s=5)


def test_large_arrays_may_pass_through_a_directory(cluster: ClusterUnderTest, tmp_path: Path) -> None:
    directory = tmp_path / "transfers"
    directory.mkdir()
    proxy = cluster.cluster.start_proxy("127.0.0.1:0", "--transfer-directory", str(directory))
    prefix = "IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION"
    settings = {f"{prefix}_DIRECTORY": str(directory), f"{prefix}_THRESHOLD_BYTES": "4096"}
    changed = directory.stat().st_mtime_ns
    with JaxProcess(proxy, tmp_path, **settings) as client:
        client.run("value = np.arange(1 << 20, dtype=np.float32); x = jax.device_put(value)")
        assert client.run("np.array_equal(x + 0, value)") is True
    assert directory.stat().st_mtime_ns > changed, "nothing came through the directory"
    assert list(directory.iterdir()) == []


def test_arrays_of_more_than_a_chunk_come_and_go(client: JaxProcess) -> None:
    client.run("value = np.arange(5 << 20, dtype=np.float32).reshape(5, -1)")
    client.run("sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), 'x'), P(None, 'x'))")
    assert client.run("x = jax.device_put(value, sharding); np.array_equal(x, value)") is True
    assert client.run("np.array_equal(x.addressable_shards[1].data, value[:, 1 << 19:])") is True
    assert client.run("np.array_equal(x.T, value.T)") is True


def test_clients_do_not_see_one_another(proxy: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with JaxProcess(proxy, tmp_path) as one, JaxProcess(proxy, tmp_path / "other") as other:
        for client, start in ((one, 1), (other, 100)):
            client.run(f"x = jnp.float32({start}); f = jax.jit(lambda x: x + 1)")
        for _ in range(5):
            one.run("x = f(x)")
            other.run("x = f(x)")
        assert (one.run("x"), other.run("x")) == (6, 105)


@pytest.mark.timeout(180)
def test_after_a_restart_of_the_proxy_the_documented_way_back_works(cluster: ClusterUnderTest, tmp_path: Path) -> None:
    first = cluster.cluster.start_proxy()
    old = cluster.cluster.proxies[-1]
    with JaxProcess(first, tmp_path) as client:
        assert client.run("x = jnp.float32(1) + 1; x") == 2
        old.kill()
        old.process.wait()
        with pytest.raises(RemoteFailure, match="UNAVAILABLE"):
            client.run("np.asarray(x + 1)")
        cluster.cluster.start_proxy(first.removeprefix("grpc://"))
        client.run("import jax.extend.backend; jax.extend.backend.clear_backends(); jax.clear_caches()")
        assert client.run("jnp.float32(2) + 1") == 3
