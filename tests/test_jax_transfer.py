"""Edges between islands through `jax.experimental.transfer`: on CPU here, where it has to be asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathway as pw
from pathway.errors import ConfigError
from pathway.executor.transfers import choose_transfer
from pathway.testing.cluster import ClusterUnderTest, local_cluster
from tests.executor_tools import layout, shared_backend


@pytest.mark.parametrize(
    ("setting", "platform", "has_keys", "chosen"),
    [
        ("auto", "cpu", False, "pathway"),
        ("auto", "tpu", False, "jax"),
        ("auto", "cuda", False, "jax"),
        ("auto", "cuda", True, "pathway"),
        ("jax", "cpu", False, "jax"),
        ("pathway", "tpu", False, "pathway"),
    ],
)
def test_the_way_is_chosen_by_platform_and_can_be_set(setting: str, platform: str, has_keys: bool, chosen: str) -> None:
    assert choose_transfer(setting, platform, has_keys) == chosen


def test_keys_and_transfers_that_know_none_exclude_one_another() -> None:
    with pytest.raises(ConfigError, match="keys"):
        choose_transfer("jax", "tpu", has_keys=True)


@pytest.mark.parametrize("pinned", [True, False])
def test_devices_without_the_hosts_memory_are_read_through_it(pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = shared_backend()
    monkeypatch.setattr(backend, "has_host_memory", False)
    monkeypatch.setattr(backend, "_has_pinned_memory", backend._has_pinned_memory and pinned)
    where = layout((40, 50), "float32", [0, 1], {"d": 2}, [("d",), ()])
    value = np.arange(2000, dtype=np.float32).reshape(40, 50)
    array = backend.array(where, {0: value[:20], 1: value[20:]})
    np.testing.assert_array_equal(backend.view(array, where, 1), value[20:])


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterUnderTest]:
    islands = {"east": {"hosts": 1, "devices": 2}, "west": {"hosts": 2, "devices": 1}}
    with local_cluster(islands, environment={"PATHWAY_TRANSFER": "jax"}) as cluster:
        yield cluster


def test_the_choice_is_in_the_status(cluster: ClusterUnderTest) -> None:
    with pw.connect(cluster.address) as client:
        assert {island["transfer"] for island in client.status()["islands"]} == {"jax"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_values_arrive_in_whatever_layout(cluster: ClusterUnderTest, dtype: str) -> None:
    """Whole shards, parts of shards, shards of several parts, and copies on every device."""
    with pw.connect(cluster.address):
        east, west = pw.slice(2, mesh={"e": 2}, island="east"), pw.slice(2, mesh={"w": 2}, island="west")
        x = np.random.default_rng(1).integers(0, 2, (6, 10)).astype(jnp.dtype(dtype))
        for spec in (P("w"), P(None, "w"), P()):
            there = pw.jit(west, in_specs=(spec,), out_specs=spec)(lambda x: x)
            back = pw.jit(east, in_specs=(P("e"),), out_specs=P("e"))(lambda x: x | x if x.dtype == bool else x + x)

            @pw.program
            def program(x: Any, there: Any = there, back: Any = back) -> Any:
                return back(there(x))

            moved = pw.get(program(pw.put(x, east, P("e"))))
            np.testing.assert_array_equal(moved, x | x if dtype == "bool" else x + x)


def test_a_value_that_is_donated_behind_its_transfer_still_arrives(cluster: ClusterUnderTest) -> None:
    with pw.connect(cluster.address):
        east, west = pw.slice(1, island="east"), pw.slice(1, island="west")
        total = pw.jit(west)(lambda x: x.sum())
        add = pw.jit(east)(lambda x: x + 1)
        step = pw.program(donate_argnums=0)(lambda x: (add(x), total(x)))
        x = pw.put(np.zeros(1 << 18, np.int32), east)
        totals = []
        for _ in range(8):
            x, each = step(x)
            totals.append(each)
        assert [int(each) for each in pw.get(totals)] == [(1 << 18) * number for number in range(8)]


def until_it_fails(use: Callable[[], object]) -> None:
    while True:
        use()


def test_clients_that_leave_amid_transfers_and_executors_that_die(cluster: ClusterUnderTest) -> None:
    for _ in range(2):
        with pw.connect(cluster.address):
            east, west = pw.slice(1, island="east"), pw.slice(1, island="west")
            last = pw.jit(west)(lambda x: x[-1:])
            x = pw.put(np.ones(16 << 20, np.uint8), east)
            for _ in range(4):
                last(x)
    with pw.connect(cluster.address):
        east, west = pw.slice(1, island="east"), pw.slice(1, island="west")
        last = pw.jit(west)(lambda x: x[-1:])
        x = pw.put(np.ones(16 << 20, np.uint8), east)
        pw.get(last(x))
        under_way = [last(x) for _ in range(4)]
        cluster.kill_executor("west")
        with pytest.raises(pw.IslandLostError):
            until_it_fails(lambda: jax.block_until_ready([*under_way, last(x)]))
        cluster.wait_for_incarnation("west", 2)
    with pw.connect(cluster.address):
        east, west = pw.slice(1, island="east"), pw.slice(1, island="west")
        assert int(pw.jit(west)(lambda x: x * 2)(pw.put(np.int32(4), east))) == 8
