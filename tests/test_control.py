"""Conditions and loops over slices, decided by data, on a real cluster: equal to JAX's own, and only what is chosen."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathway as pw

X = np.arange(8, dtype=np.float32)


@pytest.fixture
def stages(client: Any) -> tuple[Any, Any]:
    """One stage on each island."""
    east, west = pw.slice(2, island="east"), pw.slice(4, island="west")
    return (
        pw.jit(east, name="double")(lambda x: x * 2),
        pw.jit(west, out_specs=None, name="add")(lambda x: x + 1),
    )


def plain(function: Any) -> Any:
    """`function(double, add, cond, while_loop)` with JAX's own, in this process."""
    return function(lambda x: x * 2, lambda x: x + 1, jax.lax.cond, jax.lax.while_loop)


def both(stages: Any, function: Any, *args: Any) -> None:
    """The program and its twin in this process have the same results."""
    ours = pw.program(function(*stages, pw.cond, pw.while_loop))(*args)
    theirs = plain(function)(*args)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert one.dtype == np.asarray(other).dtype
        np.testing.assert_array_equal(one.numpy(), other)


def in_a_tree(double: Any, add: Any, cond: Any, while_loop: Any) -> Any:
    def program(x: Any) -> Any:
        y = {"a": double(x), "b": (add(x), None)}
        return cond(
            y["a"].sum() > 50,
            lambda y: {"out": add(y["a"]), "same": y["b"][0]},
            lambda y: {"out": y["b"][0], "same": double(y["a"])},
            y,
        )

    return program


def nested(double: Any, add: Any, cond: Any, while_loop: Any) -> Any:
    def program(x: Any) -> Any:
        scale = double(x)  # closed over by both

        def step(carried: Any) -> Any:
            count, y = carried
            y = cond(y.sum() > 60, lambda y: y / 2, lambda y: cond(count == 1, lambda y: add(y + scale), double, y), y)
            return count + 1, y

        count, y = while_loop(lambda carried: carried[0] < 5, step, (0, x))
        return count, y, add(y)

    return program


def never(double: Any, add: Any, cond: Any, while_loop: Any) -> Any:
    def program(x: Any) -> Any:
        y = add(x)
        return while_loop(lambda y: y.sum() < 0, double, y), y

    return program


def handed_through(double: Any, add: Any, cond: Any, while_loop: Any) -> Any:
    def program(x: Any) -> Any:
        return cond(x[0] > 0, lambda x: x, lambda x: x, x), cond(x[0] > 0, lambda: 1.0, lambda: 2.0), double(x)

    return program


def after_each_other(double: Any, add: Any, cond: Any, while_loop: Any) -> Any:
    def program(x: Any) -> Any:
        y = cond(x[1] > 0, add, double, x)
        z = cond(y.sum() > 0, double, add, y)
        return double(y * z), jax.lax.scan(lambda c, v: (cond(c > v, add, double, c), c), y[0], z)

    return program


@pytest.mark.parametrize("function", [in_a_tree, nested, never, handed_through, after_each_other])
@pytest.mark.parametrize("sign", [1, -1])
def test_programs_equal_their_twins(stages: Any, function: Any, sign: int) -> None:
    both(stages, function, X * sign)


def test_the_untaken_side_does_not_run_and_other_runs_do_not_wait(stages: Any) -> None:
    double, add = stages
    program = pw.program(lambda x: pw.cond(x.sum() > 0, double, lambda x: add(add(x)), double(x)))
    with pw.record_steps() as recording:
        np.testing.assert_array_equal(program(X).numpy(), X * 4)
    assert {step.island for step in recording.steps} == {"east"}
    with pw.record_steps() as recording:
        np.testing.assert_array_equal(program(-X).numpy(), -X * 2 + 2)
    assert any("add" in step.label for step in recording.steps)


def test_results_can_be_used_before_they_have_names(stages: Any) -> None:
    double, add = stages
    choose = pw.program(lambda x: pw.cond(x.sum() > 0, double, add, x))
    arrays = [pw.put(X * sign, double.slice) for sign in (1, -1)]
    used = [add(choose(double(array))) for array in arrays]  # every argument is released at once
    again = [choose(array) for array in used]
    del used
    for array, sign in zip(again, (1, -1), strict=True):
        one = X * sign * 2
        two = (one * 2 if one.sum() > 0 else one + 1) + 1
        np.testing.assert_array_equal(array.numpy(), two * 2 if two.sum() > 0 else two + 1)


def test_gradients_are_jaxs(stages: Any) -> None:
    def function(double: Any, add: Any, cond: Any, while_loop: Any) -> Any:
        def loss(x: Any, w: Any) -> Any:
            y = cond(x.sum() > 0, lambda x: add(x * w) ** 2, lambda x: double(x) * jnp.sin(w), x)
            return (double(y) * w).sum()

        return jax.value_and_grad(loss, argnums=(0, 1))

    for sign in (1, -1):
        ours = pw.program(function(*stages, pw.cond, pw.while_loop))(X * sign, X + 1)
        for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(plain(function)(X * sign, X + 1)), strict=True):
            np.testing.assert_allclose(one.numpy(), other, rtol=1e-6)


