"""A computation that holds its device for a given time without using a core.

Islands on one machine share its cores, so a bench in which only the *length* of a computation matters waits instead of
computing. Importing this module compiles `device_wait.cc` against the headers that jaxlib ships (once: `bench/_build`
keeps it by the hash of its source and of the headers' version) and registers it with XLA; executors do so when they are
started with `--preload bench.device_wait`.

Of sharded arrays, call it inside `jax.shard_map`: every device then waits, and no data moves.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np

TARGET_NAME = "pathway_device_wait"

_SOURCE = Path(__file__).with_suffix(".cc")
_BUILD_DIRECTORY = Path(__file__).with_name("_build")

_WORK_ELEMENTS = 1024
"""XLA's CPU client runs a computation of fewer than 1,000 floating-point operations inline, in the caller's thread, at
dispatch. Two operations for each of these elements keep the wait asynchronous, at about a microsecond."""


def build() -> Path:
    """The compiled target; compiled now if it is not there yet. Safe when several processes do so at once."""
    key = hashlib.sha256(_SOURCE.read_bytes() + jaxlib.version.__version__.encode()).hexdigest()[:16]
    library = _BUILD_DIRECTORY / f"device_wait-{key}.so"
    if library.exists():
        return library
    _BUILD_DIRECTORY.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_BUILD_DIRECTORY) as scratch:
        built = Path(scratch) / library.name
        command = ["g++", "-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", f"-I{jax.ffi.include_dir()}"]
        compiled = subprocess.run([*command, str(_SOURCE), "-o", str(built)], capture_output=True, text=True)
        if compiled.returncode:
            raise RuntimeError(f"device_wait.cc does not compile:\n{compiled.stderr}")
        os.replace(built, library)
    return library


def _register() -> None:
    handler = ctypes.CDLL(str(build())).PathwayDeviceWait
    jax.ffi.register_ffi_target(TARGET_NAME, jax.ffi.pycapsule(handler), platform="cpu")


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def device_wait(x: jax.Array, microseconds: int) -> jax.Array:
    """`x` itself, after its device has been held for `microseconds`. The backward pass holds it as long again."""
    x = jnp.asarray(x)
    element = jnp.ravel(x)[0].astype(jnp.float32)
    ramp = jnp.arange(_WORK_ELEMENTS, dtype=jnp.float32)
    wait = jax.ffi.ffi_call(
        TARGET_NAME,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        vmap_method="broadcast_all",
        input_output_aliases={0: 0},
    )
    waited: jax.Array = wait(x, (element + ramp) * ramp, microseconds=np.int64(microseconds))
    return waited


def _forward(x: jax.Array, microseconds: int) -> tuple[jax.Array, None]:
    return device_wait(x, microseconds), None


def _backward(microseconds: int, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (device_wait(cotangent, microseconds),)


device_wait.defvjp(_forward, _backward)
_register()
