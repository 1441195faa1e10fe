"""Plugin programs, of which Google's client library makes two kinds: arrays are written to and read from storage, and
executors are profiled. They travel as JSON (facts: pathwaysutils 0.1.13, `persistence.helper` and `profiling`).
"""

from __future__ import annotations

import base64
import binascii
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pathway.client.pending import Pending
from pathway.dataflow.layout import Aval, Layout, numpy_dtype
from pathway.proxy import wire
from pathway.proxy.cluster import ClusterIsland, ClusterView
from pathway.proxy.specs import default_layout, dtype_kind, fill_layout, op_sharding
from pathway.proxy.status import info_of, invalid, of_exception, of_info, unimplemented
from pathway.proxy.storage import Storage
from pathway.proxy.values import Value, Values
from pathway.transport import messages as m

PREFIX = b"__serialized_plugin_program "

_ELEMENTS = {
    "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    **{f"S{bits}": f"int{bits}" for bits in (8, 16, 32, 64)}, **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}  # fmt: skip

Results = tuple[list[Value], Pending]
"""What a program gives, and what ends when it has."""


class PluginExecutable:
    """A plugin program, as the session's other executables are (`executables.Executable`). `devices`: those of its
    arguments (the client gives it nothing on others, and waits for no program that has none)."""

    devices: tuple[int, ...] = (0,)

    outputs: tuple[Aval, ...] = ()

    def execute(self, arguments: Sequence[Value], kept: frozenset[int]) -> Results:
        raise NotImplementedError

    def describe(self, response: Any) -> None:
        """Fill a LoadedExecutableMetadataResponse: any parameters, and results as they always are."""
        response.parameter_layouts_list.SetInParent()
        response.output_layouts_list.SetInParent()
        for aval in self.outputs:
            fill_layout(default_layout(aval.dtype, len(aval.shape)), response.output_layouts_list.layouts.add())
        response.output_memory_kinds.status.SetInParent()
        response.donated_input_indices.SetInParent()

    def describe_output(self, number: int, output: Any) -> None:
        """Fill an Output of the response to an execution."""
        raise NotImplementedError

    def release(self) -> None:
        """The client does not need it any more."""


def plugin_executable(program: bytes, cluster: ClusterView, values: Values, storage: Storage) -> PluginExecutable:
    """What runs a plugin program. Raises INVALID_ARGUMENT or UNIMPLEMENTED."""
    try:
        kinds = json.loads(program.removeprefix(PREFIX))
        [(kind, body)] = kinds.items()
        match kind:
            case "bulk_persistence_write_request":
                return ArrayWriter([Place(each) for each in body["write_requests"]], values, storage)
            case "persistenceWriteRequest":
                return ArrayWriter([Place(body)], values, storage)
            case "bulk_persistence_read_request":
                return ArrayReader([Place(each) for each in body["read_requests"]], values, storage)
            case "persistenceReadRequest":
                return ArrayReader([Place(body)], values, storage)
            case "profileRequest":
                return Profiler(body, cluster, values, storage)
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise invalid(f"Bad PluginProgram: {type(error).__name__}: {error}") from None
    raise unimplemented(f"Bad PluginProgram: nothing here does {kind}")


class Place:
    """Where an array is kept, and how it is spread over devices."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.location = base64.b64decode(request["b64_location"], validate=True).decode()
        self.name = base64.b64decode(request["b64_name"], validate=True).decode()
        self.devices = tuple(map(int, request["devices"]["device_ids"]))
        self.op = wire.OpSharding.FromString(base64.b64decode(request["b64_hlo_sharding_string"], validate=True))
        shape = request["shape"]
        self.dtype = ""
        if isinstance(shape, dict):
            self.dtype = _ELEMENTS[shape["xla_primitive_type_str"]]
            shape = shape["dimensions"]
        self.shape = tuple(map(int, shape))


class ArrayWriter(PluginExecutable):
    """Writes its arguments, one after another. What they hold is theirs until it is written, whatever becomes of the
    client's handles."""

    def __init__(self, places: Sequence[Place], values: Values, storage: Storage) -> None:
        self._places = places
        self._values = values
        self._storage = storage
        self.devices = places[0].devices if places else (0,)

    def execute(self, arguments: Sequence[Value], kept: frozenset[int]) -> Results:
        if len(arguments) != len(self._places):
            raise invalid(f"{len(arguments)} arrays for {len(self._places)} places")
        for place in self._places:
            self._storage.path(place.location)
        held = [self._values.pinned(argument) for argument in arguments]

        def write() -> None:
            left = list(held)
            try:
                for place in self._places:
                    fetch = self._values.fetch(left[0])
                    fetch.wait()
                    if fetch.error is not None:
                        raise of_info(fetch.error)
                    self._storage.write_array(place.location, place.name, fetch.value)
                    self._values.unpin(left.pop(0))
            finally:
                for value in left:
                    self._values.unpin(value)

        return [], _in_thread(write)


class ArrayReader(PluginExecutable):
    """Reads arrays onto devices."""

    def __init__(self, places: Sequence[Place], values: Values, storage: Storage) -> None:
        self._places = places
        self.outputs = tuple(Aval(place.shape, place.dtype) for place in places)
        self._values = values
        self._storage = storage

    def execute(self, arguments: Sequence[Value], kept: frozenset[int]) -> Results:
        made: list[Value] = []
        try:
            for place in self._places:
                island, devices = self._values.locate(place.devices)
                sharding = op_sharding(place.op, len(place.shape), len(devices))
                layout = Layout(Aval(place.shape, place.dtype), sharding, devices)
                dtype = numpy_dtype(place.dtype)
                array = self._storage.read_array(place.location, place.name, dtype, place.shape)
                made.append(self._values.put(island, layout, array))
        except BaseException:
            for value in made:
                self._values.release(value)
            raise
        ended = Pending()
        ended.resolve()
        return made, ended

    def describe_output(self, number: int, output: Any) -> None:
        place = self._places[number]
        _describe(output, place.dtype, place.shape, place.devices, place.op)


class Profiler(PluginExecutable):
    """Profiles executors between its first execution and its second. The profiles are written as XProf and TensorBoard
    read them, a file for each host: LOCATION/plugins/profile/SESSION/HOST.xplane.pb."""

    def __init__(self, request: dict[str, Any], cluster: ClusterView, values: Values, storage: Storage) -> None:
        options = request.get("xprofTraceOptions", {})
        if "xprofTraceOptions" in request:  # then the client expects a result, and looks at none of it
            self.outputs = (Aval((1,), "bool"),)
        self._session = str(options.get("traceSessionName") or "")
        if self._session != self._session.replace("/", "") or self._session in (".", ".."):
            raise invalid(f"a profile cannot be called {self._session!r}")
        self._max_hosts = max(1, int(request.get("maxNumHosts") or 1))
        self._folder = storage.path(str(request["traceLocation"]))
        self._storage = storage
        self._cluster = cluster
        self._values = values
        self._profiled: list[tuple[str, str]] = []  # (host's name, address)

    def execute(self, arguments: Sequence[Value], kept: frozenset[int]) -> Results:
        ended = _in_thread(self._stop if self._profiled else self._start(self._hosts()))
        results = []
        if self.outputs:
            results.append(self._values.put(*self._result(), np.zeros(1, np.bool_)))
        return results, ended

    def describe_output(self, number: int, output: Any) -> None:
        _describe(output, "bool", (1,), (0,), wire.OpSharding())

    def _result(self) -> tuple[ClusterIsland, Layout]:
        island, devices = self._values.locate((0,))
        return island, Layout(Aval((1,), "bool"), op_sharding(wire.OpSharding(), 1, 1), devices)

    def _hosts(self) -> list[tuple[str, str]]:
        found = []
        for island in self._cluster.islands:
            addresses = self._cluster.host_addresses(island)
            found += [(f"{island.name}-{number}", address) for number, address in enumerate(addresses)]
        return found[: self._max_hosts]

    def _start(self, hosts: list[tuple[str, str]]) -> Callable[[], None]:
        self._profiled = hosts

        def start() -> None:
            try:
                self._ask(hosts, True)
            except BaseException:
                self._profiled = []
                raise

        return start

    def _stop(self) -> None:
        hosts, self._profiled = self._profiled, []
        profiles = self._ask(hosts, False)
        session = self._session or time.strftime("%Y_%m_%d_%H_%M_%S")
        folder = self._folder / "plugins" / "profile" / session
        folder.mkdir(parents=True, exist_ok=True)
        for (name, _), profile in zip(hosts, profiles, strict=True):
            self._storage.write(folder / f"{name}.xplane.pb", lambda file, profile=profile: file.write(profile))

    def _ask(self, hosts: list[tuple[str, str]], start: bool) -> list[bytes]:
        peers, core = self._cluster.connection.peers, self._cluster.core
        replies = [peers.ask(address, m.ProfileHost(core.new_request(), start)) for _, address in hosts]
        for reply in replies:
            reply.wait()
        for reply in replies:
            error = reply.error or reply.value.error
            if error is not None:
                raise of_info(error)
        return [reply.value.answer for reply in replies]

    def release(self) -> None:
        if self._profiled:  # started, and nobody will stop it
            _in_thread(self._stop)


def _describe(output: Any, dtype: str, shape: tuple[int, ...], devices: tuple[int, ...], op: Any) -> None:
    output.dtype.kind = dtype_kind(dtype)
    output.shape.dims.extend(shape)
    hlo = wire.HloSharding()
    hlo.devices.device_ids.extend(devices)
    hlo.xla_op_sharding.CopyFrom(op)
    output.sharding.serialized_sharding.type_name = "xla::ifrt::HloSharding"
    output.sharding.serialized_sharding.data = hlo.SerializeToString()


def _in_thread(work: Callable[[], None]) -> Pending:
    """Do it elsewhere: files and profiles take as long as they take."""
    ended = Pending()

    def run() -> None:
        try:
            work()
        except Exception as error:
            ended.fail(info_of(of_exception(error)))
        else:
            ended.resolve()

    threading.Thread(target=run, name="pathway-proxy plugin", daemon=True).start()
    return ended
