"""Layouts and parts of clients that mean harm: refused before anybody works with them (W-1 to W-3)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from pathway.dataflow.layout import Aval, Layout, Sharding
from pathway.dataflow.plan import Edge, Execute, Gang, Part, Send
from pathway.dataflow.wellformed import DTYPES, check_layout, check_parts
from pathway.errors import ProtocolError
from tests.hostile import Hostile


def layout(
    shape: tuple[int, ...] = (8,), dtype: str = "float32", mesh: Any = (("d", 2),), spec: Any = (("d",),),
    devices: tuple[int, ...] = (0, 1),
) -> Layout:  # fmt: skip
    return Layout(Aval(shape, dtype), Sharding(mesh, spec), devices)


@pytest.mark.parametrize(
    "fine",
    [
        layout(),
        layout((7,)),
        layout((0,)),
        layout((), spec=()),
        layout((), "key<fry>", spec=()),
        layout((3,), "float0"),
        layout(dtype="int4"),
        layout((1,) * 64, spec=()),
        layout((8,), mesh=(), spec=(), devices=(5,)),
    ],
    ids=str,
)
def test_what_is_a_layout(fine: Layout) -> None:
    check_layout(fine)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (layout(dtype="object"), "no dtype 'object'"),
        (layout(dtype="U10"), "no dtype"),
        (layout(dtype="finfo"), "no dtype"),
        (layout(dtype=""), "no dtype"),
        (layout((-1,)), "cannot be"),
        (layout((1 << 62, 1 << 62)), "cannot be"),
        (layout((1 << 62, 0)), "cannot be"),
        (layout((1 << 50,)), "bytes cannot be"),
        (layout((1,) * 65, spec=()), "64 are the most"),
        (layout(mesh=(("d", 2), ("d", 1))), "is none"),
        (layout(mesh=(("d", 0),), devices=()), "is none"),
        (layout(mesh=(("d", -2), ("e", -1))), "is none"),
        (layout(devices=(0,)), "1 devices for a mesh of 2"),
        (layout(devices=(0, 0)), "2 devices for a mesh of 2"),
        (layout(spec=((), ("d",))), "cannot be split"),
        (layout(spec=(("d", "d"),)), "cannot be split"),
        (layout(spec=(("x",),)), "cannot be split"),
    ],
)
def test_what_is_none(wrong: Layout, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        check_layout(wrong)


def test_every_dtype_of_ml_dtypes_is_one() -> None:
    assert {"bfloat16", "float8_e4m3fn", "int4", "uint2", "bool", "complex128", "key<rbg>"} <= DTYPES
    for dtype in DTYPES:
        check_layout(layout(dtype=dtype))


EDGE = Edge(3, "east", "west", 1, 0, layout(), layout())
EAST = Part(
    "plan", "east", "cpu", (layout(), layout()), (0,), ((0, 1),),
    (Gang((Execute(0, "c", (0, 1), (0,), (1,), (0,), (0,)), Send(1, 3)), arguments=(0,)),), edges_out=(EDGE,),
)  # fmt: skip
WEST = Part("plan", "west", "cpu", (layout(),), (), ((1, 0),), (Gang((), waits=(3,)),), edges_in=(EDGE,))
STEP = EAST.gangs[0].steps[0]


def gang(**changes: Any) -> tuple[Gang, ...]:
    return (replace(EAST.gangs[0], **changes),)


def step(**changes: Any) -> tuple[Gang, ...]:
    return gang(steps=(replace(STEP, **changes), EAST.gangs[0].steps[1]))


def test_parts_that_fit() -> None:
    check_parts((EAST, WEST))


@pytest.mark.parametrize(
    "east",
    [
        replace(EAST, arguments=(2,)),
        replace(EAST, arguments=(-1,)),
        replace(EAST, arguments=(0, 0)),
        replace(EAST, results=((0, 2),)),
        replace(EAST, results=((0, 1), (0, 0))),
        replace(EAST, results=((1 << 40, 1),)),
        replace(EAST, slots=(layout(devices=(0,)), layout())),
        replace(EAST, gangs=step(inputs=(7,))),
        replace(EAST, gangs=step(outputs=(-1,))),
        replace(EAST, gangs=step(outputs=(1, 1))),
        replace(EAST, gangs=step(outputs=(0,))),
        replace(EAST, gangs=step(donates=(1,))),
        replace(EAST, gangs=step(frees=(2,))),
        replace(EAST, gangs=step(devices=())),
        replace(EAST, gangs=step(devices=(0, 0))),
        replace(EAST, gangs=gang(steps=(Send(1, 4),))),
        replace(EAST, gangs=gang(steps=(Send(2, 3),))),
        replace(EAST, gangs=gang(waits=(3,))),
        replace(EAST, gangs=gang(after=(0,))),
        replace(EAST, gangs=gang(after=(-1,))),
        replace(EAST, gangs=gang(arguments=(5,))),
        replace(EAST, edges_out=()),
        replace(EAST, edges_out=(EDGE, EDGE)),
        replace(EAST, edges_out=(replace(EDGE, target=layout(devices=(2, 3))),)),
        replace(EAST, edges_out=(replace(EDGE, source=layout((4,))),)),
        replace(EAST, edges_out=(replace(EDGE, source_slot=9),)),
        replace(EAST, edges_out=(replace(EDGE, source_island="north"),)),
    ],
)
def test_parts_that_do_not(east: Part) -> None:
    with pytest.raises(ProtocolError):
        check_parts((east, WEST))


def test_nothing_that_can_be_written_down_gets_further_than_a_refusal() -> None:
    hostile = Hostile(5, numbers=(0, 1, 2, 3), texts=("east", "west", "d", "float32"))
    refused = 0
    for _ in range(3_000):
        try:
            check_parts(tuple(hostile.value(Part) for _ in range(2)))
        except ProtocolError:
            refused += 1
        shape = msgspec.structs.replace(hostile.value(Layout), aval=Aval((hostile.number(),), "float32"))
        try:
            check_layout(shape)
        except ProtocolError:
            refused += 1
        else:
            assert shape.aval.nbytes >= 0
            assert len({shape.region(position) for position in range(len(shape.devices))}) >= 1
    assert refused > 3_000
