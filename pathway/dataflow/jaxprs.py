"""Jaxprs as data: reading their parts alike on every supported JAX version, building them, sharing equal ones.

JAX 0.10 has an open `Jaxpr` inside a `ClosedJaxpr`; from 0.12 on one class is both. `opened` hides the difference. All
that the front half of the dataflow knows of the inside of a jaxpr is in this file.
"""

from __future__ import annotations

import dis
import os
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from pathway.dataflow.layout import Aval

Literal = jex.Literal

# JAX's classes have no types that a checker knows; the names say what is meant.
Var: TypeAlias = Any  # jex.Var
Atom: TypeAlias = Any  # jex.Var | jex.Literal
Equation: TypeAlias = Any  # jex.JaxprEqn

BAKED_BYTES = 1024
"""A constant of at most this size is part of the computation; a larger one is a value of the graph, sent once."""

_PLACED_NAME = re.compile(r"pathway:(\d+):(.*)", re.DOTALL)


def placed_name(slice: int, name: str) -> str:
    """The name of the inner `jit` by which an equation says that it belongs to a slice. Names survive `grad`, `vmap`,
    `checkpoint` and dead code elimination, which is why a name, and not a parameter, carries the slice."""
    return f"pathway:{slice}:{name}"


def placed_slice(equation: Equation) -> int | None:
    """The slice that a `pathway.jit` call names; None for every other equation."""
    if equation.primitive.name not in ("jit", "pjit"):
        return None
    match = _PLACED_NAME.search(equation.params["name"])
    return int(match[1]) if match else None


def equation_name(equation: Equation) -> str:
    """What people call the equation: the function's name for a call, else the primitive's."""
    name = str(equation.params.get("name") or equation.primitive.name)
    match = _PLACED_NAME.search(name)
    return match[2] if match else name


def opened(jaxpr: Any) -> tuple[Any, tuple[Any, ...]]:
    """(jaxpr, constants), whichever class stands in the parameters."""
    return getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ()))


def is_jaxpr(value: object) -> bool:
    return isinstance(value, (jex.Jaxpr, jex.ClosedJaxpr))


def inner_jaxprs(equation: Equation) -> Iterator[Any]:
    """The jaxprs among an equation's parameters: bodies, branches, conditions."""
    for value in equation.params.values():
        for entry in value if isinstance(value, (tuple, list)) else (value,):
            if is_jaxpr(entry):
                yield entry


REMATS = frozenset({"remat2", "checkpoint"})
CALLS = REMATS | {"jit", "pjit", "closed_call", "eval_jaxpr", "core_call", "custom_jvp_call", "custom_vjp_call"}
"""Equations that mean their body: replacing one by its body's equations changes nothing but what XLA may optimise."""

_WITH_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})


def call_body(equation: Equation) -> Any:
    """The body of one of `CALLS`."""
    params = equation.params
    return params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]


def every_equation(jaxpr: Any) -> Iterator[Equation]:
    """All equations at all depths, outer before inner."""
    for equation in opened(jaxpr)[0].eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from every_equation(inner)


def placed_slices(jaxpr: Any) -> frozenset[int]:
    """The slices that a jaxpr's stages name, at any depth."""
    found = {placed_slice(equation) for equation in every_equation(jaxpr)}
    return frozenset(slice for slice in found if slice is not None)


def aval_of(value: Any) -> Aval:
    """The `Aval` of a variable, a literal or anything else with an abstract value."""
    aval = getattr(value, "aval", value)
    return Aval(tuple(aval.shape), str(aval.dtype), bool(getattr(aval, "weak_type", False)))


def is_extended(dtype: Any) -> bool:
    """Whether a dtype is one of JAX's own, such as that of typed PRNG keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.extended))


def nbytes(value: Any) -> int:
    """Bytes of a variable's array."""
    aval = getattr(value, "aval", value)
    itemsize = aval.dtype.itemsize if isinstance(aval.dtype, np.dtype) else 8  # a typed PRNG key
    return int(np.prod(aval.shape, dtype=np.int64)) * itemsize


def fresh(value: Any) -> Var:
    """A new variable with the abstract value of `value`, less the mesh that JAX notes in it: the variables of a node
    all belong to the node's slice, whatever slice they came from."""
    aval = value.aval
    return jex.Var(jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type))


def make_jaxpr(
    inputs: Sequence[Var],
    outputs: Sequence[Atom],
    equations: Sequence[Equation],
    constants: Sequence[tuple[Var, Any]] = (),
    name: str = "pathway",
) -> Any:
    """A closed jaxpr of these equations."""
    names = [var for var, _ in constants]
    body = _open(names, inputs, outputs, equations, name)
    return jex.ClosedJaxpr(body, [value for _, value in constants])


