"""Plans: edges, gangs, liveness, donation, entries; every plan is validated (D-1 to D-4)."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from graph_builder import GraphBuilder, bound, pipeline, random_graphs
from hypothesis import given, settings
from hypothesis import strategies as st

import pathway.dataflow
from pathway.dataflow.check import validate
from pathway.dataflow.memory import peak_bytes
from pathway.dataflow.plan import Execute, Plan, Send
from pathway.dataflow.planner import build_plan, donations
from pathway.dataflow.schedule import order

KIB = 1024


def plan_of(graph, bindings, schedule=None, **options) -> Plan:
    schedule = order(graph, bindings, schedule=schedule)
    options.setdefault("donates", donations(graph, bindings, schedule))
    plan = build_plan(graph, bindings, {n.index: f"key-{n.name}" for n in graph.nodes}, schedule, **options)
    validate(plan)
    return plan


def two_islands() -> GraphBuilder:
    return GraphBuilder({1: bound(1, "east", range(4)), 2: bound(2, "west", range(2))})


def part_of(plan, island):
    return next(part for part in plan.parts if part.island == island)


def steps_of(plan, island):
    return [
        [step.node if isinstance(step, Execute) else f"send{step.edge}" for step in gang.steps]
        for gang in part_of(plan, island).gangs
    ]


def test_a_chain_on_one_slice_is_one_gang_without_edges():
    builder = two_islands()
    value = builder.argument(1)
    for _ in range(3):
        value = builder.node(1, [value])
    plan = plan_of(builder.graph([value]), builder.bindings)
    (part,) = plan.parts
    assert steps_of(plan, "east") == [[0, 1, 2]]
    assert [step.frees for step in part.gangs[0].steps] == [(0,), (1,), (2,)]
    assert part.results == ((0, 3),)
    assert plan.arguments[0].entries == ((0, 0),)
    assert part.gangs[0].arguments == (0,)
    assert plan.cost_bytes == 0


def test_values_cross_once_for_all_their_readers_and_right_after_they_are_computed():
    builder = two_islands()
    made = builder.node(1, [builder.argument(1)])
    builder.node(1, [made])
    first = builder.node(2, [made])
    second = builder.node(2, [made, first])
    plan = plan_of(builder.graph([second]), builder.bindings)
    east, west = part_of(plan, "east"), part_of(plan, "west")
    assert steps_of(plan, "east") == [[0, "send0", 1]]
    assert steps_of(plan, "west") == [[2, 3]]
    assert west.gangs[0].waits == (0,)
    assert east.edges_out == west.edges_in
    assert plan.cost_bytes == 8 * 8 * 4  # one host of the target, replicated there
    assert west.gangs[0].steps[1].frees == (west.gangs[0].steps[0].outputs[0], west.edges_in[0].target_slot)


def test_another_sharding_is_another_edge():
    builder = two_islands()
    made = builder.node(1, [builder.argument(1)], spec=["x"])
    whole, split = builder.node(2, [made]), builder.node(2, [made], wants={0: ["x"]})
    plan = plan_of(builder.graph([whole, split]), builder.bindings)
    assert len(part_of(plan, "west").edges_in) == 2
    assert plan.cost_bytes == 2 * 8 * 8 * 4


def test_slices_of_one_island():
    builder = GraphBuilder(
        {1: bound(1, "east", [0, 1]), 2: bound(2, "east", [2, 3]), 3: bound(3, "east", [0, 1], [("y", 2)])}
    )
    made = builder.node(1, [builder.argument(1)], spec=["x"])
    elsewhere = builder.node(2, [made])
    alike = builder.node(3, [made], wants={0: ["y"]})
    other = builder.node(3, [made], wants={0: [None, "y"]})
    plan = plan_of(builder.graph([elsewhere, alike, other]), builder.bindings)
    (part,) = plan.parts
    assert [edge.target.devices for edge in part.edges_out] == [(2, 3), (0, 1)]  # none for `alike`: equal places
    assert part.edges_in == part.edges_out
    half = 8 * 8 * 4 // 2
    assert plan.cost_bytes == 2 * half + half  # of the second edge, each device holds half of what it wants


def test_a_part_that_only_hands_an_argument_on():
    builder = two_islands()
    there = builder.argument(1)
    plan = plan_of(builder.graph([builder.node(2, [there])]), builder.bindings)
    assert steps_of(plan, "east") == [["send0"]]
    assert part_of(plan, "east").gangs[0].arguments == (0,)
    assert part_of(plan, "east").gangs[0].steps[0].frees == (0,)


def test_small_host_arguments_ride_along_and_large_ones_are_put_where_they_are_read_first():
    builder = two_islands()
    small = builder.argument(1, resident=False)
    large = builder.argument(1, (256, 256), resident=False)
    results = [builder.node(where, [small, large]) for where in (2, 1)]
    plan = plan_of(builder.graph(results), builder.bindings)
    names = [part.island for part in plan.parts]
    assert plan.arguments[0].inline
    assert [names[part] for part, _ in plan.arguments[0].entries] == ["west", "east"]
    assert not plan.arguments[1].inline
    ((part, position),) = plan.arguments[1].entries
    assert names[part] == "west"
    assert plan.parts[part].slots[plan.parts[part].arguments[position]] == plan.arguments[1].layout
    assert [edge.source_island for edge in part_of(plan, "east").edges_in] == ["west"]


def test_constants_lie_everywhere_they_are_read_and_references_at_home():
    builder = two_islands()
    argument = builder.argument(2)
    table = builder.constant(1, np.ones((64, 64), np.float32))
    reference = builder.value(1)
    builder.references.append((reference, 77))
    results = [
        builder.node(where, [argument, table, reference], wants={} if where == 1 else {1: ["x"]}) for where in (1, 2)
    ]
    plan = plan_of(builder.graph([*results, table, reference]), builder.bindings)
    assert len(plan.arguments) == 3
    assert len(plan.arguments[1].entries) == 2
    assert [plan.parts[part].island for part, _ in plan.arguments[2].entries] == ["east"]
    assert plan.results[2].argument == 1
    assert plan.results[3].argument == 2
    edges = [edge for part in plan.parts for edge in part.edges_out]
    assert sorted((edge.source_island, edge.target_island) for edge in edges) == [("east", "west"), ("west", "east")]


def test_results_that_are_arguments_or_come_twice():
    builder = two_islands()
    argument, unread = builder.argument(1), builder.argument(2, donated=True)
    made, dead = builder.node(1, [argument], outputs=2)
    plan = plan_of(builder.graph([made, unread, made, argument]), builder.bindings)
    assert plan.result_count == 1
    assert [(result.part, result.number, result.argument) for result in plan.results] == [
        (0, 0, -1),
        (-1, -1, 1),
        (0, 0, -1),
        (-1, -1, 0),
    ]
    assert plan.arguments[1].entries == ()
    assert plan.donated == (1,)
    slot = plan.parts[0].gangs[0].steps[0].outputs[1]
    assert slot in plan.parts[0].gangs[0].steps[0].frees  # nobody reads it: freed by the step that writes it
    assert dead not in (made,)


def test_a_program_without_nodes():
    builder = two_islands()
    plan = plan_of(builder.graph([builder.argument(1)]), builder.bindings)
    assert plan.parts == ()
    assert plan.results[0].argument == 0


def test_inputs_that_a_computation_does_not_take_do_not_travel():
    builder = two_islands()
    here, there = builder.argument(2), builder.argument(1)
    graph = builder.graph([builder.node(2, [there, here], donates=[1])])
    plan = plan_of(graph, builder.bindings, kept={0: (1,)}, donates={0: (1,)})
    (part,) = plan.parts
    (step,) = part.gangs[0].steps
    assert (len(step.inputs), step.donates) == (1, (0,))
    assert plan.arguments[1].entries == ()


def test_pipelines_are_cut_where_a_step_first_needs_an_edge():
    graph, bindings = pipeline(2)
    plan = plan_of(graph, bindings)
    names = [
        [graph.nodes[step.node].name for step in gang.steps if isinstance(step, Execute)]
        for gang in part_of(plan, "island0").gangs
    ]
    assert names == [["forward0.0", "forward0.1"], ["backward0.0"], ["backward0.1", "update0"]]
    assert [gang.after for gang in part_of(plan, "island0").gangs] == [(), (0,), (1,)]
    first = part_of(plan, "island0").gangs[0].steps
    assert [type(step) for step in first] == [Execute, Send, Execute, Send]
    update = part_of(plan, "island0").gangs[-1].steps[-1]
    assert update.donates == (0,)


def test_who_frees_comes_after_all_who_read():
    builder = two_islands()
    shared = builder.node(1, [builder.argument(1)])
    far = [builder.node(2, [builder.argument(2)]) for _ in range(2)]
    plan = plan_of(builder.graph([builder.node(1, [shared, value]) for value in far]), builder.bindings)
    assert steps_of(plan, "east") == [[0], [3], [4]]
    assert [gang.after for gang in part_of(plan, "east").gangs] == [(), (0,), (1,)]


def test_strict_schedules_forbid_overtaking():
    graph, bindings = pipeline(4)
    loose, strict = plan_of(graph, bindings), plan_of(graph, bindings, schedule=order(graph, bindings).orders)
    for part in strict.parts:
        assert [gang.after for gang in part.gangs] == [(), *((number,) for number in range(len(part.gangs) - 1))]
    assert any(len(gang.after) != 1 for part in loose.parts for gang in part.gangs[1:])


def test_in_program_order_only_gangs_that_share_a_device_wait_for_each_other():
    def after(devices):
        builder = GraphBuilder({1: bound(1, "east", [0, 1]), 2: bound(2, "east", devices), 3: bound(3, "west", [0])})
        far = [builder.node(3, [builder.argument(3)]) for _ in range(3)]
        near = [builder.node(where, [value]) for where, value in zip((1, 2, 1), far, strict=True)]
        plan = plan_of(builder.graph(near), builder.bindings, schedule="program")
        return [gang.after for gang in part_of(plan, "east").gangs]

    assert after([2, 3]) == [(), (), (0,)]
    assert after([1, 2]) == [(), (0,), (1,)]


def test_steps_on_other_devices_do_not_wait_for_edges_that_they_do_not_need():
    builder = GraphBuilder({1: bound(1, "east", [0, 1]), 2: bound(2, "east", [2, 3]), 3: bound(3, "west", [0])})
    far = builder.node(3, [builder.argument(3)])
    needs = builder.node(1, [far])
    free = builder.node(2, [builder.argument(2)])
    graph = builder.graph([needs, free])
    late = order(graph, builder.bindings, cost=lambda node: 1e-9)
    swapped = type(late)({**late.orders, "east": (1, 2)}, False, late.spans)
    plan = build_plan(graph, builder.bindings, dict.fromkeys(range(3), "k"), swapped)
    validate(plan)
    assert steps_of(plan, "east") == [[1], [2]]


@pytest.mark.parametrize("reason", ["read later", "result", "sent", "not given up", "twice"])
def test_what_is_still_needed_is_not_donated(reason):
    builder = two_islands()
    weights = builder.argument(1, donated=reason != "not given up")
    inputs = [weights, weights] if reason == "twice" else [weights]
    busy = builder.node(1, [builder.argument(1)])  # so that the donor is not the first on its island
    results = [busy, builder.node(1, inputs, donates=[0])]
    if reason == "read later":
        results.append(builder.node(1, [weights, results[1]]))
    if reason == "result":
        results.append(weights)
    if reason == "sent":
        results.append(builder.node(2, [weights]))
    graph = builder.graph(results)
    assert donations(graph, builder.bindings, order(graph, builder.bindings))[1] == ()


def test_peak_bytes_follow_liveness():
    array, shard = 8 * 8 * 4, 8 * 8 * 4 // 4
    builder = two_islands()
    value = builder.argument(1)
    for _ in range(4):
        value = builder.node(1, [value], spec=["x"])
    plan = plan_of(builder.graph([value]), builder.bindings)
    # The argument stays, whole on every device; of the chain, two links at a time.
    assert peak_bytes(plan) == {"east": dict.fromkeys(range(4), array + 2 * shard)}
    key = next(iter(plan.computations))
    assert peak_bytes(plan, {key: 1000}) == {"east": dict.fromkeys(range(4), array + 2 * shard + 1000)}


def test_donation_saves_memory():
    def peak(donated):
        builder = two_islands()
        made = builder.node(1, [builder.argument(1, donated=donated)], donates=[0])
        return peak_bytes(plan_of(builder.graph([made]), builder.bindings))["east"][0]

    assert peak(True) == 8 * 8 * 4
    assert peak(False) == 2 * 8 * 8 * 4


def test_plans_travel():
    graph, bindings = pipeline(2)
    plan = plan_of(graph, bindings)
    for part in plan.parts:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(part), type=type(part)) == part


def test_the_plan_does_not_depend_on_the_shard_count():
    def shape_of(devices):
        builder = GraphBuilder({1: bound(1, "east", range(devices)), 2: bound(2, "west", range(devices))})
        value = builder.argument(1, (4096, 8), ["x"])
        for index in range(8):
            value = builder.node(1 + index % 2, [value], shape=(4096, 8), spec=["x"], wants={0: ["x"]})
        plan = plan_of(builder.graph([value]), builder.bindings)
        return [(len(part.slots), len(part.edges_in), [len(gang.steps) for gang in part.gangs]) for part in plan.parts]

    assert shape_of(1) == shape_of(64) == shape_of(4096)


@settings(max_examples=200, deadline=None)
@given(random_graphs(), st.sampled_from(["loose", "strict", "program"]))
def test_every_plan_keeps_the_invariants(case, kind):
    graph, bindings = case
    schedule = {"loose": None, "strict": order(graph, bindings).orders, "program": "program"}[kind]
    plan = plan_of(graph, bindings, schedule=schedule)
    assert plan == plan_of(graph, bindings, schedule=schedule)
    used = {(value, graph.nodes[node].slice) for node in range(len(graph.nodes)) for value in graph.nodes[node].inputs}
    assert sum(len(part.edges_in) for part in plan.parts) <= 3 * len(used)
    for per_device in peak_bytes(plan).values():
        assert min(per_device.values()) >= 0


def test_a_thousand_nodes_are_planned_in_a_blink():
    builder = GraphBuilder({1: bound(1, "east", range(8)), 2: bound(2, "west", range(8))})
    value = builder.argument(1)
    for index in range(1000):
        value = builder.node(1 + index // 10 % 2, [value])
    graph = builder.graph([value])
    schedule = order(graph, builder.bindings)
    keys = dict.fromkeys(range(1000), "k")
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        plan = build_plan(graph, builder.bindings, keys, schedule)
        best = min(best, time.perf_counter() - begin)
    validate(plan)
    assert best < 0.3


def test_planning_needs_no_jax():
    modules = ["reshard", "schedule", "planner", "check", "memory", "plan", "layout", "graph", "draw"]
    imports = "; ".join(f"import pathway.dataflow.{module}" for module in modules)
    # In a process of its own, under a bare `pathway`: the package itself imports what users need.
    home = str(Path(pathway.dataflow.__file__).parent.parent)
    code = (
        "import sys, types; package = types.ModuleType('pathway'); "
        f"package.__path__ = [{home!r}]; sys.modules['pathway'] = package; "
        f"{imports}; sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
