"""Memory on a real cluster whose devices have little of it: refusals, waits, moving away (docs/scheduling.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import pathway as pw
from pathway.errors import DeviceMemoryError
from pathway.testing.cluster import ClusterUnderTest, local_cluster

MB = 250_000
"""Elements of float32 in a megabyte."""


@pytest.fixture(scope="module")
def small() -> Iterator[ClusterUnderTest]:
    with local_cluster({"east": {"devices": 2}}, device_memory="64MB", check_leftovers=False) as cluster:
        yield cluster


def waits(cluster: ClusterUnderTest, text: str) -> bool:
    return any(text in wait["reason"] for wait in cluster.status()["waits"])


def test_one_that_never_fits_says_what_is_large_and_where_it_is_made(small: ClusterUnderTest) -> None:
    with pw.Client(small.address, name="ann") as ann:
        here = ann.slice(2)
        x = ann.put(np.ones(4 * MB, np.float32), here)

        @pw.jit(here)
        def too_much(x: Any) -> Any:
            return jnp.concatenate([x] * 20)

        large = too_much(x)
        after = pw.jit(here)(lambda x: x + 1)(large)
        said = "needs 84 MB on a device of island east, which has 64 MB"
        for array in (large, after):  # what depends on it raises the same
            with pytest.raises(DeviceMemoryError, match=said) as caught:
                array.block_until_ready()
            assert "80 MB float32[20000000] of too_much (test_memory_cluster.py" in str(caught.value)


def test_memory_analysis_is_what_admission_goes_by(small: ClusterUnderTest) -> None:
    with pw.Client(small.address, name="ann") as ann:
        here = ann.slice(2)
        x = ann.put(np.ones(1000, np.float32), here)
        step = pw.program(pw.jit(here)(lambda x: jnp.sort(jnp.outer(x, x), axis=0).sum()))
        compiled = step.trace(x).lower().compile()
        assert compiled.memory_analysis()["east"].peak_bytes >= 4_000_000  # what lies between is XLA's own
        y = compiled(x)
        assert float(y) == 1e6
        what = "the run's temporaries are given back, its argument and its result stay"
        small.wait_until(lambda: small.island("east")["memory_used_bytes"] == 4004, what)


def test_a_client_full_of_its_own_results_is_refused_and_others_are_not(small: ClusterUnderTest) -> None:
    with pw.Client(small.address, name="ann") as ann, pw.Client(small.address, name="bob") as bob:
        hers, his = ann.slice(2, shared=True), bob.slice(2, shared=True)
        grow = pw.jit(hers)(lambda x: jnp.full((20 * MB,), 1.0, jnp.float32) + x)
        kept = [grow(ann.put(np.float32(number), hers)) for number in range(3)]
        with pytest.raises(DeviceMemoryError, match="60 MB of that are held by results and arrays of this client"):
            grow(ann.put(np.float32(3), hers)).block_until_ready()
        assert float(pw.jit(his)(lambda x: x.sum())(bob.put(np.ones(MB, np.float32), his))) == MB
        # One that can later waits, says on whom, and goes when there is room.
        late = pw.jit(his)(lambda x: jnp.full((30 * MB,), 2.0, jnp.float32) * x)(bob.put(np.float32(1), his))
        small.wait_until(lambda: waits(small, "held by session ann"), "a wait for memory that ann holds")
        assert waits(small, "waits for 30 MB on east")
        assert not late.is_ready()
        del kept
        assert late.numpy()[0] == 2.0


def test_what_xla_itself_cannot_allocate_names_the_largest_buffers(client: Any) -> None:
    here = client.slice(1)
    x = client.put(np.ones(MB, np.float32), here)
    endless = pw.jit(here)(lambda x: jnp.broadcast_to(x[0].astype(jnp.uint8), (1 << 44,)))
    with pytest.raises(DeviceMemoryError, match="Out of memory allocating") as caught:
        endless(x).block_until_ready()
    assert "1 MB float32[250000] that was put (test_memory_cluster.py" in str(caught.value)


def test_what_is_moved_to_host_memory_comes_back_bit_by_bit() -> None:
    islands = {"east": {"hosts": 2, "devices": 1}}
    with (
        local_cluster(islands, device_memory="64MB", spill=True) as cluster,
        pw.Client(cluster.address, name="ann") as ann,
    ):
        here = ann.slice(2)
        random = np.random.default_rng(7)
        values = [random.integers(0, 2**32, 20 * MB, np.uint32) for _ in range(5)]
        arrays = [ann.put(value, here) for value in values]  # 100 MB on each device, which has 64
        flip = pw.jit(here)(lambda x: ~x)
        for value, array in zip(values, arrays, strict=True):
            assert np.array_equal(flip(array).numpy(), ~value)
        for value, array in zip(values, arrays, strict=True):
            assert np.array_equal(array.numpy(), value)
        island = cluster.island("east")
        assert island["spills"] >= 2
        assert island["spilled_bytes"] >= 2 * 40_000_000  # on both devices
        what = "the executor's store says the same of its host"
        cluster.wait_until(lambda: 2 * cluster.island("east")["host_bytes"] == island["spilled_bytes"], what)
        del array, arrays
        cluster.wait_until(lambda: cluster.island("east")["spilled_bytes"] == 0, "all of it is released")
