"""The gang scheduler: which run goes to the islands when. A policy's order, all or nothing, with credits.

A run waits on every island that it touches, in its session's flow there, and when it is the first of the flow, in the
line of its group of devices (`queues`). The policy ranks the first runs of a line. When a group has room, the turn of
the least has come there. A run whose turn has come on all its islands leaves, for all of them at once.

Invariants
  O-4  What one session sends to one island reaches it in that order: a put or a release stands behind the session's
       runs that are queued there, never before them.
  O-5  The work for a run is per island that it touches, never per shard, device, host or island of the cluster.
  O-7  At most `credits` parts whose inputs are there are in flight past the leader of each group, and of a policy with
       a window no more than it lets in by expected time, but always two, so that devices do not idle. Of parts whose
       inputs are late at most `credits` of one session; they hold back nobody else.
  S-1  A turn that has come is kept, and costs the others nothing: the group goes on with the next in its line. So no
       two runs wait for each other's turns, whatever the policy, and however the lines differ.
  S-2  A run ends exactly once for the client: finished when all its parts have, or failed with the first cause. The run
       itself is over when its last part is, so that every credit comes back.
  S-3  A run of several islands that has all its turns claims a credit of each. All groups hold their claims in the same
       order, and a claim leaves one credit free for itself: others have room only beside it. So the first claim of all
       gets every credit that comes back, and goes; by induction so do the others.
  S-4  Nothing starves: a policy's line brings every turn at last, and a claim is overtaken by earlier claims only.
  S-5  Of one key no more runs are in flight than its limit: a run's last turn waits for one of them to be over, and
       holds back nobody else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from msgspec import structs

from pathway.errors import ErrorInfo
from pathway.sched.accounts import Account, Accounts
from pathway.sched.events import Instruction, Send
from pathway.sched.memory import Memory, buffers_read
from pathway.sched.policies import Fifo, Policy, Tenant
from pathway.sched.queues import UNKNOWN_US, Flow, Group, Held, Lane, Part, Put, Run, join, regroup
from pathway.transport.messages import AssembleOnIsland, CancelPart, FreeBuffers, Message, PutOnIsland, StartPart

__all__ = ["Lane", "LaneScheduler", "Run"]

AT_LEAST = 2
"""Parts in flight that a window always lets in: one that runs, and one to follow it without a gap."""

MOST_US = 1e12
"""What a part is believed to have taken at most: sums of such times keep their microseconds."""

LEARNING = 1 / 16
"""How much a part's last time counts in what it is expected to take, if it took longer. A shorter time counts at once:
a device that waited for its next part was measured too long, and to expect that would let it wait again."""


class LaneScheduler:
    """`failed(run, error, now, out)` is called when a run fails, once for each."""

    def __init__(
        self,
        credits: int,
        failed: Callable[[Run, ErrorInfo, float, list[Instruction]], None],
        policy: Policy | None = None,
        memory: Memory | None = None,
        accounts: Accounts | None = None,
    ) -> None:
        self.credits = credits
        self.policy = policy or Fifo()
        self.memory = memory or Memory()
        self.accounts = accounts or Accounts()
        self._freed: list[Group] = []  # where something may go, as its key has a run less in flight
        self.active = 0  # runs that are not over
        self._failed = failed
        self._tenants: dict[int, Tenant] = {}
        self._arrivals = 0
        self._stamps = 0
        self._claims = 0

    def tenant(self, session: int) -> Tenant:
        """What policies know of a session."""
        found = self._tenants.get(session)
        if found is None:
            found = self._tenants[session] = Tenant(session)
        return found

    # -- in ---------------------------------------------------------------------------------------------------------

    def submit(self, run: Run, out: list[Instruction]) -> None:
        self.active += 1
        self._arrivals += 1
        run.arrival = self._arrivals
        session, groups = run.session, run.groups
        tenant = self.tenant(session)
        account = self.accounts.of(session)
        goes = account is None or not account.full
        for lane, device in zip(run.lanes, run.devices, strict=True):
            if lane.stale and not lane.running and not lane.queue:
                regroup(self.policy, lane)
            group = lane.groups.get(device)
            if group is None:
                group = lane.groups[device] = Group(lane, self.policy)
            groups.append(group)
            if group.waiting or session in lane.flows or not self._has_room(group, session):
                goes = False
        if goes and (run.needs is None or self.memory.admit_run(run, out, wait=False)):
            run.expected_us = run.costs_us.copy()
            for group, expected_us in zip(groups, run.expected_us, strict=True):
                line = group.line
                line.came(tenant)
                line.went(tenant, line.rank(tenant, run.arrival, run.since), expected_us)
            self._dispatch(run, out)
            if self.memory.stirred:
                self.pump([], out)
            return
        run.expected_us = [0.0] * len(groups)
        for lane, group in zip(run.lanes, groups, strict=True):
            lane.queue[run] = None
            if session not in group.waiting:
                group.line.came(tenant)
            group.waiting[session] = group.waiting.get(session, 0) + 1
            flow = lane.flows.get(session)
            if flow is None:
                flow = lane.flows[session] = Flow(tenant)
                flow.entries.append(run)
                self._offer(group, flow)
            else:
                flow.entries.append(run)
                if flow.reads is not None:
                    flow.reads.update(reads_of(lane, run))
                    flow.makes = min(flow.makes, run.first_result)
        self.pump(groups.copy(), out)

    def send_behind(self, lane: Lane, session: int, message: Message, out: list[Instruction]) -> None:
        """Send to the lane's leader what must not overtake the session's queued runs (O-4)."""
        flow = lane.flows.get(session)
        if flow is None:
            self._forward(lane, session, message, out)
        else:
            self._hold(lane, flow, Held(session, message), out)
        if self.memory.stirred:
            self.pump([], out)

    def leave_behind(self, run: Run, lane: Lane, messages: Iterable[Message]) -> None:
        """Put messages in the place of a queued run, to be sent when it is dropped."""
        entries = lane.flows[run.session].entries
        place = entries.index(run)
        for message in messages:
            place += 1
            entries.insert(place, Held(run.session, message))

    def put(self, put: Put, out: list[Instruction]) -> None:
        """As `send_behind`, for a put that needs memory."""
        lane, session = put.lane, put.session
        flow = lane.flows.get(session)
        if flow is not None:
            self._hold(lane, flow, put, out)
        elif self.memory.admit_put(put, out):
            out.append(Send(lane.leader, put.message))
        else:
            flow = lane.flows[session] = Flow(self.tenant(session))
            flow.entries.append(put)
            self._let_releases_by(lane, flow, out)
        if self.memory.stirred:
            self.pump([], out)

    def refuse_put(self, put: Put, error: ErrorInfo, out: list[Instruction]) -> None:
        """The put that waits first in its flow becomes the error in place of its data."""
        self.memory.waiting.pop(put, None)
        put.message = structs.replace(put.message, data=None, error=error)
        put.admitted = True
        groups: dict[Group, None] = {}
        self._advance(put.lane, put.lane.flows[put.session], groups, out)
        self.pump(list(groups), out)

    def _forward(self, lane: Lane, session: int, message: Message, out: list[Instruction]) -> None:
        out.append(Send(lane.leader, message))
        if type(message) is FreeBuffers:
            self.memory.released(lane, session, message.buffers)

    def cancel(self, run: Run, error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        """Drop a queued run. One in flight is cancelled at the leaders, which say when it is over, and how."""
        if not run.open:
            self._drop_queued([run], error, now, out)
        else:
            for lane in run.lanes:
                if lane.error is None:  # also where its part is over: what it has sent may still be under way
                    out.append(Send(lane.leader, CancelPart(run.session, run.number, error)))

    def fail_queued(self, runs: Iterable[Run], error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        self._drop_queued([run for run in runs if not run.open], error, now, out)

    def _drop_queued(self, runs: Iterable[Run], error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        runs = sorted(runs, key=lambda run: run.arrival)
        groups: dict[Group, None] = {}
        for run in runs:
            self._withdraw(run, groups, out)
        for run in runs:
            self.active -= 1
            self._uncount(run)
            self._fail(run, error, now, out)
        self.pump(list(groups), out)

    def _withdraw(self, run: Run, groups: dict[Group, None], out: list[Instruction]) -> None:
        """Take a run out of all its lines, and its turns and claims back."""
        if run.needs is not None:
            self.memory.withdrawn(run)
        for index, (lane, group) in enumerate(zip(run.lanes, run.groups, strict=True)):
            groups[group] = None
            flow = lane.flows[run.session]
            if group in run.turns and group.line.took(flow.tenant, run.expected_us[index], 0.0):
                self._offer_again(lane, group, flow)
            if run in group.claims:
                group.claims.remove(run)
            del lane.queue[run]
            _count_down(group.waiting, run.session)
            if flow.entries[0] is run:
                flow.entries.popleft()
                self._advance(lane, flow, groups, out)
            else:
                flow.entries.remove(run)

    # -- out --------------------------------------------------------------------------------------------------------

    def _has_room(self, group: Group, session: int) -> bool:
        count = group.count
        return (
            count < self.credits - (1 if group.claims else 0)  # S-3
            and (count < AT_LEAST or group.us < self.policy.window_us)
            and (not group.parked or group.parked.get(session, 0) < self.credits)
        )

    def _offer(self, group: Group, flow: Flow) -> None:
        self._stamps += 1
        group.offer(flow, self._stamps)

    def _offer_again(self, lane: Lane, group: Group, flow: Flow) -> None:
        """The rank of what waits may have moved, or it may wait again."""
        if flow.entries and lane.flows.get(flow.tenant.session) is flow and isinstance(flow.entries[0], Run):
            run = flow.first
            if group not in run.turns and run.groups[run.lanes.index(lane)] is group:
                self._offer(group, flow)

    def pump(self, groups: list[Group], out: list[Instruction]) -> None:
        """Let go what can, on these groups and wherever that leads."""
        while groups or self.memory.stirred or self._freed:
            groups += self._freed
            self._freed.clear()
            if self.memory.stirred:
                self._memory_came(groups, out)
                continue
            group = groups.pop()
            while group.claims:
                run = group.claims[0]
                if not all(other.claims[0] is run and other.count < self.credits for other in run.groups):
                    break
                for other in run.groups:
                    other.claims.popleft()
                self._go(run, group, groups, out)
            while group.offers:
                rank, _, stamp, flow = group.offers[0]
                if flow.stamp != stamp:
                    group.next_offer()
                    continue
                session = flow.tenant.session
                if not self._has_room(group, session):
                    if group.parked.get(session, 0) < self.credits:
                        break
                    group.next_offer()  # it has too much that waits for inputs; the others go on
                    flow.stamp = 0
                    continue
                group.next_offer()
                flow.stamp = 0
                if not self._may_leave(flow, group):
                    continue
                self._turn(flow, group, rank, groups, out)

    def _turn(self, flow: Flow, group: Group, rank: float, groups: list[Group], out: list[Instruction]) -> None:
        """The turn of the flow's first run has come on one of its groups."""
        run = flow.first
        index = run.groups.index(group)
        expected_us = run.expected_us[index] = run.costs_us[index]
        group.line.went(flow.tenant, rank, expected_us)
        run.turns.add(group)
        if len(run.turns) < len(run.groups):
            return
        if run.needs is not None and not self.memory.admit_run(run, out):
            for lane in run.lanes:  # it waits for memory, with its turns
                self._let_releases_by(lane, lane.flows[run.session], out)
        elif len(run.groups) == 1:
            self._go(run, group, groups, out)
        else:
            self._claim(run, groups)

    def _may_leave(self, flow: Flow, group: Group) -> bool:
        """Whether the limit of its key lets the flow's first run go (S-5). Asked for a run's last turn only: a run that
        has it waits for nothing that another run of its key could hold. What may not is looked at again when one is
        over."""
        account = self.accounts.of(flow.tenant.session)
        run = flow.first
        if account is None or not account.full or len(run.turns) + 1 < len(run.groups):
            return True
        account.held[group.lane, run.session] = flow
        return False

    def _count(self, run: Run) -> None:
        account = self.accounts.of(run.session)
        if account is not None and not run.counted:
            run.counted = True
            account.running += 1

    def _uncount(self, run: Run) -> None:
        """The run is over, or goes no more."""
        account = self.accounts.of(run.session)
        if account is not None and run.counted:
            run.counted = False
            account.running -= 1
            self._look_at_held(account)

    def _look_at_held(self, account: Account) -> None:
        if account.held and not account.full:
            held, account.held = account.held, {}
            for (lane, session), flow in held.items():
                if lane.flows.get(session) is flow and isinstance(flow.entries[0], Run):
                    run = flow.first
                    group = run.groups[run.lanes.index(lane)]
                    self._offer_again(lane, group, flow)
                    self._freed.append(group)

    def limits_changed(self, out: list[Instruction]) -> None:
        """The operator has changed what keys may have."""
        for account in self.accounts:
            self._look_at_held(account)
        self.pump([], out)

    def _claim(self, run: Run, groups: list[Group]) -> None:
        """The run has all its turns, and its memory: it goes when there are credits (S-3)."""
        self._count(run)
        self._claims += 1
        run.claimed = self._claims
        for other in run.groups:
            other.claims.append(run)
        groups += run.groups

    def _memory_came(self, groups: list[Group], out: list[Instruction]) -> None:
        """Something is free: look at all that waits for memory."""
        for what in self.memory.ready(out):
            if isinstance(what, Run):
                self._claim(what, groups)
            else:
                found: dict[Group, None] = {}
                self._advance(what.lane, what.lane.flows[what.session], found, out)
                groups += found

    def _let_releases_by(self, lane: Lane, flow: Flow, out: list[Instruction]) -> None:
        """The flow's first waits for memory: let what can give it some overtake it (M-5)."""
        entries, flow.entries = flow.entries, type(flow.entries)()
        flow.reads, flow.makes = set(), sys.maxsize
        for entry in entries:
            if isinstance(entry, Run):
                flow.entries.append(entry)
                flow.reads.update(reads_of(lane, entry))
                flow.makes = min(flow.makes, entry.first_result)
            else:
                self._hold(lane, flow, entry, out)

    def _hold(self, lane: Lane, flow: Flow, entry: Held, out: list[Instruction]) -> None:
        """Put a message at the end of a flow, but for the part of a release that may overtake it."""
        message = entry.message
        if flow.reads is not None and type(message) is FreeBuffers:
            makes, reads = flow.makes, flow.reads
            by = tuple(buffer for buffer in message.buffers if buffer < makes and buffer not in reads)
            if by:
                self._forward(lane, entry.session, FreeBuffers(entry.session, by), out)
                rest = tuple(buffer for buffer in message.buffers if buffer >= makes or buffer in reads)
                if not rest:
                    return
                entry.message = FreeBuffers(entry.session, rest)
        elif flow.reads is not None and isinstance(message, AssembleOnIsland | PutOnIsland):
            flow.makes = min(flow.makes, message.buffer)
            flow.reads.update(message.sources if isinstance(message, AssembleOnIsland) else ())
        flow.entries.append(entry)

    def _go(self, run: Run, group: Group, groups: list[Group], out: list[Instruction]) -> None:
        """The run leaves its queues for its islands."""
        self._dispatch(run, out)
        found: dict[Group, None] = {}
        session = run.session
        for lane, other in zip(run.lanes, run.groups, strict=True):
            del lane.queue[run]
            _count_down(other.waiting, session)
            flow = lane.flows[session]
            flow.entries.popleft()
            self._advance(lane, flow, found, out)
            if other is not group:
                found[other] = None
        groups += found

    def _advance(self, lane: Lane, flow: Flow, groups: dict[Group, None], out: list[Instruction]) -> None:
        """The flow's first run is gone: send what stood behind it, and let the next run wait for its turn."""
        entries = flow.entries
        flow.stamp = 0
        flow.reads = None
        while entries:
            entry = entries[0]
            if isinstance(entry, Run):
                group = entry.groups[entry.lanes.index(lane)]
                self._offer(group, flow)
                groups[group] = None
                return
            if isinstance(entry, Put) and not entry.admitted and not self.memory.admit_put(entry, out):
                self._let_releases_by(lane, flow, out)
                return
            entries.popleft()
            if lane.error is None:
                self._forward(lane, entry.session, entry.message, out)
        del lane.flows[flow.tenant.session]

    def _dispatch(self, run: Run, out: list[Instruction]) -> None:
        session, number, plan, first = run.session, run.number, run.plan, run.first_result
        key = (session, number)
        if run.needs is not None:
            self.memory.started(run)
        self._count(run)
        run.open = len(run.lanes)
        for index, lane in enumerate(run.lanes):
            group, expected_us = run.groups[index], run.expected_us[index]
            group.count += 1
            group.us += expected_us
            lane.running[key] = Part(run, index, group, expected_us)
            out.append(Send(lane.leader, StartPart(session, number, plan, first, run.arguments[index])))

    # -- back -------------------------------------------------------------------------------------------------------

    def parts_finished(
        self, lane: Lane, parts: Sequence[tuple[int, int]], out: list[Instruction], part_us: Sequence[int] = ()
    ) -> list[Run]:
        """The runs that are over and did not fail. `part_us`: how long each part held its devices, if that is known."""
        finished = []
        groups: dict[Group, None] = {}
        for position, key in enumerate(parts):
            part = lane.running.pop(key, None)
            if part is None:
                continue
            groups[part.group] = None
            self._part_ended(lane, part, part_us[position] if part_us else None)
            run = part.run
            run.open -= 1
            if not run.open:
                self.active -= 1
                self._uncount(run)
                if run.error is None:
                    finished.append(run)
        self.pump(list(groups), out)
        return finished

    def part_failed(
        self, lane: Lane, key: tuple[int, int], error: ErrorInfo, now: float, out: list[Instruction]
    ) -> None:
        part = lane.running.pop(key, None)
        if part is not None:
            self._part_ended(lane, part, None)
            self._part_over(part.run, error, now, out)
            self.pump([part.group], out)

    def parts_late(self, lane: Lane, parts: Iterable[tuple[int, int]], out: list[Instruction]) -> None:
        """Inputs of these parts are not there: they leave their place to others meanwhile (O-7)."""
        groups: dict[Group, None] = {}
        for key in parts:
            part = lane.running.get(key)
            if part is not None and not part.parked:
                part.parked = True
                group = part.group
                group.count -= 1
                group.us -= part.expected_us
                group.parked[key[0]] = group.parked.get(key[0], 0) + 1
                groups[group] = None
        self.pump(list(groups), out)

    def _part_ended(self, lane: Lane, part: Part, measured_us: float | None) -> None:
        group, run = part.group, part.run
        session = run.session
        if run.needs is not None:
            self.memory.ended(lane, run, part.index)
        again = part.parked
        if part.parked:
            _count_down(group.parked, session)
        else:
            group.count -= 1
            group.us = group.us - part.expected_us if group.count else 0.0
        if measured_us is not None:
            measured_us = min(max(measured_us, 0.0), MOST_US)
            costs_us, index = run.costs_us, part.index
            known_us = costs_us[index]
            shorter = known_us == UNKNOWN_US or measured_us < known_us
            costs_us[index] = measured_us if shorter else known_us + LEARNING * (measured_us - known_us)
            lane.busy_us[session] = lane.busy_us.get(session, 0.0) + measured_us
            again = group.line.took(self.tenant(session), part.expected_us, measured_us) or again
        if again and lane.flows:
            flow = lane.flows.get(session)
            if flow is not None:
                self._offer_again(lane, group, flow)

    def _part_over(self, run: Run, error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        run.open -= 1
        if not run.open:
            self.active -= 1
            self._uncount(run)
        self._fail(run, error, now, out)

    def _fail(self, run: Run, error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        if run.error is None:
            run.error = error
            self._failed(run, error, now, out)

    # -- ends -------------------------------------------------------------------------------------------------------

    def lane_lost(self, lane: Lane, error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        """All runs that touch the lane fail. Their parts elsewhere are still awaited, as their edges are poisoned."""
        lane.error = error
        running, lane.running = list(lane.running.values()), {}
        for part in running:
            self._part_over(part.run, error, now, out)
        self._drop_queued(list(lane.queue), error, now, out)
        lane.flows.clear()
        self.memory.lane_lost(lane)
        self.pump([], out)

    def session_closed(self, session: int, lanes: Iterable[Lane], out: list[Instruction]) -> None:
        """The session's queued runs go, and so do its credits: leaders forget its parts before any new one comes."""
        gone: dict[Run, None] = {}
        groups: dict[Group, None] = {}
        lanes = list(lanes)
        for lane in lanes:  # of all islands first: a run of several would let go what stands behind it elsewhere
            flow = lane.flows.get(session)
            if flow is not None:
                flow.entries = type(flow.entries)(entry for entry in flow.entries if isinstance(entry, Run))
                if not flow.entries:
                    del lane.flows[session]
        for lane in lanes:
            for key in [key for key in lane.running if key[0] == session]:
                part = lane.running.pop(key)
                self._part_ended(lane, part, None)
                gone[part.run] = None
                groups[part.group] = None
            lane.busy_us.pop(session, None)
            queued = [run for run in lane.queue if run.session == session]
            for run in queued:
                self._withdraw(run, groups, out)
                gone[run] = None
            for group in lane.distinct_groups():
                group.line.left(session)
        for run in gone:
            self._uncount(run)
        self.memory.session_closed(session, lanes)
        self.active -= len(gone)
        self._tenants.pop(session, None)
        self.pump(list(groups), out)

    # -- groups -----------------------------------------------------------------------------------------------------

    def plan_registered(self, lane: Lane, key: tuple[int, int], devices: frozenset[int]) -> None:
        """The plan's part on the lane reaches these devices, so they are one group from now on."""
        lane.reaches[key] = devices
        join(self.policy, lane, devices, self._offer)

    def pump_lane(self, lane: Lane, out: list[Instruction]) -> None:
        """Look at everything that waits on the lane again."""
        self.pump(list(lane.distinct_groups()), out)

    # -- waits (O-8) ------------------------------------------------------------------------------------------------

    def reason(self, run: Run) -> tuple[str, str]:
        """Why a run is not over yet, and on which islands that is."""
        key = (run.session, run.number)
        if run.open:
            on = [lane.island for lane in run.lanes if key in lane.running]
            late = sum(lane.running[key].parked for lane in run.lanes if key in lane.running)
            inputs = f", {late} of them without all inputs" if late else ""
            return f"{len(on)} of its {len(run.lanes)} parts are in flight{inputs}", ", ".join(on)
        if run in self.memory.waiting:
            return self.memory.reason(run)
        for lane, group in zip(run.lanes, run.groups, strict=True):
            if group in run.turns:
                continue
            entries = lane.flows[run.session].entries
            if isinstance(entries[0], Put):
                return f"a put of its session before it in the queue of island {lane.island}", lane.island
            position = sum(entry.arrival < run.arrival for entry in entries if isinstance(entry, Run))
            if position:
                return f"{position} of its session before it in the queue of island {lane.island}", lane.island
        account = self.accounts.of(run.session)
        if account is not None and account.full:
            names = ", ".join(lane.island for lane in run.lanes)
            limit = account.terms.runs
            return f"the key {account.name!r} has {account.running} runs in flight, and may have {limit} (runs)", names
        full = [group for group in run.groups if group.count >= self.credits]
        if full:
            names = ", ".join(group.lane.island for group in full)
            return f"all {self.credits} credits of island {names} are in use", names
        waits = [group for group in run.groups if group not in run.turns] or run.groups
        names = ", ".join(group.lane.island for group in waits)
        others = max(len(group.waiting) for group in waits) - 1
        in_flight_ms = max(group.us for group in waits) / 1000
        return (
            f"its turn on island {names}: {in_flight_ms:.1f} ms of work are in flight, {others} other sessions wait "
            f"({self.policy.name})",
            names,
        )


def reads_of(lane: Lane, run: Run) -> tuple[int, ...]:
    """The buffers that a run's part on the lane reads."""
    return buffers_read(run, run.lanes.index(lane))


def _count_down(counts: dict[int, int], key: int) -> None:
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]