def _open(
    constants: Sequence[Var],
    inputs: Sequence[Var],
    outputs: Sequence[Atom],
    equations: Sequence[Equation],
    name: str = "pathway",
) -> Any:
    arguments = tuple(f"argument{number}" for number in range(len(inputs)))
    results = tuple(f"result{number}" for number in range(len(outputs)))
    debug_info = jex.DebugInfo(name, name, arguments, results)
    return jex.Jaxpr(list(constants), list(inputs), list(outputs), list(equations), frozenset(), debug_info)


def substituted(
    jaxpr: Any,
    arguments: Sequence[Atom],
    constant: Callable[[Any, Var], Atom],
    emit: Callable[[Equation], Sequence[Atom]],
) -> list[Atom]:
    """Write out a jaxpr's equations in terms of `arguments`. Returns its outputs as atoms.

    `constant(value, variable)` is the atom that stands for a constant of the jaxpr. `emit` takes each equation, its
    inputs replaced already, and says which atoms stand for its outputs: `renewed(equation).outvars`, to keep it."""
    body, values = opened(jaxpr)
    names: dict[Var, Atom] = dict(zip(body.invars, arguments, strict=True))
    names.update((var, constant(value, var)) for var, value in zip(body.constvars, values, strict=True))
    for equation in body.eqns:
        outputs = emit(equation.replace(invars=[read(names, atom) for atom in equation.invars]))
        names.update(zip(equation.outvars, outputs, strict=True))
    return [read(names, atom) for atom in body.outvars]


def renewed(equation: Equation) -> Equation:
    """The equation with fresh output variables."""
    return equation.replace(outvars=[fresh(var) for var in equation.outvars])


def scan_counts(equation: Equation) -> tuple[int, int]:
    """How many of a scan's inputs are constants of its body, and how many are carried."""
    params = equation.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(list(constants)), len(list(carry))


def struct_of(value: Any) -> jax.ShapeDtypeStruct:
    """The abstract value, in the form that JAX takes from users."""
    aval = value.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def read(names: dict[Var, Atom], atom: Atom) -> Atom:
    """What an atom of a jaxpr stands for."""
    return atom if isinstance(atom, Literal) else names[atom]


def without_dead_code(jaxpr: Any, used: Sequence[bool]) -> tuple[Any, list[bool]]:
    """The jaxpr with those outputs alone, and which of its inputs are still read. Constants stay constants."""
    body, values = opened(jaxpr)
    # The elimination sees constants as inputs, so that it works alike where a jaxpr carries them and where it does not.
    names = [*body.constvars, *body.invars]
    flat = _open([], names, body.outvars, body.eqns)
    alive, live_inputs = partial_eval.dce_jaxpr(flat, list(used), False)
    constants = len(body.constvars)
    kept = iter(alive.invars)
    live = [(var, next(kept)) for var, lives in zip(names, live_inputs, strict=True) if lives]
    renamed = dict(live)
    constant_pairs = [
        (renamed[var], value) for var, value in zip(body.constvars, values, strict=True) if var in renamed
    ]
    inputs = [renamed[var] for var in body.invars if var in renamed]
    return make_jaxpr(inputs, alive.outvars, alive.eqns, constant_pairs), list(live_inputs[constants:])


def call_of(jaxpr: Any, inputs: Sequence[Atom], outputs: Sequence[Var], like: Equation | None = None) -> Equation:
    """A call of a closed jaxpr, as an equation with the source line of `like`."""
    source = None if like is None else like.source_info
    return jex.new_jaxpr_eqn(
        list(inputs), list(outputs), jex.primitives.closed_call_p, {"call_jaxpr": jaxpr}, frozenset(), source
    )


