"""`pathway.program` and `pathway.jit` on a real cluster: every program equals the same JAX in one process."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathway as pw

RNG = np.random.default_rng(7)
W0, W1 = (RNG.standard_normal(shape, np.float32) / 4 for shape in ((8, 16), (16, 4)))
X, Y = (RNG.standard_normal(shape, np.float32) for shape in ((12, 8), (12, 4)))


def embed_reference(w, x):
    return jnp.tanh(x @ w)


def head_reference(w, h, y):
    return ((h @ w - y) ** 2).mean()


@dataclasses.dataclass
class Stages:
    front: pw.Slice
    back: pw.Slice
    embed: pw.Stage
    head: pw.Stage


@pytest.fixture
def stages(client):
    front = client.slice(4, {"data": 2, "model": 2}, island="east")
    back = client.slice(2, island="west")
    embed = pw.jit(front, in_specs=(P("model"), P("data")), out_specs=P("data"))(embed_reference)
    return Stages(front, back, embed, pw.jit(back)(head_reference))


def close(result, reference, rtol=2e-5):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=1e-6), pw.get(result), reference)


def test_training_over_two_islands_equals_jax(stages):
    def step_with(embed, head):
        def step(params, x, y):
            def loss(params):
                return head(params[1], embed(params[0], x), y)

            value, grads = jax.value_and_grad(loss)(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

        return step

    program = pw.program(step_with(stages.embed, stages.head), donate_argnums=0)
    reference = jax.jit(step_with(embed_reference, head_reference))
    params = expected = (W0, W1)
    for number in range(4):
        previous = params
        params, value = program(params, X, Y)
        expected, expected_value = reference(expected, X, Y)
        close(value, expected_value)
        assert number == 0 or all(leaf.is_deleted() for leaf in previous)
    close(params, expected)
    assert params[0].slice is stages.front
    assert params[1].slice is stages.back


def test_a_cached_program_is_not_traced_again(stages):
    traces = []

    @pw.program
    def f(x, *, scale):
        traces.append(1)
        return stages.embed(x, X) * scale

    first = f(W0, scale=2.0)
    again = f(W0, scale=3.0)
    close(first, np.tanh(X @ W0) * 2)
    close(again, np.tanh(X @ W0) * 3)
    f(W0, scale=np.float32(3))  # not weakly typed: another kind
    assert len(traces) == 2


def test_a_stage_alone_is_a_program(stages):
    result = stages.embed(W0, X)
    assert isinstance(result, pw.Array)
    assert result.slice is stages.front
    close(stages.head(W1, result, Y), head_reference(W1, np.tanh(X @ W0), Y))

    @pw.jit(stages.back, donate_argnums=0)
    def add(x, y):
        return x + y

    x = pw.put(X, stages.back)
    close(add(x, 1), X + 1)
    assert x.is_deleted()


def test_static_and_keyword_arguments(stages):
    @functools.partial(pw.program, static_argnums=1, static_argnames="mode")
    def f(x, power, *, mode, shift=0):
        return stages.embed(W0, x) ** power + (shift if mode == "up" else -shift)

    close(f(X, 2, mode="up", shift=1.0), np.tanh(X @ W0) ** 2 + 1)
    close(f(X, 3, mode="down", shift=1.0), np.tanh(X @ W0) ** 3 - 1)
    with pytest.raises(pw.ProgramError, match="hashable"):
        f(X, [2], mode="up")

    @pw.jit(stages.back, static_argnums=1)
    def tile(x, times):
        return jnp.tile(x, times)

    close(tile(X, 2), np.tile(X, 2))


def test_pytrees_none_and_custom_nodes(stages):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class State:
        w: object
        extra: object

    @pw.program
    def f(state, rest):
        return State(stages.embed(state.w, X), None), {"rest": rest, "one": 1.0}

    state, other = f(State(W0, None), {"n": None, "k": (np.int32(4),)})
    close(state.w, np.tanh(X @ W0))
    assert state.extra is None
    assert other["rest"]["n"] is None
    assert int(other["rest"]["k"][0]) == 4
    assert float(other["one"]) == 1.0


def test_results_that_are_arguments_or_the_same_twice(stages):
    @pw.program
    def f(x, host):
        y = stages.embed(W0, x)
        return x, y, y, host

    x = pw.put(X, stages.front)
    same, y, again, host = f(x, np.float32(3))
    x.delete()
    y.delete()
    close(same, X)
    close(again, np.tanh(X @ W0))
    assert float(host) == 3.0


def test_donating_what_another_array_stands_for_too_keeps_the_other(stages):
    @pw.program
    def identity(x):
        return x, stages.embed(W0, x)

    @functools.partial(pw.program, donate_argnums=0)
    def consume(x):
        return stages.embed(W0, x) + 1

    x = pw.put(X, stages.front)
    other, _ = identity(x)
    close(consume(other), np.tanh(X @ W0) + 1)
    assert other.is_deleted()
    close(x, X)


def test_donating_twice_is_refused(stages):
    @functools.partial(pw.program, donate_argnums=0)
    def f(x, y):
        return stages.embed(W0, x) + stages.embed(W0, y)

    x = pw.put(X, stages.front)
    with pytest.raises(pw.ProgramError, match="donated"):
        f(x, x)
    assert not x.is_deleted()


def test_closed_over_arrays_and_constants(stages):
    weights = pw.put(W0, stages.front, P("model"))
    table = RNG.standard_normal((64, 16), np.float32)

    @pw.program
    def f(x):
        h = stages.embed(weights, x)
        return h + jnp.asarray(table)[:12], weights

    result, same = f(X)
    close(result, np.tanh(X @ W0) + table[:12])
    close(same, W0)
    close(f(X * 2)[0], np.tanh(2 * X @ W0) + table[:12])
    weights.delete()
    with pytest.raises(pw.DeletedError, match="closes over"):
        f(X)


def test_large_host_arguments_are_put_first(stages):
    big = RNG.standard_normal((512, 256), np.float32)

    @pw.program
    def f(x):
        return jnp.sum(stages.embed(np.ones((256, 1), np.float32) / 256, x)), x

    total, same = f(big)
    close(total, np.tanh(big.mean(axis=1)).sum(), rtol=1e-4)
    close(same, big)


def test_programs_within_programs_are_inlined(stages):
    @pw.program
    def inner(x):
        return stages.embed(W0, x)

    @pw.program
    def outer(x):
        return stages.head(W1, inner(x), Y)

    close(outer(X), head_reference(W1, np.tanh(X @ W0), Y))


def test_typed_keys_and_integers_under_grad(stages):
    @pw.jit(stages.front)
    def noise(key, x, n):
        return x * jax.random.normal(key, x.shape) * n

    @pw.program
    def f(key, x, n):
        key, sub = jax.random.split(key)
        grads = jax.grad(lambda x, n: noise(sub, x, n).sum(), argnums=(0, 1), allow_int=True)(x, n)
        return key, grads

    key = jax.random.key(5)
    new_key, (dx, dn) = f(key, X, 3)
    expected_key, sub = jax.random.split(key)
    close(dx, jax.random.normal(sub, X.shape) * 3)
    assert dn.dtype == jax.dtypes.float0
    np.testing.assert_array_equal(jax.random.key_data(pw.get(new_key)), jax.random.key_data(expected_key))
    again, _ = f(new_key, X, 3)
    assert again.dtype == key.dtype


def test_several_sizes_of_slices_on_one_island(client):
    one, two = client.slice(1, island="west"), client.slice(2, island="west")

    @pw.program
    def f(x):
        a = pw.jit(one, name="a")(lambda x: x + 1)(x)
        b = pw.jit(two, in_specs=P("data"), name="b")(lambda x: x * 2)(a)
        return pw.jit(one, name="c")(lambda a, b: (a * b).sum())(a, b)

    close(f(X), ((X + 1) * (X + 1) * 2).sum(), rtol=1e-4)


def test_looking_into_it(stages):
    @pw.program
    def f(w, x, y):
        return jax.grad(lambda w: stages.head(w[1], stages.embed(w[0], x), y))(w)

    traced = f.trace((W0, W1), X, Y)
    lowered = traced.lower()
    assert "embed" in str(traced.jaxpr)
    assert {node.slice for node in lowered.graph.nodes} == {stages.front.number, stages.back.number}
    assert "embed" in lowered.as_text()
    assert lowered.draw().lstrip().startswith("<svg") or "<svg" in lowered.draw()
    compiled = lowered.compile()
    assert set(compiled.memory_analysis()) == {"east", "west"}
    assert compiled.memory_analysis()["east"].peak_bytes > 0
    assert compiled.cost_analysis().transfer_bytes > 0
    close(compiled((W0, W1), X, Y), jax.grad(lambda w: head_reference(w[1], embed_reference(w[0], X), Y))((W0, W1)))
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), ((W0, W1), X, Y))
    assert f.trace(*shapes).lower().as_text() == lowered.as_text()


def test_fusing_joins_stages_of_one_slice(stages):
    def chain(x):
        for _ in range(5):
            x = stages.embed(np.eye(8, dtype=np.float32), x)
        return x

    fused, apart = pw.program(chain), pw.program(chain, fuse=False)
    assert len(fused.trace(X).lower().graph.nodes) == 1
    assert len(apart.trace(X).lower().graph.nodes) >= 5
    close(fused(X), pw.get(apart(X)))


class TestBadInput:
    def test_shapes_that_do_not_fit(self, stages):
        with pytest.raises((pw.ProgramError, TypeError)):
            stages.embed(W1, X)
        close(stages.embed(W0, X), np.tanh(X @ W0))  # nothing is lost

    def test_a_spec_with_an_unknown_axis(self, stages):
        with pytest.raises(pw.ProgramError, match="no axis 'rows'"):
            pw.jit(stages.front, in_specs=P("rows"))(lambda x: x)(X)

    def test_what_is_no_array(self, stages):
        with pytest.raises(pw.ProgramError, match="static_argn"):
            stages.embed(W0, "text")

    def test_an_exception_of_the_users_own_passes_through(self, stages):
        @pw.program
        def f(x):
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            f(X)

    def test_side_effects(self, stages):
        @pw.program
        def f(x):
            jax.debug.print("{}", x)
            return stages.embed(W0, x)

        with pytest.raises(pw.ProgramError, match="test_program_api"):
            f(X)

    def test_deleted_and_released(self, client, stages):
        x = pw.put(X, stages.front)
        x.delete()
        with pytest.raises(pw.DeletedError):
            stages.embed(W0, x)
        extra = client.slice(1, island="west")
        stage, y = pw.jit(extra)(lambda y: y + 1), pw.put(Y, extra)
        extra.release()
        with pytest.raises(pw.DeletedError):
            pw.get(y)
        with pytest.raises((pw.SliceError, pw.DeletedError)):
            stage(y)
        with pytest.raises((pw.SliceError, pw.DeletedError)):
            stage(Y)

    def test_an_array_of_another_connection(self, cluster, stages):
        with pw.Client(cluster.address) as other, other.slice(1, island="west") as slice:
            x = pw.put(X, slice)
            with pytest.raises(pw.ProgramError, match="connection"):
                stages.embed(W0, x)

    def test_no_place_at_all(self, client):
        with pytest.raises(pw.ProgramError, match="slice"):
            pw.program(lambda x: x + 1)(X)

    def test_nan_is_no_error(self, stages):
        assert np.isnan(float(pw.jit(stages.front)(lambda x: x / x)(0.0)))
