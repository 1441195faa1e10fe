"""The simulated workers of SimNet: supervisors that join an island and look after an executor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pathway.testing.sim_executor import SimExecutor
from pathway.transport import messages as m
from pathway.version import PROTOCOL_VERSION, __version__

if TYPE_CHECKING:
    from pathway.testing.simnet import Link, SimNet


class SimWorker:
    """A supervisor: joins its island, starts and ends its executor child, tells when it exits."""

    def __init__(self, net: SimNet, island: str, hosts: int, host_index: int, devices: int) -> None:
        self.net = net
        self.alive = True
        self.island, self.hosts, self.host_index, self.devices = island, hosts, host_index, devices
        self.scheduler: Link | None = None
        self.child: SimExecutor | None = None

    def start(self) -> None:
        if not self.alive:
            return
        self.scheduler = self.net.link(self, self.net.scheduler)
        self._say(m.Hello(PROTOCOL_VERSION, __version__, "worker"))
        where = f"{self.island}-{self.host_index}"
        self._say(m.HostJoined(self.island, self.hosts, self.host_index, self.devices, "cpu", where, 1, f"{where}:1"))
        self._beat(self.scheduler)

    def _say(self, message: m.Message) -> None:
        if self.scheduler is not None:
            self.scheduler.send(self, message)

    def _beat(self, link: Link) -> None:
        if self.alive and link is self.scheduler:
            if link.silent:  # nothing comes back: begin again after as long as the scheduler waits
                self.net.after(2.5, self._reconnect, link)
                return
            self._say(m.Ping(0))
            self.net.after(0.5, self._beat, link)

    def _reconnect(self, link: Link) -> None:
        if self.alive and link is self.scheduler:
            link.close("silent", by=self)
            self.start()

    def closed(self, link: Link, reason: str) -> None:
        if link is self.scheduler:
            self.scheduler = None
            self.net.after(0.05, self.start)

    def received(self, link: Link, message: m.Message) -> None:
        if link is not self.scheduler:
            return
        if isinstance(message, m.FormIsland):
            self.kill_child("another incarnation begins")
            self.child = SimExecutor(self.net, self, message)
            self.net.executors[self.child.address] = self.child
            self.net.after(0.05 + 0.1 * self.net.random.random(), self.child.start)
        elif (
            isinstance(message, m.StopExecutor)
            and self.child is not None
            and self.child.incarnation == message.incarnation
        ):
            self.kill_child("stopped")

    def kill_child(self, cause: str) -> None:
        child, self.child = self.child, None
        if child is not None:
            child.kill()
            exited = m.ExecutorExited(self.island, child.incarnation, self.host_index, cause)
            self.net.after(0.001, self._say, exited)

    def kill(self) -> None:
        """The worker is gone, and its child with it."""
        self.alive = False
        if self.child is not None:
            self.child.kill()
        if self.scheduler is not None:
            self.scheduler.close("connection reset", by=self)
