"""Pipeline schedules: in which order a slice takes the passes of its stages. Plain data; no JAX and no runtime.

A pipeline is stages x microbatches x passes. What a pass needs of other passes is fixed (`Arrangement` knows it); what
a schedule adds is a predicate: which of two passes on one slice must come first. What it leaves open is filled in by
time: a slice that is free takes, among the passes whose inputs have come, a backward pass before a forward pass before
a pass for the weights, and the lowest microbatch. So a schedule is a few lines, and a drawing shows whether they are
right:

    greedy = Schedule("greedy", before=lambda first, second, shape: False)
    svg = greedy.draw(stages=4, microbatches=8)

Prior art: GPipe (Huang et al. 2018), 1F1B (PipeDream-flush, Narayanan et al. 2021), interleaved 1F1B (Megatron-LM),
ZB-H1 (Qi et al. 2023); schedules as predicates: shardy and jaxpp.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pathway.errors import ProgramError


class Pass(enum.Enum):
    """What a stage does with a microbatch. With a backward pass that is split, `BACKWARD` gives the gradient of the
    stage's input, for which the stage before it waits, and `WEIGHTS` that of its parameters, for which nobody does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHTS = "weights"


class Task(NamedTuple):
    """One pass of one microbatch through one stage."""

    stage: int
    microbatch: int
    kind: Pass

    def __str__(self) -> str:
        return f"{self.kind.value} of microbatch {self.microbatch} in stage {self.stage}"


@dataclass(frozen=True)
class Shape:
    """The pipeline that a schedule is for. `slice_of[stage]` numbers the slices that stages are on, from 0."""

    microbatches: int
    slice_of: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.slice_of)

    @property
    def slices(self) -> int:
        return max(self.slice_of) + 1

    def stages_on(self, slice: int) -> list[int]:
        return [stage for stage, where in enumerate(self.slice_of) if where == slice]


Before = Callable[[Task, Task, Shape], bool]
"""Whether the first pass must come before the second. Both are on the same slice."""

Cost = Callable[[Task], float]
"""How long a pass takes. Only proportions matter."""


@dataclass(frozen=True)
class Schedule:
    """`before` orders two passes of one slice. `splits_backward`: a stage's two gradients are passes of their own.
    `holds(slice, shape)` is a promise: for at most so many forward passes at once does a slice hold what their backward
    passes need. `check(shape)` raises for a pipeline that the schedule is not for."""

    name: str
    before: Before
    splits_backward: bool = False
    holds: Callable[[int, Shape], int] | None = None
    check: Callable[[Shape], None] = lambda shape: None

    def arrange(
        self, stages: int, microbatches: int, slices: int | Sequence[int] | None = None, cost: Cost | None = None
    ) -> Arrangement:
        """All passes in time. `slices`: how many (stage s is on slice s modulo that; default: one for each stage), or
        the slice of each stage. `cost` defaults to 1 for a forward and 2 for a whole backward pass."""
        if stages < 1 or microbatches < 1:
            raise ProgramError(f"a pipeline has stages and microbatches, not {stages} and {microbatches}")
        given = range(stages) if slices is None else slices
        slice_of = tuple(stage % given for stage in range(stages)) if isinstance(given, int) else tuple(given)
        shape = Shape(microbatches, slice_of)
        self.check(shape)
        return _arrange(self, shape, cost or (lambda task: default_cost(task, self.splits_backward)))

    def draw(self, stages: int, microbatches: int, slices: int | None = None, cost: Cost | None = None) -> str:
        """The schedule in time, as SVG. Arguments as for `arrange`."""
        return self.arrange(stages, microbatches, slices, cost).draw()

    def bubble(self, stages: int, microbatches: int, slices: int | None = None, cost: Cost | None = None) -> float:
        """The fraction of time that slices spend waiting. Arguments as for `arrange`."""
        return self.arrange(stages, microbatches, slices, cost).bubble

    def __str__(self) -> str:
        return self.name


def default_cost(task: Task, splits_backward: bool) -> float:
    return 1.0 if task.kind is not Pass.BACKWARD or splits_backward else 2.0


def tasks_of(shape: Shape, splits_backward: bool) -> Iterator[Task]:
    kinds = [Pass.FORWARD, Pass.BACKWARD] + [Pass.WEIGHTS] * splits_backward
    return (Task(s, m, kind) for s in range(shape.stages) for m in range(shape.microbatches) for kind in kinds)


def inputs_of(task: Task, stages: int) -> list[Task]:
    """The passes whose results a pass reads."""
    stage, microbatch, kind = task
    if kind is Pass.FORWARD:
        return [Task(stage - 1, microbatch, kind)] if stage else []
    if kind is Pass.WEIGHTS:
        return [Task(stage, microbatch, Pass.BACKWARD)]
    forward = Task(stage, microbatch, Pass.FORWARD)
    return [forward] if stage == stages - 1 else [forward, Task(stage + 1, microbatch, Pass.BACKWARD)]


