"""`pathway.cond`, `switch` and `while_loop`: what of a program runs is decided by data, over slices.

They are JAX's own conditions and loops, marked, so that `grad`, `jvp` and `vmap` know them. Placement makes a control
of each: the branches are plans of their own, and the scheduler starts the one that is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from pathway.client import tracing
from pathway.client.operators import traced
from pathway.dataflow.control import marked
from pathway.errors import ProgramError


def cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], *operands: Any) -> Any:
    """`true_fn(*operands)` if `pred`, else `false_fn(*operands)`, within a `pathway.program`.

    As `jax.lax.cond`: both sides return the same structure of the same shapes and dtypes, and may close over arrays of
    the program. Their stages may be on any slices. The side that is not taken costs nothing: none of it runs, and
    nothing is sent for it. What comes out lies where the true side puts it, where the two differ.
    """
    _check("cond")
    return marked(lambda pred, *operands: jax.lax.cond(pred, _operand(true_fn), _operand(false_fn), *operands))(
        *_traced((pred, *operands))
    )


def switch(index: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """`branches[index](*operands)`, within a `pathway.program`: as `cond`, with more than two sides. An index that is
    out of range counts as the nearest that is not, as with `jax.lax.switch`."""
    _check("switch")
    return marked(lambda index, *operands: jax.lax.switch(index, [_operand(b) for b in branches], *operands))(
        *_traced((index, *operands))
    )


def while_loop(cond_fn: Callable[[Any], Any], body_fn: Callable[[Any], Any], init: Any) -> Any:
    """`init`, then `body_fn` of it, over and over for as long as `cond_fn` says so, within a `pathway.program`.

    As `jax.lax.while_loop`, with stages on any slices. A step costs a round trip between an island and the scheduler,
    and none of the client. There are derivatives in forward mode. An endless loop ends by `Array.cancel` of a result,
    or with its client.
    """
    _check("while_loop")
    return marked(lambda init: jax.lax.while_loop(_operand(cond_fn), _operand(body_fn), init))(_traced(init))


def _check(name: str) -> None:
    if not tracing.is_on():
        raise ProgramError(f"pathway.{name} is a part of a program: call it within a pathway.program")


def _traced(tree: Any) -> Any:
    return jax.tree.map(traced, tree)


def _operand(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, whose results may be arrays that it closes over."""
    return lambda *operands: _traced(fun(*operands))
