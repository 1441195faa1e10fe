"""All that the executor asks of XLA. Every private name of JAX that it needs is in this file, with a test for each.

Arrays are physical (`Aval.physical`), so nothing here knows of PRNG keys or float0. Devices are island indices,
host-major; JAX's own ids are sparse on islands of several processes and never computed with (design, section 14).

What was found out by experiment, and is relied on:
  X-1  Each launch gives a token, at the price of 0.2 us. It carries the launch's own error, holds no memory, and stays
       valid when the outputs are donated. `is_ready()` of an array is True for one that holds an error.
  X-2  A launch takes 4 to 5 us through `execute_sharded` with result handlers, as much as `jax.jit` itself.
  X-3  A donated buffer that a numpy view refers to is copied by XLA, never overwritten. A view taken through a shard's
       own object is forgotten with it; one taken of the array itself would be cached there and cost every later
       donation a copy.
  X-4  Computations that XLA finds cheap, and those on one device which it runs at once, end within the launch, and
       their errors are raised by it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.backend
import jaxlib
import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir, pxla
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import _profiler
from jaxlib._jax import CompileOptions, DeviceAssignment, DeviceList
from jaxlib.lapack import _lapack
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from pathway.dataflow.computation import ComputationMetadata
from pathway.dataflow.layout import Aval, Layout, Region, Sharding, numpy_dtype, shard_regions
from pathway.dataflow.xla_program import ProgramReport, XlaProgram
from pathway.errors import CompileError, DeletedError, DeviceMemoryError, ErrorInfo, ExecutionError, PathwayError
from pathway.executor.compile_cache import CompileCache, entry_name, machine_features
from pathway.executor.programs import Signature, answer, dtype_of_element, report

Array = jax.Array
HostArray = np.ndarray[Any, Any]
Launch = Callable[[Sequence[Array], list[Any]], list[Array]]

_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"

PINNED = "pinned_host"
"""The kind of memory that belongs to the host, and that devices reach by themselves."""

QUICK_VIEW_BYTES = 4096
"""Replicated arrays up to this size are viewed as they are, several times quicker than through a shard. The view stays
with the array, so a later donation copies it (X-3), which at this size costs nothing."""


class Compiled:
    """A computation on devices. `launch(arguments, tokens)` starts it, appends its token, and returns its outputs.
    `answer` answers questions about it where it came as an XLA program (see `programs`). `temp_bytes`: what it needs on
    each device beside its arguments and outputs."""

    __slots__ = ("answer", "devices", "launch", "metadata", "temp_bytes")

    def __init__(
        self,
        metadata: ComputationMetadata | XlaProgram,
        devices: tuple[int, ...],
        launch: Launch,
        answer: Callable[[str], bytes] | None = None,
        temp_bytes: int = 0,
    ) -> None:
        self.temp_bytes = temp_bytes
        self.metadata = metadata
        self.devices = devices
        self.launch = launch
        self.answer = answer


class Profile:
    """A profile of this process that is being taken, from now on. Raises where another one is."""

    def __init__(self) -> None:
        self._session = _profiler.ProfilerSession()

    def stop(self) -> bytes:
        """What was seen: an XSpace, serialized."""
        seen: bytes = self._session.stop()
        return seen


class Backend:
    """This process's XLA client, as host `host_index` of its island. There is one per process: it configures JAX."""

    def __init__(
        self,
        platform: str,
        devices: int,
        hosts: int = 1,
        host_index: int = 0,
        coordinator: str = "",
        cache: CompileCache | None = None,
    ) -> None:
        jax.config.update("jax_platforms", platform)
        jax.config.update("jax_enable_x64", True)  # nothing is traced here, and no dtype may be narrowed
        jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is ours
        if platform == "cpu" and jax.config.jax_num_cpu_devices != devices:
            jax.config.update("jax_num_cpu_devices", devices)
        if hosts > 1:
            if platform == "cpu":
                jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(coordinator, hosts, host_index)
        self._client = jax.extend.backend.get_backend(platform)
        _lapack.initialize()  # eigh and friends, in modules that came as StableHLO, crash the process otherwise
        self.devices = tuple(sorted(jax.devices(platform), key=lambda device: (device.process_index, device.id)))
        if len(self.devices) != hosts * devices:
            raise ExecutionError(f"{len(self.devices)} {platform} devices were found, not {hosts} hosts x {devices}")
        self.local = range(host_index * devices, (host_index + 1) * devices)
        self.device_kind: str = self.devices[self.local[0]].device_kind
        self.has_host_memory = platform == "cpu"  # so that a view costs nothing
        self.memory_bytes = _memory_bytes([self.devices[index] for index in self.local])
        kinds = {memory.kind for memory in self.devices[self.local[0]].addressable_memories()}
        self._has_pinned_memory = PINNED in kinds
        self._cache = cache
        self._runtime = (
            jax.__version__,
            jaxlib.__version__,
            platform,
            self.device_kind,
            str(self._client.platform_version),
            machine_features() if platform == "cpu" else "",
            os.environ.get("XLA_FLAGS", ""),
            f"{hosts}x{devices}",
        )
        self._shardings: dict[tuple[Sharding, tuple[int, ...], str], NamedSharding] = {}

    # -- computations ------------------------------------------------------------------------------------------------

    def compile(self, key: str, metadata: ComputationMetadata, artifact: bytes, devices: tuple[int, ...]) -> Compiled:
        """Compile, or load from the disk cache. Any thread. Raises `CompileError` with XLA's message."""
        options = compiler.get_compile_options(
            num_replicas=1, num_partitions=len(devices), device_assignment=self._assignment(devices, 1)
        )
        options.executable_build_options.use_spmd_partitioning = True
        options.executable_build_options.use_shardy_partitioner = True
        executable = self._executable(key, artifact, devices, options, 1)
        outputs = zip(metadata.out_avals, metadata.out_shardings, ("",) * len(metadata.out_avals), strict=True)
        launch = self._launch(executable, devices, outputs)
        return Compiled(metadata, devices, launch, temp_bytes=_temp_bytes(executable))

    def compile_program(self, key: str, program: XlaProgram, artifact: bytes, devices: tuple[int, ...]) -> Compiled:
        """The same, of a program that comes with XLA's own options."""
        if len(devices) != program.replicas * program.partitions:
            raise CompileError(
                f"INVALID_ARGUMENT: the program is for {program.replicas} x {program.partitions} devices, "
                f"and not for {len(devices)}"
            )
        try:
            name, signature = _read_module(artifact)
            options = CompileOptions.ParseFromString(program.options)
            build = options.executable_build_options
            build.num_replicas, build.num_partitions = program.replicas, program.partitions
            build.device_assignment = DeviceAssignment.create(self._assignment(devices, program.replicas))
        except PathwayError:
            raise
        except Exception as error:
            raise CompileError(f"INVALID_ARGUMENT: XLA cannot read it: {error}") from error
        executable = self._executable(key, artifact, devices, options, program.replicas)
        made: ProgramReport = report(name, signature, program, executable)
        kinds = made.output_memory_kinds or ("",) * len(made.out_avals)
        outputs = zip(made.out_avals, made.out_shardings, kinds, strict=True)
        launch = self._launch(executable, devices, outputs)
        answered = partial(answer, made=made, executable=executable)
        return Compiled(program, devices, launch, answered, _temp_bytes(executable))

    def _launch(
        self, executable: Any, devices: tuple[int, ...], outputs: Iterable[tuple[Aval, Sharding, str]]
    ) -> Launch:
        execute = executable.execute_sharded
        handlers = [
            pxla.global_aval_to_result_handler(
                jax.core.ShapedArray(aval.shape, numpy_dtype(aval.dtype)), self._named(sharding, devices, memory), True
            )
            for aval, sharding, memory in outputs
        ]

        def launch(arguments: Sequence[Array], tokens: list[Any]) -> list[Array]:
            results = execute(arguments, True)
            tokens.append(results.consume_token())
            return results.consume_with_handlers(handlers)  # type: ignore[no-any-return]

        return launch

    def _assignment(self, devices: tuple[int, ...], replicas: int) -> np.ndarray[Any, Any]:
        return np.array([self.devices[index].id for index in devices]).reshape(replicas, -1)

    def _executable(self, key: str, artifact: bytes, devices: tuple[int, ...], options: Any, replicas: int) -> Any:
        try:
            return self._compiled_or_cached(key, artifact, devices, options, replicas)
        except Exception as error:
            if _OUT_OF_MEMORY in str(error):
                raise DeviceMemoryError(str(error)) from error
            raise CompileError(f"XLA cannot compile it: {error}") from error

    def _compiled_or_cached(
        self, key: str, artifact: bytes, devices: tuple[int, ...], options: Any, replicas: int
    ) -> Any:
        assignment = self._assignment(devices, replicas)
        device_list = DeviceList(tuple(self.devices[index] for index in devices))
        cache = self._cache
        name = entry_name(key, repr(assignment.tolist()), *self._runtime) if cache is not None else ""
        stored = cache.get(name) if cache is not None else None
        if cache is not None and stored is not None:
            try:
                return self._client.deserialize_executable(stored, device_list, options)
            except Exception:  # of another XLA after all: compile it
                cache.drop(name)
        context = mlir.make_ir_context()
        with context:
            module = stablehlo.deserialize_portable_artifact(context, artifact)
        executable = self._client.compile_and_load(module, device_list, options)
        if cache is not None:
            try:
                content = executable.serialize()
            except Exception:  # not every backend can
                return executable
            cache.put(name, content)
        return executable

    # -- arrays ------------------------------------------------------------------------------------------------------

    def _named(self, sharding: Sharding, devices: tuple[int, ...], memory: str = "") -> NamedSharding:
        known = self._shardings.get((sharding, devices, memory))
        if known is None:
            axes = sharding.mesh or (("device", 1),)
            grid = np.array([self.devices[index] for index in devices]).reshape([size for _, size in axes])
            mesh = Mesh(grid, [name for name, _ in axes])
            spec = PartitionSpec(*(names or None for names in sharding.spec))
            known = NamedSharding(mesh, spec, memory_kind=memory or None)
            self._shardings[sharding, devices, memory] = known
        return known

    def holds(self, layout: Layout) -> bool:
        """Whether a device of this host has a shard of it."""
        local = self.local
        return any(device in local for device in layout.devices)

    def array(self, layout: Layout, shards: Mapping[int, HostArray | Array]) -> Array:
        """The array whose shards on this host's devices are `shards`, by island index. The data is not copied where
        that can be avoided, so it must never change; it is kept alive."""
        aval = layout.aval
        local = [device for device in layout.devices if device in self.local]
        return pxla.batched_device_put(  # type: ignore[no-any-return]
            jax.core.ShapedArray(aval.shape, numpy_dtype(aval.dtype)),
            self._named(layout.sharding, layout.devices, layout.memory),
            [shards[device] for device in local],
            [self.devices[device] for device in local],
        )

    def assemble(self, layout: Layout, sources: Mapping[int, tuple[Array, Layout]]) -> Array:
        """The array whose shard on each of this host's devices is the one that another array has there. No copy."""
        local = [device for device in layout.devices if device in self.local]
        shards = []
        for device in local:
            array, where = sources[device]
            held = [index for index in where.devices if index in self.local]
            shards.append(array.addressable_data(held.index(device)))
        return jax.make_array_from_single_device_arrays(  # type: ignore[no-any-return]
            layout.aval.shape,
            self._named(layout.sharding, layout.devices, layout.memory),
            shards,
            dtype=numpy_dtype(layout.aval.dtype),
        )

    def array_of_bytes(self, layout: Layout, data: bytes | memoryview) -> Array:
        """The array of which `data` is the whole: dense, in C order."""
        aval = layout.aval
        whole = np.frombuffer(data, numpy_dtype(aval.dtype)).reshape(aval.shape)
        if len(layout.devices) == 1:
            return self.array(layout, {layout.devices[0]: whole})
        regions = shard_regions(aval.shape, layout.sharding)
        parts: dict[Region, HostArray] = {}
        shards = {}
        for device, region in zip(layout.devices, regions, strict=True):
            if device in self.local:
                if region not in parts:
                    parts[region] = dense(whole[tuple(slice(*bounds) for bounds in region)])
                shards[device] = parts[region]
        return self.array(layout, shards)

    def view(self, array: Array, layout: Layout, device: int) -> HostArray:
        """What the shard on `device`, one of this host's, holds: without a copy where the device has the host's memory.
        Waits for it. Raises what the computation of it raised."""
        if array.nbytes <= QUICK_VIEW_BYTES and layout.sharding.is_replicated:
            return np.asarray(array, order="C")
        return np.asarray(self._on_host(self.shard(array, layout, device)), order="C")

    def shard(self, array: Array, layout: Layout, device: int) -> Array:
        """The shard on `device`, one of this host's, as an array of its own (X-3)."""
        local = [index for index in layout.devices if index in self.local]
        return array.addressable_data(local.index(device))

    @staticmethod
    def part_of_shard(shard: Array, within: tuple[slice, ...]) -> Array:
        """A part of a shard on the same device: always a copy, which outlives a donation of the shard. Returns at
        once."""
        whole = all(part == slice(0, size) for part, size in zip(within, shard.shape, strict=True))
        return shard.copy() if whole else shard[within]

    def _on_host(self, shard: Array) -> Array:
        """The shard, on its way to memory from which numpy can take it: pinned, where the platform has such, for it is
        what devices copy to without a detour."""
        if self.has_host_memory:
            return shard
        if self._has_pinned_memory:
            return jax.device_put(shard, shard.sharding.with_memory_kind(PINNED))  # type: ignore[no-any-return]
        shard.copy_to_host_async()
        return shard


