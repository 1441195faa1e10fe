"""`pathway.Client`: one connection to a cluster, and what can be done with it."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import PartitionSpec

from pathway.array import Array
from pathway.client.bindings import ArrayKind, Run
from pathway.client.connection import Connection
from pathway.client.core import ClientCore, SliceState
from pathway.client.fetch import ArrayFetch
from pathway.client.hostvalues import aval_of, logical_value, physical_value
from pathway.client.pending import Pending
from pathway.client.slices import Device, Island, Slice, checked_mesh
from pathway.config import load_settings
from pathway.dataflow.layout import Sharding
from pathway.dataflow.placed import check_spec
from pathway.errors import DisconnectedError, ErrorInfo, ProgramError, SliceError, to_exception
from pathway.transport import messages as m

DEFAULT_CONNECT_TIMEOUT_S = 10.0
DEFAULT_SLICE_TIMEOUT_S = 60.0
STATUS_TIMEOUT_S = 10.0

_open_clients: weakref.WeakSet[Client] = weakref.WeakSet()


class Client:
    """A connection to the scheduler at `address`, for example `tcp://head:7777`. Close it, or use it in a `with`.

    A cluster with keys needs `keys`, a directory made by `pathway keygen`, or the files of one's own `key` and of the
    scheduler's public one, `scheduler_key` (or $PATHWAY_KEYS, $PATHWAY_KEY, $PATHWAY_SCHEDULER_KEY; docs/security.md).

    `weight` is its share of device time beside those of other clients, `priority` its rank where the cluster goes by
    priorities (docs/scheduling.md).

    Usable from any thread. Raises `ConnectError` where nobody listens: at once if the connection is refused, otherwise
    after `connect_timeout_s`.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str = "",
        weight: float = 1.0,
        priority: int = 0,
        connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S,
        keys: str | os.PathLike[str] | None = None,
        key: str | os.PathLike[str] | None = None,
        scheduler_key: str | os.PathLike[str] | None = None,
    ) -> None:
        self.address = address
        given = {"keys": keys, "key": key, "scheduler_key": scheduler_key}
        paths = load_settings({what: path and os.fspath(path) for what, path in given.items()}).key_paths("client")
        identity = paths.identity() if paths is not None else None
        self.connection = Connection(
            address, name or f"pid {os.getpid()}", connect_timeout_s, identity, weight, priority
        )
        self.connection.open()
        self.core: ClientCore = self.connection.core
        self.core.client = self
        self.known_computations: set[str] = set()
        self.constants: weakref.WeakValueDictionary[tuple[bytes, ArrayKind], Array] = weakref.WeakValueDictionary()
        _open_clients.add(self)

    # -- the cluster --------------------------------------------------------------------------------------------------

    def islands(self) -> tuple[Island, ...]:
        """The islands that are formed now, by name."""
        self._check_open()
        self.core.directory_known.wait(STATUS_TIMEOUT_S)
        self._check_open()
        return tuple(
            Island(e.island, e.incarnation, e.platform, len(e.hosts), e.devices_per_host, e.device_kind)
            for _, e in sorted(self.core.islands.items())
        )

    def devices(self) -> tuple[Device, ...]:
        """Every device of every formed island."""
        return tuple(device for island in self.islands() for device in island.devices)

    def status(self) -> dict[str, Any]:
        """What the scheduler knows: islands, slices, sessions, runs, and every wait with its reason."""
        self._check_open()
        reply = Pending()
        request = self.core.new_request()
        with self.core.lock:
            self.core.replies[request] = reply
            self.connection.send([m.StatusRequest(request)])
        if self.core.lost is not None:
            reply.fail(self.core.lost)
        if not reply.wait(STATUS_TIMEOUT_S):
            raise DisconnectedError(f"the scheduler at {self.address} did not answer within {STATUS_TIMEOUT_S} s")
        return json.loads(reply.result())  # type: ignore[no-any-return]

    def _temp_bytes(self, plan: int) -> dict[str, int]:
        """What each computation of a plan needs on a device beside arrays. Waits until all of them are compiled."""
        self._check_open()
        reply = Pending()
        request = self.core.new_request()
        with self.core.lock:
            self.core.replies[request] = reply
            self.connection.send([m.AskMemory(request, plan)])
        if self.core.lost is not None:
            reply.fail(self.core.lost)
        reply.wait(None)
        return reply.result()  # type: ignore[no-any-return]

    def slice(
        self,
        n: int,
        mesh: Mapping[str, int] | None = None,
        island: str | None = None,
        platform: str | None = None,
        shared: bool = False,
        memory: int | None = None,
        *,
        wait: bool = True,
        timeout_s: float = DEFAULT_SLICE_TIMEOUT_S,
    ) -> Slice:
        """`n` devices of one island, in a mesh of named axes (by default one axis, `data`).

        Another island is taken than those of this client's other slices, if one is free; `island` and `platform`
        insist. `shared` allows devices that other slices have too. `memory` is how many bytes it needs on each device.
        Waits in line up to `timeout_s` for an island to form and devices to be free, or not at all for devices that
        others hold where `wait` is False; raises `SliceError`, which says what there is, and who holds it.
        """
        self._check_open()
        axes = checked_mesh(n, mesh)
        with self.core.lock:
            state = self.core.request_slice(
                n,
                axes,
                island=island or "",
                platform=platform or "",
                shared=shared,
                memory_bytes=memory or 0,
                wait=wait,
            )
            self.connection.send([state.request])
        try:
            answered = state.answered.wait(timeout_s)
        except KeyboardInterrupt:
            self._release_slice(state)
            raise
        if not answered:
            self._release_slice(state)
            there = ", ".join(f"{i.name} ({i.device_count} {i.platform} devices)" for i in self.islands())
            raise SliceError(f"no {n} devices became free within {timeout_s} s; there is: {there or 'no island'}")
        state.answered.result()
        return Slice(self, state)

    def _release_slice(self, state: SliceState) -> None:
        with self.core.lock:
            self.connection.send(self.core.release_slice(state))

    def _cancel(self, run: Run) -> None:
        with self.core.lock:
            self.connection.send([m.CancelRun(run.number)])

    def _cancel_up_to(self, run: Run) -> None:
        """Cancel a run and all before it that are not over: it stands behind them in line."""
        with self.core.lock:
            self.connection.send([m.CancelRun(number) for number in self.core.runs if number <= run.number])

    # -- data ---------------------------------------------------------------------------------------------------------

    def put(self, tree: Any, slice: Slice, specs: Any = None) -> Any:
        """Arrays on `slice` for the arrays and numbers of a pytree: straight to the executors. Returns at once.

        `specs` is a `PartitionSpec`, or a pytree of them that is a prefix of `tree`; None means replicated. An array
        that lives on a slice already moves from there without passing through the client.
        """
        self._check_open()
        leaves, structure = jax.tree.flatten(tree)
        return structure.unflatten(
            [self._put_leaf(leaf, slice, spec) for leaf, spec in zip(leaves, _spread(specs, tree), strict=True)]
        )

    def _put_leaf(self, leaf: Any, slice: Slice, spec: PartitionSpec) -> Array:
        if isinstance(leaf, Array):
            from pathway.client.operators import moved

            array: Array = moved(leaf, slice, spec)
            return array
        if slice.client is not self:
            raise ProgramError("this slice belongs to another connection")
        aval = aval_of(leaf)
        mesh = tuple(slice.mesh.items())
        check_spec(spec, aval.shape, mesh, f"slice {slice.number}", "specs of put")
        binding = slice.binding(DEFAULT_SLICE_TIMEOUT_S)
        kind = binding.kind(aval, sharding_of(spec, mesh, len(aval.shape)))
        return self._put_value(kind, physical_value(leaf, aval))

    def _put_value(self, kind: ArrayKind, value: np.ndarray[Any, Any]) -> Array:
        """A new buffer of this kind with this physical value."""
        bound = kind.binding.bound
        inline = value.tobytes() if value.nbytes <= m.INLINE_BYTES else None
        source = ""
        if inline is None:
            from pathway.dataflow.jaxprs import calling_line

            source = calling_line()
        with self.core.lock:
            buffer = self.core.new_buffer()
            message = m.PutBuffer(buffer, bound.island, bound.incarnation, kind.physical, inline, source)
            self.connection.send([*self.core.take_releases(), message])
        array = Array(kind, buffer)
        if inline is None:
            self.connection.peers.put(kind, buffer, value)
        return array

    def get(self, tree: Any) -> Any:
        """The pytree with the value of every `pathway.Array` in its place (numpy arrays, read-only). Waits for them,
        and raises what went wrong."""
        return get(tree)

    def _fetch(self, kind: ArrayKind, buffer: int, run: Run | None) -> ArrayFetch:
        fetch = self.connection.peers.fetch(kind, buffer)
        if run is not None and (not run.done or run.error is not None):

            def run_ended() -> None:
                if run.error is not None:
                    fetch.fail(run.error)

            run.add_waiter(run_ended)
        return fetch

    def _flush_releases_soon(self) -> None:
        self.connection.flush_releases_soon()

    # -- its end ------------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or its scheduler is lost."""
        return self.core.lost is not None

    def close(self) -> None:
        """End the session: its arrays are freed, its slices given back. Whoever waits for a result gets
        `DisconnectedError`."""
        self.connection.close()
        _open_clients.discard(self)

    def _check_open(self) -> None:
        if self.core.lost is not None:
            raise to_exception(self.core.lost)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"closed: {self.core.lost.message}" if self.core.lost is not None else f"session {self.core.session}"
        return f"<pathway.Client {self.address} {state}>"


