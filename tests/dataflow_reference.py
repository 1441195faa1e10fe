"""The reference for graphs: evaluate one in this process, node by node, and compare with plain JAX.

On one process without a mesh, a stage is a plain `jit` and its constraints mean nothing: so the program itself, called
as it is, is the reference, and a graph is right when its nodes, run one after the other, give the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from pathway.dataflow.fuse import fuse
from pathway.dataflow.graph import Graph, SliceShape
from pathway.dataflow.place import Resident, place
from pathway.dataflow.trace import Traced, trace
from pathway.dataflow.validate import validate

A = SliceShape(0, (("data", 2), ("model", 2)))
B = SliceShape(1, (("x", 2),))
C = SliceShape(2, (("x", 4),))
SLICES = {0: A, 1: B, 2: C}

_compiled: dict[int, tuple[Any, Any]] = {}


def evaluate(graph: Graph, leaves: Sequence[Any], references: Mapping[Any, Any] | None = None) -> list[Any]:
    """The graph's flat results for these flat arguments."""
    values: dict[int, Any] = {argument.value: leaf for argument, leaf in zip(graph.arguments, leaves, strict=True)}
    values.update(graph.constants)
    values.update((value, (references or {})[handle]) for value, handle in graph.references)
    for node in graph.nodes:
        if id(node.jaxpr) not in _compiled:
            _compiled[id(node.jaxpr)] = (node.jaxpr, jax.jit(jex.jaxpr_as_fun(node.jaxpr)))
        results = _compiled[id(node.jaxpr)][1](*[values[number] for number in node.inputs])
        for position in node.donates:  # whoever reads a donated value later gets nothing
            values[node.inputs[position]] = None
        values.update(zip(node.outputs, results, strict=True))
    return [values[result.value] for result in graph.results]


def graphs(
    fun: Any,
    *args: Any,
    slices: Mapping[int, SliceShape] = SLICES,
    residents: Sequence[Resident | None] | None = None,
    donated: Sequence[int] = (),
    references: Any = None,
    default_slice: int | None = None,
    static_argnums: Sequence[int] = (),
    **kwargs: Any,
) -> tuple[Traced, Graph, Graph]:
    """The program traced, placed, and fused; both graphs valid."""
    traced = trace(fun, args, kwargs, static_argnums=static_argnums)
    residents = residents if residents is not None else [None] * len(traced.in_avals)
    unfused = place(traced, slices, residents, donated=donated, references=references, default_slice=default_slice)
    validate(unfused)
    fused = fuse(unfused)
    validate(fused)
    return traced, unfused, fused


def check(fun: Any, *args: Any, tolerance: float = 1e-5, **options: Any) -> Graph:
    """Both graphs of the program give what the program gives. Returns the fused one."""
    traced, unfused, fused = graphs(fun, *args, **options)
    keys = ("slices", "residents", "donated", "references", "default_slice", "static_argnums")
    kwargs = {key: value for key, value in options.items() if key not in keys}
    expected = fun(*args, **kwargs)
    leaves = traced.flatten(args, kwargs)
    for graph in (unfused, fused):
        same(traced.assemble(evaluate(graph, leaves)), expected, tolerance)
    return fused


def same(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Equal trees of equal arrays, dtypes and key types included."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert jax.numpy.shape(a) == jax.numpy.shape(b)
        assert jax.numpy.result_type(a) == jax.numpy.result_type(b)
        if jax.dtypes.issubdtype(getattr(a, "dtype", None), jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if getattr(a, "dtype", None) == jax.dtypes.float0:
            continue
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)
