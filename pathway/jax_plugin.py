"""Makes `JAX_PLATFORMS=proxy` known to JAX, in programs that use a `pathway proxy` (docs/proxy.md).

JAX calls `initialize` when it looks for backends (entry point `jax_plugins`); it does nothing unless the program asks
for the platform. `pathwaysutils.initialize()` does the same for programs that call it. This is the client's side: the
client itself is in jaxlib.
"""

from __future__ import annotations

import os
from typing import Any

PLATFORM = "proxy"


def initialize() -> None:
    """Register the platform, if the program wants it and nobody has."""
    import jax
    import jax.extend.backend

    wanted = (jax.config.jax_platforms or os.environ.get("JAX_PLATFORMS") or "").split(",")
    if PLATFORM not in wanted:
        return
    try:
        jax.extend.backend.register_backend_factory(PLATFORM, _connect, priority=-1)
    except (AssertionError, ValueError, RuntimeError):  # it is registered already
        return


def _connect() -> Any:
    import jax
    from jax.extend.backend import ifrt_proxy

    target = jax.config.read("jax_backend_target") or os.environ.get("JAX_BACKEND_TARGET", "")
    if not target:
        raise RuntimeError("JAX_PLATFORMS=proxy needs the proxy's address: set JAX_BACKEND_TARGET=grpc://HOST:29000")
    options = ifrt_proxy.ClientConnectionOptions()
    return ifrt_proxy.get_client(target, options)
