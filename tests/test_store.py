"""The store's cells: announced before they are filled, settled once, released without taking them from readers."""

from __future__ import annotations

from pathway.dataflow.layout import Aval, Layout, Sharding
from pathway.errors import ErrorInfo
from pathway.executor.store import CLOSED_SESSIONS_REMEMBERED, Poison, Store

LAYOUT = Layout(Aval((4,), "float32"), Sharding((("d", 1),), ((),)), (0,))
ERROR = ErrorInfo("ExecutionError", "no")


def test_a_buffer_has_one_cell_from_its_announcement_on() -> None:
    store = Store()
    assert store.find(1, 5) is None
    cell = store.expect(1, 5, LAYOUT, 16)
    assert store.find(1, 5) is cell
    assert store.find_or_park(1, 5) is cell
    assert store.find(2, 5) is None
    assert list(store.usage()) == [(1, 1, 16)]


def test_a_fetch_that_came_first_waits_in_the_cell() -> None:
    store, answered = Store(), []
    parked = store.find_or_park(1, 5)
    assert parked is not None
    parked.when_settled(lambda: answered.append("early"))
    assert store.find(1, 5) is None  # nothing that a run may read
    cell = store.expect(1, 5, LAYOUT, 16)
    assert cell is parked
    assert cell.layout is LAYOUT
    cell.value = "value"
    assert not answered
    cell.settle()
    cell.settle()
    cell.when_settled(lambda: answered.append("late"))
    assert answered == ["early", "late"]


def test_readers_keep_what_is_released() -> None:
    store = Store()
    cell = store.expect(1, 5, LAYOUT, 16)
    store.free(1, (5, 6))
    assert store.find(1, 5) is None
    assert list(store.usage()) == []
    cell.value = "value"
    assert cell.value == "value"


def test_giving_up_answers_only_what_was_never_announced() -> None:
    store, answered = Store(), []
    store.expect(1, 5, LAYOUT, 16).when_settled(lambda: answered.append(5))
    for buffer in (6, 7):
        parked = store.find_or_park(1, buffer)
        assert parked is not None
        parked.when_settled(lambda buffer=buffer: answered.append(buffer))
    store.give_up(1, (5, 6, 8))
    assert answered == [6]
    assert store.find(1, 5) is not None


def test_an_error_found_later_reaches_those_who_began_with_the_value() -> None:
    store = Store()
    cell = store.expect(1, 5, LAYOUT, 16)
    cell.value = "value"
    fate = cell.fate()
    assert fate.error is None
    cell.spoil(Poison(ERROR))
    assert fate.error is ERROR
    assert isinstance(cell.value, Poison)


def test_a_closed_session_is_ignored_from_then_on() -> None:
    store = Store()
    store.expect(1, 5, LAYOUT, 16)
    store.close(1)
    assert store.find(1, 5) is None
    assert store.is_closed(1)
    assert store.find_or_park(1, 5) is None
    for session in range(2, CLOSED_SESSIONS_REMEMBERED + 2):
        store.close(session)
    assert not store.is_closed(1)  # what is remembered is bounded
    assert store.is_closed(CLOSED_SESSIONS_REMEMBERED + 1)
