"""`pathway.Array` on a real cluster: a future that behaves as an array wherever its value is asked for."""

from __future__ import annotations

import gc
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trio
from jax.sharding import PartitionSpec as P

import pathway as pw

X = np.arange(24, dtype=np.float32).reshape(4, 6) / 7


@pytest.fixture
def east(client):
    return client.slice(4, {"a": 2, "b": 2}, island="east")


@pytest.fixture
def west(client):
    return client.slice(4, {"a": 2, "b": 2}, island="west")


@pytest.mark.parametrize("spec", [P(), P("a"), P("a", "b"), P(None, "b"), P(("a", "b"))], ids=str)
@pytest.mark.parametrize("island", ["east", "west"])
def test_put_and_get_are_inverse(client, island, spec):
    home = client.slice(4, {"a": 2, "b": 2}, island=island)
    small = pw.put(X, home, spec)
    large = np.random.default_rng(0).random((512, 768), np.float32)
    tree = pw.put({"x": large, "n": None, "y": [1, 2.5]}, home, {"x": spec, "n": None, "y": P()})
    np.testing.assert_array_equal(small.numpy(), X)
    got = pw.get(tree)
    np.testing.assert_array_equal(got["x"], large)
    assert (int(got["y"][0]), float(got["y"][1]), got["n"]) == (1, 2.5, None)


@pytest.mark.parametrize(
    "value",
    [True, 7, 2.5, 1 + 2j, np.int8(3), np.zeros((0, 3)), np.array(5), np.array([1, 2], "bfloat16"),
     np.array([True, False]), np.array([1, -2], "int4"), jnp.arange(6).reshape(2, 3), np.ones((3, 5), order="F")],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}-{getattr(value, 'shape', '')}",
)  # fmt: skip
def test_put_makes_of_a_value_what_jax_makes(east, value):
    reference = jnp.asarray(value)
    array = pw.put(value, east)
    assert array.dtype == reference.dtype
    assert array.shape == reference.shape
    assert array.weak_type == reference.weak_type
    np.testing.assert_array_equal(array.numpy(), np.asarray(reference))


def test_what_is_known_without_waiting(east):
    array = pw.put(X, east, P("a", "b"))
    assert (array.shape, array.ndim, array.size, array.nbytes) == ((4, 6), 2, 24, 96)
    assert array.dtype == np.float32
    assert array.slice is east
    assert array.sharding.spec == P("a", "b")
    assert "float32[4,6]" in repr(array)
    assert "slice" in repr(array)
    assert jax.tree.leaves({"k": array}) == [array]
    assert len({array, array}) == 1


def test_python_asks_for_the_value(east):
    scalar = pw.put(3, east)
    assert (float(scalar), int(scalar), bool(scalar), complex(scalar), scalar.item()) == (3.0, 3, True, 3 + 0j, 3)
    assert [10, 11, 12, 13][scalar] == 13
    assert f"{pw.put(0.123456, east):.3f}" == "0.123"
    array = pw.put(X, east)
    assert len(array) == 4
    assert array.tolist() == X.tolist()
    assert [row.sum() for row in array] == [row.sum() for row in X]
    np.testing.assert_array_equal(np.asarray(array, np.float64), X.astype(np.float64))
    with pytest.raises(TypeError):
        len(scalar)
    assert not array.numpy().flags.writeable


def test_jax_functions_take_it(east):
    array = pw.put(X, east)
    assert jax.block_until_ready({"x": array})["x"] is array
    np.testing.assert_array_equal(jax.device_get([array])[0], X)
    np.testing.assert_array_equal(jnp.asarray(array), X)
    with pytest.raises(pw.PathwayError, match=r"@pathway\.program"):
        jnp.sin(array)
    close = pw.program(lambda: jnp.sin(array) + jnp.sum(array))()
    np.testing.assert_allclose(close, np.sin(X) + X.sum(), rtol=1e-5)
    assert array.is_ready()
    assert array.block_until_ready() is array


BINARY = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.pow,
    operator.mod,
    operator.lt,
    operator.eq,
]


