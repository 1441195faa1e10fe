"""The client's state machine: events in, instructions out."""

from __future__ import annotations

import threading

import pytest
import trio
import trio.testing

from pathway.client.bindings import ArrayKind
from pathway.client.core import RELEASE_COUNT, SILENT_HEARTBEATS, ClientCore, CloseLink, DropPeers, LinkLost, Send, Tick
from pathway.client.pending import Pending
from pathway.dataflow.layout import Aval, Sharding
from pathway.errors import ErrorInfo, IslandLostError, SchedulerLostError, SliceError
from pathway.transport import messages as m

WELCOME = m.Welcome(protocol=1, version="0", scheduler=7, session=5, heartbeat_s=0.5)
LOST = ErrorInfo("IslandLostError", "island east is lost: exit code 1")


def a_core(max_unfinished_runs: int = 100) -> ClientCore:
    return ClientCore(WELCOME, 0.0, max_unfinished_runs)


def bind(core: ClientCore, incarnation: int = 1, devices: int = 2):
    state = core.request_slice(devices, (("data", devices),))
    core.handle(m.SliceBound(state.number, "east", incarnation, tuple(range(devices)), "cpu", devices), 0.0)
    return state


def a_kind(core: ClientCore) -> ArrayKind:
    return bind(core).binding.kind(Aval((4,), "float32"), Sharding((("data", 2),), (("data",),)))


def test_a_slice_is_bound_and_its_neighbours_island_avoided():
    core = a_core()
    state = core.request_slice(2, (("data", 2),))
    assert not state.answered.done
    assert core.handle(m.SliceBound(state.number, "east", 1, (0, 1), "cpu", 2), 1.0) == []
    assert state.answered.done
    assert state.binding.bound.devices == (0, 1)
    assert core.request_slice(2, (("data", 2),)).request.avoid == ("east",)


def test_a_refused_slice_raises_what_the_scheduler_said():
    core = a_core()
    state = core.request_slice(99, (("data", 99),))
    core.handle(m.SliceRefused(state.number, "SliceError", "no island has 99 devices"), 1.0)
    with pytest.raises(SliceError, match="no island has 99"):
        state.answered.result()


def test_runs_end_well_or_badly_and_once():
    core = a_core()
    (first, buffer), (second, next_buffer) = core.new_run(1, 0.0, 2), core.new_run(1, 0.0, 2)
    assert (buffer, next_buffer) == (1, 3)
    core.handle(m.RunsFinished((first.number,)), 1.0)
    core.handle(m.RunFailed(second.number, LOST), 1.0)
    core.handle(m.RunsFinished((second.number,)), 1.0)
    assert first.done
    assert first.error is None
    assert second.error == LOST
    assert core.runs == {}


def test_a_failed_plan_fails_its_runs_now_and_later():
    core = a_core()
    run, _ = core.new_run(4, 0.0, 1)
    other, _ = core.new_run(5, 0.0, 1)
    error = ErrorInfo("CompileError", "XLA says no")
    core.handle(m.PlanFailed(4, error), 1.0)
    assert run.error == error
    assert not other.done
    assert core.new_run(4, 0.0, 1)[0].error == error


def test_a_lost_island_loses_its_bindings_for_good():
    core = a_core()
    state = bind(core)
    old, epoch, changed = state.binding, core.bindings_epoch, state.bound_again
    core.handle(m.IslandLost("east", 1, LOST), 1.0)
    assert old.error == LOST
    assert core.bindings_epoch > epoch
    assert changed.done
    core.handle(m.SliceBound(state.number, "east", 2, (0, 1), "cpu", 2), 2.0)
    assert state.binding is not old
    assert state.binding.error is None
    assert old.error == LOST


def test_a_fetch_from_a_lost_island_ends():
    core = a_core()
    state, fetch = bind(core), Pending()
    core.fetches[1] = (fetch, state.binding)
    core.handle(m.IslandLost("east", 7, LOST), 1.0)
    assert not fetch.done
    core.handle(m.IslandLost("east", 1, LOST), 1.0)
    with pytest.raises(IslandLostError):
        fetch.result()


