"""Values of a registered type go into JAX's functions, on every version of JAX that is supported."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pathway.dataflow import jaxtypes
from pathway.dataflow.placed import array_reference
from pathway.errors import PathwayError

VALUE = np.arange(3, dtype=np.float32)


class Remote:
    shape, dtype, weak_type = (3,), np.dtype("float32"), False
    sharding = jax.sharding.NamedSharding(jax.sharding.AbstractMesh((2,), ("data",)), jax.sharding.PartitionSpec())
    tracing = False

    def __jax_array__(self):
        return array_reference("handle", self.shape, self.dtype) if self.tracing else jnp.asarray(VALUE)


jaxtypes.register(Remote, lambda: Remote.tracing)


def test_outside_of_a_program_one_is_told_what_to_do():
    with pytest.raises(PathwayError, match=r"@pathway\.program"):
        jnp.sin(Remote())
    np.testing.assert_array_equal(jnp.asarray(Remote()), VALUE)


def test_within_a_trace_it_is_a_reference_wherever_it_stands(monkeypatch):
    monkeypatch.setattr(Remote, "tracing", True)
    remote = Remote()

    def program(x):
        inner = jax.jit(lambda y, w: jnp.sin(remote) * y * w)
        value = inner(x, remote) + jnp.concatenate([remote, x])[:3] + jnp.where(x > 0, remote, 0)
        return value, jax.grad(lambda x: jnp.dot(remote, x) * jnp.sum(remote))(x), jax.vmap(jnp.add)(x, remote)

    jaxpr = str(jax.make_jaxpr(program)(jax.ShapeDtypeStruct((3,), jnp.float32)))
    assert jaxpr.count("pathway_array[") >= 6
    assert "handle=handle" in jaxpr
