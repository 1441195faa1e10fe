"""Runs of a proxied session: plans of one step, registered once and run for each call.

An execution is a plan of one computation; a copy between devices is a plan of one edge. Both are ordinary plans of the
runtime: gang-scheduled, with credits and fair shares, like any other client's.

Invariants
  U-1  A plan belongs to one incarnation of its islands. When an island has come back, it is registered again under
       another number.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from pathway.client.bindings import Binding, Run
from pathway.dataflow.layout import Layout
from pathway.dataflow.plan import Edge, Execute, Gang, Part, Send
from pathway.proxy.cluster import ClusterIsland, ClusterView
from pathway.proxy.status import of_info
from pathway.proxy.values import Buffer, Value, Values
from pathway.transport import messages as m

_encode = msgspec.msgpack.Encoder().encode

MAX_MOVES = 1024
"""Plans of copies that a session keeps."""


class OneStepPlan:
    """Parts, and under which number they are registered."""

    __slots__ = ("_bindings", "_cluster", "_islands", "_number", "_parts", "name", "results")

    def __init__(
        self, cluster: ClusterView, name: str, parts: Sequence[tuple[ClusterIsland, Part]], results: int
    ) -> None:
        self._cluster = cluster
        self.name = name
        self.results = results
        self._islands = tuple(island for island, _ in parts)
        self._parts = tuple(part for _, part in parts)
        self._bindings: tuple[Binding, ...] = ()
        self._number = 0

    def start(self, arguments: tuple[Raw, ...]) -> tuple[Run, int]:
        """Run it. Returns at once: the run, and the number of its first result. Raises DATA_LOSS where an island is."""
        cluster = self._cluster
        core = cluster.core
        bindings = tuple(island.binding() for island in self._islands)
        if bindings != self._bindings:
            self._register(bindings)
        while (room := core.room()) is not None:
            room.wait()
        with core.lock:
            if core.lost is not None:
                raise of_info(core.lost)
            run, first = core.new_run(self._number, time.monotonic(), self.results)
            if not run.done:
                releases = core.take_releases() if core.released or core.released_plans else []
                cluster.connection.send([*releases, m.StartRun(run.number, self._number, first, arguments)])
        return run, first

    def _register(self, bindings: tuple[Binding, ...]) -> None:
        self.release()
        core = self._cluster.core
        payloads = []
        for binding, part in zip(bindings, self._parts, strict=True):
            keys = {step.computation: None for gang in part.gangs for step in gang.steps if isinstance(step, Execute)}
            payloads.append(m.PartPayload(binding.bound.island, binding.bound.incarnation, tuple(keys), _encode(part)))
        with core.lock:
            self._number = core.new_plan()
        self._cluster.send(m.RegisterPlan(self._number, self.name, tuple(payloads)))
        self._bindings = bindings

    def release(self) -> None:
        """It is not needed any more."""
        if self._number:
            self._cluster.core.released_plans.append(self._number)
            self._number, self._bindings = 0, ()


def execution(
    cluster: ClusterView, island: ClusterIsland, name: str, key: str, devices: tuple[int, ...],
    inputs: Sequence[Layout], outputs: Sequence[Layout], donates: Sequence[int],
) -> OneStepPlan:  # fmt: skip
    """The plan that runs a computation once."""
    count, results = len(inputs), len(outputs)
    slots = tuple(range(count))
    step = Execute(0, key, devices, slots, tuple(range(count, count + results)), tuple(donates), slots)
    part = Part(
        plan_name=name,
        island=island.name,
        platform=island.platform,
        slots=(*inputs, *outputs),
        arguments=slots,
        results=tuple((number, count + number) for number in range(results)),
        gangs=(Gang((step,), arguments=slots),),
        names=(name,),
        sources=("",),
        slices=(island.slice.number,),
    )
    return OneStepPlan(cluster, name, ((island, part),), results)


class Moves:
    """Copies of arrays to other devices, of the same island or of another, and into other shardings."""

    def __init__(self, cluster: ClusterView, values: Values) -> None:
        self._cluster = cluster
        self._values = values
        self._plans: dict[tuple[int, int, Layout, Layout], OneStepPlan] = {}

    def move(self, value: Value, island: ClusterIsland, layout: Layout) -> Value:
        """The same elements, there. Returns at once."""
        source = self._values.whole(value)
        plan = self._plan(value.island, source.kind.layout, island, layout)
        kind = self._values.kind(island, layout)
        own = Raw(_encode((source.number,)))
        arguments = (own,) if island is value.island else (own, Raw(_encode(())))
        run, first = plan.start(arguments)
        return Value(island, Buffer(kind, first, run), layout)

    def _plan(self, from_: ClusterIsland, source: Layout, to: ClusterIsland, target: Layout) -> OneStepPlan:
        key = (from_.number, to.number, source, target)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MAX_MOVES:
                self._plans.pop(next(iter(self._plans))).release()
            plan = self._plans[key] = _one_edge(self._cluster, from_, source, to, target)
        return plan


def _one_edge(
    cluster: ClusterView, from_: ClusterIsland, source: Layout, to: ClusterIsland, target: Layout
) -> OneStepPlan:
    name = "copy"
    same = from_ is to
    edge = Edge(0, from_.name, to.name, 0, 1 if same else 0, source, target)
    send = Gang((Send(0, 0, frees=(0,)),), arguments=(0,))

    def part(island: ClusterIsland, **what: Any) -> tuple[ClusterIsland, Part]:
        return island, Part(plan_name=name, island=island.name, platform=island.platform, **what)

    if same:
        both = part(
            from_, slots=(source, target), arguments=(0,), results=((0, 1),), gangs=(send,),
            edges_in=(edge,), edges_out=(edge,),
        )  # fmt: skip
        return OneStepPlan(cluster, name, (both,), 1)
    out = part(from_, slots=(source,), arguments=(0,), results=(), gangs=(send,), edges_out=(edge,))
    into = part(to, slots=(target,), arguments=(), results=((0, 0),), gangs=(), edges_in=(edge,))
    return OneStepPlan(cluster, name, (out, into), 1)
