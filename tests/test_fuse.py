"""Fusing: what becomes one computation, and above all what does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dataflow_reference import A, B, C, check, graphs

from pathway.dataflow.fuse import fuse
from pathway.dataflow.graph import Graph, Node, SliceShape
from pathway.dataflow.layout import Sharding
from pathway.dataflow.place import Resident
from pathway.dataflow.placed import placed_call
from pathway.dataflow.text import as_text, implied_transfers

X = np.arange(16, dtype=np.float32).reshape(4, 4) / 16
STAGES = [placed_call(lambda w, h: jnp.tanh(h @ w), slice, name=f"stage{slice.slice}") for slice in (A, B, C)]
LOSS = placed_call(lambda h, y: ((h - y) ** 2).mean(), C, name="loss")


def pipeline(params: Sequence[Any], xs: Any, ys: Any) -> Any:
    """Three stages, a loss on the last one's slice, microbatches one after the other, gradients summed."""

    def loss(params: Sequence[Any], x: Any, y: Any) -> Any:
        for stage, w in zip(STAGES, params, strict=True):
            x = stage(w, x)
        return LOSS(x, y)

    total, gradients = jnp.zeros(()), [jnp.zeros_like(w) for w in params]
    for x, y in zip(xs, ys, strict=True):
        value, new = jax.value_and_grad(loss)(params, x, y)
        total, gradients = total + value, jax.tree.map(jnp.add, gradients, new)
    return total, [w - 0.1 * g for w, g in zip(params, gradients, strict=True)]


def waits(graph: Graph) -> list[set[int]]:
    """For every node of a graph the slices' stages, by (name, how often met), that must have ended before it."""
    producer = {output: node.index for node in graph.nodes for output in node.outputs}
    ancestors: list[set[int]] = []
    for node in graph.nodes:
        before = {producer[value] for value in node.inputs if value in producer}
        ancestors.append(before.union(*(ancestors[index] for index in before)) if before else before)
    return ancestors


def on(graph: Graph, slice: int) -> list[Node]:
    return [node for node in graph.nodes if node.slice == slice]


def test_weights_are_no_output_of_the_passes_that_read_them() -> None:
    params, (xs, ys) = [X, X + 1, X + 2], ([X, X * 2], [X, X])
    graph = check(pipeline, params, xs, ys, residents=_on_slices(params))
    weights = {argument.value for argument in graph.arguments[:3]}
    backward = [node for node in graph.nodes if node.backward]
    assert all(weights & set(node.inputs) for node in backward if node.slice > 0)  # the first has no input gradient
    forward = next(node for node in graph.nodes if node.slice == 1 and not node.backward)
    assert len(forward.outputs) <= 3  # its output, and of what its backward pass needs all but the weights


def _on_slices(params: Sequence[Any]) -> list[Resident | None]:
    homes = [Resident(slice.slice, Sharding(slice.mesh, ((), ()))) for slice in (A, B, C)]
    return [*homes[: len(params)], None, None, None, None]


def test_a_chain_on_one_slice_becomes_one_computation() -> None:
    step = placed_call(lambda x: x * 0.5 + 1, A, name="step")

    def program(x: Any) -> Any:
        for _ in range(128):
            x = step(x)
        return x

    _, unfused, fused = graphs(program, X)
    assert len(unfused.nodes) == 128
    assert len({id(node.jaxpr) for node in unfused.nodes}) == 1
    assert [node.name for node in fused.nodes] == ["step x128"]
    check(program, X)


