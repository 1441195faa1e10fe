"""A plan bound to a connection, and the start of a run: the path that every call of a cached program takes.

What can be known before the call is prepared here once: which argument goes to which slot of which part, which arrays
come back, what is given up. A call then reads buffer numbers, writes one message, and makes the result arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw

from pathway.array import Array
from pathway.client.bindings import ArrayKind, Binding
from pathway.client.hostvalues import physical_value
from pathway.errors import DeletedError, ErrorInfo, IslandLostError, ProgramError, to_exception
from pathway.transport import messages as m

if TYPE_CHECKING:
    from pathway.client.client import Client

_encode = msgspec.msgpack.Encoder().encode

ROOM_FIRST_BYTES = 1024 * 1024
"""From this much on, what was released leaves before the run that is started, which may need the room."""


@dataclass(frozen=True)
class HostArgument:
    """A flattened argument that is a host value: sent inline, or (`kind` is given) put first."""

    position: int
    aval: Any
    kind: ArrayKind | None


@dataclass(frozen=True)
class ResultSource:
    """Where one flattened result comes from: computed result `number` of `kind`, or argument `argument` handed back."""

    kind: ArrayKind
    number: int
    argument: int


class BoundPlan:
    """A plan that this connection has registered. `start` runs it."""

    def __init__(
        self,
        client: Client,
        number: int,
        name: str,
        result_count: int,
        donated: Sequence[int],
        bindings: Sequence[Binding],
        hosts: Sequence[HostArgument],
        part_sources: Sequence[Sequence[int]],
        fixed: Sequence[Array],
        results: Sequence[ResultSource],
        assemble: Callable[[list[Array]], Any],
    ) -> None:
        self.client = client
        self.number = number
        self.name = name
        self.bindings = tuple(bindings)
        self.checked_epoch = client.core.bindings_epoch
        self._hosts = tuple(hosts)
        # Positions in [arguments..., fixed...]: constants and closed-over arrays stand behind the arguments.
        self._part_sources = tuple(tuple(sources) for sources in part_sources)
        self._fixed = tuple(fixed)
        self._results = tuple(results)
        self._plain_kinds = _plain_kinds(results)
        self._assemble = assemble
        self._donated = tuple(donated)
        self._result_count = result_count
        self.plan_numbers: tuple[int, ...] = (number,)  # of all plans that it runs

    def is_current(self) -> bool:
        """Whether all its slices are still where they were when it was bound. Cheap while nothing has changed."""
        epoch = self.client.core.bindings_epoch
        if self.checked_epoch != epoch:
            if any(b.error is not None or b.owner.binding is not b for b in self.bindings):
                return False
            self.checked_epoch = epoch
        return True

    def start(self, leaves: list[Any]) -> Any:
        """Run it with these flattened arguments, of the kinds that it was bound for. Returns at once."""
        client = self.client
        core = client.core
        poison: ErrorInfo | None = None
        values: list[Any] = []
        for leaf in leaves:
            if type(leaf) is Array:
                if leaf._buffer == 0:
                    raise DeletedError(
                        f"{self.name} was called with an array ({leaf._kind.aval}) that was deleted or donated"
                    )
                run = leaf._run
                if run is not None and run.error is not None:
                    poison = run.error
                values.append(leaf._buffer)
            else:
                values.append(leaf)
        if self._donated:
            leaves = self._check_donated(leaves, values)
        put = self._take_in_host_values(values) if self._hosts else {}
        if self._fixed:
            values += self._fixed_buffers()
        start = self._message(values)

        while (room := core.room()) is not None:
            room.wait()
        with core.lock:
            run, first = core.new_run(self.number, time.monotonic(), self._result_count, poison)
            if not run.done:
                messages: list[m.Message] = [start(run.number, first)]
                if core.released or core.released_plans:
                    # The run comes first, so that it does not wait; where much is released, room for it does.
                    room_first = core.released_bytes >= ROOM_FIRST_BYTES
                    releases = core.take_releases()
                    messages = [*releases, *messages] if room_first else [*messages, *releases]
                client.connection.send(messages)
        if self._plain_kinds is not None:
            results = [Array(kind, first + number, run) for number, kind in enumerate(self._plain_kinds)]
        else:
            results = self._shared_results({**dict(enumerate([*leaves, *self._fixed])), **put}, run, first)
        for position in self._donated:
            leaf = leaves[position]
            if type(leaf) is Array:
                leaf._give_up()
        return self._assemble(results)

    def _message(self, values: list[Any]) -> Callable[[int, int], m.Message]:
        """What starts a run with these values, once the run and its first result have numbers."""
        number = self.number
        arguments = tuple(Raw(_encode([values[i] for i in sources])) for sources in self._part_sources)
        return lambda run, first: m.StartRun(run, number, first, arguments)

    # -- what fewer calls need ----------------------------------------------------------------------------------------

    def _take_in_host_values(self, values: list[Any]) -> dict[int, Array]:
        """Replace host values by their bytes, or by buffers put for this run, which are returned by position."""
        put = {}
        for argument in self._hosts:
            value = physical_value(values[argument.position], argument.aval)
            if argument.kind is None:
                values[argument.position] = value.tobytes()
            else:
                array = self.client._put_value(argument.kind, value)
                put[argument.position] = array
                values[argument.position] = array._buffer
        return put

    def _fixed_buffers(self) -> list[int]:
        for array in self._fixed:
            if array._buffer == 0:
                raise DeletedError(f"{self.name} closes over an array ({array._kind.aval}) that was deleted")
        return [array._buffer for array in self._fixed]

    def _check_donated(self, leaves: list[Any], values: list[Any]) -> list[Any]:
        """Refuse to give up what is passed twice; of a buffer that other arrays stand for, give up a copy."""
        check_donated(self.name, leaves, self._donated, self._fixed)
        for position in self._donated:
            leaf = leaves[position]
            if type(leaf) is Array and leaf._shared is not None and leaf._shared[0] > 1:
                from pathway.client.operators import copied

                leaves = list(leaves)
                leaves[position] = copied(leaf)
                values[position] = leaves[position]._buffer
                leaf._give_up()
        return leaves

    def _shared_results(self, arguments: dict[int, Any], run: Any, first: int) -> list[Array]:
        made: dict[int, Array] = {}
        results = []
        for source in self._results:
            if source.argument >= 0:
                results.append(arguments[source.argument]._share())
            elif source.number in made:
                results.append(made[source.number]._share())
            else:
                made[source.number] = Array(source.kind, first + source.number, run)
                results.append(made[source.number])
        return results

    def __del__(self) -> None:
        self.client.core.released_plans.append(self.number)


def _plain_kinds(results: Sequence[ResultSource]) -> tuple[ArrayKind, ...] | None:
    """The results' kinds where result i simply is computed result i: the common case."""
    if all(source.argument < 0 and source.number == i for i, source in enumerate(results)):
        return tuple(source.kind for source in results)
    return None


def check_donated(program: str, leaves: Sequence[Any], donated: Collection[int], closed_over: Sequence[Array]) -> None:
    """Raise if an array is given up and used as something else in the same call."""
    buffers = [leaf._buffer for leaf in leaves if type(leaf) is Array]
    buffers += [array._buffer for array in closed_over]
    if len(set(buffers)) == len(buffers):
        return
    for position in donated:
        leaf = leaves[position]
        if type(leaf) is Array and buffers.count(leaf._buffer) > 1:
            raise ProgramError(f"{program}: an array ({leaf._kind.aval}) is donated, and used again in the same call")


def check_usable(leaf: Array, program: str) -> None:
    """Raise if an array cannot be an argument of any program: deleted, lost, or left behind."""
    binding = leaf._kind.binding
    if leaf._buffer == 0:
        raise DeletedError(f"{program} was called with an array ({leaf._kind.aval}) that was deleted or donated")
    if binding.error is not None:
        raise to_exception(binding.error)
    if binding.owner.binding is not binding:
        bound = binding.bound
        raise IslandLostError(
            f"{program} was called with an array on slice {bound.slice} as it was on {bound.island} "
            f"(incarnation {bound.incarnation}); the slice has moved since"
        )
