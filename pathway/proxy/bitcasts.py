"""The same bytes as elements of another type: a program of one instruction, which executors compile as any other."""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from pathway.content import content_key
from pathway.dataflow.layout import Aval, Layout, Sharding
from pathway.dataflow.xla_program import XlaProgram
from pathway.proxy import wire
from pathway.proxy.cluster import ClusterIsland, ClusterView
from pathway.proxy.runs import OneStepPlan, execution
from pathway.proxy.specs import SUB_BYTE_BITS
from pathway.proxy.status import invalid, unimplemented
from pathway.proxy.values import Buffer, Value, Values
from pathway.transport import messages as m

_encode = msgspec.msgpack.Encoder().encode

_NAME = re.compile(r"(int|uint|float|bfloat)(\d+)(?:_(\w+))?")
_LETTERS = {"int": "i", "uint": "ui", "float": "f", "bfloat": "bf"}

MAX_BITCASTS = 256
"""Plans of bitcasts that a session keeps."""


class Bitcasts:
    """Plans by what they make of what."""

    def __init__(self, cluster: ClusterView, values: Values) -> None:
        self._cluster = cluster
        self._values = values
        self._plans: dict[tuple[int, Layout, Layout], OneStepPlan] = {}

    def bitcast(self, value: Value, island: ClusterIsland, target: Layout) -> Value:
        """Returns at once. Raises INVALID_ARGUMENT where the bytes of each shard are not those of the other."""
        source = value.layout
        if island is not value.island or target.devices != source.devices or target.memory != source.memory:
            raise invalid("a bitcast leaves an array where it is")
        whole = self._values.whole(value)
        plan = self._plan(island, source, target)
        run, first = plan.start((Raw(_encode((whole.number,))),))
        return Value(island, Buffer(self._values.kind(island, target), first, run), target)

    def _plan(self, island: ClusterIsland, source: Layout, target: Layout) -> OneStepPlan:
        key = (island.number, source, target)
        plan = self._plans.get(key)
        if plan is None:
            devices = len(source.devices)
            artifact = bitcast_module(source.aval, source.sharding, target.aval, target.sharding).encode()
            metadata = _encode(XlaProgram(island.platform, _options(devices), 1, devices))
            computation = content_key(metadata, artifact)
            self._cluster.send(m.RegisterComputation(computation, metadata, artifact))
            if len(self._plans) >= MAX_BITCASTS:
                self._plans.pop(next(iter(self._plans))).release()
            plan = self._plans[key] = execution(
                self._cluster, island, "bitcast", computation, source.devices, [source], [target], ()
            )
        return plan


def bitcast_module(source: Aval, source_sharding: Sharding, target: Aval, target_sharding: Sharding) -> str:
    """The program as StableHLO's text. An element of another size makes the last dimension longer or shorter, or is a
    last dimension of its own, as for `jax.lax.bitcast_convert_type`."""
    wide, narrow = _bits(source.dtype), _bits(target.dtype)
    a, b = _tensor(source), _tensor(target)
    if wide == narrow and source.shape == target.shape:
        steps = [f"%1 = stablehlo.bitcast_convert %0 : ({a}) -> {b}"]
    else:
        large, small = (source, target) if wide >= narrow else (target, source)
        parts = max(wide, narrow) // min(wide, narrow)
        between = Aval((*large.shape, parts), small.dtype)
        merged = (*large.shape[:-1], large.shape[-1] * parts) if large.shape else None
        if small.shape not in (between.shape, merged):
            raise invalid(f"the elements of {source} are not those of {target}")
        c = _tensor(between)
        if wide >= narrow:
            steps = [f"%2 = stablehlo.bitcast_convert %0 : ({a}) -> {c}", f"%1 = stablehlo.reshape %2 : ({c}) -> {b}"]
        else:
            steps = [f"%2 = stablehlo.reshape %0 : ({a}) -> {c}", f"%1 = stablehlo.bitcast_convert %2 : ({c}) -> {b}"]
    body = "\n    ".join(steps)
    return f"""module @bitcast {{
  {_mesh("source", source_sharding)}
  {_mesh("target", target_sharding)}
  func.func public @main(%0: {a} {_spread("source", source_sharding)}) -> ({b} {_spread("target", target_sharding)}) {{
    {body}
    return %1 : {b}
  }}
}}
"""


def _bits(dtype: str) -> int:
    found = _NAME.fullmatch(dtype)
    if found is None:
        raise unimplemented(f"bitcasts of {dtype}")
    return SUB_BYTE_BITS.get(dtype) or int(found[2])


def _tensor(aval: Aval) -> str:
    found = _NAME.fullmatch(aval.dtype)
    assert found is not None
    element = f"{_LETTERS[found[1]]}{found[2]}{(found[3] or '').upper()}"
    return f"tensor<{''.join(f'{extent}x' for extent in aval.shape)}{element}>"


def _mesh(name: str, sharding: Sharding) -> str:
    axes = ", ".join(f'"{axis}"={size}' for axis, size in sharding.mesh)
    return f"sdy.mesh @{name} = <[{axes}]>"


def _spread(name: str, sharding: Sharding) -> str:
    dimensions = ", ".join("{" + ", ".join(f'"{axis}"' for axis in axes) + "}" for axes in sharding.spec)
    return f"{{sdy.sharding = #sdy.sharding<@{name}, [{dimensions}]>}}"


def _options(devices: int) -> bytes:
    options = wire.XlaCompileOptions().compile_options
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = 1, devices
    build.use_spmd_partitioning = build.use_shardy_partitioner = True
    serialized: bytes = options.SerializeToString()
    return serialized