def _memory_bytes(devices: Sequence[jax.Device]) -> int:
    """What the fullest of these devices has for programs, as it says itself; 0 where it says nothing."""
    free = []
    for device in devices:
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit", 0)
        if limit:
            free.append(max(0, int(limit) - int(stats.get("bytes_in_use", 0))))
    return min(free, default=0)


def _temp_bytes(executable: Any) -> int:
    """What a computation needs on each device beside arguments and outputs, as XLA says; 0 where it does not."""
    try:
        return int(executable.get_compiled_memory_stats().temp_size_in_bytes)
    except Exception:  # not every backend can tell
        return 0


def _read_module(artifact: bytes) -> tuple[str, Signature]:
    """The name of a module, and the types of its main function."""
    context = mlir.make_ir_context()
    with context:
        module = stablehlo.deserialize_portable_artifact(context, artifact)
        attributes = module.operation.attributes
        name = ir.StringAttr(attributes["sym_name"]).value if "sym_name" in attributes else "main"
        for operation in module.body.operations:
            if (
                operation.operation.name == "func.func"
                and ir.StringAttr(operation.attributes["sym_name"]).value == "main"
            ):
                kind = ir.FunctionType(ir.TypeAttr(operation.attributes["function_type"]).value)
                described = (
                    ir.ArrayAttr(operation.attributes["arg_attrs"]) if "arg_attrs" in operation.attributes else ()
                )
                donated = [
                    number
                    for number, attribute in enumerate(described)
                    if "tf.aliasing_output" in (each := ir.DictAttr(attribute)) or "jax.buffer_donor" in each
                ]
                return name, Signature([*map(_aval, kind.inputs)], [*map(_aval, kind.results)], donated)
    raise CompileError("INVALID_ARGUMENT: the module has no function main")


