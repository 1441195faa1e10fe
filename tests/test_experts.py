"""Sparse routing: equal to the dense reference, forward and backward, and only chosen experts run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pathway as pw
from pathway.client.route import row_sizes
from pathway.programs import experts, load_balancing_loss, top_k_choices

ROWS, WIDTH, EXPERTS = 8, 3, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, WIDTH)).astype(np.float32)
PARAMS = [
    {"w": RNG.normal(size=(WIDTH, WIDTH)).astype(np.float32), "b": np.full(WIDTH, number, np.float32)}
    for number in range(EXPERTS)
]


def feed_forward(params: Any, rows: Any) -> Any:
    return jax.nn.relu(rows @ params["w"] + params["b"])


@pytest.fixture(scope="module")
def mixture(cluster: Any) -> Any:
    """Four experts on two slices of two islands, a router's stage on a third, and the program over them."""
    with pw.connect(cluster.address):
        router = pw.jit(pw.slice(2, island="east"), name="router")(lambda x: jnp.tanh(x))
        ready = experts(feed_forward, [pw.slice(1, island="east"), pw.slice(2, island="west")], EXPERTS)

        def run(params: Any, x: Any, scores: Any, k: int, capacity_factor: float | None) -> Any:
            return ready(params, router(x), scores, k, capacity_factor=capacity_factor)

        yield ready, router, pw.program(run, static_argnums=(3, 4)), ready.put(PARAMS)
    pw.disconnect()


def scores_for(*chosen: int) -> Any:
    """Scores by which all rows choose these experts, in this order."""
    scores = np.full((ROWS, EXPERTS), -9, np.float32)
    for place, expert in enumerate(chosen):
        scores[:, expert] = RNG.random(ROWS) - place * 2
    return scores


RANDOM = RNG.normal(size=(ROWS, EXPERTS)).astype(np.float32)


@pytest.mark.parametrize("scores", [RANDOM, scores_for(2, 0), scores_for(3, 1)], ids=["any", "two", "two others"])
def test_routed_equals_dense_and_only_the_chosen_run(mixture: Any, scores: Any) -> None:
    ready, _, program, params = mixture
    with pw.record_steps() as recording:
        rows, loss = program(params, X, scores, 2, None)
        rows.block_until_ready()
    dense, dense_loss = ready.dense(PARAMS, np.tanh(X), scores, 2)
    np.testing.assert_allclose(rows.numpy(), dense, rtol=1e-5, atol=1e-5)
    assert float(loss) == pytest.approx(float(dense_loss))
    chosen = np.unique(np.argsort(-scores, axis=-1)[:, :2])
    assert sum("expert" in step.label for step in recording.steps) == len(chosen)


def test_gradients_equal_those_of_the_dense_reference(mixture: Any) -> None:
    ready, router, _, params = mixture

    def loss(run: Any) -> Any:
        def of(params: Any, x: Any, scores: Any) -> Any:
            rows, balance = run(params, x, scores)
            return (rows**2).sum() + 0.1 * balance

        return jax.value_and_grad(of, argnums=(0, 1, 2))

    ours = pw.program(loss(lambda params, x, scores: ready(params, router(x), scores, 2)))
    theirs = loss(lambda params, x, scores: ready.dense(params, jnp.tanh(x), scores, 2))
    for scores in (RANDOM, scores_for(1, 2)):
        for one, other in zip(
            jax.tree.leaves(ours(params, X, scores)), jax.tree.leaves(theirs(PARAMS, X, scores)), strict=True
        ):
            np.testing.assert_allclose(one.numpy(), other, rtol=1e-4, atol=1e-4)


def test_a_capacity_drops_the_choices_that_come_last(mixture: Any) -> None:
    _, _, program, params = mixture
    scores = scores_for(2)
    rows, _ = program(params, X, scores, 1, 2.0)  # twice an even share of 8 rows over 4 experts
    made = np.asarray(feed_forward(PARAMS[2], np.tanh(X)))
    np.testing.assert_allclose(rows.numpy(), np.where(np.arange(ROWS)[:, None] < 4, made, 0), rtol=1e-5)


def test_a_wrong_index_fails_the_run_and_no_other(mixture: Any) -> None:
    ready, router, _, params = mixture
    program = pw.program(
        lambda index: pw.route(
            router(X), index, np.ones(ROWS, np.float32), [lambda rows: ready.stages[0](params[0], rows)]
        )
    )
    index = np.zeros(ROWS, np.int32)
    good, bad = program(index), [program(np.where(np.arange(ROWS) == 3, wrong, index)) for wrong in (-1, 1)]
    for array in bad:
        with pytest.raises(pw.ProgramError, match=r"within 0 \.\. 0"):
            array.numpy()
    np.testing.assert_allclose(good.numpy(), feed_forward(PARAMS[0], np.tanh(X)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda x, i, g, e: pw.route(x, i, g, []), "no experts"),
        (lambda x, i, g, e: pw.route(x, i[:3], g, e), "takes expert_index"),
        (lambda x, i, g, e: pw.route(x, g, g, e), "integers"),
        (lambda x, i, g, e: pw.route(x, i, i, e), "floating"),
        (lambda x, i, g, e: pw.route(x, i, g, e, capacity=0), "at least one row"),
        (lambda x, i, g, e: pw.route(x, i, g, [lambda rows: rows.sum()]), "one row for each"),
        (lambda x, i, g, e: pw.route(x, i, g, [*e, lambda rows: rows[:, :1]]), "differ"),
    ],
)
def test_bad_input_is_refused_with_its_reason(fault: Any, reason: str) -> None:
    index, gates = np.zeros((ROWS, 1), np.int32), np.ones((ROWS, 1), np.float32)
    with pytest.raises(pw.ProgramError, match=reason):
        pw.program(lambda x, i, g: fault(x, i, g, [lambda rows: rows * 2])).trace(X, index, gates)
    with pytest.raises(pw.ProgramError, match="part of a program"):
        pw.route(X, index, gates, [lambda rows: rows])


def test_experts_refuse_what_does_not_fit(mixture: Any) -> None:
    ready, _, program, params = mixture
    with pytest.raises(pw.ProgramError, match="parameters for 3"):
        ready.put(PARAMS[:3])
    with pytest.raises(pw.ProgramError, match="choose 5 of 4"):
        program(params, X, RANDOM, 5, None)
    with pytest.raises(pw.ProgramError, match="score for each expert"):
        program(params, X, RANDOM[:, :2], 2, None)


@given(rows=st.integers(1, 500), choices=st.integers(1, 4), capacity=st.none() | st.integers(1, 600))
def test_sizes_are_few_and_hold_every_count(rows: int, choices: int, capacity: int | None) -> None:
    sizes = row_sizes(rows, choices, capacity)
    most = rows * choices if capacity is None else min(capacity, rows * choices)
    assert sizes[-1] == most
    assert len(sizes) <= 2 + rows.bit_length()
    for count in range(1, most + 1):
        held = next(size for size in sizes if size >= count)
        assert held < 2 * count or held <= 8 or held == most, "no more than twice what is sent"


def test_a_balanced_router_has_the_least_loss() -> None:
    even = np.zeros((8, 4), np.float32)
    assert float(load_balancing_loss(even, np.arange(8).reshape(8, 1) % 4)) == pytest.approx(1)
    leaning = even + np.asarray([3, 0, 0, 0])
    index, gates = top_k_choices(leaning, 2)
    assert float(load_balancing_loss(leaning, index)) > 1
    np.testing.assert_allclose(gates.sum(-1), 1, rtol=1e-6)