def test_loops_have_derivatives_forward_and_refuse_them_backward(stages: Any) -> None:
    def function(double: Any, add: Any, cond: Any, while_loop: Any) -> Any:
        def loop(x: Any) -> Any:
            return while_loop(lambda x: x.sum() < 1000, lambda x: add(double(x)) * x, x)

        return lambda x: jax.jvp(loop, (x,), (x + 1,))

    both(stages, function, X)
    double, _ = stages
    with pytest.raises(ValueError, match="Reverse-mode") as raised:
        pw.program(jax.grad(lambda x: pw.while_loop(lambda x: x.sum() < 9, double, x).sum()))(X)
    assert isinstance(raised.value, pw.ProgramError)


def test_sides_that_lie_differently_agree_on_where_their_results_are(client: Any) -> None:
    rows, columns = pw.slice(4, mesh={"a": 2, "b": 2}, island="west"), pw.slice(2, mesh={"a": 2}, island="east")
    one = pw.jit(rows, in_specs=P("a", "b"), out_specs=P("a", "b"))(lambda x: x * 2)
    other = pw.jit(columns, in_specs=P(None, "a"), out_specs=P(None, "a"))(lambda x: x + 1)
    program = pw.program(lambda x: pw.cond(x[0, 0] > 0, one, other, x))
    x = np.arange(16, dtype=np.float32).reshape(4, 4) + 1
    y, z = program(x), program(-x)
    assert y.sharding == z.sharding
    assert y.slice is z.slice is rows
    np.testing.assert_array_equal(y.numpy(), x * 2)
    np.testing.assert_array_equal(z.numpy(), 1 - x)
    count = pw.program(lambda x: pw.while_loop(lambda x: x.sum() < 1e4, lambda x: one(other(x)), x))(y)
    twin = x * 2
    while twin.sum() < 1e4:
        twin = (twin + 1) * 2
    np.testing.assert_array_equal(count.numpy(), twin)


def test_batched_predicates_choose_by_row(stages: Any) -> None:
    def function(double: Any, add: Any, cond: Any, while_loop: Any) -> Any:
        return jax.vmap(lambda x: cond(x > 3, double, add, x))

    both(stages, function, X)


def test_closed_over_arrays_and_donation(stages: Any) -> None:
    double, add = stages
    weights, x = pw.put(X, add.slice), pw.put(X, double.slice)
    large = np.ones((300, 300), np.float32)

    @pw.program(donate_argnums=0)
    def program(x: Any, pred: Any, table: Any) -> Any:
        return pw.cond(pred, lambda x: (add(x + weights), table.sum()), lambda x: (weights, large.sum()), x)

    y, total = program(x, True, large)
    assert x.is_deleted()
    np.testing.assert_array_equal(y.numpy(), X * 2 + 1)
    assert float(total) == large.size
    y, _ = program(y, False, large)
    np.testing.assert_array_equal(y.numpy(), X)


def test_sides_that_differ_are_refused(stages: Any) -> None:
    double, add = stages
    with pytest.raises(TypeError, match="float32") as raised:
        pw.program(lambda x: pw.cond(x.sum() > 0, double, lambda x: add(x)[:3], x))(X)
    assert isinstance(raised.value, pw.ProgramError)
    assert "test_control.py" in str(raised.value)
    with pytest.raises(TypeError):
        pw.program(lambda x: pw.while_loop(lambda x: x.sum() < 9, lambda x: (x, x), x))(X)
    with pytest.raises(pw.ProgramError, match=r"within a pathway\.program"):
        pw.cond(True, double, add, X)


def test_an_endless_loop_can_be_interrupted_and_cancelled(stages: Any) -> None:
    double, _ = stages
    endless = pw.program(lambda x: pw.while_loop(lambda x: x.sum() >= 0, double, x))(X)
    after = double(endless)
    assert not endless.is_ready()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        endless.numpy()
    np.testing.assert_array_equal(double(X).numpy(), X * 2)
    endless.cancel()
    for array in (endless, after):
        with pytest.raises(pw.Cancelled):
            array.numpy()


def test_what_is_lowered_can_be_looked_into(stages: Any) -> None:
    double, add = stages
    lowered = pw.program(lambda x: pw.cond(x.sum() > 0, double, add, double(x))).lower(X)
    assert "body 1" in lowered.as_text()
    assert all(picture.startswith("<svg") for picture in lowered.draw())
    compiled = lowered.compile()
    np.testing.assert_array_equal(compiled(X).numpy(), X * 4)
    assert set(compiled.memory_analysis()) == {"east", "west"}
    assert compiled.cost_analysis().transfer_bytes > 0