@pytest.mark.parametrize(
    "event", [LinkLost("closed"), m.Goodbye("stopping"), Tick()], ids=["link", "goodbye", "silence"]
)
def test_when_the_scheduler_is_lost_everything_ends(event):
    core = a_core()
    run, _ = core.new_run(1, 0.0, 1)
    waiting, bound, reply = core.request_slice(2, (("data", 2),)), bind(core), Pending()
    core.replies[1] = reply
    instructions = core.handle(event, SILENT_HEARTBEATS * 0.5 + 1)
    assert isinstance(instructions[-1], CloseLink)
    for pending in (run, waiting.answered, reply):
        with pytest.raises(SchedulerLostError):
            pending.result()
    assert bound.binding.error is not None
    assert core.new_run(1, 0.0, 1)[0].error is not None
    assert core.request_slice(1, (("data", 1),)).answered.error is not None
    assert core.handle(Tick(), 100.0) == []


def test_the_heart_beats_while_the_scheduler_answers():
    core = a_core()
    for beat in range(1, 20):
        now = beat * 0.5
        assert core.handle(Tick(), now) == [Send((m.Ping(beat),))]
        assert core.handle(m.Pong(beat), now) == []


def test_releases_ride_together_by_island_and_ask_to_be_sent_when_many():
    core = a_core()
    kind = a_kind(core)
    assert not core.release(kind, 3)
    assert not core.release(kind, 4)
    assert core.take_releases() == [m.ReleaseBuffers("east", 1, (3, 4))]
    assert core.take_releases() == []
    asked = [core.release(kind, buffer) for buffer in range(RELEASE_COUNT + 5)]
    assert asked.count(True) == 1
    assert asked.index(True) == RELEASE_COUNT - 1
    assert core.handle(Tick(), 0.5)[0].messages[0].buffers == tuple(range(RELEASE_COUNT + 5))


def test_what_lay_on_a_lost_island_need_not_be_released():
    core = a_core()
    kind = a_kind(core)
    core.release(kind, 3)
    core.handle(m.IslandLost("east", 1, LOST), 1.0)
    assert core.take_releases() == []


def test_a_client_with_too_many_runs_waits():
    core = a_core(max_unfinished_runs=2)
    runs = [core.new_run(1, 0.0, 1)[0] for _ in range(2)]
    room = core.room()
    assert room is not None
    core.handle(m.RunsFinished((runs[0].number,)), 1.0)
    assert room.done
    assert core.room() is None


def test_links_to_executors_that_are_gone_are_dropped():
    core = a_core()
    entry = m.IslandEntry("east", 1, "cpu", 2, ("tcp://a", "tcp://b"))
    other = m.IslandEntry("west", 3, "cpu", 2, ("tcp://c",))
    assert core.handle(m.Directory((entry,)), 1.0) == [DropPeers(frozenset({"tcp://a", "tcp://b"}))]
    assert core.directory_known.done
    assert core.islands == {"east": entry}
    assert core.handle(m.DirectoryChange((other,)), 1.0) == []
    assert core.islands == {"east": entry, "west": other}
    assert core.handle(m.DirectoryChange(gone=("east",)), 1.0) == [DropPeers(frozenset({"tcp://c"}))]
    assert core.islands == {"west": other}


def test_a_message_that_no_client_expects_ends_the_session():
    core = a_core()
    assert isinstance(core.handle(m.StopExecutor("east", 1), 1.0)[0], CloseLink)
    assert core.lost.kind == "ProtocolError"


def test_kinds_are_one_per_aval_and_sharding():
    core = a_core()
    binding = bind(core).binding
    short, long = Sharding((("data", 2),)), Sharding((("data", 2),), ((), ()))
    aval = Aval((4, 4), "float32")
    assert binding.kind(aval, short) is binding.kind(aval, long)
    assert binding.kind(aval, short).regions() == ((((0, 4), (0, 4)), (0, 1)),)
    split = binding.kind(aval, Sharding((("data", 2),), (("data",),)))
    assert [devices for _, devices in split.regions()] == [(0,), (1,)]


def test_a_pending_is_waited_for_from_threads_and_trio():
    pending = Pending()
    assert not pending.wait(0.0)
    reached = []
    threads = [threading.Thread(target=lambda: reached.append(pending.wait(10))) for _ in range(4)]
    for thread in threads:
        thread.start()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pending.wait_trio)
            await trio.testing.wait_all_tasks_blocked()
            threading.Thread(target=pending.resolve, args=("value",)).start()

    trio.run(main)
    for thread in threads:
        thread.join()
    assert reached == [True] * 4
    assert pending.result() == "value"
