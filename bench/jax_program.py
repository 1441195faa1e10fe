"""Subject: plain JAX on whatever platform it is told to use: local CPU devices, or a proxy. See `bench.proxy`."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bench.subject import serve

SMALL_ARRAYS = 1000
BULK_BYTES = 64 << 20


@functools.cache
def _add_one() -> Any:
    step = jax.jit(lambda x: x + 1)
    step(jnp.float32(0)).block_until_ready()
    return step


def enqueue(calls: int) -> float:
    """Seconds until so many dependent calls are on their way."""
    step, x = _add_one(), jnp.float32(0)
    began = time.perf_counter()
    for _ in range(calls):
        x = step(x)
    took_s = time.perf_counter() - began
    x.block_until_ready()
    return took_s


def sustained(calls: int) -> float:
    """Seconds until they are done."""
    step, x = _add_one(), jnp.float32(0)
    began = time.perf_counter()
    for _ in range(calls):
        x = step(x)
    x.block_until_ready()
    return time.perf_counter() - began


def blocking(calls: int) -> float:
    """Seconds for calls of which each result is looked at."""
    step, x = _add_one(), jnp.float32(0)
    began = time.perf_counter()
    for _ in range(calls):
        x = step(x)
        float(x)
    return time.perf_counter() - began


@functools.cache
def _training() -> tuple[Any, Any, Any]:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    split, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    width = 1024
    params = {name: jax.device_put(np.full((width, width), 0.01, np.float32), split) for name in ("w1", "w2")}
    x = jax.device_put(np.ones((256, width), np.float32), split)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(split, whole))
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - x) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value

    return step, params, x


_params: Any = None


def train(calls: int) -> float:
    """Seconds for so many steps of a sharded model of two layers."""
    global _params
    step, first, x = _training()
    params = first if _params is None else _params
    began = time.perf_counter()
    for _ in range(calls):
        params, value = step(params, x)
    float(value)
    took_s = time.perf_counter() - began
    _params = params
    return took_s


def put(calls: int) -> float:
    data = np.ones(BULK_BYTES // 4, np.float32)
    began = time.perf_counter()
    for _ in range(calls):
        float(jax.device_put(data)[-1])  # it is there
    return time.perf_counter() - began


def get(calls: int) -> float:
    fresh = jax.jit(lambda x: x + 1)
    arrays = [jax.block_until_ready(fresh(jnp.zeros(BULK_BYTES // 4, jnp.float32))) for _ in range(calls)]
    began = time.perf_counter()
    for array in arrays:
        np.asarray(array)
    return time.perf_counter() - began


def put_small(calls: int) -> float:
    values = [np.float32(number) for number in range(SMALL_ARRAYS)]
    began = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(jax.device_put(values))
    return time.perf_counter() - began


def get_small(calls: int) -> float:
    values = [np.float32(number) for number in range(SMALL_ARRAYS)]
    took_s = 0.0
    for _ in range(calls):
        arrays = jax.block_until_ready(jax.device_put(values))
        began = time.perf_counter()
        jax.device_get(arrays)
        took_s += time.perf_counter() - began
    return took_s


def compile_model(layers: int) -> float:
    """Seconds to the first result of a language model's step, of so many layers that are not in a loop."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            y = x
            for layer in range(layers):
                scores = jax.nn.softmax(y @ w[layer] @ y.T)
                y = y + jax.nn.gelu(scores @ y @ w[layer]) @ w[layer]
            return (y**2).mean()

        return jax.grad(loss)(w)

    w, x = np.ones((layers, 64, 64), np.float32), np.ones((32, 64), np.float32)
    began = time.perf_counter()
    jax.block_until_ready(jax.jit(step)(w, x))
    return time.perf_counter() - began


def pid() -> int:
    return os.getpid()


if __name__ == "__main__":
    if "proxy" in os.environ.get("JAX_PLATFORMS", ""):
        from pathway import jax_plugin

        jax_plugin.initialize()
    serve(
        {
            "enqueue": enqueue, "sustained": sustained, "blocking": blocking, "train": train, "put": put, "get": get,
            "put_small": put_small, "get_small": get_small, "compile": compile_model, "pid": pid,
        }
    )  # fmt: skip
