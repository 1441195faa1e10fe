"""What the client knows of where things are: bindings of slices, kinds of arrays, runs. No sockets, no JAX arrays.

A *binding* is one slice on one set of devices of one incarnation of an island. When the island is lost the binding is
lost for good, and with it every array on it; when the island returns, the slice gets another binding. A *kind* is all
that arrays of one aval and sharding on one binding share; kinds are interned, so that "has this program seen such
arguments" is a comparison of identities.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pathway.client.pending import Pending
from pathway.dataflow.graph import BoundSlice
from pathway.dataflow.layout import Aval, Layout, Region, Sharding, numpy_dtype, shard_regions
from pathway.errors import ErrorInfo


class Run(Pending):
    """One execution of a plan, under way until the scheduler says that it ended."""

    __slots__ = ("number", "plan", "started_s")

    def __init__(self, number: int, plan: int, started_s: float) -> None:
        super().__init__()
        self.number = number
        self.plan = plan
        self.started_s = started_s


class Binding:
    """A slice on devices. `error` is set once nothing there can be used any more: the slice was released, or its island
    is lost (`lost`)."""

    __slots__ = ("bound", "core", "error", "kinds", "lost", "owner")

    def __init__(self, core: Any, owner: Any, bound: BoundSlice) -> None:
        self.core = core  # the ClientCore: tells connections apart, and takes releases
        self.owner = owner  # the SliceState
        self.bound = bound
        self.error: ErrorInfo | None = None
        self.lost = False
        self.kinds: dict[tuple[Aval, Sharding], ArrayKind] = {}

    def kind(self, aval: Aval, sharding: Sharding) -> ArrayKind:
        """The one kind for arrays of this aval and sharding here."""
        key = (aval, sharding.of_rank(len(aval.shape)))
        kind = self.kinds.get(key)
        if kind is None:  # two threads may both get here: setdefault keeps the kind one
            kind = self.kinds.setdefault(key, ArrayKind(self, *key))
        return kind

    def host_of(self, device: int) -> int:
        """Which host of the island has the device."""
        return device // self.bound.devices_per_host

    def __repr__(self) -> str:
        bound = self.bound
        state = "lost" if self.error is not None else "bound"
        return f"<slice {bound.slice} {state} to {bound.island}#{bound.incarnation} devices {list(bound.devices)}>"


class ArrayKind:
    """What arrays share: aval, sharding, home. Compared by identity; hashing it is what a cached call pays for."""

    __slots__ = (
        "aval",
        "binding",
        "copies",
        "jax_dtype",
        "layout",
        "named_sharding",
        "nbytes",
        "numpy_dtype",
        "physical",
        "shape",
        "sharding",
        "sources",
    )

    def __init__(
        self, binding: Binding, aval: Aval, sharding: Sharding, devices: tuple[int, ...] = (), memory: str = ""
    ) -> None:
        """`devices`: not all of the binding's, in mesh order, and `memory`, for arrays of the IFRT proxy."""
        self.binding = binding
        self.aval = aval
        self.sharding = sharding
        self.layout = Layout(aval, self.sharding, devices or binding.bound.devices, memory)
        self.shape = aval.shape
        self.physical = self.layout.physical
        self.nbytes = self.physical.aval.nbytes
        self.jax_dtype: Any = None  # these two are JAX's, and made when first asked for
        self.named_sharding: Any = None
        self.numpy_dtype: np.dtype[Any] = numpy_dtype(self.physical.aval.dtype)
        self.sources: tuple[tuple[int, tuple[int, ...]], ...] | None = None
        self.copies: tuple[tuple[Region, tuple[int, ...]], ...] | None = None

    def regions(self) -> tuple[tuple[Region, tuple[int, ...]], ...]:
        """Every distinct non-empty region of the physical array, with the devices that hold it, in mesh order."""
        if self.copies is None:
            holders: dict[Region, list[int]] = {}
            physical = self.physical
            regions = shard_regions(physical.aval.shape, physical.sharding)
            for device, region in zip(physical.devices, regions, strict=True):
                if all(stop > start for start, stop in region):
                    holders.setdefault(region, []).append(device)
            self.copies = tuple((region, tuple(devices)) for region, devices in holders.items())
        return self.copies

    def fetch_from(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Which hosts to ask for which devices' shards, so that each region comes once, and hosts share the work."""
        if self.sources is None:
            by_host: dict[int, list[int]] = {}
            for _, devices in self.regions():
                hosts = {self.binding.host_of(device): device for device in reversed(devices)}
                host = min(hosts, key=lambda host: len(by_host.get(host, ())))
                by_host.setdefault(host, []).append(hosts[host])
            self.sources = tuple((host, tuple(devices)) for host, devices in by_host.items())
        return self.sources
