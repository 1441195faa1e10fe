"""The script: how the plans of a program that is controlled by data follow one another. Plain data, no JAX.

A program with conditions and loops over slices becomes several plans. The script says which of them runs when; the
scheduler carries it out, so a decision costs a round trip between an island and the scheduler, and none of the client.

Words. A *body* is a list of tasks over *registers*: the whole program, a branch, or one step of a loop. A register
holds a buffer, the bytes of a small host array, or a decision: the small integers that a plan reports. Registers from 0
up are the body's own; -1, -2, ... are the script's arguments 0, 1, ..., the same in every body.

Invariants
  K-1  A body only names bodies behind it in the script, so a script ends, save for its loops.
  K-2  Every register of a body is written by one task, or is an input: registers 0 .. inputs - 1.
  K-3  The main body is body 0; only its plans make buffers that the client has named.
  K-4  What decides is decided by a plan of the same body: nothing is carried out twice for one decision, so all that a
       scheduler does for a script at once is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

MOST_DEPTH = 64
"""Bodies within one another. The scheduler goes through them by calls within calls."""

MOST_REGISTERS = 1 << 20
"""Of a body."""


class RunPlan(Struct, frozen=True, array_like=True, tag=1):
    """Run a plan. `arguments[i]` are the registers of its part i. Result number r goes to register `results[r]`, and
    lies on the island of part `homes[r]`. The plan reports result `decisions[k][0]`, to register `decisions[k][1]`.
    In the main body the results are named by the client, from `first` on."""

    plan: int
    arguments: tuple[tuple[int, ...], ...]
    results: tuple[int, ...]
    homes: tuple[int, ...]
    decisions: tuple[tuple[int, int], ...] = ()
    first: int = 0


class Choose(Struct, frozen=True, array_like=True, tag=2):
    """Carry out `branches[decision]`. `inputs[i]` become the first registers of branch i, `outputs` take what it puts
    out. A branch that is -1 must not be chosen: then the run fails, for the reason in `refusals`."""

    decision: int
    branches: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    refusals: tuple[str, ...] = ()


class Repeat(Struct, frozen=True, array_like=True, tag=3):
    """Carry out `entry`, then `step` for as long as the last output of the one before is a decision for it. What they
    put out before that decision is carried: the first inputs of `step`, before `fixed`. `outputs` take it in the end.
    """

    entry: int
    step: int
    inputs: tuple[int, ...]
    fixed: tuple[int, ...]
    outputs: tuple[int, ...]


Task = RunPlan | Choose | Repeat


class Body(Struct, frozen=True, array_like=True):
    registers: int
    inputs: int
    tasks: tuple[Task, ...]
    outputs: tuple[int, ...] = ()


class Script(Struct, frozen=True, array_like=True):
    """`arguments`: how many a run brings. `results`: how many buffers the client names for a run."""

    bodies: tuple[Body, ...]
    arguments: int
    results: int


def reads(task: Task) -> Iterator[int]:
    """The registers that a task needs before it can begin."""
    if isinstance(task, RunPlan):
        for part in task.arguments:
            yield from part
    elif isinstance(task, Choose):
        yield task.decision
        for inputs in task.inputs:
            yield from inputs
    else:
        yield from task.inputs
        yield from task.fixed


def writes(task: Task) -> tuple[int, ...]:
    """The registers that a task sets."""
    if isinstance(task, RunPlan):
        return (*task.results, *(register for _, register in task.decisions))
    return task.outputs


def why_invalid(script: Script) -> str:
    """What is wrong with a script that somebody sent ("" if nothing is)."""
    if not script.bodies:
        return "it has no bodies"
    depths = [0] * len(script.bodies)
    for number in reversed(range(len(script.bodies))):
        body = script.bodies[number]
        problem = _why_body_invalid(script, number, body)
        if problem:
            return f"body {number} {problem}"
        depths[number] = 1 + max((depths[called] for task in body.tasks for called in _calls(task)), default=0)
        if depths[number] > MOST_DEPTH:
            return f"it has more than {MOST_DEPTH} bodies within one another"
    made = sum(len(task.results) for task in script.bodies[0].tasks if isinstance(task, RunPlan))
    if script.results != made:
        return f"the client names {script.results} buffers, and its main body makes {made}"
    return ""


def _calls(task: Task) -> tuple[int, ...]:
    """The bodies that a task carries out."""
    if isinstance(task, RunPlan):
        return ()
    if isinstance(task, Choose):
        return tuple(branch for branch in task.branches if branch >= 0)
    return task.entry, task.step


def decisions_of(body: Body) -> set[int]:
    """The registers that hold what plans of this very body decide."""
    return {register for task in body.tasks if isinstance(task, RunPlan) for _, register in task.decisions}


def _why_body_invalid(script: Script, number: int, body: Body) -> str:
    written_by_tasks = sum(len(writes(task)) for task in body.tasks)
    if not 0 <= body.inputs <= body.registers <= MOST_REGISTERS or written_by_tasks > body.registers:
        return f"has {body.registers} registers, of which {body.inputs} are inputs"
    written = set(range(body.inputs))
    decisions = decisions_of(body)
    for task in body.tasks:
        if not all(-script.arguments <= register < body.registers for register in (*reads(task), *writes(task))):
            return "names a register that is not there"
        for register in writes(task):
            if register < 0 or register in written:
                return f"writes register {register} twice, or it is an argument"
            written.add(register)
        problem = _why_task_invalid(script, number, task, decisions)
        if problem:
            return problem
    if not all(-script.arguments <= register < body.registers for register in body.outputs):
        return "puts out a register that is not there"
    return ""


def _why_task_invalid(script: Script, number: int, task: Task, decisions: set[int]) -> str:
    if isinstance(task, RunPlan):
        count = len(task.results)
        if len(task.homes) != count or not all(0 <= result < count for result, _ in task.decisions):
            return "has a plan whose results do not fit its homes or decisions"
        if not all(0 <= home < len(task.arguments) for home in task.homes):
            return "has a result on a part that is not there"
        if number == 0 and not 0 <= task.first <= script.results - count:
            return "makes results that the client has not named"
        return ""
    if isinstance(task, Choose):
        if len(task.branches) != len(task.inputs) or not task.branches or task.decision not in decisions:
            return "chooses from nothing, or by what no plan of it decides"
        called = [
            (branch, len(inputs), len(task.outputs))
            for branch, inputs in zip(task.branches, task.inputs, strict=True)
            if branch != -1
        ]
    else:
        carried = len(task.outputs)
        called = [
            (task.entry, len(task.inputs), carried + 1),
            (task.step, carried + len(task.fixed), carried + 1),
        ]
    for index, inputs, outputs in called:
        if not number < index < len(script.bodies):
            return f"names body {index}"
        body = script.bodies[index]
        if body.inputs != inputs or len(body.outputs) != outputs:
            return f"gives body {index} other than it takes, or wants other than it puts out"
        if isinstance(task, Repeat) and body.outputs[-1] not in decisions_of(body):
            return f"repeats body {index}, which does not decide how often"
    return ""


def as_text(script: Script) -> str:
    """The script for people, a paragraph for each body."""
    paragraphs = []
    for number, body in enumerate(script.bodies):
        lines = [f"body {number} of {_listed(range(body.inputs))} puts out {_listed(body.outputs)}"]
        for task in body.tasks:
            made = _listed(writes(task))
            if isinstance(task, RunPlan):
                lines.append(f"  {made} = plan {task.plan} of {_listed(dict.fromkeys(reads(task)))}")
            elif isinstance(task, Choose):
                ways = " or ".join(
                    f"body {branch} of {_listed(inputs)}" if branch >= 0 else "failure"
                    for branch, inputs in zip(task.branches, task.inputs, strict=True)
                )
                lines.append(f"  {made} = by {_listed((task.decision,))}: {ways}")
            else:
                lines.append(
                    f"  {made} = body {task.entry} of {_listed(task.inputs)}, then body {task.step} of what it puts "
                    f"out and {_listed(task.fixed)}, for as long as that decides so"
                )
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


def _listed(registers: Iterable[int]) -> str:
    return "(" + ", ".join(f"r{r}" if r >= 0 else f"argument {-1 - r}" for r in registers) + ")"
