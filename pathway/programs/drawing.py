"""A pipeline schedule in time, as a picture (SVG): a lane for each slice, a box for each pass."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from pathway.dataflow.svg import document, fitted, round_step, text

if TYPE_CHECKING:
    from pathway.programs.schedules import Arrangement, Task

UNIT_PX, LANE_PX, GAP_PX, LEFT_PX, TOP_PX, RIGHT_PX = 26.0, 34, 8, 92, 62, 24
WIDEST_PX, NARROWEST_PX = 2400, 620


def draw_arrangement(arrangement: Arrangement, title: str = "") -> str:
    """Forward passes are solid, backward passes outlined, passes for weights dashed; a stage has its colour where
    several share a slice. The number is the microbatch's."""
    shape = arrangement.shape
    unit = min(UNIT_PX, (WIDEST_PX - LEFT_PX - RIGHT_PX) / arrangement.length)
    shared = shape.slices < shape.stages
    right = LEFT_PX + arrangement.length * unit
    width = max(right + RIGHT_PX, NARROWEST_PX)
    bottom = TOP_PX + shape.slices * (LANE_PX + GAP_PX)
    name = title or f"{arrangement.schedule.name}: {shape.stages} stages, {shape.microbatches} microbatches"
    body = [
        text(24, 36, name, "title"),
        text(width - 24, 36, f"{arrangement.length:g} long, {100 * arrangement.bubble:.1f} % bubble", "note", "end"),
    ]
    for slice in range(shape.slices):
        y = TOP_PX + slice * (LANE_PX + GAP_PX)
        body.append(f'<rect class="lane" x="12" y="{y}" width="{width - 24:.0f}" height="{LANE_PX}" rx="6"/>')
        stages = shape.stages_on(slice)
        label = f"slice {slice}" if shared else f"stage {stages[0]}"
        body.append(text(24, y + LANE_PX / 2 + 5, fitted(label, LEFT_PX - 30, 7.0), "name"))
        for task in arrangement.on(slice):
            body.append(_box(arrangement, task, y, unit, task.stage // shape.slices if shared else 0))
    step = round_step(arrangement.length, 12)
    for number in range(int(arrangement.length / step) + 1):
        x = LEFT_PX + number * step * unit
        body.append(f'<path class="line" stroke-dasharray="2 4" d="M{x:.1f} {TOP_PX - 6}V{bottom}"/>')
        body.append(text(x, bottom + 12, f"{number * step:g}", "note", "middle"))
    chunks = (shape.stages - 1) // shape.slices + 1 if shared else 1
    body += _legend(bottom + 36, arrangement.schedule.splits_backward)
    return document(width, bottom + 60, body, chunks, name)


def _box(arrangement: Arrangement, task: Task, top: float, unit: float, hue: int) -> str:
    start, end = arrangement.spans[task]
    x, width = LEFT_PX + start * unit, max((end - start) * unit - 1, 0.5)
    shape = f'x="{x:.1f}" y="{top + 5}" width="{width:.1f}" height="{LANE_PX - 10}" rx="{min(4.0, width / 3):.1f}"'
    number = ""
    if width > 7 * len(str(task.microbatch)) + 2:
        kind = "on" if task.kind.value == "forward" else f"ink{hue}"
        number = text(x + width / 2, top + LANE_PX / 2 + 4, str(task.microbatch), f"{kind} small", "middle")
    tip = escape(f"{task}\nfrom {start:g} to {end:g}")
    return f"<g>{_filled(task.kind.value, hue, shape)}{number}<title>{tip}</title></g>"


def _filled(kind: str, hue: int, shape: str) -> str:
    if kind == "forward":
        return f'<rect class="solid{hue}" {shape}/>'
    dashes = ' stroke-dasharray="3 2"' if kind == "weights" else ""
    return f'<rect class="soft{hue}" {shape}/><rect class="edge{hue}" {shape}{dashes}/>'


def _legend(y: float, splits_backward: bool) -> list[str]:
    drawn, x = [], float(LEFT_PX)
    kinds = [("forward", "forward"), ("backward", "backward: gradient of the input" if splits_backward else "backward")]
    kinds += [("weights", "gradient of the weights")] if splits_backward else []
    for kind, label in kinds:
        drawn.append(_filled(kind, 0, f'x="{x:.0f}" y="{y - 11:.0f}" width="22" height="14" rx="3"'))
        drawn.append(text(x + 28, y, label, "note"))
        x += 52 + 6.2 * len(label)
    return drawn
