"""Waiting in trio for a ZeroMQ socket without losing an edge.

`zmq.FD` is edge-triggered in disguise: it becomes readable when the socket has internal commands to process, and any
call on the socket, sends included, may process them. Hence the one rule of this package (T-1): *before a task waits, it
has tried to receive after the last call that anybody made on the socket*. The task that receives keeps it by itself;
whoever else sends while that task is parked looks at `zmq.EVENTS` afterwards and wakes it if something has come.

Several descriptors are waited for as one through an epoll descriptor of their own: the socket, its monitor, and an
eventfd through which any thread may wake the waiting task. Rejected: one trio task per descriptor (three wake-ups for
one message), and `trio.lowlevel.notify_closing` (not callable from other threads).
"""

from __future__ import annotations

import os
import select

import trio


class Readiness:
    """A set of descriptors, and a bell, that one trio task waits for."""

    def __init__(self, *descriptors: int) -> None:
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        for descriptor in (*descriptors, self._bell):
            self._epoll.register(descriptor, select.EPOLLIN)
        self._rung = False
        self.parked = False
        """Whether a task is waiting right now."""
        self.ready: list[int] = []
        """The descriptors that were readable at the last `look`."""

    async def wait(self) -> None:
        """Until a descriptor is readable or the bell was rung since the last `look`, and look. May return without
        cause. Raises `trio.ClosedResourceError` where it is closed meanwhile."""
        self.parked = True
        try:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
        finally:
            self.parked = False
        if self._epoll.closed:  # by another task, after something had come and before this one went on
            raise trio.ClosedResourceError("the link is closed")
        self.look()

    def look(self) -> None:
        """See which descriptors are readable, and silence the bell."""
        self.ready = [descriptor for descriptor, _ in self._epoll.poll(0)]
        if self._bell in self.ready:
            os.eventfd_read(self._bell)
        # After the read: a ring in between is answered by the caller, who looks at the socket next, and a later one is
        # written. The other way round its mark could stay without the bell being readable: lost for good.
        self._rung = False

    def ignore(self, descriptor: int) -> None:
        """Do not wake the waiting task for `descriptor`, until `heed`."""
        self._epoll.modify(descriptor, 0)

    def heed(self, descriptor: int) -> None:
        """Wake the waiting task for `descriptor` again, also for what has come meanwhile."""
        self._epoll.modify(descriptor, select.EPOLLIN)

    def wake(self) -> None:
        """Ring the bell. From any thread."""
        if not self._rung:
            self._rung = True
            os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        if self.parked:
            trio.lowlevel.notify_closing(self._epoll.fileno())
        self._epoll.close()
        os.close(self._bell)
