"""`pathway.Slice`: virtual devices with a mesh, bound by the scheduler to devices of one island."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pathway.client.bindings import Binding
from pathway.client.core import SliceState
from pathway.dataflow.graph import SliceShape
from pathway.errors import SliceError, to_exception

if TYPE_CHECKING:
    from pathway.client.client import Client

DEFAULT_AXIS = "data"
"""The one axis of a slice that was asked for without a mesh."""

_live: weakref.WeakValueDictionary[int, Slice] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Device:
    """One accelerator of a cluster: `index` is its number within the island, `host` the host that has it."""

    island: str
    index: int
    host: int
    platform: str
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.island}:{self.index}"


@dataclass(frozen=True)
class Island:
    """Hosts joined by one XLA runtime and a fast interconnect: what is gang-scheduled, and what fails, as one."""

    name: str
    incarnation: int
    platform: str
    hosts: int
    devices_per_host: int
    device_kind: str = ""

    @property
    def device_count(self) -> int:
        """How many devices its hosts have together."""
        return self.hosts * self.devices_per_host

    @property
    def devices(self) -> tuple[Device, ...]:
        """All its devices, host by host."""
        per_host = self.devices_per_host
        return tuple(
            Device(self.name, index, index // per_host, self.platform, self.device_kind)
            for index in range(self.device_count)
        )


class Slice:
    """Devices of one island in a mesh. Get one from `pathway.slice`; give it back with `release`, or leave a `with`."""

    def __init__(self, client: Client, state: SliceState) -> None:
        self.client = client
        self._state = state
        state.handle = self
        _live[state.number] = self

    @property
    def number(self) -> int:
        """Its number, unique in this process."""
        return self._state.number

    @property
    def mesh(self) -> dict[str, int]:
        """Axis names with their sizes, in order."""
        return dict(self._state.mesh)

    @property
    def size(self) -> int:
        """The number of devices."""
        return self._state.request.devices

    @property
    def island(self) -> str:
        """The island that it is bound to."""
        return self._bound().bound.island

    @property
    def incarnation(self) -> int:
        """The incarnation of the island that it is bound to."""
        return self._bound().bound.incarnation

    @property
    def platform(self) -> str:
        """The platform of its devices: cpu, cuda, tpu, ..."""
        return self._bound().bound.platform

    @property
    def devices(self) -> tuple[Device, ...]:
        """Its devices, in mesh order (row-major)."""
        binding = self._bound()
        island = {island.name: island for island in self.client.islands()}.get(binding.bound.island)
        kind = island.device_kind if island is not None else ""
        return tuple(
            Device(binding.bound.island, index, binding.host_of(index), binding.bound.platform, kind)
            for index in binding.bound.devices
        )

    @property
    def abstract_mesh(self) -> Any:
        """The mesh without devices, for `with_sharding_constraint` and `shard_map` in a stage's function."""
        from pathway.dataflow.placed import abstract_mesh

        return abstract_mesh(self.shape_for_graph)

    @property
    def shape_for_graph(self) -> SliceShape:
        """What a program's graph knows of it."""
        return SliceShape(self.number, self._state.mesh, self._bound().bound.platform)

    @property
    def is_released(self) -> bool:
        """Whether it was given back."""
        return self._state.released

    def release(self) -> None:
        """Give the devices back. Arrays on them can no longer be used, and are freed as you drop them."""
        self.client._release_slice(self._state)
        _live.pop(self.number, None)

    def binding(self, timeout_s: float) -> Binding:
        """Where it is bound now. While its island is lost, waits until it is bound again; raises the cause after
        `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            changed = self._state.bound_again
            binding = self._bound()
            if binding.error is None:
                return binding
            if not changed.wait(deadline - time.monotonic()):
                raise to_exception(binding.error)

    def _bound(self) -> Binding:
        if self._state.released or self._state.binding is None:
            raise SliceError(f"slice {self.number} was released")
        if self.client.core.lost is not None:
            raise to_exception(self.client.core.lost)
        return self._state.binding

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        mesh = ", ".join(f"{axis}={size}" for axis, size in self._state.mesh)
        binding = self._state.binding
        if self._state.released or binding is None:
            where = "released"
        elif binding.error is not None:
            where = f"on {binding.bound.island}, lost"
        else:
            where = f"on {binding.bound.island} devices {list(binding.bound.devices)}"
        return f"<pathway.Slice {self.number} {{{mesh}}} {where}>"


def live_slices() -> dict[int, Slice]:
    """Every slice of this process that is bound and not released, by number."""
    return {
        number: handle
        for number, handle in list(_live.items())
        if not handle.is_released and handle.client.core.lost is None
    }


def checked_mesh(devices: int, mesh: Mapping[str, int] | None) -> tuple[tuple[str, int], ...]:
    """The mesh of a slice of so many devices, as it travels. Raises `SliceError`."""
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise SliceError(f"a slice has a positive number of devices, not {devices!r}")
    if mesh is None:
        return ((DEFAULT_AXIS, devices),)
    axes = tuple(mesh.items())
    for axis, size in axes:
        if not isinstance(axis, str) or not axis:
            raise SliceError(f"a mesh axis has a name, and not {axis!r}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise SliceError(f"mesh axis {axis!r} has a positive size, and not {size!r}")
    total = math.prod(size for _, size in axes)
    if total != devices:
        raise SliceError(f"the mesh {dict(axes)} is for {total} devices, but the slice has {devices}")
    return axes
