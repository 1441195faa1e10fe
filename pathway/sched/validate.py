"""Assert, between events, what must always hold of the scheduler's core. For tests and simulations."""

from __future__ import annotations

from pathway.sched import lanes
from pathway.sched.core import SchedulerCore


def validate(core: SchedulerCore) -> None:
    core.cluster.validate()
    core.clients.binder.validate()
    live = [island.lane for island in core.cluster.islands.values() if island.lane is not None]
    lost = {lane for session in core.clients.sessions.values() for lane in session.lanes if lane.error is not None}
    assert not lost, "a lost lane is remembered"
    lanes.validate(core.clients.lanes, live)
    for key, wanted in core.clients.waiting_slices.items():
        assert core.clients.sessions[key[0]].slices[key[1]] is wanted
        assert wanted.reason, "V-3"
        assert not wanted.island
    for session in core.clients.sessions.values():
        for number, held in session.slices.items():
            assert bool(held.island) != ((session.id, number) in core.clients.waiting_slices), "V-3"
            assert not held.island or all(
                held in core.clients.binder.holders[held.island][device] for device in held.devices
            )
        for number, run in session.runs.items():
            assert run.number == number
            assert run.error is None
            assert number <= session.last_run, "N-3"
            assert any(lane.error is None for lane in run.lanes)
        if session.peer is not None:
            peer = core.peers.get(session.peer)
            assert peer is not None
            assert peer.session is session, "N-1"
    owners = set(core.clients.sessions)
    for lane in live:
        assert {session for session, _ in lane.registered} <= owners
        assert {session for session, _ in lane.running} <= owners
    for held_by_device in core.clients.binder.holders.values():
        for holders in held_by_device.values():
            assert all(held.session in owners for held in holders)
