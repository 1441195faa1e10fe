"""Ready-made programs, built on the public API alone: a program that needs more shows what the API is missing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathway.programs.pipeline import Pipeline, pipeline
    from pathway.programs.schedules import Arrangement, Pass, Schedule, Shape, Task, schedules

__all__ = ["Arrangement", "Pass", "Pipeline", "Schedule", "Shape", "Task", "pipeline", "schedules"]

_HOME = {
    "Arrangement": "schedules",
    "Pass": "schedules",
    "Pipeline": "pipeline",
    "Schedule": "schedules",
    "Shape": "schedules",
    "Task": "schedules",
    "pipeline": "pipeline",
    "schedules": "schedules",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'pathway.programs' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"pathway.programs.{home}"), name)
    return value
