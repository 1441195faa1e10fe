"""What a language model is trained on: a file's bytes, cut into batches that follow from the number of the step alone.

So a training that was interrupted goes on with the same batches, and has no reader whose state would have to be saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pathway.errors import ConfigError

HELD_OUT = 0.05
"""The last part of the text, for validation."""


@dataclass(frozen=True)
class Text:
    """Byte tokens."""

    train: np.ndarray
    held_out: np.ndarray


def read(path: Path, context: int) -> Text:
    """A file of any kind, of which the last part is held out."""
    try:
        tokens = np.frombuffer(path.read_bytes(), np.uint8)
    except OSError as error:
        raise ConfigError(f"the text cannot be read: {error}") from error
    cut = int(len(tokens) * (1 - HELD_OUT))
    text = Text(tokens[:cut], tokens[cut:])
    if len(text.held_out) <= context + 1:
        raise ConfigError(f"{path} has {len(tokens)} bytes: too few for a context of {context}")
    return text


def batch(tokens: np.ndarray, size: int, context: int, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The inputs and the targets of a step: stretches from random places, the targets one token on."""
    rng = np.random.default_rng((seed, step))
    starts = rng.integers(0, len(tokens) - context, size)
    rows = np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int32)
    return rows[:, :-1], rows[:, 1:]
