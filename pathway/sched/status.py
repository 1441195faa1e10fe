"""What `pathway status` shows: everything there is, and every wait with its reason (O-8). Plain data for JSON."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from pathway.sched.cluster import Island
from pathway.sched.events import Wait
from pathway.sched.queues import Put
from pathway.sched.sessions import Session
from pathway.transport.endpoints import address_of
from pathway.version import __version__

if TYPE_CHECKING:
    from pathway.sched.core import SchedulerCore


RUNS_SHOWN = 20
"""Of each session: a client may have ten thousand under way, and all wait for the first of them."""


def waits(core: SchedulerCore, now: float) -> list[Wait]:
    found = []
    for island in core.cluster.islands.values():
        reason = island.reason(now)
        if reason:
            found.append(Wait(f"island {island.name}", reason, island.name, now - island.since))
        for index, host in island.hosts.items():
            if host.paused_since is not None:
                reason = (
                    f"the executor of host {index} is stopped (SIGSTOP), and goes on when it is continued (SIGCONT)"
                )
                found.append(Wait(f"island {island.name}", reason, island.name, now - host.paused_since))
    for held in core.clients.waiting_slices.values():
        found.append(Wait(held.who, held.reason, held.request.island, now - held.since))
    for what in core.clients.lanes.memory.waiting:
        if isinstance(what, Put):
            reason, on = core.clients.lanes.memory.reason(what)
            name = core.clients.sessions[what.session].name
            found.append(Wait(f"put {what.message.buffer} of session {name}", reason, on, now - what.since))
    for session in core.clients.sessions.values():
        for run in itertools.islice(session.runs.values(), RUNS_SHOWN):
            reason, on = core.clients.lanes.reason(run)
            found.append(Wait(f"run {run.number} of session {session.name}", reason, on, now - run.since))
        for number, reason, since in session.scripts.waits() if session.scripts is not None else ():
            found.append(Wait(f"run {number} of session {session.name}", reason, "", now - since))
        if len(session.runs) > RUNS_SHOWN:
            more = len(session.runs) - RUNS_SHOWN
            found.append(Wait(f"{more} more runs of session {session.name}", "those before them", "", 0.0))
    for island in core.cluster.islands.values():
        if island.lane is not None and island.lane.report is not None:
            for session_id, number, reason, since_s in island.lane.report.waits:
                owner = core.clients.sessions.get(session_id)
                name = owner.name if owner else f"{session_id:x}"
                found.append(Wait(f"{number} of session {name}", reason, island.name, since_s))
    return found


def status(core: SchedulerCore, now: float) -> dict[str, Any]:
    return {
        "version": __version__,
        "uptime_s": round(now - core.started_at, 3),
        "state": core.clients.ending or "running",
        "policy": core.settings.policy.name,
        "islands": [_island(core, island, now) for island in core.cluster.islands.values()],
        "sessions": [_session(core, session, now) for session in core.clients.sessions.values()],
        "slices": [
            {
                "slice": held.request.slice,
                "session": f"{session.id:x}",
                "island": held.island,
                "devices": list(held.devices),
                "mesh": dict(held.request.mesh),
                "shared": held.request.shared,
                "reason": held.reason,
            }
            for session in core.clients.sessions.values()
            for held in session.slices.values()
        ],
        "keys": core.clients.accounts.status(),
        "runs": core.clients.lanes.active,
        "computations": core.clients.plans.computation_count,
        "computation_bytes": core.clients.plans.computation_bytes,
        "waits": [
            {"what": wait.what, "reason": wait.reason, "on": wait.on, "since_s": round(wait.since_s, 3)}
            for wait in waits(core, now)
        ],
    }


def _island(core: SchedulerCore, island: Island, now: float) -> dict[str, Any]:
    lane = island.lane
    report = lane.report if lane else None
    held = core.clients.binder.holders.get(island.name, {})
    return {
        "island": island.name,
        "state": island.state.value,
        "reason": island.reason(now),
        "incarnation": island.incarnation,
        "platform": island.platform,
        "device_kind": island.entry.device_kind if lane else "",
        "transfer": island.entry.transfer if lane else "",
        "devices": island.devices,
        "devices_per_host": island.devices_per_host,
        "devices_held": len(held),
        "hosts": [
            {
                "host": index,
                "hostname": host.joined.hostname,
                "pid": host.joined.pid,
                "paused": host.paused_since is not None,
                "executor_pid": island.executors[index][1].pid if index in island.executors else 0,
                "executor": address_of(island.executors[index][1].peer_address) if index in island.executors else "",
            }
            for index, host in sorted(island.hosts.items())
        ],
        "losses": island.losses,
        "last_loss": island.cause,
        "in_flight": len(lane.running) if lane else 0,
        "queued": len(lane.queue) if lane else 0,
        "credits": core.settings.credits,
        "drained": island.drained,
        "damaged_transfers": island.damaged_transfers,
        "buffers": sum(buffers for _, buffers, _ in report.bytes_by_session) if report else 0,
        "bytes": sum(size for _, _, size in report.bytes_by_session) if report else 0,
        "memory_limit_bytes": lane.ledger.limit_bytes if lane and lane.ledger else 0,
        "memory_used_bytes": max(lane.ledger.used) if lane and lane.ledger else 0,
        "spilled_bytes": lane.ledger.spilled_bytes if lane and lane.ledger else 0,
        "host_bytes": report.spilled_bytes if report else 0,
        "spills": lane.ledger.spills if lane and lane.ledger else 0,
        "busy_us": report.busy_us if report else 0,
    }


def _session(core: SchedulerCore, session: Session, now: float) -> dict[str, Any]:
    islands = core.cluster.islands.values()
    tenant = core.clients.lanes.tenant(session.id)
    reports = [island.lane.report for island in islands if island.lane and island.lane.report]
    held = [entry for report in reports for entry in report.bytes_by_session if entry[0] == session.id]
    return {
        "session": f"{session.id:x}",
        "name": session.name,
        "connected": session.peer is not None,
        "age_s": round(now - session.opened_at, 3),
        "slices": len(session.slices),
        "plans": len(session.plans),
        "runs": len(session.runs),
        "runs_submitted": session.last_run,
        "weight": tenant.weight,
        "priority": tenant.priority,
        "device_us": int(sum(island.lane.busy_us.get(session.id, 0.0) for island in islands if island.lane)),
        "buffers": sum(buffers for _, buffers, _ in held),
        "bytes": sum(size for _, _, size in held),
        "relayed_bytes": session.relayed_bytes,
    }
