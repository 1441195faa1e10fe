"""What a computation is called: the hash of all that it is, so that nobody can give one the name of another. Pure.

Compiled computations are shared by name, between sessions and across restarts. The scheduler, which reads no modules,
checks the name of each that a client registers; so a name says what runs, whoever registered it first.
"""

from __future__ import annotations

import hashlib


def content_key(metadata: bytes, artifact: bytes) -> str:
    """The key of a computation, of its metadata (as it travels) and its artifact: 128 bits, in hexadecimal."""
    digest = hashlib.sha256(len(metadata).to_bytes(8, "big"))
    digest.update(metadata)
    digest.update(artifact)
    return digest.hexdigest()[:32]
