"""Plugin programs of pathwaysutils through a proxy: arrays kept in a directory, and profiles of executors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("grpc")
pytest.importorskip("pathwaysutils")

from pathway.proxy.status import Code, StatusError
from pathway.proxy.storage import Storage
from pathway.testing.cluster import local_cluster
from tests.proxy_client import JaxProcess, RemoteFailure


class Client(NamedTuple):
    process: JaxProcess
    storage: Path


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    storage = tmp_path_factory.mktemp("storage")
    with local_cluster({"east": {"hosts": 1, "devices": 4}, "west": {"hosts": 1, "devices": 4}}) as cluster:
        proxy = cluster.cluster.start_proxy("127.0.0.1:0", "--storage", str(storage))
        with JaxProcess(proxy, tmp_path_factory.mktemp("client")) as process:
            process.run("import pathwaysutils, datetime; pathwaysutils.initialize()")
            process.run("from pathwaysutils.persistence import helper; minute = datetime.timedelta(minutes=1)")
            process.run("mesh = Mesh(jax.devices()[:4], 'x'); split = NamedSharding(mesh, P('x'))")
            process.run("other = NamedSharding(Mesh(jax.devices()[4:6], 'y'), P(None, 'y'))")
            yield Client(process, storage)


def test_arrays_are_written_and_read_onto_other_devices(client: Client) -> None:
    run = client.process.run
    run("a = jax.device_put(np.arange(32, dtype=np.float32).reshape(8, 4), split)")
    run("b = jax.device_put(np.arange(8, dtype=jnp.bfloat16), split)")
    run("c = jax.device_put(np.int32(7), NamedSharding(mesh, P()))")
    run("helper.write_arrays('model/1', ['layer/a', 'b', 'c'], [a, b, c], minute).result()")
    assert np.array_equal(np.load(client.storage / "model" / "1" / "layer%2Fa.npy"), np.arange(32.0).reshape(8, 4))
    run(
        "arrays, read = helper.read_arrays('model/1', ['layer/a'], [a.dtype], [a.shape], [other],"
        " jax.devices()[4:6], minute); read.result()"
    )
    assert run("np.array_equal(arrays[0], a), arrays[0].sharding == other, float(arrays[0].sum())") == [
        True,
        True,
        496.0,
    ]
    run(
        "arrays, read = helper.read_arrays('model/1', ['b', 'c'], [b.dtype, c.dtype], [b.shape, c.shape],"
        " [split, c.sharding], jax.devices()[:4], minute); read.result()"
    )
    assert run("np.array_equal(arrays[0], b), str(arrays[0].dtype), int(arrays[1])") == [True, "bfloat16", 7]


def test_what_is_written_is_what_was_there_when_it_was_asked_for(client: Client) -> None:
    run = client.process.run
    run("x = jax.device_put(np.ones((1024, 256), np.float32), split)")
    run("next = jax.jit(lambda x: x + 1, donate_argnums=0)")
    run("written = helper.write_arrays('run', ['x'], [x], minute); y = next(x); del x; written.result()")
    assert np.array_equal(np.load(client.storage / "run" / "x.npy"), np.ones((1024, 256)))
    assert run("float(y[0, 0])") == 2.0


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ("helper.read_arrays('run', ['none'], [a.dtype], [a.shape], [split], mesh.devices, minute)", "NOT_FOUND"),
        ("helper.read_arrays('run', ['x'], [a.dtype], [(4, 4)], [split], mesh.devices, minute)", "INVALID"),
        ("helper.write_arrays('/etc', ['x'], [a], minute)[1]", "PERMISSION_DENIED"),
        ("helper.plugin_executable.PluginExecutable('{\"dance\": {}}')", "UNIMPLEMENTED: Bad PluginProgram"),
        ("helper.plugin_executable.PluginExecutable('no json')", "INVALID_ARGUMENT: Bad PluginProgram"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_says_why(client: Client, request_: str, error: str) -> None:
    client.process.run("a = jax.device_put(np.arange(32, dtype=np.float32).reshape(8, 4), split)")
    with pytest.raises(RemoteFailure, match=error):
        client.process.run(f"tried = {request_}\ntried[1].result()")
    assert client.process.run("float(a.sum())") == 496.0


def test_executors_are_profiled(client: Client) -> None:
    run = client.process.run
    run("from pathwaysutils import profiling")
    run("request = {'traceLocation': 'gs://bucket/traces', 'maxNumHosts': 2}")
    run("profiling._start_pathways_trace_from_profile_request(request)")
    run("jax.jit(lambda x: (x @ x.T).sum())(a).block_until_ready()")
    run(
        "with profiling._profile_state.lock:\n"
        "    profiling._profile_state.call_profile_executable(); profiling._profile_state.reset()"
    )
    found = sorted((client.storage / "bucket" / "traces" / "plugins" / "profile").glob("*/*.xplane.pb"))
    assert [path.name for path in found] == ["east-0.xplane.pb", "west-0.xplane.pb"]
    assert all(path.stat().st_size > 100 for path in found)
    run("request['xprofTraceOptions'] = {'traceDirectory': 'traces', 'traceSessionName': 'mine'}")
    run("profiling._start_pathways_trace_from_profile_request(request)")
    run(
        "with profiling._profile_state.lock:\n"
        "    profiling._profile_state.call_profile_executable(); profiling._profile_state.reset()"
    )
    assert (client.storage / "bucket/traces/plugins/profile/mine/east-0.xplane.pb").is_file()


def test_storage_is_one_directory(tmp_path: Path) -> None:
    with pytest.raises(StatusError, match="--storage") as raised:
        Storage("").path("anywhere")
    assert raised.value.code is Code.FAILED_PRECONDITION
    storage = Storage(str(tmp_path))
    assert storage.path("gs://bucket/a") == tmp_path / "bucket" / "a"
    assert storage.path(str(tmp_path / "b")) == tmp_path / "b"
    for outside in ("/etc", "../other", "gs://../../etc", f"{tmp_path}x"):
        with pytest.raises(StatusError, match="outside"):
            storage.path(outside)
