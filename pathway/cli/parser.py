"""What the command line takes. Imports nothing that is slow: `pathway --help` answers at once.

Flags that are settings have no default here: what is not given comes from the environment, pathway.toml, or the default
(`config`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pathway.version import PROTOCOL_VERSION, __version__


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pathway",
        description="One Python process drives every accelerator of a cluster with plain JAX.",
        epilog="example: pathway up     (then, in a program: pathway.connect('tcp://127.0.0.1:7777'))",
    )
    parser.add_argument("--version", action="version", version=f"pathway {__version__} (protocol {PROTOCOL_VERSION})")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _scheduler(commands)
    _worker(commands)
    _up(commands)
    _proxy(commands)
    _status(commands)
    _orders(commands)
    _keygen(commands)
    commands.add_parser("train", help="train a language model over islands", add_help=False)  # has its own flags
    commands.add_parser("demo", help="train a digit classifier over two islands", add_help=False)  # has its own flags
    return parser


def _scheduler(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "scheduler",
        help="run the scheduler of a cluster",
        description="Run the scheduler: it owns the cluster, shares it between clients, and starts work on islands. "
        "SIGTERM and Ctrl-C let the runs that it has end, and then stop it; a second one stops it at once.",
        epilog="example: pathway scheduler --bind tcp://127.0.0.1:7777",
    )
    parser.add_argument(
        "--bind", metavar="ADDRESS", help="where to listen; port 0 takes a free one (tcp://127.0.0.1:7777)"
    )
    parser.add_argument("--listen-fd", type=int, default=-1, metavar="N", help="a socket that listens there already")
    parser.add_argument(
        "--address-file", type=Path, metavar="FILE", help="write the real address there once it listens"
    )
    parser.add_argument("--report-fd", type=int, default=-1, metavar="N", help="write the address to this descriptor")
    parser.add_argument(
        "--lease-s", type=float, metavar="S", help="how long a session outlives its client's silence (10)"
    )
    parser.add_argument("--state-dir", metavar="DIR", help="remember there what must outlive this process")
    parser.add_argument("--drain-s", type=float, metavar="S", help="how long to wait for runs when told to stop (10)")
    parser.add_argument(
        "--policy", metavar="P", help="whose run goes next: fair, fifo, priority, or your own as module:object (fair)"
    )
    parser.add_argument(
        "--credits-per-island", type=int, metavar="K", help="runs in flight on an island past the scheduler (16)"
    )
    _spill(parser)
    _insecure(parser)
    parser.add_argument("--allowed-keys", metavar="FILE", help="the list of keys that may connect")
    _common(parser)
    _child(parser)


def _worker(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "worker",
        help="offer this host's devices to an island",
        description="Run one host of an island: start its executor, watch it, start it again. The island forms when "
        "its last host has come, in whatever order. Waits for a scheduler that is not there yet.",
        epilog="example: pathway worker --scheduler tcp://head:7777 --island east --hosts 2 --host-index 0 --devices 4",
    )
    parser.add_argument("--scheduler", metavar="ADDRESS", help="the scheduler's address ($PATHWAY_ADDRESS)")
    parser.add_argument("--island", required=True, metavar="NAME", help="the island that this host belongs to")
    parser.add_argument("--hosts", type=int, default=1, metavar="H", help="how many hosts the island has (1)")
    parser.add_argument("--host-index", type=int, default=0, metavar="I", help="which of them this is, from 0")
    parser.add_argument("--devices", type=int, default=1, metavar="D", help="devices of this host (1)")
    parser.add_argument("--platform", default="cpu", metavar="P", help="JAX's name for them: cpu, cuda, tpu (cpu)")
    parser.add_argument(
        "--preload", action="append", default=[], metavar="MODULE", help="import it in the executor; can be given again"
    )
    _device_memory(parser)
    parser.add_argument("--host-address", default="", metavar="IP", help="where the other hosts reach this one")
    parser.add_argument(
        "--transfer", choices=("auto", "pathway", "jax"), help="how edges go to other islands (auto: docs/transfers.md)"
    )
    _insecure(parser)
    _common(parser)
    _child(parser)


def _up(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "up",
        help="run a cluster on this machine",
        description="Run a whole cluster on this machine, in the foreground, for several clients. Ctrl-C stops it.",
        epilog="example: pathway up --islands 2 --hosts 1 --devices 4",
    )
    parser.add_argument("--islands", type=int, default=2, metavar="N", help="how many islands (2)")
    parser.add_argument("--hosts", type=int, default=1, metavar="H", help="hosts of each island (1)")
    parser.add_argument("--devices", type=int, default=4, metavar="D", help="devices of each host (4)")
    parser.add_argument("--platform", default="cpu", metavar="P", help="JAX's name for them (cpu)")
    parser.add_argument("--preload", action="append", default=[], metavar="MODULE", help="import it in executors")
    parser.add_argument("--bind", metavar="ADDRESS", help="where the scheduler listens (tcp://127.0.0.1:7777)")
    parser.add_argument(
        "--transfer", choices=("auto", "pathway", "jax"), help="how edges go to other islands (auto: docs/transfers.md)"
    )
    parser.add_argument(
        "--proxy", nargs="?", const="127.0.0.1:29000", metavar="HOST:PORT",
        help="also serve unchanged JAX programs there (127.0.0.1:29000; docs/proxy.md)",
    )  # fmt: skip
    _device_memory(parser)
    _spill(parser)
    _insecure(parser)
    _common(parser, own_key=False)


def _proxy(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "proxy",
        help="let unchanged JAX programs use the cluster",
        description="Serve the IFRT proxy protocol: JAX programs run on the cluster with JAX_PLATFORMS=proxy and "
        "JAX_BACKEND_TARGET=grpc://HOST:29000 (docs/proxy.md).",
        epilog="example: pathway proxy --scheduler tcp://127.0.0.1:7777 --bind 127.0.0.1:29000",
    )
    parser.add_argument("--scheduler", metavar="ADDRESS", help="the scheduler's address ($PATHWAY_ADDRESS)")
    parser.add_argument(
        "--bind",
        dest="proxy_bind",
        default="127.0.0.1:29000",
        metavar="HOST:PORT",
        help="where to listen (127.0.0.1:29000)",
    )
    parser.add_argument(
        "--transfer-directory",
        default="",
        metavar="DIR",
        help="where clients of this machine may leave large host buffers",
    )
    parser.add_argument(
        "--storage",
        default="",
        metavar="DIR",
        help="where arrays and profiles that clients of pathwaysutils write are kept",
    )
    parser.add_argument("--report-fd", type=int, default=-1, metavar="N", help="write the address to this descriptor")
    _insecure(parser)
    _common(parser)
    _child(parser)


def _status(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "status",
        help="show islands, slices, sessions, runs, and what waits for what",
        description="Show a cluster: islands, hosts, slices, sessions, runs, bytes, and every wait with its reason.",
        epilog="example: pathway status --address tcp://127.0.0.1:7777 --watch",
    )
    parser.add_argument("--address", metavar="ADDRESS", help="the scheduler's address ($PATHWAY_ADDRESS)")
    parser.add_argument("--json", action="store_true", help="as JSON (keys: docs/cli.md)")
    parser.add_argument("--watch", action="store_true", help="again every second, until Ctrl-C")
    parser.add_argument("--connect-timeout-s", type=float, metavar="S", help="how long to wait for an answer (10)")
    _common(parser)


def _orders(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    weigh = commands.add_parser(
        "set-weight",
        help="change a session's or a key's share of devices",
        description="Change the weight of a session, or of all sessions of a key, from the next run on.",
        epilog="example: pathway set-weight ann 4     (or for a key: pathway set-weight --of-key ann 4)",
    )
    weigh.add_argument("session", metavar="SESSION", help="its name or number, as pathway status shows it")
    weigh.add_argument("weight", type=float, metavar="WEIGHT", nargs="?", help="its share, beside those of the others")
    weigh.add_argument("--of-key", action="store_true", help="SESSION is the name of a key in the allow-list")
    weigh.add_argument("--priority", type=int, metavar="P", help="under the policy priority: higher goes first")
    kill = commands.add_parser(
        "kill",
        help="end a session",
        description="End a session at once: its runs are dropped and what it owns is freed.",
        epilog="example: pathway kill ann",
    )
    kill.add_argument("session", metavar="SESSION", help="its name or number, as pathway status shows it")
    drain = commands.add_parser(
        "drain",
        help="take an island out of use for maintenance",
        description="Bind no more slices to an island, move those that are idle, and let the runs there end.",
        epilog="example: pathway drain east     (and later: pathway undrain east)",
    )
    undrain = commands.add_parser(
        "undrain",
        help="take a drained island into use again",
        description="Let an island that was drained take slices again.",
        epilog="example: pathway undrain east",
    )
    for parser in (drain, undrain):
        parser.add_argument("island", metavar="ISLAND")
    for parser in (weigh, kill, drain, undrain):
        parser.add_argument("--address", metavar="ADDRESS", help="the scheduler's address ($PATHWAY_ADDRESS)")
        parser.add_argument("--connect-timeout-s", type=float, metavar="S", help="how long to wait for an answer (10)")
        _common(parser)


def _keygen(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "keygen",
        help="make the keys of a cluster, or one more",
        description="Make the keys of a cluster and the list of who may connect; with --name, one more pair of keys.",
        epilog="example: pathway keygen /etc/pathway/keys     then: pathway scheduler --keys /etc/pathway/keys ...",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="where; made if need be, nothing is overwritten")
    parser.add_argument("--name", metavar="NAME", help="make only this pair, and print its line for allowed_keys")
    parser.add_argument(
        "--role",
        action="append",
        choices=["client", "worker", "admin"],
        help="what NAME may do (client); can be given again",
    )


def _insecure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--insecure", action="store_true", default=None, help="listen without keys where other machines can connect"
    )


def _common(parser: argparse.ArgumentParser, own_key: bool = True) -> None:
    keys = parser.add_argument_group("keys (docs/security.md)")
    keys.add_argument("--keys", metavar="DIR", help="a directory that pathway keygen made")
    if own_key:
        keys.add_argument("--key", metavar="FILE", help="a key pair of one's own")
        keys.add_argument("--scheduler-key", metavar="FILE", help="the scheduler's public key")
    logs = parser.add_argument_group("logs")
    logs.add_argument(
        "--log-format", choices=["auto", "terminal", "json"], help="auto: readable on a terminal, else JSON"
    )
    logs.add_argument("--log-level", choices=["debug", "info", "warning", "error"])


def _device_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device-memory", metavar="SIZE", help="of each device, for programs: 16GiB (what the devices say themselves)"
    )


def _spill(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--spill", action="store_true", default=None,
        help="move buffers that nobody has used for long to host memory when a run needs their room",
    )  # fmt: skip


def _child(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parent-fd", type=int, default=-1, help=argparse.SUPPRESS)
