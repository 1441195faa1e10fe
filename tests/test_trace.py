"""From a Python function to a closed jaxpr: what is accepted, and what is refused at which line."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dataflow_reference import A, B, check
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pathway.dataflow.jaxprs import every_equation, placed_slice
from pathway.dataflow.placed import abstract_mesh, placed_call
from pathway.dataflow.trace import trace
from pathway.errors import ProgramError

X = np.arange(16, dtype=np.float32).reshape(4, 4) / 16


def line_of(function: Any, text: str) -> str:
    """ "file.py:12" of the line of `function` that holds `text`."""
    lines, start = inspect.getsourcelines(function)
    offset = next(number for number, line in enumerate(lines) if text in line)
    return f"test_trace.py:{start + offset}"


def test_names_survive_grad_vmap_and_checkpoint() -> None:
    stage = placed_call(lambda w, x: jnp.tanh(x @ w), A, P("data"), P("data"), name="stage")

    def program(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: jax.vmap(jax.checkpoint(lambda x: stage(w, x)))(x).sum())(w)

    traced = trace(program, (X, np.stack([X, X])))
    slices = [placed_slice(equation) for equation in every_equation(traced.jaxpr)]
    assert slices.count(0) >= 2
    check(program, X, np.stack([X, X]))


@jax.tree_util.register_dataclass
@dataclass
class Params:
    w: Any
    b: Any
    extra: Any = None


def test_pytrees_with_dataclasses_none_and_custom_nodes() -> None:
    stage = placed_call(lambda p, x: {"y": x @ p.w + p.b, "none": p.extra}, A)

    def program(p: Params, x: Any, nothing: None, *, scale: Any) -> Any:
        out = stage(p, x["x"])
        return Params(out["y"] * scale, (out["none"], nothing)), [x]

    check(program, Params(X, X[0]), {"x": X}, None, scale=2.0)


def test_static_arguments_by_number_and_name() -> None:
    stage = placed_call(lambda x, n, mode: x * n if mode == "scale" else x, A, static_argnames="mode", name="stage")

    def program(x: Any, n: int, mode: str) -> Any:
        assert isinstance(n, int)
        return stage(x, n=n, mode=mode)

    traced = trace(program, (X, 3, "scale"), static_argnums=(1, -1))
    assert len(traced.in_avals) == 1
    assert traced.statics.numbers == {1, 2}
    by_name = trace(program, (X,), {"n": 3, "mode": "scale"}, static_argnames=("n", "mode"))
    assert str(by_name.jaxpr) == str(traced.jaxpr)
    check(program, X, 3, "scale", static_argnums=(1, 2))


def test_weak_types_are_kept() -> None:
    stage = placed_call(lambda x, a: (x * a, a * 2), A)

    def program(x: Any, a: Any) -> Any:
        return stage(x, a)

    traced = trace(program, (X.astype(jnp.bfloat16), 2.0))
    assert traced.in_avals[1].weak_type
    assert [aval.dtype for aval in traced.out_avals] == ["bfloat16", "float32"]
    check(program, X.astype(jnp.bfloat16), 2.0)


def test_typed_prng_keys() -> None:
    stage = placed_call(lambda key, x: (jax.random.split(key), x + jax.random.normal(key, x.shape)), A)

    def program(key: Any, x: Any) -> Any:
        keys, y = stage(jax.random.fold_in(key, 7), x)
        return keys[0], y

    key = jax.random.key(0)
    assert trace(program, (key, X)).in_avals[0].dtype == "key<fry>"
    check(program, key, X)


def test_integers_under_grad_give_float0() -> None:
    stage = placed_call(lambda x, n: (x * n).sum(), A)

    def program(x: Any, n: Any) -> Any:
        return jax.value_and_grad(stage, argnums=(0, 1), allow_int=True)(x, n)

    traced = trace(program, (X, 3))
    assert len(traced.out_avals) == 2
    [(position, value)] = traced.host_results
    assert position == 2
    assert value.dtype == jax.dtypes.float0
    check(program, X, 3)


def test_64_bit_mode() -> None:
    stage = placed_call(lambda x: x * 2, A)
    assert trace(stage, (np.ones(4),)).in_avals[0].dtype == "float32"
    with jax.enable_x64(True):
        assert trace(stage, (np.ones(4),)).in_avals[0].dtype == "float64"
        check(lambda x: stage(x) + 1, np.arange(4) / 3)


def test_donated_leaves() -> None:
    traced = trace(
        lambda a, n, b, c: (a["x"], b, c), ({"x": X, "y": X}, "static", X, X), static_argnums=1, name="program"
    )
    assert traced.donated_leaves(0, 4) == {0, 1}
    assert traced.donated_leaves((2, -1), 4) == {2, 3}


def test_another_structure_of_arguments_is_refused() -> None:
    traced = trace(lambda x: x, ({"a": X},))
    with pytest.raises(ProgramError, match="traced for arguments"):
        traced.flatten(({"b": X},), {})


def test_collectives_in_shard_map_over_the_slices_mesh() -> None:
    mesh = abstract_mesh(B)

    def body(x: Any) -> Any:
        total = jax.shard_map(lambda v: jax.lax.psum(v, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(x)
        return jax.lax.with_sharding_constraint(total, NamedSharding(mesh, P(None, "x")))

    traced = trace(placed_call(body, B, P("x"), P(None, "x")), (X,))
    assert traced.out_avals[0].shape == (2, 4)


# What is refused, with the line ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
def test_host_callbacks_are_refused(nested: bool) -> None:
    def body(x: Any) -> Any:
        return jax.pure_callback(np.sin, x, x)

    stage = placed_call(body, A) if nested else body
    with pytest.raises(ProgramError, match="pure_callback") as caught:
        trace(lambda x: stage(x), (X,))
    assert line_of(test_host_callbacks_are_refused, "np.sin") in str(caught.value)


def test_effects_are_refused() -> None:
    def program(x: Any) -> Any:
        jax.debug.print("{}", x)
        return x

    with pytest.raises(ProgramError, match="calls back into Python") as caught:
        trace(program, (X,))
    assert line_of(test_effects_are_refused, "debug.print") in str(caught.value)


def test_a_function_that_is_not_jax_is_refused_with_the_cause() -> None:
    def program(x: Any) -> Any:
        return x if x.sum() > 0 else -x

    with pytest.raises(ProgramError, match="cannot be traced") as caught:
        trace(program, (X,))
    assert isinstance(caught.value.__cause__, jax.errors.TracerBoolConversionError)
    assert line_of(test_a_function_that_is_not_jax_is_refused_with_the_cause, "x.sum()") in str(caught.value)
    with pytest.raises(ProgramError) as caught:
        trace(lambda x: np.sin(x), (X,))
    assert isinstance(caught.value.__cause__, jax.errors.TracerArrayConversionError)


def test_shapes_that_do_not_fit_are_refused_at_the_line() -> None:
    def program(x: Any) -> Any:
        return x @ x[:3]

    with pytest.raises(ProgramError) as caught:
        trace(program, (X,))
    assert line_of(test_shapes_that_do_not_fit_are_refused_at_the_line, "x[:3]") in str(caught.value)


def test_the_users_own_exceptions_pass_through() -> None:
    def program(x: Any) -> Any:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        trace(program, (X,))


def test_an_argument_that_is_no_array_is_named() -> None:
    with pytest.raises(ProgramError, match=r"args\[0\]\['mode'\].*str.*static_argnums"):
        trace(lambda options: options["x"], ({"x": X, "mode": "fast"},))
    with pytest.raises(ProgramError, match=r"kwargs\['mode'\]"):
        trace(lambda mode: 1.0, (), {"mode": "fast"})


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (P("rows"), "no axis 'rows'"),
        (P("data", "data"), "splits two dimensions"),
        (P(None, None, "data"), "splits 3 dimensions of an array that has 2"),
        (P(("data", "model")), "length 6 cannot be split into 4"),
        ("data", "no prefix|PartitionSpec was expected"),
    ],
)
@pytest.mark.parametrize("where", ["in_specs", "out_specs"])
def test_specs_that_cannot_be(spec: Any, problem: str, where: str) -> None:
    specs = {"in_specs": (spec,)} if where == "in_specs" else {"out_specs": spec}
    stage = placed_call(lambda x: x, A, name="stage", **specs)
    with pytest.raises(ProgramError, match=problem) as caught:
        trace(lambda x: stage(x), (np.ones((6, 6)),))
    text = str(caught.value)
    assert f"{where} of stage" in text
    assert line_of(test_specs_that_cannot_be, "trace(lambda x: stage(x)") in text
    if isinstance(spec, P):
        assert "data=2, model=2" in text
        assert "(6, 6)" in text


def test_specs_are_prefixes_and_follow_keywords() -> None:
    stage = placed_call(
        lambda p, x: (x @ p["w"] + p["b"], x), A, in_specs=(P(), P("data")), out_specs=(P("data"), None), name="stage"
    )
    traced = trace(lambda p, x: stage(x=x, p=p), ({"w": X, "b": X[0]}, X))
    specs = [
        str(equation.params["sharding"].spec)
        for equation in every_equation(traced.jaxpr)
        if equation.primitive.name == "sharding_constraint"
    ]
    assert len(specs) == 4
    assert sum("data" in spec for spec in specs) == 2
    with pytest.raises(ProgramError, match="no prefix"):
        trace(placed_call(lambda x: x, A, in_specs=(P(), P())), (X,))
