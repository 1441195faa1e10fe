"""Small graphs for the tests of the dataflow's back half, built by hand: no tracing, no placing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from pathway.dataflow.graph import BoundSlice, Graph, GraphArgument, GraphResult, Node, SliceShape, Value
from pathway.dataflow.layout import Aval, Sharding


def bound(
    index: int,
    island: str,
    devices: Sequence[int],
    mesh: Sequence[tuple[str, int]] | None = None,
    devices_per_host: int = 4,
) -> BoundSlice:
    return BoundSlice(index, island, 1, tuple(devices), devices_per_host, tuple(mesh or (("x", len(devices)),)))


@dataclass
class GraphBuilder:
    """Appends arguments, nodes and results in program order, and hands back value numbers."""

    bindings: dict[int, BoundSlice]
    values: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    arguments: list[GraphArgument] = field(default_factory=list)
    constants: list[tuple[int, Any]] = field(default_factory=list)
    references: list[tuple[int, int]] = field(default_factory=list)

    def sharding(self, where: int, *spec: str | None) -> Sharding:
        return Sharding(self.bindings[where].mesh, tuple((axis,) if axis else () for axis in spec))

    def value(
        self, where: int, shape: Sequence[int] = (8, 8), spec: Sequence[str | None] = (), dtype: str = "float32"
    ) -> int:
        aval = Aval(tuple(shape), dtype)
        sharding = self.sharding(where, *spec).of_rank(len(aval.shape))
        self.values.append(Value(len(self.values), aval, where, sharding))
        return len(self.values) - 1

    def argument(
        self,
        where: int,
        shape: Sequence[int] = (8, 8),
        spec: Sequence[str | None] = (),
        *,
        resident: bool = True,
        donated: bool = False,
        dtype: str = "float32",
    ) -> int:
        value = self.value(where, shape, spec, dtype)
        self.arguments.append(GraphArgument(value, resident, donated))
        return value

    def constant(self, where: int, array: Any) -> int:
        value = self.value(where, array.shape)
        self.constants.append((value, array))
        return value

    def node(
        self,
        where: int,
        inputs: Sequence[int],
        *,
        name: str = "node",
        shape: Sequence[int] = (8, 8),
        spec: Sequence[str | None] = (),
        outputs: int = 1,
        jaxpr: Any = None,
        donates: Sequence[int] = (),
        dtype: str = "float32",
        wants: dict[int, Sequence[str | None]] | None = None,
    ) -> Any:
        """A node; returns its output's number, or the list of them. `wants`: specs of inputs by position, where they
        are not the value's own (on its own slice) or replicated (elsewhere)."""
        in_shardings = []
        for position, index in enumerate(inputs):
            value = self.values[index]
            if wants and position in wants:
                sharding = self.sharding(where, *wants[position])
            elif value.slice == where:
                sharding = value.sharding
            else:
                sharding = self.sharding(where)
            in_shardings.append(sharding.of_rank(len(value.aval.shape)))
        written = [self.value(where, shape, spec, dtype) for _ in range(outputs)]
        self.nodes.append(
            Node(
                len(self.nodes),
                name,
                where,
                tuple(inputs),
                tuple(written),
                tuple(in_shardings),
                tuple(self.values[index].sharding for index in written),
                jaxpr,
                f"model.py:{len(self.nodes)} in step",
                donates=tuple(donates),
            )
        )
        return written[0] if outputs == 1 else written

    def graph(self, results: Sequence[int], name: str = "step") -> Graph:
        shapes = {index: SliceShape(index, binding.mesh, binding.platform) for index, binding in self.bindings.items()}
        return Graph(
            name,
            shapes,
            tuple(self.values),
            tuple(self.nodes),
            tuple(self.arguments),
            tuple(map(GraphResult, results)),
            tuple(self.constants),
            tuple(self.references),
        )


def pipeline(
    microbatches: int, stages: int = 2, shape: Sequence[int] = (8, 8), body: Any = None
) -> tuple[Graph, dict[int, BoundSlice]]:
    """Forward, then backward, for each microbatch in turn; at last one update a stage. One island for each stage.
    `body(inputs, outputs)` makes a node's jaxpr."""
    body = body or (lambda inputs, outputs: None)
    bindings = {stage: bound(stage, f"island{stage}", range(4)) for stage in range(stages)}
    builder = GraphBuilder(bindings)
    weights = [builder.argument(stage, shape, donated=True) for stage in range(stages)]
    gradients: list[list[int]] = [[] for _ in range(stages)]
    for batch in range(microbatches):
        x = builder.argument(0, shape)
        saved = []
        for stage in range(stages):
            saved.append(x)
            x = builder.node(stage, [weights[stage], x], name=f"forward{stage}.{batch}", shape=shape, jaxpr=body(2, 1))
        cotangent = x
        for stage in reversed(range(stages)):
            gradient, cotangent = builder.node(
                stage,
                [weights[stage], saved[stage], cotangent],
                name=f"backward{stage}.{batch}",
                shape=shape,
                outputs=2,
                jaxpr=body(3, 2),
            )
            gradients[stage].append(gradient)
    updated = [
        builder.node(
            stage,
            [weights[stage], *gradients[stage]],
            name=f"update{stage}",
            donates=[0],
            shape=shape,
            jaxpr=body(1 + microbatches, 1),
        )
        for stage in range(stages)
    ]
    return builder.graph(updated, "train"), bindings


@st.composite
def random_graphs(draw, body=None, most_nodes=14):
    """Any DAG over slices that share islands, devices or nothing, with results and donations anywhere. `body(shapes)`
    makes the jaxpr of a node with inputs of these shapes and two outputs of shape (8, 8)."""
    builder = GraphBuilder(
        {
            1: bound(1, "east", [0, 1, 2, 3], [("x", 2), ("y", 2)], devices_per_host=2),
            2: bound(2, "east", [4, 5], [("x", 2)], devices_per_host=2),
            3: bound(3, "west", [3, 1], [("x", 2)], devices_per_host=2),
            4: bound(4, "west", [1], [("x", 1)], devices_per_host=2),
            5: bound(5, "north", [0, 1], [("x", 2)], devices_per_host=1),
        }
    )
    slices, specs = st.integers(1, 5), st.sampled_from([[], ["x"], [None, "x"]])
    values = []
    for _ in range(draw(st.integers(1, 4))):
        large = draw(st.booleans())
        values.append(
            builder.argument(
                draw(slices),
                (256, 256) if large else (8, 8),
                draw(specs),
                resident=draw(st.booleans()),
                donated=draw(st.booleans()),
            )
        )
    for _ in range(draw(st.integers(0, most_nodes))):
        inputs = draw(st.lists(st.sampled_from(values), min_size=0, max_size=3))
        where = draw(slices)
        wants = {i: draw(specs) for i, v in enumerate(inputs) if builder.values[v].slice != where}
        donates = [i for i in range(len(inputs)) if draw(st.booleans())]
        jaxpr = body(tuple(builder.values[v].aval.shape for v in inputs)) if body else None
        made = builder.node(where, inputs, spec=draw(specs), outputs=2, donates=donates, wants=wants, jaxpr=jaxpr)
        values += made
    return builder.graph(draw(st.lists(st.sampled_from(values), max_size=4))), builder.bindings
