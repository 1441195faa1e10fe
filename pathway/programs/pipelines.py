"""A pipeline: stages on slices, a batch in microbatches, a schedule; out come the loss and the gradients.

The stages are `pathway.jit` functions `stage(params, x)`. The pipeline calls them, and the backward passes that JAX
derives of them, in the schedule's order, and the program keeps every device to that order (`schedule="program"`). So
what a schedule promises of memory holds on the devices, and one message starts the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pathway as pw
from pathway.errors import ProgramError
from pathway.programs.schedules import Arrangement, Cost, Pass, Schedule, Task, schedule_of
from pathway.programs.splitting import SplitBackward, split

Tree = Any
"""A pytree of arrays."""

StageParams = Callable[[Tree], Tree]
"""What a stage takes of the parameters: leaves of theirs, as they are."""


def pipeline(
    stages: Sequence[pw.Stage],
    loss: Callable[..., Any],
    *,
    microbatches: int,
    schedule: Schedule | str | Callable[[Task, Task], bool] = "1f1b",
    params_of: Sequence[StageParams] | None = None,
    cost: Cost | None = None,
    name: str = "pipeline",
) -> Pipeline:
    """The training step of a pipeline: `value, gradients = step(params, inputs, targets)`.

    `stages` are `pathway.jit` functions `stage(params, x)`, on any slices: the first takes the inputs, each of the
    others what the one before gives, which may be a pytree. `loss(output, targets)` is the mean over the examples that
    it is given. The batch is cut along its first dimension into `microbatches`; the step's loss, and what its gradients
    are of, is the mean over them. `schedule` is "gpipe", "1f1b", "interleaved", "zero_bubble", or a predicate.

    `params` is a sequence with an entry for each stage, unless `params_of` gives a function for each stage which picks
    what it takes. A parameter that several stages pick is tied: its gradient is the sum, and it lives with the first.
    `cost(task)` is how long the passes of the stages take, for the order where the schedule leaves it open.

    A step can be called, or be part of a larger program (`@pathway.program(schedule="program")`).
    """
    return Pipeline(stages, loss, microbatches, schedule_of(schedule), params_of, cost, name)


class Pipeline:
    """Made by `pipeline`."""

    def __init__(
        self,
        stages: Sequence[pw.Stage],
        loss: Callable[..., Any],
        microbatches: int,
        schedule: Schedule,
        params_of: Sequence[StageParams] | None,
        cost: Cost | None,
        name: str,
    ) -> None:
        if params_of is not None and len(params_of) != len(stages):
            raise ProgramError(f"{name} has {len(stages)} stages, and params_of has {len(params_of)} functions")
        for number, stage in enumerate(stages):
            if not isinstance(stage, pw.Stage):
                raise ProgramError(f"stage {number} of {name} is no pathway.jit function, but {stage!r}")
        self.stages, self.loss, self.microbatches, self.name = tuple(stages), loss, microbatches, name
        self._params_of = params_of
        numbers: dict[int, int] = {}
        slice_of = [numbers.setdefault(stage.slice.number, len(numbers)) for stage in stages]
        self.arrangement: Arrangement = schedule.arrange(len(stages), microbatches, slice_of or None, cost)
        self._order = self.arrangement.order
        self._program = pw.program(schedule="program", name=name)(self._step)
        self._evaluate = pw.program(name=f"{name} forward")(self._forward_only)

    @property
    def schedule(self) -> Schedule:
        return self.arrangement.schedule

    def __call__(self, params: Tree, inputs: Tree, targets: Tree) -> tuple[Any, Tree]:
        """The mean loss of the batch, and its gradient by the parameters."""
        value, gradients = self._program(params, inputs, targets)
        return value, gradients

    def evaluate(self, params: Tree, inputs: Tree, targets: Tree) -> Any:
        """The mean loss alone."""
        return self._evaluate(params, inputs, targets)

    def trace(self, params: Tree, inputs: Tree, targets: Tree) -> pw.Traced:
        """As `pathway.Program.trace`."""
        traced: pw.Traced = self._program.trace(params, inputs, targets)
        return traced

    def lower(self, params: Tree, inputs: Tree, targets: Tree) -> pw.Lowered | pw.LoweredControl:
        """As `pathway.Program.lower`."""
        return self.trace(params, inputs, targets).lower()

    def _step(self, params: Tree, inputs: Tree, targets: Tree) -> tuple[Any, Tree]:
        return _Passes(self, params, inputs, targets).run(self._order)

    def _forward_only(self, params: Tree, inputs: Tree, targets: Tree) -> Any:
        passes = _Passes(self, params, inputs, targets)
        total: Any = 0.0
        for microbatch in range(self.microbatches):
            x = passes.inputs[microbatch]
            for number, stage in enumerate(self.stages):
                x = passes.called(number, stage, passes.params[number], x)
            total += self.loss(x, passes.targets[microbatch])
        return total / self.microbatches

    def __repr__(self) -> str:
        return (
            f"<pipeline {self.name}: {len(self.stages)} stages, {self.microbatches} microbatches, {self.schedule.name}>"
        )


class _Passes:
    """The passes of one step while it is traced."""

    def __init__(self, pipeline: Pipeline, params: Tree, inputs: Tree, targets: Tree) -> None:
        self.pipeline = pipeline
        self.leaves, self.tree = jax.tree.flatten(params)
        self.picked = _picked(pipeline, params, self.tree, len(self.leaves))
        self.params = [jax.tree.map(lambda index: self.leaves[index], picked) for picked in self.picked]
        self.inputs = _cut(inputs, pipeline.microbatches, f"the inputs of {pipeline.name}")
        self.targets = _cut(targets, pipeline.microbatches, f"the targets of {pipeline.name}")
        self.outputs: dict[tuple[int, int], Tree] = {}
        self.pullbacks: dict[tuple[int, int], Callable[[Tree], Any]] = {}
        self.cotangents: dict[tuple[int, int], Tree] = {}
        self.rest: dict[tuple[int, int], Callable[[], Tree]] = {}
        self.losses: list[Any] = []
        self.gradients: list[Tree] = [None] * len(pipeline.stages)
        self.sums: dict[int, list[Any]] = {}
        self.backwards: dict[int, pw.Stage] = {}
        self.of_params: dict[int, Callable[[Sequence[Any]], Tree]] = {}
        self.of_inputs: dict[int, Callable[[Sequence[Any]], Tree]] = {}
        self.splits: dict[int, tuple[Any, pw.Stage, pw.Stage]] = {}

    def run(self, order: Sequence[Task]) -> tuple[Any, Tree]:
        passes = {Pass.FORWARD: self.forward, Pass.BACKWARD: self.backward, Pass.WEIGHTS: self.weights}
        for stage, microbatch, kind in order:
            passes[kind](stage, microbatch)
        total = self.losses[0]
        for value in self.losses[1:]:
            total = total + value
        return total / self.pipeline.microbatches, self.tree.unflatten(self.summed())

    # Passes ----------------------------------------------------------------------------------------------------------

    def forward(self, number: int, microbatch: int) -> None:
        at, stage = (number, microbatch), self.pipeline.stages[number]
        if number == 0:
            x = self.inputs[microbatch]
            output, self.pullbacks[at] = self.pulled(number, lambda params: stage(params, x), self.params[0])
        else:
            x = self.outputs.pop((number - 1, microbatch))
            output, self.pullbacks[at] = self.pulled(number, stage, self.params[number], x)
        if number < len(self.pipeline.stages) - 1:
            self.outputs[at] = output
            return
        value, pullback = jax.vjp(lambda output: self.pipeline.loss(output, self.targets[microbatch]), output)
        if jnp.shape(value) != ():
            raise ProgramError(f"the loss of {self.pipeline.name} is a number, not an array of shape {value.shape}")
        self.losses.append(value)
        [self.cotangents[at]] = pullback(jnp.full((), 1 / self.pipeline.microbatches, value.dtype))

    def backward(self, number: int, microbatch: int) -> None:
        at = (number, microbatch)
        pullback, cotangent = self.pullbacks.pop(at), self.cotangents.pop(at)
        if number and self.pipeline.schedule.splits_backward:
            self.cotangents[number - 1, microbatch], self.rest[at] = self.split(number, pullback, cotangent)
            return
        # Of the first stage nobody waits for the backward pass, which is therefore not worth splitting.
        of_input = self.pulled_back(number, pullback, cotangent)
        if number:
            self.cotangents[number - 1, microbatch] = of_input

    def weights(self, number: int, microbatch: int) -> None:
        if not number:
            return
        gradient, before = self.rest.pop((number, microbatch))(), self.gradients[number]
        self.gradients[number] = gradient if before is None else jax.tree.map(_sum, before, gradient)

    def called(self, number: int, function: Callable[..., Any], *args: Any) -> Any:
        """A call of a stage, with a clear error where it does not take what the one before it gives."""
        try:
            return function(*args)
        except (TypeError, ValueError) as error:
            shapes = jax.tree.map(lambda x: jax.typeof(x).str_short(), args[-1])
            before = f"stage {number - 1} gives" if number else "it is given, beside the inputs,"
            reason = str(error).partition("\n-----")[0]  # what JAX adds about tracebacks comes after
            raise ProgramError(
                f"stage {number} of {self.pipeline.name} ({self.pipeline.stages[number].name}) does not take what "
                f"{before} {shapes}: {reason}"
            ) from error

    def pulled(self, number: int, function: Callable[..., Any], *args: Any) -> Any:
        return self.called(number, lambda *args: jax.vjp(function, *args), *args)

    # Gradients -------------------------------------------------------------------------------------------------------

    def pulled_back(self, number: int, pullback: Any, cotangent: Tree) -> Tree:
        """Adds the gradient of the stage's parameters to the sum. Returns that of its input (of the first stage, None).

        The sum is made in the backward pass's own computation: outside, it would be one more."""
        residuals, tree = jax.tree.flatten(pullback)
        given, nothing = _without_float0(cotangent)
        if number not in self.backwards:

            def backward(residuals: Sequence[Any], given: Sequence[Any], sums: Sequence[Any] | None) -> Any:
                gradient, *of_input = tree.unflatten(residuals)(nothing(given))
                leaves, self.of_params[number] = _without_float0(gradient)
                inputs, self.of_inputs[number] = _without_float0(of_input)
                return leaves if sums is None else [a + b for a, b in zip(sums, leaves, strict=True)], inputs

            self.backwards[number] = self.placed(number, backward, "")
        with jax.named_scope("transpose(pipeline)"):  # so autodiff itself marks its backward passes
            sums, inputs = self.backwards[number](residuals, given, self.sums.get(number))
        self.sums[number] = sums
        self.gradients[number] = self.of_params[number](sums)
        of_input = self.of_inputs[number](inputs)
        return of_input[0] if of_input else None

    def placed(self, number: int, function: Callable[..., Any], what: str) -> pw.Stage:
        """A part of a stage's backward pass, on the stage's slice."""
        stage = self.pipeline.stages[number]
        return pw.jit(stage.slice, in_specs=None, out_specs=None, name=f"{stage.name}{what}")(function)

    def summed(self) -> list[Any]:
        """The gradient of every leaf. Of equal operands the last decides where a sum is made, so the first stage that
        picked the leaf comes last."""
        terms: list[list[Any]] = [[] for _ in self.leaves]
        for picked, gradient in zip(reversed(self.picked), reversed(self.gradients), strict=True):
            for index, term in zip(jax.tree.leaves(picked), jax.tree.leaves(gradient), strict=True):
                terms[index].append(term)
        gradients = []
        for leaf, its_terms in zip(self.leaves, terms, strict=True):
            # The barrier makes the zeros where the leaf is: with nothing to read they could be anywhere.
            total = its_terms[0] if its_terms else jax.lax.optimization_barrier((jnp.zeros_like(leaf), leaf))[0]
            for term in its_terms[1:]:
                total = _sum(total, term)
            gradients.append(total)
        return gradients

    def split(self, number: int, pullback: Any, cotangent: Tree) -> tuple[Tree, Callable[[], Tree]]:
        """The gradient of the stage's input now, and that of its parameters when it is asked for."""
        residuals, tree = jax.tree.flatten(pullback)
        given, shape = jax.tree.flatten(cotangent)
        arguments = [*residuals, *given]
        if number not in self.splits:
            self.splits[number] = self.make_split(number, tree, shape, arguments, len(residuals))
        (parts, trees), first, second = self.splits[number]
        with jax.named_scope("transpose(pipeline)"):
            results = first(*arguments)
        input_gradient = trees[0].unflatten(results[: parts.first_results])
        handed_on = results[parts.first_results :]
        return input_gradient, lambda: trees[1].unflatten(second(*arguments, *handed_on))

    def make_split(self, number: int, tree: Any, shape: Any, arguments: Sequence[Any], residuals: int) -> Any:
        trees: list[Any] = []

        def backward(*flat: Any) -> list[Any]:
            pullback = tree.unflatten(flat[:residuals])
            gradient, of_input = pullback(shape.unflatten(flat[residuals:]))
            trees[:] = [jax.tree.structure(of_input), jax.tree.structure(gradient)]
            return [*jax.tree.leaves(of_input), *jax.tree.leaves(gradient)]

        of_input = jax.eval_shape(backward, *arguments)
        if any(result.dtype == jax.dtypes.float0 for result in of_input):
            raise ProgramError(
                f"{self.pipeline.schedule.name} cannot split stage {number} of {self.pipeline.name}: it has integers "
                "among its parameters, or takes some from the stage before"
            )
        parts: SplitBackward = split(backward, arguments, trees[0].num_leaves)
        first, second = self.placed(number, parts.first, ""), self.placed(number, parts.second, " weights")
        return (parts, trees), first, second


