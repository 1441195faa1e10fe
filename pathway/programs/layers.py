"""A model's layers cut into the stages of a pipeline: by number, by name or by cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from pathway.errors import ProgramError

Layer = TypeVar("Layer")
Tree = Any


def split_layers(
    layers: Sequence[Layer],
    *,
    stages: int | None = None,
    at: Sequence[int | str] | None = None,
    costs: Sequence[float] | None = None,
    names: Sequence[str] | None = None,
) -> list[list[Layer]]:
    """The layers in consecutive stages.

    Either `stages` of them, such that the most expensive stage is as cheap as can be (`costs`: of each layer; all
    alike by default), or a new one `at` each of these layers, by number or by name. `names` default to the layers
    themselves, if they are strings, or to their attribute `name`.
    """
    if (stages is None) == (at is None):
        raise ProgramError("split_layers takes either a number of stages, or the layers at which new stages begin")
    if at is not None:
        named = list(names) if names is not None else [_name(layer) for layer in layers]
        starts = [_position(where, named) for where in at]
    else:
        assert stages is not None
        starts = _balanced(list(costs) if costs is not None else [1.0] * len(layers), stages)
    cuts = [0, *starts, len(layers)]
    if any(a >= b for a, b in itertools.pairwise(cuts)):
        raise ProgramError(f"stages that begin at layers {[0, *starts]} of {len(layers)} are not consecutive and full")
    return [list(layers[a:b]) for a, b in itertools.pairwise(cuts)]


def _name(layer: object) -> str:
    return layer if isinstance(layer, str) else str(getattr(layer, "name", None) or layer)


def _position(where: int | str, names: Sequence[str]) -> int:
    if isinstance(where, int):
        return where
    if where not in names:
        raise ProgramError(f"there is no layer {where!r} among {', '.join(names)}")
    return names.index(where)


def _balanced(costs: list[float], stages: int) -> list[int]:
    """Where the stages after the first begin, such that the most expensive one is as cheap as can be."""
    if not 1 <= stages <= len(costs):
        raise ProgramError(f"{len(costs)} layers cannot be cut into {stages} stages")
    totals = [0.0, *itertools.accumulate(costs)]
    count = len(costs)
    # best[k][i]: the cheapest possible maximum of the first i layers in k + 1 stages, and where its last stage begins.
    best: list[list[tuple[float, int]]] = [[(totals[i], 0) for i in range(count + 1)]]
    for k in range(1, stages):
        row = [(float("inf"), 0)] * (count + 1)
        for i in range(k + 1, count + 1):
            row[i] = min((max(best[-1][j][0], totals[i] - totals[j]), j) for j in range(k, i))
        best.append(row)
    starts: list[int] = []
    end = count
    for k in range(stages - 1, 0, -1):
        end = best[k][end][1]
        starts.append(end)
    return starts[::-1]


def sequential_stages(
    model: Any, variables: Mapping[str, Any], *, stages: int | None = None, at: Sequence[int | str] | None = None
) -> tuple[list[Callable[[Tree, Any], Any]], list[Tree]]:
    """Stage functions `stage(params, x)` of a `flax.linen.Sequential`, and the parameters of each, from what its `init`
    gave. Cost, where `stages` is given, is the number of a layer's parameters; layers go by flax's own names."""
    import flax.linen as nn

    parameters = variables["params"]
    names = [f"layers_{number}" for number in range(len(model.layers))]
    costs = [1.0 + sum(leaf.size for leaf in jax.tree.leaves(parameters.get(name, {}))) for name in names]
    numbers = split_layers(range(len(names)), stages=stages, at=at, costs=costs, names=names)
    functions, parts = [], []
    for mine in numbers:
        renamed = {f"layers_{new}": names[old] for new, old in enumerate(mine) if names[old] in parameters}
        parts.append({new: parameters[old] for new, old in renamed.items()})
        functions.append(_applied(nn.Sequential([model.layers[number] for number in mine])))
    return functions, parts


def _applied(model: Any) -> Callable[[Tree, Any], Any]:
    def stage(params: Tree, x: Any) -> Any:
        return model.apply({"params": params}, x)

    return stage
