"""What each island did over time, as a picture (SVG): a lane for each island, a bar for each step."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

from pathway.dataflow.svg import HUES, document, fitted, round_step, text

Step = tuple[str, str, int, float, float]
"""(island, label, run, start_s, end_s) on one clock."""

WIDTH_PX, LEFT_PX, RIGHT_PX, TOP_PX = 1200, 150, 116, 62
BAR_PX, BAR_GAP_PX, LANE_PADDING_PX, LANE_GAP_PX = 26, 4, 10, 12
CAPTION_CHARACTER_PX = 6.6
THINNEST_PX = 0.6
"""Bars thinner than this that touch the one before are drawn as one with it: a picture of 100,000 steps stays small."""


def draw_timeline(steps: Iterable[Step], title: str = "") -> str:
    """Each island's steps over time. Steps of one island that overlap (on different slices) are stacked."""
    taken = sorted(steps, key=lambda step: (step[3], step[4], step[0], step[1]))
    begin = min((step[3] for step in taken), default=0.0)
    end = max((step[4] for step in taken), default=begin)
    span_s = max(end - begin, 1e-9)
    scale = (WIDTH_PX - LEFT_PX - RIGHT_PX) / span_s
    families: dict[str, int] = {}
    for step in taken:
        families.setdefault(_family(step[1]), len(families) % len(HUES))

    body = [text(24, 36, title or "steps by island", "title")]
    body.append(text(WIDTH_PX - 24, 36, f"{len(taken):,} steps in {_milliseconds(span_s)}", "note", "end"))
    lanes, top = [], float(TOP_PX)
    for island in sorted({step[0] for step in taken}):
        mine = [step for step in taken if step[0] == island]
        rows = _stacked(mine)
        height = len(rows) * (BAR_PX + BAR_GAP_PX) - BAR_GAP_PX + 2 * LANE_PADDING_PX
        lanes.append((island, mine, rows, top, height))
        top += height + LANE_GAP_PX
    body += [
        f'<rect class="lane" x="12" y="{lane_top:.0f}" width="{WIDTH_PX - 24}" height="{height:.0f}" rx="8"/>'
        for _, _, _, lane_top, height in lanes
    ]
    body += _axis(span_s, scale, TOP_PX, top)
    for island, mine, rows, lane_top, height in lanes:
        middle = lane_top + height / 2 + 5
        body.append(text(28, middle, fitted(island, LEFT_PX - 40, 8.2), "name"))
        busy = _busy(mine) / span_s
        body.append(text(WIDTH_PX - 28, middle, f"{100 * busy:.0f} % busy", "", "end"))
        for number, row in enumerate(rows):
            y = lane_top + LANE_PADDING_PX + number * (BAR_PX + BAR_GAP_PX)
            body += _bars(row, y, begin, scale, families)
    legend, bottom = _legend(families, top + 36)
    body += legend
    return document(WIDTH_PX, bottom + 24, body, len(families), title or "steps by island")


def _family(label: str) -> str:
    """What differs only in a number (a microbatch's, a count's) has one colour."""
    return re.sub(r"[\W_x]*\d+$", "", label) or label


def _milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _stacked(steps: Sequence[Step]) -> list[list[Step]]:
    """Rows without overlap. A label keeps its row as far as can be: it moves to another for what runs beside it."""
    families: dict[str, list[Step]] = {}
    for step in steps:
        families.setdefault(_family(step[1]), []).append(step)
    rows: list[list[Step]] = []
    for family in families.values():
        for bundle in _disjoint(family):
            row = next((row for row in rows if not _overlap(row, bundle)), None)
            if row is None:
                rows.append(bundle)
            else:
                row += bundle
                row.sort(key=_start)
    return rows


def _disjoint(steps: Sequence[Step]) -> list[list[Step]]:
    bundles: list[list[Step]] = []
    for step in steps:
        bundle = next((bundle for bundle in bundles if bundle[-1][4] <= step[3]), None)
        if bundle is None:
            bundles.append([step])
        else:
            bundle.append(step)
    return bundles


def _overlap(first: Sequence[Step], second: Sequence[Step]) -> bool:
    merged = sorted([*first, *second], key=_start)
    return any(after[3] < before[4] for before, after in itertools.pairwise(merged))


def _start(step: Step) -> tuple[float, float]:
    return step[3], step[4]


def _busy(steps: Sequence[Step]) -> float:
    """Seconds during which at least one step ran."""
    total, until = 0.0, -math.inf
    for _, _, _, start, end in steps:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _bars(row: Sequence[Step], y: float, begin: float, scale: float, families: dict[str, int]) -> list[str]:
    drawn: list[tuple[float, float, Step, int]] = []  # left, right, the first step, how many
    for step in row:
        left, right = LEFT_PX + (step[3] - begin) * scale, LEFT_PX + (step[4] - begin) * scale
        if drawn and right - left < THINNEST_PX and left - drawn[-1][1] < THINNEST_PX:
            first_left, _, first, count = drawn[-1]
            drawn[-1] = (first_left, right, first, count + 1)
        else:
            drawn.append((left, right, step, 1))
    bars = []
    for left, right, (_, label, run, start, end), count in drawn:
        width = max(right - left, THINNEST_PX)
        hue = families[_family(label)]
        radius = min(4.0, width / 3)
        caption = ""
        names = [name for name in (label, _family(label)) if width > 10 + CAPTION_CHARACTER_PX * len(name)]
        if names:
            caption = text(left + width / 2, y + BAR_PX / 2 + 4, names[0], "on small", "middle")
        more = f" and {count - 1} more" if count > 1 else ""
        tip = f"{label}, run {run}{more}\nfrom {1e3 * (start - begin):.3f} ms, for {_milliseconds(end - start)}"
        opacity = 1.0 if run % 2 == 0 else 0.82  # so that one run is told from the next
        shape = f'x="{left:.2f}" y="{y:.1f}" width="{width:.2f}" height="{BAR_PX}" rx="{radius:.1f}"'
        bar = f'<rect class="solid{hue}" {shape} fill-opacity="{opacity}"/>'
        bars.append(f"<g>{bar}{caption}<title>{escape(tip)}</title></g>")
    return bars


def _axis(span_s: float, scale: float, top: float, bottom: float) -> list[str]:
    step_ms = round_step(1e3 * span_s, 10)
    drawn = []
    for number in range(int(1e3 * span_s / step_ms + 1e-6) + 1):
        x = LEFT_PX + number * step_ms * 1e-3 * scale
        drawn.append(f'<path class="line" stroke-dasharray="2 4" d="M{x:.1f} {top - 6:.0f}V{bottom - 4:.0f}"/>')
        drawn.append(text(x, bottom + 12, f"{number * step_ms:g}" + (" ms" if number == 0 else ""), "note", "middle"))
    return drawn


def _legend(families: dict[str, int], y: float) -> tuple[list[str], float]:
    drawn, x = [], float(LEFT_PX)
    for family, hue in families.items():
        width = 34 + 6.6 * len(family)
        if x + width > WIDTH_PX - 20:
            x, y = float(LEFT_PX), y + 22
        drawn.append(f'<rect class="solid{hue}" x="{x:.0f}" y="{y - 11:.0f}" width="13" height="13" rx="3"/>')
        drawn.append(text(x + 19, y, family, "note"))
        x += width
    return drawn, y