def _without_float0(tree: Tree) -> tuple[list[Any], Callable[[Sequence[Any]], Tree]]:
    """The leaves that are arrays, and how the tree is made of them: the cotangents of integers are no arrays, and do
    not enter computations."""
    leaves, structure = jax.tree.flatten(tree)
    known = [leaf if leaf.dtype == jax.dtypes.float0 else None for leaf in leaves]

    def whole(arrays: Sequence[Any]) -> Tree:
        rest = iter(arrays)
        return structure.unflatten([next(rest) if leaf is None else leaf for leaf in known])

    return [leaf for leaf in leaves if leaf.dtype != jax.dtypes.float0], whole


def _sum(first: Any, second: Any) -> Any:
    return first if jax.dtypes.float0 == first.dtype else first + second


def _picked(pipeline: Pipeline, params: Tree, tree: Any, count: int) -> list[Tree]:
    """For each stage the tree that it takes, with the numbers of the parameters' leaves for leaves."""
    numbered = tree.unflatten(range(count))
    if pipeline._params_of is not None:
        picked = [pick(numbered) for pick in pipeline._params_of]
        for number, leaf in ((number, leaf) for number, some in enumerate(picked) for leaf in jax.tree.leaves(some)):
            if type(leaf) is not int:
                raise ProgramError(
                    f"params_of[{number}] of {pipeline.name} must pick leaves of the parameters, not make new ones"
                )
        return picked
    stages = len(pipeline.stages)
    if not isinstance(params, Sequence) or len(params) != stages:
        kind = f"{type(params).__name__} of {len(params)}" if hasattr(params, "__len__") else type(params).__name__
        raise ProgramError(
            f"{pipeline.name} takes a sequence of {stages} parameter trees, one for each stage, not a {kind}; "
            "params_of says otherwise"
        )
    return list(numbered)


def _cut(tree: Tree, microbatches: int, what: str) -> list[Tree]:
    """The microbatches of a batch."""
    leaves, structure = jax.tree.flatten_with_path(tree)
    cut = []
    for path, leaf in leaves:
        shape = np.shape(leaf)
        if not shape or shape[0] % microbatches or not shape[0]:
            where = what + jax.tree_util.keystr(path)
            raise ProgramError(f"{where}: {microbatches} microbatches do not divide a batch of shape {shape}")
        size = shape[0] // microbatches
        cut.append([leaf[m * size : (m + 1) * size] for m in range(microbatches)])
    return [structure.unflatten([parts[m] for parts in cut]) for m in range(microbatches)]