class Interner:
    """Equal jaxprs become the same object, so that what is lowered for one microbatch serves them all."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        self._interned: dict[int, tuple[Any, Any]] = {}
        self._pruned: dict[tuple[int, tuple[bool, ...]], tuple[Any, Any, list[bool]]] = {}

    def intern(self, jaxpr: Any) -> Any:
        if id(jaxpr) not in self._interned:  # with the original, to keep it alive: its id is the key
            self._interned[id(jaxpr)] = (jaxpr, self._known.setdefault(self._fingerprint(jaxpr), jaxpr))
        return self._interned[id(jaxpr)][1]

    def pruned(self, jaxpr: Any, used: tuple[bool, ...]) -> tuple[Any, list[bool]]:
        """`without_dead_code`, once per jaxpr and outputs; the same object where all outputs are used."""
        if all(used):
            return jaxpr, [True] * len(opened(jaxpr)[0].invars)
        key = (id(jaxpr), used)
        if key not in self._pruned:
            alive, live = without_dead_code(jaxpr, used)
            self._pruned[key] = (jaxpr, self.intern(alive), live)
        _, alive, live = self._pruned[key]
        return alive, live

    def _fingerprint(self, jaxpr: Any) -> Any:
        """Equal for jaxprs that differ in nothing but their variables, names and source lines."""
        body, values = opened(jaxpr)
        numbers = {var: number for number, var in enumerate([*body.constvars, *body.invars])}
        equations = []
        for equation in body.eqns:
            inputs = tuple(_atom(numbers, atom) for atom in equation.invars)
            for var in equation.outvars:
                numbers[var] = len(numbers)
            rules = equation.primitive.name in _WITH_RULES  # of autodiff, which is over: only the body counts
            params = tuple(
                (key, self._parameter(value))
                for key, value in sorted(equation.params.items())
                if not rules or is_jaxpr(value)
            )
            context = repr(getattr(equation.ctx, "compute_type", None)), repr(getattr(equation.ctx, "xla_metadata", 0))
            equations.append((equation.primitive, inputs, tuple(map(_type, equation.outvars)), params, context))
        outputs = tuple(_atom(numbers, atom) for atom in body.outvars)
        return tuple(map(_type, body.invars)), tuple(map(id, values)), tuple(equations), outputs

    def _parameter(self, value: Any) -> Any:
        if is_jaxpr(value):
            return ("jaxpr", id(self.intern(value)))
        if isinstance(value, (tuple, list)):
            return tuple(map(self._parameter, value))
        try:
            hash(value)
        except TypeError:
            return ("object", id(value))
        return (type(value), value)


def _type(atom: Atom) -> tuple[str, bool]:
    return str(atom.aval), atom.aval.weak_type


def _atom(numbers: dict[Var, int], atom: Atom) -> Any:
    return (np.asarray(atom.val).tobytes(), *_type(atom)) if isinstance(atom, Literal) else numbers[atom]


def is_backward(equation: Equation) -> bool:
    """Whether autodiff made the equation as part of a backward pass."""
    return "transpose(" in str(equation.source_info.name_stack)


# Source lines -------------------------------------------------------------------------------------------------------

_PATHWAY = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_JAX = tuple(
    os.path.dirname(module.__file__) + os.sep for module in (jax, sys.modules["jaxlib"]) if module.__file__ is not None
)
_LIBRARIES = tuple(
    os.path.abspath(path) + os.sep
    for path in {*site.getsitepackages(), sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]}
)


def source_line(equation: Equation) -> str:
    """The user's line that made an equation, as "train.py:12 in step". Of a stage that is a program by itself there is
    none within the trace: then it is the line that called it."""
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    return _user_line((frame.file_name, frame.line_num, frame.function_name) for frame in frames) or calling_line()


def calling_line() -> str:
    """The user's line that is running now."""

    def frames() -> Iterator[tuple[str, int, str]]:
        frame = sys._getframe(1)
        while frame is not None:
            yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname
            frame = frame.f_back  # type: ignore[assignment]

    return _user_line(frames())


def raising_line(error: BaseException) -> tuple[str, bool]:
    """The user's line that an exception came through last, and whether a `raise` of the user's code raised it. (JAX
    takes its own frames out of tracebacks, so it does not show there when an exception is JAX's.)"""
    frames: list[tuple[str, int, str]] = []
    traceback, raised = error.__traceback__, False
    while traceback is not None:
        code = traceback.tb_frame.f_code
        frames.append((code.co_filename, traceback.tb_lineno, code.co_qualname))
        opcode = code.co_code[traceback.tb_lasti]
        raised = dis.opname[opcode] in ("RAISE_VARARGS", "RERAISE") and not code.co_filename.startswith(_JAX)
        traceback = traceback.tb_next
    return _user_line(reversed(frames)), raised


def _user_line(frames: Iterable[tuple[str, int, str]]) -> str:
    """The innermost frame of the user's own files; of another library's (optax, say) where there is none."""
    library = ""
    for file, line, function in frames:
        if file.startswith((_PATHWAY, *_JAX, "<")):
            continue
        text = f"{os.path.basename(file)}:{line} in {function.rpartition('.')[2]}"
        if not file.startswith(_LIBRARIES):
            return text
        library = library or text
    return library
