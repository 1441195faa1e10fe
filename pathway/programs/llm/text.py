"""What a language model is trained on: a file's tokens, cut into batches that follow from the number of the step alone.
Tokens are bytes, or those of a byte-pair encoding that is made of the text itself (Sennrich, Haddow and Birch, 2016).

So a training that was interrupted goes on with the same batches, and has no reader whose state would have to be saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pathway.errors import ConfigError

HELD_OUT = 0.05
"""The last part of the text, for validation."""


BYTES = 256
"""Tokens, where they are bytes."""


class ByteTokens:
    """Each byte is a token."""

    unit = "byte"

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: Sequence[int]) -> bytes:
        return bytes(tokens)


class PairTokens:
    """A byte-pair encoding: every byte is a token, and so are stretches of bytes that are frequent in the text."""

    unit = "token"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, text: bytes, vocabulary: int) -> PairTokens:
        """Made of a text, of at most so many tokens. The same text gives the same tokens."""
        try:
            import tokenizers
        except ImportError:
            raise ConfigError(
                f"a vocabulary of {vocabulary} needs the package tokenizers: pip install 'pathway-jax[train]'"
            ) from None
        from tokenizers import decoders, models, pre_tokenizers, trainers

        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(_lines(text), trainer)
        return cls(tokenizer)

    @classmethod
    def read(cls, path: Path) -> PairTokens:
        """As `save` has written it."""
        import tokenizers

        return cls(tokenizers.Tokenizer.from_file(str(path)))

    def save(self, path: Path) -> None:
        """Write it as JSON, which the package `tokenizers` reads."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(path))

    def encode(self, text: bytes) -> np.ndarray:
        encoded = self._tokenizer.encode_batch(_lines(text))
        return np.concatenate([np.array(line.ids, np.int32) for line in encoded] or [np.empty(0, np.int32)])

    def decode(self, tokens: Sequence[int]) -> bytes:
        text: str = self._tokenizer.decode(list(tokens))
        return text.encode()


Tokens = ByteTokens | PairTokens


def _lines(text: bytes) -> list[str]:
    try:
        return text.decode().splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise ConfigError(f"a vocabulary of more than {BYTES} needs a text in UTF-8: {error}") from None


@dataclass(frozen=True)
class Text:
    """The tokens of both parts, and what they mean."""

    train: np.ndarray
    held_out: np.ndarray
    tokens: Tokens


def read(path: Path, context: int, vocabulary: int = BYTES, saved: Path | None = None) -> Text:
    """A file of any kind, of which the last part is held out. With a `vocabulary` of more than 256, tokens are a
    byte-pair encoding of its first part, which is read from `saved` if it was written there."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the text cannot be read: {error}") from error
    if vocabulary < BYTES:
        raise ConfigError(f"a vocabulary of {vocabulary} cannot have all {BYTES} bytes")
    cut = int(len(content) * (1 - HELD_OUT))
    tokens: Tokens = ByteTokens()
    if vocabulary > BYTES:
        cut = content.rfind(b"\n", 0, cut) + 1 or cut  # within no character
        known = saved is not None and saved.is_file()
        tokens = PairTokens.read(saved) if known and saved is not None else PairTokens.of(content[:cut], vocabulary)
        if saved is not None and not known:
            tokens.save(saved)
    text = Text(tokens.encode(content[:cut]), tokens.encode(content[cut:]), tokens)
    if len(text.held_out) <= context + 1:
        raise ConfigError(
            f"{path} has {len(content)} bytes, of which {len(text.held_out)} {tokens.unit}s are held out: too few for "
            f"a context of {context}"
        )
    return text


def batch(tokens: np.ndarray, size: int, context: int, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The inputs and the targets of a step: stretches from random places, the targets one token on."""
    rng = np.random.default_rng((seed, step))
    starts = rng.integers(0, len(tokens) - context, size)
    rows = np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int32)
    return rows[:, :-1], rows[:, 1:]
