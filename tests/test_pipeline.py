"""Pipelines on a real cluster: schedules against `jax.grad` of the composition, memory from the plan, bad input."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathway as pw
from pathway.dataflow.plan import Execute
from pathway.programs import Schedule, Task, pipeline, sequential_stages, split_layers
from pathway.programs.schedules import by_name
from pathway.programs.splitting import split

BATCH = 24
HELD = 37
"""A width that nothing but what a stage keeps for its backward pass has."""


def block(params: Any, x: Any) -> Any:
    for layer in params:
        x = x + jnp.tanh(jnp.tanh(x @ layer["in"]) @ layer["out"])
    return x


def embed(params: Any, tokens: Any) -> Any:
    return {"x": params["embedding"][tokens] * params["scale"], "doubled": jnp.sin(params["embedding"][tokens])}


def middle(params: Any, h: Any) -> Any:
    return {"x": block(params, h["x"]), "doubled": h["doubled"] * 2}


def unembed(params: Any, h: Any) -> Any:
    return block(params["blocks"], h["x"] + h["doubled"]) @ params["embedding"].T


def cross_entropy(logits: Any, targets: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1).mean()


def mean_square(y: Any, t: Any) -> Any:
    return ((y - t) ** 2).mean()


def weights(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)


def blocks(rng: np.random.Generator, count: int, width: int = 8, hidden: int = HELD) -> Any:
    return [{"in": weights(rng, width, hidden), "out": weights(rng, hidden, width)} for _ in range(count)]


def same(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(pw.get(actual)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.fixture
def slices(client: Any) -> Iterator[list[Any]]:
    """Four slices of unequal sizes and meshes, over both islands, one of which has two hosts."""
    taken = [
        pw.slice(2, mesh={"data": 2}, island="east"),
        pw.slice(3, mesh={"row": 1, "model": 3}, island="west"),
        pw.slice(1, island="east"),
        pw.slice(1, island="west"),
    ]
    yield taken
    for slice in taken:
        slice.release()


@pytest.mark.parametrize("schedule", [*sorted(by_name), "custom"])
def test_every_schedule_is_the_gradient_of_the_composition(slices: list[Any], schedule: str) -> None:
    """Unequal numbers of layers, of slices and of devices; two stages share a slice now and then."""
    seed = 1 + sorted([*by_name, "custom"]).index(schedule)
    print("seed", seed)
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    count = draw.choice([3, 4])
    where = [draw.choice(slices) for _ in range(count)] if schedule != "interleaved" else (slices[:2] * 2)
    depths = [draw.choice([1, 2, 3]) for _ in where]
    stages = [
        pw.jit(slice, in_specs=(P(), P("data" if "data" in slice.mesh and slice.size == 2 else None)), name=f"s{n}")(
            block
        )
        for n, slice in enumerate(where)
    ]
    params = [blocks(rng, depth) for depth in depths]
    x, t = weights(rng, BATCH, 8), weights(rng, BATCH, 8)

    def microbatch_by_microbatch(first: Task, second: Task) -> bool:
        return first.microbatch < second.microbatch

    step = pipeline(
        stages,
        mean_square,
        microbatches=draw.choice([2, 4, 6]),
        schedule=microbatch_by_microbatch if schedule == "custom" else schedule,
    )

    def composed(params: Any) -> Any:
        y = x
        for some in params:
            y = block(some, y)
        return mean_square(y, t)

    value, gradients = step(params, x, t)
    expected, expected_gradients = jax.value_and_grad(composed)(params)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    same(gradients, expected_gradients)
    assert float(step.evaluate(params, x, t)) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_language_model_with_a_tied_embedding(slices: list[Any], schedule: str) -> None:
    """Integers in, pytrees between stages, an embedding that the first and the last stage use, and a named slice for
    each parameter's gradient."""
    rng = np.random.default_rng(3)
    params = {
        "embedding": weights(rng, 11, 8),
        "scale": np.float32(1.5),
        "blocks": [blocks(rng, 1), blocks(rng, 2), blocks(rng, 1)],
    }
    front, wide, back = slices[0], slices[1], slices[2]
    stages = [
        pw.jit(front, in_specs=(P(), P("data")), out_specs=P("data"))(embed),
        pw.jit(wide, name="first")(middle),
        pw.jit(wide, name="second")(middle),
        pw.jit(back)(unembed),
    ]
    step = pipeline(
        stages,
        cross_entropy,
        microbatches=4,
        schedule=schedule,
        params_of=[
            lambda p: {"embedding": p["embedding"], "scale": p["scale"]},
            lambda p: p["blocks"][0],
            lambda p: p["blocks"][1],
            lambda p: {"embedding": p["embedding"], "blocks": p["blocks"][2]},
        ],
    )
    tokens, targets = rng.integers(0, 11, (2, BATCH, 5)).astype(np.int32)

    def composed(params: Any) -> Any:
        h = embed(params, tokens)
        for some in params["blocks"][:2]:
            h = middle(some, h)
        return cross_entropy(unembed({"embedding": params["embedding"], "blocks": params["blocks"][2]}, h), targets)

    value, gradients = step(params, tokens, targets)
    expected, expected_gradients = jax.value_and_grad(composed)(params)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    same(gradients, expected_gradients)
    assert gradients["embedding"].slice is front
    assert gradients["blocks"][1][0]["in"].slice is wide


