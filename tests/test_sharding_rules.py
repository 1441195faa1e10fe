"""Output shardings from input shardings, rule by rule."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pathway.dataflow.graph import SliceShape
from pathway.dataflow.layout import Sharding
from pathway.dataflow.placed import mesh_without_devices, placed_call
from pathway.dataflow.sharding_rules import output_shardings, wanted_sharding

MESH = (("a", 2), ("b", 4))
ABSTRACT = mesh_without_devices(MESH)

A, B, N = ("a",), ("b",), ()


def constraint(x: Any, *spec: Any) -> Any:
    return jax.lax.with_sharding_constraint(x, NamedSharding(ABSTRACT, P(*spec)))


def outputs(fun: Any, *arguments: tuple[tuple[int, ...], tuple[tuple[str, ...], ...]]) -> list[Any]:
    """The specs of the function's outputs for arguments given as (shape, spec)."""
    jaxpr = jax.make_jaxpr(fun)(*[jax.ShapeDtypeStruct(shape, np.float32) for shape, _ in arguments])
    return [
        sharding.spec for sharding in output_shardings(jaxpr, [Sharding(MESH, spec) for _, spec in arguments], MESH)
    ]


@pytest.mark.parametrize(
    ("fun", "arguments", "expected"),
    [
        (lambda x: constraint(jnp.sin(x), "b"), [((8, 8), (A, N))], [(B, N)]),
        (lambda x: constraint(x, P.UNCONSTRAINED, "b"), [((8, 8), (A, N))], [(A, B)]),
        (lambda x, y: x * y + 1, [((8, 8), (A, N)), ((8, 8), (N, B))], [(A, B)]),
        (lambda x, y: x * y, [((8, 8), (A, N)), ((8, 8), (N, A))], [(A, N)]),  # one axis splits one dimension
        (lambda x: x.T, [((8, 16), (A, B))], [(B, A)]),
        (lambda x: jnp.broadcast_to(x, (3, 8)), [((8,), (A,))], [(N, A)]),
        (lambda x: x.sum(0), [((8, 16), (A, B))], [(B,)]),
        (lambda x: (x.max(1), jnp.argmax(x, 0)), [((8, 16), (A, B))], [(A,), (B,)]),
        (lambda x, w: x @ w, [((8, 16), (A, N)), ((16, 8), (N, B))], [(A, B)]),
        (lambda x, w: x @ w, [((8, 16), (A, N)), ((16, 8), (N, A))], [(A, N)]),
        (lambda x, w: jnp.einsum("bij,bjk->bik", x, w), [((8, 4, 4), (A, N, N)), ((8, 4, 8), (A, N, B))], [(A, N, B)]),
        (lambda x: x.reshape(8, 4, 4), [((8, 16), (A, B))], [(A, B, N)]),
        (lambda x: x.reshape(32, 16), [((8, 4, 16), (A, N, B))], [(A, B)]),
        (lambda x: x.reshape(32, 16), [((8, 4, 16), (N, A, B))], [(N, B)]),
        (lambda x: x.reshape(2, 4, 16), [((8, 16), (B, A))], [(N, N, A)]),  # two cannot be split into four
        (lambda x: x.astype(jnp.bfloat16)[None], [((8,), (A,))], [(N, A)]),
        (lambda x: jnp.where(x > 0, x, 0.0), [((8,), (A,))], [(A,)]),
        (lambda x: jnp.squeeze(x, 1), [((8, 1, 4), (A, N, B))], [(A, B)]),
        (lambda x, y: jnp.concatenate([x, y], 0), [((8, 8), (N, B)), ((8, 8), (A, N))], [(N, B)]),
        (lambda x: x[:4], [((8, 8), (A, B))], [(N, B)]),
        (lambda x: jnp.pad(x, ((1, 1), (0, 0))), [((8, 8), (A, B))], [(N, B)]),
        (lambda x: jnp.cumsum(x, 1), [((8, 8), (A, N))], [(A, N)]),
        (lambda x: jax.nn.softmax(x), [((8, 8), (A, N))], [(A, N)]),
        (lambda x: jax.checkpoint(jnp.sin)(jax.jit(jnp.cos)(x)), [((8,), (A,))], [(A,)]),
        (lambda x: jax.nn.relu(x), [((8,), (A,))], [(A,)]),
        (lambda x: jax.lax.scan(lambda c, r: (c + r, c * 2), x[0] * 0, x), [((4, 8), (N, A))], [(A,), (N, A)]),
        (lambda x: jax.lax.scan(lambda c, r: (c.T, c), x, None, length=2)[0], [((8, 8), (A, N))], [(N, N)]),
        (lambda x: jax.lax.while_loop(lambda c: c.sum() > 0, lambda c: c - 1, x), [((8,), (A,))], [(A,)]),
        (lambda x: jax.lax.cond(x[0] > 0, lambda x: x, lambda x: x + 1, x), [((8,), (A,))], [(A,)]),
        (lambda x: jax.lax.optimization_barrier((x, x.T)), [((8, 8), (A, N))], [(A, N), (N, A)]),
        (lambda x: x.at[0].add(1.0), [((8, 8), (A, B))], [(A, B)]),
        (lambda x: jnp.sort(x, axis=1)[::2, :], [((6, 8), (N, B))], [(N, B)]),
        (lambda x: constraint(x[:6], "b"), [((8,), (A,))], [(N,)]),  # six do not split into four
        (lambda x: jnp.zeros((8, 8)), [((8,), (A,))], [(N, N)]),
        (
            lambda x: jax.shard_map(lambda x: x, mesh=ABSTRACT, in_specs=P("a"), out_specs=P("a"))(x),
            [((8, 4), (N, N))],
            [(A, N)],
        ),
        (
            lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME"),
            [((8, 4, 8, 8), (A, N, N, N)), ((16, 4, 3, 3), (B, N, N, N))],
            [(A, B, N, N)],
        ),
    ],
)
def test_forward(fun: Any, arguments: Any, expected: Any) -> None:
    assert outputs(fun, *arguments) == expected


