"""The scheduler's process: address, port in use, open binds, memory, signals, garbage."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

from pathway.observe import fetch_status, observe
from pathway.transport.messages import Directory, Goodbye, HostJoined, Refused
from pathway.transport.sockets import Dealer, Delivery, PeerGone, hello

PATHWAY = [sys.executable, "-m", "pathway"]


@contextmanager
def scheduler(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [*PATHWAY, "scheduler", "--bind", "tcp://127.0.0.1:0", "--report-fd", str(writing), *flags],
        pass_fds=[writing],
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    try:
        with os.fdopen(reading) as report:
            yield process, report.readline().strip()
    finally:
        process.kill()
        process.communicate()


def test_it_reports_its_address_and_status() -> None:
    with scheduler() as (_, address):
        status = trio.run(fetch_status, address, 5.0)
        assert status["state"] == "running"
        assert status["islands"] == []


def test_the_address_file_holds_the_address_while_it_runs(tmp_path: Path) -> None:
    file = tmp_path / "address"
    with scheduler("--address-file", str(file)) as (process, address):
        assert file.read_text() == address + "\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
        assert list(tmp_path.iterdir()) == []


def test_it_imports_no_jax_and_stays_small() -> None:
    with scheduler() as (process, address):
        trio.run(fetch_status, address, 5.0)
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "jaxlib" not in maps
        status = Path(f"/proc/{process.pid}/status").read_text()
        rss_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        assert rss_kib < 80 * 1024, f"{rss_kib} KiB"
    modules = "import sys, pathway.sched.daemon, pathway.executor.supervisor, pathway.cli.commands, pathway.embedded; "
    code = modules + "sys.exit('jax' in sys.modules or 'jaxlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_signals_end_it_cleanly_and_peers_hear_of_it() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with scheduler() as (process, address):

            async def hear_goodbye(address: str = address, number: int = number, process: Any = process) -> None:
                dealer, _ = await Dealer.open(address, hello("client"))
                heard: list[Any] = []
                process.send_signal(number)
                with trio.fail_after(5):
                    while not any(isinstance(item, PeerGone) for item in heard):
                        for item in await dealer.receive_batch():
                            heard += item.messages if isinstance(item, Delivery) else [item]
                assert [type(message) for message in heard if not isinstance(message, Directory)] == [Goodbye, PeerGone]

            trio.run(hear_goodbye)
            assert process.wait(5) == 0


def test_a_second_scheduler_on_the_same_port_says_so() -> None:
    with scheduler() as (_, address):
        second = subprocess.run([*PATHWAY, "scheduler", "--bind", address], capture_output=True, text=True, timeout=20)
        assert second.returncode == 2
        assert address in second.stderr
        assert "in use" in second.stderr
        assert "Traceback" not in second.stderr


def test_an_open_bind_without_keys_is_refused_unless_insecure() -> None:
    command = [*PATHWAY, "scheduler", "--bind", "tcp://0.0.0.0:0"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert refused.returncode == 2
    assert "--insecure" in refused.stderr
    with scheduler("--bind", "tcp://0.0.0.0:0", "--insecure") as (_, address):
        assert address.startswith("tcp://0.0.0.0:")


def test_garbage_harms_nobody() -> None:
    with scheduler() as (_, address):

        async def main() -> None:
            async with observe(address, 5.0) as observer:
                await observer.status()
                port = int(address.rsplit(":", 1)[1])
                for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(10_000)):
                    with socket.create_connection(("127.0.0.1", port)) as raw:
                        raw.sendall(garbage)
                assert (await observer.status())["state"] == "running"

        trio.run(main)


def test_hosts_that_disagree_are_refused() -> None:
    def joined(host_index: int, hosts: int) -> HostJoined:
        return HostJoined("east", hosts, host_index, 4, "cpu", "node", 1, "127.0.0.1:5000")

    with scheduler() as (_, address):

        async def main() -> None:
            first, _ = await Dealer.open(address, hello("worker"))
            first.post(joined(0, 3))
            first.flush()
            second, _ = await Dealer.open(address, hello("worker"))
            second.post(joined(1, 2))
            second.flush()
            with trio.fail_after(5):
                (item, *_) = await second.receive_batch()
            assert isinstance(item, Delivery)
            assert isinstance(item.messages[0], Refused)
            assert "hosts: 2" in item.messages[0].reason
            first.close()
            second.close()

        trio.run(main)
