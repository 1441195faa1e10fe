"""Pipeline schedules as data: orders, promises, bubbles, cycles, drawings."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathway.errors import ProgramError
from pathway.programs.schedules import Pass, Schedule, Task, by_name, inputs_of, schedule_of, tasks_of

F, B, W = Pass.FORWARD, Pass.BACKWARD, Pass.WEIGHTS


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(sorted(by_name)),
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(1, 3),
    st.lists(st.sampled_from([0.25, 1.0, 1.5, 3.0]), min_size=6, max_size=6),
)
def test_every_schedule_is_complete_in_order_and_keeps_its_promise(name, slices, microbatches, chunks, speeds):
    schedule = by_name[name]
    if name == "interleaved" and chunks > 1:
        microbatches = slices * (1 + microbatches // slices)
    if name == "gpipe":
        chunks = 1
    stages = slices * chunks
    found = schedule.arrange(stages, microbatches, slices, cost=lambda task: speeds[task.stage % 6])
    assert set(found.spans) == set(tasks_of(found.shape, schedule.splits_backward))
    for task, (start, _) in found.spans.items():
        assert all(found.spans[needed][1] <= start for needed in inputs_of(task, stages))
    place = {task: number for number, task in enumerate(found.order)}
    assert all(place[needed] < place[task] for task in place for needed in inputs_of(task, stages))
    for slice in range(slices):
        spans = sorted(found.spans[task] for task in found.on(slice))
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert found.held(slice) <= schedule.holds(slice, found.shape)
    assert found.spans == schedule.arrange(stages, microbatches, slices, cost=lambda t: speeds[t.stage % 6]).spans


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 3), (4, 4), (4, 16), (8, 8)])
def test_the_bubble_is_the_known_one(stages, microbatches):
    known = (stages - 1) / (microbatches + stages - 1)
    assert by_name["gpipe"].bubble(stages, microbatches) == pytest.approx(known)
    assert by_name["1f1b"].bubble(stages, microbatches) == pytest.approx(known)
    bound = 3 * microbatches + stages - 1  # ZB-H1's own length
    assert bound <= by_name["zero_bubble"].arrange(stages, microbatches).length <= bound + 2


def test_interleaving_divides_the_bubble():
    once = by_name["interleaved"].bubble(4, 8)
    twice = by_name["interleaved"].arrange(8, 8, slices=4)
    idle = twice.length - 2 * 3 * 8  # each slice does two stages' work
    assert once == pytest.approx(3 / 11)
    assert idle == pytest.approx(3 * 3)  # of (4 - 1) * 3 stages' time, as once, where the stages are half as long


def test_one_forward_one_backward_is_the_classical_order():
    found = by_name["1f1b"].arrange(3, 4)
    written = ["".join(f"{task.kind.name[0]}{task.microbatch} " for task in found.on(stage)) for stage in range(3)]
    assert written == ["F0 F1 F2 B0 F3 B1 B2 B3 ", "F0 F1 B0 F2 B1 F3 B2 B3 ", "F0 B0 F1 B1 F2 B2 F3 B3 "]


def test_a_predicate_of_ones_own():
    def one_at_a_time(first, second):
        return first.microbatch < second.microbatch

    schedule = schedule_of(one_at_a_time)
    assert schedule.name == "one_at_a_time"
    assert all(schedule.arrange(3, 5).held(slice) == 1 for slice in range(3))
    assert schedule_of("1f1b") is by_name["1f1b"]
    with pytest.raises(ProgramError, match="no schedule 'fast': gpipe, 1f1b"):
        schedule_of("fast")


def test_a_cycle_is_named():
    backwards = Schedule("backwards", lambda first, second, shape: (first.kind, second.kind) == (B, F))
    with pytest.raises(ProgramError) as raised:
        backwards.arrange(2, 2)
    text = str(raised.value)
    assert "the schedule backwards waits for itself" in text
    assert "the backward of microbatch 0 in stage 0 needs the forward of microbatch 0 in stage 0" in text
    assert "the forward of microbatch 0 in stage 0 is ordered after the backward of microbatch" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4), "stages and microbatches"),
        ((4, 0), "microbatches"),
        ((5, 4, 2), "slice s modulo"),
        ((4, 3, 2), "multiple"),
    ],
)
def test_what_a_schedule_is_not_for_is_refused(arguments, message):
    with pytest.raises(ProgramError, match=message):
        by_name["interleaved"].arrange(*arguments)


@pytest.mark.parametrize("name", sorted(by_name))
def test_a_drawing_shows_every_pass(name):
    schedule = by_name[name]
    svg = schedule.draw(4, 6, slices=4 if name != "interleaved" else None)
    root = ElementTree.fromstring(svg)
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    kinds = 3 if schedule.splits_backward else 2
    assert len(titles) == 4 * 6 * kinds
    assert any(title.startswith(str(Task(3, 5, F))) for title in titles)
    assert "% bubble" in svg
