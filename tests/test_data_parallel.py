"""Data parallel over islands: the same bits everywhere, equal to one process, unequal islands, compression, overlap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathway as pw
from pathway.programs import data_parallel, pipeline

BATCH = 48
SPECS = [{"in": P(None, "model"), "out": P("model", None)}] * 2


def layer(params: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ params["in"]) @ params["out"]


def mean_square(y: Any, t: Any) -> Any:
    return ((y - t) ** 2).mean()


def reference(params: Any, x: Any, t: Any) -> Any:
    for some in params:
        x = layer(some, x)
    return mean_square(x, t)


def host_params() -> Any:
    rng = np.random.default_rng(0)
    return [
        {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in (("in", (8, 12)), ("out", (12, 8)))}
        for _ in range(2)
    ]


def batch() -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    return tuple(rng.normal(size=(2, BATCH, 8)).astype(np.float32))


def replica(slice: pw.Slice) -> Any:
    """Two layers, tensor parallel where the slice has more than one device."""
    spec = SPECS[0] if "model" in slice.mesh else P()
    stages = [pw.jit(slice, in_specs=(spec, P()), name=f"layer{number}")(layer) for number in range(2)]

    def loss(params: Any, x: Any, t: Any) -> Any:
        for stage, some in zip(stages, params, strict=True):
            x = stage(some, x)
        return mean_square(x, t)

    return jax.value_and_grad(loss)


def put(slice: pw.Slice) -> Any:
    return pw.put(host_params(), slice, SPECS if "model" in slice.mesh else P())


@pytest.fixture
def slices(client: Any) -> Iterator[list[pw.Slice]]:
    """Three slices of unequal sizes over both islands, of which one has two hosts."""
    taken = [
        pw.slice(2, mesh={"model": 2}, island="east"),
        pw.slice(4, mesh={"data": 1, "model": 4}, island="west"),
        pw.slice(1, island="east"),
    ]
    yield taken
    for slice in taken:
        slice.release()


def trainer(step: Any, rate: float = 0.1) -> Any:
    @pw.program(donate_argnums=0)
    def train(params: Any, *state_and_batch: Any) -> Any:
        value, gradients, *residue = step(params, *state_and_batch)
        return jax.tree.map(lambda p, g: p - rate * g, params, gradients), value, *residue

    return train


@pytest.mark.parametrize(("count", "shares"), [(1, None), (2, None), (2, [3, 1]), (3, [1, 2, 1])])
def test_all_replicas_train_alike_and_as_one_process(slices: list[Any], count: int, shares: Any) -> None:
    mine, (x, t) = slices[:count], batch()
    step = data_parallel([replica(slice) for slice in mine], shares=shares)
    value, gradients = step([put(slice) for slice in mine], x, t)
    expected, expected_gradients = jax.value_and_grad(reference)(host_params(), x, t)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    for some, slice in zip(gradients, mine, strict=True):
        assert all(leaf.slice is slice for leaf in jax.tree.leaves(some))
        for a, b in zip(jax.tree.leaves(pw.get(some)), jax.tree.leaves(expected_gradients), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

    train, params = trainer(step), [put(slice) for slice in mine]
    expected_params: Any = host_params()
    for _ in range(4):
        params, value = train(params, x, t)
        gradient = jax.grad(reference)(expected_params, x, t)
        expected_params = jax.tree.map(lambda p, g: p - 0.1 * g, expected_params, gradient)
    first = jax.tree.leaves(pw.get(params[0]))
    for other in params[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(first, jax.tree.leaves(pw.get(other)), strict=True))
    assert len(set(step.checksums(params))) == 1
    for a, b in zip(first, jax.tree.leaves(expected_params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compress", ["bfloat16", "int8"])
@pytest.mark.parametrize("count", [2, 3])
def test_compressed_gradients_keep_replicas_alike_and_lose_nothing_for_good(
    slices: list[Any], compress: Any, count: int
) -> None:
    mine, (x, t) = slices[:count], batch()
    step = data_parallel([replica(slice) for slice in mine], compress=compress)
    params = [put(slice) for slice in mine]
    residue = step.no_residue(params)
    totals: Any = None
    steps = 8
    for _ in range(steps):  # at the same parameters: what is rounded away at first comes later
        _, gradients, residue = step(params, residue, x, t)
        assert len(set(step.checksums(gradients))) == 1
        got = pw.get(gradients[0])
        totals = got if totals is None else jax.tree.map(np.add, totals, got)
    exact = jax.grad(reference)(host_params(), x, t)
    for total, wanted in zip(jax.tree.leaves(totals), jax.tree.leaves(exact), strict=True):
        once = np.abs(wanted).max() / (60 if compress == "int8" else 250)  # one rounding's error, at most
        assert np.abs(total - steps * wanted).max() < 2 * once


def test_what_travels_is_small_and_goes_from_shard_to_shard(slices: list[Any]) -> None:
    mine, (x, t) = slices[:2], batch()
    params = [put(slice) for slice in mine]
    gradient_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(host_params()))

    def moved(compress: Any) -> int:
        step = data_parallel([replica(slice) for slice in mine], compress=compress)
        state = [step.no_residue(params)] if compress else []
        plan = step.lower(params, *state, x, t).plan
        between = [e for part in plan.parts for e in part.edges_out if e.source_island != e.target_island]
        assert between
        for edge in between:
            if edge.target.aval.shape in ((8, 12), (12, 8)):
                assert any(edge.target.sharding.spec), "it arrives whole"
        return plan.cost_bytes

    assert 2 * gradient_bytes <= moved(None) < 2.2 * gradient_bytes
    assert moved("bfloat16") < 1.2 * gradient_bytes
    assert moved("int8") < 0.8 * gradient_bytes


def test_gradients_of_the_last_layer_travel_while_the_first_is_computed(slices: list[Any]) -> None:
    mine, (x, t) = slices[:2], batch()
    lowered = data_parallel([replica(slice) for slice in mine]).lower([put(slice) for slice in mine], x, t)
    [part] = [part for part in lowered.plan.parts if part.island == "east"]
    kinds = [type(step).__name__ for gang in part.gangs for step in gang.steps]
    assert "Execute" in kinds[kinds.index("Send") :][:8]
    sends = [number for number, kind in enumerate(kinds) if kind == "Send"]
    executes = [number for number, kind in enumerate(kinds) if kind == "Execute"]
    assert any(min(sends) < number < max(sends) for number in executes)


def test_a_checksum_sees_every_bit(slices: list[Any]) -> None:
    step = data_parallel([replica(slice) for slice in slices[:2]])
    one, other = put(slices[0]), host_params()
    other[1]["out"][3, 5] = np.nextafter(other[1]["out"][3, 5], np.float32(9))
    same, different = step.checksums([one, pw.put(other, slices[1], SPECS)])
    assert same != different
    other[1]["out"][3, 5] = host_params()[1]["out"][3, 5]
    same, equal = step.checksums([one, pw.put(other, slices[1], SPECS)])
    assert same == equal
    other[0]["in"][[0, 1]] = other[0]["in"][[1, 0]]
    assert step.checksums([one, pw.put(other, slices[1], SPECS)])[1] != same


def test_pipelines_are_replicas(client: Any) -> None:
    x, t = batch()
    with (
        pw.slice(2, island="east") as a,
        pw.slice(2, island="east") as b,
        pw.slice(1, island="west") as c,
        pw.slice(3, island="west") as d,
    ):
        pairs = [(a, b), (c, d)]
        pipes = [
            pipeline([pw.jit(slice, name="layer")(layer) for slice in pair], mean_square, microbatches=4)
            for pair in pairs
        ]
        step = data_parallel(pipes, shares=[2, 1])
        params = [[pw.put(p, slice) for p, slice in zip(host_params(), pair, strict=True)] for pair in pairs]
        value, gradients = step(params, x[:12], t[:12])
        assert len(set(step.checksums(gradients))) == 1
        expected, expected_gradients = jax.value_and_grad(reference)(host_params(), x[:12], t[:12])
        assert float(value) == pytest.approx(float(expected), rel=1e-5)
        for p, g in zip(jax.tree.leaves(params), jax.tree.leaves(gradients), strict=True):
            assert p.slice is g.slice
        for one, wanted in zip(jax.tree.leaves(gradients[1]), jax.tree.leaves(expected_gradients), strict=True):
            np.testing.assert_allclose(one.numpy(), wanted, rtol=1e-5, atol=1e-6)


def test_what_is_no_data_parallel_program(slices: list[Any]) -> None:
    x, t = batch()
    one, two = replica(slices[0]), replica(slices[1])
    with pytest.raises(pw.ProgramError, match="no replica"):
        data_parallel([])
    with pytest.raises(pw.ProgramError, match=r"2 replicas, and shares \[1\]"):
        data_parallel([one, two], shares=[1])
    with pytest.raises(pw.ProgramError, match="not 'zip'"):
        data_parallel([one], compress="zip")  # type: ignore[arg-type]
    with pytest.raises(pw.ProgramError, match=r"shape \(48, 8\), which cannot be dealt out to 2 replicas in shares of"):
        data_parallel([one, two], shares=[3, 2])([put(slices[0]), put(slices[1])], x, t)
    with pytest.raises(pw.ProgramError, match="2 replicas, and parameters for 1"):
        data_parallel([one, two])([put(slices[0])], x, t)
    other = jax.value_and_grad(lambda params, x, t: mean_square(layer(params["only"], x), t))
    with pytest.raises(pw.ProgramError, match="differ in structure"):
        data_parallel([one, other])([put(slices[0]), {"only": host_params()[0]}], x, t)
