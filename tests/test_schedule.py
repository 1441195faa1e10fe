"""The scheduler of nodes: simulation, predicates, explicit orders, cycles."""

from __future__ import annotations

import pytest
from graph_builder import GraphBuilder, bound, pipeline
from hypothesis import given
from hypothesis import strategies as st

from pathway.dataflow.schedule import order
from pathway.errors import ProgramError


def names(graph, schedule, island):
    return [graph.nodes[index].name for index in schedule.orders[island]]


def test_a_chain_keeps_program_order():
    builder = GraphBuilder({1: bound(1, "east", range(4))})
    value = builder.argument(1)
    for _ in range(5):
        value = builder.node(1, [value])
    schedule = order(builder.graph([value]), builder.bindings)
    assert schedule.orders == {"east": (0, 1, 2, 3, 4)}
    assert not schedule.strict


def test_microbatches_are_pipelined_one_forward_one_backward():
    graph, bindings = pipeline(8)
    schedule = order(graph, bindings)
    assert names(graph, schedule, "island1") == [
        *(f"{kind}1.{batch}" for batch in range(8) for kind in ("forward", "backward")),
        "update1",
    ]
    first = names(graph, schedule, "island0")
    assert first[:4] == [f"forward0.{batch}" for batch in range(4)]  # they fill the time until the first cotangent
    assert first[4:10] == [
        f"{kind}0.{batch}"
        for batch in range(3)
        for kind in ("backward", "forward")
        for batch in [batch + 4 * (kind == "forward")]
    ]
    assert first[-1] == "update0"
    assert max(end for _, end in schedule.spans) < 0.75 * len(graph.nodes) * 1e-3


def test_costs_change_the_order():
    graph, bindings = pipeline(3)
    slow = order(graph, bindings, cost=lambda node: 1.0 if node.name.startswith("forward1") else 1e-3)
    assert names(graph, slow, "island0")[:3] == ["forward0.0", "forward0.1", "forward0.2"]


def test_slices_of_one_island_run_side_by_side_unless_they_share_devices():
    def makespan(devices):
        builder = GraphBuilder({1: bound(1, "east", [0, 1]), 2: bound(2, "east", devices)})
        results = [builder.node(where, [builder.argument(where)]) for where in (1, 2, 1, 2)]
        return max(end for _, end in order(builder.graph(results), builder.bindings).spans)

    assert makespan([2, 3]) == pytest.approx(2e-3)
    assert makespan([1, 2]) == pytest.approx(4e-3)


def test_a_predicate_orders_the_nodes_strictly():
    graph, bindings = pipeline(3)
    gpipe = order(graph, bindings, schedule=lambda a, b: a.name.startswith("forward") and b.name.startswith("backward"))
    assert gpipe.strict
    for island in ("island0", "island1"):
        assert [name[:7] for name in names(graph, gpipe, island)] == ["forward"] * 3 + ["backwar"] * 3 + [
            "update" + island[-1]
        ]


def test_an_explicit_order_is_kept():
    graph, bindings = pipeline(2)
    default = order(graph, bindings)
    again = order(graph, bindings, schedule=default.orders)
    assert again.orders == default.orders
    whole = order(graph, bindings, schedule=range(len(graph.nodes)))
    assert whole.orders == {
        "island0": tuple(n.index for n in graph.nodes if n.slice == 0),
        "island1": tuple(n.index for n in graph.nodes if n.slice == 1),
    }


def test_program_keeps_every_device_to_the_order_of_the_program():
    graph, bindings = pipeline(4)
    schedule = order(graph, bindings, schedule="program")
    assert schedule.strict
    assert schedule.per_device
    for island, nodes in schedule.orders.items():
        assert list(nodes) == [n.index for n in graph.nodes if bindings[n.slice].island == island]
    with pytest.raises(ProgramError, match="programm"):
        order(graph, bindings, schedule="programm")


@pytest.mark.parametrize(
    ("given_order", "message"),
    [
        ({"island0": [0]}, "missing"),
        ({"island0": [0, 3, 4, 7, 8, 8]}, "named twice|missing"),
        ([0, 99], "node 99"),
        ({"nowhere": [1]}, "nowhere"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(given_order, message):
    graph, bindings = pipeline(2)
    with pytest.raises(ProgramError, match=message):
        order(graph, bindings, schedule=given_order)


def test_a_cycle_is_named():
    graph, bindings = pipeline(2)
    with pytest.raises(ProgramError) as raised:
        order(graph, bindings, schedule=lambda a, b: a.name.startswith("backward") and b.name.startswith("forward"))
    text = str(raised.value)
    assert "waits for itself" in text
    assert "forward0.0" in text
    assert "backward0." in text
    assert "is ordered after" in text
    assert "needs a result of" in text


def test_a_donating_node_runs_after_the_other_readers():
    builder = GraphBuilder({1: bound(1, "east", range(4)), 2: bound(2, "west", range(4))})
    weights = builder.argument(1, donated=True)
    late = builder.node(2, [builder.argument(2)], name="late")
    reader = builder.node(1, [weights, late], name="reader")
    donor = builder.node(1, [weights], name="donor", donates=[0])
    graph = builder.graph([reader, donor])
    assert names(graph, order(graph, builder.bindings), "east") == ["reader", "donor"]


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_every_order_is_complete_and_can_be_followed(stages, microbatches, data):
    graph, bindings = pipeline(microbatches, stages)
    costs = [data.draw(st.sampled_from([0.0, 1e-4, 1e-3, 5e-3])) for _ in graph.nodes]
    schedule = order(graph, bindings, cost=lambda node: costs[node.index])
    assert sorted(index for nodes in schedule.orders.values() for index in nodes) == list(range(len(graph.nodes)))
    assert order(graph, bindings, cost=lambda node: costs[node.index]) == schedule
    assert order(graph, bindings, schedule=schedule.orders).orders == schedule.orders  # no cycle
