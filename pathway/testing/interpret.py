"""Runs a plan in one process: no scheduler, no executors, no sockets, but the same computations, gangs and pieces.

Good for finding out whether a wrong result comes from the program or from the cluster. The gangs that are ready are
started in an order drawn from a seed, so that an order on which the result wrongly depends is found, and found again.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import compiler, xla_bridge  # private, as is all below that compiles: checked on every supported version
from jax._src.interpreters import mlir, pxla
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import _jax
from jaxlib.lapack import _lapack
from jaxlib.mlir.dialects import stablehlo

from pathway.dataflow.computation import Computation
from pathway.dataflow.layout import Aval, Layout, Sharding, numpy_dtype
from pathway.dataflow.plan import Edge, Execute, Gang, Part, Plan, Send
from pathway.dataflow.reshard import edge_pieces

HostArray = np.ndarray[Any, Any]


def run_plan(
    plan: Plan,
    computations: Mapping[str, Computation],
    arguments: Sequence[Any],
    *,
    devices_per_host: Mapping[str, int],
    devices: Mapping[str, Sequence[jax.Device]] | None = None,
    seed: int = 0,
) -> list[HostArray]:
    """The results of one run, as host arrays.

    `computations` are by key. `arguments` are host arrays for `plan.arguments`: the program's flat ones, the graph's
    constants, the values of its references. All arrays, in and out, are physical (`Aval.physical`): typed PRNG keys as
    their words. `devices` says which local devices stand for an island's; by default every island gets the same ones,
    from the first on. `seed` draws the order of the gangs."""
    run = _Run(plan, computations, devices_per_host, devices or {})
    run.bring(arguments)
    run.start_all(random.Random(seed))
    return [
        np.asarray(arguments[result.argument]) if result.argument >= 0 else run.result(result.part, result.number)
        for result in plan.results
    ]


class _Run:
    def __init__(
        self,
        plan: Plan,
        computations: Mapping[str, Computation],
        devices_per_host: Mapping[str, int],
        devices: Mapping[str, Sequence[jax.Device]],
    ) -> None:
        self.plan, self.computations, self.devices_per_host = plan, computations, devices_per_host
        self.part_of = {part.island: part for part in plan.parts}
        self.devices = {island: devices.get(island) or jax.devices() for island in self.part_of}
        self.slots: dict[tuple[str, int], jax.Array] = {}
        self.edges = {edge.index: edge for part in plan.parts for edge in part.edges_out}
        self.arrived: set[int] = set()

    def bring(self, arguments: Sequence[Any]) -> None:
        for argument, value in zip(self.plan.arguments, arguments, strict=True):
            for number, position in argument.entries:
                part = self.plan.parts[number]
                slot = part.arguments[position]
                layout = part.slots[slot]
                dense = np.array(value, numpy_dtype(layout.aval.dtype)).reshape(layout.aval.shape)
                self.slots[part.island, slot] = self._placed(
                    part.island, layout, lambda region, dense=dense: dense[region]
                )

    def start_all(self, order: random.Random) -> None:
        waiting = {part.island: dict(enumerate(part.gangs)) for part in self.plan.parts}
        while any(waiting.values()):
            ready = [
                (island, number)
                for island, gangs in waiting.items()
                for number, gang in gangs.items()
                if self.arrived.issuperset(gang.waits) and not any(other in gangs for other in gang.after)
            ]
            if not ready:
                raise RuntimeError(
                    f"no gang can start: { ({island: list(gangs) for island, gangs in waiting.items()}) }"
                )
            island, number = order.choice(ready)
            self._start(self.part_of[island], waiting[island].pop(number))

    def result(self, part: int, number: int) -> HostArray:
        return np.asarray(self.slots[self.plan.parts[part].island, dict(self.plan.parts[part].results)[number]])

    def _start(self, part: Part, gang: Gang) -> None:
        for step in gang.steps:
            if isinstance(step, Send):
                self._carry(self.edges[step.edge])
            else:
                self._execute(part, step)
            for slot in step.frees:
                del self.slots[part.island, slot]

    def _execute(self, part: Part, step: Execute) -> None:
        devices = tuple(self.devices[part.island][device] for device in step.devices)
        program = _program(self.computations[step.computation], devices)
        inputs = [self.slots[part.island, slot] for slot in step.inputs]
        for slot, value in zip(step.outputs, program(inputs), strict=True):
            self.slots[part.island, slot] = value

    def _carry(self, edge: Edge) -> None:
        """An edge, piece by piece: what no piece brings stays wrong, so that a piece that is missing shows."""
        source = self.slots[edge.source_island, edge.source_slot]
        position = {device: number for number, device in enumerate(edge.source.devices)}
        local = [self.devices[edge.source_island][device] for device in edge.source.devices]
        held = {shard.device: np.asarray(shard.data) for shard in source.addressable_shards}
        built: dict[int, HostArray] = {
            device: np.full(edge.target.aval.shape, 111, numpy_dtype(edge.target.aval.dtype))
            for device in edge.target.devices
        }
        hosts = self.devices_per_host[edge.source_island], self.devices_per_host[edge.target_island]
        for piece in edge_pieces(edge, *hosts):
            number = position[piece.source]
            origin = edge.source.region(number)
            within = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(piece.region, origin, strict=True))
            data = held[local[number]][within]
            for device in piece.targets:
                built[device][tuple(slice(*interval) for interval in piece.region)] = data
        at = {device: number for number, device in enumerate(edge.target.devices)}
        shards = []
        for device, number in at.items():
            region = tuple(slice(*interval) for interval in edge.target.region(number))
            shards.append(jax.device_put(built[device][region], self.devices[edge.target_island][device]))
        self.slots[edge.target_island, edge.target_slot] = jax.make_array_from_single_device_arrays(
            edge.target.aval.shape, self._sharding(edge.target_island, edge.target), shards
        )
        self.arrived.add(edge.index)

    def _sharding(self, island: str, layout: Layout) -> NamedSharding:
        return _named_sharding(layout.sharding, [self.devices[island][device] for device in layout.devices])

    def _placed(self, island: str, layout: Layout, shard: Any) -> jax.Array:
        array: jax.Array = jax.make_array_from_callback(layout.aval.shape, self._sharding(island, layout), shard)
        return array


class _Program:
    """A computation, compiled from its artifact for given devices."""

    def __init__(self, computation: Computation, devices: Sequence[jax.Device]) -> None:
        metadata = computation.metadata
        _lapack.initialize()  # else a program that came as StableHLO crashes in its first eigh
        with mlir.make_ir_context() as context:
            module = stablehlo.deserialize_portable_artifact(context, computation.artifact)
        assignment = np.array([device.id for device in devices]).reshape(1, -1)
        options = compiler.get_compile_options(
            num_replicas=1, num_partitions=len(devices), device_assignment=assignment
        )
        options.executable_build_options.use_spmd_partitioning = True
        options.executable_build_options.use_shardy_partitioner = True
        client = xla_bridge.get_backend(metadata.platform)
        self.executable = client.compile_and_load(module, _jax.DeviceList(tuple(devices)), options)
        self.handlers = [
            pxla.global_aval_to_result_handler(_shaped(aval), _named_sharding(sharding, devices), True)
            for aval, sharding in zip(metadata.out_avals, metadata.out_shardings, strict=True)
        ]

    def __call__(self, inputs: list[jax.Array]) -> list[jax.Array]:
        results: list[jax.Array] = self.executable.execute_sharded(inputs).consume_with_handlers(self.handlers)
        return results


@functools.lru_cache(maxsize=256)
def _program(computation: Computation, devices: tuple[jax.Device, ...]) -> _Program:
    return _Program(computation, devices)


def _shaped(aval: Aval) -> jax.core.ShapedArray:
    return jax.core.ShapedArray(aval.shape, numpy_dtype(aval.dtype), weak_type=aval.weak_type)


def _named_sharding(sharding: Sharding, devices: Sequence[jax.Device]) -> NamedSharding:
    axes = sharding.mesh or (("device", 1),)
    mesh = Mesh(np.array(devices).reshape([size for _, size in axes]), [name for name, _ in axes])
    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in sharding.spec)))
