"""One proxied session: the client's requests, one after another, and what its handles hold.

The session is an actor: `handle` takes one request at a time, in the thread that reads the stream; responses go to
`respond` from whichever thread has them, and may overtake one another. What would wait does so elsewhere: a compile on
executors, a value that is not ready. Only a host buffer that the client is still sending is waited for here, since
nothing behind it may overtake.

Invariants
  Q-1  Requests take effect in the order in which they came.
  Q-2  Each request is answered once. `seq_num` counts the answers.
  Q-3  A request that fails puts its error under every handle that the client named for its results; whatever uses such
       a handle fails with the same error.
  Q-4  Handles of the client's are below SERVER_HANDLES, and those made here are above it.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pathway.client.pending import Pending
from pathway.dataflow.layout import Aval, Layout
from pathway.proxy import wire
from pathway.proxy.cluster import ClusterIsland, ClusterView
from pathway.proxy.executables import Compilation, Executable, Program, report_of
from pathway.proxy.hostbuffers import HostBuffers
from pathway.proxy.runs import Moves
from pathway.proxy.specs import default_layout, dtype_name, host_array, laid_out, shape_of, spread_of
from pathway.proxy.status import Code, StatusError, invalid, of_exception, of_info, unimplemented
from pathway.proxy.values import Value, Values

log = logging.getLogger(__name__)

SERVER_HANDLES = 1 << 62
DONATE_INPUT = 3

Held = Value | StatusError
Later = object()
"""What a step returns when its answer comes by itself."""


class Session:
    """See the module's docstring. `send`: gives a serialized response to the stream, from any thread."""

    def __init__(self, cluster: ClusterView, number: int, platform_version: str, send: Callable[[bytes], None]) -> None:
        self.number = number
        self.host_buffers = HostBuffers()
        self._cluster = cluster
        self._platform_version = platform_version
        self._send = send
        self._sending = threading.Lock()
        self._next_seq = 0
        self._server_handles = itertools.count(SERVER_HANDLES)
        self._values = Values(cluster)
        self._moves = Moves(cluster, self._values)
        self._arrays: dict[int, Held] = {}
        self._executables: dict[int, Executable] = {}
        self._statuses: dict[int, Pending | StatusError] = {}
        self._closed = False
        self._steps: dict[str, Callable[[Any, Any], Any]] = {
            field.name: step
            for field in wire.Request.DESCRIPTOR.oneofs_by_name["request"].fields
            if (step := getattr(self, "_" + field.name.removesuffix("_request"), None)) is not None
        }

    # -- in and out --------------------------------------------------------------------------------------------------

    def handle(self, request: Any) -> None:
        """Take one request. Errors become its answer."""
        op_id = request.request_metadata.op_id
        name = request.WhichOneof("request")
        response = wire.Response()
        try:
            if name is None:
                raise invalid("a request without a kind")
            step = self._steps.get(name)
            if step is None:
                raise unimplemented(f"this server does not do {name.removesuffix('_request')}")
            body = getattr(request, name)
            made = getattr(response, name.removesuffix("request") + "response")
            made.SetInParent()
            if step(body, made) is Later:
                self._later(op_id, name, body, made, response)
                return
        except Exception as error:
            self._fail(op_id, name or "", request, error)
            return
        self.respond(op_id, response)

    def respond(self, op_id: int, response: Any) -> None:
        """Any thread."""
        metadata = response.response_metadata
        metadata.op_id = op_id
        metadata.status.SetInParent()
        with self._sending:
            metadata.seq_num = self._next_seq
            self._next_seq += 1
            self._send(response.SerializeToString())

    def refuse(self, op_id: int, error: StatusError) -> None:
        """Any thread."""
        response = wire.Response()
        response.response_metadata.op_id = op_id
        error.fill(response.response_metadata.status)
        with self._sending:
            response.response_metadata.seq_num = self._next_seq
            self._next_seq += 1
            self._send(response.SerializeToString())

    def _fail(self, op_id: int, name: str, request: Any, caught: Exception) -> None:
        error = of_exception(caught)
        if error.code is Code.INTERNAL:
            log.exception("request %s failed", name, exc_info=caught)
        if name:
            body = getattr(request, name)
            for handle in _named_results(name, body):
                self._arrays[handle] = error
            if name == "loaded_executable_execute_request" and body.result_status_handle:
                self._statuses[body.result_status_handle] = error
        self.refuse(op_id, error)

    def close(self) -> None:
        """The client has gone: everything of it is freed, everywhere."""
        self._closed = True
        self.host_buffers.close()
        self._cluster.close()

    # -- handles -----------------------------------------------------------------------------------------------------

    def _array(self, handle: int) -> Value:
        held = self._arrays.get(handle)
        if held is None:
            raise invalid(f"array handle {handle} is not known")
        if isinstance(held, StatusError):
            raise held
        return held

    def _keep(self, handle: int, value: Held) -> int:
        """Hold a value under the client's handle, or (0) one of ours."""
        if not handle:
            handle = next(self._server_handles)
        elif handle in self._arrays:
            if isinstance(value, Value):
                self._values.release(value)
            raise invalid(f"array handle {handle} is used already")
        self._arrays[handle] = value
        return handle

    def _keep_all(self, handles: Sequence[int], values: Sequence[Value]) -> list[int]:
        if handles and len(handles) != len(values):
            for value in values:
                self._values.release(value)
            raise invalid(f"{len(handles)} handles for {len(values)} arrays")
        return [self._keep(handle, value) for handle, value in zip(handles or [0] * len(values), values, strict=True)]

    def _executable(self, handle: int) -> Executable:
        found = self._executables.get(handle)
        if found is None:
            raise invalid(f"executable handle {handle} is not known")
        return found

    # -- the session -------------------------------------------------------------------------------------------------

    def _init(self, body: Any, response: Any) -> None:
        self._cluster.describe(response, self.number, self._platform_version)

    def _check_future(self, body: Any, response: Any) -> Any:
        if body.future_handle not in self._statuses:
            return None  # what it stood for is done when it is answered: a deletion
        return Later

    def _get_default_device_assignment(self, body: Any, response: Any) -> None:
        replicas, partitions = int(body.num_replicas), int(body.num_partitions)
        if not 0 < replicas * partitions <= len(self._cluster.island_of):
            raise invalid(f"there are not {replicas} x {partitions} devices")
        devices = self._cluster.default_devices(replicas * partitions)
        assignment = response.device_assignment
        assignment.replica_count, assignment.computation_count = replicas, partitions
        for partition in range(partitions):
            column = assignment.computation_devices.add()
            column.replica_device_ids.extend(devices[replica * partitions + partition] for replica in range(replicas))

    def _get_default_layout(self, body: Any, response: Any) -> None:
        response.serialized_pjrt_layout = default_layout(dtype_name(body.dtype), len(body.dims)).encode()

    # -- arrays from the host ----------------------------------------------------------------------------------------

    def _make_array_from_host_buffer(self, body: Any, response: Any) -> None:
        shape = shape_of(body.shape)
        dtype = dtype_name(body.dtype)
        data = self.host_buffers.take(body.host_buffer_handle)
        strides = body.byte_strides.strides if body.HasField("byte_strides") else None
        island, layout = self._values.layout(dtype, shape, spread_of(body.sharding, shape))
        value = self._values.put(island, layout, host_array(data, dtype, shape, strides))
        response.array_handle = self._keep(body.array_handle, value)

    def _make_arrays_from_host_buffer_shards(self, body: Any, response: Any) -> None:
        made = [self._array_of_shards(spec) for spec in body.specs]
        response.array_handles.extend(self._keep_all(body.array_handles, made))

    def _array_of_shards(self, spec: Any) -> Value:
        shape = shape_of(spec.array_spec.shape)
        dtype = dtype_name(spec.array_spec.dtype)
        island, layout = self._values.layout(dtype, shape, spread_of(spec.array_spec.sharding, shape))
        if len(spec.host_buffers) != len(spec.addressable_shard_indices):
            raise invalid("as many host buffers as groups of shards are needed")
        count = len(layout.devices)
        pieces: dict[Any, np.ndarray[Any, Any]] = {}
        for indices, buffer in zip(spec.addressable_shard_indices, spec.host_buffers, strict=True):
            data = self.host_buffers.take(buffer.host_buffer_handle)
            strides = buffer.byte_strides.strides if buffer.HasField("byte_strides") else None
            piece = host_array(data, dtype_name(buffer.dtype), shape_of(buffer.shape), strides)
            for index in indices.indices:
                if not 0 <= index < count:
                    raise invalid(f"shard {index} of an array of {count} shards")
                region = layout.region(index)
                if piece.shape != tuple(stop - start for start, stop in region):
                    raise invalid(f"a host buffer of shape {piece.shape} for a shard of {region}")
                pieces[region] = piece
        missing = {layout.region(index) for index in range(count)} - pieces.keys()
        if missing:
            raise invalid(f"no host buffer for the shard {next(iter(missing))}")
        if len(pieces) == 1:
            whole = next(iter(pieces.values()))
        else:
            whole = np.empty(shape, next(iter(pieces.values())).dtype)
            for region, piece in pieces.items():
                whole[tuple(slice(start, stop) for start, stop in region)] = piece
            whole.flags.writeable = False
        return self._values.put(island, layout, whole)

    def _make_error_arrays(self, body: Any, response: Any) -> None:
        try:
            code = Code(body.error.code)
        except ValueError:
            code = Code.UNKNOWN
        error = StatusError(code, body.error.message)
        handles = list(body.array_handles) or [0] * len(body.array_specs)
        response.array_handles.extend(self._keep(handle, error) for handle in handles)

    # -- arrays to the host ------------------------------------------------------------------------------------------

    def _copy_to_host_buffer(self, body: Any, response: Any) -> Any:
        return Later

    def _check_value_ready(self, body: Any, response: Any) -> Any:
        return Later

    # -- arrays of arrays --------------------------------------------------------------------------------------------

    def _disassemble_into_single_device_arrays(self, body: Any, response: Any) -> None:
        shards = self._values.shards(self._array(body.array_handle))
        response.array_handles.extend(self._keep_all(body.result_handles, shards))

    def _fully_replicated_shard(self, body: Any, response: Any) -> None:
        value = self._array(body.array_handle)
        response.array_handle = self._keep(
            body.result_handle,
            self._values.shards(value)[0] if len(value.devices) == 1 else self._values.shard(value, 0),
        )

    def _assemble_array_from_single_device_arrays(self, body: Any, response: Any) -> None:
        shards = [self._array(handle) for handle in body.single_device_array_handles]
        shape = shape_of(body.shape)
        spread = spread_of(body.sharding, shape)
        dtype = dtype_name(body.dtype) if body.HasField("dtype") else ""
        dtype = shards[0].aval.dtype if shards else dtype
        island, layout = self._values.layout(dtype, shape, spread)
        if len(shards) != len(layout.devices):
            raise invalid(f"{len(shards)} arrays for {len(layout.devices)} devices")
        for position, shard in enumerate(shards):
            wanted = Aval(tuple(stop - start for start, stop in layout.region(position)), dtype)
            if shard.aval != wanted or len(shard.layout.devices) != 1:
                raise invalid(f"shard {position} is {shard.aval}, and should be {wanted}")
        sources = [self._values.source(shard) for shard in shards]
        value = self._values.assembled(island, layout, sources)
        self._given(body.copy_semantics, body.single_device_array_handles)
        response.array_handle = self._keep(body.result_handle, value)

    def _remap_arrays(self, body: Any, response: Any) -> None:
        arrays = [self._array(handle) for handle in body.array_handles]
        made = []
        sources: dict[int, dict[int, Any]] = {}
        for mapping in body.plan.mappings:
            if not 0 <= mapping.in_array < len(arrays):
                raise invalid(f"array {mapping.in_array} of {len(arrays)}")
            array = arrays[mapping.in_array]
            for taken, into in _intervals(mapping):
                if taken and not 0 <= min(taken) <= max(taken) < len(array.layout.devices):
                    raise invalid(f"the shards {taken} of an array of {len(array.layout.devices)} shards")
                for shard, place in zip(taken, into, strict=True):
                    sources.setdefault(mapping.out_array, {})[place] = self._values.source(array, shard)
        for number, spec in enumerate(body.plan.output_specs):
            shape = shape_of(spec.shape)
            island, layout = self._values.layout(dtype_name(spec.dtype), shape, spread_of(spec.sharding, shape))
            places = sources.get(number, {})
            if sorted(places) != list(range(len(layout.devices))):
                raise invalid(f"the shards {sorted(places)} are mapped, of {len(layout.devices)}")
            made.append(self._values.assembled(island, layout, [places[i] for i in range(len(places))]))
        response.array_handles.extend(self._keep_all(body.result_handles, made))
        self._given(body.copy_semantics, body.array_handles)

    # -- arrays elsewhere --------------------------------------------------------------------------------------------

    def _copy_arrays(self, body: Any, response: Any) -> None:
        arrays = [self._array(handle) for handle in body.array_handles]
        made = []
        for array in arrays:
            devices = tuple(body.device_ids) or array.devices
            island, indices = self._cluster.locate(devices, "a copy")
            memory = array.layout.memory
            if body.HasField("memory_kind"):
                memory = "" if body.memory_kind == island.memories[0] else body.memory_kind
            if memory and memory not in island.memories:
                raise invalid(f"devices of {island.name} have no memory of kind {memory}")
            if len(indices) != len(array.layout.devices):
                raise invalid(f"an array on {len(array.layout.devices)} devices cannot be copied to {len(indices)}")
            layout = Layout(array.aval, array.layout.sharding, indices, memory)
            made.append(self._moved(array, island, layout))
        response.array_handles.extend(self._keep_all(body.result_handles, made))
        self._given(body.copy_semantics, body.array_handles)

    def _reshard_arrays(self, body: Any, response: Any) -> None:
        arrays = [self._array(handle) for handle in body.array_handles]
        if len(arrays) != len(body.array_specs):
            raise invalid(f"{len(body.array_specs)} specs for {len(arrays)} arrays")
        made = []
        for array, spec in zip(arrays, body.array_specs, strict=True):
            shape = shape_of(spec.shape)
            if shape != array.aval.shape or dtype_name(spec.dtype) != array.aval.dtype:
                raise invalid(f"an array of {array.aval} cannot become one of {dtype_name(spec.dtype)}{list(shape)}")
            island, layout = self._values.layout(array.aval.dtype, shape, spread_of(spec.sharding, shape))
            made.append(self._moved(array, island, layout))
        response.array_handles.extend(self._keep_all(body.result_handles, made))
        self._given(body.copy_semantics, body.array_handles)

    def _moved(self, array: Value, island: ClusterIsland, layout: Layout) -> Value:
        return self._moves.move(array, island, layout)

    def _given(self, semantics: int, handles: Iterable[int]) -> None:
        """The client has given these away."""
        if semantics == DONATE_INPUT:
            for handle in handles:
                self._delete(handle)

    # -- their end ---------------------------------------------------------------------------------------------------

    def _delete(self, handle: int) -> None:
        held = self._arrays.get(handle)
        if isinstance(held, Value):
            self._values.release(held)
            self._arrays[handle] = invalid("the array has been deleted or donated")

    def _delete_array(self, body: Any, response: Any) -> None:
        for handle in body.array_handle:
            if handle not in self._arrays:
                raise invalid(f"array handle {handle} is not known")
            self._delete(handle)
        response.deletion_future_handle = next(self._server_handles)

    def _is_array_deleted(self, body: Any, response: Any) -> None:
        held = self._arrays.get(body.array_handle)
        if held is None:
            raise invalid(f"array handle {body.array_handle} is not known")
        response.deleted = held.buffer.deleted if isinstance(held, Value) else "deleted" in held.message

    def _destruct_array(self, body: Any, response: Any) -> None:
        for handle in body.array_handle:
            held = self._arrays.pop(handle, None)
            if isinstance(held, Value):
                self._values.release(held)

    # -- programs ----------------------------------------------------------------------------------------------------

    def _compile(self, body: Any, response: Any) -> Any:
        return Later

    def _loaded_executable_metadata(self, body: Any, response: Any) -> None:
        self._executable(body.loaded_executable_handle).describe(response)

    def _loaded_executable_cost_analysis(self, body: Any, response: Any) -> Any:
        self._executable(body.loaded_executable_handle)
        return Later

    def _loaded_executable_human_readable_program_text(self, body: Any, response: Any) -> Any:
        self._executable(body.loaded_executable_handle)
        return Later

    def _loaded_executable_execute(self, body: Any, response: Any) -> None:
        executable = self._executable(body.loaded_executable_handle)
        arguments = [self._array(handle) for handle in body.args_handles]
        options = body.execute_options
        results = executable.execute(arguments, frozenset(options.non_donatable_input_indices))
        run = results[0].buffer.run if results else None
        handles = self._keep_all(body.result_array_handle, results)
        if not body.result_array_handle:
            for number, handle in enumerate(handles):
                output = response.outputs.add()
                output.array_handle = handle
                executable.describe_output(number, output)
        status = body.result_status_handle
        if status or options.fill_status:
            status = status or next(self._server_handles)
            self._statuses[status] = run if run is not None else _done()
            response.status_handle = status

    def _loaded_executable_fetch_execute_result(self, body: Any, response: Any) -> Any:
        if body.result_status_handle not in self._statuses:
            raise invalid(f"status handle {body.result_status_handle} is not known")
        return Later

    def _loaded_executable_destruct(self, body: Any, response: Any) -> None:
        found = self._executables.pop(body.loaded_executable_handle, None)
        if found is not None:
            found.release()

    def _loaded_executable_delete(self, body: Any, response: Any) -> None:
        self._executable(body.loaded_executable_handle).release()
        response.future_handle = next(self._server_handles)

    def _loaded_executable_is_deleted(self, body: Any, response: Any) -> None:
        response.is_deleted = body.loaded_executable_handle not in self._executables

    # -- what is answered later --------------------------------------------------------------------------------------

    def _later(self, op_id: int, name: str, body: Any, made: Any, response: Any) -> None:
        """Begin what has its answer later."""
        match name:
            case "copy_to_host_buffer_request":
                self._fetch(op_id, body, response)
            case "check_value_ready_request":
                self._when_ready(op_id, [self._array(handle) for handle in body.value_handles], response)
            case "compile_request":
                self._begin_compile(op_id, body, made, response)
            case "loaded_executable_cost_analysis_request":
                self._ask(op_id, body, "cost", made, response)
            case "loaded_executable_human_readable_program_text_request":
                self._ask(op_id, body, "text", made, response)
            case "check_future_request":
                self._when_done(op_id, self._statuses.pop(body.future_handle), response)
            case _:
                self._when_done(op_id, self._statuses.pop(body.result_status_handle), response)

    def _fetch(self, op_id: int, body: Any, response: Any) -> None:
        handle = body.host_buffer_handle
        strides = tuple(body.byte_strides.strides) if body.HasField("byte_strides") else None
        fetch = self._values.fetch(self._array(body.array_handle))

        def came() -> None:
            try:
                if fetch.error is not None:
                    raise of_info(fetch.error)
                self.host_buffers.store(handle, laid_out(fetch.value, strides))
            except Exception as error:
                self.refuse(op_id, of_exception(error))
            else:
                self.respond(op_id, response)

        fetch.add_waiter(_once(came))

    def _when_ready(self, op_id: int, values: Sequence[Value], response: Any) -> None:
        waits = [run for value in values if (run := value.buffer.run) is not None]
        self._when_all(op_id, waits, response)

    def _when_done(self, op_id: int, status: Pending | StatusError, response: Any) -> None:
        if isinstance(status, StatusError):
            self.refuse(op_id, status)
        else:
            self._when_all(op_id, [status], response)

    def _when_all(self, op_id: int, waits: Sequence[Pending], response: Any) -> None:
        open_ = [run for run in waits if not run.done]

        def finish() -> None:
            error = next((run.error for run in waits if run.error is not None), None)
            if error is not None:
                self.refuse(op_id, of_info(error))
            else:
                self.respond(op_id, response)

        if not open_:
            finish()
            return
        left = len(open_)
        lock = threading.Lock()

        def one_ended() -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                finish()

        for run in open_:
            run.add_waiter(_once(one_ended))

    def _begin_compile(self, op_id: int, body: Any, made: Any, response: Any) -> None:
        if body.host_callbacks:
            raise unimplemented("host callbacks: the client of this jaxlib cannot serve them (docs/proxy.md)")
        program = Program(self._cluster, body.program, body.compile_options)
        handle = next(self._server_handles)

        def answered(answer: Any, error: StatusError | None) -> None:
            if error is not None:
                self.refuse(op_id, error)
                return
            report = report_of(answer)
            self._executables[handle] = Executable(self._cluster, self._values, self._moves, program, report)
            made.loaded_executable_handle = handle
            made.name = report.name
            made.num_devices = len(program.device_ids)
            made.device_ids.extend(program.device_ids)
            made.addressable_device_ids.extend(program.device_ids)
            made.fingerprint_value = report.fingerprint
            self.respond(op_id, response)

        Compilation(self._cluster, program).ask("report", answered, every_host=True)

    def _ask(self, op_id: int, body: Any, what: str, made: Any, response: Any) -> None:
        executable = self._executable(body.loaded_executable_handle)

        def answered(answer: Any, error: StatusError | None) -> None:
            if error is not None:
                error.fill(made.status)
            elif what == "text":
                made.human_readable_program_text = answer.decode()
            else:
                made.attributes.SetInParent()
                for name, value in executable.costs(answer).items():
                    made.attributes.attributes[name].float_value = value
            self.respond(op_id, response)

        executable.compilation.ask(what, answered)


