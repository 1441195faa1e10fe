"""What the client inside the installed jaxlib speaks: the descriptors that its library carries.

A C++ program that uses protobuf has the FileDescriptorProto of each of its .proto files as a constant. They are found
by their first field, the file's name, and read as far as they are well-formed.
"""

from __future__ import annotations

import functools
from pathlib import Path

import jaxlib
from google.protobuf import descriptor_pb2 as pb
from google.protobuf.message import DecodeError

_NAME_FIELD = 0x0A
_FIELDS = range(1, 16)


@functools.cache
def embedded_files() -> dict[str, pb.FileDescriptorProto]:
    """By the name of the file."""
    data = (Path(jaxlib.__file__).parent / "libjax_common.so").read_bytes()
    found: dict[str, pb.FileDescriptorProto] = {}
    at = data.find(b".proto")
    while at >= 0:
        end = at + len(b".proto")
        for length in range(len(b".proto") + 1, 128):
            start = end - length - 2
            if data[start] == _NAME_FIELD and data[start + 1] == length:
                file = _file_at(data, start)
                if file is not None:
                    found.setdefault(file.name, file)
                break
        at = data.find(b".proto", end)
    return found


def _file_at(data: bytes, start: int) -> pb.FileDescriptorProto | None:
    at = start
    while True:
        tag, after = _varint(data, at)
        field, kind = tag >> 3, tag & 7
        if field not in _FIELDS or kind not in (0, 2) or (field == 1 and at != start):
            break
        value, after = _varint(data, after)
        at = after + value if kind == 2 else after
    try:
        file = pb.FileDescriptorProto.FromString(data[start:at])
    except DecodeError:
        return None
    return file if file.package and (file.message_type or file.enum_type or file.service) else None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            break
    return value, at
