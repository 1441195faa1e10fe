"""The simulated devices of SimNet."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pathway.errors import ErrorInfo

if TYPE_CHECKING:
    from pathway.testing.sim_executor import SimExecutor
    from pathway.testing.simnet import SimNet


class SimDevices:
    """The devices of one incarnation of an island: a gang starts when it is at the head of every host's queue, so hosts
    that disagree about the order (O-1) stop for ever; they are found at once, though."""

    def __init__(self, net: SimNet, island: str, hosts: int) -> None:
        self.net = net
        self.island = island
        self._order: deque[tuple[int, int, int]] = deque()  # what some hosts have started, and others not yet
        self._first = 0  # the place of the first of them
        self._launched = [0] * hosts
        self._queues: list[deque[tuple[int, int, int]]] = [deque() for _ in range(hosts)]
        self.executors: dict[int, SimExecutor] = {}
        self._busy = False
        self._began_s = 0.0
        self.used_us: dict[tuple[int, int], float] = {}  # by (session, run), until it is asked for

    def launch(self, host: int, gang: tuple[int, int, int]) -> None:
        place = self._launched[host] - self._first
        self._launched[host] += 1
        if place == len(self._order):
            self._order.append(gang)
        elif self._order[place] != gang:
            self.net.fail(f"O-1: host {host} of {self.island} starts {gang} where others started {self._order[place]}")
        while self._order and min(self._launched) > self._first:
            self._order.popleft()
            self._first += 1
        self._queues[host].append(gang)
        self._go_on()

    def forget(self, session: int) -> None:
        for run in [run for run in self.used_us if run[0] == session]:
            del self.used_us[run]

    def _go_on(self) -> None:
        if not self._busy and all(self._queues):
            self._busy = True
            self._began_s = self.net.now
            self.net.after(self.net.gang_s(self._queues[0][0][0]), self._end)

    def _end(self) -> None:
        self._busy = False
        gang = self._queues[0][0]
        run = gang[:2]
        took_s = self.net.now - self._began_s
        if run in self.executors[0].runs:
            self.used_us[run] = self.used_us.get(run, 0.0) + took_s * 1e6
        self.net.gang_ran(self.island, run, self._began_s)
        error = None
        if self.net.random.random() < self.net.faults.gang_failure:
            error = ErrorInfo("ExecutionError", f"gang {gang} failed by chance", island=self.island)
        for queue in self._queues:
            queue.popleft()
        for host in list(self.executors):
            if self.executors[host].alive:
                self.executors[host].gang_ended(gang, error)
        self._go_on()
