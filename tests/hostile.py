"""Hostile input from a seed: messages that are well-formed and mean nothing, frames that are damaged, and noise.

What a fuzz finds depends on how far it gets, so most of it is *nearly* right: fields have their types, ids come from a
small pool in which real ones are, and damage is done to frames that were whole.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Raw
from msgspec import inspect as types

from pathway.transport import messages as m

NUMBERS = (
    0,
    1,
    2,
    3,
    4,
    7,
    100,
    101,
    -1,
    -2,
    1 << 20,
    1 << 31,
    (1 << 53) + 1,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    -(1 << 63),
)
TEXTS = (
    *("", "east", "west", "north", "d", "cpu", "key", "float32", "bfloat16", "int4", "key<fry>", "void", "client"),
    *("peer", "executor", "é\u202e", "\x00", "x" * 300, "../../etc/passwd", "tcp://127.0.0.1:1", "SessionLostError"),
    "report",
)
NUMBERS_REAL = (0.0, 1.0, -1.0, 0.5, 1e308, -1e308, float("inf"), float("nan"), 5e-324)


class Hostile:
    """Random input. `numbers` and `texts` are the ids that mean something where it goes, and come up most often."""

    def __init__(self, seed: int, numbers: Sequence[int] = (), texts: Sequence[str] = ()) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.numbers = list(numbers)
        self.texts = list(texts)
        self._makers: dict[Any, Callable[[], Any]] = {}

    # -- messages that are well-formed ----------------------------------------------------------------------------

    def message(self, kind: type[m.Message]) -> m.Message:
        """One of this kind, its fields anything of their types."""
        made: m.Message = self._maker(kind)()
        return made

    def value(self, annotation: Any) -> Any:
        """Anything of a type."""
        return self._maker(annotation)()

    def _maker(self, annotation: Any) -> Callable[[], Any]:
        try:
            return self._makers[annotation]
        except KeyError:
            made = self._makers[annotation] = self._make(types.type_info(annotation))
            return made

    def _make(self, info: types.Type) -> Callable[[], Any]:
        draw = self.random
        match info:
            case types.IntType():
                return self.number
            case types.StrType():
                return self.text
            case types.FloatType():
                return lambda: draw.choice(NUMBERS_REAL)
            case types.BoolType():
                return lambda: draw.random() < 0.5
            case types.NoneType():
                return lambda: None
            case types.BytesType():
                return self.noise
            case types.RawType():
                return lambda: Raw(msgspec.msgpack.encode(self.anything(2)))
            case types.VarTupleType(item_type=item):
                of_item = self._make(item)
                return lambda: tuple(of_item() for _ in range(draw.choice((0, 1, 1, 2, 3, 5))))
            case types.TupleType(item_types=items):
                of_items = [self._make(item) for item in items]
                return lambda: tuple(each() for each in of_items)
            case types.DictType(key_type=key, value_type=value):
                of_key, of_value = self._make(key), self._make(value)
                return lambda: {of_key(): of_value() for _ in range(draw.randrange(3))}
            case types.UnionType(types=choices):
                made = [self._make(choice) for choice in choices]
                return lambda: draw.choice(made)()
            case types.StructType(cls=cls, fields=fields):
                of_fields = [(field.name, self._lazily(cls, field.type)) for field in fields]
                return lambda: cls(**{name: each() for name, each in of_fields})
            case _:
                raise AssertionError(f"a message has a field of type {info}")

    def _lazily(self, owner: type, info: types.Type) -> Callable[[], Any]:
        """A maker for a field; a struct that holds its own kind (an error with a cause) ends somewhere."""
        if isinstance(info, types.UnionType) and any(
            isinstance(each, types.StructType) and each.cls is owner for each in info.types
        ):
            return lambda: None
        return self._make(info)

    def number(self) -> int:
        pool = self.numbers if self.numbers and self.random.random() < 0.6 else NUMBERS
        return self.random.choice(pool)

    def text(self) -> str:
        pool = self.texts if self.texts and self.random.random() < 0.6 else TEXTS
        return self.random.choice(pool)

    def noise(self) -> bytes:
        return self.random.randbytes(self.random.choice((0, 1, 4, 8, 16, 100, 3000)))

    def anything(self, depth: int) -> Any:
        """Any value of MessagePack."""
        choice = self.random.randrange(8 if depth else 6)
        match choice:
            case 0:
                return self.number()
            case 1:
                return self.text()
            case 2:
                return self.noise()
            case 3:
                return self.random.choice(NUMBERS_REAL)
            case 4:
                return self.random.choice((None, True, False))
            case 5 | 6:
                return [self.anything(depth - 1) for _ in range(self.random.randrange(4))] if depth else []
            case _:
                return {self.text(): self.anything(depth - 1)}

    # -- frames that are not ----------------------------------------------------------------------------------------

    def frame(self, kinds: Sequence[type[m.Message]] = m.CONTROL_MESSAGES) -> bytes:
        """A frame: of well-formed messages, of messages with a wrong field, damaged, or noise."""
        draw = self.random
        messages = [self.message(draw.choice(kinds)) for _ in range(draw.choice((1, 1, 1, 2, 4)))]
        match draw.randrange(10):
            case 0:
                return m.encode(messages)
            case 1 | 2 | 3:
                return self.with_wrong_field(m.encode(messages))
            case 4:
                return draw.randbytes(draw.randrange(200))
            case _:
                return self.damaged(m.encode(messages))

    def with_wrong_field(self, frame: bytes) -> bytes:
        """The frame with a field of another type, one too many, or one too few."""
        whole = msgspec.msgpack.decode(frame)
        within = self.random.choice(whole)
        match self.random.randrange(4):
            case 0:
                within.append(self.anything(2))
            case 1:
                del within[self.random.randrange(len(within)) :]
            case _:
                within[self.random.randrange(len(within))] = self.anything(3)
        return msgspec.msgpack.encode(whole)

    def damaged(self, frame: bytes) -> bytes:
        """The frame with bytes flipped, lost, doubled, or with a length that lies."""
        data, draw = bytearray(frame), self.random
        for _ in range(draw.choice((1, 1, 2, 5))):
            if not data:
                break
            at = draw.randrange(len(data))
            match draw.randrange(7):
                case 0:
                    data[at] ^= 1 << draw.randrange(8)
                case 1:
                    data[at] = draw.randrange(256)
                case 2:
                    del data[at:]
                case 3:
                    del data[at : at + draw.randrange(1, 9)]
                case 4:
                    data[at:at] = draw.randbytes(draw.randrange(1, 9))
                case 5:
                    data[at:at] = data[at : at + draw.randrange(1, 40)]
                case _:  # an array, map, string or binary of four thousand million
                    data[at : at + 5] = draw.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6")) + b"\xff\xff\xff\xf0"
        return bytes(data)
