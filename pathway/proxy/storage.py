"""Where plugin programs may keep files: one directory of the proxy's machine, which its operator names.

An array is a .npy file, written beside its place and renamed, so that whoever reads finds all of it or nothing.
"""

from __future__ import annotations

import os
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np

from pathway.proxy.status import Code, StatusError, invalid

GOOGLE_CLOUD_STORAGE = "gs://"


class Storage:
    """`directory`: \"\" for none. A bucket of Google's (gs://bucket/path) is a folder in it; any other place must be
    inside of it."""

    def __init__(self, directory: str) -> None:
        self._root = Path(directory).resolve() if directory else None

    def path(self, location: str) -> Path:
        """The folder that a client's location means. Raises FAILED_PRECONDITION or PERMISSION_DENIED."""
        if self._root is None:
            raise StatusError(
                Code.FAILED_PRECONDITION, "this server keeps no files for clients (pathway proxy --storage DIR)"
            )
        bucket = location.removeprefix(GOOGLE_CLOUD_STORAGE)
        path = Path(location) if bucket == location else self._root / bucket.lstrip("/")
        resolved = (path if path.is_absolute() else self._root / path).resolve()
        if not resolved.is_relative_to(self._root):
            raise StatusError(Code.PERMISSION_DENIED, f"{location} is outside of {self._root} (--storage)")
        return resolved

    def write_array(self, location: str, name: str, array: np.ndarray[Any, Any]) -> None:
        """Write it, over what was there."""
        folder = self.path(location)
        folder.mkdir(parents=True, exist_ok=True)
        path = _array_path(folder, name)
        self.write(path, lambda file: np.save(file, array, allow_pickle=False))

    @staticmethod
    def write(path: Path, fill: Any) -> None:
        """All of a file, or nothing of it."""
        draft = path.with_name(f"{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
        try:
            with draft.open("xb") as file:
                fill(file)
            draft.replace(path)
        except OSError as error:
            raise StatusError(Code.RESOURCE_EXHAUSTED, f"{path} cannot be written: {error}") from None
        finally:
            draft.unlink(missing_ok=True)

    def read_array(
        self, location: str, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> np.ndarray[Any, Any]:
        """The array, as far as can be without reading it yet. Raises NOT_FOUND, or INVALID_ARGUMENT for another shape
        or dtype, DATA_LOSS for a file that is damaged."""
        path = _array_path(self.path(location), name)
        try:
            found = np.load(path, mmap_mode="r" if 0 not in shape else None, allow_pickle=False)
        except FileNotFoundError:
            raise StatusError(Code.NOT_FOUND, f"there is no array {name!r} in {location}") from None
        except (OSError, ValueError) as error:
            raise StatusError(Code.DATA_LOSS, f"{path} cannot be read: {error}") from None
        # What is no dtype of numpy's own (bfloat16) is bytes to it.
        same = found.dtype == dtype or (found.dtype.kind == "V" and found.dtype.itemsize == dtype.itemsize)
        if found.shape != shape or not same:
            raise invalid(f"{name!r} in {location} is {found.dtype}{list(found.shape)}, not {dtype}{list(shape)}")
        array: np.ndarray[Any, Any] = found.view(dtype)
        return array


def _array_path(folder: Path, name: str) -> Path:
    return folder / f"{urllib.parse.quote(name, safe='')}.npy"
