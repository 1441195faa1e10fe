"""A session fed by hand: what bad requests get, versions, host buffers, and a stream of nonsense."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc")

from pathway.dataflow.layout import numpy_dtype, shard_regions
from pathway.errors import ErrorInfo
from pathway.proxy import specs, wire
from pathway.proxy.cluster import ClusterView
from pathway.proxy.hostbuffers import HostBuffers
from pathway.proxy.session import Session
from pathway.proxy.state import SERVER_HANDLES
from pathway.proxy.status import Code, StatusError, of_exception, of_info
from pathway.proxy.versions import negotiate
from pathway.testing.cluster import ClusterUnderTest, local_cluster

FUZZED_MESSAGES = 10_000


class Talk:
    """A session, and its answers by op_id."""

    def __init__(self, address: str) -> None:
        self.answers: dict[int, Any] = {}
        self.came = threading.Condition()
        self.session = Session(ClusterView(address, "test", None), 7, "test", self._answer)
        self._next_op = 0

    def _answer(self, data: bytes) -> None:
        response = wire.Response.FromString(data)
        with self.came:
            self.answers[response.response_metadata.op_id] = response
            self.came.notify_all()

    def send(self, kind: str, fill: Callable[[Any], None] = lambda body: None) -> int:
        request = wire.Request()
        self._next_op += 1
        request.request_metadata.op_id = self._next_op
        body = getattr(request, f"{kind}_request")
        body.SetInParent()
        fill(body)
        self.session.handle(request)
        return self._next_op

    def ask(self, kind: str, fill: Callable[[Any], None] = lambda body: None) -> Any:
        """The response's body; raises what it failed with."""
        op = self.send(kind, fill)
        with self.came:
            assert self.came.wait_for(lambda: op in self.answers, 20), f"{kind} was not answered"
        response = self.answers[op]
        status = response.response_metadata.status
        if status.code:
            raise StatusError(Code(status.code), status.message)
        return getattr(response, f"{kind}_response")

    def put(self, handle: int, value: np.ndarray) -> None:
        """A float32 array on device 0."""
        buffer = handle + (1 << 32)
        self.session.host_buffers.store(buffer, value.tobytes())

        def fill(body: Any) -> None:
            body.dtype.kind = specs.dtype_kind(value.dtype.name)
            body.shape.dims.extend(value.shape)
            body.sharding.CopyFrom(on_device(0))
            body.host_buffer_handle = buffer
            body.array_handle = handle

        self.ask("make_array_from_host_buffer", fill)

    def get(self, handle: int, dtype: Any = np.float32) -> np.ndarray:
        buffer = handle + (1 << 33)

        def fill(body: Any) -> None:
            body.array_handle = handle
            body.host_buffer_handle = buffer

        self.ask("copy_to_host_buffer", fill)
        return np.frombuffer(self.session.host_buffers.take(buffer), dtype)


def on_device(number: int) -> Any:
    sharding = wire.Sharding()
    single = wire.SingleDeviceSharding(device_id=number)
    sharding.serialized_sharding.type_name = "xla::ifrt::SingleDeviceSharding"
    sharding.serialized_sharding.data = single.SerializeToString()
    return sharding


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterUnderTest]:
    with local_cluster({"east": {"hosts": 1, "devices": 2}, "west": {"hosts": 1, "devices": 2}}) as cluster:
        yield cluster


@pytest.fixture
def talk(cluster: ClusterUnderTest) -> Iterator[Talk]:
    talk = Talk(cluster.address)
    yield talk
    talk.session.close()


def test_init_describes_the_cluster(talk: Talk) -> None:
    answer = talk.ask("init")
    assert [device.id for device in answer.all_devices] == [0, 1, 2, 3]
    assert [d.attributes.attributes["slice_index"].int64_value for d in answer.all_devices] == [0, 0, 1, 1]
    assert list(answer.addressable_device_ids) == [0, 1, 2, 3]
    assert {memory.memory_space_kind for memory in answer.memories} >= {"device", "pinned_host"}
    assert all(device.default_memory_id in device.memory_ids for device in answer.all_devices)


def test_an_array_goes_and_comes_back(talk: Talk) -> None:
    talk.put(1, np.arange(6, dtype=np.float32))
    np.testing.assert_array_equal(talk.get(1), np.arange(6))
    talk.put(2, np.arange(100_000, dtype=np.float32))
    np.testing.assert_array_equal(talk.get(2), np.arange(100_000))


