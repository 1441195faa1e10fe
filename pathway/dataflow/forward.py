"""Outputs that are inputs: what reads such an output reads the input instead, and nobody writes it.

The backward pass of a stage needs the stage's weights, so JAX's autodiff makes them an output of the forward pass.
There they have gone through the sharding constraint of `in_specs`, which makes them a new variable to JAX, though in
that very sharding they are the same array. Without this pass every microbatch in flight would hold a copy of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Set
from dataclasses import replace

from pathway.dataflow.fuse import renumbered
from pathway.dataflow.graph import Graph, Node
from pathway.dataflow.jaxprs import Interner, Literal, Var, opened
from pathway.dataflow.layout import Sharding


def forward_inputs(graph: Graph) -> Graph:
    """The graph in which no node of a slice reads what another node of that slice only hands on."""
    original: dict[int, tuple[int, int, Sharding]] = {}  # output value -> (slice, the input's value, its sharding)
    for node in graph.nodes:
        for output, position in _handed_on(graph, node).items():
            value, sharding = node.inputs[position], node.in_shardings[position]
            if value in original and original[value][0] == node.slice:
                value = original[value][1]
            original[output] = (node.slice, value, sharding)
    if not original:
        return graph

    def source(node: Node, value: int) -> int:
        found = original.get(value)
        return found[1] if found is not None and found[0] == node.slice else value

    nodes = [replace(node, inputs=tuple(source(node, value) for value in node.inputs)) for node in graph.nodes]
    read = {value for node in nodes for value in node.inputs} | {result.value for result in graph.results}
    dropped, interner = original.keys() - read, Interner()
    kept = [_without(node, dropped, interner) for node in nodes]
    return renumbered(graph, [node for node in kept if node.outputs])


def _handed_on(graph: Graph, node: Node) -> dict[int, int]:
    """The values of outputs that are inputs in the same sharding, with the positions of those."""
    body = opened(node.jaxpr)[0]
    position_of: dict[Var, int] = {var: position for position, var in enumerate(body.invars)}
    for equation in body.eqns:
        if equation.primitive.name == "sharding_constraint" and equation.invars[0] in position_of:
            position_of[equation.outvars[0]] = position_of[equation.invars[0]]
    found = {}
    for atom, output in zip(body.outvars, node.outputs, strict=True):
        position = None if isinstance(atom, Literal) else position_of.get(atom)
        if position is None:
            continue
        value, same = graph.values[output], graph.values[node.inputs[position]]
        if value.aval == same.aval and value.sharding == node.in_shardings[position]:
            found[output] = position
    return found


def _without(node: Node, dropped: Set[int], interner: Interner) -> Node:
    used = tuple(output not in dropped for output in node.outputs)
    if all(used):
        return node
    jaxpr, live = interner.pruned(node.jaxpr, used)
    return replace(
        node,
        jaxpr=jaxpr,
        outputs=tuple(itertools.compress(node.outputs, used)),
        out_shardings=tuple(itertools.compress(node.out_shardings, used)),
        inputs=tuple(itertools.compress(node.inputs, live)),
        in_shardings=tuple(itertools.compress(node.in_shardings, live)),
    )
