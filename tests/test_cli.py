"""The `pathway` command as users meet it: help, versions, errors and exit codes, status."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pathway.cli import main
from pathway.cli.status_view import render
from pathway.version import __version__

PATHWAY = [sys.executable, "-m", "pathway"]
COMMANDS = ("scheduler", "worker", "up", "status", "keygen")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environment}
    return subprocess.run([*PATHWAY, *arguments], capture_output=True, text=True, timeout=60, env=environment)


def unused_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


def test_version() -> None:
    assert run("--version").stdout.startswith(f"pathway {__version__}")


@pytest.mark.parametrize("command", [(), *((command,) for command in COMMANDS)], ids=str)
def test_help_ends_with_an_example(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    example = capsys.readouterr().out.split("\n\n")[-1]
    assert example.startswith("example: pathway " + "".join(command))


def test_help_is_fast_and_imports_nothing_slow() -> None:
    code = (
        "import sys\n"
        "from pathway.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "slow = {'jax', 'numpy', 'trio', 'zmq', 'rich', 'structlog'} & sys.modules.keys()\n"
        "sys.exit(str(slow) if slow else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [(), ("nonsense",), ("status", "--nonsense"), ("worker",)], ids=str)
def test_wrong_usage_is_two(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: pathway" in capsys.readouterr().err


def test_status_where_nobody_listens_is_one_and_at_once() -> None:
    address = f"tcp://127.0.0.1:{unused_port()}"
    started = time.monotonic()
    done = run("status", "--address", address)
    assert time.monotonic() - started < 5
    assert done.returncode == 1
    assert address in done.stderr
    assert "nobody listens" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_setting_is_two(tmp_path: Path) -> None:
    done = run("status", PATHWAY_CONNECT_TIMEOUT_S="soon")
    assert done.returncode == 2
    assert "PATHWAY_CONNECT_TIMEOUT_S" in done.stderr


def test_a_refused_worker_is_two_and_says_why() -> None:
    from tests.test_daemon import scheduler

    with scheduler() as (_, address):
        flags = ("--scheduler", address, "--island", "east", "--hosts", "2", "--host-index", "5")
        done = run("worker", *flags)
        assert done.returncode == 2
        assert "host index 5" in done.stderr


def test_keygen(tmp_path: Path) -> None:
    assert run("keygen", str(tmp_path)).returncode == 0
    assert {"scheduler.key", "worker.key_secret", "allowed_keys"} <= {path.name for path in tmp_path.iterdir()}
    again = run("keygen", str(tmp_path))
    assert again.returncode == 2
    assert "exists" in again.stderr
    one = run("keygen", str(tmp_path), "--name", "alice", "--role", "admin")
    assert one.stdout.splitlines()[-1].split()[1:] == ["admin", "alice"]


STATUS: dict[str, Any] = {
    "version": "0.1.0",
    "uptime_s": 75.0,
    "state": "running",
    "islands": [
        {
            "island": "east",
            "state": "formed",
            "reason": "",
            "incarnation": 2,
            "platform": "cpu",
            "device_kind": "",
            "transfer": "pathway",
            "devices": 8,
            "devices_per_host": 4,
            "devices_held": 6,
            "hosts": [{"host": 0, "hostname": "node", "pid": 11, "executor_pid": 0, "executor": ""}],
            "losses": 1,
            "last_loss": "signal SIGKILL",
            "in_flight": 3,
            "queued": 1,
            "credits": 16,
            "damaged_transfers": 7,
            "buffers": 2,
            "bytes": 3 * 1024 * 1024,
            "memory_limit_bytes": 16 * 1024**3,
            "memory_used_bytes": 3 * 1024**3,
            "spilled_bytes": 5 * 1024 * 1024,
            "spills": 7,
            "busy_us": 0,
        }
    ],
    "sessions": [
        {
            "session": "ab12",
            "name": "alice[bold]\x1b[2J",
            "connected": False,
            "age_s": 4000.0,
            "slices": 1,
            "plans": 1,
            "runs": 1,
            "runs_submitted": 9,
            "buffers": 2,
            "bytes": 100,
        }
    ],
    "slices": [
        {
            "slice": 1,
            "session": "ab12",
            "island": "east",
            "devices": [0, 1, 2, 5],
            "mesh": {"data": 2, "model": 2},
            "shared": True,
            "reason": "",
        }
    ],
    "runs": 1,
    "computations": 1,
    "computation_bytes": 512,
    "waits": [{"what": "run 3", "reason": "waits for a credit", "on": "east", "since_s": 0.25}],
}


def test_the_status_as_tables() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render(STATUS))
    text = console.export_text()
    for part in (
        "1 min 15 s",
        "formed",
        "3/16",
        "3.0 MiB",
        "16.0 GiB",
        "5.0 MiB",
        "alice[bold]",
        "cut off",
        "1 h 6 min",
        "0-2,5",
        "data=2 x model=2",
        "damaged transfers",
    ):
        assert part in text
    assert "waits for a credit" in text
    assert "\x1b" not in text


def test_up_runs_a_cluster_until_ctrl_c_and_leaves_nothing() -> None:
    command = [*PATHWAY, "up", "--islands", "1", "--devices", "2", "--bind", "tcp://127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(5)]
        address = lines[1].strip()
        assert address.startswith("tcp://127.0.0.1:")
        assert "pathway.connect" in lines[2]
        status = json.loads(run("status", "--json", "--address", address).stdout)
        (island,) = status["islands"]
        assert (island["state"], island["devices"]) == ("formed", 2)
        assert run("status", PATHWAY_ADDRESS=address).stdout.count("island0") == 2
        (host,) = island["hosts"]
        process.send_signal(signal.SIGINT)
        assert process.wait(3) == 0
        for pid in (host["pid"], host["executor_pid"]):
            assert not Path(f"/proc/{pid}").exists()
    finally:
        process.kill()
        process.wait()