def test_a_step_is_part_of_a_program(slices: list[Any]) -> None:
    optax = pytest.importorskip("optax")
    rng = np.random.default_rng(5)
    stages = [pw.jit(slice, name=f"s{n}")(block) for n, slice in enumerate(slices[:3])]
    pipe = pipeline(stages, mean_square, microbatches=3)
    optimizer = optax.adam(1e-2)

    @pw.program(schedule="program", donate_argnums=(0, 1))
    def step(params: Any, states: Any, x: Any, t: Any) -> Any:
        value, gradients = pipe(params, x, t)
        updated = [optimizer.update(g, s, p) for g, s, p in zip(gradients, states, params, strict=True)]
        params = [optax.apply_updates(p, u) for p, (u, _) in zip(params, updated, strict=True)]
        return params, [state for _, state in updated], value

    host = [blocks(rng, 1) for _ in stages]
    params = [pw.put(tree, slice) for tree, slice in zip(host, slices, strict=False)]
    states = [pw.put(optimizer.init(tree), slice) for tree, slice in zip(host, slices, strict=False)]
    x, t = weights(rng, BATCH, 8), weights(rng, BATCH, 8)
    values = []
    for _ in range(6):
        params, states, value = step(params, states, x, t)
        values.append(float(value))
    assert values[-1] < values[0]
    assert [tree[0]["in"].slice for tree in params] == slices[:3]


def held(lowered: Any, island: str) -> int:
    """How many slots of width `HELD` the island's part holds at once, at most, its steps taken in order. They are what
    forward passes keep for their backward passes, so many for each."""
    [part] = [part for part in lowered.plan.parts if part.island == island]
    wide = {n for n, layout in enumerate(part.slots) if HELD in layout.aval.shape and 8 not in layout.aval.shape}
    alive: set[int] = set()
    most = 0
    for gang in part.gangs:
        for step in gang.steps:
            if isinstance(step, Execute):
                alive |= wide & set(step.outputs)
            most = max(most, len(alive))
            alive -= set(step.frees)
    return most


@pytest.mark.parametrize("schedule", sorted(by_name))
def test_the_plan_holds_no_more_activations_than_the_schedule_promises(client: Any, schedule: str) -> None:
    rng = np.random.default_rng(0)
    with pw.slice(4, island="east") as first, pw.slice(4, island="west") as second:
        where = [first, second, first, second] if schedule == "interleaved" else [first, second]
        stages = [pw.jit(slice, name=f"s{n}")(block) for n, slice in enumerate(where)]
        params = [blocks(rng, 1) for _ in where]
        x = weights(rng, 32, 8)

        def lower(microbatches: int) -> tuple[Any, Any]:
            step = pipeline(stages, mean_square, microbatches=microbatches, schedule=schedule)
            return step.lower(params, x[: 4 * microbatches], x[: 4 * microbatches]), step.arrangement

        lowered, arrangement = lower(2)
        one_pass = held(lowered, "east") / arrangement.held(0)
        lowered, arrangement = lower(8)
        promised = by_name[schedule].holds(0, arrangement.shape)
        assert one_pass >= 1
        assert held(lowered, "east") <= promised * one_pass
        assert promised == {"gpipe": 8, "1f1b": 2, "eager_1f1b": 3, "zero_bubble": 2, "interleaved": 5}[schedule]


