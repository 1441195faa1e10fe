"""Ready-made programs, built on the public API alone: a program that needs more shows what the API is missing.

Modules are named in the plural, what they are for in the singular: `pathway.programs.pipeline` is the function.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathway.programs.layers import sequential_stages, split_layers
    from pathway.programs.mixtures import Experts, experts, load_balancing_loss, top_k_choices
    from pathway.programs.pipelines import Pipeline, pipeline
    from pathway.programs.replicas import DataParallel, data_parallel
    from pathway.programs.schedules import Arrangement, Pass, Schedule, Shape, Task

__all__ = [
    "Arrangement",
    "DataParallel",
    "Experts",
    "Pass",
    "Pipeline",
    "Schedule",
    "Shape",
    "Task",
    "data_parallel",
    "experts",
    "load_balancing_loss",
    "pipeline",
    "sequential_stages",
    "split_layers",
    "top_k_choices",
]

_HOME = {
    "Arrangement": "schedules",
    "DataParallel": "replicas",
    "Experts": "mixtures",
    "Pass": "schedules",
    "Pipeline": "pipelines",
    "Schedule": "schedules",
    "Shape": "schedules",
    "Task": "schedules",
    "data_parallel": "replicas",
    "experts": "mixtures",
    "load_balancing_loss": "mixtures",
    "pipeline": "pipelines",
    "sequential_stages": "layers",
    "split_layers": "layers",
    "top_k_choices": "mixtures",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'pathway.programs' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"pathway.programs.{home}"), name)
    return value
