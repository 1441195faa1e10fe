"""Arrays cut into regions and put together again, however they are laid out and in whatever order they come."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathway.client.bindings import Binding
from pathway.client.fetch import ArrayFetch, host_regions, piece_of
from pathway.dataflow.graph import BoundSlice
from pathway.dataflow.layout import Aval, Sharding

MESH = (("a", 2), ("b", 2))
BINDING = Binding(None, None, BoundSlice(1, "east", 1, (0, 1, 2, 3), 2, MESH))
SPECS = [(), (("a",),), ((), ("b",)), (("b",), ("a",)), (("a", "b"),), ((), ("b", "a"))]


def a_kind(shape, dtype, spec):
    return BINDING.kind(Aval(shape, dtype), Sharding(MESH, spec))


@given(
    rows=st.integers(0, 9),
    columns=st.integers(1, 9),
    spec=st.sampled_from(SPECS),
    dtype=st.sampled_from(["float32", "bool", "bfloat16", "int8"]),
    chunk=st.integers(1, 50),
    order=st.randoms(use_true_random=False),
)
def test_what_is_cut_is_put_together(rows, columns, spec, dtype, chunk, order):
    kind = a_kind((rows, columns), dtype, spec)
    value = np.arange(rows * columns).reshape(rows, columns).astype(kind.physical.aval.dtype)
    fetch = ArrayFetch(kind)
    regions = [region for region, _ in kind.regions()]
    order.shuffle(regions)
    for number, region in enumerate(regions):
        data = piece_of(value[tuple(slice(*bounds) for bounds in region)])
        if number % 2 or len(data) <= chunk:
            fetch.place(region, data)
            continue
        room = fetch.room(region)
        for offset in range(0, len(data), chunk):
            room.flat[offset : offset + chunk] = data[offset : offset + chunk]
        room.filled()
    assert fetch.done
    assert fetch.error is None
    np.testing.assert_array_equal(fetch.value, value)
    assert not fetch.value.flags.writeable


def test_a_scalar_is_one_region_and_keeps_no_frame():
    kind = a_kind((), "float32", ())
    assert kind.regions() == (((), (0, 1, 2, 3)),)
    frame = bytearray(np.float32(2.5).tobytes())
    fetch = ArrayFetch(kind)
    fetch.place((), np.frombuffer(frame, np.uint8))
    frame[:] = b"\0\0\0\0"
    assert float(fetch.value) == 2.5


def test_an_empty_array_needs_nothing():
    fetch = ArrayFetch(a_kind((0, 3), "float32", ()))
    assert fetch.done
    assert fetch.value.shape == (0, 3)


@pytest.mark.parametrize("nbytes", [0, 5, 64])
def test_data_of_another_size_is_an_error(nbytes):
    fetch = ArrayFetch(a_kind((2, 3), "float32", ()))
    fetch.place(((0, 2), (0, 3)), np.zeros(nbytes, np.uint8))
    assert fetch.error.kind == "TransferError"


def test_what_is_one_stretch_of_the_result_is_received_in_its_place():
    fetch = ArrayFetch(a_kind((4, 4), "float32", (("a",),)))
    room = fetch.room(((2, 4), (0, 4)))
    assert np.shares_memory(room.flat, fetch.out)
    assert not np.shares_memory(fetch.room(((0, 4), (0, 2))).flat, fetch.out)


def test_each_host_gets_each_of_its_regions_once():
    kind = a_kind((4, 4), "float32", ((), ("b",)))
    assert list(host_regions(kind.physical, 2)) == [
        (0, ((0, 4), (0, 2))),
        (0, ((0, 4), (2, 4))),
        (1, ((0, 4), (0, 2))),
        (1, ((0, 4), (2, 4))),
    ]
    assert list(host_regions(a_kind((4, 4), "float32", ()).physical, 2)) == [
        (0, ((0, 4), (0, 4))),
        (1, ((0, 4), (0, 4))),
    ]


def test_a_piece_does_not_see_later_changes():
    value = np.zeros((4, 4), np.float32)
    frozen = np.ones((4, 4), np.float32)
    frozen.flags.writeable = False
    piece, shared, view = (piece_of(v[:2]) for v in (value, frozen, value[:]))
    value[:] = 7
    assert not piece.any()
    assert not view.any()
    assert np.shares_memory(shared, frozen)
