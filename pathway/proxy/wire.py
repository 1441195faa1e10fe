"""The protocol's message classes, made from the .proto files of this package when it is imported (a few ms).

They live in a pool of their own: a process that has anybody else's messages of these names is not disturbed.
"""

from __future__ import annotations

import importlib.resources
from typing import Any

from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, message_factory

from pathway.proxy.protofile import read_files

SERVICE = "xla.ifrt.proxy.GrpcIfrtService"

FILES = ("codes.proto", "status.proto", "types.proto", "xla.proto", "ifrt.proto", "service.proto")


def descriptors() -> list[descriptor_pb2.FileDescriptorProto]:
    """The descriptors of this package's .proto files."""
    directory = importlib.resources.files("pathway.proxy.protos")
    return read_files({name: (directory / name).read_text() for name in FILES})


def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    any_file = descriptor_pb2.FileDescriptorProto()
    any_pb2.DESCRIPTOR.CopyToProto(any_file)
    pool.Add(any_file)
    for file in descriptors():
        pool.Add(file)
    return pool


_POOL = _pool()


def message(name: str) -> Any:
    """The class of a message, by its full name."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(name))


def _proxy(name: str) -> Any:
    return message(f"xla.ifrt.proxy.{name}")


def _ifrt(name: str) -> Any:
    return message(f"xla.ifrt.{name}")


Request = _proxy("IfrtRequest")
Response = _proxy("IfrtResponse")
Version = _proxy("IfrtProxyVersion")
GetVersionRequest = _proxy("GrpcGetVersionRequest")
GetVersionResponse = _proxy("GrpcGetVersionResponse")
SessionMetadata = _proxy("GrpcIfrtSessionMetadata")
StoreMetadata = _proxy("GrpcHostBufferStoreMetadata")
StoreRequest = _proxy("GrpcHostBufferStoreRequest")
StoreResponse = _proxy("GrpcHostBufferStoreResponse")
LookupRequest = _proxy("GrpcHostBufferLookupRequest")
LookupResponse = _proxy("GrpcHostBufferLookupResponse")
DeleteBufferRequest = _proxy("GrpcHostBufferDeleteRequest")
DeleteBufferResponse = _proxy("GrpcHostBufferDeleteResponse")
ReadFromDiskRequest = _proxy("GrpcHostBufferReadFromDiskRequest")
ReadFromDiskResponse = _proxy("GrpcHostBufferReadFromDiskResponse")

Status = message("tensorflow.StatusProto")
DType = _ifrt("DTypeProto")
Shape = _ifrt("ShapeProto")
Sharding = _ifrt("ShardingProto")
Serialized = _ifrt("Serialized")
ArraySpec = _ifrt("ArraySpecProto")
HloSharding = _ifrt("HloShardingProto")
SingleDeviceSharding = _ifrt("SingleDeviceShardingProto")
OpaqueSharding = _ifrt("OpaqueShardingProto")
ConcreteSharding = _ifrt("ConcreteShardingProto")
ConcreteEvenSharding = _ifrt("ConcreteEvenShardingProto")
XlaCompileOptions = _ifrt("XlaCompileOptionsProto")
CustomCallProgram = _ifrt("CustomCallProgramProto")
OpSharding = message("xla.OpSharding")
LayoutProto = message("xla.LayoutProto")
