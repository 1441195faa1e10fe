"""From a node to a computation: a StableHLO portable artifact that any executor can compile, named by its content.

The client needs no device for this: `jax.export` lowers for an abstract mesh. Every input and output of the module gets
an explicit sharding; with constraints inside alone, the module would be for one device.

The artifact has no debug locations, and functions in it have no names of their own, so that two nodes that do the same
share one compile, whatever lines and functions they came from; which node failed, and at which line, the plan knows.
The key is a hash of its very bytes (`content`), which anybody can check without reading a module. (Rejected: a hash of
the module's text. Nobody but MLIR can check that, and its text is another with each version.)
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import jax.extend.core as jex
import msgspec
import numpy as np
from jax._src.interpreters import mlir  # private: the context that StableHLO is read in
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxlib import _jax  # private: the serializer that knows Shardy's dialect
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import stablehlo
from msgspec import Struct

from pathway.content import content_key
from pathway.dataflow.graph import Graph, Node
from pathway.dataflow.jaxprs import aval_of, every_equation, opened, struct_of
from pathway.dataflow.layout import Aval, Sharding
from pathway.dataflow.placed import mesh_without_devices
from pathway.errors import ProgramError

MeshAxes = tuple[tuple[str, int], ...]

CACHED_COMPUTATIONS = 4096
"""How many lowered nodes a process remembers."""


class ComputationMetadata(Struct, frozen=True, array_like=True, tag="computation"):
    """What an executor must know of a module to run it. Avals are physical; the inputs are exactly the module's
    parameters, in order. `donated` are positions in them."""

    platform: str
    mesh: MeshAxes
    in_avals: tuple[Aval, ...]
    in_shardings: tuple[Sharding, ...]
    out_avals: tuple[Aval, ...]
    out_shardings: tuple[Sharding, ...]
    donated: tuple[int, ...] = ()

    @property
    def num_devices(self) -> int:
        return Sharding(self.mesh).device_count


@dataclass(frozen=True)
class Computation:
    """A lowered node. `kept` are the positions of the node's inputs that the module takes: it has no parameter for one
    that it does not use."""

    key: str
    metadata: ComputationMetadata
    artifact: bytes
    kept: tuple[int, ...]

    @functools.cached_property
    def metadata_bytes(self) -> bytes:
        """The metadata as it travels (`RegisterComputation`)."""
        return msgspec.msgpack.encode(self.metadata)


def lower_graph(graph: Graph, donates: Mapping[int, tuple[int, ...]] | None = None) -> dict[int, Computation]:
    """Every node's computation, by node index. `donates`: what each node may really donate (`planner.donations`)."""
    return {
        node.index: lower(
            node,
            graph.slices[node.slice].mesh,
            graph.slices[node.slice].platform,
            node.donates if donates is None else donates.get(node.index, ()),
        )
        for node in graph.nodes
    }


def lower(node: Node, mesh: MeshAxes, platform: str, donates: tuple[int, ...] | None = None) -> Computation:
    """Lower one node for any slice with this mesh on this platform. `donates` overrides the node's own wish."""
    donates = node.donates if donates is None else donates
    request = (id(node.jaxpr), node.in_shardings, node.out_shardings, mesh, platform, donates)
    with _lock:
        known = _cache.get(request)
        if known is not None:
            _cache.move_to_end(request)
            return known[1]
    computation = _lower(node, mesh, platform, donates)
    with _lock:
        # The jaxpr is kept with its entry: as long as it lives, no other object has its id.
        _cache[request] = node.jaxpr, computation
        while len(_cache) > CACHED_COMPUTATIONS:
            _cache.popitem(last=False)
    return computation


_lock = threading.Lock()
_cache: OrderedDict[tuple[Any, ...], tuple[Any, Computation]] = OrderedDict()


