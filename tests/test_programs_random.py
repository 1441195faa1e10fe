"""Programs drawn at random, against plain JAX: stages, slices, fan-in and fan-out, host arrays, gradients, donation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dataflow_reference import A, B, C, check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from pathway.dataflow.layout import Sharding
from pathway.dataflow.place import Resident
from pathway.dataflow.placed import placed_call

SLICES = (A, B, C)
BODIES = {
    "mix": lambda a, b: jnp.tanh(a + 0.5 * b),
    "product": lambda a, b: (a @ b) * 0.3,
    "scaled": lambda a, b: a * b.mean(),
}
STAGES = {
    (name, slice.slice): placed_call(
        body, slice, P(slice.mesh[0][0]), (P() if slice is B else P(slice.mesh[0][0])), name=f"{name}{slice.slice}"
    )
    for name, body in BODIES.items()
    for slice in SLICES
}
FREE = {
    "add": lambda a, b: a + b,
    "transpose": lambda a, b: a.T - b,
    "normalise": lambda a, b: a / (1 + jnp.sqrt((b**2).sum())),
    "gate": lambda a, b: jnp.where(b.sum() > 0, a, -a),
    "noise": lambda a, b: a + 0.1 * jax.random.normal(jax.random.key(3), b.shape),
    "slice": lambda a, b: jnp.concatenate([a[:2], b[2:]]),
    "detour": lambda a, b: jax.jit(lambda a, b: (a * 2, b + 1))(a, b)[0],
}

operation = st.tuples(
    st.one_of(
        st.tuples(st.sampled_from(sorted(BODIES)), st.sampled_from([0, 1, 2])),
        st.tuples(st.sampled_from(sorted(FREE)), st.none()),
    ),
    st.integers(0, 30),
    st.integers(0, 30),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(
    operations=st.lists(operation, min_size=1, max_size=9),
    wanted=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    homes=st.lists(st.sampled_from([None, 0, 1, 2]), min_size=3, max_size=3),
    gradient=st.booleans(),
    remat=st.booleans(),
)
def test_a_random_program_equals_plain_jax(
    operations: list[Any], wanted: list[int], homes: list[int | None], gradient: bool, remat: bool
) -> None:
    def forward(arguments: tuple[Any, ...]) -> list[Any]:
        values = list(arguments)
        for (name, slice), left, right in operations:
            fun = FREE[name] if slice is None else STAGES[name, slice]
            values.append(fun(values[left % len(values)], values[right % len(values)]))
        return [values[-1 - index % len(values)] for index in wanted]

    def loss(arguments: tuple[Any, ...]) -> Any:
        return sum((value**2).mean() for value in forward(arguments))

    def program(arguments: tuple[Any, ...]) -> Any:
        if not gradient:
            return forward(arguments)
        value, gradients = jax.value_and_grad(jax.checkpoint(loss) if remat else loss)(arguments)
        return value, jax.tree.map(lambda a, g: a - 0.1 * g, arguments, gradients)

    arguments = tuple(np.sin(np.arange(16, dtype=np.float32) + 7 * i).reshape(4, 4) for i in range(3))
    residents = [
        None if home is None else Resident(home, Sharding(SLICES[home].mesh, ((), ())), number)
        for number, home in enumerate(homes)
    ]
    donated = [number for number, home in enumerate(homes) if home is not None]
    check(program, arguments, residents=residents, donated=donated, default_slice=0, tolerance=1e-4)
