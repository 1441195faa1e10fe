"""Pipelines beside the ideal of their schedule, SPMD, a hand-written loop, one island, and sequential dispatch.

`python -m bench.pipeline [--quick]`. Lines whose case says "device wait" hold their devices for a time without using a
core (`bench.device_wait`), so that islands which share this machine's cores do not slow each other down; the others do
real arithmetic. A device wait's backward pass is as long as its forward pass, and has no part for the weights.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("NPROC", "64")  # XLA's pool has a thread a core, which starves more devices than cores
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")  # the rivals' own devices, in this process
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pathway as pw
from bench.device_wait import device_wait
from bench.harness import Goal, Measure, interleaved_medians, note_machine, report
from pathway.programs import Pass, pipeline
from pathway.programs.schedules import by_name

BENCH = "pipeline"
STAGES, MICROBATCHES = 4, 16
CHAIN = 8
WAIT_US, SHORT_WAIT_US = 10_000, 100
WIDTH, TINY_WIDTH = 768, 8
Tree = Any

ISLANDS = {"one": {"hosts": 1, "devices": CHAIN}} | {name: {"hosts": 1, "devices": 1} for name in "abcd"}


def waiting(params: Tree, x: Any) -> Any:
    """A stage that holds its device."""
    held: Any = device_wait(x + params, WAIT_US)
    return held


def computing(params: Tree, x: Any) -> Any:
    """A stage that computes."""
    return x + jnp.tanh(x @ params["in"]) @ params["out"]


def mean_square(y: Any, t: Any) -> Any:
    return ((y - t) ** 2).mean()


def computing_params(width: int) -> list[Tree]:
    rng = np.random.default_rng(0)
    return [
        {name: (rng.normal(size=(width, width)) / width).astype(np.float32) for name in ("in", "out")}
        for _ in range(STAGES)
    ]


def ours(slices: Sequence[pw.Slice], fun: Callable[..., Any], host: list[Tree], batch: int, **options: Any) -> Any:
    """A call of the pipeline with everything in place."""
    step = pipeline([pw.jit(slice)(fun) for slice in slices], mean_square, **options)
    params = [pw.put(tree, slice) for tree, slice in zip(host, slices, strict=True)]
    width = jax.tree.leaves(host)[0].shape[-1]
    x, t = np.ones((batch, width), np.float32), np.zeros((batch, width), np.float32)
    inputs, targets = pw.put(x, slices[0]), pw.put(t, slices[-1])
    return lambda: step(params, inputs, targets)


def each_waited_for(call: Callable[[], Any]) -> Measure:
    """The seconds of calls that do not overlap."""

    def measure(calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            jax.block_until_ready(call())
        return time.perf_counter() - begin

    return measure


def together(call: Callable[[], Any]) -> Measure:
    """The seconds of calls that are made one after the other and waited for at the end."""

    def measure(calls: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready([call() for _ in range(calls)])
        return time.perf_counter() - begin

    return measure


def by_hand(fun: Callable[..., Any], host: list[Tree], batch: int, microbatches: int) -> Callable[[], Any]:
    """The same step as a loop of jitted calls and `device_put` over the devices of this process."""
    devices = jax.devices()[:STAGES]
    params = [jax.device_put(tree, device) for tree, device in zip(host, devices, strict=True)]
    width = jax.tree.leaves(host)[0].shape[-1]
    size = batch // microbatches
    x = jax.device_put(np.ones((size, width), np.float32), devices[0])
    t = jax.device_put(np.zeros((size, width), np.float32), devices[-1])
    order = by_name["1f1b"].arrange(STAGES, microbatches).order

    def last(params: Tree, x: Any, t: Any) -> Any:
        value, pullback = jax.vjp(lambda params, x: mean_square(fun(params, x), t) / microbatches, params, x)
        return value, *pullback(jnp.ones(()))

    def backward(pullback: Any, cotangent: Any, sums: Tree) -> Any:
        gradient, cotangent = pullback(cotangent)
        return jax.tree.map(jnp.add, sums, gradient), cotangent

    zeros = [
        jax.device_put(jax.tree.map(np.zeros_like, tree), device) for tree, device in zip(host, devices, strict=True)
    ]
    forward, last_compiled = jax.jit(lambda params, x: jax.vjp(fun, params, x)), jax.jit(last)
    backward_compiled = jax.jit(backward)
    add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))

    def step() -> Any:
        sums, values = list(zeros), []
        outputs: dict[Any, Any] = {}
        pullbacks: dict[Any, Any] = {}
        cotangents: dict[Any, Any] = {}
        for stage, microbatch, kind in order:
            at = (stage, microbatch)
            if kind is Pass.FORWARD:
                given = x if stage == 0 else jax.device_put(outputs.pop((stage - 1, microbatch)), devices[stage])
                if stage < STAGES - 1:
                    outputs[at], pullbacks[at] = forward(params[stage], given)
                else:
                    value, gradient, cotangents[at] = last_compiled(params[stage], given, t)
                    values.append(value)
                    sums[stage] = add(sums[stage], gradient)
            elif stage < STAGES - 1:
                given = jax.device_put(cotangents.pop((stage + 1, microbatch)), devices[stage])
                sums[stage], cotangents[at] = backward_compiled(pullbacks.pop(at), given, sums[stage])
        return values, sums

    return step


def spmd(host: list[Tree], batch: int) -> Callable[[], Any]:
    """The same model tensor parallel over all devices of this process, the batch in one piece."""
    mesh = Mesh(np.array(jax.devices()[:STAGES]), ("model",))
    specs = {"in": PartitionSpec(None, "model"), "out": PartitionSpec("model", None)}
    params = [{k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in tree.items()} for tree in host]
    whole = NamedSharding(mesh, PartitionSpec())
    x = jax.device_put(np.ones((batch, WIDTH), np.float32), whole)

    def step(params: list[Tree], x: Any) -> Any:
        def loss(params: list[Tree]) -> Any:
            y = x
            for tree in params:
                y = computing(tree, y)
            return mean_square(y, 0.0)

        return jax.value_and_grad(loss)(params)

    compiled = jax.jit(step)
    return lambda: compiled(params, x)


def wait_cases(rounds: int, microbatches: int) -> None:
    """Compute-bound, by device waits: the ideal of each schedule, and stages on four islands beside stages on one."""
    host: list[Tree] = [np.zeros(TINY_WIDTH, np.float32) for _ in range(STAGES)]
    one = [pw.slice(1, island="one") for _ in range(STAGES)]
    four = [pw.slice(1, island=name) for name in "abcd"]
    measures, ideal_s = {}, {}
    for name, slices in (("one island", one), ("four islands", four)):
        for schedule in ("1f1b", "eager_1f1b"):
            options = {"microbatches": microbatches, "schedule": schedule, "cost": lambda task: 1.0}
            call = ours(slices, waiting, host, microbatches, **options)
            jax.block_until_ready(call())
            measures[f"{name} {schedule}"] = each_waited_for(call)
            length = by_name[schedule].arrange(STAGES, microbatches, cost=lambda task: 1.0).length
            ideal_s[f"{name} {schedule}"] = length * WAIT_US * 1e-6
    medians = interleaved_medians(measures, rounds=rounds, round_s=0.5)
    for name, seconds in medians.items():
        case = f"compute-bound {STAGES} x {microbatches}, device wait, {name}"
        goal = Goal("ratio", ">=", 0.95)
        report(BENCH, case, 1 / seconds, "steps/s", rival="ideal", rival_value=1 / ideal_s[name], goal=goal)
    for schedule in ("1f1b", "eager_1f1b"):
        report(
            BENCH,
            f"stages on four islands, {schedule}, device wait (Figure 10)",
            1 / medians[f"four islands {schedule}"],
            "steps/s",
            rival="stages on one island",
            rival_value=1 / medians[f"one island {schedule}"],
            goal=Goal("ratio", ">=", 0.98),
        )
    for slice in (*one, *four):
        slice.release()


def arithmetic_cases(rounds: int, microbatches: int) -> None:
    """Real arithmetic: beside SPMD, and overhead-bound beside a loop by hand."""
    slices = [pw.slice(1, island="one") for _ in range(STAGES)]
    batch = 64 * microbatches
    host = computing_params(WIDTH)
    for schedule in ("1f1b", "zero_bubble"):
        call = ours(slices, computing, host, batch, microbatches=microbatches, schedule=schedule)
        medians = interleaved_medians(
            {"ours": each_waited_for(call), "rival": each_waited_for(spmd(host, batch))}, rounds=rounds, round_s=0.5
        )
        report(
            BENCH,
            f"compute-bound {STAGES} x {microbatches}, real arithmetic, {schedule} (Table 2)",
            batch / medians["ours"],
            "examples/s",
            rival="SPMD tensor parallel, one process",
            rival_value=batch / medians["rival"],
            goal=Goal("ratio", ">=", 1.0),
        )
    tiny = computing_params(TINY_WIDTH)
    call = ours(slices, computing, tiny, 16, microbatches=4)
    loop = by_hand(computing, tiny, 16, 4)
    medians = interleaved_medians({"ours": together(call), "rival": together(loop)}, rounds=rounds, round_s=0.5)
    report(
        BENCH,
        "overhead-bound 4 x 4",
        1 / medians["ours"],
        "steps/s",
        rival="loop of jitted calls by hand, one process",
        rival_value=1 / medians["rival"],
        goal=Goal("ratio", ">=", 0.67),
    )
    for slice in slices:
        slice.release()


def dispatch_case(rounds: int) -> None:
    """Figure 7: a chain of short stages as one program, and each stage dispatched when the one before it has ended."""
    slices = [pw.slice(1, island="one") for _ in range(CHAIN)]
    stages = [pw.jit(slice)(lambda x: device_wait(x, SHORT_WAIT_US)) for slice in slices]
    x = pw.put(np.zeros(TINY_WIDTH, np.float32), slices[0])

    @pw.program(fuse=False)
    def chain(x: Any) -> Any:
        for stage in stages:
            x = stage(x)
        return x

    def sequential() -> Any:
        y: Any = x
        for stage in stages:
            y = stage(y).block_until_ready()
        return y

    medians = interleaved_medians(
        {"ours": together(lambda: chain(x)), "rival": each_waited_for(sequential)}, rounds=rounds, round_s=0.5
    )
    report(
        BENCH,
        f"parallel dispatch, {CHAIN} stages of {SHORT_WAIT_US} us device wait (Figure 7)",
        CHAIN / medians["ours"],
        "stages/s",
        rival="sequential dispatch",
        rival_value=CHAIN / medians["rival"],
        goal=Goal("ratio", ">=", 2),
    )
    for slice in slices:
        slice.release()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds: for a look, not for a figure")
    options = parser.parse_args(argv)
    rounds = 3 if options.quick else 9
    note_machine("jax", "pyzmq")
    with pw.connect(islands=ISLANDS, preload=("bench.device_wait",)):
        dispatch_case(rounds)
        wait_cases(rounds, MICROBATCHES)
        arithmetic_cases(rounds, MICROBATCHES)


if __name__ == "__main__":
    main()
