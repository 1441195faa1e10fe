"""Every private name of JAX that the executor leans on, and every fact about XLA that `backend` says it found out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pathway.dataflow.layout import numpy_dtype
from pathway.errors import CompileError, DeletedError, DeviceMemoryError, ExecutionError
from pathway.executor import backend as xla
from pathway.executor.backend import Backend
from pathway.executor.compile_cache import CompileCache
from tests.executor_tools import BACKEND_DEVICES, compiled, layout, lowered, shared_backend, wide  # noqa: F401

EVERYDAY = ["bool", "int8", "uint32", "int64", "uint64", "float64", "complex64", "complex128"]
NARROW = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4"]


@pytest.fixture(scope="module")
def backend() -> Backend:
    return shared_backend()


def test_devices_are_found_in_host_major_order(backend: Backend) -> None:
    assert len(backend.devices) == BACKEND_DEVICES
    assert list(backend.local) == list(range(BACKEND_DEVICES))
    assert backend.device_kind


def test_a_computation_runs_on_one_device(backend: Backend) -> None:
    add = compiled(backend, lambda x: (x + 1,), [layout((4,), "float32", [2])])
    x = backend.array(layout((4,), "float32", [2]), {2: np.arange(4, dtype=np.float32)})
    tokens: list[Any] = []
    (y,) = add.launch([x], tokens)
    xla.wait_for(tokens[0])
    np.testing.assert_array_equal(backend.view(y, layout((4,), "float32", [2]), 2), np.arange(4) + 1.0)


def test_a_computation_with_a_collective_runs_on_all_devices(backend: Backend) -> None:
    split = layout((8, 2), "float32", [0, 1, 2, 3], {"d": 4}, [("d",), ()])
    whole = layout((2,), "float32", [0, 1, 2, 3], {"d": 4}, [()])
    total = compiled(backend, lambda x: (x.sum(0),), [split], [whole])
    value = np.arange(16, dtype=np.float32).reshape(8, 2)
    x = backend.array_of_bytes(split, value.tobytes())
    for device in range(4):
        np.testing.assert_array_equal(backend.view(x, split, device), value[2 * device : 2 * device + 2])
    (y,) = total.launch([x], [])
    for device in range(4):
        np.testing.assert_array_equal(backend.view(y, whole, device), value.sum(0))


@pytest.mark.parametrize("dtype", EVERYDAY + NARROW)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 3)])
def test_any_dtype_and_shape_comes_back_as_it_was(backend: Backend, dtype: str, shape: tuple[int, ...]) -> None:
    where = layout(shape, dtype, [1, 3], {"d": 2})
    value = (np.arange(int(np.prod(shape))) % 2).reshape(shape).astype(numpy_dtype(dtype))
    array = backend.array_of_bytes(where, np.ascontiguousarray(value).tobytes())
    assert array.dtype == value.dtype
    view = backend.view(array, where, 3)
    assert view.shape == shape
    np.testing.assert_array_equal(view, value)


def test_prng_keys_are_words(backend: Backend) -> None:
    def draw(words: Any) -> tuple[Any]:
        return (jax.random.uniform(jax.random.wrap_key_data(words), (3,), jnp.float32),)

    where = layout((2,), "uint32", [0])
    words = np.asarray(jax.random.key_data(jax.random.key(7)))
    (y,) = compiled(backend, draw, [where]).launch([backend.array_of_bytes(where, words.tobytes())], [])
    np.testing.assert_array_equal(np.asarray(y), jax.random.uniform(jax.random.key(7), (3,), jnp.float32))


def test_lapack_is_ready_for_modules_that_came_as_stablehlo(backend: Backend) -> None:
    where = layout((2, 2), "float32", [0])
    (values, _) = compiled(backend, lambda x: tuple(jnp.linalg.eigh(x)), [where]).launch(
        [backend.array_of_bytes(where, np.diag([2.0, 1.0]).astype(np.float32).tobytes())], []
    )
    np.testing.assert_allclose(np.asarray(values), [1.0, 2.0])


def test_a_view_does_not_copy_and_survives_donation(backend: Backend) -> None:
    where = layout((1 << 16,), "float32", [0])
    increment = compiled(backend, lambda x: (x + 1,), [where], donates=(0,))
    (x,) = increment.launch([backend.array(where, {0: np.zeros(1 << 16, np.float32)})], [])
    view = backend.view(x, where, 0)
    assert view.ctypes.data == x.addressable_data(0).unsafe_buffer_pointer()
    (y,) = increment.launch([x], [])
    assert (view == 1).all()
    assert (backend.view(y, where, 0) == 2).all()


def test_donation_is_in_place_once_no_view_is_left(backend: Backend) -> None:
    where = layout((1 << 16,), "float32", [0])
    increment = compiled(backend, lambda x: (x + 1,), [where], donates=(0,))
    (x,) = increment.launch([backend.array(where, {0: np.zeros(1 << 16, np.float32)})], [])
    x.block_until_ready()
    assert backend.view(x, where, 0)[0] == 1  # a view that is dropped leaves nothing behind
    address = x.addressable_data(0).unsafe_buffer_pointer()
    (y,) = increment.launch([x], [])
    assert y.addressable_data(0).unsafe_buffer_pointer() == address
    assert x.is_deleted()
    assert not xla.is_ready([x])


def test_memory_of_the_host_that_became_an_array_is_not_written_when_it_is_donated(backend: Backend) -> None:
    from pathway.transport.bulk import aligned_empty

    where = layout((1 << 16,), "float32", [0])
    memory = aligned_empty(4 << 16).view(np.float32)
    memory[:] = 3
    (y,) = compiled(backend, lambda x: (x + 1,), [where], donates=(0,)).launch([backend.array(where, {0: memory})], [])
    assert (np.asarray(y) == 4).all()
    assert (memory == 3).all()


def test_a_token_outlives_the_donation_of_the_outputs(backend: Backend) -> None:
    where = layout((1 << 16,), "float32", [0])
    increment = compiled(backend, lambda x: (x + 1,), [where], donates=(0,))
    tokens: list[Any] = []
    x = backend.array(where, {0: np.zeros(1 << 16, np.float32)})
    for _ in range(5):
        (x,) = increment.launch([x], tokens)
    for token in tokens:
        xla.wait_for(token)
    assert (np.asarray(x) == 5).all()


def test_a_donated_argument_is_an_error_of_its_own_kind(backend: Backend) -> None:
    where = layout((4,), "float32", [0])
    increment = compiled(backend, lambda x: (x + 1,), [where], donates=(0,))
    x = backend.array(where, {0: np.zeros(4, np.float32)})
    increment.launch([x], [])
    with pytest.raises(Exception, match=r"deleted|donated") as caught:
        increment.launch([x], [])
    assert xla.error_kind(caught.value) is DeletedError


def test_a_copy_lives_on_when_the_original_is_donated(backend: Backend) -> None:
    where = layout((8,), "float32", [0, 1], {"d": 2}, [("d",)])
    increment = compiled(backend, lambda x: (x + 1,), [where], donates=(0,))
    x = backend.array_of_bytes(where, np.arange(8, dtype=np.float32).tobytes())
    copy = xla.copy_on_device(x)
    increment.launch([x], [])
    np.testing.assert_array_equal(backend.view(copy, where, 1), [4, 5, 6, 7])


def test_what_xla_cannot_compile_is_a_compile_error_with_its_message(backend: Backend) -> None:
    where = layout((4,), "float32", [0])
    key, metadata, artifact = lowered(lambda x: (x + 1,), [where])
    with pytest.raises(CompileError, match="XLA cannot compile"):
        backend.compile(key, metadata, artifact[: len(artifact) // 2], (0,))


def test_errors_of_memory_are_told_from_others() -> None:
    assert xla.error_kind(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")) is DeviceMemoryError
    assert xla.error_kind(RuntimeError("INTERNAL: the device caught fire")) is ExecutionError


def test_compiled_computations_come_back_from_disk(backend: Backend, tmp_path: Path) -> None:
    where = layout((4,), "float32", [0, 1], {"d": 2}, [("d",)])
    program = lowered(lambda x: (x * 3,), [where])
    cache = CompileCache(tmp_path / "cache")
    backend._cache, kept = cache, backend._cache
    try:
        backend.compile(*program, (0, 1))
        (entry,) = (tmp_path / "cache").iterdir()
        before = entry.stat().st_mtime_ns
        x = backend.array_of_bytes(where, np.arange(4, dtype=np.float32).tobytes())
        (y,) = backend.compile(*program, (0, 1)).launch([x], [])
        assert entry.stat().st_mtime_ns >= before
        np.testing.assert_array_equal(np.asarray(y), [0, 3, 6, 9])
        entry.write_bytes(entry.read_bytes()[:-1])  # damaged: found out, and compiled again
        (y,) = backend.compile(*program, (0, 1)).launch([x], [])
        np.testing.assert_array_equal(np.asarray(y), [0, 3, 6, 9])
        backend.compile(*program, (2, 3))
        assert len(list((tmp_path / "cache").iterdir())) == 2
        assert cache.get(next((tmp_path / "cache").iterdir()).name) is not None
    finally:
        backend._cache = kept


def test_a_cache_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert not CompileCache(tmp_path / "open").usable


def test_a_cache_forgets_what_was_used_least_recently(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path / "cache", limit_bytes=2500)
    for number in range(4):
        cache.put(str(number), bytes(1000))
        path = tmp_path / "cache" / str(number)
        os.utime(path, (number, number))
    assert cache.get("0") is not None  # used now
    cache.prune()
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["0", "3"]
