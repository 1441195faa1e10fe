"""Which versions of the protocol, and of the classes in it, are spoken with which client.

A client offers a range of each. The version of the classes ("serdes") that a server may pick goes with the jaxlib of
the executors, which read what the client writes: the two must have the same.
"""

from __future__ import annotations

from pathway.proxy.status import Code, StatusError

PROTOCOLS = range(16, 26)
"""Those that this server speaks. A client must be able to speak one of them."""

SERDES_OF_JAXLIB = {"0.10": 3, "0.12": 6}
"""By the first two numbers of the executors' jaxlib."""


def negotiate(lowest: tuple[int, int], highest: tuple[int, int], jaxlib: str) -> tuple[int, int]:
    """(protocol, serdes) to speak with a client that offers from `lowest` to `highest`. Raises FAILED_PRECONDITION."""
    protocol = min(highest[0], PROTOCOLS[-1])
    if protocol < max(lowest[0], PROTOCOLS[0]):
        raise _refusal(f"protocol versions {PROTOCOLS[0]} to {PROTOCOLS[-1]}", lowest[0], highest[0], jaxlib)
    wanted = serdes_of(jaxlib)
    if not lowest[1] <= wanted <= highest[1]:
        raise _refusal(f"serialization version {wanted}", lowest[1], highest[1], jaxlib)
    return protocol, wanted


def serdes_of(jaxlib: str) -> int:
    """The version of the classes that executors with this jaxlib read."""
    found = SERDES_OF_JAXLIB.get(".".join(jaxlib.split(".")[:2]))
    if found is None:
        known = ", ".join(f"{version}.x" for version in SERDES_OF_JAXLIB)
        raise StatusError(
            Code.FAILED_PRECONDITION, f"executors run jaxlib {jaxlib or 'unknown'}; the proxy works with {known}"
        )
    return found


def _refusal(what: str, lowest: int, highest: int, jaxlib: str) -> StatusError:
    return StatusError(
        Code.FAILED_PRECONDITION,
        f"this cluster (jaxlib {jaxlib}) speaks {what} of the IFRT proxy, and this client {lowest} to {highest}: "
        f"install jaxlib {jaxlib} in the client's environment",
    )
