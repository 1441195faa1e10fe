"""A program on its way to the cluster, as `jax.stages`: traced, lowered, compiled. For looking into it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from pathway.array import Array
from pathway.client.hostvalues import aval_of
from pathway.client.plans import BoundPlan
from pathway.dataflow import trace as dataflow_trace
from pathway.dataflow.cost import cost_estimate
from pathway.dataflow.graph import Graph
from pathway.dataflow.plan import Plan
from pathway.errors import ProgramError

if TYPE_CHECKING:
    from pathway.client.build import LoweredPlan
    from pathway.client.scripts import LoweredScript
    from pathway.dataflow.script import Script


class Traced:
    """A program traced for some arguments."""

    def __init__(
        self,
        traced: dataflow_trace.Traced,
        leaves: Sequence[Any],
        donated: Collection[int],
        fuse: bool,
        schedule: Any,
    ) -> None:
        self._traced = traced
        self._leaves = list(leaves)
        self._donated = donated
        self._fuse = fuse
        self._schedule = schedule

    @property
    def jaxpr(self) -> Any:
        """The closed jaxpr: stages are `jit` equations."""
        return self._traced.jaxpr

    @property
    def out_avals(self) -> tuple[Any, ...]:
        """Shapes and dtypes of the flat results."""
        return self._traced.out_avals

    def lower(self) -> Lowered | LoweredControl:
        """Placed, fused, scheduled, every computation lowered to StableHLO, for the slices as they are bound now."""
        from pathway.client.bodies import is_controlled, lower_script
        from pathway.client.build import lower_plan  # it brings jax.export, which a fully cached program never needs

        if is_controlled(self._traced):
            script = lower_script(
                self._traced, self._leaves, donated=self._donated, fused=self._fuse, schedule=self._schedule
            )
            return LoweredControl(script, self._leaves)
        plan = lower_plan(self._traced, self._leaves, donated=self._donated, fused=self._fuse, schedule=self._schedule)
        return Lowered(plan, self._leaves)


class Lowered:
    """A program lowered onto its slices. Nothing has been sent yet."""

    def __init__(self, lowered: LoweredPlan, leaves: Sequence[Any]) -> None:
        self._lowered = lowered
        self._leaves = leaves

    @property
    def graph(self) -> Graph:
        """One node per computation, whatever the number of devices."""
        return self._lowered.graph

    @property
    def plan(self) -> Plan:
        """For each island an ordered list of gangs of steps."""
        return self._lowered.plan

    def as_text(self) -> str:
        """The graph for people: every node, where it is and why, and every transfer."""
        from pathway.dataflow.text import as_text

        return as_text(self.graph)

    def draw(self) -> str:
        """The graph by island, as SVG."""
        from pathway.dataflow.draw import draw_graph

        return draw_graph(self.graph, self._lowered.bound_slices, self.plan, title=self.plan.name)

    def stablehlo(self) -> dict[str, bytes]:
        """The StableHLO portable artifact of every computation, by node name."""
        computations = self._lowered.computations
        return {node.name: computations[node.index].artifact for node in self.graph.nodes if node.index in computations}

    def bind(self, leaves: Sequence[Any]) -> BoundPlan:
        """Register it with the scheduler for calls with arguments like `leaves`; does not wait."""
        from pathway.client.build import bind_plan

        return bind_plan(self._lowered, leaves)

    def compile(self) -> Compiled:
        """Send it to its islands, which compile it. Does not wait for them: a compile error raises where a result is
        first needed."""
        return Compiled(self, self._leaves)


class LoweredControl:
    """A program that data control, lowered onto its slices: a plan for each stretch between decisions, and the script
    that says which follows which. Nothing has been sent yet."""

    def __init__(self, lowered: LoweredScript, leaves: Sequence[Any]) -> None:
        self._lowered = lowered
        self._leaves = leaves

    @property
    def graphs(self) -> list[Graph]:
        """The graph of each plan."""
        return [plan.graph for plan in self._lowered.plans]

    @property
    def plans(self) -> list[Plan]:
        """For each plan, by island, an ordered list of gangs of steps."""
        return [plan.plan for plan in self._lowered.plans]

    @property
    def script(self) -> Script:
        """Which plan runs when; here its plans are numbered as in `plans`."""
        return self._lowered.script

    def as_text(self) -> str:
        """The script and the graphs for people."""
        from pathway.dataflow.script import as_text as script_text
        from pathway.dataflow.text import as_text

        graphs = [f"plan {number}\n{as_text(graph)}" for number, graph in enumerate(self.graphs)]
        return "\n\n".join([script_text(self.script), *graphs])

    def draw(self) -> list[str]:
        """The graph of each plan by island, as SVG."""
        from pathway.dataflow.draw import draw_graph

        return [
            draw_graph(plan.graph, plan.bound_slices, plan.plan, title=f"{plan.plan.name}, plan {number}")
            for number, plan in enumerate(self._lowered.plans)
        ]

    def bind(self, leaves: Sequence[Any]) -> BoundPlan:
        """Register it with the scheduler for calls with arguments like `leaves`; does not wait."""
        from pathway.client.scripts import bind_script

        return bind_script(self._lowered)

    def compile(self) -> Compiled:
        """As `Lowered.compile`."""
        return Compiled(self, self._leaves)


@dataclass(frozen=True)
class IslandMemory:
    """What a run needs on the fullest device of an island, in bytes: arrays of the program alive at the same time, and
    what its computations need beside them."""

    peak_bytes: int
    peak_bytes_by_device: Mapping[int, int]


@dataclass(frozen=True)
class CostAnalysis:
    """Estimates made before the program ran."""

    seconds_by_node: Mapping[str, float]
    transfer_bytes: int


class Compiled:
    """A program that its islands compile, or have compiled. Call it with arguments like those it was traced for."""

    def __init__(self, lowered: Lowered | LoweredControl, leaves: Sequence[Any]) -> None:
        self._lowered = lowered._lowered
        self._leaves = leaves
        self._bind = lowered.bind
        self._bound: BoundPlan | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = self._lowered.traced.flatten(args, kwargs)
        for leaf, before, aval in zip(leaves, self._leaves, self._lowered.traced.in_avals, strict=True):
            self._check_argument(leaf, before, aval)
        if self._bound is None:
            self._bound = self._bind(leaves)
        return self._bound.start(leaves)

    def _check_argument(self, leaf: Any, before: Any, aval: Any) -> None:
        """The plan is for arguments that are where they were when it was lowered."""
        if isinstance(before, Array):
            fits = isinstance(leaf, Array) and leaf._kind is before._kind
        else:
            fits = not isinstance(leaf, Array) and aval_of(leaf) == aval
        if not fits:
            raise ProgramError(
                f"{self._lowered.traced.name} was compiled for {before!r} as an argument, and called with {leaf!r}"
            )

    def memory_analysis(self) -> dict[str, IslandMemory]:
        """By island, what a run must find room for: the plan's liveness and XLA's own temporaries; of several plans,
        that of the largest. Waits until the islands have compiled them; raises what went wrong there."""
        from pathway.dataflow.memory import peak_bytes

        bound = self._bound = self._bound or self._bind(self._leaves)
        peaks: dict[str, IslandMemory] = {}
        for lowered, number in zip(self._lowered.plans, bound.plan_numbers, strict=True):
            temp_bytes = lowered.client._temp_bytes(number)
            for island, by_device in peak_bytes(lowered.plan, temp_bytes).items():
                found = IslandMemory(max(by_device.values(), default=0), by_device)
                if island not in peaks or found.peak_bytes > peaks[island].peak_bytes:
                    peaks[island] = found
        return peaks

    def cost_analysis(self) -> CostAnalysis:
        """Estimated seconds of each node, and the bytes that move between devices of different slices."""
        seconds = {
            node.name: cost_estimate(node, lowered.graph.slices[node.slice].mesh)
            for lowered in self._lowered.plans
            for node in lowered.graph.nodes
        }
        return CostAnalysis(seconds, sum(lowered.plan.cost_bytes for lowered in self._lowered.plans))

    @property
    def in_tree(self) -> jax.tree_util.PyTreeDef:
        """The structure of its arguments that are not static."""
        return self._lowered.traced.in_tree
