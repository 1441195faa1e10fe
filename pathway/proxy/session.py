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

import logging
from collections.abc import Callable, Iterable
from typing import Any

from pathway.proxy import wire
from pathway.proxy.array_requests import ArrayRequests
from pathway.proxy.cluster import ClusterView
from pathway.proxy.program_requests import ProgramRequests
from pathway.proxy.specs import default_layout, dtype_name
from pathway.proxy.status import Code, invalid, of_exception, unimplemented
from pathway.proxy.storage import Storage
from pathway.proxy.waiting import done

log = logging.getLogger(__name__)

Step = Callable[[Any, Any], None]
"""(request, response to fill): answered when it returns."""

SlowStep = Callable[[Any, Any, int, Any], None]
"""(request, its part of the response, op_id, the response): answered by itself, later."""


class Session(ArrayRequests, ProgramRequests):
    """See the module's docstring."""

    def __init__(
        self,
        cluster: ClusterView,
        number: int,
        platform_version: str,
        send: Callable[[bytes], None],
        storage: Storage | None = None,
    ) -> None:
        super().__init__(cluster, number, send, storage)
        self._platform_version = platform_version
        self._steps: dict[str, Step] = self._methods("_")
        self._slow_steps: dict[str, SlowStep] = self._methods("_begin_")

    def _methods(self, prefix: str) -> dict[str, Any]:
        """What is done for each request: the method of its name."""
        fields = wire.Request.DESCRIPTOR.oneofs_by_name["request"].fields
        found = {field.name: getattr(self, prefix + field.name.removesuffix("_request"), None) for field in fields}
        return {name: method for name, method in found.items() if method is not None}

    def handle(self, request: Any) -> None:
        """Take one request. Errors become its answer."""
        op_id = request.request_metadata.op_id
        name = request.WhichOneof("request")
        response = wire.Response()
        try:
            if name is None:
                raise invalid("a request without a kind")
            body = getattr(request, name)
            made = getattr(response, name.removesuffix("request") + "response")
            made.SetInParent()
            if (begin := self._slow_steps.get(name)) is not None:
                begin(body, made, op_id, response)
                return
            step = self._steps.get(name)
            if step is None:
                raise unimplemented(f"this server does not do {name.removesuffix('_request')}")
            step(body, made)
        except Exception as error:
            self._fail(op_id, name or "", request, error)
            return
        self.respond(op_id, response)

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
        self.host_buffers.close()
        self._cluster.close()

    # -- about the session -------------------------------------------------------------------------------------------

    def _init(self, body: Any, response: Any) -> None:
        self._cluster.describe(response, self.number, self._platform_version)

    def _begin_check_future(self, body: Any, made: Any, op_id: int, response: Any) -> None:
        self._when_done(op_id, self._statuses.pop(body.future_handle, done()), response)  # deletions are done by now

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
