"""Whether a graph keeps the invariants that `pathway.dataflow.graph` states. For tests, after every pass."""

from __future__ import annotations

from pathway.dataflow.graph import Graph
from pathway.dataflow.jaxprs import BAKED_BYTES, aval_of, nbytes, opened
from pathway.dataflow.lift import is_baked


def validate(graph: Graph) -> None:
    """Raise `AssertionError`, naming the invariant and the node, for a graph that breaks one."""
    sources = [argument.value for argument in graph.arguments]
    sources += [value for value, _ in (*graph.constants, *graph.references)]
    known = set(sources)
    assert len(known) == len(sources), "G-2: two sources for one value"
    assert [value.index for value in graph.values] == list(range(len(graph.values))), "values are not numbered in order"
    assert [node.index for node in graph.nodes] == list(range(len(graph.nodes))), "nodes are not numbered in order"
    for value in graph.values:
        mesh = graph.slices[value.slice].mesh
        assert value.sharding.mesh == mesh, f"G-2: value {value.index} is sharded over another slice's mesh"
        assert len(value.sharding.spec) == len(value.aval.shape), f"G-2: value {value.index} has a spec of another rank"
        for dimension, extent in enumerate(value.aval.shape):
            assert extent % value.sharding.parts(dimension) == 0, f"G-2: value {value.index} is split unevenly"
    for node in graph.nodes:
        body, constants = opened(node.jaxpr)
        at = f"node {node.index} ({node.name})"
        assert node.inputs == tuple(v for v in node.inputs if v in known), f"G-1: {at} reads what is not there yet"
        assert not known & set(node.outputs), f"G-2: {at} writes a value again"
        assert len(body.invars) == len(node.inputs) == len(node.in_shardings), f"{at}: inputs do not match its body"
        assert len(body.outvars) == len(node.outputs) == len(node.out_shardings), f"{at}: outputs do not match its body"
        for number, var, sharding in zip(node.inputs, body.invars, node.in_shardings, strict=True):
            value = graph.values[number]
            assert (value.aval.shape, value.aval.dtype) == (aval_of(var).shape, aval_of(var).dtype), f"{at}: input aval"
            assert sharding.mesh == graph.slices[node.slice].mesh, f"G-3: {at} takes an input over another mesh"
            if value.slice == node.slice:
                assert sharding == value.sharding, f"G-3: {at} takes value {number} in another sharding than it is in"
        for number, var, sharding in zip(node.outputs, body.outvars, node.out_shardings, strict=True):
            value = graph.values[number]
            assert value.aval == aval_of(var), f"{at}: output aval {value.aval} is {aval_of(var)} in the body"
            assert (value.slice, value.sharding) == (node.slice, sharding), f"G-2: {at} writes value {number} elsewhere"
        for var, constant in zip(body.constvars, constants, strict=True):
            assert is_baked(constant, var), f"{at} holds a constant of {nbytes(var)} > {BAKED_BYTES} bytes"
        for position in node.donates:
            number = node.inputs[position]
            readers = [other for other in graph.nodes if number in other.inputs]
            assert readers[-1] is node, f"{at} donates value {number}, which is read later"
            assert all(other.slice == node.slice for other in readers), f"{at} donates what another slice reads"
            assert number not in {result.value for result in graph.results}, f"{at} donates a result"
        known.update(node.outputs)
    for result in graph.results:
        assert result.value in known, "a result that nothing computes"
