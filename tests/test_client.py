"""Connecting, slices, threads, trio, and what is left when something ends."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time

import jax
import numpy as np
import pytest
import trio
from jax.sharding import PartitionSpec as P

import pathway as pw


def test_islands_and_devices(client):
    islands = {island.name: island for island in client.islands()}
    assert {name: (i.hosts, i.devices_per_host) for name, i in islands.items()} == {"east": (1, 4), "west": (2, 2)}
    assert len(pw.devices()) == 8
    assert [device.host for device in islands["west"].devices] == [0, 0, 1, 1]
    assert "east" in str(client.status())


def test_slices_prefer_another_island(client):
    first, second = pw.slice(2), pw.slice(2)
    assert first.island != second.island
    assert first.mesh == {"data": 2}
    assert first.abstract_mesh.axis_names == ("data",)
    with pw.slice(1, {"x": 1}, island="west") as third:
        assert third.island == "west"
        assert [device.island for device in third.devices] == ["west"]
    assert third.is_released
    assert "released" in repr(third)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 64}, "east"),
        ({"n": 0}, "positive"),
        ({"n": 4, "mesh": {"a": 3}}, "3 devices"),
        ({"n": 1, "mesh": {"": 1}}, "name"),
        ({"n": 1, "island": "nowhere"}, "nowhere"),
        ({"n": 1, "platform": "tpu"}, "tpu"),
    ],
    ids=["too many", "none", "mesh", "axis", "island", "platform"],
)
def test_slices_that_cannot_be(client, arguments, message):
    with pytest.raises(pw.SliceError, match=message):
        pw.slice(**arguments, timeout_s=5)


def test_a_slice_waits_until_devices_are_free(cluster, client):
    taken = pw.slice(4, island="east")
    with pw.Client(cluster.address) as other:
        with pytest.raises(pw.SliceError, match="within"):
            other.slice(4, island="east", timeout_s=0.2)
        threading.Timer(0.2, taken.release).start()
        assert other.slice(4, island="east", timeout_s=10).island == "east"


def test_nobody_listens():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
    start = time.monotonic()
    with pytest.raises(pw.ConnectError, match=address):
        pw.Client(address)
    assert time.monotonic() - start < 5


def test_somebody_listens_but_never_answers():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(pw.ConnectError, match=address):
            pw.Client(address, connect_timeout_s=0.3)


def test_not_connected():
    with pytest.raises(pw.DisconnectedError, match=r"pathway\.connect"):
        pw.slice(1)


def test_connecting_twice(cluster, client):
    with pytest.raises(pw.DisconnectedError, match="already"):
        pw.connect(cluster.address)


def test_after_closing_everything_says_so(cluster):
    client = pw.Client(cluster.address)
    home = client.slice(1, island="west")
    array = client.put(np.ones(3), home)
    client.close()
    client.close()
    for use in (lambda: pw.get(array), lambda: client.slice(1), lambda: client.put(1, home), client.islands):
        with pytest.raises(pw.DisconnectedError):
            use()
    assert "closed" in repr(client)


def test_threads_share_a_client(client):
    home = pw.slice(2, island="east")
    add = pw.jit(home)(lambda x, y: x + y)
    failures = []

    def work(number: int) -> None:
        try:
            x = pw.put(np.float32(number), home)
            for _ in range(30):
                x = add(x, 1.0)
            assert float(x) == number + 30
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


def test_from_within_trio(client):
    async def main() -> None:
        home = pw.slice(2, island="west")
        f = pw.jit(home, in_specs=P("data"))(lambda x: x * 2)
        x = f(np.arange(8.0))
        np.testing.assert_array_equal(await x, np.arange(8) * 2.0)
        with trio.move_on_after(5):
            np.testing.assert_array_equal(await f(x), np.arange(8) * 4.0)

    trio.run(main)


def test_many_runs_at_once_and_backpressure(client):
    home = pw.slice(1, island="east")
    f = pw.jit(home)(lambda x: x + 1)
    client.core.max_unfinished_runs = 50
    x = pw.put(np.float32(0), home)
    for _ in range(500):
        x = f(x)
        assert len(client.core.runs) <= 50
    assert float(x) == 500


def test_results_of_one_client_are_not_anothers(cluster, client):
    home = pw.slice(1, island="east")
    x = pw.put(np.float32(1), home)
    with pw.Client(cluster.address) as other, other.slice(1, island="west") as there:
        with pytest.raises(pw.ProgramError, match="another connection"):
            other.put(1.0, home)
        y = other.put(np.float32(2), there)
        assert float(y) == 2.0
    assert float(x) == 1.0


def _in_the_child(queue):
    try:
        pw.slice(1)
    except pw.DisconnectedError as error:
        queue.put(str(error))


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_told(client):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_the_child, args=(queue,))
    child.start()
    assert "forked" in queue.get(timeout=30)
    child.join(30)
    assert float(pw.put(1.0, pw.slice(1))) == 1.0  # and the parent's connection is whole


def run_script(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        check=False,
    )


def test_exit_is_clean_whatever_is_left(cluster):
    script = """
        import numpy as np, pathway as pw, threading
        pw.connect()
        home = pw.slice(2)
        x = pw.put(np.ones((300, 300)), home)
        y = [x + i for i in range(5)]
        other = pw.Client(pw.client.default.default_client().address)
        print(float(y[4].sum()))
    """
    done = run_script(script, PATHWAY_ADDRESS=cluster.address)
    assert done.stdout.split() == [str(300 * 300 * 5.0)]
    assert done.stderr == ""
    assert done.returncode == 0


def test_an_embedded_cluster_lives_with_its_program():
    script = """
        import os, pathway as pw, numpy as np
        with pw.connect(islands={"only": {"devices": 2}}) as client:
            home = pw.slice(2)
            print(float(pw.jit(home)(lambda x: x.sum())(np.arange(10.0))), [i.name for i in pw.islands()])
            address = client.address
        try:
            pw.Client(address)
        except pw.ConnectError:
            print("stopped")
    """
    done = run_script(script)
    assert done.stdout.splitlines() == ["45.0 ['only']", "stopped"], done.stderr
    assert done.returncode == 0


def test_names_are_loaded_when_used():
    done = run_script("import sys, pathway; assert 'jax' not in sys.modules and 'zmq' not in sys.modules; dir(pathway)")
    assert done.returncode == 0, done.stderr
    assert all(hasattr(pw, name) for name in pw.__all__)


def test_jax_is_not_disturbed():
    assert jax.devices()[0].platform == "cpu"


def test_what_nobody_holds_is_freed(client):
    home = pw.slice(2, island="west")
    step = pw.jit(home, donate_argnums=0)(lambda x, y: x + y)
    x, y = pw.put(np.zeros(300), home), pw.put(np.ones(300), home)
    for _ in range(300):
        x = step(x, y)
        temporary = x * 2.0
    assert float(temporary[0]) == 600.0
    del x, y, temporary

    def held() -> int:
        return next(s["buffers"] for s in client.status()["sessions"] if s["session"] == f"{client.core.session:x}")

    deadline = time.monotonic() + 20
    while held() and time.monotonic() < deadline:
        pass
    assert held() == 0
    assert client.core.runs == {}
    assert client.core.fetches == {}


def test_what_ran_where_is_recorded(client):
    east, west = pw.slice(2, island="east"), pw.slice(2, island="west")
    first, second = pw.jit(east, name="first")(lambda x: x + 1), pw.jit(west, name="second")(lambda x: x * 2)
    program = pw.program(lambda x: second(first(x)), name="both")
    float(program(1.0))
    with pw.record_steps() as recording:
        assert float(program(1.0)) == 4.0
    assert [(step.island, step.program, step.label) for step in recording.steps] == [
        ("east", "both", "first"),
        ("west", "both", "second"),
    ]
    assert all(step.start_s <= step.end_s for step in recording.steps)
    assert "<svg" in recording.draw(title="two steps")