def _once(function: Callable[[], None]) -> Callable[[], None]:
    """A waiter may be called twice (see `Pending`)."""
    lock = threading.Lock()

    def call() -> None:
        if lock.acquire(blocking=False):
            function()

    return call


def _done() -> Pending:
    pending = Pending()
    pending.resolve()
    return pending


def _intervals(mapping: Any) -> Iterator[tuple[range, range]]:
    """The intervals of a mapping: shards that are taken, and the places where they go."""
    parts = (
        mapping.from_start, mapping.from_end, mapping.from_step, mapping.to_start, mapping.to_end, mapping.to_step,
    )  # fmt: skip
    if len(set(map(len, parts))) != 1:
        raise invalid("a mapping whose lists are not of one length")
    for start, end, step, to_start, to_end, to_step in zip(*parts, strict=True):
        if step < 1 or to_step < 1:
            raise invalid("a mapping that does not go forward")
        taken, into = range(start, end, step), range(to_start, to_end, to_step)
        if len(taken) != len(into):
            raise invalid(f"{len(taken)} shards for {len(into)} places")
        yield taken, into


def _named_results(name: str, body: Any) -> Iterable[int]:
    """The handles under which a request's results were to be (Q-3)."""
    match name:
        case "make_array_from_host_buffer_request":
            handles = [body.array_handle]
        case "make_arrays_from_host_buffer_shards_request" | "make_error_arrays_request":
            handles = list(body.array_handles)
        case "assemble_array_from_single_device_arrays_request" | "fully_replicated_shard_request":
            handles = [body.result_handle]
        case (
            "remap_arrays_request"
            | "bitcast_arrays_request"
            | "reshard_arrays_request"
            | "disassemble_into_single_device_arrays_request"
            | "copy_arrays_request"
        ):
            handles = list(body.result_handles)
        case "loaded_executable_execute_request":
            handles = list(body.result_array_handle)
        case _:
            handles = []
    return [handle for handle in handles if handle]
