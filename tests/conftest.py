"""What must be set before any test loads JAX: eight CPU devices, and threads enough for their collectives."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("NPROC", "32")  # XLA's pool: with as few threads as cores, collectives can starve themselves
