"""Slices: which devices they are bound to, and what is said when they cannot be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sched_world import World, sent

from pathway.sched.cluster import Island
from pathway.sched.slices import choose_devices
from pathway.transport import messages as m


def bound(out: list, client: str = "client") -> tuple[str, tuple[int, ...]]:  # type: ignore[type-arg]
    [message] = sent(out, client, m.SliceBound)
    return message.island, message.devices


def reason(out: list, client: str = "client") -> str:  # type: ignore[type-arg]
    [message] = sent(out, client, m.SliceRefused)
    assert message.kind == "SliceError"
    return message.reason


def test_slices_spread_over_islands_and_stay_within_hosts() -> None:
    world = World()
    world.form("east", hosts=2)
    world.form("west", hosts=2)
    world.connect()
    assert bound(world.slice("client", 1, 4)) == ("east", (0, 1, 2, 3))
    assert bound(world.slice("client", 2, 2, avoid=("east",))) == ("west", (0, 1))
    assert bound(world.slice("client", 3, 2)) == ("west", (2, 3))  # the less loaded, beside the other two
    assert bound(world.slice("client", 4, 4, avoid=("east",))) == ("west", (4, 5, 6, 7))
    assert bound(world.slice("client", 5, 4, avoid=("east", "west"))) == ("east", (4, 5, 6, 7))


def test_a_message_tells_all_that_a_client_needs() -> None:
    world = World()
    world.form("east", hosts=2)
    world.connect()
    assert sent(world.slice("client", 1, 8), "client") == [m.SliceBound(1, "east", 1, tuple(range(8)), "cpu", 4)]


@pytest.mark.parametrize(
    ("request_fields", "why"),
    [
        ({"devices": 5}, "5 devices: no island can ever have them; there are: east (4 cpu devices)"),
        ({"devices": 2, "island": "mars"}, "2 devices on island 'mars': no island can ever have them"),
        ({"devices": 2, "platform": "tpu"}, "2 devices of platform 'tpu'"),
        ({"devices": 0}, "a slice of 0 devices"),
        ({"devices": 4, "mesh": (("a", 2), ("b", 3))}, "the mesh (a=2, b=3) has 6 places, the slice 4 devices"),
    ],
)
def test_what_can_never_be_is_refused_at_once(request_fields: dict, why: str) -> None:  # type: ignore[type-arg]
    world = World(grace_s=0.0)
    world.form("east")
    world.connect()
    fields = {"mesh": (("d", request_fields["devices"]),), "wait": True, **request_fields}
    assert why in reason(world.say("client", m.RequestSlice(1, **fields)))


def test_a_full_island_says_who_holds_it_and_how_to_share() -> None:
    world = World()
    world.form("east")
    world.connect("ann")
    world.connect("bob")
    world.slice("ann", 1, 3)
    why = reason(world.slice("bob", 1, 2), "bob")
    assert "slice 1 of session ann holds 3" in why
    assert "shared=True" in why
    assert "the others' slices are not shared" in reason(world.slice("bob", 2, 2, shared=True), "bob")
    # Waiting for oneself would never end; waiting for another session may.
    assert "holds 3" in reason(world.slice("ann", 2, 2, wait=True), "ann")
    assert world.slice("bob", 3, 2, wait=True) == []
    [wait] = [wait for wait in world.core.waits(world.now) if "slice 3" in wait.what]
    assert "slice 1 of session ann holds 3" in wait.reason
    assert bound(world.say("ann", m.ReleaseSlice(1)), "bob") == ("east", (0, 1))


def test_shared_slices_overlap_only_when_they_must() -> None:
    world = World()
    world.form("east")
    world.connect()
    assert bound(world.slice("client", 1, 2, shared=True)) == ("east", (0, 1))
    assert bound(world.slice("client", 2, 2, shared=True)) == ("east", (2, 3))
    assert bound(world.slice("client", 3, 4, shared=True)) == ("east", (0, 1, 2, 3))
    assert reason(world.slice("client", 4, 1))


def test_a_slice_waits_for_an_island_that_is_forming() -> None:
    world = World()
    world.connect()
    world.join("east", 0, hosts=2)
    assert world.slice("client", 1, 8) == []
    [island, wanted] = world.core.waits(world.now)
    assert wanted.reason == "island east waits for host 1 of 2 to join"
    assert island.reason == "waits for host 1 of 2 to join"
    world.join("east", 1, hosts=2)
    world.ready("east", 0)
    out = world.ready("east", 1)
    assert bound(out)[0] == "east"
    kinds = [type(message) for message in sent(out, "client")]
    assert kinds == [m.DirectoryChange, m.SliceBound]  # the addresses come first


def test_a_young_cluster_waits_for_its_first_hosts_and_an_old_one_does_not() -> None:
    world = World(grace_s=10.0)
    world.connect()
    assert world.slice("client", 1, 1) == []
    assert "no host has joined the cluster" in world.core.waits(world.now)[0].reason
    world.say("client", m.Ping(1))
    world.wait(9.0)
    world.say("client", m.Ping(1))
    assert "pathway worker" in reason(world.wait(1.0))


def test_a_slice_comes_back_with_its_island() -> None:
    world = World()
    world.form("east")
    world.connect()
    world.slice("client", 7, 2)
    world.say("worker-east-0", m.ExecutorExited("east", 1, 0, "exit code 1"))
    assert sent(world.ready("east", incarnation=2), "client", m.SliceBound) == [
        m.SliceBound(7, "east", 2, (0, 1), "cpu", 4)
    ]


def test_a_slice_moves_when_its_island_comes_back_too_small() -> None:
    world = World()
    world.form("east")
    world.connect()
    world.slice("client", 1, 4)
    world.say("worker-east-0", m.Goodbye())
    world.form("west")
    world.join("east", devices=2)
    out = world.ready("east", devices=2, incarnation=2)
    assert bound(out) == ("west", (0, 1, 2, 3))


def test_the_end_of_a_session_frees_its_slices() -> None:
    world = World()
    world.form("east")
    world.connect("ann")
    world.connect("bob")
    world.slice("ann", 1, 4)
    world.slice("bob", 1, 4, wait=True)
    assert bound(world.say("ann", m.Goodbye()), "bob") == ("east", (0, 1, 2, 3))
    world.say("bob", m.ReleaseSlice(1))
    assert not world.core.clients.binder.holders["east"]


@given(
    hosts=st.integers(1, 4),
    per_host=st.integers(1, 8),
    count=st.integers(1, 32),
    taken=st.sets(st.integers(0, 31)),
)
@settings(max_examples=300, deadline=None)
def test_chosen_devices_are_free_and_neighbours_where_they_can_be(
    hosts: int, per_host: int, count: int, taken: set[int]
) -> None:
    island = Island("east", hosts, per_host, "cpu", since=0.0)
    free = [device for device in range(island.devices) if device not in taken]
    chosen = choose_devices(count, island, free)
    if len(free) < count:
        assert chosen == ()
        return
    assert len(set(chosen)) == count
    assert set(chosen) <= set(free)
    assert list(chosen) == sorted(chosen)
    blocks = [
        range(start, start + count)
        for start in range(island.devices - count + 1)
        if set(range(start, start + count)) <= set(free)
    ]
    if blocks:
        assert chosen[-1] - chosen[0] == count - 1
    if any(block[0] // per_host == block[-1] // per_host for block in blocks):
        assert chosen[0] // per_host == chosen[-1] // per_host
