"""Whole plans, run in one process, equal plain evaluation: random graphs, any order of gangs, every kind of layout."""

from __future__ import annotations

import functools

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from graph_builder import GraphBuilder, bound, pipeline, random_graphs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from pathway.dataflow.check import validate
from pathway.dataflow.computation import lower_graph
from pathway.dataflow.fuse import fuse
from pathway.dataflow.graph import SliceShape
from pathway.dataflow.layout import Sharding
from pathway.dataflow.place import Resident, place
from pathway.dataflow.placed import placed_call
from pathway.dataflow.plan import Execute
from pathway.dataflow.planner import build_plan, donations
from pathway.dataflow.schedule import order
from pathway.dataflow.trace import trace
from pathway.testing.interpret import run_plan


@functools.cache
def body(shapes, outputs=2):
    """A node that mixes its inputs so that order, position and every element matter."""

    def mix(*inputs):
        total = jnp.arange(64.0).reshape(8, 8) / 64
        for position, value in enumerate(inputs):
            total = total * 0.5 + jnp.tanh(value[:8, :8]) * (position + 1) + value.mean()
        return (total, total.T - 1)[:outputs]

    return jax.make_jaxpr(mix)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


def reference(graph, arguments):
    values = dict(zip((argument.value for argument in graph.arguments), arguments, strict=True))
    values.update(graph.constants)
    for node in graph.nodes:
        results = jex.jaxpr_as_fun(node.jaxpr)(*(jnp.asarray(values[value]) for value in node.inputs))
        values.update(zip(node.outputs, results, strict=True))
    return [np.asarray(values[result.value]) for result in graph.results]


def planned(graph, bindings, schedule=None):
    schedule = order(graph, bindings, schedule=schedule)
    donated = donations(graph, bindings, schedule)
    computations = lower_graph(graph, donated)
    plan = build_plan(
        graph,
        bindings,
        {index: computation.key for index, computation in computations.items()},
        schedule,
        kept={index: computation.kept for index, computation in computations.items()},
        donates=donated,
    )
    validate(plan)
    return plan, {computation.key: computation for computation in computations.values()}


def per_host(bindings):
    return {binding.island: binding.devices_per_host for binding in bindings.values()}


def drawn(graph, seed):
    numbers = np.random.default_rng(seed)
    return [
        numbers.normal(size=graph.values[argument.value].aval.shape).astype(np.float32) for argument in graph.arguments
    ]


def check(graph, bindings, seed=0, schedule=None):
    plan, computations = planned(graph, bindings, schedule)
    arguments = drawn(graph, seed)
    everything = [*arguments, *(array for _, array in graph.constants)]
    results = run_plan(plan, computations, everything, devices_per_host=per_host(bindings), seed=seed)
    for result, expected in zip(results, reference(graph, arguments), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5, err_msg=f"seed {seed}")


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(random_graphs(body=body, most_nodes=6), st.integers(0, 2**32))
def test_random_graphs_equal_plain_evaluation(case, seed):
    check(*case, seed=seed)


@pytest.mark.parametrize("schedule", ["simulated", "strict"])
@pytest.mark.parametrize("seed", range(3))
def test_pipelines(schedule, seed):
    graph, bindings = pipeline(3, 3, body=lambda inputs, outputs: body(((8, 8),) * inputs, outputs))
    check(graph, bindings, seed, order(graph, bindings).orders if schedule == "strict" else None)


