"""The protocol's field tables are those of the client in the installed jaxlib."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf import descriptor_pb2 as pb

from pathway.proxy import wire
from pathway.proxy.protofile import read_files
from tests.proxy_descriptors import embedded_files

NEWER_THAN_0_10_2 = {
    "xla.ifrt.XlaCompileOptionsProto": {"version_number", "outputs_bundle_slice_sizes"},
    "xla.NamedShardingProto": {"reduction_op"},
}
MESSAGES_NEWER_THAN_0_10_2 = {"xla.ifrt.CustomCallCompileOptionsProto"}


def tables(files: list[pb.FileDescriptorProto]) -> dict[str, dict[str, Any]]:
    """Every message and enum, by full name: its fields or values."""
    found: dict[str, dict[str, Any]] = {}

    def walk(scope: str, messages: Any, enums: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        for enum in enums:
            yield f"{scope}.{enum.name}", {value.name: value.number for value in enum.value}
        for message in messages:
            name = f"{scope}.{message.name}"
            oneofs = [oneof.name for oneof in message.oneof_decl]
            yield (
                name,
                {
                    field.name: (
                        field.number,
                        field.label,
                        field.type,
                        field.type_name,
                        field.proto3_optional,
                        oneofs[field.oneof_index] if field.HasField("oneof_index") else "",
                    )
                    for field in message.field
                },
            )
            yield from walk(name, message.nested_type, message.enum_type)

    for file in files:
        found.update(walk(file.package, file.message_type, file.enum_type))
        for service in file.service:
            found[f"{file.package}.{service.name}"] = {
                method.name: (method.input_type, method.client_streaming, method.output_type, method.server_streaming)
                for method in service.method
            }
    return found


OURS = tables(wire.descriptors())
THEIRS = tables(list(embedded_files().values()))


@pytest.mark.parametrize("name", sorted(OURS))
def test_no_field_of_ours_is_another_one_there(name: str) -> None:
    if name in MESSAGES_NEWER_THAN_0_10_2 and name not in THEIRS:
        return
    assert name in THEIRS, f"the installed jaxlib does not have {name}"
    for field, what in OURS[name].items():
        if name.startswith(("xla.ifrt.DTypeProto.Kind", "xla.PrimitiveType")) and field not in THEIRS[name]:
            continue  # a dtype that this jaxlib does not know yet
        if field in THEIRS[name] or field not in NEWER_THAN_0_10_2.get(name, ()):
            assert THEIRS[name].get(field) == what, field


def test_the_protocols_own_messages_are_complete() -> None:
    for name, fields in THEIRS.items():
        if name.startswith("xla.ifrt.proxy.") and not name.startswith("xla.ifrt.proxy.StringArray"):
            assert OURS.get(name) == fields, name


def test_requests_and_their_responses_have_the_same_numbers() -> None:
    requests = {field.name[: -len("_request")]: field.number for field in wire.Request.DESCRIPTOR.oneofs[0].fields}
    responses = {field.name[: -len("_response")]: field.number for field in wire.Response.DESCRIPTOR.oneofs[0].fields}
    assert requests == responses


def test_messages_come_back_as_they_went() -> None:
    request = wire.Request()
    request.request_metadata.op_id = 7
    request.copy_to_host_buffer_request.array_handle = 1 << 62
    request.copy_to_host_buffer_request.byte_strides.strides.extend([8, 4])
    again = wire.Request.FromString(request.SerializeToString())
    assert again == request
    assert again.WhichOneof("request") == "copy_to_host_buffer_request"
    assert not wire.Request.FromString(b"").HasField("request_metadata")


def test_names_of_types_are_looked_up_from_the_inside() -> None:
    texts = {
        "a.proto": 'syntax = "proto3"; package p; message T { int32 x = 1; } // outside',
        "b.proto": """syntax = "proto3"; package p.q; import "a.proto";
                      message M { message T {} T inner = 1; p.T outer = 2; }""",
    }
    last = read_files(texts)[-1]
    assert [field.type_name for field in last.message_type[0].field] == [".p.q.M.T", ".p.T"]
    with pytest.raises(ValueError, match="no type 'Absent'"):
        read_files({"c.proto": 'syntax = "proto3"; package p; message M { Absent x = 1; }'})
    with pytest.raises(ValueError, match="is expected"):
        read_files({"d.proto": 'syntax = "proto3"; package p; message M { int32 x 1; }'})