def test_a_pipeline_stays_a_pipeline() -> None:
    params = [X, X.T, X + 1]
    xs, ys = np.stack([X + i for i in range(4)]), np.stack([X] * 4)
    graph = check(pipeline, params, xs, ys)
    _, unfused, _ = graphs(pipeline, params, xs, ys)
    # For each microbatch a forward and a backward node, which are one on the last slice; and the sum of the gradients,
    # which is one with the backward node unless another slice waits for that one.
    assert [len(on(graph, slice)) for slice in (0, 1, 2)] == [8, 12, 9], as_text(graph)
    before = waits(graph)
    forwards = [node for node in on(graph, 0) if not node.backward]
    assert len(forwards) == 4
    assert all(graph.nodes[index].slice == 0 for node in forwards for index in before[node.index])
    # The stages of all microbatches but the first and the last share their bodies.
    assert len({id(node.jaxpr) for node in on(graph, 1)}) <= 5
    moved = sum(transfer.nbytes for transfer in implied_transfers(graph))
    assert moved == sum(transfer.nbytes for transfer in implied_transfers(unfused))


def test_backward_and_sum_are_one() -> None:
    graph = check(pipeline, [X, X.T, X + 1], np.stack([X, X + 1, X + 2]), np.stack([X] * 3))
    backward = [node for node in on(graph, 0) if node.backward]
    assert all("add" in node.name for node in backward[1:]), as_text(graph)


def test_what_another_slice_reads_is_not_delayed() -> None:
    one, two, three = (placed_call(lambda x: x + 1, A, name=n) for n in ("one", "two", "three"))
    other = placed_call(lambda x: x * 2, B, name="other")

    def program(x: Any) -> Any:
        a = one(x)
        b = other(a)  # F-1: `one` must not wait for `two`
        c = two(a)
        return three(b + c)  # F-2: `two` must not wait for `other`

    graph = check(program, X)
    assert [node.name for node in on(graph, 0)] == ["one", "two", "add, three"]


def test_a_forward_does_not_wait_for_another_microbatchs_backward() -> None:
    one, two = placed_call(lambda x: x + 1, A, name="one"), placed_call(lambda x: x - 1, A, name="two")
    other = placed_call(lambda x: x * 2, B, name="other")

    def program(x: Any) -> Any:
        back = two(other(one(x)))
        return back, other(one(x * 2))  # F-3: this `one` needs nothing that `two` needs

    graph = check(program, X)
    assert [node.name for node in on(graph, 0)] == ["mul, one", "two", "one"] or len(on(graph, 0)) == 3, as_text(graph)


def test_a_node_that_reads_twice_and_a_result_inside_a_group() -> None:
    one = placed_call(lambda x, y: x + y, A, name="one")

    def program(x: Any) -> Any:
        a = one(x, x)
        b = one(a, a)
        return a, b, one(b, a)

    graph = check(program, X)
    assert len(graph.nodes) == 1
    assert len(graph.nodes[0].inputs) == 1
    assert len(graph.nodes[0].outputs) == 3


def test_donations_follow_the_group() -> None:
    one, two = placed_call(lambda x: x + 1, A, name="one"), placed_call(lambda x, y: x * y, A, name="two")
    home = Resident(0, Sharding(A.mesh, ((), ())), "x")

    def program(x: Any) -> Any:
        return two(one(x), x)

    _, unfused, fused = graphs(program, X, residents=[home], donated=(0,))
    assert [node.donates for node in unfused.nodes] == [(), (1,)]
    assert [node.donates for node in fused.nodes] == [(0,)]
    check(program, X, residents=[home], donated=(0,))


def test_constants_of_a_group_are_kept_once() -> None:
    small = np.full((4, 4), 3, np.float32)
    one = placed_call(lambda x: x @ small, A, name="one")

    def program(x: Any) -> Any:
        return one(one(x) + small) * jnp.asarray(small)

    graph = check(program, X)
    assert len(graph.nodes) == 1
    assert not graph.constants


def test_fusing_again_changes_nothing() -> None:
    _, _, fused = graphs(pipeline, [X, X.T, X + 1], np.stack([X, X + 1]), np.stack([X] * 2))
    assert fuse(fused) is fused


def test_a_slice_of_one_device() -> None:
    tiny = SliceShape(0, (("x", 1),))
    step = placed_call(lambda x: x + 1, tiny, name="step")
    check(lambda x: step(step(x)), X, slices={0: tiny})
