"""The gRPC server. Each bidirectional stream is a session; host buffers come and go in calls of their own.

The calls are served by grpcio's threads: one reads a session's requests, one sends its responses, and each transfer of
a host buffer has one. What a session does is in `session`; nothing is decided here.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np

from pathway.errors import ErrorInfo
from pathway.proxy import wire
from pathway.proxy.cluster import ClusterView
from pathway.proxy.session import Session
from pathway.proxy.status import Code, StatusError, of_exception, of_info
from pathway.proxy.storage import Storage
from pathway.proxy.versions import negotiate
from pathway.transport.security import Identity
from pathway.version import __version__

log = logging.getLogger(__name__)

SESSION_METADATA = "ifrt-proxy-grpc-ifrt-session-metadata-bin"
STORE_METADATA = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"
PIECE_BYTES = 1024 * 1024
MAX_BUFFER_BYTES = 1 << 40
THREADS = 1024
"""Calls at once: a session has one, and up to 64 transfers each way."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True)
class ProxySettings:
    """`directory`: where clients on this machine leave large host buffers; `storage`: where files that clients have
    written and read are (\"\": nowhere)."""

    scheduler: str
    bind: str = "127.0.0.1:29000"
    identity: Identity | None = None
    directory: str = ""
    storage: str = ""
    jaxlib: str = ""


