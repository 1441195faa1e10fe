"""A jaxpr cut at what data decide: who waits for which decision, and what belongs nowhere. No cluster."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pathway.dataflow.control import Control, anchored, cut, has_control, marked, reasons_of, refused
from pathway.dataflow.graph import SliceShape
from pathway.dataflow.placed import placed_call

ONE, OTHER = (
    placed_call(lambda x, sign=sign: x * sign, SliceShape(slice, (("d", 1),)), name=f"stage{slice}")
    for slice, sign in ((1, 2.0), (2, 3.0))
)
X = jax.ShapeDtypeStruct((4,), np.float32)


def cond(pred: Any, true_fn: Any, false_fn: Any, *operands: Any) -> Any:
    return marked(lambda pred, *operands: jax.lax.cond(pred, true_fn, false_fn, *operands))(pred, *operands)


def names(made: Any, deps: Any) -> list[str]:
    return [str(equation.params.get("name", equation.primitive.name)) for equation in made.segments.get(deps, [])]


def test_what_depends_on_no_decision_waits_for_none() -> None:
    def program(x: Any) -> Any:
        y = ONE(x)
        a = cond(y[0] > 0, ONE, OTHER, y)
        b = cond(y[1] > 0, ONE, OTHER, y)
        return jnp.sin(y), jnp.cos(a), jnp.tan(b), jnp.exp(a * b)

    made = cut(jax.make_jaxpr(program)(X), [False])
    assert "sin" in names(made, frozenset())
    assert names(made, frozenset({0})) == ["cos"]
    assert names(made, frozenset({1})) == ["tan"]
    assert names(made, frozenset({0, 1})) == ["mul", "exp"], "B-1"
    assert all(control.deps == frozenset() for control in made.controls)
    order = made.order()
    for position, entry in enumerate(order):
        deps = entry.deps if isinstance(entry, Control) else entry
        assert all(order.index(made.controls[number]) < position for number in deps)


def test_what_is_computed_of_host_values_belongs_to_its_readers() -> None:
    def program(x: Any, h: Any) -> Any:
        shift = jnp.sin(h)
        return cond(x[0] > 0, lambda x: ONE(x + shift), lambda x: OTHER(x), ONE(x) - shift)

    made = cut(jax.make_jaxpr(program)(X, X), [False, True])
    assert [equation.primitive.name for equation in made.floating] == ["sin"], "B-2"
    jaxpr, inputs, _ = made.segment(frozenset(), made.outputs)
    assert set(inputs) == set(made.inputs)
    assert "sin" in str(jaxpr)


def test_what_is_anchored_is_computed_once_and_copied_only_from_a_host() -> None:
    def program(x: Any, h: Any) -> Any:
        return cond(x[0] > 0, ONE, OTHER, anchored(x) + jnp.sin(anchored(h)))

    made = cut(jax.make_jaxpr(program)(X, X), [False, True])
    assert made.floating == []
    anchors = [name for name in names(made, frozenset()) if "anchor" in name]
    assert len(anchors) == 1


def test_controls_are_those_that_are_marked_or_span_slices() -> None:
    def whole(x: Any) -> Any:
        return jax.lax.cond(x[0] > 0, ONE, lambda x: ONE(x) + 1, x)

    def spanning(x: Any) -> Any:
        return jax.lax.while_loop(lambda x: x[0] > 0, lambda x: ONE(OTHER(x)), x)

    def within_a_call(x: Any) -> Any:
        return jax.checkpoint(lambda x: jax.lax.scan(lambda c, _: (spanning(c), None), x, None, length=2)[0])(x)

    assert not has_control(jax.make_jaxpr(whole)(X))
    assert has_control(jax.make_jaxpr(spanning)(X))
    assert has_control(jax.make_jaxpr(lambda x: cond(x[0] > 0, ONE, ONE, x))(X))
    assert not has_control(
        jax.make_jaxpr(placed_call(lambda x: cond(x[0] > 0, jnp.sin, jnp.cos, x), SliceShape(1, (("d", 1),))))(X)
    ), "what is within a stage is the stage's own"
    made = cut(jax.make_jaxpr(within_a_call)(X), [False])
    assert [control.deps for control in made.controls] == [frozenset(), frozenset({0})], "a scan over them is unrolled"


def test_a_branch_that_must_not_be_taken_says_why() -> None:
    jaxpr = jax.make_jaxpr(lambda x: cond(x[0] > 0, refused("no way", lambda x: x), ONE, x))(X)
    [control] = cut(jaxpr, [False]).controls
    assert reasons_of(control) == ["", "no way"]
