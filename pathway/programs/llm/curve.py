"""Curves over steps, as a picture (SVG)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pathway.dataflow.svg import document, round_step, text

WIDTH_PX, HEIGHT_PX, LEFT_PX, TOP_PX, RIGHT_PX, BOTTOM_PX = 860, 420, 64, 60, 24, 64


def draw_curves(curves: Mapping[str, Sequence[tuple[float, float]]], title: str) -> str:
    """One line for each name, through its (step, value) points."""
    points = [point for curve in curves.values() for point in curve] or [(0.0, 0.0)]
    first, last = min(x for x, _ in points), max(max(x for x, _ in points), 1)
    low, high = min(y for _, y in points), max(y for _, y in points)
    margin = 0.05 * (high - low) or 1.0
    low, high = low - margin, high + margin

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (x - first) / max(last - first, 1), (y - low) / (high - low)
        return (
            LEFT_PX + across * (WIDTH_PX - LEFT_PX - RIGHT_PX),
            HEIGHT_PX - BOTTOM_PX - up * (HEIGHT_PX - TOP_PX - BOTTOM_PX),
        )

    body = [text(24, 36, title, "title")]
    step = round_step(high - low, 6)
    value = step * int(low / step + 1)
    while value < high:
        _, y = place(first, value)
        body.append(f'<path class="line" stroke-dasharray="2 4" d="M{LEFT_PX} {y:.1f}H{WIDTH_PX - RIGHT_PX}"/>')
        body.append(text(LEFT_PX - 8, y + 4, f"{value:.4g}", "note", "end"))
        value += step
    step = max(round_step(last - first, 8), 1)
    number = step * int(first / step)
    while number <= last:
        if number >= first:
            x, _ = place(number, low)
            body.append(text(x, HEIGHT_PX - BOTTOM_PX + 18, f"{number:g}", "note", "middle"))
        number += step
    at = float(LEFT_PX)
    for hue, (name, curve) in enumerate(curves.items()):
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
        body.append(f'<polyline class="edge{hue}" stroke-width="1.8" points="{line}"/>')
        body.append(f'<rect class="solid{hue}" x="{at}" y="{HEIGHT_PX - 25}" width="14" height="4"/>')
        body.append(text(at + 20, HEIGHT_PX - 19, name, "note"))
        at += 48 + 6.6 * len(name)
    return document(WIDTH_PX, HEIGHT_PX, body, len(curves), title)
