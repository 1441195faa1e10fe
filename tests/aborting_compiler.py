"""Preloaded by executors in a test: an XLA that aborts the process on one program, as XLA does on some."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

UNSPEAKABLE = np.float32(12345.678)
"""A program with this number in it."""


def register() -> None:
    from pathway.executor.backend import Backend

    compile_ = Backend.compile

    def aborting(self: Backend, key: str, metadata: Any, artifact: bytes, devices: tuple[int, ...]) -> Any:
        if UNSPEAKABLE.tobytes() in artifact:
            os.abort()
        return compile_(self, key, metadata, artifact, devices)

    Backend.compile = aborting  # type: ignore[method-assign]
