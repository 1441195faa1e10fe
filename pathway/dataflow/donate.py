"""Which inputs a node may overwrite: the arguments that their caller gives up.

A donated argument goes to the last node that reads it, if XLA can put an output in its place (the same shape, dtype and
sharding) and if nobody else could still want it: it is read on its own slice alone, it is no result, and no other
argument or closed-over array is the same buffer. The donating node must run after the other readers.
"""

from __future__ import annotations

from dataclasses import replace

from pathway.dataflow.graph import Graph


def assign_donations(graph: Graph) -> Graph:
    """The graph with every node's `donates` set anew."""
    results = {result.value for result in graph.results}
    donates: dict[int, list[int]] = {node.index: [] for node in graph.nodes}
    taken: dict[int, set[int]] = {node.index: set() for node in graph.nodes}
    for argument in graph.arguments:
        if not (argument.donated and argument.resident) or argument.value in results:
            continue
        value = graph.values[argument.value]
        readers = [node for node in graph.nodes if argument.value in node.inputs]
        if not readers or any(node.slice != value.slice for node in readers):
            continue
        last = readers[-1]
        if last.inputs.count(argument.value) > 1:
            continue
        for number in last.outputs:
            output = graph.values[number]
            same = (output.aval.shape, output.aval.dtype) == (value.aval.shape, value.aval.dtype)
            if same and output.sharding == value.sharding and number not in taken[last.index]:
                taken[last.index].add(number)
                donates[last.index].append(last.inputs.index(argument.value))
                break
    nodes = tuple(replace(node, donates=tuple(sorted(donates[node.index]))) for node in graph.nodes)
    return replace(graph, nodes=nodes)
