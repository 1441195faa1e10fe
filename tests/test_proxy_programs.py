"""Programs that know nothing of Pathway run through a proxy as they run on local devices."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc")

from pathway.testing.cluster import ClusterUnderTest, local_cluster
from tests.proxy_client import client_environment
from tests.proxy_programs import PROGRAMS

ROOT = Path(__file__).parents[1]
DEVICES = 4

CANNOT_WORK = {
    "jax.debug.print (cannot work)": "UNIMPLEMENTED: Unsupported host callback type",
    "jax.pure_callback (cannot work)": "UNIMPLEMENTED: Unsupported host callback type",
    "host arrays with negative strides (cannot work)": "UNIMPLEMENTED: Negative or zero strides",
}
"""What the client itself refuses."""

NOT_TO_THE_LAST_BIT = {"a training step with FSDP shardings"}
"""Reductions over hosts add in another order."""


def run_programs(environment: dict[str, str], results: Path, timeout_s: float = 240) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.proxy_programs", str(results)],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, Any] = pickle.loads(results.read_bytes())
    return found


@pytest.fixture(scope="session")
def cluster() -> Iterator[ClusterUnderTest]:
    """Two islands: of one host, and of two."""
    with local_cluster({"east": {"hosts": 1, "devices": DEVICES}, "west": {"hosts": 2, "devices": 2}}) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def proxy(cluster: ClusterUnderTest) -> str:
    return cluster.cluster.start_proxy()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES), "PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)
    return run_programs(environment, tmp_path_factory.mktemp("local") / "results")


@pytest.fixture(scope="module", params=["one host", "two hosts"])
def proxied(request: pytest.FixtureRequest, proxy: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    tmp = tmp_path_factory.mktemp("proxied")
    first = {"one host": 0, "two hosts": DEVICES}[request.param]
    environment = client_environment(proxy, tmp) | {"PROGRAMS_FIRST_DEVICE": str(first)}
    return run_programs(environment, tmp / "results") | {"island": request.param}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("title", sorted(PROGRAMS))
def test_the_same_results(title: str, local: dict[str, Any], proxied: dict[str, Any]) -> None:
    kind, made = proxied[title]
    if title in CANNOT_WORK:
        assert (kind, made[0]) == ("error", "JaxRuntimeError")
        assert CANNOT_WORK[title] in made[1]
        return
    wanted_kind, wanted = local[title]
    assert kind == wanted_kind, made
    if kind == "error":
        assert made == wanted
        return
    assert len(made) == len(wanted)
    for one, other in zip(made, wanted, strict=True):
        assert type(one) is type(other)
        if not isinstance(other, np.ndarray):
            assert one == other
            continue
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if title in NOT_TO_THE_LAST_BIT:
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
        else:
            assert one.tobytes() == other.tobytes(), title