def get(tree: Any) -> Any:
    """See `Client.get`. Arrays may be of several connections."""
    leaves, structure = jax.tree.flatten(tree)
    for leaf in leaves:
        if isinstance(leaf, Array):
            leaf.copy_to_host_async()
    try:
        return structure.unflatten([_value(leaf) if isinstance(leaf, Array) else leaf for leaf in leaves])
    except KeyboardInterrupt:
        for leaf in leaves:
            if isinstance(leaf, Array):
                leaf._interrupted()
        raise


def _value(array: Array) -> Any:
    return logical_value(array._physical_value(), array._kind.aval)


def sharding_of(spec: PartitionSpec, mesh: tuple[tuple[str, int], ...], rank: int) -> Sharding:
    """The sharding that a spec means on a mesh."""
    axes = tuple(() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec)
    return Sharding(mesh, axes).of_rank(rank)


def _spread(specs: Any, tree: Any) -> Sequence[PartitionSpec]:
    """A spec for every leaf of `tree`, of which `specs` is a prefix."""

    def is_spec(value: Any) -> bool:
        return value is None or isinstance(value, PartitionSpec)

    spread: list[PartitionSpec] = []
    try:
        jax.tree.map(
            lambda spec, below: spread.extend(
                [PartitionSpec() if spec is None else spec] * len(jax.tree.leaves(below))
            ),
            specs,
            tree,
            is_leaf=is_spec,
        )
    except ValueError as error:
        raise ProgramError(f"specs are no prefix of the pytree that is put: {error}") from error
    return spread


def open_clients() -> list[Client]:
    """Every client of this process that is not closed."""
    return list(_open_clients)


def close_after_fork() -> None:
    """In a forked child: the sockets are the parent's. Whoever uses a client of the parent's here is told so."""
    error = ErrorInfo(
        "DisconnectedError",
        "this process was forked from one that is connected; a connection cannot be shared with a forked child: "
        "call pathway.connect() in the child, or start it with multiprocessing's spawn method",
    )
    for client in open_clients():
        client.connection.abandon(error)


os.register_at_fork(after_in_child=close_after_fork)
