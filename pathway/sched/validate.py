"""Assert, between events, what must always hold of the scheduler's core. For tests and simulations."""

from __future__ import annotations

from collections.abc import Iterable

from pathway.sched.core import SchedulerCore
from pathway.sched.lanes import LaneScheduler
from pathway.sched.queues import Group, Lane, Run
from pathway.transport.messages import OWN_RUNS


def validate(core: SchedulerCore) -> None:
    core.cluster.validate()
    core.clients.binder.validate()
    live = [island.lane for island in core.cluster.islands.values() if island.lane is not None]
    lost = {lane for session in core.clients.sessions.values() for lane in session.lanes if lane.error is not None}
    assert not lost, "a lost lane is remembered"
    validate_lanes(core.clients.lanes, live)
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
            assert number <= session.last_run or number >= OWN_RUNS, "N-3"
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


def validate_lanes(scheduler: LaneScheduler, lanes: Iterable[Lane]) -> None:
    """Assert the invariants of `lanes` and `queues`."""
    runs: dict[Run, None] = {}
    credits = scheduler.credits
    for lane in lanes:
        for part in lane.running.values():
            assert part.run.open
            assert part.group is part.run.groups[part.index]
            runs[part.run] = None
        if lane.ledger is not None:
            lane.ledger.validate()
            assert all(used <= lane.ledger.limit_bytes for used in lane.ledger.used), "M-1"
        for run in lane.queue:
            assert not run.open
            assert all(run in other.queue for other in run.lanes), "all or nothing"
            assert run in lane.flows[run.session].entries
            runs[run] = None
        for session, flow in lane.flows.items():
            assert session == flow.tenant.session
            arrivals = [entry.arrival for entry in flow.entries if isinstance(entry, Run)]
            assert arrivals == sorted(arrivals), "O-4"
            first = flow.entries[0]
            assert isinstance(first, Run) or first in scheduler.memory.waiting, "M-3"
        for group in lane.distinct_groups():
            _validate_group(scheduler, lane, group)
    for run in runs:
        assert not run.open or run.open == sum((run.session, run.number) in lane.running for lane in run.lanes), "S-2"
        if not run.open:
            waits = run in scheduler.memory.waiting
            assert (bool(run.claimed) or waits) == (len(run.turns) == len(run.groups)), "S-3"
            assert not (run.claimed and waits), "M-2"
            can_go = run.claimed and all(group.claims[0] is run and group.count < credits for group in run.groups)
            assert not can_go, "a claim waits for nothing"
    assert scheduler.active == len(runs)


def _validate_group(scheduler: LaneScheduler, lane: Lane, group: Group) -> None:
    parts = [part for part in lane.running.values() if part.group is group]
    assert group.count == sum(not part.parked for part in parts)
    assert group.merged or group.count <= scheduler.credits, "O-7"
    assert abs(group.us - sum(part.expected_us for part in parts if not part.parked)) < 1.0
    assert [run.claimed for run in group.claims] == sorted(run.claimed for run in group.claims), "S-3"
    waiting = [run for run in lane.queue if run.groups[run.lanes.index(lane)] is group]
    assert sum(group.waiting.values()) == len(waiting)
    for flow in lane.flows.values():
        if not isinstance(flow.entries[0], Run):
            continue
        run = flow.first
        if run.groups[run.lanes.index(lane)] is group and group not in run.turns:
            parked = group.parked.get(run.session, 0)
            account = scheduler.accounts.of(run.session)
            held = account is not None and account.full and account.held.get((lane, run.session)) is flow
            assert flow.stamp or held or parked >= scheduler.credits, "a run waits for no turn"
            assert held or not scheduler._has_room(group, run.session), "a run waits for nothing"
