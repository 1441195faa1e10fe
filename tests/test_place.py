"""Placement: where equations go, why, and that the graph computes what the program does."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dataflow_reference import SLICES, A, B, C, check, evaluate, graphs, same
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pathway.dataflow.graph import Graph, SliceShape
from pathway.dataflow.layout import Sharding
from pathway.dataflow.place import Resident
from pathway.dataflow.placed import abstract_mesh, array_reference, placed_call
from pathway.dataflow.text import as_text, implied_transfers
from pathway.errors import ProgramError

X = np.arange(16, dtype=np.float32).reshape(4, 4) / 16
W = np.cos(np.arange(16, dtype=np.float32)).reshape(4, 4)

front = placed_call(lambda w, x: jnp.tanh(x @ w), A, (P("model"), P("data")), P("data"), name="front")
back = placed_call(lambda w, h: ((h @ w) ** 2).mean(), B, name="back")


def resident(slice: SliceShape, rank: int = 2, handle: Any = None) -> Resident:
    return Resident(slice.slice, Sharding(slice.mesh).of_rank(rank), handle)


def where(graph: Graph) -> list[tuple[int, str]]:
    return [(node.slice, node.name) for node in graph.nodes]


def loss(params: Any, x: Any) -> Any:
    return back(params["back"], front(params["front"], x))


PARAMS = {"front": W, "back": W.T.copy()}


# Autodiff, batching, libraries ----------------------------------------------------------------------------------------


def test_backward_stages_land_on_their_forwards_slice() -> None:
    def program(params: Any, x: Any) -> Any:
        return jax.value_and_grad(loss)(params, x)

    _, unfused, _ = graphs(program, PARAMS, X)
    assert where(unfused) == [(0, "front"), (1, "back"), (1, "back"), (0, "front")]
    assert all(node.placed for node in unfused.nodes)
    assert [node.backward for node in unfused.nodes] == [False, False, True, True]
    check(program, PARAMS, X)


def test_gradients_have_their_parameters_sharding() -> None:
    graph = check(lambda p, x: jax.grad(loss)(p, x), PARAMS, X)
    weight = graph.values[graph.arguments[1].value]
    gradient = graph.values[graph.results[1].value]
    assert gradient.sharding == weight.sharding == Sharding(A.mesh, (("model",), ()))


def test_vmap_adds_a_dimension_in_front() -> None:
    def program(w: Any, xs: Any) -> Any:
        return jax.vmap(front, in_axes=(None, 0))(w, xs)

    graph = check(program, W, np.stack([X, X + 1]))
    assert graph.values[graph.results[0].value].sharding.spec == ((), ("data",), ())


def test_checkpoint_of_one_slice_stays_whole_and_of_several_is_opened() -> None:
    def one(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: (jax.checkpoint(front)(w, x) ** 2).sum())(w)

    _, unfused, _ = graphs(one, W, X)
    assert "checkpoint" in " ".join(name for _, name in where(unfused)) or "remat2" in str(where(unfused))
    check(one, W, X)

    def several(params: Any, x: Any) -> Any:
        return jax.value_and_grad(jax.checkpoint(loss))(params, x)

    _, unfused, _ = graphs(several, PARAMS, X)
    assert [slice for slice, _ in where(unfused)].count(0) == 3  # forward, again, backward
    check(several, PARAMS, X)


def test_custom_derivatives_around_and_inside_stages() -> None:
    @jax.custom_vjp
    def clipped(x: Any) -> Any:
        return front(W, x)

    clipped.defvjp(lambda x: (front(W, x), x), lambda x, g: (jnp.clip(g, -0.1, 0.1) * x,))
    relu = placed_call(jax.nn.relu, B, name="relu")
    check(lambda x: clipped(x), X)
    check(lambda x: jax.grad(lambda x: relu(clipped(x) - 0.5).sum())(x), X)


def test_adam_moves_scalars_not_gradients() -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))

    def program(params: Any, state: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    state = optimizer.init(PARAMS)
    graph = check(program, PARAMS, state, X, tolerance=1e-4)
    sizes = sorted(transfer.nbytes for transfer in implied_transfers(graph))
    assert sizes[-2:] == [64, 64], as_text(graph)  # the activation and its gradient
    assert all(size <= 4 for size in sizes[:-2]), as_text(graph)


def test_adam_with_resident_state() -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))

    def program(params: Any, state: Any, x: Any) -> Any:
        gradients = jax.grad(loss)(params, x)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(PARAMS)
    homes = [resident(B), Resident(0, Sharding(A.mesh, (("model",), ())))]
    count = resident(A, 0)
    residents = [*homes, count, *homes, *homes, None]
    graph = check(program, PARAMS, state, X, residents=residents, donated=range(7), tolerance=1e-4)
    sizes = sorted(transfer.nbytes for transfer in implied_transfers(graph))
    assert sizes[-2:] == [64, 64]
    assert all(size <= 4 for size in sizes[:-2]), as_text(graph)
    assert sum(len(node.donates) for node in graph.nodes) == 7, as_text(graph)


def test_an_update_under_jit_is_opened_where_its_operands_are_on_several_slices() -> None:
    @jax.jit
    def update(params: Any, gradients: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    graph = check(lambda p, x: update(p, jax.grad(loss)(p, x)), PARAMS, X)
    assert {transfer.nbytes for transfer in implied_transfers(graph)} == {64}
    assert len(implied_transfers(graph)) == 2


def test_flax_modules() -> None:
    first, second = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(4)]), nn.Dense(2)
    one = placed_call(first.apply, A, (P(), P("data")), P("data"), name="first")
    two = placed_call(second.apply, B, name="second")
    params = {
        "first": first.init(jax.random.key(0), jnp.asarray(X)),
        "second": second.init(jax.random.key(1), jnp.asarray(X)),
    }

    def program(params: Any, x: Any) -> Any:
        return jax.value_and_grad(lambda p: (two(p["second"], one(p["first"], x)) ** 2).mean())(params)

    check(program, params, X)


# P-1 to P-6 -----------------------------------------------------------------------------------------------------------


def test_unplaced_code_follows_the_largest_operand_then_the_last() -> None:
    one, two = placed_call(lambda x: x + 1, A, name="one"), placed_call(lambda x: x * 2, B, name="two")

    def program(x: Any) -> Any:
        a, b = one(x), two(x[0])
        return a + b, b - b.sum() * a[0], a[0, 0] + b[0]

    _, unfused, _ = graphs(program, X)
    home = [unfused.values[result.value].slice for result in unfused.results]
    assert home[0] == 0
    assert home[2] == 1
    assert "the largest of its operands on slices 0, 1" in as_text(unfused)
    check(program, X)


def test_what_only_hosts_and_constants_feed_runs_where_it_is_read() -> None:
    one = placed_call(lambda x, n: x + n, A, name="one")
    two = placed_call(lambda x, n: x * n, B, name="two")

    def program(x: Any, n: Any) -> Any:
        scale = jnp.sin(n * 2.0)
        noise = jax.random.normal(jax.random.key(0), (64, 64))
        return one(x, scale), two(noise, scale), noise[0, 0] + jnp.ones(()), jnp.arange(3), 7

    graph = check(program, X, 3)
    assert not implied_transfers(graph)
    _, unfused, _ = graphs(program, X, 3)
    assert unfused.nodes[0].slice == 1  # the noise: computed where it is read, ahead of the stage
    assert not unfused.nodes[0].placed


def test_an_expensive_thing_that_hosts_feed_is_computed_once() -> None:
    one, two = placed_call(lambda x: x + 1, A, name="one"), placed_call(lambda x: x * 2, B, name="two")

    def program(x: Any) -> Any:
        y = x @ x
        return one(y), two(y)

    graph = check(program, X)
    assert [transfer.nbytes for transfer in implied_transfers(graph)] == [64]


def test_a_broadcast_travels_before_it_is_broadcast() -> None:
    one, two = placed_call(lambda x: x + 1, A, name="one"), placed_call(lambda x: x.sum(), B, name="two")

    def program(x: Any) -> Any:
        a, total = one(x), two(x)
        return a * jnp.broadcast_to(total, a.shape) + (jnp.broadcast_to(total, a.shape) * 2 + 1)

    graph = check(program, X)
    assert [transfer.nbytes for transfer in implied_transfers(graph)] == [4]
    check(lambda x: jnp.broadcast_to(two(x), (4, 4)), X)
    check(lambda x: one(jnp.broadcast_to(two(x), (2, 4)).T @ jnp.broadcast_to(two(x), (2, 4))), X)


def test_sums_over_microbatches_stay_apart_and_stages_share_one_body() -> None:
    def program(params: Any, xs: Any) -> Any:
        total = jax.tree.map(jnp.zeros_like, params)
        for i in range(4):
            gradients = jax.grad(loss)(params, xs[i])
            total = jax.tree.map(jnp.add, total, gradients)
        return total

    xs = np.stack([X + i for i in range(4)])
    for residents in (None, [resident(B), resident(A), resident(A, 3)]):
        _, unfused, fused = graphs(program, PARAMS, xs, residents=residents)
        forward = [node for node in unfused.nodes if node.name == "front" and len(node.outputs) > 1]
        assert len(forward) == 4
        assert len({id(node.jaxpr) for node in forward}) == 1
        # One slicing of the batch, one forward and one backward with its sum for each microbatch: three bodies and the
        # first ones, which are joined with the slicing and have no sum before them.
        mine = [node for node in fused.nodes if node.slice == 0]
        assert len(mine) == 8
        assert len({id(node.jaxpr) for node in mine}) <= 4, as_text(fused)
        check(program, PARAMS, xs, residents=residents)


def test_loops_of_one_slice_stay_whole() -> None:
    step = placed_call(lambda c, x: jnp.tanh(c + x), A, name="step")

    def scanned(c: Any, xs: Any) -> Any:
        return jax.lax.scan(lambda c, x: (step(c, x), c.sum()), c, xs)

    def looped(c: Any) -> Any:
        c = jax.lax.while_loop(lambda c: c.sum() < 5, lambda c: step(c, c) + 1, c)
        return jax.lax.cond(c[0, 0] > 0, lambda c: step(c, c), lambda c: c, c)

    _, unfused, _ = graphs(scanned, X, np.stack([X, X]))
    assert where(unfused) == [(0, "scan")]
    _, unfused, _ = graphs(looped, X)
    assert where(unfused)[0][1] == "while"
    check(scanned, X, np.stack([X, X]))
    check(looped, X)
    check(lambda c, xs: jax.grad(lambda c: scanned(c, xs)[0].sum())(c), X, np.stack([X, X]))


def test_a_scan_over_several_slices_is_unrolled() -> None:
    def scanned(params: Any, xs: Any) -> Any:
        total, losses = jax.lax.scan(
            lambda total, x: (total + loss(params, x), loss(params, x * 2)), jnp.zeros(()), xs, reverse=True
        )
        return total, losses

    xs = np.stack([X, X + 1, X + 2])
    check(scanned, PARAMS, xs)
    graph = check(lambda p, xs: jax.grad(lambda p: scanned(p, xs)[0])(p), PARAMS, xs)
    assert "concatenate" not in as_text(graph)  # residuals go from step to step, never stacked
    check(lambda p, xs: jax.lax.scan(lambda t, x: (t + loss(p, x), t), 0.0, xs), PARAMS, xs[:0], default_slice=0)


@pytest.mark.parametrize("kind", ["while", "cond"])
def test_loops_that_span_slices_are_refused_with_a_way_out(kind: str) -> None:
    one, two = placed_call(lambda x: x + 1, A, name="one"), placed_call(lambda x: x * 2, B, name="two")

    def program(x: Any) -> Any:
        if kind == "while":
            return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: two(one(x)), x)
        return jax.lax.cond(x[0, 0] > 0, one, two, x)

    with pytest.raises(ProgramError, match=r"pathway\.(while_loop|cond)") as caught:
        graphs(program, X)
    assert "test_place.py:" in str(caught.value)


def test_a_stage_within_a_stage_of_another_slice_is_refused() -> None:
    inner = placed_call(lambda x: x + 1, B, name="inner")
    with pytest.raises(ProgramError, match="outer is placed on slice 0 and calls"):
        graphs(placed_call(lambda x: inner(x) * 2, A, name="outer"), X)
    same_slice = placed_call(lambda x: x + 1, A, name="inner")
    check(placed_call(lambda x: same_slice(x) * 2, A, name="outer"), X)


# Constants, references, homes -----------------------------------------------------------------------------------------


def test_large_constants_are_values_and_small_ones_are_baked() -> None:
    large, small = np.ones((32, 32), np.float32), np.ones((4, 4), np.float32)
    inner = placed_call(lambda x: x @ large, A, name="inner")
    both = placed_call(lambda x: jax.lax.scan(lambda c, _: (c @ large, None), x, None, length=2)[0], B, name="both")

    def program(x: Any) -> Any:
        y = inner(x @ small @ jnp.ones((4, 32)))
        return both(y) + jnp.asarray(large)[:4], jax.jit(lambda x: x @ large)(y)

    graph = check(program, X, tolerance=1e-3)
    assert all(array.shape == (32, 32) for _, array in graph.constants)
    assert len({id(array) for _, array in graph.constants}) == len(graph.constants) <= 2


def test_closed_over_arrays_by_reference() -> None:
    arrays = {"w": W, "b": X}
    homes = {"w": resident(A, handle="w"), "b": resident(B, handle="b")}

    def w() -> Any:
        return array_reference("w", (4, 4), np.dtype("float32"))

    def b() -> Any:
        return array_reference("b", (4, 4), np.dtype("float32"))

    inside = placed_call(lambda x: jnp.tanh(x @ w()), A, name="inside")
    looped = placed_call(
        lambda x: jax.lax.cond(
            x[0, 0] > 0,
            lambda x: jax.lax.scan(lambda c, _: (c @ w(), None), x, None, length=2)[0],
            lambda x: jax.lax.while_loop(lambda c: c.sum() < b()[0, 0], lambda c: c + w(), x),
            x,
        ),
        A,
        name="looped",
    )

    def program(x: Any) -> Any:
        def loss(x: Any) -> Any:
            return (inside(x) * b()).sum() + (jax.checkpoint(lambda x: jnp.sin(x) @ w())(x)).sum()

        return jax.grad(loss)(x), looped(x), w(), b() @ w()

    traced, unfused, fused = graphs(program, X, references=homes.__getitem__)
    expected = _without_references(program, arrays, X)
    for graph in (unfused, fused):
        assert sorted(handle for _, handle in graph.references) == ["b", "w"]
        same(traced.assemble(evaluate(graph, [X], arrays)), expected)


def _without_references(program: Any, arrays: Any, *args: Any) -> Any:
    """The program with plain arrays in the places of references."""
    original = globals()["array_reference"]
    globals()["array_reference"] = lambda handle, shape, dtype: jnp.asarray(arrays[handle])
    try:
        jax.clear_caches()
        return program(*args)
    finally:
        globals()["array_reference"] = original


def test_where_nothing_says_where() -> None:
    def program(x: Any) -> Any:
        return jnp.sin(x) @ x, x

    with pytest.raises(ProgramError, match=r"no pathway\.jit function.*no default slice"):
        graphs(program, X)
    graph = check(program, X, default_slice=1)
    assert {node.slice for node in graph.nodes} == {1}
    assert not check(program, X, residents=[resident(C)]).nodes[0].placed


def test_a_slice_that_is_not_there_is_refused() -> None:
    with pytest.raises(ProgramError, match="slice 0, which is released"):
        graphs(front, W, X, slices={1: B})


def test_a_long_chain_of_host_code_is_no_deep_recursion() -> None:
    def program(x: Any) -> Any:
        for _ in range(3000):
            x = jnp.add(x, x[::-1] if x.ndim > 2 else 1e-6)
        return x

    check(program, np.ones((32, 32), np.float32), default_slice=0, tolerance=1e-3)


def test_constraints_in_unplaced_code_give_the_home_sharding() -> None:
    def program(w: Any, x: Any) -> Any:
        y = jax.lax.with_sharding_constraint(front(w, x) * 2, NamedSharding(abstract_mesh(A), P(None, "model")))
        other = jax.lax.with_sharding_constraint(front(w, x) * 3, NamedSharding(abstract_mesh(C), P("x")))
        return y, other

    graph = check(jax.jit(program), W, X)
    specs = [graph.values[result.value].sharding.spec for result in graph.results]
    assert specs == [((), ("model",)), (("data",), ())]


def test_results_that_are_arguments_or_come_twice() -> None:
    def program(w: Any, x: Any, unused: Any) -> Any:
        y = front(w, x)
        return y, x, y, 1.0, unused, x

    graph = check(program, W, X, X)
    assert graph.results[1].value == graph.results[5].value == graph.arguments[1].value
    assert graph.results[0] == graph.results[2]


def test_dead_code_is_dropped() -> None:
    def program(w: Any, x: Any) -> Any:
        front(w, x * 3)
        return back(w, front(w, x)), None

    _, unfused, _ = graphs(program, W, X)
    assert where(unfused) == [(0, "front"), (1, "back")]


@pytest.mark.parametrize("shards", [1, 64, 4096])
def test_the_number_of_nodes_does_not_depend_on_the_number_of_shards(shards: int) -> None:
    wide, narrow = SliceShape(0, (("x", shards),)), SliceShape(1, (("x", 1),))
    one = placed_call(lambda w, x: jnp.tanh(x @ w), wide, (P(), P("x")), P("x"), name="one")
    two = placed_call(lambda x: (x**2).mean(), narrow, name="two")

    def program(w: Any, x: Any) -> Any:
        return jax.tree.map(lambda p, g: p - g, w, jax.grad(lambda w: two(one(w, x)))(w))

    struct = jax.ShapeDtypeStruct((4096, 4), np.float32)
    _, unfused, fused = graphs(program, W, struct, slices={0: wide, 1: narrow})
    assert (len(unfused.nodes), len(fused.nodes)) == (5, 3)


def test_donation_only_where_nobody_could_want_the_array() -> None:
    homes = [resident(B, handle=1), resident(A, handle=2)]

    def program(params: Any) -> Any:
        return jax.tree.map(lambda p: p * 2, params), params["front"][0]

    _, _, graph = graphs(program, PARAMS, residents=homes, donated=(0, 1))
    assert sum(len(node.donates) for node in graph.nodes) == 2
    # The same buffer twice; an argument that is a result; one that another slice reads.
    _, _, graph = graphs(program, PARAMS, residents=[resident(A, handle=1)] * 2, donated=(0, 1))
    assert not any(node.donates for node in graph.nodes)
    _, _, graph = graphs(lambda x: (x * 2, x), X, residents=[resident(A)], donated=(0,))
    assert not any(node.donates for node in graph.nodes)
    _, _, graph = graphs(lambda x: (x * 2, back(x, x)), X, residents=[resident(A)], donated=(0,))
    assert not any(node.donates for node in graph.nodes)


def test_the_text_tells_every_choice() -> None:
    _, unfused, _ = graphs(lambda p, x: jax.value_and_grad(loss)(p, x), PARAMS, X, slices=SLICES)
    text = as_text(unfused)
    assert hash(unfused) != hash(graphs(lambda x: back(x, x), X)[1])
    assert "program <lambda>: 4 nodes on 2 slices, 2 transfers of 128 bytes in all" in text
    assert "why     is a pathway.jit stage of slice 0" in text
    assert "TRANSFER of 64 bytes from slice 0 P(data,-)" in text
    assert "test_place.py:" in text