def wanted(fun: Any, *shapes: tuple[int, ...]) -> list[Any]:
    jaxpr = jax.make_jaxpr(fun)(*[jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes])
    return [wanted_sharding(jaxpr, position, MESH).spec for position in range(len(shapes))]


def test_the_constraint_on_an_input_is_what_it_wants() -> None:
    stage = placed_call(lambda x, y: x @ y, SliceShape(0, MESH), (P("a"), P(None, "b")), name="stage")
    assert wanted(lambda x, y: stage(x, y) + 1, (8, 8), (8, 8)) == [(A, N), (N, B)]
    assert wanted(lambda x: jnp.sin(x), (8,)) == [(N,)]
    assert wanted(lambda x: jax.lax.scan(lambda c, r: (stage(c, r), None), x[0], x)[0], (4, 8, 8)) == [(N, N, B)]
    assert wanted(lambda x: jax.jit(jax.checkpoint(lambda x: constraint(x, "b")))(x), (8, 8)) == [(B, N)]
    assert wanted(lambda x: constraint(x, "b"), (6, 8)) == [(N, N)]
    other = mesh_without_devices((("a", 4),))
    assert wanted(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(other, P("a"))), (8,)) == [(N,)]


def test_an_array_from_elsewhere_comes_in_the_sharding_of_what_it_meets() -> None:
    there = Sharding(MESH, (A, B))
    shape = jax.ShapeDtypeStruct((8, 8), np.float32)

    def wanted(fun: Any) -> Any:
        return wanted_sharding(jax.make_jaxpr(fun)(shape, shape), 0, MESH, [None, there]).spec

    assert wanted(lambda x, y: x + y) == (A, B)
    assert wanted(lambda x, y: x - 0.1 * y) == (A, B)
    assert wanted(lambda x, y: jax.lax.optimization_barrier((x, y))[0]) == (A, B)
    assert wanted(lambda x, y: x * 2 + y) == (N, N)  # only what it meets first
    assert wanted(lambda x, y: x @ y) == (N, N)
    assert wanted(lambda x, y: constraint(x, "b") + y) == (B, N)
    assert wanted_sharding(jax.make_jaxpr(jnp.add)(shape, shape), 0, MESH).spec == (N, N)
