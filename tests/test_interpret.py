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

from pathway.dataflow.check import validate
from pathway.dataflow.computation import lower_graph
from pathway.dataflow.planner import build_plan, donations
from pathway.dataflow.schedule import order
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


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(random_graphs(body=body, most_nodes=8), st.integers(0, 2**32))
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
