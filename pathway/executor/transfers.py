"""How pieces of edges get to other processes: an interface, and which of its two implementations is used.

`pathway` is the links of this package (`departures.BulkTransfer`): chunks over ZeroMQ, or shared memory. `jax` is
`jax.experimental.transfer` (`jax_transfer`), which on accelerators needs no detour through this process's memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from pathway.errors import ConfigError

if TYPE_CHECKING:
    from pathway.executor.bind import BoundSend, OutgoingPiece
    from pathway.executor.runs import Run

AUTO, PATHWAY, JAX = "auto", "pathway", "jax"

_FASTER_WITH_JAX = frozenset({"tpu", "gpu", "cuda", "rocm"})


class EdgeTransfer(Protocol):
    """A way for pieces to other processes."""

    def is_quick(self, send: BoundSend) -> bool:
        """Whether `pack` and `send` of a computed value may be called in the trio thread."""

    def pack(self, send: BoundSend, pieces: list[OutgoingPiece], value: Any) -> list[Any]:
        """Wait for the value, and make these pieces of it ready to be sent. Any thread. Raises what the computation
        raised, and keeps nothing then."""

    def send(self, run: Run, send: BoundSend, piece: OutgoingPiece, packed: Any) -> None:
        """Send what was packed. Trio thread."""


def check_choice(setting: str, has_keys: bool) -> None:
    """Raises `ConfigError` where what is set cannot be."""
    if setting == JAX and has_keys:
        raise ConfigError(
            'transfer = "jax" is not for clusters with keys: jax.experimental.transfer neither encrypts nor asks who '
            'connects; leave it at "auto", or set "pathway"'
        )


def choose_transfer(setting: str, platform: str, has_keys: bool) -> str:
    """`PATHWAY` or `JAX`: what is set, and otherwise by platform. Keys rule JAX's out."""
    check_choice(setting, has_keys)
    if setting != AUTO:
        return setting
    return JAX if platform in _FASTER_WITH_JAX and not has_keys else PATHWAY
