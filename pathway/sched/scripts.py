"""Programs that data control: their scripts carried out. What of their session waits for that: `promises`. Pure.

A run of a script starts the runs of its plans, each as soon as what it reads has a name; that is before it is computed,
save where a decision has to be known. What a decision does not choose costs nothing: no message is sent for it.

Invariants
  X-1  A buffer that a script made for itself is freed when no register holds it any more.
  X-2  A script's run ends once: failed with the first failure of its runs, or finished when all of them are, and
       nothing is left to start.
  X-3  No more than `MOST_TASKS` tasks of one script are open at once, so that no client can keep the scheduler busy.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw

from pathway.dataflow.script import Body, Choose, Repeat, RunPlan, Script, reads, why_invalid
from pathway.errors import ErrorInfo
from pathway.sched.events import Instruction
from pathway.sched.lanes import Lane
from pathway.sched.promises import Actions, OwnNumbers, Promises, Value, buffers_of
from pathway.transport import messages as m

MOST_TASKS = 50_000

_encode = msgspec.msgpack.Encoder().encode
_decode_script = msgspec.msgpack.Decoder(Script).decode


class Decision(int):
    """A value that decides, where any other integer in a register is a buffer."""


@dataclass(eq=False)
class Registered:
    """A script, from its registration to its release and the end of its last run."""

    script: Script
    error: ErrorInfo | None
    active: int = 0
    released: bool = False


@dataclass(eq=False)
class Frame:
    """One execution of a body. `missing[t]`: how many registers task t still waits for. `uses[r]`: how many tasks will
    still read register r, and 1 more if it is put out. `returns(k, value)` takes output k."""

    body: Body
    missing: list[int]
    uses: Counter[int]
    readers: dict[int, list[int]]
    returns: Callable[[int, Value], None] | None
    registers: dict[int, Value] = field(default_factory=dict)


@dataclass(eq=False)
class OwnRun:
    """The run of one of a script's plans. `awaited`: where decisions that have not come yet go, by result."""

    script: ScriptRun
    awaited: dict[int, tuple[Frame, int]]
    over: bool = False


@dataclass(eq=False)
class ScriptRun:
    """`tasks`: how many have not been carried out, in all frames. `holders`: how many registers hold a buffer that the
    script made, and where it lies."""

    number: int
    registered: Registered
    first: int
    arguments: tuple[Value, ...]
    since: float
    runs: dict[int, OwnRun] = field(default_factory=dict)
    tasks: int = 0
    holders: dict[int, tuple[int, Lane]] = field(default_factory=dict)


