"""A graph for people: every node with where it runs, why, what it reads and writes, and what has to travel for it."""

from __future__ import annotations

from dataclasses import dataclass

from pathway.dataflow.graph import Graph, Node
from pathway.dataflow.layout import Sharding


@dataclass(frozen=True)
class Transfer:
    """A value that a node reads from another slice. `nbytes` is the whole array's."""

    value: int
    node: int
    from_slice: int
    to_slice: int
    nbytes: int


def implied_transfers(graph: Graph) -> list[Transfer]:
    """What travels between slices: once for each value, slice and sharding that it is wanted in, however many nodes
    read it there. Host arrays are not among it: they are sent to each slice that reads them."""
    host = {argument.value for argument in graph.arguments if not argument.resident}
    host.update(value for value, _ in graph.constants)
    seen: set[tuple[int, int, Sharding]] = set()
    transfers = []
    for node in graph.nodes:
        for number, sharding in zip(node.inputs, node.in_shardings, strict=True):
            value = graph.values[number]
            if value.slice != node.slice and number not in host and (number, node.slice, sharding) not in seen:
                seen.add((number, node.slice, sharding))
                transfers.append(Transfer(number, node.index, value.slice, node.slice, value.aval.physical.nbytes))
    return transfers


def as_text(graph: Graph) -> str:
    """The graph, a paragraph for each node in the order in which they run."""
    transfers = implied_transfers(graph)
    used = len({node.slice for node in graph.nodes})
    moved = sum(transfer.nbytes for transfer in transfers)
    lines = [
        f"program {graph.name}: {_count(len(graph.nodes), 'node')} on {_count(used, 'slice')}, "
        f"{_count(len(transfers), 'transfer')} of {_bytes(moved)} in all"
    ]
    for slice in sorted(graph.slices):
        shape = graph.slices[slice]
        mesh = ", ".join(f"{axis}={size}" for axis, size in shape.mesh)
        lines.append(f"  slice {slice}: mesh {{{mesh}}} on {shape.platform}")
    origins = _origins(graph)
    for argument in graph.arguments:
        lines.append(f"  {origins[argument.value]}: {_value(graph, argument.value)}")
    for number, _ in (*graph.constants, *graph.references):
        lines.append(f"  {origins[number]}: {_value(graph, number)}")
    for node in graph.nodes:
        lines += _node(graph, node, origins)
    lines.append("  results: " + ", ".join(f"%{result.value}" for result in graph.results))
    return "\n".join(lines)


def _origins(graph: Graph) -> dict[int, str]:
    origins = {}
    for position, argument in enumerate(graph.arguments):
        kind = "resident" if argument.resident else "from the host"
        origins[argument.value] = f"argument {position} ({kind}{', donated' if argument.donated else ''})"
    origins.update((value, "constant") for value, _ in graph.constants)
    origins.update((value, "closed-over array") for value, _ in graph.references)
    return origins


def _value(graph: Graph, number: int) -> str:
    value = graph.values[number]
    return f"%{number} {value.aval} on slice {value.slice} {_spec(value.sharding)}"


def _spec(sharding: Sharding) -> str:
    return str(sharding).split(" over ")[0]


def _node(graph: Graph, node: Node, origins: dict[int, str]) -> list[str]:
    lines = ["", f"node {node.index}  {node.name}  on slice {node.slice}"]
    if node.reason:
        lines.append(f"  why     {node.reason}")
    if node.source:
        lines.append(f"  line    {node.source}")
    for position, (number, sharding) in enumerate(zip(node.inputs, node.in_shardings, strict=True)):
        value = graph.values[number]
        notes = []
        if number in origins:
            notes.append(origins[number])
        elif value.slice != node.slice:
            notes.append(
                f"TRANSFER of {_bytes(value.aval.physical.nbytes)} from slice {value.slice} {_spec(value.sharding)}"
            )
        if number in origins and value.slice != node.slice:
            kind = (
                "TRANSFER from" if "resident" in origins[number] or "closed" in origins[number] else "also sent, as to"
            )
            notes.append(f"{kind} slice {value.slice}")
        if position in node.donates:
            notes.append("donated")
        lines.append(
            f"  reads   %{number} {value.aval} {_spec(sharding)}" + (f"  ({', '.join(notes)})" if notes else "")
        )
    lines += [
        f"  writes  %{n} {graph.values[n].aval} {_spec(s)}"
        for n, s in zip(node.outputs, node.out_shardings, strict=True)
    ]
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _bytes(number: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return _count(number, "byte")
