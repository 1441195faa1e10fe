"""Subject: the least that moving bytes between two processes costs here, in two processes.

  socket  ZeroMQ over TCP loopback in frames of 1 MiB: out of one array without a copy, into another that is there
  memcpy  one array into another, in the sending process, both warm

A transfer is over when the receiver has said so.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import zmq

from bench.subject import serve

FRAME_BYTES = 1 << 20
ACKNOWLEDGED = b"here"


def send(port: int) -> None:
    socket = _socket(zmq.PAIR)
    socket.connect(f"tcp://127.0.0.1:{port}")

    def transfers(nbytes: int, count: int) -> float:
        """Seconds for `count` transfers, one after the other."""
        frames = _frames(np.ones(nbytes, np.uint8))
        began = time.perf_counter()
        for _ in range(count):
            for frame in frames:
                socket.send(frame, copy=False)
            socket.recv()
        return time.perf_counter() - began

    def memcpy(nbytes: int, count: int) -> float:
        """Seconds for `count` copies; the receiver sleeps meanwhile."""
        source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        began = time.perf_counter()
        for _ in range(count):
            np.copyto(target, source)
        return time.perf_counter() - began

    serve({"socket": transfers, "memcpy": memcpy})


def receive(port: int) -> None:
    socket = _socket(zmq.PAIR)
    socket.bind(f"tcp://127.0.0.1:{port}")

    def transfers(nbytes: int, count: int) -> None:
        frames = _frames(np.ones(nbytes, np.uint8))
        for _ in range(count):
            for frame in frames:
                frame[:] = np.frombuffer(socket.recv(copy=False).buffer, np.uint8)
            socket.send(ACKNOWLEDGED)

    serve({"socket": transfers, "memcpy": lambda nbytes, count: None})


def _socket(kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


def _frames(array: np.ndarray) -> list[Any]:
    return [array[start : start + FRAME_BYTES] for start in range(0, len(array), FRAME_BYTES)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("send", "receive"))
    parser.add_argument("port", type=int)
    options = parser.parse_args()
    {"send": send, "receive": receive}[options.role](options.port)


if __name__ == "__main__":
    main()