def test_constants_and_unused_inputs():
    builder = GraphBuilder({1: bound(1, "east", range(4)), 2: bound(2, "west", range(2))})
    argument, unused = builder.argument(1), builder.argument(2)
    table = builder.constant(1, np.arange(64, dtype=np.float32).reshape(8, 8))
    ignores = jax.make_jaxpr(lambda a, b, c: (a * 2 + c, c))(*[jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 3)
    results = [
        value for where in (1, 2) for value in builder.node(where, [argument, unused, table], outputs=2, jaxpr=ignores)
    ]
    graph = builder.graph([*results, table, unused])
    check(graph, builder.bindings)
    plan, _ = planned(graph, builder.bindings)
    assert plan.arguments[1].entries == ()


def test_typed_keys_cross_islands():
    builder = GraphBuilder({1: bound(1, "east", range(2)), 2: bound(2, "west", range(4))})
    key = builder.argument(1, (), dtype="key<fry>")
    split = jax.make_jaxpr(lambda k: jax.random.split(k, 4))(jax.random.key(0))
    keys = builder.node(1, [key], shape=(4,), spec=["x"], dtype="key<fry>", jaxpr=split)
    draw = jax.make_jaxpr(lambda ks: jax.vmap(lambda k: jax.random.normal(k, (3,)))(ks))(
        jax.random.split(jax.random.key(0), 4)
    )
    numbers = builder.node(2, [keys], shape=(4, 3), spec=["x"], wants={0: ["x"]}, jaxpr=draw)
    graph = builder.graph([numbers, keys])
    plan, computations = planned(graph, builder.bindings)
    start = jax.random.key(7)
    numbers, keys = run_plan(
        plan, computations, [jax.random.key_data(start)], devices_per_host=per_host(builder.bindings)
    )
    split = jax.random.split(start, 4)
    np.testing.assert_array_equal(keys, jax.random.key_data(split))
    np.testing.assert_allclose(numbers, jax.vmap(lambda k: jax.random.normal(k, (3,)))(split), rtol=1e-6)


@pytest.mark.parametrize("fusing", [True, False])
def test_a_training_step_from_python_to_results(fusing):
    """Trace, place, fuse, order, donate, lower, plan, run: the results are those of plain `jit`."""
    front = SliceShape(1, (("data", 2), ("model", 2)))
    middle, back = SliceShape(2, (("x", 2),)), SliceShape(3, (("x", 2),))
    spec = PartitionSpec
    embed = placed_call(lambda w, x: jnp.tanh(x @ w), front, (spec("model"), spec("data")), spec("data"), name="embed")
    body = placed_call(lambda w, x: x + jnp.tanh(x @ w), middle, (spec(), spec("x")), spec("x"), name="body")
    head = placed_call(lambda w, h, y: ((h @ w - y) ** 2).mean(), back, name="head")

    def step(weights, x, y):
        def loss(weights, x, y):
            return head(weights[2], body(weights[1], embed(weights[0], x)), y)

        parts = [jax.value_and_grad(loss)(weights, x[batch], y[batch]) for batch in range(3)]
        gradients = jax.tree.map(lambda *g: sum(g) / 3, *(gradient for _, gradient in parts))
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), sum(value for value, _ in parts) / 3

    numbers = np.random.default_rng(0)
    weights = [numbers.normal(size=shape).astype(np.float32) for shape in ((16, 16), (16, 16), (16, 4))]
    x, y = (numbers.normal(size=(3, 8, width)).astype(np.float32) for width in (16, 4))
    traced = trace(step, (weights, x, y))
    homes = [
        Resident(1, Sharding(front.mesh, (("model",), ())), 0),
        Resident(2, Sharding(middle.mesh, ((), ())), 1),
        Resident(3, Sharding(back.mesh, ((), ())), 2),
    ]
    graph = place(traced, {1: front, 2: middle, 3: back}, [*homes, None, None], donated=(0, 1, 2))
    graph = fuse(graph) if fusing else graph
    bindings = {
        1: bound(1, "east", range(4), front.mesh),
        2: bound(2, "west", [0, 1], middle.mesh, devices_per_host=2),
        3: bound(3, "west", [2, 3], back.mesh, devices_per_host=2),
    }
    plan, computations = planned(graph, bindings)
    assert len(computations) < len(graph.nodes)  # microbatches share
    assert any(
        step.donates for part in plan.parts for gang in part.gangs for step in gang.steps if isinstance(step, Execute)
    )
    arguments = [*weights, x, y, *(array for _, array in graph.constants)]
    expected = jax.tree.leaves(jax.jit(step)(weights, x, y))
    for seed in range(3):
        results = run_plan(plan, computations, arguments, devices_per_host=per_host(bindings), seed=seed)
        for result, value in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, value, rtol=1e-5, atol=1e-6, err_msg=f"seed {seed}")