@dataclass(frozen=True)
class Arrangement:
    """All passes of a pipeline in time, in units of one forward pass unless a cost was given."""

    schedule: Schedule
    shape: Shape
    spans: Mapping[Task, tuple[float, float]]

    @property
    def order(self) -> list[Task]:
        """All passes by when they start: what a pass needs stands before it."""
        return sorted(self.spans, key=lambda task: (self.spans[task], task.stage, task.microbatch))

    @property
    def length(self) -> float:
        """When the last pass ends."""
        return max(end for _, end in self.spans.values())

    @property
    def bubble(self) -> float:
        """The fraction of time that slices spend waiting."""
        busy = sum(end - start for start, end in self.spans.values())
        return 1 - busy / (self.length * self.shape.slices)

    def on(self, slice: int) -> list[Task]:
        """A slice's passes, in order."""
        return [task for task in self.order if self.shape.slice_of[task.stage] == slice]

    def held(self, slice: int) -> int:
        """For how many forward passes at once the slice holds what their backward passes need, at most."""
        last = Pass.WEIGHTS if self.schedule.splits_backward else Pass.BACKWARD
        held = most = 0
        for task in self.on(slice):
            held += task.kind is Pass.FORWARD
            most = max(most, held)
            held -= task.kind is last
        return most

    def draw(self, title: str = "") -> str:
        """As SVG."""
        from pathway.programs.drawing import draw_arrangement

        return draw_arrangement(self, title)


_PRIORITY = {Pass.BACKWARD: 0, Pass.FORWARD: 1, Pass.WEIGHTS: 2}


def _arrange(schedule: Schedule, shape: Shape, cost: Cost) -> Arrangement:
    tasks = list(tasks_of(shape, schedule.splits_backward))
    blockers = {task: set(inputs_of(task, shape.stages)) for task in tasks}
    for slice in range(shape.slices):
        mine = [task for task in tasks if shape.slice_of[task.stage] == slice]
        for second in mine:
            blockers[second].update(
                first for first in mine if first is not second and schedule.before(first, second, shape)
            )
    readers: dict[Task, list[Task]] = {task: [] for task in tasks}
    for task in tasks:
        for blocker in blockers[task]:
            readers[blocker].append(task)
    waits = {task: len(blockers[task]) for task in tasks}
    ready: list[list[tuple[int, int, int, Task]]] = [[] for _ in range(shape.slices)]
    free_at = [0.0] * shape.slices
    spans: dict[Task, tuple[float, float]] = {}
    events: list[tuple[float, int, Task | None]] = [
        (0.0, number, task) for number, task in enumerate(tasks) if not waits[task]
    ]  # (when, to break ties, the pass that is ready or None: a slice is free)
    number = len(tasks)
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, _, became_ready = heapq.heappop(events)
            if became_ready is not None:
                stage, microbatch, kind = became_ready
                heapq.heappush(ready[shape.slice_of[stage]], (_PRIORITY[kind], microbatch, -stage, became_ready))
        for slice in range(shape.slices):
            if not ready[slice] or free_at[slice] > now:
                continue
            task = heapq.heappop(ready[slice])[3]
            end = free_at[slice] = now + max(cost(task), 1e-9)
            spans[task] = (now, end)
            heapq.heappush(events, (end, number, None))
            for reader in readers[task]:
                waits[reader] -= 1
                if not waits[reader]:
                    # Its other blockers have ended by now or end later than they start: the latest end counts.
                    when = max(spans[blocker][1] for blocker in blockers[reader])
                    heapq.heappush(events, (when, number + 1, reader))
                    number += 1
            number += 1
    if len(spans) < len(tasks):
        raise ProgramError(_describe_cycle(schedule, shape, blockers, set(tasks) - spans.keys()))
    return Arrangement(schedule, shape, spans)


def _describe_cycle(schedule: Schedule, shape: Shape, blockers: Mapping[Task, set[Task]], stuck: set[Task]) -> str:
    def key(task: Task) -> tuple[int, int, str]:
        return task.stage, task.microbatch, task.kind.value

    path = [min(stuck, key=key)]
    while path[-1] not in path[:-1]:
        path.append(min(blockers[path[-1]] & stuck, key=key))
    cycle = path[path.index(path[-1]) :]
    lines = []
    for task, blocker in itertools.pairwise(cycle):
        why = "needs the" if blocker in inputs_of(task, shape.stages) else "is ordered after the"
        lines.append(f"  the {task} {why} {blocker}")
    return f"the schedule {schedule.name} waits for itself:\n" + "\n".join(lines)


# The schedules --------------------------------------------------------------------------------------------------------

gpipe = Schedule(
    "gpipe",
    before=lambda first, second, shape: first.kind is Pass.FORWARD and second.kind is Pass.BACKWARD,
    holds=lambda slice, shape: shape.microbatches * len(shape.stages_on(slice)),
)
"""All forward passes, then all backward passes."""


