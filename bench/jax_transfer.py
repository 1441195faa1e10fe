"""Subject: `jax.experimental.transfer` between two processes, one CPU device each.

The process that pulls is the one whose answers count; the other has offered every array before the clock starts.
"""

from __future__ import annotations

import argparse
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from bench.subject import serve

ANY_PORT = "127.0.0.1:0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("pull", "offer"))
    parser.add_argument("meeting_point", type=pathlib.Path, help="a file through which the two find each other")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    device = jax.devices()[0]
    server = transfer.start_transfer_server(device.client, ANY_PORT, [ANY_PORT])
    {"pull": pull, "offer": offer}[options.role](server, device, options.meeting_point)


def offer(server: transfer.TransferServer, device: jax.Device, meeting_point: pathlib.Path) -> None:
    written = meeting_point.with_suffix(".new")
    written.write_text(server.address())
    written.rename(meeting_point)

    def prepare(first: int, nbytes: int, count: int) -> None:
        x = jax.device_put(np.ones(nbytes, np.uint8), device).block_until_ready()
        for uuid in range(first, first + count):
            server.await_pull(uuid, [x])

    serve({"prepare": prepare, "measure": lambda first, nbytes, count, at_once: None})


def pull(server: transfer.TransferServer, device: jax.Device, meeting_point: pathlib.Path) -> None:
    while not meeting_point.exists():
        time.sleep(0.05)
    connection = server.connect(meeting_point.read_text())
    sharding = SingleDeviceSharding(device)

    def measure(first: int, nbytes: int, count: int, at_once: bool) -> float:
        """Seconds for `count` transfers: all of them asked for before the first is waited for, or one by one."""
        wanted = [jax.ShapeDtypeStruct((nbytes,), jnp.uint8, sharding=sharding)]
        began = time.perf_counter()
        if at_once:
            jax.block_until_ready([connection.pull(uuid, wanted) for uuid in range(first, first + count)])
        else:
            for uuid in range(first, first + count):
                jax.block_until_ready(connection.pull(uuid, wanted))
        return time.perf_counter() - began

    serve({"prepare": lambda first, nbytes, count: None, "measure": measure})


if __name__ == "__main__":
    main()