def test_devices_keep_to_the_schedule(client: Any) -> None:
    """The strict order of gpipe: on the first slice no backward pass starts before the last forward pass."""
    rng = np.random.default_rng(0)
    with pw.slice(2, island="east") as first, pw.slice(2, island="west") as second:
        stages = [pw.jit(first, name="front")(block), pw.jit(second, name="back")(block)]
        step = pipeline(stages, mean_square, microbatches=4, schedule="gpipe")
        params, x = [blocks(rng, 1), blocks(rng, 1)], weights(rng, 16, 8)
        lowered = step.lower(params, x, x)
        jax.block_until_ready(step(params, x, x))
        with pw.record_steps() as recording:
            jax.block_until_ready(step(params, x, x))
    nodes = [node for node in lowered.graph.nodes if node.slice == first.number]
    assert [node.backward for node in nodes if "front" in node.name] == [False] * 4 + [True] * 4
    ran = [record.label for record in recording.steps if record.island == "east"]
    assert ran == [node.name for node in nodes]


class TestBadInput:
    def test_stages_that_do_not_chain(self, slices: list[Any]) -> None:
        rng = np.random.default_rng(0)
        stages = [pw.jit(slice, name=f"s{n}")(block) for n, slice in enumerate(slices[:2])]
        step = pipeline(stages, mean_square, microbatches=2)
        x = weights(rng, 4, 8)
        with pytest.raises(pw.ProgramError, match=r"stage 1 of pipeline \(s1\) does not take what stage 0 gives") as e:
            step([blocks(rng, 1), blocks(rng, 1, width=9)], x, x)
        assert "float32[2,8]" in str(e.value)

    def test_microbatches_that_do_not_divide_the_batch(self, slices: list[Any]) -> None:
        step = pipeline([pw.jit(slices[0])(block)], mean_square, microbatches=3)
        x = np.ones((4, 8), np.float32)
        with pytest.raises(pw.ProgramError, match=r"the inputs of pipeline\['x'\]: 3 microbatches do not divide"):
            step([[]], {"x": x}, x)

    def test_parameters_of_another_number_of_stages(self, slices: list[Any]) -> None:
        step = pipeline([pw.jit(slices[0])(block)], mean_square, microbatches=1)
        x = np.ones((4, 8), np.float32)
        with pytest.raises(pw.ProgramError, match=r"a sequence of 1 parameter trees, .* not a list of 2"):
            step([[], []], x, x)
        with pytest.raises(pw.ProgramError, match="not a dict"):
            step({"a": x}, x, x)

    def test_parameters_that_are_made_up(self, slices: list[Any]) -> None:
        step = pipeline([pw.jit(slices[0])(block)], mean_square, microbatches=1, params_of=[lambda p: [1.0]])
        x = np.ones((4, 8), np.float32)
        with pytest.raises(pw.ProgramError, match=r"params_of\[0\] of pipeline must pick leaves"):
            step([x], x, x)

    def test_a_loss_that_is_no_number(self, slices: list[Any]) -> None:
        step = pipeline([pw.jit(slices[0])(block)], lambda y, t: y - t, microbatches=1)
        x = np.ones((4, 8), np.float32)
        with pytest.raises(pw.ProgramError, match="the loss of pipeline is a number"):
            step([blocks(np.random.default_rng(0), 1)], x, x)

    def test_what_is_no_pipeline(self, slices: list[Any]) -> None:
        stage = pw.jit(slices[0])(block)
        with pytest.raises(pw.ProgramError, match="not 0 and 2"):
            pipeline([], mean_square, microbatches=2)
        with pytest.raises(pw.ProgramError, match="not 1 and 0"):
            pipeline([stage], mean_square, microbatches=0)
        with pytest.raises(pw.ProgramError, match=r"stage 0 of pipeline is no pathway\.jit function"):
            pipeline([block], mean_square, microbatches=2)  # type: ignore[list-item]
        with pytest.raises(pw.ProgramError, match="has 1 stages, and params_of has 2"):
            pipeline([stage], mean_square, microbatches=2, params_of=[lambda p: p] * 2)
        with pytest.raises(pw.ProgramError, match="interleaved wants stage s on slice s modulo"):
            pipeline([stage, stage, pw.jit(slices[1])(block)], mean_square, microbatches=2, schedule="interleaved")

    def test_a_predicate_with_a_cycle(self, slices: list[Any]) -> None:
        stage = pw.jit(slices[0])(block)
        with pytest.raises(pw.ProgramError, match="the schedule odd waits for itself"):
            pipeline([stage], mean_square, microbatches=2, schedule=Schedule("odd", lambda first, second, shape: True))