def test_errors_are_under_the_handles_that_the_client_named(talk: Talk) -> None:
    def copy(source: int, result: int) -> Callable[[Any], None]:
        def fill(body: Any) -> None:
            body.array_handles.append(source)
            body.device_ids.append(1)
            body.result_handles.append(result)

        return fill

    with pytest.raises(StatusError, match="handle 99 is not known"):
        talk.ask("copy_arrays", copy(99, 100))
    with pytest.raises(StatusError, match="handle 99 is not known"):
        talk.ask("copy_arrays", copy(100, 101))
    with pytest.raises(StatusError, match="handle 99 is not known"):
        talk.get(101)


def test_arrays_of_errors(talk: Talk) -> None:
    def fill(body: Any) -> None:
        body.error.code = Code.ABORTED
        body.error.message = "as asked"
        body.array_handles.append(5)

    talk.ask("make_error_arrays", fill)
    with pytest.raises(StatusError, match="as asked") as caught:
        talk.get(5)
    assert caught.value.code is Code.ABORTED


@pytest.mark.parametrize(
    ("dtype", "shape"), [("int32", [6]), ("uint16", [12]), ("bfloat16", [6, 2]), ("float64", [3]), ("int8", [24])]
)
def test_bitcasts(talk: Talk, dtype: str, shape: list[int]) -> None:
    value = np.arange(6, dtype=np.float32) - 2.5
    talk.put(1, value)

    def fill(body: Any) -> None:
        body.array_handles.append(1)
        body.result_handles.append(2)
        spec = body.array_specs.add()
        spec.dtype.kind = specs.dtype_kind(dtype)
        spec.shape.dims.extend(shape)
        spec.sharding.CopyFrom(on_device(0))

    talk.ask("bitcast_arrays", fill)
    kind = numpy_dtype(dtype)
    np.testing.assert_array_equal(talk.get(2, kind), value.view(kind).reshape(-1))


def test_bitcasts_of_other_sizes_are_refused(talk: Talk) -> None:
    talk.put(1, np.zeros(6, np.float32))

    def fill(body: Any) -> None:
        body.array_handles.append(1)
        spec = body.array_specs.add()
        spec.dtype.kind = specs.dtype_kind("int32")
        spec.shape.dims.append(7)
        spec.sharding.CopyFrom(on_device(0))

    with pytest.raises(StatusError, match="not those of"):
        talk.ask("bitcast_arrays", fill)


def test_a_handle_is_used_once(talk: Talk) -> None:
    talk.put(1, np.zeros(2, np.float32))
    with pytest.raises(StatusError, match="used already"):
        talk.put(1, np.zeros(2, np.float32))


def test_what_is_not_done_says_so(talk: Talk) -> None:
    with pytest.raises(StatusError) as caught:
        talk.ask("loaded_host_callback_poll")
    assert caught.value.code is Code.UNIMPLEMENTED


def test_deleted_arrays(talk: Talk) -> None:
    talk.put(1, np.zeros(2, np.float32))
    talk.ask("delete_array", lambda body: body.array_handle.append(1))
    assert talk.ask("is_array_deleted", lambda body: setattr(body, "array_handle", 1)).deleted
    with pytest.raises(StatusError, match="deleted"):
        talk.get(1)
    talk.ask("destruct_array", lambda body: body.array_handle.append(1))
    with pytest.raises(StatusError, match="not known"):
        talk.ask("is_array_deleted", lambda body: setattr(body, "array_handle", 1))


def test_programs_that_do_not_parse(talk: Talk) -> None:
    def fill(body: Any) -> None:
        body.program.type_name = "xla::ifrt::XlaProgram"
        body.program.data = b"this is no module"
        body.compile_options.type_name = "xla::ifrt::XlaCompileOptions"

    with pytest.raises(StatusError) as caught:
        talk.ask("compile", fill)
    assert caught.value.code is Code.INVALID_ARGUMENT


def test_a_short_host_buffer(talk: Talk) -> None:
    talk.session.host_buffers.store(1, b"\0" * 7)

    def fill(body: Any) -> None:
        body.dtype.kind = specs.dtype_kind("float32")
        body.shape.dims.append(2)
        body.sharding.CopyFrom(on_device(0))
        body.host_buffer_handle = 1
        body.array_handle = 3

    with pytest.raises(StatusError, match="too short"):
        talk.ask("make_array_from_host_buffer", fill)


# -- nonsense ----------------------------------------------------------------------------------------------------------


