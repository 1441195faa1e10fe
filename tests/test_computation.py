"""Lowering: keys by content, every kind of array, what is refused; artifacts run and give what JAX gives."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pathway.dataflow.computation import ComputationMetadata, lower
from pathway.dataflow.cost import cost_estimate
from pathway.dataflow.graph import Node
from pathway.dataflow.jaxprs import opened
from pathway.dataflow.layout import Sharding
from pathway.dataflow.placed import mesh_without_devices
from pathway.errors import ProgramError

MESH = (("x", 2), ("y", 2))
Shape = jax.ShapeDtypeStruct
F32 = Shape((8, 8), jnp.float32)


def node(function, *avals, ins=None, outs=None, name="f", donates=(), x64=False):
    with jax.enable_x64(x64):
        jaxpr = jax.make_jaxpr(function)(*avals)
    body, _ = opened(jaxpr)

    def shardings(variables, specs):
        specs = specs or [()] * len(variables)
        return tuple(
            Sharding(MESH, tuple((axis,) if axis else () for axis in spec)).of_rank(len(var.aval.shape))
            for var, spec in zip(variables, specs, strict=True)
        )

    return Node(
        0,
        name,
        1,
        tuple(range(len(body.invars))),
        (),
        shardings(body.invars, ins),
        shardings(body.outvars, outs),
        jaxpr,
        "train.py:7 in step",
        donates=donates,
    )


def lowered(*args, **kwargs):
    return lower(node(*args, **kwargs), MESH, "cpu")


def shown(avals):
    return [str(aval) for aval in avals]


def test_every_input_and_output_has_its_sharding():
    computation = lowered(lambda w, x: x @ w, F32, F32, ins=[("x", "y"), ()], outs=[(None, "y")])
    metadata = computation.metadata
    assert metadata.num_devices == 4
    assert [sharding.spec for sharding in metadata.in_shardings] == [(("x",), ("y",)), ((), ())]
    assert [sharding.spec for sharding in metadata.out_shardings] == [((), ("y",))]
    assert msgspec.msgpack.decode(computation.metadata_bytes, type=ComputationMetadata) == metadata


def test_the_key_is_the_content():
    def first(x):
        return jnp.sin(x) * 2

    def second(x):
        # a line more, another name
        return jnp.sin(x) * 2

    a, b = lowered(first, F32, name="first"), lowered(second, F32, name="second stage")
    assert a.key == b.key
    assert len(a.key) == 32
    others = [
        lowered(lambda x: jnp.sin(x) * 3, F32),
        lowered(first, Shape((4, 8), jnp.float32)),
        lowered(first, F32, ins=[("x",)]),
        lowered(first, F32, outs=[("x",)]),
        lowered(first, F32, donates=(0,)),
        lowered(first, Shape((8, 8), jnp.bfloat16)),
    ]
    assert len({a.key, *(other.key for other in others)}) == 1 + len(others)


def test_the_name_of_a_slice_is_not_content():
    def stage(x):
        return jnp.sin(x) @ x

    keys = set()
    for number in (1, 2):
        inner = jax.jit(lambda x: stage(x))
        inner.__wrapped__.__name__ = f"pathway:{number}:stage"
        keys.add(lowered(lambda x, inner=inner: inner(x) + 1, F32, name=f"pathway:{number}:stage").key)
    assert len(keys) == 1


def test_a_body_is_lowered_once():
    one = node(lambda x: x + 1, F32)
    assert lower(one, MESH, "cpu") is lower(in_another_place(one), MESH, "cpu")


def in_another_place(original):
    return Node(5, "other", 2, original.inputs, (), original.in_shardings, original.out_shardings, original.jaxpr)


def test_unused_inputs_are_no_parameters():
    computation = lowered(
        lambda a, b, c: b * 2 + c, F32, Shape((4,), jnp.int32), Shape((4,), jnp.int32), donates=(0, 2)
    )
    assert computation.kept == (1, 2)
    assert shown(computation.metadata.in_avals) == ["int32[4]", "int32[4]"]
    assert computation.metadata.donated == (1,)


@pytest.mark.parametrize(("implementation", "words"), [("threefry2x32", 2), ("rbg", 4)])
def test_typed_keys_are_their_words(implementation, words):
    key = jax.eval_shape(lambda: jax.random.key(0, impl=implementation))
    metadata = lowered(lambda k: (jax.random.split(k, 3), jax.random.normal(k, (4,))), key).metadata
    assert shown(metadata.in_avals) == [f"uint32[{words}]"]
    assert shown(metadata.out_avals) == [f"uint32[3,{words}]", "float32[4]"]
    assert [len(sharding.spec) for sharding in metadata.out_shardings] == [2, 1]


def test_64_bit_and_weakly_typed():
    wide = lowered(lambda x: x * 2.5 + jnp.arange(4), Shape((4,), np.float64), x64=True)
    assert shown(wide.metadata.out_avals) == ["float64[4]"]
    weak = lowered(lambda x: x * 2, 1.0)
    assert weak.metadata.out_avals[0].weak_type
    with jax.enable_x64(True):  # whatever the mode is when it is lowered
        again = lowered(lambda x: x * 2, Shape((4,), jnp.float32))
    assert shown(again.metadata.out_avals) == ["float32[4]"]


@pytest.mark.parametrize("dtype", ["int4", "uint4", "float8_e4m3fn", "float8_e5m2", "bfloat16", "bool", "complex64"])
def test_narrow_types(dtype):
    metadata = lowered(lambda x: (x, jnp.concatenate([x, x])), Shape((4,), getattr(jnp, dtype))).metadata
    assert shown(metadata.out_avals) == [f"{dtype}[4]", f"{dtype}[8]"]


def test_float0():
    metadata = lowered(lambda x, y: x, Shape((4,), jnp.float32), Shape((3,), jax.dtypes.float0)).metadata
    assert shown(metadata.in_avals) == ["float32[4]"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.shard_map(
            lambda v: jax.lax.psum(v, "x"),
            mesh=mesh_without_devices(MESH),
            in_specs=PartitionSpec("x"),
            out_specs=PartitionSpec(),
        )(x),
        lambda x: (jnp.linalg.eigh(x), jnp.linalg.svd(x), jnp.linalg.qr(x), jnp.linalg.cholesky(x)),
        lambda x: jax.ffi.ffi_call("some_target", Shape((8, 8), jnp.float32))(x, seconds=np.float32(1)),
        lambda x: jax.lax.scan(lambda carry, _: (carry * 2, carry), x, None, length=5),
        lambda x: (x, x, 2.0, jnp.arange(8)),
        lambda x: x + np.arange(8, dtype=np.float32),
    ],
    ids=["shard_map", "linalg", "ffi", "scan", "handed through", "constant"],
)
def test_all_of_jax_lowers(function):
    lowered(function, F32)


def test_a_node_without_inputs_or_without_outputs():
    assert lowered(lambda: jnp.arange(8) * 2).kept == ()
    assert lowered(lambda x: (), F32).metadata.out_avals == ()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: (jax.debug.print("{}", x), x)[1], "calls back into Python"),
        (lambda x: jax.pure_callback(lambda v: v, F32, x), "pure_callback"),
    ],
)
def test_side_effects_are_refused_with_their_line(function, message):
    with pytest.raises(ProgramError, match=message) as raised:
        lowered(function, F32, name="bad")
    assert "bad" in str(raised.value)
    assert "train.py:7 in step" in str(raised.value)


def test_what_xla_cannot_split_is_refused_with_its_line():
    with pytest.raises(ProgramError, match=r"train\.py:7(.|\n)*evenly divide"):
        lowered(lambda x: x + 1, Shape((5, 4), jnp.float32), ins=[("x",)])


def test_costs_grow_with_the_work_and_shrink_with_the_devices():
    def cost(function, *avals, mesh=MESH):
        return cost_estimate(node(function, *avals), mesh)

    big = Shape((1024, 1024), jnp.float32)
    product = cost(lambda x: x @ x, big)
    assert product > 5 * cost(lambda x: x + x, big)
    assert cost(lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=10)[0], big) > 8 * product
    assert cost(lambda x: x @ x, big, mesh=(("x", 1),)) > 3 * product
    branches = cost(lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x @ x, lambda: x), big)
    assert product <= branches < 1.5 * product
    image, kernel = Shape((8, 32, 32, 16), jnp.float32), Shape((3, 3, 16, 32), jnp.float32)
    convolution = cost(
        lambda a, b: jax.lax.conv_general_dilated(a, b, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        image,
        kernel,
        mesh=(("x", 1),),
    )
    assert convolution == pytest.approx(20e-6 + 2 * 8 * 32 * 32 * 32 * 9 * 16 / 1e11)


def test_a_hundred_different_nodes_are_lowered_in_seconds():
    nodes = [node(lambda x, i=i: jnp.tanh(x @ x) * i + x.sum() * (i + 0.5), F32) for i in range(100)]
    begin = time.process_time()
    keys = {lower(each, MESH, "cpu").key for each in nodes}
    assert len(keys) == 100
    assert time.process_time() - begin < 4.0  # about 1 s on an idle core
