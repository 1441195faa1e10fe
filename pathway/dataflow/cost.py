"""How long a node may take, guessed from its jaxpr: for the order of nodes, where only proportions matter."""

from __future__ import annotations

import math
from typing import Any

from pathway.dataflow.graph import Node
from pathway.dataflow.jaxprs import inner_jaxprs, nbytes, opened
from pathway.dataflow.layout import Sharding

FLOPS_PER_S = 1e11
BYTES_PER_S = 1e10
LAUNCH_S = 20e-6
"""What one device is taken to do. A real one is faster or slower at everything, which changes no order."""


def cost_estimate(node: Node, mesh: tuple[tuple[str, int], ...]) -> float:
    """Seconds: the time of its multiplications or of its memory traffic, whichever is longer, on all devices of the
    mesh together. Loops of unknown length count once, and the longest branch of a `cond` counts."""
    flops, traffic = work(node.jaxpr)
    return LAUNCH_S + max(flops / FLOPS_PER_S, traffic / BYTES_PER_S) / Sharding(mesh).device_count


def work(jaxpr: Any) -> tuple[float, float]:
    """(floating-point operations of matrix products and convolutions, bytes read and written)."""
    flops = traffic = 0.0
    for equation in opened(jaxpr)[0].eqns:
        bodies = [work(body) for body in inner_jaxprs(equation)]
        if bodies:
            times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
            inner = max(bodies) if equation.primitive.name == "cond" else tuple(map(sum, zip(*bodies, strict=True)))
            flops, traffic = flops + times * inner[0], traffic + times * inner[1]
            continue
        traffic += sum(nbytes(atom) for atom in (*equation.invars, *equation.outvars) if hasattr(atom.aval, "shape"))
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            flops += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[axis] for axis in contracted)
        elif equation.primitive.name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            out_features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
            flops += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) / max(out_features, 1)
    return flops, traffic
