"""Checkpoints in Orbax format, written through the client: atomic, and readable by plain Orbax.

A checkpoint is the folder `step_N` with the tree {"params", "optimizer", "step"}, the optimizer's leaves by number. It
comes into being under another name, and gets its own when it is whole; what is left of one that was not stays unread.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pathway.errors import ConfigError

Tree = Any
_NAME = re.compile(r"step_(\d+)")


def save(directory: Path, step: int, params: Tree, optimizer: Tree) -> Path:
    """Write host arrays; returns the checkpoint's folder."""
    import orbax.checkpoint as ocp

    target = (directory / f"step_{step}").resolve()
    leaves = {f"{number:04d}": np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(optimizer))}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(target, {"params": params, "optimizer": leaves, "step": np.int64(step)}, force=True)
    return target


def latest(directory: Path) -> Path | None:
    """The checkpoint of the highest step."""
    found = [(int(match[1]), path) for path in directory.glob("step_*") if (match := _NAME.fullmatch(path.name))]
    return max(found)[1] if found else None


def restore(checkpoint: Path, params: Tree, optimizer: Tree) -> tuple[int, Tree, Tree]:
    """(step, params, optimizer) as host arrays, in the structure of those given. Raises `ConfigError` for a checkpoint
    of another model, and for one that cannot be read."""
    import orbax.checkpoint as ocp

    leaves, structure = jax.tree.flatten(optimizer)
    names = [f"{number:04d}" for number in range(len(leaves))]
    wanted = {"params": params, "optimizer": dict(zip(names, leaves, strict=True)), "step": np.int64(0)}
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
            found = checkpointer.restore(checkpoint.resolve(), restore_args=kinds)
    except Exception as error:
        raise ConfigError(f"the checkpoint {checkpoint} cannot be read: {type(error).__name__}: {error}") from error
    shapes = jax.tree.map(np.shape, found), jax.tree.map(np.shape, wanted)
    if shapes[0] != shapes[1]:
        raise ConfigError(f"the checkpoint {checkpoint} is of another model: {_difference(found, wanted)}")
    ordered = [found["optimizer"][name] for name in names]
    return int(found["step"]), found["params"], structure.unflatten(ordered)


def _difference(found: Tree, wanted: Tree) -> str:
    def by_path(tree: Tree) -> dict[str, tuple[int, ...]]:
        return {jax.tree_util.keystr(path): np.shape(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}

    one, other = by_path(found), by_path(wanted)
    different = [path for path in sorted({*one, *other}) if one.get(path) != other.get(path)]
    first = different[0] if different else "the structure"
    return f"{first} is {one.get(first, 'not there')}, and {other.get(first, 'not there')} in the model"
