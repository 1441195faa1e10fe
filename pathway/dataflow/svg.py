"""What the pictures share: colours, a style sheet for light and dark, escaping, and numbers for people."""

from __future__ import annotations

import colorsys
import math
from xml.sax.saxutils import escape, quoteattr

HUES = (212, 24, 152, 280, 345, 188, 46, 246, 96, 318)
"""One hue a slice or a label, in order of appearance: neighbours differ clearly."""

FONT = "ui-sans-serif, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def colour(hue: int, saturation: float, lightness: float) -> str:
    """As #rrggbb, which every viewer understands."""
    channels = colorsys.hls_to_rgb(hue / 360, lightness, saturation)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


def style_sheet(hues: int) -> str:
    """Classes: `back`, `lane`, `name`, `note`, `line`, and for hue i `solid{i}`, `soft{i}`, `edge{i}`, `ink{i}`."""
    light = [
        f"text {{ font-family: {FONT}; font-size: 12px; fill: #1c232e }}",
        ".back { fill: #ffffff } .lane { fill: #f4f6f9; stroke: #e1e6ee }",
        ".title { font-size: 17px; font-weight: 600 } .name { font-size: 14px; font-weight: 600 }",
        ".note { font-size: 11px; fill: #667085 } .line { stroke: #c3cbd8; fill: none }",
        ".halo { stroke: #ffffff; stroke-width: 4px; stroke-linejoin: round; paint-order: stroke }",
        ".on { fill: #ffffff; font-weight: 600 } .on2 { fill: #ffffff; font-size: 11px; opacity: 0.9 }",
        ".small { font-size: 11px }",
    ]
    dark = [
        "text { fill: #e6eaf0 } .back { fill: #12161d } .lane { fill: #1a2029; stroke: #2a3240 }",
        ".note { fill: #93a0b4 } .line { stroke: #465064 } .halo { stroke: #12161d }",
    ]
    for i in range(min(hues, len(HUES))):
        hue = HUES[i]
        light.append(
            f".solid{i} {{ fill: {colour(hue, 0.55, 0.45)} }} .soft{i} {{ fill: {colour(hue, 0.7, 0.93)} }} "
            f".edge{i} {{ stroke: {colour(hue, 0.55, 0.45)}; fill: none }} .ink{i} {{ fill: {colour(hue, 0.6, 0.28)} }}"
        )
        dark.append(
            f".soft{i} {{ fill: {colour(hue, 0.35, 0.19)} }} .edge{i} {{ stroke: {colour(hue, 0.6, 0.6)} }} "
            f".ink{i} {{ fill: {colour(hue, 0.7, 0.82)} }}"
        )
    return "<style>" + "\n".join(light) + "\n@media (prefers-color-scheme: dark) {\n" + "\n".join(dark) + "\n}</style>"


def document(width: float, height: float, body: list[str], hues: int, description: str) -> str:
    """A whole SVG file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label={quoteattr(description)}>'
    )
    back = f'<rect class="back" width="{width:.0f}" height="{height:.0f}" rx="10"/>'
    return "\n".join([head, style_sheet(hues), back, *body, "</svg>"]) + "\n"


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    style = f' class="{kind}"' if kind else ""
    where = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{style}{where}>{escape(content)}</text>'


def fitted(content: str, width_px: float, character_px: float = 6.9) -> str:
    """`content`, cut so that it fits."""
    room = int(width_px / character_px)
    return content if len(content) <= room else content[: max(room - 1, 1)] + "…"


def bytes_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def round_step(span: float, steps: int) -> float:
    """A round number (1, 2 or 5 times a power of ten) that divides `span` into about `steps` parts."""
    rough = span / max(steps, 1)
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
