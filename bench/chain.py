"""The work that dispatch is measured on (the paper's Figure 5, on this scale), as plain JAX.

One *step* is an all-reduce of one scalar a device, and an add; every step's output is the next one's input. So nothing
can be computed ahead, and what is measured is how fast a runtime can tell devices what to do.

  O  every step is a call of its own
  C  one program of `CHAIN_LENGTH` nodes, a step each
  F  one computation of `CHAIN_LENGTH` steps
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from bench import CHAIN_LENGTH

AXIS = "d"
"""The mesh axis over which x has one element a device."""

_SHRINK = 2.0**-20
"""Keeps the values finite however long the chain is."""

Step = Callable[[jax.Array], jax.Array]


def make_step(wait_us: int = 0) -> Step:
    """The step, in which every device is held for `wait_us` besides (`bench.device_wait`)."""
    if wait_us:
        from bench.device_wait import device_wait

    def step(x: jax.Array) -> jax.Array:
        total = jnp.sum(x)
        if wait_us:
            total = device_wait(total, wait_us)
        stepped: jax.Array = x + total * _SHRINK
        return stepped

    return step


def make_fused(step: Step) -> Step:
    """`CHAIN_LENGTH` steps as one function."""

    def fused(x: jax.Array) -> jax.Array:
        for _ in range(CHAIN_LENGTH):
            x = step(x)
        return x

    return fused


def start_value(devices: int) -> np.ndarray:
    return np.linspace(0.5, 1.0, devices, dtype=np.float32)