@pytest.mark.parametrize("function", BINARY, ids=lambda f: f.__name__)
def test_arithmetic_runs_where_it_lives(east, function):
    x, y = pw.put(X + 1, east, P("a")), pw.put(X * 2 + 1, east)
    for left, right in ((x, y), (x, 2), (2.0, x), (x, X + 3), (X + 3, x)):
        result = function(left, right)
        assert isinstance(result, pw.Array)
        assert result.slice is east
        expected = function(
            *(jnp.asarray(pw.get(operand)) if hasattr(operand, "shape") else operand for operand in (left, right))
        )
        np.testing.assert_allclose(result, expected, rtol=1e-6)
        assert result.dtype == expected.dtype


def test_more_operators(east):
    x = pw.put(X, east)
    np.testing.assert_allclose(-x, -X)
    np.testing.assert_allclose(abs(-x), X)
    np.testing.assert_allclose(x @ x.T, X @ X.T, rtol=1e-5)
    np.testing.assert_allclose(x.sum(axis=0), X.sum(axis=0), rtol=1e-6)
    np.testing.assert_allclose(x.mean(), X.mean(), rtol=1e-6)
    assert x.reshape(2, 12).shape == (2, 12)
    assert x.astype(jnp.int32).dtype == np.int32
    for index in (0, -1, (1, 2), slice(1, 3), (..., 0), (None, 2), np.array([0, 2])):
        np.testing.assert_array_equal(x[index], X[index])
    with pytest.raises(TypeError):
        x + "text"


def test_arithmetic_over_slices_runs_at_the_larger(east, west):
    big, small = pw.put(X, east), pw.put(np.float32(3), west)
    result = small * big
    assert result.slice is east
    np.testing.assert_allclose(result, 3 * X)


def test_put_moves_an_array(east, west):
    moved = pw.put(pw.put(X, east, P("a")), west, P(None, "b"))
    assert moved.slice is west
    assert moved.sharding.spec == P(None, "b")
    np.testing.assert_array_equal(moved, X)


def test_typed_keys(east):
    keys = jax.random.split(jax.random.key(3), 4)
    array = pw.put(keys, east, P("a"))
    assert array.dtype == keys.dtype
    assert array.shape == (4,)
    np.testing.assert_array_equal(jax.random.key_data(pw.get(array)), jax.random.key_data(keys))
    with pytest.raises(TypeError, match="key"):
        array.numpy()


def test_deleted_arrays_say_so(east):
    array = pw.put(X, east)
    array.delete()
    array.delete()
    assert array.is_deleted()
    assert "deleted" in repr(array)
    for use in (np.asarray, float, lambda a: a + 1, pw.get, lambda a: a.block_until_ready(), lambda a: a.is_ready()):
        with pytest.raises(pw.DeletedError):
            use(array)


def test_it_is_not_pickled(east):
    with pytest.raises(TypeError, match=r"pathway\.get"):
        pickle.dumps(pw.put(X, east))


def test_awaited_in_trio(east):
    array = pw.put(X, east) + 1

    async def main() -> None:
        np.testing.assert_array_equal(await array, X + 1)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(array._value_async)
        assert float(array.sum() * 0) == 0

    trio.run(main)


def test_an_array_that_is_gone_is_released(client, east, monkeypatch):
    released = []
    release = client.core.release
    monkeypatch.setattr(client.core, "release", lambda kind, buffer: released.append(buffer) or release(kind, buffer))
    array = pw.put(X, east)
    buffer = array._buffer
    del array
    gc.collect()
    assert buffer in released


def test_specs_that_do_not_fit(east):
    with pytest.raises(pw.ProgramError, match="no axis 'c'"):
        pw.put(X, east, P("c"))
    with pytest.raises(pw.ProgramError, match="cannot be split"):
        pw.put(np.zeros(3), east, P("a"))
    with pytest.raises(pw.ProgramError, match="prefix"):
        pw.put({"x": X}, east, {"y": P()})
    with pytest.raises(pw.ProgramError, match="neither an array"):
        pw.put("text", east)
