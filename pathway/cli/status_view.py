"""`pathway status`: the scheduler's status as tables, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import trio

from pathway.observe import fetch_status, observe
from pathway.transport.security import Identity

if TYPE_CHECKING:
    from rich.console import RenderableType

WATCH_S = 1.0


async def show_status(address: str, timeout_s: float, identity: Identity | None, as_json: bool, watch: bool) -> int:
    """Print the status once, or every second until the connection ends."""
    if not watch:
        _print_once(await fetch_status(address, timeout_s, identity), as_json)
        return 0
    async with observe(address, timeout_s, identity) as observer:
        if as_json:
            while True:
                print(json.dumps(await observer.status()), flush=True)
                await trio.sleep(WATCH_S)
        from rich.live import Live

        with Live(auto_refresh=False, screen=False) as live:
            while True:
                live.update(render(await observer.status()), refresh=True)
                await trio.sleep(WATCH_S)


def _print_once(status: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(status, indent=2))
        return
    from rich.console import Console

    Console().print(render(status))


def render(status: dict[str, Any]) -> RenderableType:
    """The status as rich tables; sections that have nothing to say are left out."""
    from rich.console import Group
    from rich.text import Text

    head = Text.assemble(
        ("pathway ", "bold"),
        f"{status['version']}  {status['state']} for {_duration(status['uptime_s'])}, {status['runs']} runs active, ",
        f"{status['computations']} computations ({_bytes(status['computation_bytes'])})",
    )
    return Group(head, *_tables(status), Text(_ways(status["islands"])))


def _ways(islands: list[dict[str, Any]]) -> str:
    """How edges go, and to which islands where not to all alike."""
    ways = sorted({island["transfer"] for island in islands} - {""})
    if len(ways) < 2:
        return f"edges between islands go by {ways[0]}" if ways else ""
    named = {way: ", ".join(island["island"] for island in islands if island["transfer"] == way) for way in ways}
    return "\n".join(f"edges to {names} go by {way}" for way, names in named.items())


def _tables(status: dict[str, Any]) -> Iterator[RenderableType]:
    yield _table(
        "islands",
        ("island", "state", "#", "platform", ">devices", ">held", ">runs", ">queued", ">buffers", ">bytes"),
        [
            (
                island["island"],
                island["state"],
                island["incarnation"],
                island["device_kind"] or island["platform"],
                f"{len(island['hosts'])} x {island['devices_per_host']}",
                island["devices_held"],
                f"{island['in_flight']}/{island['credits']}",
                island["queued"],
                island["buffers"],
                _bytes(island["bytes"]),
            )
            for island in status["islands"]
        ],
        "no island has joined",
    )
    yield _table(
        "memory of a device",
        ("island", ">used", ">limit", ">spilled", ">spills"),
        [
            (
                island["island"],
                _bytes(island["memory_used_bytes"]),
                _bytes(island["memory_limit_bytes"]),
                _bytes(island["spilled_bytes"]),
                island["spills"],
            )
            for island in status["islands"]
            if island["memory_limit_bytes"]
        ],
    )
    yield _table(
        "hosts",
        ("island", "host", "name", ">worker", ">executor", "address"),
        [
            (
                island["island"],
                host["host"],
                host["hostname"],
                host["pid"],
                host["executor_pid"] or "-",
                host["executor"],
            )
            for island in status["islands"]
            for host in island["hosts"]
        ],
    )
    yield _table(
        "damaged transfers received",
        ("island", ">transfers"),
        [(island["island"], damaged) for island in status["islands"] if (damaged := island["damaged_transfers"])],
    )
    yield _table(
        "sessions",
        ("session", "name", "", ">age", ">slices", ">plans", ">runs", ">submitted", ">buffers", ">bytes"),
        [
            (
                session["session"],
                session["name"],
                "" if session["connected"] else "cut off",
                _duration(session["age_s"]),
                *(session[key] for key in ("slices", "plans", "runs", "runs_submitted", "buffers")),
                _bytes(session["bytes"]),
            )
            for session in status["sessions"]
        ],
    )
    yield _table(
        "slices",
        ("session", "slice", "island", "devices", "mesh", ""),
        [
            (
                held["session"],
                held["slice"],
                held["island"] or "-",
                _ranges(held["devices"]),
                " x ".join(f"{axis}={size}" for axis, size in held["mesh"].items()),
                "shared" if held["shared"] else "",
            )
            for held in status["slices"]
        ],
    )
    yield _table(
        "waits",
        ("what", "because", "on", ">for"),
        [(wait["what"], wait["reason"], wait["on"], _duration(wait["since_s"])) for wait in status["waits"]],
    )


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]], empty: str = "") -> RenderableType:
    """Columns whose names begin with > are numbers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return Text(empty)
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    for row in rows:
        table.add_row(*(Text(_printable(str(cell))) for cell in row))
    return table


def _printable(text: str) -> str:
    """Without what would steer a terminal: sessions are called what their clients say."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _ranges(numbers: list[int]) -> str:
    """0-3,6: what is easier to read than 0,1,2,3,6."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
