"""Settings: flags > environment (PATHWAY_*) > pathway.toml > defaults.

`pathway.toml` is looked for in the working directory, or where $PATHWAY_CONFIG says. Its keys are the fields of
`Settings`; the environment's names are theirs in capitals, PATHWAY_CONNECT_TIMEOUT_S for example. A key that is none is
refused by name, and so is a variable that looks like a misspelt one.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from pathway.errors import ConfigError
from pathway.transport.security import KeyPaths

PREFIX = "PATHWAY_"
FILE_NAME = "pathway.toml"
DEFAULT_ADDRESS = "tcp://127.0.0.1:7777"
_CLOSE = 0.8  # how alike a misspelt variable is to the one that was meant


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be set. Names end with their units."""

    address: str = DEFAULT_ADDRESS
    """The scheduler that clients and workers connect to."""
    bind: str = DEFAULT_ADDRESS
    """Where a scheduler listens."""
    connect_timeout_s: float = 10.0
    lease_s: float = 10.0
    """How long a session outlives its client's silence."""
    heartbeat_s: float = 0.5
    host_silence_s: float = 2.0
    """A worker that is silent for this long is lost."""
    executor_silence_s: float = 10.0
    credits_per_island: int = 16
    """Runs in flight on an island, past the scheduler (O-7)."""
    device_memory: str = ""
    """Of each device of a worker, for programs, for example 16GiB. Empty: what the devices say themselves, if they do;
    without a limit if not."""
    spill: bool = False
    """Move buffers that nobody has used for long to the hosts' memory when a run needs their room."""
    policy: str = "fair"
    """Whose run goes next: fair, fifo or priority, or one of your own as "module:object" (docs/scheduling.md)."""
    state_dir: str = ""
    """Where a scheduler remembers what must outlive it; empty: nowhere."""
    drain_s: float = 10.0
    """How long a scheduler that is told to stop waits for the runs it has."""
    max_sessions: int = 1000
    """Clients connected at once."""
    max_plans_per_session: int = 10_000
    max_program_mib_per_session: int = 4096
    """Compiled programs that one client may have the cluster keep."""
    max_message_mib: int = 256
    """The largest message that a scheduler takes. Computations are the largest."""
    max_undelivered_mib: int = 256
    """A peer for which more than this waits, because it does not take it, is disconnected."""
    shared_memory: bool = True
    """Data between processes of one machine goes through memory that they share, where they can."""
    transfer: typing.Literal["auto", "pathway", "jax"] = "auto"
    """How executors send edges to other islands: by Pathway's own links, by jax.experimental.transfer, or by what suits
    the platform (docs/transfers.md)."""
    keys: str = ""
    """A directory with keys, as `pathway keygen DIR` makes it: each process takes the key of its kind."""
    key: str = ""
    """The file of another key pair to use."""
    scheduler_key: str = ""
    """The file of the scheduler's public key, where it is not in `keys`."""
    allowed_keys: str = ""
    """The scheduler's list of keys, where it is not in `keys`."""
    insecure: bool = False
    """Listen without keys on addresses that other machines can reach."""
    log_format: typing.Literal["auto", "terminal", "json"] = "auto"
    log_level: typing.Literal["debug", "info", "warning", "error"] = "info"

    def __post_init__(self) -> None:
        for name in ("connect_timeout_s", "lease_s", "heartbeat_s", "host_silence_s", "executor_silence_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)!r}")
        if self.drain_s < 0:
            raise ConfigError(f"drain_s must not be below 0: {self.drain_s!r}")
        for name in (
            "credits_per_island",
            "max_sessions",
            "max_plans_per_session",
            "max_program_mib_per_session",
            "max_message_mib",
            "max_undelivered_mib",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)!r}")
        size_bytes(self.device_memory, "device_memory")
        if self.host_silence_s <= 2 * self.heartbeat_s:
            raise ConfigError(
                f"host_silence_s ({self.host_silence_s:g}) must be more than two heartbeats "
                f"(heartbeat_s = {self.heartbeat_s:g}), or hosts are lost at random"
            )

    @property
    def device_memory_bytes(self) -> int:
        """0 where nothing is set."""
        return size_bytes(self.device_memory, "device_memory")

    @property
    def state_path(self) -> Path | None:
        """Where a scheduler remembers, if it does."""
        return _path(self.state_dir)

    def key_paths(self, kind: str) -> KeyPaths | None:
        """Where the keys of a process of this kind are (scheduler, worker, client or admin); None without keys."""
        found = KeyPaths.in_directory(Path(self.keys), kind) if self.keys else None
        own = _path(self.key) or (found.own if found else None)
        scheduler = _path(self.scheduler_key) or (found.scheduler if found else None)
        allow_list = _path(self.allowed_keys) or (found.allow_list if found else None)
        if own is None:
            if scheduler is not None or allow_list is not None:
                raise ConfigError("scheduler_key and allowed_keys need a key of one's own: give keys or key")
            return None
        return KeyPaths(own, scheduler, allow_list)


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|b)?", re.IGNORECASE)


