"""What the tests of the executor share: one backend in this process, layouts and computations in a line each."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

os.environ.setdefault("NPROC", "32")

import jax
import msgspec
import pytest
import trio
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from pathway.dataflow.computation import ComputationMetadata
from pathway.dataflow.layout import Aval, Layout, Sharding, numpy_dtype
from pathway.executor.backend import Backend, Compiled

BACKEND_DEVICES = 8
"""As many as the other tests of this process have."""


@functools.cache
def shared_backend() -> Backend:
    """The backend of this process. Other tests of the process keep their narrow types: see `wide`."""
    before = jax.config.jax_enable_x64
    backend = Backend("cpu", BACKEND_DEVICES)
    jax.config.update("jax_enable_x64", before)
    return backend


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    """64-bit types, as an executor's process has them throughout."""
    with jax.enable_x64(True):
        yield


def in_trio(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test under trio, with its fixtures."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        trio.run(functools.partial(test, **fixtures))

    return run


def layout(
    shape: tuple[int, ...],
    dtype: str,
    devices: Sequence[int],
    mesh: Mapping[str, int] | None = None,
    spec: Sequence[tuple[str, ...]] = (),
) -> Layout:
    axes = tuple((mesh or {"d": len(devices)}).items())
    return Layout(Aval(shape, dtype), Sharding(axes, tuple(spec)).of_rank(len(shape)), tuple(devices))


def lowered(
    function: Callable[..., tuple[Any, ...]],
    inputs: Sequence[Layout],
    outputs: Sequence[Layout] | None = None,
    donates: tuple[int, ...] = (),
) -> tuple[str, ComputationMetadata, bytes]:
    """(key, metadata, artifact), as a client would send them. Without `outputs`: as the first input is split."""
    mesh = inputs[0].sharding.mesh
    abstract = AbstractMesh(
        tuple(size for _, size in mesh), tuple(name for name, _ in mesh), axis_types=(AxisType.Auto,) * len(mesh)
    )

    def named(sharding: Sharding) -> NamedSharding:
        return NamedSharding(abstract, PartitionSpec(*(axes or None for axes in sharding.spec)))

    with jax.enable_x64(True):
        arguments = [jax.ShapeDtypeStruct(each.aval.shape, numpy_dtype(each.aval.dtype)) for each in inputs]
        shapes = jax.eval_shape(function, *arguments)
        if outputs is not None:
            out = [each.sharding for each in outputs]
        else:
            out = [
                inputs[0].sharding
                if len(each.shape) == len(inputs[0].aval.shape)
                else Sharding(mesh).of_rank(each.ndim)
                for each in shapes
            ]
        jitted = jax.jit(
            function,
            in_shardings=tuple(named(each.sharding) for each in inputs),
            out_shardings=tuple(map(named, out)),
            donate_argnums=donates,
            keep_unused=True,
        )
        checks = [jax.export.DisabledSafetyCheck.custom_call("ALL")]
        artifact = jax.export.export(jitted, platforms=("cpu",), disabled_checks=checks)(*arguments)
    metadata = ComputationMetadata(
        "cpu",
        mesh,
        tuple(each.aval for each in inputs),
        tuple(each.sharding for each in inputs),
        tuple(Aval(each.shape, each.dtype.name) for each in shapes),
        tuple(out),
        donates,
    )
    data = artifact.mlir_module_serialized
    return hashlib.sha256(data + msgspec.msgpack.encode(metadata)).hexdigest()[:32], metadata, data


def compiled(
    backend: Backend,
    function: Callable[..., tuple[Any, ...]],
    inputs: Sequence[Layout],
    outputs: Sequence[Layout] | None = None,
    donates: tuple[int, ...] = (),
) -> Compiled:
    return backend.compile(*lowered(function, inputs, outputs, donates), inputs[0].devices)
