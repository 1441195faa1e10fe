"""What came of a simulation, as a picture (SVG): shares over time, waits, and how busy the devices were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pathway.dataflow.svg import HUES, document, text

if TYPE_CHECKING:
    from pathway.testing.simulate import ClientResult, Result

WIDTH_PX, LEFT_PX, RIGHT_PX = 1080, 70, 250
CURVES_PX, BUSY_PX, BAR_PX = 300, 90, 20
LISTED = 16


def draw(result: Result) -> str:
    """Clients with most device time first; those past LISTED are drawn as one, `others`."""
    clients = sorted(result.clients, key=lambda client: -client.device_s)
    shown, others = clients[:LISTED], clients[LISTED:]
    s = result.scenario
    seconds = s.seconds
    title = f"{s.islands:,} islands, {s.clients} clients, policy {s.policy_name}"
    right = WIDTH_PX - RIGHT_PX
    body = [text(24, 36, title, "title"), text(WIDTH_PX - 24, 36, f"seed {s.seed}", "note", "end")]

    top = 76.0
    body.append(text(24, top - 12, "share of all device time", "name"))
    body += _frame(top, CURVES_PX, right, "0 %", "100 %")
    below = [0.0] * len(result.busy_curve)
    x_of = [LEFT_PX + (right - LEFT_PX) * (index + 0.5) / max(1, len(below)) for index in range(len(below))]
    bands: list[tuple[str, Sequence[float], int]] = [
        (client.name, client.curve, number % len(HUES)) for number, client in enumerate(shown)
    ]
    if others:
        bands.append((f"{len(others)} others", [sum(values) for values in zip(*(o.curve for o in others), strict=True)],
                      len(shown) % len(HUES)))  # fmt: skip
    for name, curve, hue in bands:
        above = [a + b for a, b in zip(below, curve, strict=True)]
        points = [*zip(x_of, above, strict=True), *reversed([*zip(x_of, below, strict=True)])]
        path = " ".join(f"{x:.1f},{top + CURVES_PX * (1 - value):.1f}" for x, value in points)
        body.append(f'<polygon class="solid{hue}" opacity="0.85" points="{path}"><title>{name}</title></polygon>')
        below = above
    for number, (name, _, hue) in enumerate(bands):
        y = top + 12 + 18 * number
        body.append(f'<rect class="solid{hue}" x="{right + 20}" y="{y - 10}" width="14" height="12" rx="3"/>')
        client = shown[number] if number < len(shown) else None
        said = f"{name}: {100 * client.share:.1f} % ({100 * client.fair_share:.1f} %)" if client else name
        body.append(text(right + 40, y, said, "small"))
    body.append(text(right + 20, top + 30 + 18 * len(bands), "share on its islands (by weight)", "note"))

    top += CURVES_PX + 44
    body.append(text(24, top - 12, "devices busy", "name"))
    body += _frame(top, BUSY_PX, right, "0 %", "100 %")
    busy = " ".join(
        f"{x:.1f},{top + BUSY_PX * (1 - min(1.0, value)):.1f}" for x, value in zip(x_of, result.busy_curve, strict=True)
    )
    body.append(f'<polyline class="edge0" stroke-width="2" points="{busy}"/>')
    body.append(text(right + 20, top + 14, f"{100 * result.busy:.1f} % on average", "small"))
    for part in range(6):
        x = LEFT_PX + (right - LEFT_PX) * part / 5
        body.append(text(x, top + BUSY_PX + 18, f"{seconds * part / 5:.3g} s", "note", "middle"))

    top += BUSY_PX + 62
    body.append(text(24, top - 12, "wait of a run: median, and 99 % (thin)", "name"))
    longest_ms = max((client.wait_99_ms for client in shown), default=0.0) or 1.0
    for number, client in enumerate(shown):
        body += _waits(client, top + number * (BAR_PX + 6), right, longest_ms, number % len(HUES))
    height = top + len(shown) * (BAR_PX + 6) + 20
    return document(WIDTH_PX, height, body, len(HUES), title)


def _frame(top: float, height: float, right: float, low: str, high: str) -> list[str]:
    return [
        f'<rect class="lane" x="{LEFT_PX}" y="{top:.0f}" width="{right - LEFT_PX}" height="{height}"/>',
        text(LEFT_PX - 8, top + 10, high, "note", "end"),
        text(LEFT_PX - 8, top + height, low, "note", "end"),
    ]


def _waits(client: ClientResult, y: float, right: float, longest_ms: float, hue: int) -> list[str]:
    width = right - LEFT_PX - 60
    median = width * client.wait_median_ms / longest_ms
    tail = width * client.wait_99_ms / longest_ms
    x = LEFT_PX + 50
    return [
        text(24, y + 14, client.name, "small"),
        f'<rect class="solid{hue}" x="{x}" y="{y + 2}" width="{max(median, 1):.1f}" height="{BAR_PX - 4}" rx="3"/>',
        f'<rect class="solid{hue}" x="{x}" y="{y + BAR_PX / 2 - 1}" width="{max(tail, 1):.1f}" height="2"/>',
        text(right + 20, y + 14, f"{client.wait_median_ms:.2f} ms, {client.wait_99_ms:.2f} ms", "small"),
    ]
