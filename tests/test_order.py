"""O-1 to O-8, each broken on purpose: what checks the rule must find it, or it checks nothing.

Most are found by the simulation, whose failures name the seed that replays them. That the rules hold when nothing
breaks them is what tests/test_simnet.py plays.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import pytest
import trio
from sched_world import NO_ARGUMENTS, cluster_of

from pathway.actor import Actor
from pathway.executor import gangs as g
from pathway.executor import leader_state
from pathway.executor.follower import FollowerCore
from pathway.executor.leader import LeaderCore
from pathway.sched.core import SchedulerCore
from pathway.sched.events import Instruction, MessageReceived, Send
from pathway.sched.lanes import LaneScheduler
from pathway.sched.queues import Run
from pathway.testing.simnet import SimNet, SimulationFailure
from pathway.transport import messages as m
from pathway.transport.sockets import Dealer, Delivery, Router, hello


def is_found(what: str, clients: int = 2, validate: bool = False, seeds: int = 20) -> bool:
    """Whether one of some histories without faults ends with `what`."""
    for seed in range(seeds):
        try:
            SimNet(seed, clients=clients, validate=validate).run(limit_s=60.0)
        except SimulationFailure as failure:
            text = str(failure)
            if what in text and f"seed {seed}," in text:
                return True
    return False


def test_o1_a_follower_that_starts_gangs_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = FollowerCore.handle
    held: list[g.Instruction] = []

    def disorderly(self: FollowerCore, event: object, now: float) -> list[g.Instruction]:
        out: list[g.Instruction] = []
        for instruction in handle(self, event, now):
            if isinstance(instruction, g.Launch) and not held:
                held.append(instruction)
            else:
                out.append(instruction)
                if isinstance(instruction, g.Launch):
                    out += held
                    held.clear()
        return out

    monkeypatch.setattr(FollowerCore, "handle", disorderly)
    assert is_found("O-1", clients=1)


def test_o2_a_leader_that_asks_one_host_for_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    settled = LeaderCore._edge_settled

    def hasty(self: LeaderCore, part: leader_state.Part, edge: int, host: int, error: Any) -> None:
        if error is None and edge in part.awaited_edges:
            part.awaited_edges[edge] = {host}
        settled(self, part, edge, host, error)

    monkeypatch.setattr(LeaderCore, "_edge_settled", hasty)
    assert is_found("O-2")


def test_o2_a_leader_that_does_not_wait_for_what_makes_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    find = LeaderCore._open

    def trusting(self: LeaderCore, session: leader_state.Session, number: int) -> leader_state.Buffer | None:
        buffer = find(self, session, number)
        known = buffer is None or buffer.defined
        return buffer if known else leader_state.Buffer("a buffer that is hoped for", defined=True)

    monkeypatch.setattr(LeaderCore, "_open", trusting)
    assert is_found("O-2")


def test_o3_a_scheduler_that_sends_a_run_to_one_island_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch, finished = LaneScheduler._dispatch, LaneScheduler.parts_finished
    later: dict[tuple[int, int], list[Instruction]] = {}

    def stepwise(self: LaneScheduler, run: Run, out: list[Instruction]) -> None:
        sent: list[Instruction] = []
        dispatch(self, run, sent)
        later[run.session, run.number] = sent[1:]
        out += sent[:1]

    def and_then(self: LaneScheduler, lane: Any, parts: Any, out: list[Instruction], part_us: Any = ()) -> list[Run]:
        for key in parts:
            out += later.pop(key, ())
        return finished(self, lane, parts, out, part_us)

    monkeypatch.setattr(LaneScheduler, "_dispatch", stepwise)
    monkeypatch.setattr(LaneScheduler, "parts_finished", and_then)
    assert is_found("O-3")


def test_o3_a_leader_that_begins_a_run_when_its_inputs_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = LeaderCore.handle
    held: list[g.PartSubmitted] = []

    def late(self: LeaderCore, event: Any, now: float) -> list[g.Instruction]:
        if isinstance(event, g.PartSubmitted):
            if self._sessions[event.message.session].plans[event.message.plan].info.edges:
                held.append(event)
                return []
        elif isinstance(event, g.HostReported) and isinstance(event.message, m.EdgeArrived) and held:
            return handle(self, held.pop(0), now) + handle(self, event, now)
        return handle(self, event, now)

    monkeypatch.setattr(LeaderCore, "handle", late)
    assert is_found("O-3")


def test_o4_a_release_that_overtakes_the_sessions_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaneScheduler, "send_behind", LaneScheduler._forward)
    assert is_found("failed without a fault: DeletedError")


def test_o4_a_run_that_overtakes_another_of_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = LaneScheduler.submit

    def pushing(self: LaneScheduler, run: Run, out: list[Instruction]) -> None:
        submit(self, run, out)
        for lane in run.lanes:
            flow = lane.flows.get(run.session)
            if flow is not None and len(flow.entries) > 2 and isinstance(flow.entries[-2], Run):
                flow.entries[-1], flow.entries[-2] = flow.entries[-2], flow.entries[-1]

    monkeypatch.setattr(LaneScheduler, "submit", pushing)
    assert is_found("O-4")


def test_o5_a_scheduler_that_tells_every_host_of_an_island(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch = LaneScheduler._dispatch

    def talkative(self: LaneScheduler, run: Run, out: list[Instruction]) -> None:
        dispatch(self, run, out)
        for lane in run.lanes:
            start = next(
                one.message for one in out if isinstance(one, Send) and isinstance(one.message, m.StartPart)
            )  # fmt: skip
            out += [Send(host, start) for host in lane.hosts[1:]]

    monkeypatch.setattr(LaneScheduler, "_dispatch", talkative)
    assert is_found("O-5")


def lines_of_a_run(islands: int, hosts: int) -> int:
    """Lines of Python that the core goes through for a run of one island."""
    core, session, executor = cluster_of(islands, hosts)
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    for run in range(1, 4):  # the first learns what the plan takes
        before, lines = sys.gettrace(), 0
        sys.settrace(trace)
        try:
            core.handle(MessageReceived(b"client", m.StartRun(run, 1, 1, (NO_ARGUMENTS,))), 1.0)
            core.handle(MessageReceived(executor, m.PartsFinished(((session, run),))), 1.0)
        finally:
            sys.settrace(before)
    return lines


def test_o5_the_work_for_a_run_does_not_grow_with_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_of_a_run(1, 1) == lines_of_a_run(100, 1) == lines_of_a_run(1, 100)
    handle = SchedulerCore.handle

    def thorough(self: SchedulerCore, event: Any, now: float) -> list[Instruction]:
        for island in self.cluster.islands.values():
            assert island.name
        return handle(self, event, now)

    monkeypatch.setattr(SchedulerCore, "handle", thorough)
    assert lines_of_a_run(1, 1) < lines_of_a_run(100, 1)


class Echo:
    """A core whose instructions are its events."""

    def handle(self, event: m.Ping, now: float) -> Iterable[m.Ping]:
        return [event]

    def next_deadline(self) -> None:
        return None


def frames_of_a_batch(messages: int) -> int:
    """Frames in which what one batch of events causes arrives at the other end of a socket."""

    async def main() -> int:
        with trio.fail_after(30), Router.bind("tcp://127.0.0.1:0") as router:
            dealer = await Dealer.connect(router.address, hello("peer"))
            await router.receive_batch()
            Actor(Echo(), dealer.post, dealer.flush, tick=m.Ping(0)).deliver(map(m.Ping, range(messages)))
            frames: list[Delivery] = []
            while sum(len(frame.messages) for frame in frames) < messages:
                frames += [frame for frame in await router.receive_batch() if isinstance(frame, Delivery)]
            dealer.close()
            assert [message.number for frame in frames for message in frame.messages] == list(range(messages))
            return len(frames)

    return trio.run(main)


def test_o6_what_a_batch_causes_leaves_as_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    assert frames_of_a_batch(20) == 1
    post = Dealer.post

    def eager(self: Dealer, *what: Any) -> None:
        post(self, *what)
        self.flush()

    monkeypatch.setattr(Dealer, "post", eager)
    assert frames_of_a_batch(20) > 1


def test_o7_a_scheduler_that_sends_all_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaneScheduler, "_has_room", lambda self, group, session: True)
    assert is_found("O-7", validate=True)


def test_o8_a_leader_that_keeps_what_waits_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = leader_state.waits

    def silent(sessions: dict[int, leader_state.Session], now: float) -> list[tuple[int, int, str, float]]:
        return [wait for wait in waits(sessions, now) if "waits for" not in wait[2]]

    monkeypatch.setattr(leader_state, "waits", silent)
    assert is_found("O-8", validate=True)


def test_o8_a_scheduler_that_gives_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaneScheduler, "reason", lambda self, run: ("", ""))
    assert is_found("O-8", validate=True)
