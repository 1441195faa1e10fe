"""The leader's core: events in, instructions out."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from pathway.dataflow.layout import Aval, Layout, Sharding
from pathway.dataflow.plan import Edge, Execute, Gang, Part, Send
from pathway.errors import ErrorInfo
from pathway.executor.gangs import (
    Assemble,
    Begin,
    DropSession,
    EdgeInfo,
    End,
    ForgetPlan,
    Free,
    GangInfo,
    GiveUp,
    HostReported,
    Launch,
    PartInfo,
    PartRegistered,
    PartSubmitted,
    Poison,
    Put,
    SendToFollowers,
    SendToScheduler,
    part_info,
    with_result_gangs,
)
from pathway.executor.gangs import submitted as event_of
from pathway.executor.leader import LeaderCore
from pathway.transport import messages as m

S = 5  # the session of these tests
BROKEN = ErrorInfo("ExecutionError", "broken")


def layout(*devices: int) -> Layout:
    return Layout(Aval((), "float32"), Sharding((("d", len(devices)),), ()), devices)


def info(*gangs: GangInfo, edges: dict[int, EdgeInfo] | None = None) -> PartInfo:
    """The part with these gangs; `dependents` are filled in."""
    full = [
        msgspec.structs.replace(
            gang, dependents=tuple(number for number, other in enumerate(gangs) if me in other.needs)
        )
        for me, gang in enumerate(gangs)
    ]
    return PartInfo("part", tuple(full), edges or {}, single=len(gangs) == 1 and not edges)


class Leader:
    """The core, validated after every event, with plans that are bound at once."""

    def __init__(self, hosts: int = 1, devices_per_host: int = 1) -> None:
        self.hosts = hosts
        self.core = LeaderCore(hosts, devices_per_host)

    def handle(self, event: Any) -> list[Any]:
        out = self.core.handle(event, 0.0)
        self.core.validate()
        return out

    def register(self, plan: int, part: PartInfo, bound: bool = True) -> None:
        assert self.handle(PartRegistered(S, plan, part)) == []
        if bound:
            for host in range(self.hosts):
                self.host(host, m.PartBound(S, plan))

    def host(self, host: int, message: m.Message) -> list[Any]:
        return self.handle(HostReported(host, message))

    def start(self, run: int, plan: int, *arguments: int | bytes, first: int = 0) -> list[Any]:
        """Without the Begin that every start begins with."""
        out = self.handle(submitted(run, plan, *arguments, first=first))
        out = [one for one in out if one != SendToFollowers(submitted(run, plan, first=first).message)]
        assert isinstance(out[0], Begin)
        return out[1:]

    def done(self, run: int, *gangs: int, host: int = 0) -> list[Any]:
        return self.host(host, m.GangsDone(tuple((S, run, gang) for gang in gangs)))

    def put(self, buffer: int) -> None:
        self.handle(m.PutOnIsland(S, buffer, layout(0), b"x"))


def submitted(run: int, plan: int, *arguments: int | bytes, first: int = 0) -> PartSubmitted:
    return PartSubmitted(m.StartPart(S, run, plan, first or run * 100, Raw(b"\x90")), arguments)


def finished(run: int) -> list[Any]:
    return [End(S, run), SendToScheduler(m.PartsFinished(((S, run),)))]


ONE = info(GangInfo(reads=(0,), results=(0,)))
TAKES = info(GangInfo(reads=(0,), donates=(0,), results=(0,)))
FROM_EDGE = info(GangInfo(edges=(7,), results=(0,)), edges={7: EdgeInfo("west", (0,), (0,))})


def test_a_run_whose_inputs_are_there_starts_at_once() -> None:
    leader = Leader()
    leader.register(1, ONE)
    leader.put(1)
    start = submitted(10, 1, 1)
    assert leader.handle(start) == [Begin(start.message, (1,)), Launch(S, 10, 0)]
    assert leader.done(10, 0) == finished(10)
    assert leader.start(11, 1, 1000) == [Launch(S, 11, 0)]  # run 10's result
    assert leader.start(12, 1, 1100) == [Launch(S, 12, 0)]  # run 11's, which is placed though not computed


def test_hosts_get_everything_in_the_leaders_order() -> None:
    leader = Leader(hosts=2)
    leader.register(1, ONE)
    put = m.PutOnIsland(S, 1, layout(0, 1), b"x")
    assert leader.handle(put) == [SendToFollowers(put), Put(put)]
    start = submitted(10, 1, 1)
    assert leader.handle(start) == [
        SendToFollowers(start.message),
        Begin(start.message, (1,)),
        SendToFollowers(m.LaunchGang(S, 10, 0)),
        Launch(S, 10, 0),
    ]
    free = m.FreeBuffers(S, (1, 99))
    assert leader.handle(free) == [SendToFollowers(m.FreeBuffers(S, (1,))), Free(S, (1,))]
    assert leader.done(10, 0, host=1) == []
    assert leader.done(10, 0) == finished(10)


def test_a_gang_waits_until_its_edge_has_arrived_on_all_hosts_that_need_it() -> None:
    leader = Leader(hosts=3)
    leader.register(1, info(GangInfo(edges=(7,)), edges={7: EdgeInfo("west", (1, 2), (0,))}))
    leader.register(2, info(GangInfo()))
    assert leader.start(10, 1) == []
    assert leader.start(11, 2) == [SendToFollowers(m.LaunchGang(S, 11, 0)), Launch(S, 11, 0)]  # overtakes
    assert leader.host(2, m.EdgeArrived(S, 10, 7)) == []
    assert leader.host(2, m.EdgeArrived(S, 10, 7)) == []  # once is enough
    assert "edge 7 from island west on host 1" in leader.core.waits(3.0)[0][2]
    assert leader.host(1, m.EdgeArrived(S, 10, 7)) == [
        SendToFollowers(m.LaunchGang(S, 10, 0)),
        Launch(S, 10, 0),
    ]


def test_a_gang_waits_until_its_plan_is_bound_everywhere_and_runs_keep_their_order() -> None:
    leader = Leader(hosts=2)
    leader.register(1, info(GangInfo()), bound=False)
    assert leader.start(10, 1) == leader.start(11, 1) == []
    assert "compiled on host 0, 1" in leader.core.waits(0.0)[0][2]
    leader.host(1, m.PartBound(S, 1))
    out = leader.host(0, m.PartBound(S, 1))
    assert [one for one in out if isinstance(one, Launch)] == [Launch(S, 10, 0), Launch(S, 11, 0)]


def test_a_buffer_that_is_put_must_have_come_to_all_its_hosts() -> None:
    leader = Leader(hosts=3)
    leader.register(1, ONE)
    leader.handle(m.PutOnIsland(S, 1, layout(0, 2)))
    assert leader.start(10, 1, 1) == []
    assert "buffer 1 (the client's data) on host 0, 2" in leader.core.waits(0.0)[0][2]
    assert leader.host(0, m.BufferArrived(S, 1)) == []
    assert Launch(S, 10, 0) in leader.host(2, m.BufferArrived(S, 1))


def test_an_unready_run_delays_what_reads_its_results_and_nobody_else() -> None:
    leader = Leader()
    leader.register(1, FROM_EDGE)
    leader.register(2, ONE)
    assert leader.start(10, 1) == []
    assert leader.start(11, 2, 1000) == []
    assert leader.start(12, 2, b"x") == [Launch(S, 12, 0)]
    assert leader.host(0, m.EdgeArrived(S, 10, 7)) == [Launch(S, 10, 0), Launch(S, 11, 0)]


def test_gangs_of_one_part_wait_for_one_another_only_where_they_must() -> None:
    leader = Leader()
    part = info(
        GangInfo(edges=(7,)),
        GangInfo(needs=(0,), producers=(0,)),
        GangInfo(),
        GangInfo(needs=(2,)),
        edges={7: EdgeInfo("west", (0,), (0,))},
    )
    leader.register(1, part)
    assert leader.start(10, 1) == [Launch(S, 10, 2), Launch(S, 10, 3)]
    assert leader.done(10, 2, 3) == []
    assert leader.host(0, m.EdgeArrived(S, 10, 7)) == [Launch(S, 10, 0), Launch(S, 10, 1)]
    assert leader.done(10, 0, 1) == finished(10)


def test_a_buffer_is_freed_when_it_is_released_and_nobody_is_to_read_it_any_more() -> None:
    leader = Leader()
    leader.register(1, FROM_EDGE)
    leader.register(2, info(GangInfo(reads=(0, 1))))
    leader.put(1)
    leader.start(10, 1)
    assert leader.start(11, 2, 1, 1000) == []
    assert leader.handle(m.FreeBuffers(S, (1, 1000))) == []
    # Both at once, behind the gang that read them last, in the order's own sequence.
    assert leader.host(0, m.EdgeArrived(S, 10, 7)) == [Launch(S, 10, 0), Launch(S, 11, 0), Free(S, (1, 1000))]
    assert leader.handle(m.FreeBuffers(S, (1, 1000))) == []


def test_a_result_that_is_released_before_it_is_made_is_freed_when_it_is() -> None:
    leader = Leader()
    leader.register(1, FROM_EDGE)
    leader.start(10, 1)
    assert leader.handle(m.FreeBuffers(S, (1000,))) == []
    assert leader.host(0, m.EdgeArrived(S, 10, 7)) == [Launch(S, 10, 0), Free(S, (1000,))]


def test_a_put_that_is_released_before_its_data_comes_is_freed_when_it_has() -> None:
    leader = Leader()
    leader.handle(m.PutOnIsland(S, 1, layout(0)))
    assert leader.handle(m.FreeBuffers(S, (1,))) == []
    assert leader.host(0, m.BufferArrived(S, 1)) == [Free(S, (1,))]


def test_who_takes_a_buffer_waits_for_its_earlier_readers() -> None:
    leader = Leader()
    leader.register(1, info(GangInfo(edges=(7,), reads=(0,)), edges={7: EdgeInfo("west", (0,), (0,))}))
    leader.register(2, TAKES)
    leader.put(1)
    assert leader.start(10, 1, 1) == []
    assert leader.start(11, 2, 1) == []
    assert "earlier readers of buffer 1" in leader.core.waits(0.0)[-1][2]
    assert leader.start(12, 2, 1)[0].error.kind == "DeletedError"  # it is taken already
    assert leader.host(0, m.EdgeArrived(S, 10, 7)) == [Launch(S, 10, 0), Launch(S, 11, 0)]
    assert leader.handle(m.FreeBuffers(S, (1,))) == [Free(S, (1,))]


def test_who_takes_a_result_waits_for_the_rest_of_the_run_that_made_it() -> None:
    leader = Leader()
    part = info(
        GangInfo(results=(0,)),
        GangInfo(needs=(0,), producers=(0,), edges=(7,), rereads=(0,)),
        edges={7: EdgeInfo("west", (0,), (1,))},
    )
    leader.register(1, part)
    leader.register(2, TAKES)
    assert leader.start(10, 1) == [Launch(S, 10, 0)]
    assert leader.start(11, 2, 1000) == []
    assert leader.host(0, m.EdgeArrived(S, 10, 7)) == [Launch(S, 10, 1), Launch(S, 11, 0)]


def test_a_taken_buffer_is_gone_for_later_runs_also_on_the_short_way() -> None:
    leader = Leader()
    leader.register(1, TAKES)
    leader.put(1)
    assert leader.start(10, 1, 1) == [Launch(S, 10, 0)]
    assert isinstance(leader.start(11, 1, 1)[0], Poison)
    assert leader.handle(m.FreeBuffers(S, (1,))) == [Free(S, (1,))]


def test_an_unknown_buffer_poisons_at_once() -> None:
    leader = Leader()
    leader.register(1, ONE)
    poison, end, failed = leader.start(10, 1, 77)
    assert isinstance(poison, Poison)
    assert poison.error.kind == "DeletedError"
    assert "buffer 77" in poison.error.message
    assert [end, failed] == [End(S, 10), SendToScheduler(m.PartFailed(S, 10, poison.error))]
    # Whatever reads its result has the same error, its root.
    assert leader.start(11, 1, 1000)[0] == Poison(S, 11, 0, poison.error)


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_failed_edge_poisons_what_needs_it_and_lets_the_rest_run(hosts: int) -> None:
    leader = Leader(hosts)
    part = info(
        GangInfo(edges=(7,), results=(0,)),
        GangInfo(needs=(0,), producers=(0,), results=(1,)),
        GangInfo(needs=(0,), results=(2,)),  # after it, but not of it
        edges={7: EdgeInfo("west", tuple(range(hosts)), (0,))},
    )
    leader.register(1, part)
    leader.start(10, 1)
    out = leader.host(hosts - 1, m.EdgeArrived(S, 10, 7, BROKEN))
    if hosts == 2:
        assert [one.message for one in out if isinstance(one, SendToFollowers)] == [
            m.PoisonGang(S, 10, 0, BROKEN),
            m.PoisonGang(S, 10, 1, BROKEN),
            m.LaunchGang(S, 10, 2),
        ]
    assert [one for one in out if not isinstance(one, SendToFollowers)] == [
        Poison(S, 10, 0, BROKEN),
        Poison(S, 10, 1, BROKEN),
        Launch(S, 10, 2),
    ]
    for host in range(hosts - 1):
        assert leader.done(10, 2, host=host) == []
    assert leader.done(10, 2, host=hosts - 1) == [End(S, 10), SendToScheduler(m.PartFailed(S, 10, BROKEN))]


def test_a_lost_island_poisons_what_still_waits_for_it() -> None:
    leader = Leader(hosts=2)
    edges = {7: EdgeInfo("west", (0, 1), (0,)), 8: EdgeInfo("north", (0,), (1,))}
    leader.register(1, info(GangInfo(edges=(7,)), GangInfo(edges=(8,)), edges=edges))
    leader.start(10, 1)
    leader.host(0, m.EdgeArrived(S, 10, 7))
    out = leader.handle(m.IslandLost("west", 1, BROKEN))
    assert out == [SendToFollowers(m.PoisonGang(S, 10, 0, BROKEN)), Poison(S, 10, 0, BROKEN)]
    assert leader.handle(m.IslandLost("south", 1, BROKEN)) == []


def test_a_gang_that_fails_poisons_its_readers_and_its_results() -> None:
    leader = Leader()
    part = info(
        GangInfo(results=(0,)),
        GangInfo(needs=(0,), producers=(0,), edges=(7,)),
        edges={7: EdgeInfo("west", (0,), (1,))},
    )
    leader.register(1, part)
    leader.register(2, info(GangInfo(reads=(0,), edges=(7,)), edges={7: EdgeInfo("west", (0,), (0,))}))
    assert leader.start(10, 1) == [Launch(S, 10, 0)]
    assert leader.start(11, 2, 1000) == []
    assert leader.host(0, m.GangFailed(S, 10, 0, BROKEN)) == [
        Poison(S, 10, 1, BROKEN),
        End(S, 10),
        SendToScheduler(m.PartFailed(S, 10, BROKEN)),
        Poison(S, 11, 0, BROKEN),
        End(S, 11),
        SendToScheduler(m.PartFailed(S, 11, BROKEN)),
    ]
    assert leader.start(12, 2, 1000)[0] == Poison(S, 12, 0, BROKEN)


def test_data_that_fails_to_come_poisons_its_readers() -> None:
    leader = Leader(hosts=2)
    leader.register(1, ONE)
    leader.handle(m.PutOnIsland(S, 1, layout(0, 1)))
    leader.start(10, 1, 1)
    assert Poison(S, 10, 0, BROKEN) in leader.host(1, m.BufferArrived(S, 1, BROKEN))
    assert leader.start(11, 1, 1)[1] == Poison(S, 11, 0, BROKEN)
    assert leader.host(0, m.BufferArrived(S, 1)) == []
    assert leader.handle(m.FreeBuffers(S, (1,)))[-1] == Free(S, (1,))


def test_a_plan_that_does_not_compile_poisons_its_runs_and_is_refused_once() -> None:
    leader = Leader(hosts=2)
    leader.register(1, ONE, bound=False)
    leader.start(10, 1, b"x")
    out = leader.host(1, m.PartBound(S, 1, BROKEN))
    assert out[0] == SendToScheduler(m.PartRefused(S, 1, BROKEN))
    assert out[-1] == SendToScheduler(m.PartFailed(S, 10, BROKEN))
    assert leader.host(0, m.PartBound(S, 1, ErrorInfo("CompileError", "me too"))) == []
    assert Poison(S, 11, 0, BROKEN) in leader.start(11, 1, b"x")


def test_cancelling_poisons_what_has_no_place_yet() -> None:
    leader = Leader()
    leader.register(1, info(GangInfo(), GangInfo(edges=(7,)), edges={7: EdgeInfo("west", (0,), (1,))}))
    leader.start(10, 1)
    cancelled = ErrorInfo("Cancelled", "by the user")
    assert leader.handle(m.CancelPart(S, 10, cancelled)) == [GiveUp(S, 10), Poison(S, 10, 1, cancelled)]
    assert leader.handle(m.CancelPart(S, 99, cancelled)) == [GiveUp(S, 99)]  # over: what it sent may be under way
    assert leader.handle(m.CancelPart(S, 10, cancelled)) == [GiveUp(S, 10)]
    assert leader.done(10, 0)[-1] == SendToScheduler(m.PartFailed(S, 10, cancelled))


def test_a_closed_session_leaves_nothing() -> None:
    leader = Leader(hosts=2)
    leader.register(1, FROM_EDGE)
    leader.handle(m.PutOnIsland(S, 1, layout(1)))
    leader.start(10, 1)
    close = m.CloseSession(S)
    assert leader.handle(close) == [SendToFollowers(close), DropSession(S)]
    assert leader.core.is_idle
    for late in (m.EdgeArrived(S, 10, 7), m.BufferArrived(S, 1), m.PartBound(S, 1), m.GangsDone(((S, 10, 0),))):
        assert leader.host(1, late) == []


def test_a_dropped_plan_lives_until_its_runs_have_ended() -> None:
    leader = Leader(hosts=2)
    leader.register(1, info(GangInfo()))
    leader.start(10, 1)
    assert leader.handle(m.DropPlan(S, 1)) == []
    leader.done(10, 0)
    assert leader.done(10, 0, host=1)[2:] == [SendToFollowers(m.DropPlan(S, 1)), ForgetPlan(S, 1)]
    assert isinstance(leader.handle(submitted(11, 1))[0], SendToScheduler)  # PartFailed
    assert leader.handle(m.DropPlan(S, 1)) == []


# -- from plans to conditions ----------------------------------------------------------------------------------------


def part_of(*gangs: Gang, slots: int = 10, **fields: Any) -> Part:
    given = {"arguments": (), "results": (), "edges_in": (), "edges_out": (), **fields}
    return Part("plan", "east", "cpu", (layout(0, 1),) * slots, gangs=gangs, **given)


def test_part_info_reads_conditions_off_the_steps() -> None:
    edge = Edge(3, "west", "east", 0, 5, layout(0), layout(1, 2, 3))
    part = part_of(
        Gang((Execute(0, "a", (0, 1), (0, 1), (2,)), Send(2, 9)), arguments=(0, 1)),
        Gang((Execute(1, "b", (0, 1), (2, 5), (4,), donates=(1,), frees=(5,)),), waits=(3,)),
        Gang((Execute(2, "c", (0, 1), (1, 2), (6,), donates=(0,), frees=(1, 2)),)),
        arguments=(0, 1),
        results=((0, 4), (1, 6)),
        edges_in=(edge,),
    )
    found = part_info(part, devices_per_host=2)
    assert found.gangs == (
        GangInfo(reads=(0, 1), dependents=(1, 2)),
        GangInfo(needs=(0,), producers=(0,), edges=(3,), results=(0,), dependents=(2,)),
        # It frees slot 2, which gang 1 also reads, and takes argument 1, which gang 0 also reads.
        GangInfo(needs=(0, 1), producers=(0,), reads=(1,), donates=(1,), results=(1,)),
    )
    assert found.edges == {3: EdgeInfo("west", (0, 1), (1,))}
    assert not found.single


def test_results_that_no_step_touches_get_gangs_of_their_own() -> None:
    edge = Edge(3, "west", "east", 0, 5, layout(0), layout(0))
    part = with_result_gangs(part_of(arguments=(0,), results=((0, 5), (1, 0), (2, 5)), edges_in=(edge,)))
    assert part.gangs == (Gang((), waits=(3,)), Gang((), arguments=(0,)))
    found = part_info(part, devices_per_host=2)
    assert found.gangs == (GangInfo(edges=(3,), results=(0, 2)), GangInfo(reads=(0,), results=(1,)))
    whole = part_of(Gang((Execute(0, "a", (0,), (), (2,)),)), results=((0, 2),))
    assert with_result_gangs(whole) is whole


def test_a_result_that_later_gangs_read_is_reread() -> None:
    part = part_of(
        Gang((Execute(0, "a", (0,), (), (2,)),)), Gang((Execute(1, "b", (0,), (2,), (3,)),)), results=((0, 2), (1, 3))
    )
    assert part_info(part, 2).gangs[1] == GangInfo(needs=(0,), producers=(0,), results=(1,), rereads=(0,))


# -- what a part costs -----------------------------------------------------------------------------------------------


def test_a_small_part_is_cheap_and_its_instructions_do_not_grow_with_shards() -> None:
    runs = 5000
    for shards in (1, 4096):
        part = part_of(
            Gang((Execute(0, "a", tuple(range(shards)), (0,), (1,)),), arguments=(0,)),
            arguments=(0,),
            results=((0, 1),),
        )
        core = LeaderCore(1, shards)
        core.handle(PartRegistered(S, 1, part_info(part, shards)), 0.0)
        core.handle(HostReported(0, m.PartBound(S, 1)), 0.0)
        core.handle(m.PutOnIsland(S, 1, layout(0), b"x"), 0.0)
        best, count = float("inf"), 0
        for turn in range(3):
            began = time.perf_counter()
            for run in range(turn * runs + 1, (turn + 1) * runs + 1):
                count += len(core.handle(submitted(run, 1, run, first=run + 1), 0.0))
                count += len(core.handle(HostReported(0, m.GangsDone(((S, run, 0),))), 0.0))
                count += len(core.handle(m.FreeBuffers(S, (run,)), 0.0))
            best = min(best, time.perf_counter() - began)
        assert count == 3 * runs * 5
        assert best / runs < 40e-6  # the budget is 10 us on a quiet machine


def test_a_buffer_made_of_others_is_there_when_every_host_says_so() -> None:
    leader = Leader(hosts=2)
    leader.register(1, ONE)
    leader.put(1)
    made = m.AssembleOnIsland(S, 2, layout(0, 1), (1, 1))
    assert leader.handle(made) == [SendToFollowers(made), Assemble(made)]
    assert leader.handle(made) == []  # sent again after a broken connection
    assert leader.start(10, 1, 2) == [Begin(submitted(10, 1, 2).message, (2,))][1:]
    assert leader.host(1, m.BufferArrived(S, 2)) == []
    assert [type(one) for one in leader.host(0, m.BufferArrived(S, 2))] == [SendToFollowers, Launch]


# -- what clients cannot ask for (L-5) ---------------------------------------------------------------------------------


def impossible(out: list[Any]) -> tuple[Begin, ErrorInfo]:
    """The Begin of a run that cannot be, and the error that its gang is poisoned with."""
    begin = next(one for one in out if isinstance(one, Begin))
    poison = next(one for one in out if isinstance(one, Poison))
    return begin, poison.error


def submit(leader: Leader, run: int, arguments: bytes, first: int) -> list[Any]:
    return leader.handle(event_of(m.StartPart(S, run, 1, first, Raw(arguments))))


@pytest.mark.parametrize("arguments", [b"\x90", b"\x92\x01\x02", b"\xc0", b"\x91\xc0", b"\x91\x91\x01", b"\xa1x"])
def test_other_arguments_than_the_plan_takes_are_errors_that_nobody_waits_for(arguments: bytes) -> None:
    leader = Leader(hosts=2)
    leader.register(1, PartInfo("part", (GangInfo(reads=(0,), results=(0,)),), {}, True, arguments=1, results=(0,)))
    out = submit(leader, 1, arguments, 100)
    begin, error = impossible(out)
    assert (error.kind, begin.arguments) == ("ProtocolError", (b"",))
    [to_followers] = [one.message for one in out if isinstance(one, SendToFollowers)][:1]
    assert event_of(to_followers).arguments == (b"",)  # followers are never told what they cannot read
    assert [one.message for one in out if isinstance(one, SendToScheduler)] == [m.PartFailed(S, 1, error)]


def test_a_result_is_a_buffer_that_was_not_there() -> None:
    """Two runs that name the same results: the second would end what the first had begun."""
    leader = Leader()
    part = PartInfo("part", (GangInfo(reads=(0,), results=(0, 1)),), {}, True, arguments=1, results=(0, 1))
    leader.register(1, part)
    leader.handle(m.PutOnIsland(S, 7, layout(0), None))  # not here yet, so both runs would wait for it
    submit(leader, 1, b"\x91\x07", 100)
    for first in (100, 99, 101, 6, -5, 1 << 62, (1 << 64) - 1):
        begin, error = impossible(submit(leader, 2, b"\x91\x07", first))
        assert error.kind == "ProtocolError"
        assert begin.message.first_result < -(1 << 61)  # where nobody's results are
    out = leader.host(0, m.BufferArrived(S, 7))
    assert [one for one in out if isinstance(one, Launch)] == [Launch(S, 1, 0)]
    leader.handle(m.FreeBuffers(S, (100, 101, 7)))
    assert len(impossible_buffers(leader)) == 0


def impossible_buffers(leader: Leader) -> list[int]:
    return [number for session in leader.core._sessions.values() for number in session.buffers]