def _in_flight(first: Task, second: Task, most: int) -> bool:
    """Whether the first is the backward pass for which the second, a forward pass, waits when `most` are in flight."""
    return (
        (first.kind, second.kind) == (Pass.BACKWARD, Pass.FORWARD)
        and first.stage == second.stage
        and second.microbatch >= first.microbatch + most
    )


def _one_forward_one_backward(first: Task, second: Task, shape: Shape) -> bool:
    return _in_flight(first, second, shape.stages - first.stage)


one_forward_one_backward = Schedule(
    "1f1b",
    before=_one_forward_one_backward,
    holds=lambda slice, shape: sum(min(shape.microbatches, shape.stages - s) for s in shape.stages_on(slice)),
)
"""A stage takes a new microbatch only when one is done of as many as there are stages from it to the end."""

eager = Schedule(
    "eager_1f1b",
    before=lambda first, second, shape: _in_flight(first, second, shape.stages - first.stage + 1),
    holds=lambda slice, shape: sum(min(shape.microbatches, shape.stages - s + 1) for s in shape.stages_on(slice)),
)
"""1F1B with one microbatch more in flight. In 1F1B a stage has nothing to do while a cotangent travels to it and the
next activation from it; the one more fills that time."""


def _zero_bubble(first: Task, second: Task, shape: Shape) -> bool:
    weights_first = (
        (first.kind, second.kind) == (Pass.WEIGHTS, Pass.FORWARD)
        and first.stage == second.stage
        and second.microbatch >= first.microbatch + shape.stages
    )
    return weights_first or _one_forward_one_backward(first, second, shape)


zero_bubble = Schedule(
    "zero_bubble",
    before=_zero_bubble,
    splits_backward=True,
    holds=lambda slice, shape: len(shape.stages_on(slice)) * min(shape.microbatches, shape.stages),
)
"""After ZB-H1: 1F1B whose gradients of weights fill the time in which a stage would wait, within the memory that 1F1B
takes in its first stage. (The greedy order is at most two passes longer than ZB-H1's own.)"""


def _interleaved_position(task: Task, shape: Shape) -> int:
    """The place of a pass in its slice's order, as in Megatron-LM: groups of as many microbatches as there are slices
    go through all stages of the slice; after a warm-up, forward and backward passes take turns."""
    slices, chunks = shape.slices, shape.stages // shape.slices
    group, member = divmod(task.microbatch, slices)
    size = min(slices, shape.microbatches - group * slices)
    chunk = task.stage // slices if task.kind is Pass.FORWARD else chunks - 1 - task.stage // slices
    number = group * slices * chunks + chunk * size + member
    total, warm_up = shape.microbatches * chunks, _interleaved_warm_up(task.stage % slices, shape)
    if task.kind is Pass.FORWARD:
        return number + max(0, number - warm_up)
    return number + min(total, warm_up + number + 1)


def _interleaved_warm_up(slice: int, shape: Shape) -> int:
    slices, chunks = shape.slices, shape.stages // shape.slices
    behind = slices - slice - 1
    return min(shape.microbatches * chunks, 2 * behind + (chunks - 1) * slices if chunks > 1 else behind)


def _check_interleaved(shape: Shape) -> None:
    if any(where != stage % shape.slices for stage, where in enumerate(shape.slice_of)) or shape.stages % shape.slices:
        raise ProgramError(
            f"interleaved wants stage s on slice s modulo the number of slices, and as many stages on each; the stages "
            f"are on slices {list(shape.slice_of)}"
        )
    if shape.slices < shape.stages and shape.microbatches % shape.slices:
        raise ProgramError(
            f"interleaved wants a multiple of its {shape.slices} slices as microbatches, not {shape.microbatches}"
        )


interleaved = Schedule(
    "interleaved",
    before=lambda first, second, shape: _interleaved_position(first, shape) < _interleaved_position(second, shape),
    holds=lambda slice, shape: min(
        shape.microbatches * shape.stages // shape.slices, _interleaved_warm_up(slice, shape) + 1
    ),
    check=_check_interleaved,
)
"""1F1B with several stages on each slice, in turn: the bubble is as many times smaller."""

by_name: Mapping[str, Schedule] = {
    s.name: s for s in (gpipe, one_forward_one_backward, eager, interleaved, zero_bubble)
}
"""The schedules that have a name."""


def schedule_of(given: Schedule | str | Callable[[Task, Task], bool]) -> Schedule:
    """The schedule that a user means by a value, a name or a predicate `before(first, second)`."""
    if isinstance(given, Schedule):
        return given
    if callable(given):
        return Schedule(getattr(given, "__name__", "custom"), lambda first, second, shape: given(first, second))
    if given not in by_name:
        raise ProgramError(f"there is no schedule {given!r}: {', '.join(by_name)}, or a predicate of your own")
    return by_name[given]
