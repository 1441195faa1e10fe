"""Reads .proto files: enough of the language for the messages in `protos/`, so that no generated code is kept.

What is read: package, import, message, enum, service, oneof, map, repeated and optional fields, comments. Names of
types are looked up as protobuf does: in the scope where they stand, then in those around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from google.protobuf import descriptor_pb2 as pb

_TOKEN = re.compile(r'\s*(?://[^\n]*|("[^"]*")|([A-Za-z_][\w.]*|\.[A-Za-z_][\w.]*)|(-?\d+)|([{}()<>=;,]))')
_SCALARS = {
    name: getattr(pb.FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in (
        *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64"),
        *("sfixed32", "sfixed64", "bool", "string", "bytes"),
    )
}
_REPEATED = pb.FieldDescriptorProto.LABEL_REPEATED
_OPTIONAL = pb.FieldDescriptorProto.LABEL_OPTIONAL
_UNRESOLVED = pb.FieldDescriptorProto.TYPE_GROUP  # no field of proto3 has it: stands for a type that is still a name


def read_files(texts: Mapping[str, str]) -> list[pb.FileDescriptorProto]:
    """The descriptors of files that import one another, each behind those that it imports."""
    files = {name: _Reader(name, text).file() for name, text in texts.items()}
    kinds: dict[str, int] = {".google.protobuf.Any": pb.FieldDescriptorProto.TYPE_MESSAGE}
    for file in files.values():
        kinds |= {f".{file.package}.{enum.name}": pb.FieldDescriptorProto.TYPE_ENUM for enum in file.enum_type}
        for scope, message in _messages(f".{file.package}", file.message_type):
            kinds[scope] = pb.FieldDescriptorProto.TYPE_MESSAGE
            kinds |= {f"{scope}.{enum.name}": pb.FieldDescriptorProto.TYPE_ENUM for enum in message.enum_type}
    for file in files.values():
        for scope, message in _messages(f".{file.package}", file.message_type):
            for field in message.field:
                if field.type == _UNRESOLVED:
                    field.type_name = _resolve(field.type_name, scope, kinds)
                    field.type = kinds[field.type_name]
        for service in file.service:
            for method in service.method:
                method.input_type = _resolve(method.input_type, f".{file.package}", kinds)
                method.output_type = _resolve(method.output_type, f".{file.package}", kinds)
    ordered: list[pb.FileDescriptorProto] = []

    def place(file: pb.FileDescriptorProto) -> None:
        for imported in file.dependency:
            if imported in files:
                place(files[imported])
        if file not in ordered:
            ordered.append(file)

    for file in files.values():
        place(file)
    return ordered


def _messages(scope: str, messages: object) -> Iterator[tuple[str, pb.DescriptorProto]]:
    for message in messages:  # type: ignore[attr-defined]
        name = f"{scope}.{message.name}"
        yield name, message
        yield from _messages(name, message.nested_type)


def _resolve(name: str, scope: str, kinds: Mapping[str, int]) -> str:
    while True:
        if f"{scope}.{name}" in kinds:
            return f"{scope}.{name}"
        if not scope:
            raise ValueError(f"no type {name!r}")
        scope = scope.rpartition(".")[0]


class _Reader:
    """One file."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._tokens = [
            next(part for part in match.groups() if part)
            for match in _TOKEN.finditer(text)
            if any(part for part in match.groups())
        ]
        self._at = 0

    def file(self) -> pb.FileDescriptorProto:
        file = pb.FileDescriptorProto(name=self._name)
        while self._at < len(self._tokens):
            match self._next():
                case "syntax":
                    self._expect("=")
                    file.syntax = self._next().strip('"')
                    self._expect(";")
                case "package":
                    file.package = self._next()
                    self._expect(";")
                case "import":
                    file.dependency.append(self._next().strip('"'))
                    self._expect(";")
                case "message":
                    self._message(file.message_type.add())
                case "enum":
                    self._enum(file.enum_type.add())
                case "service":
                    self._service(file.service.add())
                case other:
                    raise ValueError(f"{self._name}: {other!r} is not expected here")
        return file

    def _message(self, message: pb.DescriptorProto) -> None:
        message.name = self._next()
        self._expect("{")
        while (word := self._next()) != "}":
            match word:
                case "message":
                    self._message(message.nested_type.add())
                case "enum":
                    self._enum(message.enum_type.add())
                case "oneof":
                    index = len(message.oneof_decl)
                    message.oneof_decl.add(name=self._next())
                    self._expect("{")
                    while (kind := self._next()) != "}":
                        self._field(message, kind).oneof_index = index
                case "map":
                    self._map(message)
                case "repeated":
                    self._field(message, self._next()).label = _REPEATED
                case "optional":
                    self._field(message, self._next()).proto3_optional = True
                case _:
                    self._field(message, word)
        for field in message.field:  # as protoc does: a oneof of its own for each, behind the real ones
            if field.proto3_optional:
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field.name}")

    def _field(self, message: pb.DescriptorProto, kind: str) -> pb.FieldDescriptorProto:
        field = message.field.add(name=self._next(), label=_OPTIONAL)
        self._expect("=")
        field.number = int(self._next())
        self._expect(";")
        _set_type(field, kind)
        return field

    def _map(self, message: pb.DescriptorProto) -> None:
        self._expect("<")
        key = self._next()
        self._expect(",")
        value = self._next()
        self._expect(">")
        entry = message.nested_type.add()
        entry.options.map_entry = True
        for number, (name, kind) in enumerate((("key", key), ("value", value)), 1):
            _set_type(entry.field.add(name=name, number=number, label=_OPTIONAL), kind)
        entry.name = "".join(part.capitalize() for part in self._tokens[self._at].split("_")) + "Entry"
        self._field(message, entry.name).label = _REPEATED

    def _enum(self, enum: pb.EnumDescriptorProto) -> None:
        enum.name = self._next()
        self._expect("{")
        while (name := self._next()) != "}":
            self._expect("=")
            enum.value.add(name=name, number=int(self._next()))
            self._expect(";")

    def _service(self, service: pb.ServiceDescriptorProto) -> None:
        service.name = self._next()
        self._expect("{")
        while self._next() != "}":
            method = service.method.add(name=self._next())
            method.client_streaming, method.input_type = self._argument()
            self._expect("returns")
            method.server_streaming, method.output_type = self._argument()
            self._expect(";")

    def _argument(self) -> tuple[bool, str]:
        self._expect("(")
        word = self._next()
        streams = word == "stream"
        name = self._next() if streams else word
        self._expect(")")
        return streams, name

    def _next(self) -> str:
        token = self._tokens[self._at]
        self._at += 1
        return token

    def _expect(self, token: str) -> None:
        found = self._next()
        if found != token:
            raise ValueError(f"{self._name}: {token!r} is expected, not {found!r}")


def _set_type(field: pb.FieldDescriptorProto, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _UNRESOLVED, kind
