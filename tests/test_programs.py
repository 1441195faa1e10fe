"""XLA programs with their own options, as the proxy's clients send them, on this process's devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib import xla_client

from pathway.dataflow.layout import Aval, Layout, Sharding
from pathway.dataflow.tiles import replicated
from pathway.dataflow.xla_program import ProgramReport, XlaProgram
from pathway.errors import CompileError
from pathway.executor.backend import Backend, Compiled
from pathway.executor.programs import dtype_of_element
from tests.executor_tools import shared_backend

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="compares with the CPU")


@pytest.fixture(scope="module")
def backend() -> Backend:
    return shared_backend()


def program(
    function: Callable[..., Any], devices: int, *avals: jax.ShapeDtypeStruct, **options: Any
) -> tuple[XlaProgram, bytes]:
    exported = jax.export.export(jax.jit(function, **options), platforms=("cpu",))(*avals)
    compile_options = xla_client.CompileOptions()
    compile_options.executable_build_options.use_spmd_partitioning = True
    compile_options.executable_build_options.use_shardy_partitioner = True
    return XlaProgram("cpu", compile_options.SerializeAsString(), 1, devices), exported.mlir_module_serialized


def reported(compiled: Compiled) -> ProgramReport:
    assert compiled.answer is not None
    return msgspec.msgpack.decode(compiled.answer("report"), type=ProgramReport)


def test_a_program_of_one_device(backend: Backend) -> None:
    metadata, artifact = program(lambda x: (x + 1, x.sum()), 1, jax.ShapeDtypeStruct((4,), jnp.float32))
    compiled = backend.compile_program("one", metadata, artifact, (0,))
    layout = Layout(Aval((4,), "float32"), replicated(1, 1), (0,))
    argument = backend.array(layout, {0: np.arange(4, dtype=np.float32)})
    tokens: list[Any] = []
    out = compiled.launch([argument], tokens)
    np.testing.assert_array_equal(out[0], [1, 2, 3, 4])
    assert float(out[1]) == 6
    assert len(tokens) == 1
    made = reported(compiled)
    assert made.in_avals == (Aval((4,), "float32"),)
    assert made.out_avals == (Aval((4,), "float32"), Aval((), "float32"))
    assert made.output_layouts == ("{0}", "{}")
    assert made.output_memory_kinds == ("device", "device")
    assert made.memory["argument_size_in_bytes"] == 16
    assert compiled.answer is not None
    assert msgspec.msgpack.decode(compiled.answer("cost"))["flops"] > 0
    assert compiled.answer("text").startswith(b"HloModule")


@pytest.mark.skipif(jax.device_count() < 2, reason="two devices")
def test_a_program_of_several_devices(backend: Backend) -> None:
    count = jax.device_count()
    mesh = AbstractMesh((count,), ("x",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    metadata, artifact = program(
        lambda x: (x * 2, x.sum()), count, jax.ShapeDtypeStruct((2 * count,), jnp.float32),
        in_shardings=split, out_shardings=(split, whole), donate_argnums=0,
    )  # fmt: skip
    devices = tuple(range(count))
    compiled = backend.compile_program("many", metadata, artifact, devices)
    made = reported(compiled)
    assert made.donated == (0,)
    layout = Layout(made.in_avals[0], made.in_shardings[0], devices)
    assert [layout.region(i) for i in devices] == [((2 * i, 2 * i + 2),) for i in devices]
    argument = backend.array(layout, {i: np.array([2 * i, 2 * i + 1], np.float32) for i in devices})
    doubled, total = compiled.launch([argument], [])
    np.testing.assert_array_equal(doubled, 2 * np.arange(2 * count))
    assert float(total) == sum(range(2 * count))
    assert argument.is_deleted()

    second = Layout(Aval((2,), "float32"), replicated(1, 1), (1,))
    view = backend.assemble(second, {1: (doubled, layout)})
    np.testing.assert_array_equal(view, [4, 6])
    first = backend.assemble(Layout(Aval((2,), "float32"), replicated(1, 1), (0,)), {0: (doubled, layout)})
    pair = Layout(Aval((4,), "float32"), Sharding((("a", 2),), (("a",),)), (0, 1))
    again = backend.assemble(
        pair,
        {0: (first, Layout(Aval((2,), "float32"), replicated(1, 1), (0,))), 1: (view, second)},
    )
    np.testing.assert_array_equal(again, [0, 2, 4, 6])


def test_what_cannot_be_compiled_says_whose_fault_it_is(backend: Backend) -> None:
    metadata, artifact = program(lambda x: x + 1, 1, jax.ShapeDtypeStruct((4,), jnp.float32))
    with pytest.raises(CompileError, match="INVALID_ARGUMENT"):
        backend.compile_program("bad", metadata, b"no module", (0,))
    with pytest.raises(CompileError, match="not for 2"):
        backend.compile_program("bad", metadata, artifact, (0, 1))


@pytest.mark.parametrize(
    ("element", "name"),
    [
        ("i1", "bool"), ("i4", "int4"), ("ui8", "uint8"), ("f64", "float64"), ("bf16", "bfloat16"),
        ("f8E4M3FN", "float8_e4m3fn"), ("f8E5M2", "float8_e5m2"), ("f4E2M1FN", "float4_e2m1fn"),
        ("complex<f32>", "complex64"),
    ],
)  # fmt: skip
def test_names_of_dtypes(element: str, name: str) -> None:
    assert dtype_of_element(element) == name
    from pathway.dataflow.layout import numpy_dtype

    numpy_dtype(name)


def test_values_that_no_array_has_are_refused() -> None:
    with pytest.raises(CompileError, match="UNIMPLEMENTED"):
        dtype_of_element("!stablehlo.token")
