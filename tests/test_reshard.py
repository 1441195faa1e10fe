"""Pieces against NumPy: exact values, each element once per host, nothing that need not travel."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathway.dataflow import wellformed
from pathway.dataflow.layout import Aval, Layout, Sharding, numpy_dtype, shard_regions
from pathway.dataflow.plan import Edge
from pathway.dataflow.reshard import cost_bytes, edge_bytes, edge_pieces, pieces

DTYPES = sorted(name for name in wellformed.DTYPES if not name.startswith(("key<", "float0")))
"""All that arrays have in memory: NumPy's and those of ml_dtypes."""


def layout(shape, mesh, spec, devices=None, dtype="float32"):
    sharding = Sharding(tuple(mesh), tuple(spec)).of_rank(len(shape))
    return Layout(Aval(tuple(shape), dtype), sharding, tuple(devices or range(sharding.device_count)))


def slices(region):
    return tuple(slice(start, stop) for start, stop in region)


def size(region):
    return math.prod(stop - start for start, stop in region)


@st.composite
def shardings(draw, rank):
    mesh = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3).filter(lambda m: math.prod(m) <= 16))
    axes = draw(st.permutations([f"a{i}" for i in range(len(mesh))]))
    used = draw(st.integers(0, len(axes))) if rank else 0
    spec = [[] for _ in range(rank)]
    for axis in axes[:used]:
        spec[draw(st.integers(0, rank - 1))].append(axis)
    return Sharding(tuple((f"a{i}", n) for i, n in enumerate(mesh)), tuple(map(tuple, spec)))


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    made = []
    for _ in range(2):
        sharding = draw(shardings(len(shape)))
        devices = draw(st.permutations(range(16)))[: sharding.device_count]
        made.append(Layout(Aval(shape, draw(st.sampled_from(DTYPES))), sharding, tuple(devices)))
    source, target = made
    target = Layout(source.aval, target.sharding, target.devices)
    return (
        source,
        target,
        draw(st.sampled_from([1, 2, 4, 16])),
        draw(st.sampled_from([1, 2, 4, 16])),
        draw(st.booleans()),
    )