class ProxyServer:
    """Serves from `start` until `stop`."""

    def __init__(self, settings: ProxySettings) -> None:
        self._settings = settings
        self._storage = Storage(settings.storage)
        self._sessions: dict[int, Session] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="pathway-proxy")
        self._server = grpc.server(
            self._threads,
            options=[
                ("grpc.max_receive_message_length", -1),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ],
        )
        self._server.add_generic_rpc_handlers((self._handlers(),))
        self.port = self._server.add_insecure_port(settings.bind)
        if not self.port:
            raise StatusError(Code.UNAVAILABLE, f"nothing can listen at {settings.bind}")

    def start(self) -> None:
        self._server.start()

    def stop(self, grace_s: float = 0.5) -> None:
        """End all sessions."""
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            session.close()
        self._server.stop(grace_s).wait()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _handlers(self) -> grpc.GenericRpcHandler:
        def unary(do: Callable[..., Any], request: Any) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(do, request.FromString, _serialized)

        return grpc.method_handlers_generic_handler(
            wire.SERVICE,
            {
                "GetVersion": unary(self._get_version, wire.GetVersionRequest),
                "IfrtSession": grpc.stream_stream_rpc_method_handler(self._session, wire.Request.FromString, None),
                "HostBufferStore": grpc.stream_unary_rpc_method_handler(
                    self._store, wire.StoreRequest.FromString, _serialized
                ),
                "HostBufferLookup": grpc.unary_stream_rpc_method_handler(
                    self._lookup, wire.LookupRequest.FromString, _serialized
                ),
                "HostBufferDelete": unary(self._delete, wire.DeleteBufferRequest),
                "HostBufferReadFromDisk": unary(self._read_from_disk, wire.ReadFromDiskRequest),
            },
        )

    # -- sessions ----------------------------------------------------------------------------------------------------

    def _get_version(self, request: Any, context: grpc.ServicerContext) -> Any:
        try:
            protocol, serdes = negotiate(
                (request.min_version.protocol_version, request.min_version.ifrt_serdes_version_number),
                (request.max_version.protocol_version, request.max_version.ifrt_serdes_version_number),
                self._settings.jaxlib,
            )
        except StatusError as error:
            _abort(context, error)
        response = wire.GetVersionResponse()
        response.version.protocol_version = protocol
        response.version.ifrt_serdes_version_number = serdes
        return response

    def _session(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[bytes]:
        responses: SimpleQueue[bytes | None] = SimpleQueue()
        number = secrets.randbits(62) + 1
        try:
            if not any(key == SESSION_METADATA for key, _ in context.invocation_metadata()):
                raise StatusError(Code.INVALID_ARGUMENT, f"a session without the header {SESSION_METADATA}")
            cluster = ClusterView(self._settings.scheduler, f"proxy {context.peer()}", self._settings.identity)
        except Exception as error:
            _abort(context, of_exception(error))
        session = Session(cluster, number, f"pathway {__version__}", responses.put, self._storage)
        with self._lock:
            self._sessions[number] = session
        log.info("session %x of %s begins", number, context.peer())

        def read() -> None:
            try:
                for request in requests:
                    session.handle(request)
            except grpc.RpcError:
                pass
            except Exception:
                log.exception("session %x fails", number)
            finally:
                responses.put(None)

        context.add_callback(lambda: responses.put(None))
        threading.Thread(target=read, name="pathway-proxy session", daemon=True).start()
        try:
            while (response := responses.get()) is not None:
                yield response
        finally:
            with self._lock:
                self._sessions.pop(number, None)
            session.close()
            log.info("session %x ends", number)

    def _find(self, number: int, context: grpc.ServicerContext) -> Session:
        session = self._sessions.get(number)
        if session is None:
            raise _abort(context, StatusError(Code.NOT_FOUND, f"session {number} is not known"))
        return session

    # -- host buffers ------------------------------------------------------------------------------------------------

    def _store(self, pieces: Iterator[Any], context: grpc.ServicerContext) -> Any:
        header = next((value for key, value in context.invocation_metadata() if key == STORE_METADATA), None)
        try:
            metadata = wire.StoreMetadata.FromString(header or b"")
        except Exception:
            _abort(context, StatusError(Code.INVALID_ARGUMENT, f"the header {STORE_METADATA} cannot be read"))
        session = self._find(metadata.session_id, context)
        size = metadata.buffer_size
        try:
            if not 0 <= size <= MAX_BUFFER_BYTES:
                raise StatusError(Code.INVALID_ARGUMENT, f"a host buffer of {size} bytes")
            session.host_buffers.store(metadata.handle, _collected(pieces, size))
        except grpc.RpcError:
            session.host_buffers.fail(metadata.handle, ErrorInfo("Cancelled", "the host buffer did not come whole"))
            raise
        except Exception as caught:
            error = of_exception(caught)
            session.host_buffers.fail(metadata.handle, ErrorInfo("ProtocolError", error.message))
            _abort(context, error)
        return wire.StoreResponse()

    def _lookup(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        session = self._find(request.session_id, context)
        pending = session.host_buffers.expect(request.handle)
        pending.wait()
        if pending.error is not None:
            _abort(context, of_info(pending.error))
        data = memoryview(pending.value).cast("B")
        for start in range(0, max(len(data), 1), PIECE_BYTES):
            yield wire.LookupResponse(data=bytes(data[start : start + PIECE_BYTES]))

    def _delete(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._find(request.session_id, context).host_buffers.delete(request.handle)
        return wire.DeleteBufferResponse()

    def _read_from_disk(self, request: Any, context: grpc.ServicerContext) -> Any:
        metadata = request.metadata
        session = self._find(metadata.session_id, context)
        try:
            if not self._settings.directory:
                raise StatusError(
                    Code.FAILED_PRECONDITION, "this server shares no directory with clients (--transfer-directory)"
                )
            path = Path(self._settings.directory) / f"lt_{metadata.handle}"
            size = path.stat().st_size
            if size != metadata.buffer_size:
                raise StatusError(Code.INVALID_ARGUMENT, f"{path} has {size} bytes, not {metadata.buffer_size}")
            data = np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8)
            path.unlink()  # the client leaves it to us; what is mapped stays
            session.host_buffers.store(metadata.handle, data)
        except OSError as error:
            _abort(context, StatusError(Code.NOT_FOUND, f"the host buffer's file cannot be read: {error}"))
        except Exception as error:
            _abort(context, of_exception(error))
        return wire.ReadFromDiskResponse()


def _collected(pieces: Iterator[Any], size: int) -> Any:
    """A host buffer of `size` bytes, out of its pieces. Raises INVALID_ARGUMENT if they are more or fewer."""
    first = next(pieces, None)
    if first is not None and len(first.data) == size:
        rest = next(pieces, None)
        if rest is None:
            return first.data
        raise StatusError(Code.INVALID_ARGUMENT, f"more than the {size} bytes of a host buffer came")
    whole = np.empty(size, np.uint8)
    at = 0
    piece = first
    while piece is not None:
        data = piece.data
        if at + len(data) > size:
            raise StatusError(Code.INVALID_ARGUMENT, f"more than the {size} bytes of a host buffer came")
        whole[at : at + len(data)] = np.frombuffer(data, np.uint8)
        at += len(data)
        piece = next(pieces, None)
    if at != size:
        raise StatusError(Code.INVALID_ARGUMENT, f"{at} bytes of a host buffer of {size} came")
    whole.flags.writeable = False
    return whole


def _serialized(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _abort(context: grpc.ServicerContext, error: StatusError) -> StatusError:
    """End the call with this status: raises, as grpcio wants it."""
    context.abort(_CODES[int(error.code)], error.message)
    return error
