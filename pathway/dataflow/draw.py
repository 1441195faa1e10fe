"""A program's graph by island, as a picture (SVG). A string out; no JAX.

One lane for each island, in it one row for each slice. Time goes to the right: every node has a column of its own
within its row, in the order in which the island would take it, so that a pipeline looks like one. Arrows are what
moves between slices, with its bytes. Every shape, sharding and source line is in the tooltips.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from pathway.dataflow.graph import BoundSlice, Graph, Node
from pathway.dataflow.layout import Sharding
from pathway.dataflow.plan import Plan
from pathway.dataflow.schedule import order
from pathway.dataflow.svg import HUES, bytes_text, document, fitted, text
from pathway.dataflow.timeline import draw_timeline

__all__ = ["draw_graph", "draw_timeline"]

BOX_WIDTH, BOX_HEIGHT = 122, 46
COLUMN_PX, ROW_PX = 176, 98
LEFT_PX, TOP_PX, BOTTOM_PX = 168, 62, 58
LANE_PADDING_PX, LANE_GAP_PX = 8, 20


@dataclass
class _Arrow:
    """What goes from one box to the first node that reads it on another slice. A box is a node's index, or -1 - value
    for an argument."""

    source: int
    target: int
    nbytes: int = 0
    values: list[str] = field(default_factory=list)


def draw_graph(graph: Graph, bindings: Mapping[int, BoundSlice], plan: Plan | None = None, title: str = "") -> str:
    """The graph on its islands. `plan` adds what is only known of a plan: the bytes that really move."""
    return _Drawing(graph, bindings).svg(plan, title or graph.name)


class _Drawing:
    def __init__(self, graph: Graph, bindings: Mapping[int, BoundSlice]) -> None:
        self.graph, self.bindings = graph, bindings
        used = {node.slice for node in graph.nodes} | {value.slice for value in graph.values}
        self.slices = sorted(used, key=lambda index: (bindings[index].island, index))
        self.hue = {index: number % len(HUES) for number, index in enumerate(sorted(used))}
        self.writer = {value: node.index for node in graph.nodes for value in node.outputs}
        self.arrows = self._find_arrows()
        self.column = self._assign_columns()
        self.channels: dict[tuple[int, bool], list[list[tuple[float, float]]]] = {}
        self.channel_of: dict[int, float] = {}  # by the arrow's identity
        self.lanes: list[tuple[str, float, float]] = []  # island, top, height
        self.row: dict[int, float] = {}  # slice -> the middle of its row
        top = float(TOP_PX)
        for island in sorted({bindings[index].island for index in self.slices}):
            rows = [index for index in self.slices if bindings[index].island == island]
            height = len(rows) * ROW_PX + 2 * LANE_PADDING_PX
            for number, index in enumerate(rows):
                self.row[index] = top + LANE_PADDING_PX + (number + 0.5) * ROW_PX
            self.lanes.append((island, top, height))
            top += height + LANE_GAP_PX
        self.height = top - LANE_GAP_PX + BOTTOM_PX
        self.width = max(LEFT_PX + (1 + max(self.column.values(), default=0)) * COLUMN_PX, 560)

    def _find_arrows(self) -> list[_Arrow]:
        """One for each pair of boxes; a value that a slice has already received is not sent again."""
        values = self.graph.values
        arrows: dict[tuple[int, int], _Arrow] = {}
        received: set[tuple[int, int, Sharding]] = set()
        host = {argument.value for argument in self.graph.arguments if not argument.resident}
        host |= {value for value, _ in self.graph.constants}
        for node in self.graph.nodes:
            for position, index in enumerate(node.inputs):
                value, wanted = values[index], node.in_shardings[position]
                at_home = value.slice == node.slice and value.sharding == wanted
                if at_home or index in host or (index, node.slice, wanted) in received:
                    continue
                received.add((index, node.slice, wanted))
                source = self.writer.get(index, -1 - index)
                arrow = arrows.setdefault((source, node.index), _Arrow(source, node.index))
                nbytes = value.aval.physical.nbytes
                arrow.nbytes += nbytes
                arrow.values.append(f"{value.aval} {value.sharding} → {wanted}, {bytes_text(nbytes)}")
        return list(arrows.values())

    def _assign_columns(self) -> dict[int, int]:
        column: dict[int, int] = {}
        taken = dict.fromkeys(self.slices, 0)  # the first free column of each row
        for source in dict.fromkeys(arrow.source for arrow in self.arrows if arrow.source < 0):
            where = self.graph.values[-1 - source].slice
            column[source] = taken[where]
            taken[where] += 1
        arriving: dict[int, list[int]] = {}
        for arrow in self.arrows:
            arriving.setdefault(arrow.target, []).append(arrow.source)
        spans = order(self.graph, self.bindings).spans
        for node in sorted(self.graph.nodes, key=lambda node: (*spans[node.index], node.index)):
            before = [self.writer[value] for value in node.inputs if value in self.writer] + arriving.get(
                node.index, []
            )
            column[node.index] = max([taken[node.slice], *(column[other] + 1 for other in before)])
            taken[node.slice] = column[node.index] + 1
        return column

    # -- boxes -----------------------------------------------------------------------------------------------------

    def _corner(self, box: int) -> tuple[float, float]:
        where = self.graph.values[-1 - box].slice if box < 0 else self.graph.nodes[box].slice
        return LEFT_PX + self.column[box] * COLUMN_PX, self.row[where] - BOX_HEIGHT / 2

    def svg(self, plan: Plan | None, title: str) -> str:
        body = [text(24, 36, title, "title"), text(self.width - 24, 36, self._summary(plan), "note", "end")]
        for island, top, height in self.lanes:
            body += self._lane(island, top, height)
        body += self._chains()
        body += [self._arrow(arrow) for arrow in self.arrows]
        body += [self._argument(box) for box in self.column if box < 0]
        body += [self._node(node) for node in self.graph.nodes]
        body += [self._label(arrow) for arrow in self.arrows]
        body += self._legend()
        return document(self.width, self.height, body, len(self.hue), f"graph of {title}")

    def _summary(self, plan: Plan | None) -> str:
        moved = plan.cost_bytes if plan is not None else sum(arrow.nbytes for arrow in self.arrows)
        return f"{len(self.graph.nodes)} nodes · {len(self.arrows)} transfers, {bytes_text(moved)}"

    def _lane(self, island: str, top: float, height: float) -> list[str]:
        drawn = [
            f'<rect class="lane" x="12" y="{top:.0f}" width="{self.width - 24:.0f}" height="{height:.0f}" rx="10"/>'
        ]
        rows = [index for index in self.slices if self.bindings[index].island == island]
        for number, index in enumerate(rows):
            y, bound = self.row[index], self.bindings[index]
            if number == 0:
                drawn.append(text(28, y - 14, fitted(island, LEFT_PX - 48, 8.5), "name"))
            count = len(bound.devices)
            mesh = ", ".join(f"{axis}={size}" for axis, size in bound.mesh)
            drawn.append(f'<circle class="solid{self.hue[index]}" cx="33" cy="{y + 1:.1f}" r="5"/>')
            drawn.append(text(45, y + 5, f"slice {index}: {count} device{'s' * (count != 1)}"))
            drawn.append(text(45, y + 21, fitted(mesh, LEFT_PX - 62, 6.2), "note"))
        return drawn

    def _node(self, node: Node) -> str:
        (x, y), hue = self._corner(node.index), self.hue[node.slice]
        radius = 12 if node.placed else 4
        shape = f'x="{x:.1f}" y="{y:.1f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="{radius}"'
        if node.backward:
            box = f'<rect class="soft{hue}" {shape}/><rect class="edge{hue}" {shape} stroke-width="1.6"/>'
            kinds = (f"ink{hue}", "note")
        elif node.placed:
            box, kinds = f'<rect class="solid{hue}" {shape}/>', ("on", "on2")
        else:
            box = f'<rect class="soft{hue}" {shape}/><rect class="edge{hue}" {shape} stroke-dasharray="3 3"/>'
            kinds = (f"ink{hue}", "note")
        mark = "◂ " if node.backward else ""
        written = [str(self.graph.values[value].aval) for value in node.outputs]
        shapes = (written[0] + (f" +{len(written) - 1}" if len(written) > 1 else "")) if written else "nothing"
        name = mark + fitted(node.name, BOX_WIDTH - 12 - 9 * len(mark))
        lines = text(x + BOX_WIDTH / 2, y + 20, name, kinds[0], "middle")
        lines += text(x + BOX_WIDTH / 2, y + 35, fitted(shapes, BOX_WIDTH - 10, 6.0), kinds[1], "middle")
        return f"<g>{box}{lines}<title>{escape(self._tooltip(node))}</title></g>"

    def _tooltip(self, node: Node) -> str:
        values, bound = self.graph.values, self.bindings[node.slice]
        lines = [f"node {node.index}: {node.name}{' (backward)' if node.backward else ''}"]
        lines.append(f"slice {node.slice} on {bound.island}, devices {', '.join(map(str, bound.devices[:16]))}")
        lines += [
            f"reads {values[value].aval} {sharding}"
            for value, sharding in zip(node.inputs, node.in_shardings, strict=True)
        ]
        lines += [f"writes {values[value].aval} {values[value].sharding}" for value in node.outputs]
        lines += [node.source] if node.source else []
        lines += [f"there because: {node.reason}"] if node.reason else []
        return "\n".join(lines)

    def _argument(self, box: int) -> str:
        value = self.graph.values[-1 - box]
        (x, y), hue = self._corner(box), self.hue[value.slice]
        names = {argument.value: f"argument {number}" for number, argument in enumerate(self.graph.arguments)}
        name = names.get(value.index, "closed-over array")
        shape = f'x="{x + 14:.1f}" y="{y + 9:.1f}" width="{BOX_WIDTH - 28}" height="28" rx="14"'
        return (
            f'<g><rect class="soft{hue}" {shape}/><rect class="edge{hue}" {shape}/>'
            f"{text(x + BOX_WIDTH / 2, y + 27, fitted(name, BOX_WIDTH - 36), f'ink{hue}', 'middle')}"
            f"<title>{escape(f'{name}: {value.aval} {value.sharding}')}</title></g>"
        )

    # -- lines -----------------------------------------------------------------------------------------------------

    def _chains(self) -> list[str]:
        """A thin line from each node to the next of its row, where that one reads from it."""
        drawn: list[str] = []
        last: dict[int, int] = {}
        for node in sorted(self.graph.nodes, key=lambda node: self.column[node.index]):
            before = last.get(node.slice)
            if before is not None and any(self.writer.get(value) == before for value in node.inputs):
                (x1, y), (x2, _) = self._corner(before), self._corner(node.index)
                middle = y + BOX_HEIGHT / 2
                drawn.append(f'<path class="line" d="M{x1 + BOX_WIDTH:.1f} {middle:.1f}H{x2:.1f}"/>')
            last[node.slice] = node.index
        return drawn

    def _ends(self, arrow: _Arrow) -> tuple[float, float, float, float]:
        (x1, y1), (x2, y2) = self._corner(arrow.source), self._corner(arrow.target)
        if arrow.source < 0:
            x1 -= 14
        # Below the middle going down, above it going up: the thin lines of the rows stay free, and so do labels.
        down = y2 > y1
        return (
            x1 + BOX_WIDTH,
            y1 + BOX_HEIGHT * (0.72 if down else 0.28),
            x2 - 5,
            y2 + BOX_HEIGHT * (0.28 if down else 0.72),
        )

    def _arrow(self, arrow: _Arrow) -> str:
        x1, y1, x2, y2 = self._ends(arrow)
        hue = self.hue[
            self.graph.nodes[arrow.target].slice if arrow.source < 0 else self.graph.nodes[arrow.source].slice
        ]
        gap = COLUMN_PX - BOX_WIDTH
        if x2 - x1 <= gap:
            bend = (x2 - x1) / 2
            path = f"M{x1:.1f} {y1:.1f}C{x1 + bend:.1f} {y1:.1f} {x2 - bend:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"
        else:  # across in the first gap between columns, then along the target's row, beside its boxes
            channel = self._channel(arrow)
            a, b, half = x1 + gap, x2 - gap / 2, gap / 2
            path = (
                f"M{x1:.1f} {y1:.1f}C{x1 + half:.1f} {y1:.1f} {x1 + half:.1f} {channel:.1f} {a:.1f} {channel:.1f}"
                f"H{max(a, b - half / 2):.1f}C{b + half / 3:.1f} {channel:.1f} {b:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"
            )
        tip = f"M{x2 + 5:.1f} {y2:.1f}l-8 -4v8z"
        line = f'<path class="edge{hue}" stroke-width="1.6" opacity="0.85" d="{path}"/>'
        tooltip = escape("\n".join(arrow.values))
        return f'<g>{line}<path class="solid{hue}" d="{tip}"/><title>{tooltip}</title></g>'

    def _channel(self, arrow: _Arrow) -> float:
        """The height at which a long arrow runs along its target's row: the first beside it where nothing else runs."""
        key = id(arrow)
        if key not in self.channel_of:
            x1, y1, x2, y2 = self._ends(arrow)
            down = y2 > y1
            tracks = self.channels.setdefault((self.graph.nodes[arrow.target].slice, down), [])
            track = next((t for t in range(len(tracks)) if all(b <= x1 or x2 <= a for a, b in tracks[t])), len(tracks))
            if track == len(tracks):
                tracks.append([])
            tracks[track].append((x1, x2))
            middle = self._corner(arrow.target)[1] + BOX_HEIGHT / 2
            self.channel_of[key] = middle + (BOX_HEIGHT / 2 + 12 + 11 * (track % 2)) * (-1 if down else 1)
        return self.channel_of[key]

    def _label(self, arrow: _Arrow) -> str:
        x1, y1, x2, y2 = self._ends(arrow)
        far = x2 - x1 > COLUMN_PX - BOX_WIDTH
        x, y = (x1 + COLUMN_PX - BOX_WIDTH + 6, self._channel(arrow) + 4) if far else ((x1 + x2) / 2, (y1 + y2) / 2 + 4)
        return text(x, y, bytes_text(arrow.nbytes), "note halo", "start" if far else "middle")

    def _legend(self) -> list[str]:
        y = self.height - 34
        drawn, x = [], 28.0
        for kind, label in (("forward", "forward"), ("backward", "◂ backward"), ("free", "placed by its operands")):
            radius = 3 if kind == "free" else 6
            shape = f'x="{x:.0f}" y="{y:.0f}" width="26" height="16" rx="{radius}"'
            dashes = ' stroke-dasharray="3 3"' if kind == "free" else ""
            if kind == "forward":
                drawn.append(f'<rect class="solid0" {shape}/>')
            else:
                drawn.append(f'<rect class="soft0" {shape}/><rect class="edge0" {shape}{dashes}/>')
            drawn.append(text(x + 34, y + 12, label, "note"))
            x += 60 + 6.4 * len(label)
        drawn.append(f'<path class="edge0" stroke-width="1.6" d="M{x:.0f} {y + 8}h22"/>')
        drawn.append(f'<path class="solid0" d="M{x + 29:.0f} {y + 8}l-8 -4v8z"/>')
        drawn.append(text(x + 38, y + 12, "transfer between slices", "note"))
        return drawn