@settings(max_examples=300, deadline=None)
@given(cases())
def test_pieces_make_the_target_exactly_and_move_no_more_than_needed(case):
    source, target, source_dph, target_dph, same_island = case
    if same_island:
        target_dph = source_dph
    shape = source.aval.shape
    whole = np.arange(math.prod(shape)).reshape(shape)
    held = dict(zip(source.devices, shard_regions(shape, source.sharding), strict=True))
    wanted = dict(zip(target.devices, shard_regions(shape, target.sharding), strict=True))
    found = pieces(source, target, source_dph, target_dph, same_island)

    edge = Edge(0, "a", "a" if same_island else "b", 0, 0, source, target)
    assert edge_bytes(edge, source_dph, target_dph) == cost_bytes(found)
    assert edge_pieces(edge, source_dph, target_dph) == found

    built = {device: np.full(shape, -1) for device in target.devices}
    travelled: dict[int, int] = {}
    for piece in found:
        assert size(piece.region) > 0
        assert piece.nbytes == size(piece.region) * np.dtype(whole.dtype).itemsize * source.aval.nbytes // max(
            1, whole.nbytes
        )
        inside = held[piece.source]
        assert all(a <= c and d <= b for (a, b), (c, d) in zip(inside, piece.region, strict=True))
        assert len({device // target_dph for device in piece.targets}) == 1
        assert piece.local == (same_island and piece.source in piece.targets)
        for device in piece.targets:
            assert np.all(built[device][slices(piece.region)] == -1), "an element came twice"
            built[device][slices(piece.region)] = whole[slices(piece.region)]
        if not piece.local:
            host = piece.targets[0] // target_dph
            travelled[host] = travelled.get(host, 0) + size(piece.region)
    for device, region in wanted.items():
        expected = np.full(shape, -1)
        expected[slices(region)] = whole[slices(region)]
        np.testing.assert_array_equal(built[device], expected)

    for host in {device // target_dph for device in wanted}:
        needed = np.zeros(shape, bool)
        for device, region in wanted.items():
            if device // target_dph == host:
                mine = np.zeros(shape, bool)
                mine[slices(region)] = True
                if same_island and device in held:
                    mine[slices(held[device])] = False
                needed |= mine
        assert travelled.get(host, 0) == needed.sum()


def test_what_stays_in_place_costs_nothing():
    same = layout((8, 8), [("x", 4)], [("x",)])
    found = pieces(same, same, 4, 4, True)
    assert [(piece.source, piece.targets, piece.local) for piece in found] == [(d, (d,), True) for d in range(4)]
    assert cost_bytes(found) == 0
    assert cost_bytes(pieces(same, same, 4, 4, False)) == 8 * 8 * 4


def test_a_replicated_destination_gets_one_copy_per_host():
    source = layout((4, 4), [("x", 2)], [("x",)])
    target = layout((4, 4), [("x", 4)], [])
    found = pieces(source, target, 2, 2, False)
    assert [(piece.source, piece.targets, piece.region[0]) for piece in found] == [
        (0, (0, 1), (0, 2)),
        (1, (0, 1), (2, 4)),
        (0, (2, 3), (0, 2)),
        (1, (2, 3), (2, 4)),
    ]


def test_a_replicated_source_shares_the_sending():
    source = layout((8, 4), [("x", 4)], [])
    target = layout((8, 4), [("x", 8)], [("x",)])
    sent: dict[int, int] = {}
    for piece in pieces(source, target, 2, 8, False):
        sent[piece.source] = sent.get(piece.source, 0) + piece.nbytes
    assert sent == dict.fromkeys(range(4), 2 * 4 * 4)


def test_a_sender_on_the_same_host_is_preferred():
    source = layout((4,), [("x", 2)], [], devices=[0, 2])  # a copy on each of two hosts
    target = layout((4,), [("x", 2)], [], devices=[1, 3])
    assert [(piece.source, piece.targets) for piece in pieces(source, target, 2, 2, True)] == [(0, (1,)), (2, (3,))]


def test_scalars_and_empty_arrays():
    scalar = pieces(layout((), [("x", 2)], []), layout((), [("x", 2)], []), 1, 1, False)
    assert [(piece.source, piece.targets, piece.region) for piece in scalar] == [(0, (0,), ()), (1, (1,), ())]
    assert pieces(layout((0, 3), [("x", 2)], []), layout((0, 3), [("x", 2)], []), 1, 1, False) == ()
    uneven = pieces(layout((1,), [("x", 1)], []), layout((1,), [("x", 4)], [("x",)]), 1, 1, False)
    assert [piece.targets for piece in uneven] == [(0,)]  # the other three shards are empty


def test_another_shape_is_refused():
    with pytest.raises(ValueError, match="cannot become"):
        pieces(layout((2,), [("x", 1)], []), layout((3,), [("x", 1)], []), 1, 1, False)


def test_equal_placements_have_one_canonical_form():
    mesh = (("a", 2), ("b", 3))
    merged, crossed = Sharding(mesh, (("a", "b"),)), Sharding(mesh, (("b", "a"),))
    assert merged.strides(2) == Sharding((("all", 6),), (("all",),)).strides(2)
    assert merged.strides(2) != crossed.strides(2)
    assert Sharding((("one", 1), ("x", 6)), (("one",), ("x",))).strides(2) == Sharding(
        (("x", 6),), ((), ("x",))
    ).strides(2)


def test_thousands_of_shards():
    source = layout((4096, 16), [("x", 4096)], [("x",)])
    target = layout((4096, 16), [("x", 64), ("y", 64)], [("y",), ()])
    found = pieces(source, target, 8, 8, False)
    assert len(found) == 512 * 512  # each of 512 hosts wants 8 blocks of 64 rows
    assert edge_bytes(Edge(0, "a", "b", 0, 0, source, target), 8, 8) == cost_bytes(found)


@settings(max_examples=150, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_every_dtype_arrives_bit_by_bit(case, random):
    """Shards as bytes, as they travel: cut out of the senders', put together at the receivers', against NumPy."""
    source, target, source_dph, target_dph, same_island = case
    if same_island:
        target_dph = source_dph
    shape, dtype = source.aval.shape, numpy_dtype(source.aval.dtype)
    bits = np.frombuffer(random.randbytes(source.aval.size * dtype.itemsize), np.uint8)
    if source.aval.dtype in ("int4", "uint4", "int2", "uint2", "bool"):
        bits = bits & (1 if source.aval.dtype == "bool" else 3)  # one number a byte, of so many bits
    whole = bits.view(dtype).reshape(shape)
    at = dict(zip(source.devices, shard_regions(shape, source.sharding), strict=True))
    held = {device: whole[slices(region)].copy() for device, region in at.items()}
    wanted = dict(zip(target.devices, shard_regions(shape, target.sharding), strict=True))
    built = {d: np.zeros([stop - start for start, stop in region], dtype) for d, region in wanted.items()}
    for piece in pieces(source, target, source_dph, target_dph, same_island):
        within = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(piece.region, at[piece.source], strict=True))
        travels = held[piece.source][within].tobytes()
        assert len(travels) == piece.nbytes
        for device in piece.targets:
            place = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(piece.region, wanted[device], strict=True))
            arrived = np.frombuffer(travels, dtype).reshape([stop - start for start, stop in piece.region])
            built[device][place] = arrived
    for device, region in wanted.items():
        assert built[device].tobytes() == whole[slices(region)].tobytes()