class TestLayers:
    def test_cuts_by_number_name_and_cost(self) -> None:
        layers = ["embed", "a", "b", "c", "head"]
        assert split_layers(layers, at=[1, 4]) == [["embed"], ["a", "b", "c"], ["head"]]
        assert split_layers(layers, at=["c"]) == [["embed", "a", "b"], ["c", "head"]]
        assert split_layers(layers, stages=2, costs=[9, 1, 1, 1, 9]) == [["embed", "a"], ["b", "c", "head"]]
        assert split_layers(layers, stages=5) == [[layer] for layer in layers]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, "either"),
            ({"stages": 3}, "2 layers cannot be cut into 3"),
            ({"at": ["x"]}, "no layer 'x' among a, b"),
            ({"at": [0]}, "consecutive and full"),
            ({"at": [2]}, "consecutive and full"),
        ],
    )
    def test_cuts_that_cannot_be(self, options: Any, message: str) -> None:
        with pytest.raises(pw.ProgramError, match=message):
            split_layers(["a", "b"], **options)

    def test_a_sequential_module(self) -> None:
        nn = pytest.importorskip("flax.linen")
        model = nn.Sequential([nn.Dense(16), nn.tanh, nn.Dense(4), nn.Dense(3)])
        x = np.ones((2, 5), np.float32)
        variables = model.init(jax.random.key(0), x)
        for options in ({"stages": 2}, {"at": ["layers_1", "layers_3"]}):
            functions, parts = sequential_stages(model, variables, **options)
            y: Any = x
            for function, params in zip(functions, parts, strict=True):
                y = function(params, y)
            same(y, model.apply(variables, x))
            assert sum(leaf.size for leaf in jax.tree.leaves(parts)) == sum(
                leaf.size for leaf in jax.tree.leaves(variables)
            )


def test_the_two_halves_of_a_backward_pass_share_no_work() -> None:
    rng = np.random.default_rng(0)
    params, x = blocks(rng, 3), weights(rng, 4, 8)
    _, pullback = jax.vjp(jax.jit(block), params, x)
    residuals, tree = jax.tree.flatten(pullback)

    def backward(*flat: Any) -> list[Any]:
        of_params, of_x = tree.unflatten(flat[:-1])(flat[-1])
        return [of_x, *jax.tree.leaves(of_params)]

    parts = split(backward, [*residuals, x], 1)
    one = parts.first(*residuals, x)
    two = parts.second(*residuals, x, *one[1:])
    same([one[0], *two], backward(*residuals, x))

    def products(fun: Any, *args: Any) -> int:
        return str(jax.make_jaxpr(fun)(*args)).count("dot_general")

    whole = products(backward, *residuals, x)
    first, second = products(parts.first, *residuals, x), products(parts.second, *residuals, x, *one[1:])
    assert (first, second) == (6, 6)
    assert whole == 12
