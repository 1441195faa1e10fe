"""A real cluster for the tests that want one: started once and shared, with a connection of its own for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # for the tests that run plans in their own process
os.environ.setdefault("NPROC", "32")  # XLA's pool: with few threads, collectives of many devices can starve

import pytest

ISLANDS = {"east": {"hosts": 1, "devices": 4}, "west": {"hosts": 2, "devices": 2}}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Two islands of four CPU devices: `east` of one host, `west` of two."""
    from pathway.embedded import start_local_cluster

    with start_local_cluster(ISLANDS) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Any) -> Iterator[Any]:
    """The default client, connected to the shared cluster for one test."""
    import pathway as pw

    with pw.connect(cluster.address) as client:
        yield client
    pw.disconnect()
