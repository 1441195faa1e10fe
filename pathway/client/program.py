"""`pathway.program` and `pathway.jit`: functions that run on slices.

Inside a program a `pathway.jit` function is a stage: a named part of the trace. Called with arrays outside, it is a
program of one stage. A program is traced, placed and planned once for each structure and kind of arguments; then a call
costs one look-up and one message.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax
from jax.sharding import PartitionSpec

from pathway.array import Array
from pathway.client import tracing
from pathway.client.hostvalues import kind_key
from pathway.client.operators import traced as traced_operand
from pathway.client.plans import BoundPlan, check_usable
from pathway.client.slices import Slice
from pathway.client.stages import Traced
from pathway.dataflow.placed import placed_call
from pathway.dataflow.trace import Statics
from pathway.errors import ProgramError, SliceError

_flatten = jax.tree_util.tree_flatten


class Program:
    """A function whose parts are placed on slices. Made by `pathway.program`; called like the function.

    Calls return at once, with a `pathway.Array` for every array of the result.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        *,
        donate_argnums: int | Sequence[int] = (),
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Sequence[str] = (),
        fuse: bool = True,
        schedule: Any = None,
        name: str | None = None,
    ) -> None:
        functools.update_wrapper(self, fun, updated=())
        self._fun = fun
        self._name = name or str(getattr(fun, "__name__", type(fun).__name__))
        self._donate_argnums = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
        self._statics = Statics.of(fun, static_argnums, static_argnames)
        self._has_statics = bool(self._statics.numbers or self._statics.names)
        self._fuse = fuse
        self._schedule = schedule
        self._plans: dict[Any, BoundPlan] = {}
        self._planning = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if tracing.is_on():
            return self._fun(*args, **kwargs)
        statics: Any = None
        dynamic: Any = (args, kwargs)
        if self._has_statics:
            dynamic = self._statics.split(args, kwargs)
            statics = self._static_key(args, kwargs)
        leaves, tree = _flatten(dynamic)
        key = [tree, statics, jax.config.jax_enable_x64]
        for leaf in leaves:
            key.append(leaf._kind if type(leaf) is Array else kind_key(leaf))
        found = tuple(key)
        plan = self._plans.get(found)
        if plan is None or not plan.is_current():
            plan = self._plan(found, args, kwargs, leaves)
        return plan.start(leaves)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """The program traced for these arguments: arrays, numbers, or `jax.ShapeDtypeStruct`s."""
        leaves, _ = _flatten(self._statics.split(args, kwargs))
        with tracing.on():
            traced = self._trace(args, kwargs)
        donated = traced.donated_leaves(self._donate_argnums, len(args)) if self._donate_argnums else frozenset()
        return Traced(traced, leaves, donated, self._fuse, self._schedule)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """`trace(...).lower()`."""
        return self.trace(*args, **kwargs).lower()

    def clear_cache(self) -> None:
        """Forget every plan."""
        with self._planning:
            self._plans = {}

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from pathway.dataflow.trace import trace

        return trace(
            _references_out(self._fun),
            args,
            kwargs,
            static_argnums=tuple(sorted(self._statics.numbers)),
            static_argnames=tuple(sorted(self._statics.names)),
            name=self._name,
        )

    def _plan(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> BoundPlan:
        for leaf in leaves:
            if isinstance(leaf, Array):
                check_usable(leaf, self._name)
        with self._planning:
            plan = self._plans.get(key)
            if plan is not None and plan.is_current():
                return plan
            self._plans = {k: p for k, p in self._plans.items() if p.is_current()}
            plan = self.trace(*args, **kwargs).lower().bind(leaves)
            self._plans[key] = plan
            return plan

    def _static_key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        numbers, names = self._statics.numbers, self._statics.names
        values = [(i, type(arg), arg) for i, arg in enumerate(args) if i in numbers]
        values += [(k, type(v), v) for k, v in sorted(kwargs.items()) if k in names]  # type: ignore[misc]
        try:
            hash(tuple(values))
        except TypeError as error:
            raise ProgramError(f"{self._name}: static arguments must be hashable: {error}") from error
        return tuple(values)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"<pathway.program {self._name}>"


def _references_out(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, but arrays that it closes over and returns as they are become references too."""

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return jax.tree.map(traced_operand, fun(*args, **kwargs))

    return wrapped


@overload
def program(fun: Callable[..., Any], /) -> Program: ...
@overload
def program(
    fun: None = None,
    /,
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    fuse: bool = True,
    schedule: Any = None,
    name: str | None = None,
) -> Callable[[Callable[..., Any]], Program]: ...
def program(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    fuse: bool = True,
    schedule: Any = None,
    name: str | None = None,
) -> Any:
    """Make a program of a JAX function, some parts of which are `pathway.jit` functions. A decorator, with or without
    options.

    Everything of JAX that is pure works inside, `jax.grad` across stages included. What is in no stage is placed by its
    operands. `donate_argnums` are arguments that the caller gives up. `static_argnums` and `static_argnames` are Python
    values that it is traced anew for. `fuse=False` keeps every stage a computation of its own. `schedule` orders each
    island's nodes: "program" keeps every device to the order of the program's calls (see docs/pipelines.md).
    """
    options = {
        "donate_argnums": donate_argnums,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "fuse": fuse,
        "schedule": schedule,
        "name": name,
    }
    if fun is None:
        return lambda fun: Program(fun, **options)
    return Program(fun, **options)


class Stage:
    """A function on a slice. Made by `pathway.jit`."""

    def __init__(self, fun: Callable[..., Any], slice: Slice, placed: Callable[..., Any], program: Program) -> None:
        functools.update_wrapper(self, fun, updated=())
        self.slice = slice
        self._placed = placed
        self._program = program

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if tracing.is_on():
            args, kwargs = jax.tree.map(traced_operand, (args, kwargs))
            return self._placed(*args, **kwargs)
        if self.slice.is_released:
            raise SliceError(f"{self._program._name} was called, but its slice {self.slice.number} was released")
        return self._program(*args, **kwargs)

    @property
    def name(self) -> str:
        """What graphs, drawings and errors call it."""
        return self._program._name

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """As `Program.trace`, of the program of this one stage."""
        return self._program.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """`trace(...).lower()`."""
        return self._program.lower(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"<pathway.jit {self._program._name} on slice {self.slice.number}>"


def jit(
    slice: Slice,
    *,
    in_specs: Any = PartitionSpec(),  # noqa: B008  (immutable)
    out_specs: Any = PartitionSpec(),  # noqa: B008
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    name: str | None = None,
) -> Callable[[Callable[..., Any]], Stage]:
    """Place a function on a slice: `@pathway.jit(front, in_specs=(P("model"), P("data")), out_specs=P("data"))`.

    `in_specs` is one `PartitionSpec` for all arguments, or a tuple with an entry for each positional argument that is
    not static; an entry, like `out_specs`, may be a pytree of specs that is a prefix of the argument. The default,
    `PartitionSpec()`, is replicated; None leaves the sharding to XLA. Called within a program it is a stage of it;
    outside, a program of one stage, which gives up its `donate_argnums`.
    """

    def decorate(fun: Callable[..., Any]) -> Stage:
        placed = placed_call(
            fun,
            slice.shape_for_graph,
            in_specs,
            out_specs,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            name=name,
        )
        functools.update_wrapper(placed, fun, assigned=("__doc__", "__module__"), updated=())
        alone = Program(
            placed,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            name=name or getattr(fun, "__name__", None),
        )
        return Stage(fun, slice, placed, alone)

    return decorate
