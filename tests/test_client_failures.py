"""What a client sees when something breaks: an error that tells the story where the result is needed; nothing hangs."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trio

import pathway as pw
from pathway.testing.cluster import local_cluster

X = np.arange(8, dtype=np.float32)


@pytest.fixture
def fragile():
    """A cluster of this test's own, to be hurt."""
    with local_cluster({"east": {"hosts": 1, "devices": 2}, "west": {"hosts": 2, "devices": 1}}) as cluster:
        yield cluster


def run_until_it_fails(function, argument):
    while True:
        pw.get(function(argument))


def test_a_lost_island_is_named_and_its_slice_returns(fragile):
    with pw.connect(fragile.address):
        east, west = pw.slice(2, island="east"), pw.slice(2, island="west")
        on_east, on_west = pw.jit(east)(lambda x: x + 1), pw.jit(west)(lambda x: x * 2)

        @pw.program
        def both(x, y):
            return on_east(on_west(x)), on_west(y)

        x, y = pw.put(X, west), pw.put(X, east)
        np.testing.assert_array_equal(both(x, y)[0], 2 * X + 1)
        fragile.kill_executor("west", host=1)
        with pytest.raises(pw.IslandLostError, match="west") as caught:
            run_until_it_fails(on_west, x)
        assert caught.value.info.island == "west"
        for use in (lambda: pw.get(x), lambda: both(x, y), lambda: x + 1, lambda: x.block_until_ready()):
            with pytest.raises(pw.IslandLostError, match="west"):
                use()
        assert "failed" in repr(x)
        np.testing.assert_array_equal(on_east(y), X + 1)  # the other island's work goes on

        fragile.wait_for_incarnation("west", 2)
        x = pw.put(X, west)  # waits, if need be, until the slice is bound again
        assert west.incarnation == 2
        np.testing.assert_array_equal(both(x, y)[0], 2 * X + 1)
        np.testing.assert_array_equal(on_west(X), 2 * X)


def test_a_scheduler_that_dies_leaves_nobody_waiting(fragile):
    with pw.Client(fragile.address) as holder, pw.Client(fragile.address) as client:
        holder.slice(2, island="west")
        home = client.slice(1, island="east")
        x = client.put(X, home)
        f = pw.jit(home)(lambda x: x + 1)
        pw.get(f(x))
        ended = []

        def wait_for_a_slice() -> None:
            try:
                client.slice(2, island="west")  # another holds it, so this waits until the scheduler has gone
            except pw.PathwayError as error:
                ended.append(error)

        thread = threading.Thread(target=wait_for_a_slice)
        thread.start()
        fragile.kill_scheduler()
        thread.join(20)
        assert [type(error) for error in ended] == [pw.SchedulerLostError]
        with pytest.raises(pw.SchedulerLostError):
            run_until_it_fails(f, x)
        with pytest.raises(pw.SchedulerLostError):
            client.status()

        async def main() -> None:
            with trio.fail_after(10), pytest.raises(pw.SchedulerLostError):
                await f(x)

        trio.run(main)


def test_a_compile_error_has_xlas_message_and_the_users_line(client):
    home, other = client.slice(1, island="east"), client.slice(1, island="west")

    @pw.jit(home)
    def broken(x):
        return jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    after = pw.jit(other)(lambda x: x + 1)
    result = broken(X)
    poisoned = after(result)
    for array in (result, poisoned, result + 1):
        with pytest.raises(pw.CompileError, match="no_such_target") as caught:
            pw.get(array)
        assert caught.value.info is not None
        assert "test_client_failures.py" in str(caught.value)
        assert "broken" in str(caught.value)
    np.testing.assert_array_equal(after(X), X + 1)


def test_memory_that_no_device_has(client):
    home = client.slice(1, island="east")

    @pw.jit(home)
    def huge(x):
        return jnp.broadcast_to(x, (1 << 24, 1 << 24)) + x

    with pytest.raises(pw.ExecutionError) as caught:
        pw.get(huge(np.float32(1)).block_until_ready())
    assert "huge" in str(caught.value)
    assert float(pw.jit(home)(lambda x: x + 1)(np.float32(1))) == 2.0