class SessionScripts:
    """The scripts of one session."""

    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        self._numbers = OwnNumbers()
        self.promises = Promises(actions, self._numbers)
        self.registered: dict[int, Registered] = {}
        self.active: dict[int, ScriptRun] = {}
        self._own: dict[int, OwnRun] = {}
        self._freed: dict[Lane, list[int]] = {}  # to be given back, behind the runs that are started now
        self._ready: deque[tuple[ScriptRun, Frame, int]] = deque()
        self._now = 0.0
        self._out: list[Instruction] = []

    # -- the client's messages --------------------------------------------------------------------------------------

    def register(self, message: m.RegisterScript) -> ErrorInfo | None:
        """Take a script; returns why it can never run, if so."""
        if message.script in self.registered:  # sent again after a resume
            return self.registered[message.script].error
        script, error = Script((), 0, 0), None
        try:
            script = _decode_script(message.payload)
            reason = why_invalid(script)
        except msgspec.DecodeError as damaged:
            reason = str(damaged)
        if reason:
            error = ErrorInfo("ProtocolError", f"script {message.name!r}: {reason}")
        self.registered[message.script] = Registered(script, error)
        return error

    def release(self, script: int, out: list[Instruction]) -> bool:
        """The client forgets a script. False: it is none of these."""
        registered = self.registered.pop(script, None)
        if registered is None:
            return False
        registered.released = True
        self._forget_if_over(registered, out)
        return True

    def start(self, message: m.StartScript, now: float, out: list[Instruction]) -> ErrorInfo | None:
        """Carry out a script whose arguments all have their names."""
        registered = self.registered.get(message.script)
        if registered is None:
            return ErrorInfo("ProgramError", f"script {message.script} is not registered")
        script = registered.script
        if registered.error is not None:
            return registered.error
        if len(message.arguments) != script.arguments:
            return ErrorInfo("ProtocolError", f"{len(message.arguments)} arguments for {script.arguments}")
        run = ScriptRun(message.run, registered, message.first_result, message.arguments, now)
        registered.active += 1
        self.active[run.number] = run
        self.promises.promise(range(run.first, run.first + script.results))
        self.promises.read(buffers_of(message))
        self._enter(run, 0, (), None)
        self._go_on(run, now, out)
        return None

    def cancel(self, number: int, error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        """End a script, or a run that is held or was."""
        run = self.active.get(number)
        if run is not None:
            self._fail(run, error, now, out)
        self.promises.cancel(number, error, now, out)

    # -- how its runs go --------------------------------------------------------------------------------------------

    def decided(self, message: m.Decided, now: float, out: list[Instruction]) -> None:
        """An island says what a plan computed that decides."""
        own = self._own.get(message.run)
        if own is None:
            return
        for result, value in message.decisions:
            target = own.awaited.pop(result, None)
            if target is not None:
                self._set(own.script, *target, Decision(value))
        if own.over and not own.awaited:
            del self._own[message.run], own.script.runs[message.run]
        self._go_on(own.script, now, out)

    def run_finished(self, number: int, now: float, out: list[Instruction]) -> None:
        """One of our runs is over on all its islands."""
        if self.promises.run_finished(number, now, out):
            return
        own = self._own.get(number)
        if own is None:
            return
        own.over = True
        if not own.awaited:  # else it comes from another host, and is on its way
            del self._own[number], own.script.runs[number]
            self._go_on(own.script, now, out)

    def run_failed(self, number: int, error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        """One of our runs has failed, and so has its script."""
        if self.promises.run_failed(number, error, now, out):
            return
        own = self._own.get(number)
        if own is not None:
            del self._own[number], own.script.runs[number]
            self._fail(own.script, error, now, out)

    # -- frames and registers ---------------------------------------------------------------------------------------

    def _enter(
        self, run: ScriptRun, body: int, inputs: Sequence[Value], returns: Callable[[int, Value], None] | None
    ) -> None:
        found = run.registered.script.bodies[body]
        frame = Frame(found, [], Counter(set(found.outputs)), {}, returns)
        for number, task in enumerate(found.tasks):
            read = {register for register in reads(task) if register >= 0}
            frame.uses.update(read)
            frame.missing.append(len(read))
            for register in read:
                frame.readers.setdefault(register, []).append(number)
            if not read:
                self._ready.append((run, frame, number))
        run.tasks += len(found.tasks)
        if run.tasks > MOST_TASKS:
            reason = f"a script has more than {MOST_TASKS:,} tasks to carry out at once"
            self._fail(run, ErrorInfo("LimitError", reason), self._now, self._out)
            return
        for register, value in enumerate(inputs):
            self._set(run, frame, register, value)
        for position, register in enumerate(found.outputs):
            if register < 0:
                self._return(frame, position, run.arguments[-1 - register])

    def _set(self, run: ScriptRun, frame: Frame, register: int, value: Value) -> None:
        unused = not frame.uses[register]
        frame.uses[register] += unused
        frame.registers[register] = value
        self._keep(run, (value,), 1)
        for number in frame.readers.get(register, ()):
            frame.missing[number] -= 1
            if not frame.missing[number]:
                self._ready.append((run, frame, number))
        outputs = frame.body.outputs
        if register in outputs:
            for position, output in enumerate(outputs):
                if output == register:
                    self._return(frame, position, value)
            if frame.returns is not None:
                self._drop(run, frame, (register,))
        if unused:
            self._drop(run, frame, (register,))

    def _return(self, frame: Frame, position: int, value: Value) -> None:
        if frame.returns is not None:
            frame.returns(position, value)

    def _drop(self, run: ScriptRun, frame: Frame, registers: Iterable[int]) -> None:
        """One use less of these registers."""
        for register in registers:
            frame.uses[register] -= 1
            if not frame.uses[register]:
                self._keep(run, (frame.registers.pop(register),), -1)

    def _value(self, run: ScriptRun, frame: Frame, register: int) -> Value:
        return frame.registers[register] if register >= 0 else run.arguments[-1 - register]

    # -- tasks ------------------------------------------------------------------------------------------------------

    def _go_on(self, run: ScriptRun, now: float, out: list[Instruction]) -> None:
        """Carry out all that can be."""
        self._now, self._out = now, out
        while self._ready:
            owner, frame, number = self._ready.popleft()
            if owner.number not in self.active:
                continue
            task = frame.body.tasks[number]
            owner.tasks -= 1
            if isinstance(task, RunPlan):
                self._run_plan(owner, frame, task)
            elif isinstance(task, Choose):
                self._choose(owner, frame, task)
            else:
                self._repeat(owner, frame, task)
            if owner.number in self.active:
                self._drop(owner, frame, {register for register in reads(task) if register >= 0})
        self._free()
        if run.number in self.active and not run.tasks and not run.runs:
            self._end(run)
            self._actions.finished(run.number, now, out)

    def _free(self) -> None:
        freed, self._freed = self._freed, {}
        for lane, buffers in freed.items():
            self._actions.free(lane, tuple(buffers), self._out)

    def _run_plan(self, run: ScriptRun, frame: Frame, task: RunPlan) -> None:
        count = len(task.results)
        if frame.returns is None:
            first = run.first + task.first
        else:
            first = self._numbers.take(count)
        number = self._numbers.take()
        arguments = tuple(Raw(_encode([self._value(run, frame, r) for r in part])) for part in task.arguments)
        own = OwnRun(run, {result: (frame, register) for result, register in task.decisions})
        self._own[number] = run.runs[number] = own
        lanes = self._actions.submit(number, task.plan, first, arguments, self._now, self._out)
        if isinstance(lanes, ErrorInfo):
            del self._own[number], run.runs[number]
            self._fail(run, lanes, self._now, self._out)
            return
        for result, (register, home) in enumerate(zip(task.results, task.homes, strict=True)):
            run.holders[first + result] = (0, lanes[home])
            self._set(run, frame, register, first + result)
        if frame.returns is None:
            self.promises.named(range(first, first + count), self._now, self._out)

    def _choose(self, run: ScriptRun, frame: Frame, task: Choose) -> None:
        decision = self._value(run, frame, task.decision)
        if not isinstance(decision, Decision) or not 0 <= decision < len(task.branches):
            reason = f"a choice of {len(task.branches)} branches cannot be made with {decision!r}"
            self._fail(run, ErrorInfo("ProtocolError", reason), self._now, self._out)
            return
        if task.branches[decision] < 0:
            reason = task.refusals[decision] if decision < len(task.refusals) else "it chose what it must not"
            self._fail(run, ErrorInfo("ProgramError", reason), self._now, self._out)
            return
        inputs = [self._value(run, frame, register) for register in task.inputs[decision]]
        self._enter(
            run,
            task.branches[decision],
            inputs,
            lambda position, value: self._set(run, frame, task.outputs[position], value),
        )

    def _repeat(self, run: ScriptRun, frame: Frame, task: Repeat) -> None:
        """A loop holds what stays the same until it ends, by a frame of no tasks of its own."""
        carried = len(task.outputs)
        fixed = [self._value(run, frame, register) for register in task.fixed]
        self._keep(run, fixed, 1)
        made: list[Value | None] = []

        def begin(body: int, inputs: Sequence[Value]) -> None:
            made[:] = [None] * (carried + 1)
            self._enter(run, body, inputs, collect)

        def collect(position: int, value: Value) -> None:
            made[position] = value
            if position < carried:
                self._keep(run, (value,), 1)
            if any(each is None for each in made):
                return
            *values, decision = made
            state = [value for value in values if value is not None]
            if run.number not in self.active:
                return
            if decision:
                begin(task.step, [*state, *fixed])
            else:
                for register, each in zip(task.outputs, state, strict=True):
                    self._set(run, frame, register, each)
                self._keep(run, fixed, -1)
            self._keep(run, state, -1)

        begin(task.entry, [self._value(run, frame, register) for register in task.inputs])

    def _keep(self, run: ScriptRun, values: Iterable[Value], by: int) -> None:
        """One more that holds these buffers, or one less: what nobody holds is freed."""
        for value in values:
            if type(value) is int and value in run.holders:
                count, lane = run.holders[value]
                run.holders[value] = (count + by, lane)
                if not count + by:
                    del run.holders[value]
                    self._freed.setdefault(lane, []).append(value)

    # -- ends -------------------------------------------------------------------------------------------------------

    def _fail(self, run: ScriptRun, error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        """X-2. What is under way of it is cancelled; what it made goes, save what the client holds."""
        self._now, self._out = now, out
        finals = {
            run.first + task.first + result
            for task in run.registered.script.bodies[0].tasks
            if isinstance(task, RunPlan)
            for result, register in enumerate(task.results)
            if register in run.registered.script.bodies[0].outputs
        }
        runs, run.runs = list(run.runs), {}
        self._end(run)
        for number in runs:
            del self._own[number]
            self._actions.cancel(number, error, now, out)
        for buffer, (_, lane) in run.holders.items():
            if buffer not in finals:
                self._freed.setdefault(lane, []).append(buffer)
        self._free()
        self._actions.failed(run.number, error, now, out)
        script = run.registered.script
        self.promises.broken(range(run.first, run.first + script.results), error, now, out)

    def _end(self, run: ScriptRun) -> None:
        del self.active[run.number]
        run.registered.active -= 1
        self.promises.stop_reading(dict.fromkeys(v for v in run.arguments if type(v) is int), self._out)
        self._forget_if_over(run.registered, self._out)

    def _forget_if_over(self, registered: Registered, out: list[Instruction]) -> None:
        if registered.released and not registered.active:
            tasks = (task for body in registered.script.bodies for task in body.tasks)
            for plan in dict.fromkeys(task.plan for task in tasks if isinstance(task, RunPlan)):
                self._actions.release(plan, out)

    # -- waits (O-8) ------------------------------------------------------------------------------------------------

    def waits(self) -> Iterator[tuple[int, str, float]]:
        """(run, why it is not over, since)."""
        for run in self.active.values():
            awaited = sum(len(own.awaited) for own in run.runs.values())
            yield (
                run.number,
                f"{len(run.runs)} runs of its plans are under way, {run.tasks} tasks of its script wait for them and "
                f"for {awaited} decisions",
                run.since,
            )
        yield from self.promises.waits()