def size_bytes(text: str, name: str) -> int:
    """ "512MiB" or "2 GB" in bytes; 0 for "". Raises `ConfigError`."""
    if not text:
        return 0
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{name}: {text!r} is no size, such as 512MiB or 16GB")
    number, unit, binary = match.groups()
    factor = (1024 if binary else 1000) ** (" kmgt".index(unit.lower()) if unit else 0)
    return int(float(number) * factor)


def _path(text: str) -> Path | None:
    return Path(text).expanduser() if text else None


def load_settings(
    flags: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """The settings in force. `flags` that are None are not given. Raises `ConfigError`, naming key and source."""
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    path = file or Path(environment.get(PREFIX + "CONFIG", FILE_NAME))
    if path.exists():
        values |= _from_file(path)
    elif file is not None or PREFIX + "CONFIG" in environment:
        raise ConfigError(f"there is no {path}")
    values |= _from_environment(environment)
    values |= {name: value for name, value in (flags or {}).items() if value is not None}
    return Settings(**values)


NO_SETTINGS = frozenset({"PATHWAY_CACHE_DIR"})
"""Variables that are read where they are needed: where executors keep what they have compiled."""


def _from_file(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    values = {}
    for name, value in table.items():
        if name not in _TYPES:
            raise ConfigError(f"{path}: there is no setting {name!r}{_did_you_mean(name, _TYPES)}")
        values[name] = _checked(name, value, str(path))
    return values


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    variables = {PREFIX + name.upper(): name for name in _TYPES}
    for variable, text in environment.items():
        if variable in variables:
            name = variables[variable]
            values[name] = _checked(name, _parsed(name, text, variable), variable)
        elif variable.startswith(PREFIX) and variable not in NO_SETTINGS:
            hint = _did_you_mean(variable, variables)
            if hint:
                raise ConfigError(f"there is no setting {variable}{hint}")
    return values


def _parsed(name: str, text: str, source: str) -> Any:
    kind = _TYPES[name]
    try:
        if kind is bool:
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}[
                text.strip().lower()
            ]
        return kind(text) if kind in (int, float) else text
    except (ValueError, KeyError):
        raise ConfigError(f"{source}: {text!r} is no {_describe(kind)}") from None


def _checked(name: str, value: Any, source: str) -> Any:
    kind = _TYPES[name]
    choices = typing.get_args(kind)
    if choices:
        if value not in choices:
            raise ConfigError(f"{source}: {name} must be one of {', '.join(choices)}, not {value!r}")
        return value
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{source}: {name} must be {_describe(kind)}, not {value!r}")
    return value


def _describe(kind: Any) -> str:
    return {int: "whole number", float: "number", bool: "true or false", str: "text"}[kind]


def _did_you_mean(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE)
    return f"; did you mean {close[0]}?" if close else ""


_TYPES: dict[str, Any] = {field.name: get_type_hints(Settings)[field.name] for field in fields(Settings)}
