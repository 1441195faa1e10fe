"""What clients ask for: sessions, slices, plans, runs and buffers, and what they are told. Pure.

The rules stand with the subjects: `sessions` (N), `slices` (V), `plans` (R) and `lanes` (O, S).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Raw

from pathway.errors import ErrorInfo, ProtocolError
from pathway.sched.accounts import Account, Accounts
from pathway.sched.cluster import Cluster, Island
from pathway.sched.events import Close, Instruction, Send
from pathway.sched.lanes import Lane, LaneScheduler, Run
from pathway.sched.memory import Memory
from pathway.sched.memory_requests import MemoryRequests, in_error
from pathway.sched.ownership import check_buffer, within
from pathway.sched.peers import Peer, Peers
from pathway.sched.plans import PlanRegistry
from pathway.sched.policies import Policy
from pathway.sched.script_actions import ScriptActions
from pathway.sched.scripts import SessionScripts
from pathway.sched.sessions import Session
from pathway.sched.slices import Slice, SliceBinder, why_invalid
from pathway.sched.timers import Timers
from pathway.transport import messages as m
from pathway.transport.terms import Terms

TokenOf = Callable[[int, str | None], int]
"""What proves a session: (session, the client's public key) -> token."""


@dataclass(frozen=True)
class Limits:
    """What the operator allows."""

    sessions: int = 1000
    plans_per_session: int = 10_000
    computation_bytes_per_session: int = 4 << 30


LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e6


class Clients:
    """`grace_until`: how long slices wait for islands that nobody has announced yet. `ending`: why no new work is taken
    ("" while it is)."""

    def __init__(
        self,
        cluster: Cluster,
        timers: Timers,
        numbers: random.Random,
        credits: int,
        lease_s: float,
        grace_until: float,
        token_of: TokenOf | None,
        limits: Limits,
        policy: Policy,
        memory: Memory,
        memory_patience_s: float,
    ) -> None:
        self.sessions: dict[int, Session] = {}
        self.waiting_slices: dict[tuple[int, int], Slice] = {}
        self._waiting_for: dict[str, dict[tuple[int, int], Slice]] = {}  # the same, by the island that they ask for
        self.cluster = cluster
        self.binder = SliceBinder(cluster)
        self.plans = PlanRegistry(cluster)
        self.accounts = Accounts()
        self.lanes = LaneScheduler(credits, self._run_failed, policy, memory, self.accounts)
        self.memory = MemoryRequests(self.sessions, self.lanes, timers, memory_patience_s, self._plan_failed)
        self.ending = ""
        self._failed_own: list[tuple[Session, int, ErrorInfo]] = []
        self._timers = timers
        self._numbers = numbers
        self.lease_s = lease_s
        self._grace_until = grace_until
        self._limits = limits
        self._token_of = token_of or (lambda session, key: numbers.getrandbits(62) + 1)
        timers.at(grace_until, self.bind_waiting)
        self.handlers: dict[type, Callable[[Peer, Any, float, list[Instruction]], None]] = {
            m.StartRun: self._start_run,
            m.StartScript: self._start_run,
            m.RegisterScript: self._register_script,
            m.ReleaseBuffers: self._release_buffers,
            m.PutBuffer: self._put_buffer,
            m.AssembleBuffer: self._assemble_buffer,
            m.RegisterComputation: self._register_computation,
            m.RegisterPlan: self._register_plan,
            m.AskMemory: self._ask_memory,
            m.ReleasePlan: self._release_plan,
            m.CancelRun: self._cancel_run,
            m.RequestSlice: self._request_slice,
            m.ReleaseSlice: self._release_slice,
        }

    # -- sessions ---------------------------------------------------------------------------------------------------

    def open(self, peer: Peer, peers: Peers, now: float, out: list[Instruction]) -> Session | None:
        hello = peer.hello
        if self.ending:
            out.append(Close(peer.key, m.Refused("ConnectError", f"the scheduler takes no new clients: {self.ending}")))
            return None
        if not hello.resume:
            if len(self.sessions) >= self._limits.sessions:
                reason = f"the scheduler has {len(self.sessions)} sessions, which is its limit (max_sessions)"
                out.append(Close(peer.key, m.Refused("LimitError", reason)))
                return None
            account = self.accounts.of_key(peer.public_key)
            refusal = account.may_open() if account is not None else None
            if refusal is not None:
                out.append(Close(peer.key, m.Refused(refusal.kind, refusal.message)))
                return None
            number = self._numbers.getrandbits(62) + 1
            token = self._token_of(number, peer.public_key)
            session = Session(number, hello.name, token, peer.key, now, peer.public_key)
            self.sessions[number] = session
            self.accounts.opened(session)
            if account is None:
                self.set_weight(session, hello.weight or None, hello.priority)
            else:
                session.share = min(hello.weight or 1.0, 1.0)
                self.set_weight(session, account.weight * session.share, min(hello.priority, account.terms.priority))
        else:
            found = self.sessions.get(hello.resume)
            if found is None:
                reason = f"session {hello.resume:x} is unknown here: its lease of {self.lease_s:g} s ran out"
                out.append(Close(peer.key, m.Refused("SessionLostError", reason)))
                return None
            if hello.token != found.token or peer.public_key != found.public_key:
                reason = "the session does not belong to this connection"
                out.append(Close(peer.key, m.Refused("PermissionDeniedError", reason)))
                return None
            if found.peer is not None:
                out.append(Close(found.peer, m.Refused("DisconnectedError", "another connection resumed the session")))
                peers.closed(found.peer, "another connection resumed the session", now, out)
            session, session.peer = found, peer.key
        peer.session = session
        return session

    def set_weight(self, session: Session, weight: float | None, priority: int | None) -> None:
        """What policies go by, from now on."""
        tenant = self.lanes.tenant(session.id)
        if weight is not None:
            tenant.weight = min(max(weight, LEAST_WEIGHT), MOST_WEIGHT)
            account = self.accounts.of(session.id)
            session.share = weight / account.weight if account is not None else 1.0
        if priority is not None:
            tenant.priority = priority

    def set_key_weight(self, account: Account, weight: float) -> None:
        """The weight of all sessions of a key, now and later."""
        account.weight = weight
        for session in account.sessions.values():
            self.set_weight(session, weight * session.share, None)

    def listed(self, keys: Mapping[str, tuple[str, Terms]], out: list[Instruction]) -> None:
        """The allow-list, with the terms of each key, as it is now."""
        for account in self.accounts.listed(keys):
            self.set_key_weight(account, account.terms.weight)
        self.lanes.limits_changed(out)

    def detached(self, session: Session, last_heard: float) -> None:
        """The session's connection is over. It may come back within its lease."""
        session.peer = None
        session.detached_at = last_heard
        detached_at = session.detached_at

        def lapsed(now: float, out: list[Instruction]) -> None:
            if session.peer is None and session.detached_at == detached_at:
                self.close(session, now, out)

        self._timers.at(detached_at + self.lease_s, lapsed)

    def close(self, session: Session, now: float, out: list[Instruction]) -> None:
        """Everything of the session goes, at once and everywhere."""
        if self.sessions.pop(session.id, None) is None:
            return
        session.peer = None
        lanes = [lane for lane in session.lanes if lane.error is None]
        for lane in lanes:
            lane.tell_all(m.CloseSession(session.id), out)
            lane.forget_session(session.id)
        self.memory.session_closed(session.id)
        self.lanes.session_closed(session.id, session.lanes, out)
        self.accounts.closed(session.id)
        session.scripts = None
        self.plans.drop_session(session)
        for held in session.slices.values():
            self.binder.release(held)
            self._wait_no_more((session.id, held.request.slice))
        self.bind_waiting(now, out)

    def resumed(self, session: Session, out: list[Instruction]) -> None:
        """Tell a connection that resumed its session what it may have missed (N-2)."""
        session.tell_again(out)
        for held in session.slices.values():
            if session.peer is not None and held.island and self.cluster.islands[held.island].lane is not None:
                out.append(Send(session.peer, self._bound(held)))

    # -- slices -----------------------------------------------------------------------------------------------------

    def _request_slice(self, peer: Peer, message: m.RequestSlice, now: float, out: list[Instruction]) -> None:
        session = owner(peer)
        held = session.slices.get(message.slice)
        if held is not None:  # sent again after a resume
            if held.island and self.cluster.islands[held.island].lane is not None:
                self.tell_bound(session, held, now, out)
            return
        reason = why_invalid(message) or self.ending
        if reason:
            session.tell(m.SliceRefused(message.slice, "SliceError", reason), now, self.lease_s, out)
            return
        account = self.accounts.of(session.id)
        limit = account.may_have_devices(message.devices) if account is not None else None
        if limit is not None:
            session.tell(m.SliceRefused(message.slice, limit.kind, limit.message), now, self.lease_s, out)
            return
        wanted = Slice(session.id, session.name, message, since=now)
        session.slices[message.slice] = wanted
        self._bind_or_wait(session, wanted, now, out)

    def _bind_or_wait(self, session: Session, wanted: Slice, now: float, out: list[Instruction]) -> None:
        grace = now < self._grace_until
        refusal = self.binder.bind(wanted, now, grace)
        key = (session.id, wanted.request.slice)
        if refusal is None:
            self._wait_no_more(key)
            self.tell_bound(session, wanted, now, out)
        elif refusal.final:
            self._wait_no_more(key)
            del session.slices[wanted.request.slice]
            session.tell(m.SliceRefused(wanted.request.slice, "SliceError", refusal.reason), now, self.lease_s, out)
        else:
            wanted.reason = refusal.reason
            self._wait(wanted)

    def _wait(self, wanted: Slice) -> None:
        key = (wanted.session, wanted.request.slice)
        self.waiting_slices[key] = self._waiting_for.setdefault(wanted.request.island, {})[key] = wanted

    def _wait_no_more(self, key: tuple[int, int]) -> None:
        wanted = self.waiting_slices.pop(key, None)
        if wanted is not None:
            here = self._waiting_for[wanted.request.island]
            del here[key]
            if not here:
                del self._waiting_for[wanted.request.island]

    def bind_waiting(self, now: float, out: list[Instruction], island: str = "") -> None:
        """Something has changed, on this island or ("") anywhere: look at the slices that may wait for it, in the
        order in which they came."""
        waiting = self.waiting_slices
        if island:
            named = self._waiting_for.get(island, {})
            if not named and "" not in self._waiting_for:
                return
            waiting = {**self._waiting_for.get("", {}), **named}
        for wanted in sorted(waiting.values(), key=lambda wanted: wanted.since):
            self._bind_or_wait(self.sessions[wanted.session], wanted, now, out)

    def tell_bound(self, session: Session, held: Slice, now: float, out: list[Instruction]) -> None:
        """Tell the client where its slice is."""
        session.tell(self._bound(held), now, self.lease_s, out)

    def _bound(self, held: Slice) -> m.SliceBound:
        island = self.cluster.islands[held.island]
        return m.SliceBound(
            held.request.slice,
            held.island,
            island.incarnation,
            held.devices,
            island.platform,
            island.devices_per_host,
        )

    def _release_slice(self, peer: Peer, message: m.ReleaseSlice, now: float, out: list[Instruction]) -> None:
        session = owner(peer)
        held = session.slices.pop(message.slice, None)
        if held is not None:
            self._wait_no_more((session.id, message.slice))
            island = held.island
            self.binder.release(held)
            held_now = session.reach()
            for plan in session.plans.values():
                if plan.error is None and not within(plan.reach, held_now):
                    plan.error = ErrorInfo("SliceError", f"slice {message.slice} was released", slice=message.slice)
            if island:
                self.bind_waiting(now, out, island)

    # -- plans and runs ---------------------------------------------------------------------------------------------

    def _register_computation(
        self, peer: Peer, message: m.RegisterComputation, now: float, out: list[Instruction]
    ) -> None:
        self.plans.add_computation(owner(peer), message, self._limits.computation_bytes_per_session)

    def _register_plan(self, peer: Peer, message: m.RegisterPlan, now: float, out: list[Instruction]) -> None:
        session = owner(peer)
        known = session.plans.get(message.plan)
        if known is not None and known.message == message:  # sent again after a resume
            if known.error is not None:
                session.tell(m.PlanFailed(message.plan, known.error), now, self.lease_s, out)
            return
        if len(session.plans) >= self._limits.plans_per_session:
            reason = f"the session has {len(session.plans)} plans, which is the limit (max_plans_per_session)"
            session.tell(m.PlanFailed(message.plan, ErrorInfo("LimitError", reason)), now, self.lease_s, out)
            return
        if not session.plan_numbers.use(message.plan):  # N-4
            error = ErrorInfo("ProtocolError", f"plan {message.plan}: its number was used before, or is out of order")
            session.tell(m.PlanFailed(message.plan, error), now, self.lease_s, out)
            return
        plan = session.plans[message.plan] = self.plans.register(session, message, out)
        if plan.error is not None:
            session.tell(m.PlanFailed(message.plan, plan.error), now, self.lease_s, out)
        for lane in plan.lanes:
            self.lanes.plan_registered(lane, (session.id, message.plan), plan.reach[lane.island])
        self.memory.plan_registered(session, message.plan, plan, now, out)

    def _ask_memory(self, peer: Peer, message: m.AskMemory, now: float, out: list[Instruction]) -> None:
        self.memory.ask(peer.key, owner(peer), message, now, out)

    def _register_script(self, peer: Peer, message: m.RegisterScript, now: float, out: list[Instruction]) -> None:
        session = owner(peer)
        if session.scripts is None:
            session.scripts = SessionScripts(ScriptActions(self, session))
        if len(session.scripts.registered) >= self._limits.plans_per_session:
            reason = f"the session has {len(session.scripts.registered)} scripts, which is the limit"
            error: ErrorInfo | None = ErrorInfo("LimitError", reason)
        elif message.script not in session.scripts.registered and not session.plan_numbers.use(message.script):
            error = ErrorInfo("ProtocolError", f"script {message.script}: its number was used before")
        else:
            error = session.scripts.register(message)
        if error is not None:
            session.tell(m.PlanFailed(message.script, error), now, self.lease_s, out)

    def _release_plan(self, peer: Peer, message: m.ReleasePlan, now: float, out: list[Instruction]) -> None:
        session = owner(peer)
        if session.scripts is None or not session.scripts.release(message.plan, out):
            self.forget_plan(session, message.plan, out)

    def forget_plan(self, session: Session, number: int, out: list[Instruction]) -> None:
        """The session starts no more runs of this plan."""
        plan = session.plans.pop(number, None)
        if plan is None:
            return
        key = (session.id, number)
        self.memory.forget_plan(key, ErrorInfo("ProgramError", f"plan {number} was released"), out)
        for part in plan.message.parts:
            island = self.cluster.islands.get(part.island)
            if island is not None and island.lane is not None and key in island.lane.registered:
                island.lane.forget_plan(key)
                self.lanes.send_behind(island.lane, session.id, m.DropPlan(*key), out)

    def _start_run(self, peer: Peer, message: m.StartRun | m.StartScript, now: float, out: list[Instruction]) -> None:
        session = owner(peer)
        if message.run <= session.last_run:
            return  # N-3
        session.last_run = message.run
        session.active_at = now
        if message.run >= m.OWN_RUNS:
            raise ProtocolError(f"run {message.run}: clients number theirs below {m.OWN_RUNS}")
        if session.scripts is not None and session.scripts.promises.hold(
            message, self._results_of(session, message), now
        ):
            return
        error = self.begin(session, message, now, out)
        if error is not None:
            session.tell(m.RunFailed(message.run, error), now, self.lease_s, out)

    def _results_of(self, session: Session, message: m.StartRun | m.StartScript) -> int:
        if isinstance(message, m.StartRun):
            plan = session.plans.get(message.plan)
            parts = plan.message.parts if plan is not None else ()
            return min(plan.message.results, sum(len(part.payload) for part in parts)) if plan is not None else 0
        assert session.scripts is not None
        registered = session.scripts.registered.get(message.script)
        return registered.script.results if registered is not None else 0

    def begin(
        self, session: Session, message: m.StartRun | m.StartScript, now: float, out: list[Instruction]
    ) -> ErrorInfo | None:
        """Start a run that has its inputs; returns why it cannot run, if so."""
        if isinstance(message, m.StartRun):
            started = self.submit(session, message.run, message.plan, message.first_result, message.arguments, now, out)
            return started if isinstance(started, ErrorInfo) else None
        if self.ending:
            return self._no_new_runs()
        if session.scripts is None:
            return ErrorInfo("ProgramError", f"script {message.script} is not registered")
        return session.scripts.start(message, now, out)

    def submit(
        self,
        session: Session,
        number: int,
        plan_number: int,
        first_result: int,
        arguments: tuple[Raw, ...],
        now: float,
        out: list[Instruction],
    ) -> tuple[Lane, ...] | ErrorInfo:
        """Start a run of a plan; returns where its parts are, or why it cannot run."""
        plan = session.plans.get(plan_number)
        if plan is None:
            return ErrorInfo("ProgramError", f"plan {plan_number} is not registered")
        if plan.error is not None:
            if plan.error.kind == "DeviceMemoryError":
                self.memory.spoil_new(session, plan, first_result, plan.error, out)
            return plan.error
        if self.ending and number < m.OWN_RUNS:
            return self._no_new_runs()
        if len(arguments) != len(plan.lanes):
            return ErrorInfo("ProtocolError", f"{len(arguments)} lists of arguments for {len(plan.lanes)} parts")
        for lane in plan.lanes:
            if lane.error is not None:
                return lane.error
        account = self.accounts.of(session.id)
        limit = account.may_have_bytes(1) if account is not None and number < m.OWN_RUNS else None
        if limit is not None:
            self.memory.spoil_new(session, plan, first_result, limit, out)
            return limit
        if not plan.lanes:
            self._tell_finished(session, (number,), now, out)
            return ()
        run = Run(
            session.id,
            number,
            plan_number,
            first_result,
            arguments,
            plan.lanes,
            now,
            plan.costs_us,
            plan.devices,
            plan.needs,
        )
        session.runs[number] = run
        self.lanes.submit(run, out)
        return plan.lanes

    def _no_new_runs(self) -> ErrorInfo:
        return ErrorInfo("SchedulerLostError", f"the scheduler takes no new runs: {self.ending}")

    def _cancel_run(self, peer: Peer, message: m.CancelRun, now: float, out: list[Instruction]) -> None:
        session = owner(peer)
        error = ErrorInfo("Cancelled", f"run {message.run} was cancelled before its results were there")
        run = session.runs.get(message.run)
        if run is not None:
            self.lanes.cancel(run, error, now, out)
        elif session.scripts is not None:
            session.scripts.cancel(message.run, error, now, out)

    def _put_buffer(self, peer: Peer, message: m.PutBuffer, now: float, out: list[Instruction]) -> None:
        session = owner(peer)
        session.active_at = now
        lane = self.cluster.lane(message.island, message.incarnation)
        if lane is not None:
            check_buffer(f"buffer {message.buffer}", message.island, message.layout, session.reach())
            session.lanes[lane] = None
            put = m.PutOnIsland(session.id, message.buffer, message.layout, message.data, source=message.source)
            account = self.accounts.of(session.id)
            if account is not None:
                nbytes = message.layout.physical.shard_nbytes * len(message.layout.physical.devices)
                limit = account.may_have_bytes(nbytes)
                if limit is not None:
                    self.lanes.send_behind(lane, session.id, in_error(put, limit), out)
                    return
                account.put(lane, nbytes)
            if lane.ledger is not None:
                self.memory.put(session, lane, put, now, out)
            else:
                self.lanes.send_behind(lane, session.id, put, out)

    def _assemble_buffer(self, peer: Peer, message: m.AssembleBuffer, now: float, out: list[Instruction]) -> None:
        session = owner(peer)
        lane = self.cluster.lane(message.island, message.incarnation)
        if lane is not None:
            check_buffer(f"buffer {message.buffer}", message.island, message.layout, session.reach())
            if len(message.sources) != len(message.layout.devices):
                raise ProtocolError(f"{len(message.sources)} shards for {len(message.layout.devices)} devices")
            session.lanes[lane] = None
            assemble = m.AssembleOnIsland(session.id, message.buffer, message.layout, message.sources)
            self.memory.assemble(lane, session.id, assemble)
            self.lanes.send_behind(lane, session.id, assemble, out)

    def _release_buffers(self, peer: Peer, message: m.ReleaseBuffers, now: float, out: list[Instruction]) -> None:
        session = owner(peer)
        lane = self.cluster.lane(message.island, message.incarnation)
        if lane is None:
            return
        buffers = message.buffers
        if session.scripts is not None:
            buffers = session.scripts.promises.releasable(lane, buffers)
        if buffers:
            self.lanes.send_behind(lane, session.id, m.FreeBuffers(session.id, buffers), out)

    # -- how runs and plans end --------------------------------------------------------------------------------------

    def parts_finished(self, lane: Lane, message: m.PartsFinished, now: float, out: list[Instruction]) -> None:
        part_us = message.part_us if len(message.part_us) == len(message.parts) else ()
        by_session: dict[int, list[int]] = {}
        for run in self.lanes.parts_finished(lane, message.parts, out, part_us):
            by_session.setdefault(run.session, []).append(run.number)
        for number, runs in by_session.items():
            session = self.sessions[number]
            for run_number in runs:
                del session.runs[run_number]
            self._tell_finished(session, tuple(runs), now, out)

    def _tell_finished(self, session: Session, runs: tuple[int, ...], now: float, out: list[Instruction]) -> None:
        """The client learns of its own runs, the session's scripts of theirs."""
        if session.scripts is not None:
            for number in runs:
                if number >= m.OWN_RUNS:
                    session.scripts.run_finished(number, now, out)
            runs = tuple(number for number in runs if number < m.OWN_RUNS)
        if runs:
            session.tell_finished(runs, now, self.lease_s, out)

    def decided(self, message: m.Decided, now: float, out: list[Instruction]) -> None:
        session = self.sessions.get(message.session)
        if session is not None and session.scripts is not None:
            session.scripts.decided(message, now, out)

    def settle(self, now: float, out: list[Instruction]) -> None:
        """What failures of runs mean to scripts, when nothing else is half done."""
        while self._failed_own:
            session, run, error = self._failed_own.pop(0)
            if session.scripts is not None:
                session.scripts.run_failed(run, error, now, out)

    def part_refused(self, lane: Lane, message: m.PartRefused, now: float, out: list[Instruction]) -> None:
        session = self.sessions.get(message.session)
        plan = session.plans.get(message.plan) if session else None
        if session is not None and plan is not None and plan.error is None and lane in plan.lanes:
            self._plan_failed(session, message.plan, message.error, now, out)

    def _plan_failed(self, session: Session, number: int, error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        """The plan can never run."""
        plan = session.plans[number]
        plan.error = error
        self.memory.forget_plan((session.id, number), error, out)
        session.tell(m.PlanFailed(number, error), now, self.lease_s, out)
        queued = [run for run in session.runs.values() if run.plan == number and not run.open]
        if plan.needs is not None:
            for run in queued:
                self.memory.spoil_queued(run, error)
        self.lanes.fail_queued(queued, error, now, out)

    def _run_failed(self, run: Run, error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        session = self.sessions.get(run.session)
        if session is not None:
            session.runs.pop(run.number, None)
            if run.number >= m.OWN_RUNS:
                self._failed_own.append((session, run.number, error))
            else:
                session.tell(m.RunFailed(run.number, error), now, self.lease_s, out)

    # -- islands -----------------------------------------------------------------------------------------------------

    def island_formed(self, island: Island, lane: Lane, now: float, out: list[Instruction]) -> None:
        """Bind the slices that it held before to its new incarnation, and send what it has to compile (V-2)."""
        held_here = {held for slices in self.binder.holders.get(island.name, {}).values() for held in slices}
        self.memory.island_formed(lane, island.memory_bytes, island.devices)
        for held in sorted(held_here, key=lambda held: (held.since, held.session, held.request.slice)):
            session = self.sessions[held.session]
            if self.binder.still_fits(held, island):
                self.binder.promise(held)
                self.tell_bound(session, held, now, out)
            else:
                self.binder.release(held)
                held.reason = f"island {island.name} came back with other devices"
                self._wait(held)
        for session in self.sessions.values():
            self.plans.register_again(session, lane, out)
        self.bind_waiting(now, out, island.name)

    def island_lost(self, lane: Lane, error: ErrorInfo, now: float, out: list[Instruction]) -> None:
        notice = m.IslandLost(lane.island, lane.incarnation, error)
        for session in self.sessions.values():
            session.tell(notice, now, self.lease_s, out)
            session.lanes.pop(lane, None)
        for other in self.cluster.islands.values():
            if other.lane is not None and other.lane.neighbours.get(lane.island) == lane.incarnation:
                del other.lane.neighbours[lane.island]
                other.lane.tell_all(notice, out)
        self.memory.lane_lost(lane, error, out)
        self.accounts.lane_lost(lane)
        self.lanes.lane_lost(lane, error, now, out)

    def refuse_waiting(self, now: float, out: list[Instruction]) -> None:
        """No slice is bound any more."""
        for wanted in self.waiting_slices.values():
            session = self.sessions[wanted.session]
            del session.slices[wanted.request.slice]
            refusal = m.SliceRefused(wanted.request.slice, "SliceError", f"the scheduler: {self.ending}")
            session.tell(refusal, now, self.lease_s, out)
        self.waiting_slices.clear()
        self._waiting_for.clear()


def owner(peer: Peer) -> Session:
    """The session of a client's connection."""
    assert peer.session is not None
    return peer.session
