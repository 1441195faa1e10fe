"""The pictures: well-formed, complete, readable, small. How they look was looked at; these tests keep what they say."""

from __future__ import annotations

import dataclasses
import re
import time
import xml.etree.ElementTree as ElementTree

import pytest
from graph_builder import GraphBuilder, bound, pipeline

from pathway.dataflow.draw import draw_graph, draw_timeline
from pathway.dataflow.planner import build_plan
from pathway.dataflow.schedule import order
from pathway.dataflow.svg import bytes_text, fitted, round_step

SVG = "{http://www.w3.org/2000/svg}"


def parsed(svg):
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return (
        root,
        [element.text or "" for element in root.iter(f"{SVG}text")],
        [element.text or "" for element in root.iter(f"{SVG}title")],
    )


def test_a_graph_shows_islands_slices_nodes_and_transfers():
    graph, bindings = pipeline(2)
    plan = build_plan(graph, bindings, dict.fromkeys(range(len(graph.nodes)), "k"), order(graph, bindings))
    _, texts, titles = parsed(draw_graph(graph, bindings, plan, title="train <step> & more"))
    assert "train <step> & more" in texts
    assert {"island0", "island1", "slice 0: 4 devices", "slice 1: 4 devices", "x=4"} <= set(texts)
    assert {node.name for node in graph.nodes} <= set(texts)
    transfers = sum(len(part.edges_out) for part in plan.parts)
    assert f"{len(graph.nodes)} nodes · {transfers} transfers, {bytes_text(plan.cost_bytes)}" in texts
    assert texts.count("256 B") == transfers
    (tooltip,) = [title for title in titles if title.startswith("node 1:")]
    for part in ("forward1.0", "slice 1 on island1", "reads float32[8,8]", "writes float32[8,8]", "model.py:1 in step"):
        assert part in tooltip


def test_forward_and_backward_are_told_apart():
    graph, bindings = pipeline(1)
    nodes = tuple(dataclasses.replace(node, backward=node.name.startswith("backward")) for node in graph.nodes)
    _, texts, titles = parsed(draw_graph(dataclasses.replace(graph, nodes=nodes), bindings))
    assert "◂ backward0.0" in texts
    assert "forward0.0" in texts
    assert any("(backward)" in title for title in titles)


def test_a_node_stands_right_of_what_it_reads():
    graph, bindings = pipeline(4, 3)
    root, _, _ = parsed(draw_graph(graph, bindings))
    left = {}
    for group in root.iter(f"{SVG}g"):
        title = group.find(f"{SVG}title")
        if title is not None and (found := re.match(r"node (\d+):", title.text or "")):
            left[int(found[1])] = float(group.find(f"{SVG}rect").get("x"))
    assert len(left) == len(graph.nodes)
    writer = {value: node.index for node in graph.nodes for value in node.outputs}
    for node in graph.nodes:
        assert all(left[writer[value]] < left[node.index] for value in node.inputs if value in writer)


def test_arguments_that_travel_are_drawn():
    builder = GraphBuilder({1: bound(1, "east", [0]), 2: bound(2, "west", [0])})
    graph = builder.graph([builder.node(2, [builder.argument(1)])])
    _, texts, titles = parsed(draw_graph(graph, builder.bindings))
    assert "argument 0" in texts
    assert "slice 1: 1 device" in texts
    assert any(title.startswith("argument 0: float32[8,8]") for title in titles)


def test_a_graph_without_nodes():
    builder = GraphBuilder({1: bound(1, "east", [0])})
    parsed(draw_graph(builder.graph([builder.argument(1)]), builder.bindings))


def test_a_timeline_shows_steps_and_how_busy_each_island_was():
    steps = [
        ("east", "embed", 1, 10.000, 10.004),
        ("east", "embed", 2, 10.006, 10.010),
        ("west", "head <2>", 1, 10.004, 10.006),
        ("west", "other", 1, 10.005, 10.007),
    ]
    _, texts, titles = parsed(draw_timeline(steps, "two runs"))
    assert {"two runs", "east", "west", "80 % busy", "30 % busy", "4 steps in 10 ms", "0 ms", "5"} <= set(texts)
    assert "embed, run 2\nfrom 6.000 ms, for 4 ms" in titles
    assert any(title.startswith("head <2>, run 1") for title in titles)


def test_steps_that_overlap_are_stacked():
    root, _, _ = parsed(draw_timeline([("a", "x", 0, 0.0, 1.0), ("a", "y", 0, 0.5, 2.0), ("a", "x", 0, 2.0, 3.0)]))
    bars = [group.find(f"{SVG}rect") for group in root.iter(f"{SVG}g")]
    assert [bar.get("y") for bar in bars].count(bars[0].get("y")) == 2
    assert len({bar.get("y") for bar in bars}) == 2


def test_an_empty_timeline():
    parsed(draw_timeline([]))


def test_many_steps_make_a_small_picture_soon():
    steps = [("east", f"step.{i % 7}", i // 100, i * 1e-5, i * 1e-5 + 0.9e-5) for i in range(50_000)]
    begin = time.process_time()
    svg = draw_timeline(steps)
    assert time.process_time() - begin < 5.0
    assert len(svg) < 1_000_000


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (2048, "2.0 KiB"),
        (300 * 1024, "300 KiB"),
        (5 * 1024**2, "5.0 MiB"),
        (3 * 1024**4, "3.0 TiB"),
    ],
)
def test_bytes_for_people(count, expected):
    assert bytes_text(count) == expected


def test_labels_fit_and_axes_are_round():
    assert fitted("short", 100) == "short"
    assert fitted("a very long label indeed", 69) == "a very lo…"
    assert [round_step(span, 10) for span in (1.0, 3.0, 7.0, 77.8)] == pytest.approx([0.1, 0.5, 1.0, 10.0])
