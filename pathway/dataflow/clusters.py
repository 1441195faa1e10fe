"""The nodes being filled while a program is placed, and where every variable is in the meantime.

`pathway.dataflow.place` decides where an operation runs; here it is put there, with all that it reads (P-2, P-4).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jex
import numpy as np

from pathway.dataflow.drafts import Argument, Draft, Key, Operation, Resident
from pathway.dataflow.graph import SliceShape
from pathway.dataflow.jaxprs import Atom, Literal, Var, fresh, nbytes
from pathway.dataflow.lift import Capture, Constant, is_baked
from pathway.errors import ProgramError

Vote = tuple[int, int]
"""(slice, bytes): what an operand has to say about where its reader runs."""


@dataclass(frozen=True)
class _Waiting:
    """An operation that is placed when something reads it: inside the reader's node, or in its slice's prologue."""

    number: int
    operation: Operation
    within_reader: bool
    expensive: bool


class Clusters:
    """All nodes of a program under construction."""

    def __init__(
        self,
        program: str,
        slices: Mapping[int, SliceShape],
        find_reference: Callable[[Hashable], Resident] | None = None,
        default_slice: int | None = None,
    ) -> None:
        self._program, self._slices, self._default = program, slices, default_slice
        self._find_reference = find_reference
        self._first_slice: int | None = None
        # What a variable is: on slices, on the host, a small constant, or waiting.
        self._homes: dict[Var, list[int]] = {}
        self._host: set[Var] = set()
        self._baked: dict[Var, Any] = {}
        self._waiting: dict[Var, _Waiting] = {}
        self._votes: dict[Var, Vote] = {}
        self._arguments: set[Var] = set()
        self._early: set[Var] = set()  # on a slice before the first stage runs
        self._captured: dict[Capture, Var] = {}
        self.constants: dict[Var, Any] = {}
        self.references: dict[Var, Resident] = {}
        self._prologues: dict[int, Draft] = {}
        self._closed: list[Draft] = []
        self._open: dict[int, Draft] = {}
        self._numbers = itertools.count()

    def drafts(self) -> list[Draft]:
        """All nodes in a topological order: prologues need only arguments, and open nodes nothing of each other."""
        return [*self._prologues.values(), *self._closed, *self._open.values()]

    def home(self) -> int:
        """The slice of what nothing gives a place: the default, else the first that the program names."""
        home = self._default if self._default is not None else self._first_slice
        if home is None:
            raise ProgramError(
                f"nothing in {self._program} says where it runs: it calls no pathway.jit function, none of its "
                "arguments is on a slice, and there is no default slice"
            )
        return home

    # What the program is given ---------------------------------------------------------------------------------------

    def give(self, argument: Argument) -> None:
        """An argument of the program."""
        self._arguments.add(argument.var)
        if argument.resident is None:
            self._host.add(argument.var)
        else:
            self._settle(argument.var, argument.resident.slice)
            self._early.add(argument.var)

    def constant(self, value: Any, var: Var) -> Atom:
        """A constant of a jaxpr: part of its readers if it is small, else a value of the graph."""
        if not is_baked(value, var):
            return self.capture(Constant(value), var)
        name = fresh(var)
        self._baked[name] = value
        return name

    def capture(self, capture: Capture, like: Var) -> Var:
        """A closed-over array: one variable, however often it is met."""
        if capture in self._captured:
            return self._captured[capture]
        var = self._captured[capture] = fresh(like)
        if isinstance(capture, Constant):
            self.constants[var] = capture.array
            self._host.add(var)
        else:
            if self._find_reference is None:
                raise ProgramError(f"{self._program} closes over an array that belongs to no connection")
            self.references[var] = resident = self._find_reference(capture.handle)
            self._settle(var, resident.slice)
            self._early.add(var)
        return var

    # What is known of variables --------------------------------------------------------------------------------------

    def vote(self, atom: Atom) -> Vote | None:
        """The slice for which an operand speaks (P-1). A waiting broadcast speaks for what it broadcasts."""
        return None if isinstance(atom, Literal) else self._votes.get(atom)

    def votes(self, atoms: Sequence[Atom]) -> list[Vote]:
        return [vote for vote in map(self.vote, atoms) if vote is not None]

    def is_waiting(self, atom: Atom) -> bool:
        return not isinstance(atom, Literal) and atom in self._waiting and atom not in self._homes

    def is_early(self, atom: Atom) -> bool:
        """Whether a prologue can read it. What waits and has a vote comes of something on a slice: maybe too late."""
        if isinstance(atom, Literal) or atom in self._early or atom in self._baked or atom in self._host:
            return True
        return atom in self._waiting and self.vote(atom) is None

    # Where operations go ---------------------------------------------------------------------------------------------

    def wait(self, operation: Operation, within_reader: bool, expensive: bool = False) -> None:
        """Place it when something reads it. An expensive one is not done twice, unless prologues ask."""
        expensive = expensive or any(
            self._waiting[atom].expensive for atom in operation.inputs if self.is_waiting(atom)
        )
        waiting = _Waiting(next(self._numbers), operation, within_reader and not expensive, expensive)
        said = self.votes(operation.inputs)
        for var in operation.outputs:
            self._waiting[var] = waiting
            if said:
                self._votes[var] = winner(said)

    def whole(self, operation: Operation, slice: int, reason: str, placed: bool) -> None:
        """A node of its own; the open one of its slice ends before it."""
        draft = Draft(slice, reason, placed)
        self._check(slice)
        for atom in operation.inputs:
            self._supply(atom, draft)
        if slice in self._open:
            self._close(slice)
        self._closed.append(draft)
        self._add(operation, draft)

    def join(self, operation: Operation, slice: int, reason: str) -> None:
        """The open node of the slice, or a new one: also where it needs something of another slice that the open node
        does not, which would then have to wait for it. (`fuse` joins the two where they wait for the same.)"""
        if slice in self._open and any(
            self._is_new_from_elsewhere(atom, self._open[slice]) for atom in operation.inputs
        ):
            self._close(slice)
        draft = self._open.setdefault(slice, Draft(slice, reason))
        for atom in operation.inputs:
            self._supply(atom, draft)
        self._add(operation, draft)

    def early(self, operation: Operation, slice: int) -> None:
        """The slice's prologue. It reads nothing of other slices, so prologues can all come first."""
        prologue = self._prologue(slice)
        for atom in operation.inputs:
            self._supply(atom, prologue)
        self._add(operation, prologue)

    def result(self, atom: Atom) -> Key:
        """An output of the program: computed in any case, and on one slice."""
        if isinstance(atom, Literal):
            literal, atom = atom, fresh(atom)
            self._baked[atom] = np.asarray(literal.val, literal.aval.dtype)
        if atom in self._homes and atom not in self.references:
            return atom, self._homes[atom][0]
        if atom in self._arguments:
            return atom, None
        vote = self.vote(atom)
        slice = self.home() if vote is None else vote[0]
        if atom in self._baked:
            prologue = self._prologue(slice)
            prologue.constants[atom] = self._baked[atom]
            prologue.defined.add(atom)
            prologue.exported[atom] = None
            self._settle(atom, slice)
        elif atom in self._waiting:
            operation = self._waiting[atom].operation
            if vote is None:
                self.early(operation, slice)
            else:
                self.join(operation, slice, "is a result")
        else:  # what was closed over has an owner already: the result is a copy
            copied = fresh(atom)
            equation = jex.new_jaxpr_eqn([atom], [copied], jex.primitives.copy_p, {}, frozenset())
            operation = Operation("copy", (equation,), (atom,), (copied,))
            self.early(operation, slice)
            atom = copied
        return atom, slice

    # How they get there ----------------------------------------------------------------------------------------------

    def _check(self, slice: int) -> None:
        if slice not in self._slices:
            raise ProgramError(
                f"{self._program} uses slice {slice}, which is released or belongs to another connection"
            )
        if self._first_slice is None:
            self._first_slice = slice

    def _settle(self, var: Var, slice: int) -> None:
        self._check(slice)
        homes = self._homes.setdefault(var, [])
        if slice not in homes:
            homes.append(slice)
        self._votes.setdefault(var, (slice, nbytes(var)))

    def _add(self, operation: Operation, draft: Draft) -> None:
        draft.add(operation)
        for var in operation.outputs:
            self._settle(var, draft.slice)
            if draft is self._prologues.get(draft.slice):
                self._early.add(var)

    def _prologue(self, slice: int) -> Draft:
        self._check(slice)
        reason = f"needs arguments alone, and is used on slice {slice}"
        return self._prologues.setdefault(slice, Draft(slice, reason))

    def _close(self, slice: int) -> None:
        self._closed.append(self._open.pop(slice))

    def _supply(self, atom: Atom, draft: Draft) -> None:
        """Make `atom` readable in `draft`, with the waiting operations that it takes, oldest first. (Not recursive:
        chains of waiting operations can be as long as a program.)"""
        needed: dict[int, tuple[_Waiting, Draft]] = {}
        within_prologue: set[int] = set()
        asked = [(atom, draft)]
        while asked:
            wanted, reader = asked.pop()
            waiting = None if self._is_readable(wanted, reader) else self._waiting[wanted]
            if waiting is None:
                continue
            target = reader if waiting.within_reader else self._prologue(draft.slice)
            is_prologue = target is self._prologues.get(draft.slice)
            if waiting.number in needed and (not is_prologue or waiting.number in within_prologue):
                continue
            if is_prologue:
                within_prologue.add(waiting.number)
            needed[waiting.number] = (waiting, target)
            asked += [(operand, target) for operand in waiting.operation.inputs]
        for number in sorted(needed):
            waiting, target = needed[number]
            for operand in waiting.operation.inputs:
                self._read(operand, target)
            if target is self._prologues.get(target.slice):
                self._add(waiting.operation, target)
            else:
                target.add(waiting.operation, export=False)
        self._read(atom, draft)

    def _is_new_from_elsewhere(self, atom: Atom, draft: Draft) -> bool:
        if isinstance(atom, Literal) or atom in draft.defined:
            return False
        homes = self._homes.get(atom, [])
        return bool(homes) and draft.slice not in homes and (atom, homes[0]) not in draft.reads

    def _is_readable(self, atom: Atom, draft: Draft) -> bool:
        """Whether `_read` can do without a waiting operation."""
        if isinstance(atom, Literal) or atom not in self._waiting or atom in draft.defined:
            return True
        homes = self._homes.get(atom, [])
        if draft.slice in homes:
            return True
        # A prologue reads nothing from elsewhere; other nodes do, rather than repeat something expensive, or something
        # that is a result and has operands on slices.
        is_prologue = draft is self._prologues.get(draft.slice)
        return bool(homes) and self._waiting[atom].expensive and not is_prologue

    def _read(self, atom: Atom, draft: Draft) -> None:
        if isinstance(atom, Literal) or atom in draft.defined:
            return
        if atom in self._baked and atom not in self._homes:
            draft.constants[atom] = self._baked[atom]
        elif atom in self._host:
            draft.reads[atom, None] = None
        else:
            homes = self._homes[atom]
            home = draft.slice if draft.slice in homes else homes[0]
            if home != draft.slice and home in self._open and atom in self._open[home].exported:
                self._close(home)  # P-4: another slice reads from it
            draft.reads[atom, home] = None


def winner(votes: Sequence[Vote]) -> Vote:
    """The largest, then the last."""
    return max(reversed(votes), key=lambda vote: vote[1])
