"""Programs that know nothing of Pathway. Run by themselves, on whatever platform JAX is told to use:

    python -m tests.proxy_programs RESULTS

writes the results of each, or the error it ends with. `test_proxy_programs` runs it twice, on local devices and through
a proxy, and compares.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

PROGRAMS: dict[str, Callable[[], Any]] = {}


def program(title: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        PROGRAMS[title] = function
        return function

    return add


FIRST_DEVICE = int(os.environ.get("PROGRAMS_FIRST_DEVICE", "0"))


def devices() -> list[jax.Device]:
    """Four devices, of one island."""
    return jax.devices()[FIRST_DEVICE : FIRST_DEVICE + 4]


def mesh(*sizes: int, names: tuple[str, ...] = ("x", "y")) -> Mesh:
    count = int(np.prod(sizes))
    return Mesh(np.array(devices()[:count]).reshape(sizes), names[: len(sizes)])


def values(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return (np.arange(np.prod(shape)).reshape(shape) % 17).astype(dtype)


@program("jit")
def _() -> Any:
    return jax.jit(lambda x, y: (x @ y, jnp.tanh(x)))(values(4, 6), values(6, 3))


@program("jit of Python numbers and pytrees")
def _() -> Any:
    return jax.jit(lambda tree, n: jax.tree.map(lambda x: x * n, tree))({"a": 1.5, "b": [values(3), 2]}, 4)


@program("eager operations")
def _() -> Any:
    x = jnp.linspace(0, 1, 7)
    return jnp.where(x > 0.5, x, -x)[::-1].cumsum(), float(x.sum()), int(jnp.argmax(x))


@program("grad")
def _() -> Any:
    return jax.value_and_grad(lambda w, x: jnp.mean(jnp.sin(x @ w) ** 2))(values(6, 2), values(4, 6))


@program("vmap")
def _() -> Any:
    return jax.vmap(jnp.dot)(values(5, 4), values(5, 4)), jax.jit(jax.vmap(jnp.outer, in_axes=(0, None)))(
        values(2, 3), values(4)
    )


@program("scan")
def _() -> Any:
    return lax.scan(lambda carry, x: (carry * 0.5 + x, carry), jnp.zeros(3), values(6, 3))


@program("while_loop, cond, fori_loop, switch")
def _() -> Any:
    return (
        lax.while_loop(lambda s: s[0] < 10, lambda s: (s[0] + 1, s[1] * 1.5), (0, jnp.float32(1))),
        lax.cond(jnp.float32(1) > 0, lambda x: x + 1, lambda x: x - 1, values(3)),
        lax.fori_loop(0, 5, lambda i, x: x + i, values(2)),
        lax.switch(2, [jnp.sin, jnp.cos, jnp.tan], values(3)),
    )


@program("random")
def _() -> Any:
    key = jax.random.key(7)
    one, two = jax.random.split(key)
    return (
        jax.random.normal(one, (3, 4)),
        jax.random.randint(two, (5,), 0, 100),
        jax.random.permutation(one, 10),
        jax.random.key_data(two),
    )


@program("random keys of other kinds")
def _() -> Any:
    return jax.random.uniform(jax.random.key(3, impl="rbg"), (4,)), jax.random.bits(jax.random.PRNGKey(1), (3,))


@program("linear algebra")
def _() -> Any:
    a = values(5, 5) @ values(5, 5).T / 50 + 5 * np.eye(5, dtype=np.float32)
    return (
        jnp.linalg.cholesky(a), jnp.linalg.eigh(a), jnp.linalg.inv(a), jnp.linalg.det(a),
        jnp.linalg.solve(a, values(5)), jnp.linalg.svd(a, compute_uv=False), jnp.linalg.qr(a),
        jax.scipy.linalg.lu(a), jax.scipy.linalg.expm(a / 10),
    )  # fmt: skip


@program("FFT")
def _() -> Any:
    return jnp.fft.fft(values(8)), jnp.fft.rfft2(values(4, 8)), jnp.fft.irfft(jnp.fft.rfft(values(8)))


@program("convolution and pooling")
def _() -> Any:
    x, w = values(2, 8, 8, 3), values(3, 3, 3, 4)
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return y, lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


@program("sort, top_k, gather, scatter")
def _() -> Any:
    x = values(4, 9) * 7 % 11
    return (
        jnp.sort(x),
        lax.top_k(x, 3),
        x[jnp.array([2, 0]), 1:4],
        jnp.zeros(5).at[jnp.array([1, 3, 1])].add(2.0),
        jnp.unique(x, size=6),
    )


@program("dynamic slices")
def _() -> Any:
    return jax.jit(lambda x, i: (lax.dynamic_slice(x, (i, 0), (2, 3)), lax.dynamic_update_slice(x, x[:1], (i, 0))))(
        values(5, 3), 2
    )


@program("sparse")
def _() -> Any:
    from jax.experimental import sparse

    m = sparse.BCOO.fromdense(values(5, 4) * (values(5, 4) > 9))
    return m @ values(4, 2), m.todense(), m.T.todense()


@program("dtypes: integers and floats of all sizes")
def _() -> Any:
    kinds = ["bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32"]
    return [(jax.jit(lambda x: x + x)(jnp.asarray(values(5), kind)), jnp.asarray(values(3), kind)) for kind in kinds]


@program("dtypes: int4 and uint4")
def _() -> Any:
    x = jnp.array([1, -3, 7], jnp.int4)
    return (
        x.astype(jnp.int8) * 2,
        jax.jit(lambda x: x + x)(x).astype(jnp.int32),
        jnp.array([1, 15], jnp.uint4).astype(jnp.int32),
    )


@program("dtypes: int4 arrays on the host")
def _() -> Any:
    x = jax.device_put(np.array([1, -3, 7], jnp.int4))
    return np.asarray(x).astype(np.int8), np.asarray(jax.jit(lambda x: x)(x)).astype(np.int8)


@program("dtypes: float8")
def _() -> Any:
    return [
        jax.jit(lambda x: (x * x).astype(jnp.float32))(jnp.asarray(values(4) / 8, kind))
        for kind in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e4m3b11fnuz)
    ]


@program("dtypes: complex")
def _() -> Any:
    x = values(4) + 1j * values(4)[::-1]
    return jnp.asarray(x), jax.jit(lambda x: (x * x.conj(), jnp.abs(x), jnp.exp(1j * x)))(x)


@program("64-bit mode")
def _() -> Any:
    with jax.enable_x64(True):
        x = jnp.arange(5, dtype=jnp.int64) * 10**12
        return x, jax.jit(lambda x: x / 3)(x), jnp.float64(1) / 3, jnp.asarray(values(3, dtype=np.complex128))


@program("zero-size arrays")
def _() -> Any:
    x = jnp.zeros((0, 3))
    return (
        x,
        x @ jnp.ones((3, 2)),
        jax.jit(lambda x: x.sum())(x),
        jnp.concatenate([x, jnp.ones((1, 3))]),
        x.at[:].add(1),
    )


@program("scalars and booleans")
def _() -> Any:
    return jnp.float32(2), jax.jit(lambda x: x > 1)(2.0), bool(jax.jit(lambda: True)()), jnp.asarray(False)


@program("strided and transposed host arrays")
def _() -> Any:
    x = values(6, 8)
    return jax.device_put(x.T), jax.device_put(x[::2, 1::3]), jax.device_put(np.asfortranarray(x))


@program("host arrays with negative strides (cannot work)")
def _() -> Any:
    return jax.device_put(values(6, 8)[::-1])


@program("donation")
def _() -> Any:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros(1024)
    old = x
    for _ in range(5):
        x = step(x)
    return x, old.is_deleted()


@program("a donated array used again is an error")
def _() -> Any:
    x = jnp.zeros(1024)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    return x + 1


@program("NamedSharding")
def _() -> Any:
    m = mesh(2, 2)
    x = jax.device_put(values(8, 4), NamedSharding(m, P("x", "y")))
    w = jax.device_put(values(4, 6), NamedSharding(m, P("y", None)))
    f = jax.jit(lambda x, w: (x @ w, x.T, x.sum(0)), out_shardings=NamedSharding(m, P()))
    y, t, s = f(x, w)
    return x, y, t, s, jax.jit(lambda x: x * 2)(x), [np.asarray(shard.data) for shard in x.addressable_shards]


@program("shardings that permute and replicate")
def _() -> Any:
    m = mesh(2, 2)
    specs = [P(("x", "y")), P(("y", "x")), P("y", "x"), P(None, "y"), P("y"), P(None, ("y", "x")), P()]
    arrays = [jax.device_put(values(8, 4), NamedSharding(m, spec)) for spec in specs]
    moved = [jax.device_put(arrays[0], NamedSharding(m, spec)) for spec in specs]
    summed = [jax.jit(lambda x: x + 1)(array) for array in arrays]
    return arrays, moved, summed, [str(array.sharding.spec) for array in summed]


@program("with_sharding_constraint")
def _() -> Any:
    m = mesh(4)
    return jax.jit(lambda x: lax.with_sharding_constraint(x * 2, NamedSharding(m, P("x"))) + 1)(values(8))


@program("shard_map and collectives")
def _() -> Any:
    m = mesh(2, 2)

    @jax.jit
    @partial(jax.shard_map, mesh=m, in_specs=P("x", "y"), out_specs=(P("x", "y"), P("x"), P(None, "y")))
    def f(x: Any) -> Any:
        return (
            lax.ppermute(x, "x", [(0, 1), (1, 0)]),
            lax.psum(x, "y"),
            lax.psum(x, "x") + lax.axis_index("y"),
        )

    return f(values(4, 4))


@program("pmap")
def _() -> Any:
    return jax.pmap(lambda x: lax.psum(x, "i") + x, axis_name="i", devices=devices())(values(4, 3))


@program("make_array_from_callback")
def _() -> Any:
    m = mesh(4)
    x = jax.make_array_from_callback((8, 2), NamedSharding(m, P("x")), lambda index: values(8, 2)[index])
    return x, x + 1


@program("make_array_from_single_device_arrays")
def _() -> Any:
    m = mesh(4)
    shards = [jax.device_put(values(2, 3) + i, device) for i, device in enumerate(m.devices.flat)]
    x = jax.make_array_from_single_device_arrays((8, 3), NamedSharding(m, P("x")), shards)
    return x, x.sum(), [shard.data + 1 for shard in x.addressable_shards]


@program("device_put between devices and meshes")
def _() -> Any:
    x = jax.device_put(values(8), devices()[1])
    y = jax.device_put(x, devices()[2])
    z = jax.device_put(y, NamedSharding(mesh(4), P("x")))
    w = jax.device_put(z, NamedSharding(mesh(2), P("x")))
    return x, y, z, w, [next(iter(a.devices())).id - FIRST_DEVICE for a in (x, y)], jax.device_put(z, devices()[0])


@program("pinned host memory")
def _() -> Any:
    device = devices()[0]
    there = jax.device_put(values(6), jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host"))
    back = jax.device_put(there, jax.sharding.SingleDeviceSharding(device, memory_kind="device"))
    return there, back, there.sharding.memory_kind, back + 1


@program("many small arrays")
def _() -> Any:
    return list(jax.device_get(jax.device_put([np.float32(i) for i in range(100)])))


@program("is_ready, block_until_ready, copy_to_host_async, delete")
def _() -> Any:
    x = jax.jit(lambda x: x * 2)(values(100))
    jax.block_until_ready(x)
    x.copy_to_host_async()
    ready, value = x.is_ready(), np.asarray(x)
    x.delete()
    return ready, value, x.is_deleted()


@program("a deleted array used again is an error")
def _() -> Any:
    x = jnp.ones(3)
    x.delete()
    return x + 1


@program("lower, compile, and what compiled programs say")
def _() -> Any:
    compiled = jax.jit(lambda x: x @ x.T).lower(values(8, 8)).compile()
    memory = compiled.memory_analysis()
    return (
        compiled(values(8, 8)), compiled.cost_analysis()["flops"], "HloModule" in compiled.as_text(),
        memory.argument_size_in_bytes, memory.output_size_in_bytes, str(compiled.input_formats[0][0].layout),
    )  # fmt: skip


@program("static arguments, closures, custom_vjp, remat")
def _() -> Any:
    @jax.custom_vjp
    def f(x: Any) -> Any:
        return jnp.sin(x)

    f.defvjp(lambda x: (f(x), x), lambda x, g: (g * 2 * x,))
    w = jnp.asarray(values(3, 3))
    g = jax.jit(lambda x, n: jax.checkpoint(lambda y: jnp.tanh(y @ w))(x) * n, static_argnums=1)
    return (
        jax.grad(lambda x: f(x).sum())(values(4)),
        g(values(2, 3), 3),
        jax.grad(lambda x: g(x, 2).sum())(values(2, 3)),
    )


@program("a training step with FSDP shardings")
def _() -> Any:
    m = mesh(4)
    split, whole = NamedSharding(m, P("x")), NamedSharding(m, P())
    params = {"w1": jax.device_put(values(8, 16) / 20, split), "w2": jax.device_put(values(16, 8) / 20, split)}

    @partial(jax.jit, donate_argnums=0, out_shardings=(split, whole))
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - x) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    losses = []
    for _ in range(5):
        params, value = step(params, jax.device_put(values(8, 8) / 10, split))
        losses.append(value)
    return params, losses


@program("a flax model trained with optax")
def _() -> Any:
    import flax.linen as nn
    import optax

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(4)(nn.relu(nn.LayerNorm()(nn.Dense(16)(x))))

    model, optimizer = Model(), optax.adamw(1e-2)
    params = model.init(jax.random.key(0), jnp.ones((2, 8)))
    state = optimizer.init(params)
    x, y = values(8, 8) / 10, np.arange(8) % 4

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        def loss(params: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for _ in range(3):
        params, state, value = step(params, state)
        losses.append(value)
    return losses, params


@program("errors of tracing")
def _() -> Any:
    return jax.jit(lambda x, y: x @ y)(values(3, 2), values(3, 2))


@program("checkify and NaN are not special")
def _() -> Any:
    from jax.experimental import checkify

    error, value = jax.jit(checkify.checkify(lambda x: x / 2))(4.0)
    return value, error.get() is None, jnp.log(-jnp.ones(2)), jnp.array([np.inf, -np.inf])


@program("export and call again")
def _() -> Any:
    exported = jax.export.export(jax.jit(lambda x: x * 3), platforms=["cpu"])(jax.ShapeDtypeStruct((4,), np.float32))
    return jax.jit(jax.export.deserialize(exported.serialize()).call)(values(4))


@program("jax.debug.print (cannot work)")
def _() -> Any:
    jax.jit(lambda x: (jax.debug.print("x = {}", x), x)[1])(1.0).block_until_ready()
    jax.effects_barrier()
    return "printed"


@program("jax.pure_callback (cannot work)")
def _() -> Any:
    return jax.jit(lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), np.float32), x))(np.float32(1))


def result_of(function: Callable[[], Any]) -> tuple[str, Any]:
    try:
        made = function()
        leaves = jax.tree.leaves(made)
        return "values", [np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
    except Exception as error:
        return "error", (type(error).__name__, str(error))


def main(path: str, *only: str) -> None:
    jax.config.update("jax_default_device", devices()[0])
    results = {}
    for title, function in PROGRAMS.items():
        if not only or any(word in title for word in only):
            results[title] = result_of(function)
            with open(path, "wb") as file:
                pickle.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
