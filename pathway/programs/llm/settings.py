"""What a training is told by its TOML file."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pathway.errors import ConfigError
from pathway.programs.llm.model import Config


@dataclasses.dataclass(frozen=True)
class Parallel:
    """How the model is laid out: `replicas` of a pipeline of `stages`, each on a slice of `tensor` devices. Every stage
    gets an island of its own if the cluster is started for this training."""

    replicas: int = 1
    stages: int = 2
    tensor: int = 1
    microbatches: int = 4
    schedule: str = "1f1b"


@dataclasses.dataclass(frozen=True)
class Train:
    """What is done. `evaluate_every` and `save_every` are in steps; 0 means only at the end. `peak_flops` of all
    devices together: what the part that is made use of (MFU) is a part of."""

    steps: int = 200
    batch: int = 16
    learning_rate: float = 3e-3
    warmup: int = 20
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    evaluate_every: int = 50
    evaluate_batches: int = 4
    save_every: int = 100
    peak_flops: float = 0.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """The sections of the file. `text` is the path of what is trained on; `directory` gets checkpoints and pictures."""

    text: Path
    directory: Path = Path("run")
    model: Config = dataclasses.field(default_factory=Config)
    parallel: Parallel = dataclasses.field(default_factory=Parallel)
    train: Train = dataclasses.field(default_factory=Train)

    def __post_init__(self) -> None:
        parallel, train = self.parallel, self.train
        if not 1 <= parallel.stages <= self.model.layers:
            raise ConfigError(f"{self.model.layers} layers cannot be cut into {parallel.stages} stages")
        if train.batch % (parallel.replicas * parallel.microbatches):
            raise ConfigError(
                f"a batch of {train.batch} cannot be dealt out to {parallel.replicas} replicas in "
                f"{parallel.microbatches} microbatches each"
            )
        if self.model.kv_heads % parallel.tensor or self.model.hidden % parallel.tensor:
            raise ConfigError(f"kv_heads and hidden of the model cannot be split over {parallel.tensor} devices")


def read_settings(path: Path) -> Settings:
    """The settings in a TOML file; paths in it are relative to it."""
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    settings: Settings = _read(Settings, table, str(path))
    base = path.parent
    return dataclasses.replace(settings, text=base / settings.text, directory=base / settings.directory)


_SECTIONS: Mapping[str, Any] = {"model": Config, "parallel": Parallel, "train": Train}


def _read(kind: Any, table: Mapping[str, Any], where: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values = {}
    for key, value in table.items():
        if key not in fields:
            raise ConfigError(f"{where}: there is no {key!r} here: {', '.join(fields)}")
        if key in _SECTIONS:
            values[key] = _read(_SECTIONS[key], value, f"{where} [{key}]")
            continue
        wanted: Any = {"Path": str, "int": int, "float": (int, float), "str": str, "bool": bool}[str(fields[key].type)]
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise ConfigError(f"{where}: {key} is of type {fields[key].type}, not {value!r}")
        values[key] = Path(value) if fields[key].type == "Path" else value
    unset = dataclasses.MISSING
    required = [name for name, field in fields.items() if field.default is field.default_factory is unset]
    missing = [name for name in required if name not in values]
    if missing:
        raise ConfigError(f"{where}: {', '.join(missing)} is missing")
    return kind(**values)
