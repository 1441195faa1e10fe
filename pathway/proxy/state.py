"""What the requests of a session share: its handles, and how it answers. See `session` for the rules."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pathway.client.pending import Pending
from pathway.proxy import wire
from pathway.proxy.bitcasts import Bitcasts
from pathway.proxy.cluster import ClusterView
from pathway.proxy.executables import Executable
from pathway.proxy.hostbuffers import HostBuffers
from pathway.proxy.plugins import PluginExecutable
from pathway.proxy.runs import Moves
from pathway.proxy.status import StatusError, invalid, of_info
from pathway.proxy.storage import Storage
from pathway.proxy.values import Value, Values
from pathway.proxy.waiting import all_of, once

SERVER_HANDLES = 1 << 62

Held = Value | StatusError


class SessionState:
    """One session's handles and answers. `send` gives a serialized response to the stream, from any thread."""

    def __init__(
        self, cluster: ClusterView, number: int, send: Callable[[bytes], None], storage: Storage | None = None
    ) -> None:
        self.number = number
        self.host_buffers = HostBuffers()
        self._cluster = cluster
        self._storage = storage or Storage("")
        self._send = send
        self._sending = threading.Lock()
        self._next_seq = 0
        self._server_handles = itertools.count(SERVER_HANDLES)
        self._values = Values(cluster)
        self._moves = Moves(cluster, self._values)
        self._bitcasts = Bitcasts(cluster, self._values)
        self._arrays: dict[int, Held] = {}
        self._executables: dict[int, Executable | PluginExecutable] = {}
        self._statuses: dict[int, Pending | StatusError] = {}

    # -- answers -----------------------------------------------------------------------------------------------------

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

    def _when_done(self, op_id: int, status: Pending | StatusError, response: Any) -> None:
        if isinstance(status, StatusError):
            self.refuse(op_id, status)
        else:
            self._when_all(op_id, [status], response)

    def _when_all(self, op_id: int, waits: Sequence[Pending], response: Any) -> None:
        together = all_of(waits)

        def ended() -> None:
            if together.error is not None:
                self.refuse(op_id, of_info(together.error))
            else:
                self.respond(op_id, response)

        together.add_waiter(once(ended))

    # -- handles -----------------------------------------------------------------------------------------------------

    def _array(self, handle: int) -> Value:
        held = self._arrays.get(handle)
        if held is None:
            raise invalid(f"array handle {handle} is not known")
        if isinstance(held, StatusError):
            raise held.with_traceback(None)  # it is raised for each use, and would remember them all
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

    def _executable(self, handle: int) -> Executable | PluginExecutable:
        found = self._executables.get(handle)
        if found is None:
            raise invalid(f"executable handle {handle} is not known")
        return found