def _aval(kind: Any) -> Aval:
    try:
        tensor = ir.RankedTensorType(kind)
    except ValueError:
        raise CompileError(f"UNIMPLEMENTED: the program takes or gives a {kind}") from None
    return Aval(tuple(tensor.shape), dtype_of_element(str(tensor.element_type)))


def as_shard(piece: HostArray | Array) -> HostArray | Array:
    """What a device's shard can be made of: an array that is on a device as it is, and other elements dense."""
    return piece if isinstance(piece, jax.Array) else dense(piece)


def dense(view: HostArray) -> HostArray:
    """The same elements next to one another, in C order: the same memory where they already are."""
    return np.asarray(view, order="C")


def integer(array: Array) -> int:
    """The value of a computed integer without dimensions, which each of its devices has."""
    return int(np.asarray(array))


def copy_on_device(array: Array) -> Array:
    """A copy that lives on when `array` is donated. Returns at once."""
    return array.copy()


def wait_for(token: Any) -> None:
    """Wait for a launch to end, without the interpreter's lock. Raises the launch's error."""
    token.block_until_ready()


def is_ready(arrays: Sequence[Array]) -> bool:
    """Whether all are computed, as values or as errors. A donated one says nothing any more: False."""
    for array in arrays:  # noqa: SIM110 (a generator costs more than this loop)
        if array.is_deleted() or not array.is_ready():  # type: ignore[attr-defined]
            return False
    return True


def error_kind(error: BaseException) -> type[PathwayError]:
    """What an exception of XLA is to a user."""
    if isinstance(error, PathwayError):
        return type(error)
    message = str(error)
    if _OUT_OF_MEMORY in message or isinstance(error, MemoryError):
        return DeviceMemoryError
    if "has been deleted" in message or "donated" in message:
        return DeletedError
    return ExecutionError


def describe_failure(error: BaseException, **where: Any) -> ErrorInfo:
    """An exception of XLA as data, with where it happened."""
    if isinstance(error, PathwayError) and error.info is not None:
        return error.info
    kind = error_kind(error)
    return ErrorInfo(
        kind.__name__, str(error), original=f"{type(error).__module__}.{type(error).__qualname__}", **where
    )