def nonsense(rng: random.Random, message: Any, depth: int = 0) -> None:
    """Fill a message with anything: numbers near the edges, handles that may exist, and parts that are left out."""
    if message.DESCRIPTOR.name == "Serialized" and rng.random() < 0.7:
        message.type_name, message.data = rng.choice(SHARDINGS)
        return
    if message.DESCRIPTOR.name == "DTypeProto" and rng.random() < 0.7:
        message.kind = specs.dtype_kind("float32")
        return
    if message.DESCRIPTOR.name == "ShapeProto" and rng.random() < 0.7:
        message.dims.extend(rng.choice(((4,), (2,), (), (0,), (2, 2))))
        return
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.4 or depth > 4:
            continue
        values = [_value(rng, field) for _ in range(rng.choice((1, 1, 2, 5)))]
        try:
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                continue
            if field.message_type is not None:
                for _ in values:
                    part = getattr(message, field.name).add() if field.is_repeated else getattr(message, field.name)
                    part.SetInParent()
                    nonsense(rng, part, depth + 1)
            elif field.is_repeated:
                getattr(message, field.name).extend(values)
            else:
                setattr(message, field.name, values[0])
        except (ValueError, TypeError):
            continue


def _value(rng: random.Random, field: Any) -> Any:
    if field.type == field.TYPE_BYTES:
        return rng.choice((b"", rng.randbytes(rng.choice((1, 8, 40))), rng.choice(SHARDINGS)[1]))
    if field.type == field.TYPE_STRING:
        return rng.choice(
            ("", "device", "pinned_host", "xla::ifrt::HloSharding", "xla::ifrt::SingleDeviceSharding", "é")
        )
    if field.type == field.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        return rng.random()
    if field.type == field.TYPE_ENUM:
        return rng.choice([value.number for value in field.enum_type.values])
    if field.type in (field.TYPE_UINT64, field.TYPE_FIXED64, field.TYPE_UINT32, field.TYPE_FIXED32):
        return rng.choice((0, 1, 2, 3, rng.randrange(40), SERVER_HANDLES + rng.randrange(5), (1 << 32) - 1))
    return rng.choice((0, 1, 2, 3, -1, 4, 1 << 31, -(1 << 31), (1 << 62), rng.randrange(9)))


SHARDINGS = [
    *[("xla::ifrt::SingleDeviceSharding", on_device(n).serialized_sharding.data) for n in (0, 1, 3, 77)],
    *[
        (
            "xla::ifrt::HloSharding",
            wire.HloSharding(devices={"device_ids": ids}, xla_op_sharding=op).SerializeToString(),
        )
        for ids in ([0, 1], [1, 0], [2], [0, 2], [0, 0], [])
        for op in (
            {},
            {"type": 3, "tile_assignment_dimensions": [2], "iota_reshape_dims": [2], "iota_transpose_perm": [0]},
        )
    ],
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "count", [FUZZED_MESSAGES, pytest.param(100 * FUZZED_MESSAGES, marks=pytest.mark.soak)], ids="{:,}".format
)
def test_nonsense_is_refused_and_nothing_else_happens(cluster: ClusterUnderTest, talk: Talk, count: int) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    other = Talk(cluster.address)
    other.put(1, np.arange(4, dtype=np.float32))
    session = talk.session
    kinds = [field.name for field in wire.Request.DESCRIPTOR.oneofs_by_name["request"].fields]
    number = 0
    for handle in range(1, 10):
        talk.put(handle, np.arange(4, dtype=np.float32))
    while number < count:
        if rng.random() < 0.1:
            request = wire.Request()
            try:
                request.ParseFromString(rng.randbytes(rng.randrange(60)))
            except Exception:
                continue
        else:
            request = wire.Request()
            body = getattr(request, rng.choice(kinds))
            body.SetInParent()
            nonsense(rng, body)
        if rng.random() < 0.3:
            session.host_buffers.delete(rng.randrange(4))
            session.host_buffers.expect(rng.randrange(4)).resolve(rng.randbytes(16))
        for handle in range(40):  # a host buffer that never comes would be waited for
            session.host_buffers.expect(handle)
        request.request_metadata.op_id = (1 << 32) + number
        _never_wait(session.host_buffers)
        session.handle(request)
        number += 1
    statuses = [answer.response_metadata.status for answer in talk.answers.values()]
    assert [s.message for s in statuses if s.code == Code.INTERNAL and "the proxy failed" in s.message] == []
    done = {answer.WhichOneof("response") for answer in talk.answers.values()}
    assert len(done) > 10, "the nonsense does not get far"
    np.testing.assert_array_equal(other.get(1), np.arange(4))
    talk.put(1 << 40, np.arange(4, dtype=np.float32))
    np.testing.assert_array_equal(talk.get(1 << 40), np.arange(4))
    assert all(island["incarnation"] == 1 for island in cluster.status()["islands"])
    other.session.close()


