"""The cluster as one proxied session sees it: a session of the scheduler, a shared slice of every island, and devices
numbered from 0 over the islands in the order of their names.

Invariants
  K-1  A session's devices never change. Of an island that is lost and comes back they are the same devices; work that
       names them fails with the island's loss until then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from pathway.client.bindings import Binding
from pathway.client.connection import Connection
from pathway.client.core import SliceState
from pathway.proxy.specs import DEFAULT_MEMORY
from pathway.proxy.status import Code, StatusError, invalid, of_info
from pathway.transport import messages as m
from pathway.transport.security import Identity

DEVICES_TIMEOUT_S = 20.0
"""How long a session waits for islands to form, and for their devices."""

MEMORIES = {"cpu": (DEFAULT_MEMORY, "pinned_host", "unpinned_host")}
"""The kinds of memory that each device has, the default one first; elsewhere the first two of them."""


@dataclass(eq=False)
class ClusterIsland:
    """One island, and the numbers of its devices: `first` and the ones after it. `number` is its slice_index."""

    name: str
    number: int
    first: int
    devices: int
    devices_per_host: int
    platform: str
    device_kind: str
    slice: SliceState

    def binding(self) -> Binding:
        """Where its devices are now. Raises DATA_LOSS while it is lost."""
        binding = self.slice.binding
        if binding is None:
            raise StatusError(Code.UNAVAILABLE, f"island {self.name} is not formed")
        if binding.error is not None:
            raise of_info(binding.error)
        return binding

    @property
    def memories(self) -> tuple[str, ...]:
        return MEMORIES.get(self.platform, MEMORIES["cpu"][:2])


class ClusterView:
    """A connection to the scheduler for one proxied session. Close it."""

    def __init__(self, address: str, name: str, identity: Identity | None, connect_timeout_s: float = 10.0) -> None:
        self.connection = Connection(address, name, connect_timeout_s, identity)
        self.connection.open()
        self.core = self.connection.core
        try:
            self.islands = self._take_slices()
        except BaseException:
            self.close()
            raise
        self.island_of = tuple(island for island in self.islands for _ in range(island.devices))

    def _take_slices(self) -> tuple[ClusterIsland, ...]:
        deadline = time.monotonic() + DEVICES_TIMEOUT_S
        self.core.directory_known.wait(DEVICES_TIMEOUT_S)
        while not self.core.islands and time.monotonic() < deadline and self.core.lost is None:
            time.sleep(0.05)
        entries = sorted(self.core.islands.values(), key=lambda entry: entry.island)
        asked = []
        with self.core.lock:
            for entry in entries:
                devices = len(entry.hosts) * entry.devices_per_host
                state = self.core.request_slice(devices, (("device", devices),), island=entry.island, shared=True)
                self.connection.send([state.request])
                asked.append((entry, devices, state))
        islands: list[ClusterIsland] = []
        refused = []
        first = 0
        for entry, devices, state in asked:
            if not state.answered.wait(max(0.0, deadline - time.monotonic())) or state.answered.error is not None:
                refused.append(state.answered.error.message if state.answered.error else "its devices are not free")
                with self.core.lock:
                    self.connection.send(self.core.release_slice(state))
                continue
            islands.append(
                ClusterIsland(
                    entry.island, len(islands), first, devices, entry.devices_per_host,
                    entry.platform, entry.device_kind, state,
                )
            )  # fmt: skip
            first += devices
        if not islands:
            if self.core.lost is not None:
                raise of_info(self.core.lost)
            raise StatusError(
                Code.UNAVAILABLE, f"no island's devices can be had: {'; '.join(refused) or 'none formed'}"
            )
        return tuple(islands)

    def close(self) -> None:
        """End the session: all that it has on executors is freed."""
        self.connection.close("the proxied client has gone")

    # -- devices -----------------------------------------------------------------------------------------------------

    def locate(self, devices: tuple[int, ...], what: str) -> tuple[ClusterIsland, tuple[int, ...]]:
        """The island of devices, and their indices there. Raises INVALID_ARGUMENT unless they are of one."""
        if not devices:
            raise invalid(f"{what} names no devices")
        if any(not 0 <= device < len(self.island_of) for device in devices):
            raise invalid(f"{what} names a device that does not exist: {devices}")
        islands = {self.island_of[device].number: self.island_of[device] for device in devices}
        if len(islands) > 1:
            names = ", ".join(island.name for island in islands.values())
            raise invalid(
                f"{what} is over devices of several islands ({names}), which no XLA program can span: use one mesh for "
                "the devices of each slice_index, and move arrays between them with jax.device_put"
            )
        island = next(iter(islands.values()))
        if len(set(devices)) != len(devices):
            raise invalid(f"{what} names a device twice: {devices}")
        return island, tuple(device - island.first for device in devices)

    def default_devices(self, count: int) -> tuple[int, ...]:
        """Devices for a program that only says how many it needs."""
        for island in self.islands:
            if island.devices >= count:
                return tuple(range(island.first, island.first + count))
        raise invalid(f"no island has {count} devices")

    # -- talking to executors ------------------------------------------------------------------------------------------

    def host_addresses(self, island: ClusterIsland) -> tuple[str, ...]:
        """Where the executors of an island listen."""
        bound = island.binding().bound
        entry = self.core.islands.get(bound.island)
        if entry is None or entry.incarnation != bound.incarnation:
            raise StatusError(Code.DATA_LOSS, f"island {island.name} is lost")
        return entry.hosts

    def send(self, *messages: m.Message) -> None:
        """To the scheduler, behind what was sent before."""
        core = self.core
        with core.lock:
            if core.lost is not None:
                raise of_info(core.lost)
            self.connection.send([*core.take_releases(), *messages])

    # -- what the client is told ---------------------------------------------------------------------------------------

    def describe(self, response: Any, session_id: int, version: str) -> None:
        """Fill an InitResponse."""
        platform = self.islands[0].platform
        response.session_id = session_id
        response.platform_name = platform
        response.platform_version = version
        response.platform_id = _fingerprint(platform)
        response.runtime_type = "pathway"
        response.process_index = 0
        response.client_attributes.attributes["serialize_with_sdy"].bool_value = True  # asked for by jax.export's call
        memory = 0
        for island in self.islands:
            for index in range(island.devices):
                number = island.first + index
                device = response.all_devices.add()
                device.id = device.local_device_id = device.local_hardware_id = number
                device.platform_name = island.platform
                device.device_kind = island.device_kind
                device.default_memory_id = memory
                host = index // island.devices_per_host
                device.debug_string = device.to_string = (
                    f"pathway device({number}, {island.platform}, island={island.name}, index={index}, host={host})"
                )
                device.attributes.attributes["slice_index"].int64_value = island.number
                device.attributes.attributes["island"].string_value = island.name.encode()
                for kind, name in enumerate(island.memories):
                    made = response.memories.add()
                    made.id = memory
                    made.memory_space_kind = name
                    made.kind_id = kind
                    made.device_ids.append(number)
                    made.debug_string = made.to_string = f"{name} memory of device {number}"
                    device.memory_ids.append(memory)
                    memory += 1
                response.primary_device_ids.append(number)
                response.addressable_device_ids.append(number)


def _fingerprint(platform: str) -> int:
    """A number for a platform: clients compare it only with itself."""
    number = 0xCBF29CE484222325
    for byte in platform.encode():
        number = (number ^ byte) * 0x100000001B3 % (1 << 64)
    return number
