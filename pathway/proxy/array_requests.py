"""Requests about arrays: made from host buffers, of one another, moved, brought back, and freed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from pathway.dataflow.layout import Aval, Layout
from pathway.proxy.specs import dtype_name, host_array, laid_out, shape_of, spread_of
from pathway.proxy.state import SessionState
from pathway.proxy.status import Code, StatusError, invalid, of_exception, of_info
from pathway.proxy.values import Value
from pathway.proxy.waiting import once

DONATE_INPUT = 3


class ArrayRequests(SessionState):
    """Methods by the names of the requests; `session` calls them."""

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
            made.append(self._moves.move(array, island, layout))
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
            made.append(self._moves.move(array, island, layout))
        response.array_handles.extend(self._keep_all(body.result_handles, made))
        self._given(body.copy_semantics, body.array_handles)

    def _bitcast_arrays(self, body: Any, response: Any) -> None:
        arrays = [self._array(handle) for handle in body.array_handles]
        if len(arrays) != len(body.array_specs):
            raise invalid(f"{len(body.array_specs)} specs for {len(arrays)} arrays")
        made = []
        for array, spec in zip(arrays, body.array_specs, strict=True):
            shape = shape_of(spec.shape)
            island, layout = self._values.layout(dtype_name(spec.dtype), shape, spread_of(spec.sharding, shape))
            made.append(self._bitcasts.bitcast(array, island, layout))
        response.array_handles.extend(self._keep_all(body.result_handles, made))
        self._given(body.copy_semantics, body.array_handles)

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

    # -- to the host -------------------------------------------------------------------------------------------------

    def _begin_copy_to_host_buffer(self, body: Any, made: Any, op_id: int, response: Any) -> None:
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

        fetch.add_waiter(once(came))

    def _begin_check_value_ready(self, body: Any, made: Any, op_id: int, response: Any) -> None:
        values = [self._array(handle) for handle in body.value_handles]
        waits = [run for value in values if (run := value.buffer.run) is not None]
        self._when_all(op_id, waits, response)


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