def _never_wait(buffers: HostBuffers) -> None:
    buffers.take = lambda handle, timeout_s=0.0: HostBuffers.take(buffers, handle, 0.0)  # type: ignore[method-assign]


# -- pieces ------------------------------------------------------------------------------------------------------------


def test_versions() -> None:
    assert negotiate((16, 0), (25, 3), "0.10.2") == (25, 3)
    assert negotiate((16, 2), (25, 6), "0.12.0.1") == (25, 6)
    assert negotiate((16, 0), (30, 9), "0.10.2") == (25, 3)
    with pytest.raises(StatusError, match=r"serialization version 3.*this client 0 to 2: install jaxlib 0.10.2"):
        negotiate((16, 0), (25, 2), "0.10.2")
    with pytest.raises(StatusError, match="protocol versions 16 to 25"):
        negotiate((30, 0), (35, 3), "0.10.2")
    with pytest.raises(StatusError, match=r"works with 0\.10"):
        negotiate((16, 0), (25, 3), "0.4.30")


def test_host_buffers_are_waited_for_and_used_once() -> None:
    buffers = HostBuffers()
    taken: list[Any] = []
    waiting = threading.Thread(target=lambda: taken.append(buffers.take(1)))
    waiting.start()
    buffers.store(1, b"abc")
    waiting.join(5)
    assert taken == [b"abc"]
    buffers.store(2, b"x")
    with pytest.raises(StatusError, match="stored before"):
        buffers.store(2, b"y")
    buffers.fail(3, ErrorInfo("ProtocolError", "cut short"))
    with pytest.raises(StatusError, match="cut short"):
        buffers.take(3)
    buffers.close()
    with pytest.raises(StatusError, match="over"):
        buffers.take(4)


def test_strides_of_host_buffers() -> None:
    array = np.arange(12, dtype=np.int16).reshape(3, 4)
    fortran = np.asfortranarray(array)
    data = fortran.tobytes(order="A")
    np.testing.assert_array_equal(specs.host_array(data, "int16", (3, 4), fortran.strides), array)
    assert bytes(specs.laid_out(array, fortran.strides)) == data
    assert bytes(specs.laid_out(array, None)) == array.tobytes()
    for strides in [(8,), (-8, 2), (1 << 40, 2)]:
        with pytest.raises(StatusError):
            specs.host_array(data, "int16", (3, 4), strides)
        with pytest.raises(StatusError):
            specs.laid_out(array, strides)


def test_shardings_over_a_mesh_with_names() -> None:
    op = wire.OpSharding()
    named = op.named_sharding
    for name, size in (("x", 2), ("y", 4)):
        named.mesh.axes.add(name=name, size=size)
    rows, columns = named.dim_shardings.add(), named.dim_shardings.add()
    part = rows.axes.add(mesh_axis_index=1)
    part.sub_axis_info.pre_size, part.sub_axis_info.size = 1, 2
    columns.axes.add(mesh_axis_index=0)
    regions = shard_regions((4, 2), specs.op_sharding(op, 2, 8))
    assert regions[0] == ((0, 2), (0, 1))
    assert regions[1] == ((0, 2), (0, 1))
    assert regions[2] == ((2, 4), (0, 1))
    assert regions[4] == ((0, 2), (1, 2))


def test_layouts_as_text() -> None:
    layout = wire.LayoutProto()
    specs.fill_layout("{1,0:T(8,128)(2,1)E(4)S(5)}", layout)
    assert list(layout.minor_to_major) == [1, 0]
    assert [list(tile.dimensions) for tile in layout.tiles] == [[8, 128], [2, 1]]
    assert (layout.element_size_in_bits, layout.memory_space) == (4, 5)
    assert specs.default_layout("float32", 3) == "{2,1,0}"
    assert specs.default_layout("int4", 1) == "{0:E(4)}"


@pytest.mark.parametrize(
    ("info", "code"),
    [
        (ErrorInfo("IslandLostError", "gone"), Code.DATA_LOSS),
        (ErrorInfo("DeviceMemoryError", "too much"), Code.RESOURCE_EXHAUSTED),
        (ErrorInfo("CompileError", "XLA cannot compile it: UNIMPLEMENTED: no such op"), Code.UNIMPLEMENTED),
        (ErrorInfo("ExecutionError", "INTERNAL: oops"), Code.INVALID_ARGUMENT),
        (ErrorInfo("ExecutionError", "so", cause=ErrorInfo("IslandLostError", "root")), Code.DATA_LOSS),
    ],
)
def test_codes(info: ErrorInfo, code: Code) -> None:
    assert of_info(info).code is code


def test_what_nobody_expected_is_ours() -> None:
    assert of_exception(KeyError("x")).code is Code.INTERNAL
