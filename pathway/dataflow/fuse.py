"""Fewer, larger computations: consecutive nodes of one slice become one where nothing is delayed by it.

Going along a slice's nodes in program order, a node joins the group before it if

  F-1  no other slice reads what the group computes so far: it would get it later;
  F-2  what the node needs from other slices, the group needs too: otherwise its first members would start later. Host
       arrays do not count, they come with the run;
  F-3  whatever on other slices the group comes after, the node comes after too; unless nothing on another slice comes
       after the node. Otherwise the forward pass of a microbatch would wait for the backward pass of the one before.

So a chain on one slice becomes one computation, and a backward pass takes in the sum that follows it, while the stages
of a pipeline's microbatches, each of which is read elsewhere, stay apart. No cycle can arise: a path from a group back
to a later member would have to pass a node between the two, on another slice by construction, and by F-1 none of those
reads from the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pathway.dataflow.donate import assign_donations
from pathway.dataflow.graph import Graph, Node
from pathway.dataflow.jaxprs import Atom, Equation, Interner, Var, call_of, fresh, make_jaxpr, opened, renewed
from pathway.dataflow.jaxprs import substituted as written_out


def fuse(graph: Graph) -> Graph:
    """The graph with its groups joined, donations found anew."""
    groups = _groups(graph)
    if len(groups) == len(graph.nodes):
        return graph
    read = {result.value for result in graph.results}
    for node in graph.nodes:
        read.update(node.inputs)
    interner = Interner()
    # A group stands where its last member stood: nothing between its members needs any but the last (F-1).
    nodes = [
        _joined(graph, group, read, interner) if len(group) > 1 else group[0]
        for group in sorted(groups, key=lambda group: group[-1].index)
    ]
    return assign_donations(renumbered(graph, nodes))


def _groups(graph: Graph) -> list[list[Node]]:
    producer = {output: node for node in graph.nodes for output in node.outputs}
    readers: dict[int, list[Node]] = {}
    for node in graph.nodes:
        for value in node.inputs:
            readers.setdefault(value, []).append(node)
    host = {argument.value for argument in graph.arguments if not argument.resident}
    host.update(value for value, _ in graph.constants)

    ancestors: list[int] = []  # as bit sets over node indices
    for node in graph.nodes:
        mask = 0
        for value in node.inputs:
            if value in producer:
                mask |= ancestors[producer[value].index] | 1 << producer[value].index
        ancestors.append(mask)
    everything = (1 << len(graph.nodes)) - 1
    elsewhere = dict.fromkeys(graph.slices, everything)
    for node in graph.nodes:
        elsewhere[node.slice] &= ~(1 << node.index)
    leads_elsewhere = [False] * len(graph.nodes)
    for node in reversed(graph.nodes):
        after = (reader for output in node.outputs for reader in readers.get(output, ()))
        leads_elsewhere[node.index] = any(r.slice != node.slice or leads_elsewhere[r.index] for r in after)

    def foreign(node: Node) -> set[int]:
        return {value for value in node.inputs if graph.values[value].slice != node.slice} - host

    def is_joined(group: _Group, node: Node) -> bool:
        if group.read_elsewhere:
            return False
        new = foreign(node) - group.foreign
        if not all(value in producer and group.ancestors >> producer[value].index & 1 for value in new):
            return False
        return not leads_elsewhere[node.index] or not group.ancestors & elsewhere[node.slice] & ~ancestors[node.index]

    groups: list[_Group] = []
    current: dict[int, _Group] = {}
    for node in graph.nodes:
        group = current.get(node.slice)
        if group is None or not is_joined(group, node):
            group = current[node.slice] = _Group()
            groups.append(group)
        group.nodes.append(node)
        group.foreign |= foreign(node)
        group.ancestors |= ancestors[node.index]
        group.read_elsewhere = any(r.slice != node.slice for output in node.outputs for r in readers.get(output, ()))
    return [group.nodes for group in groups]


@dataclass
class _Group:
    """Nodes to be joined: what they read from other slices, what they come after, and whether another slice waits."""

    nodes: list[Node] = field(default_factory=list)
    foreign: set[int] = field(default_factory=set)
    ancestors: int = 0
    read_elsewhere: bool = False


def _joined(graph: Graph, group: Sequence[Node], read: set[int], interner: Interner) -> Node:
    members = {node.index for node in group}
    wanted = {result.value for result in graph.results}
    for node in graph.nodes:
        if node.index not in members:
            wanted.update(node.inputs)
    names: dict[int, Atom] = {}
    inputs: dict[int, tuple[Var, Any]] = {}
    outputs: dict[int, Any] = {}
    equations: list[Equation] = []
    constants: dict[int, tuple[Var, Any]] = {}

    def constant(value: Any, var: Var) -> Atom:
        return constants.setdefault(id(value), (fresh(var), value))[0]

    def keep(equation: Equation) -> Sequence[Atom]:
        equations.append(renewed(equation))
        return list(equations[-1].outvars)

    for node in group:
        variables = opened(node.jaxpr)[0].invars
        for value, var, sharding in zip(node.inputs, variables, node.in_shardings, strict=True):
            if value not in names:
                inputs[value] = (fresh(var), sharding)
                names[value] = inputs[value][0]
        arguments = [names[value] for value in node.inputs]
        if node.placed:  # a stage stays one call: XLA reads the body of all its calls once
            results: Sequence[Atom] = [fresh(atom) for atom in opened(node.jaxpr)[0].outvars]
            equations.append(call_of(node.jaxpr, arguments, results))
        else:
            results = written_out(node.jaxpr, arguments, constant, keep)
        names.update(zip(node.outputs, results, strict=True))
        outputs.update((v, s) for v, s in zip(node.outputs, node.out_shardings, strict=True) if v in wanted)
    jaxpr = make_jaxpr(
        [var for var, _ in inputs.values()], [names[value] for value in outputs], equations, list(constants.values())
    )
    stages = [node for node in group if node.placed] or list(group)
    return replace(
        group[-1],
        name=_name([node.name for node in group]),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        in_shardings=tuple(sharding for _, sharding in inputs.values()),
        out_shardings=tuple(outputs.values()),
        jaxpr=interner.intern(jaxpr),
        source=stages[0].source,
        placed=any(node.placed for node in group),
        donates=(),
        backward=any(node.backward for node in group),
        reason=f"{len(group)} nodes in one: {group[0].reason}",
    )


def _name(names: Sequence[str]) -> str:
    """The distinct names in order, with how often each comes."""
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    texts = [name if count == 1 else f"{name} x{count}" for name, count in counts.items()]
    return ", ".join(texts[:3]) + (", ..." if len(texts) > 3 else "")


def renumbered(graph: Graph, nodes: Sequence[Node]) -> Graph:
    """Nodes and values numbered without gaps; values that are internal to a group are gone."""
    written = {output for node in graph.nodes for output in node.outputs}
    kept = {output for node in nodes for output in node.outputs}
    numbers: dict[int, int] = {}
    for value in graph.values:
        if value.index not in written or value.index in kept:
            numbers[value.index] = len(numbers)
    return replace(
        graph,
        values=tuple(replace(graph.values[old], index=new) for old, new in numbers.items()),
        nodes=tuple(
            replace(
                node,
                index=index,
                inputs=tuple(numbers[value] for value in node.inputs),
                outputs=tuple(numbers[value] for value in node.outputs),
            )
            for index, node in enumerate(nodes)
        ),
        arguments=tuple(replace(argument, value=numbers[argument.value]) for argument in graph.arguments),
        results=tuple(replace(result, value=numbers[result.value]) for result in graph.results),
        constants=tuple((numbers[value], array) for value, array in graph.constants),
        references=tuple((numbers[value], handle) for value, handle in graph.references),
    )