def _lower(node: Node, mesh: MeshAxes, platform: str, donates: tuple[int, ...]) -> Computation:
    body, _ = opened(node.jaxpr)
    _refuse_side_effects(node, body)
    abstract_mesh = mesh_without_devices(mesh or (("device", 1),))
    flat = jex.jaxpr_as_fun(node.jaxpr)

    def function(*arguments: Any) -> tuple[Any, ...]:
        return tuple(flat(*arguments))

    function.__name__ = function.__qualname__ = node.name
    jitted = jax.jit(
        function,
        in_shardings=tuple(_named(abstract_mesh, sharding) for sharding in node.in_shardings),
        out_shardings=tuple(_named(abstract_mesh, sharding) for sharding in node.out_shardings),
        donate_argnums=donates,
    )
    # A custom call's stability concerns artifacts that are kept for later. Ours run now, on this very version.
    checks = [jax.export.DisabledSafetyCheck.custom_call("ALL")]
    export = jax.export.export(jitted, platforms=(platform,), disabled_checks=checks)
    try:
        with warnings.catch_warnings(), jax.enable_x64(_is_wide(node.jaxpr)):
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            exported = export(*map(struct_of, body.invars))
    except Exception as error:
        raise ProgramError(f"{node.name} cannot be lowered for {platform}, at {node.source}: {error}") from error

    kept = tuple(exported.module_kept_var_idx)
    in_avals = [aval_of(variable).physical for variable in body.invars]
    out_avals = [aval_of(variable).physical for variable in body.outvars]
    metadata = ComputationMetadata(
        platform=platform,
        mesh=mesh,
        in_avals=tuple(in_avals[position] for position in kept),
        in_shardings=tuple(_physical(node.in_shardings[position], in_avals[position]) for position in kept),
        out_avals=tuple(out_avals),
        out_shardings=tuple(map(_physical, node.out_shardings, out_avals)),
        donated=tuple(number for number, position in enumerate(kept) if position in donates),
    )
    artifact = _without_names(exported.mlir_module_serialized)
    return Computation(content_key(msgspec.msgpack.encode(metadata), artifact), metadata, artifact, kept)


def _without_names(artifact: bytes) -> bytes:
    """The artifact without debug locations, and with its functions, other than main, numbered."""
    with _ir_context() as context:
        module = stablehlo.deserialize_portable_artifact(context, artifact)
        operation = module.operation
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(operation)
        operation.attributes["sym_name"] = ir.StringAttr.get("computation")
        functions = [each for each in module.body.operations if each.operation.name == "func.func"]
        for prefix in (":", "function"):  # twice, so that no new name is one that another function still has
            for number, function in enumerate(functions):
                name = ir.StringAttr(function.attributes["sym_name"]).value
                if name != "main":
                    ir.SymbolTable.replace_all_symbol_uses(name, f"{prefix}{number}", operation)
                    function.attributes["sym_name"] = ir.StringAttr.get(f"{prefix}{number}")
        version = stablehlo.get_version_from_compatibility_requirement(
            stablehlo.StablehloCompatibilityRequirement.WEEK_4  # as jax.export has it
        )
        return bytes(_jax.mlir.serialize_portable_artifact(module, version, True))  # True: with Shardy's dialect


def _ir_context() -> Any:
    """One context serves for all reading on a thread: making one takes longer than reading a module."""
    context = getattr(_thread, "context", None)
    if context is None:
        context = _thread.context = mlir.make_ir_context()
    return context


_thread = threading.local()


def _named(mesh: AbstractMesh, sharding: Sharding) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in sharding.spec)))


def _physical(sharding: Sharding, aval: Aval) -> Sharding:
    return sharding.of_rank(len(aval.shape))


def _is_wide(jaxpr: Any) -> bool:
    """Whether it was traced in 64-bit mode and needs it again. Without 64-bit values it must not have it: Python
    scalars in the jaxpr would become wide."""
    body, _ = opened(jaxpr)
    atoms = [*body.invars, *body.constvars, *body.outvars]
    for equation in every_equation(jaxpr):
        atoms += equation.invars
        atoms += equation.outvars
    return any(getattr(atom.aval, "dtype", None) in _WIDE for atom in atoms)


_WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))


def _refuse_side_effects(node: Node, body: Any) -> None:
    for equation in every_equation(body):
        if "callback" in equation.primitive.name or equation.primitive.name == "debug_print":
            raise ProgramError(
                f"{node.name}, at {node.source}, calls back into Python ({equation.primitive.name}): a program runs on "
                "executors, which do not have the caller's Python"
            )
    effects = {str(effect) for equation in body.eqns for effect in equation.effects}
    if effects:
        raise ProgramError(f"{node.name}, at {node.source}, has side effects: {', '.join(sorted(effects))}")
