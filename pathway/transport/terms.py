"""What the operator grants a key: its share, and the most that its sessions may have together. Pure.

Written in the allow-list behind a key's name: `weight=2 priority=1 sessions=4 devices=8 bytes=64GiB runs=100`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace

from pathway.errors import ConfigError

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"([0-9]+)(KiB|MiB|GiB|TiB)?")


@dataclass(frozen=True, slots=True)
class Terms:
    """`weight`: its share when several compete, where the policy weighs. `priority`: the most that a session may ask
    for. `sessions`, `devices` (bound to slices or asked for), `bytes` (held on devices) and `runs` (in flight past the
    scheduler) are limits for all sessions of the key together; None is none."""

    weight: float = 1.0
    priority: int = 0
    sessions: int | None = None
    devices: int | None = None
    bytes: int | None = None
    runs: int | None = None

    def options(self) -> str:
        """As in the allow-list; "" for the usual terms."""
        written = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                written.append(f"{field.name}={value:g}" if field.name == "weight" else f"{field.name}={value}")
        return " ".join(written)

    def with_option(self, word: str) -> Terms:
        """These terms with one option more. Raises `ConfigError` for what is none."""
        label, _, text = word.partition("=")
        if label == "weight":
            return replace(self, weight=_weight(text))
        if label == "priority":
            if not re.fullmatch(r"-?[0-9]{1,6}", text):
                raise ConfigError(f"a priority is a whole number, not {text!r}")
            return replace(self, priority=int(text))
        if label == "bytes":
            size = _SIZE.fullmatch(text)
            if size is None:
                raise ConfigError(f"bytes are a number, perhaps with KiB, MiB, GiB or TiB behind it, not {text!r}")
            return replace(self, bytes=int(size[1]) * _UNITS[size[2] or ""])
        if label in ("sessions", "devices", "runs"):
            if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
                raise ConfigError(f"{label} is a whole number above 0, not {text!r}")
            if label == "sessions":
                return replace(self, sessions=int(text))
            return replace(self, devices=int(text)) if label == "devices" else replace(self, runs=int(text))
        raise ConfigError(f"{label!r} is no option: there are {', '.join(field.name for field in fields(self))}")


USUAL_TERMS = Terms()


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0.0 < weight < 1e6:
        raise ConfigError(f"a weight is a number above 0 and below 1,000,000, not {text!r}")
    return weight
