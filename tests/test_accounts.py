"""Weights and quotas of keys: what the allow-list grants, and what happens beyond it."""

from __future__ import annotations

from typing import Any

import pytest
from sched_world import World, executor_of, hello, refused, sent
from test_admin import reply, report

from pathway.errors import ConfigError, ErrorInfo, to_exception
from pathway.sched.events import AccessChanged, MessageReceived
from pathway.transport import messages as m
from pathway.transport.keys import parse_allow_list
from pathway.transport.terms import Terms


class KeyedWorld(World):
    """One island, and the keys `a` (of ann) and `b` (of bob)."""

    def __init__(self, terms: Terms, **settings: Any) -> None:
        super().__init__(**settings)
        self.list(terms)
        self.form("east")
        self.say("admin", hello("admin"))

    def list(self, terms: Terms) -> list[Any]:
        keys = {"a": ("ann", terms), "b": ("bob", Terms())}
        return self.handle(AccessChanged(m.AccessList(b"secret", ""), keys))

    def open(self, client: str, key: str = "a", **fields: Any) -> list[Any]:
        said = hello("client", name=client, **fields)
        return self.handle(MessageReceived(client.encode(), said, key))

    def ready_to_run(self, client: str, key: str = "a") -> int:
        [welcome] = sent(self.open(client, key), client, m.Welcome)
        self.slice(client, 1, 1)
        self.plan(client, 1, "east")
        return welcome.session

    def account(self, name: str = "ann") -> Any:
        return self.core.clients.accounts.named(name)


def started(out: list[Any]) -> list[int]:
    return [message.run for message in sent(out, executor_of("east"), m.StartPart)]


def test_terms_are_read_from_the_list_and_written_back() -> None:
    key = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
    line = f"{key}  client  alice  weight=2.5 priority=3 sessions=4 devices=8 bytes=3GiB runs=100"
    [entry] = parse_allow_list(line).entries.values()
    assert entry.terms == Terms(2.5, 3, 4, 8, 3 << 30, 100)
    assert parse_allow_list(entry.line()).entries == {entry.key: entry}
    assert parse_allow_list(f"{key} client alice").entries[entry.key].terms == Terms()
    for bad in ("runs=0", "devices=-1", "bytes=3GB", "priority=high", "weight=nan", "colour=red", "runs"):
        with pytest.raises(ConfigError, match="line 1"):
            parse_allow_list(f"{key} client alice {bad}")


def test_what_a_limit_refuses_can_be_caught_by_its_public_name() -> None:
    import pathway

    assert pathway.LimitError is to_exception(ErrorInfo("LimitError", "devices=3")).__class__


def test_a_session_has_at_most_its_keys_weight_and_priority_whatever_it_asks_for() -> None:
    world = KeyedWorld(Terms(weight=4.0, priority=1))
    tenants = []
    for client, asked in (("one", 100.0), ("two", 0.5), ("three", 0.0)):
        [welcome] = sent(world.open(client, weight=asked, priority=9), client, m.Welcome)
        tenants.append(world.core.clients.lanes.tenant(welcome.session))
    assert [tenant.weight for tenant in tenants] == [4.0, 2.0, 4.0]
    assert [tenant.priority for tenant in tenants] == [1, 1, 1]


def test_a_keys_weight_changes_at_once_by_order_and_by_the_list() -> None:
    world = KeyedWorld(Terms())
    [welcome] = sent(world.open("one"), "one", m.Welcome)
    tenant = world.core.clients.lanes.tenant(welcome.session)
    assert "weight 3" in reply(world.say("admin", m.SetWeight(1, "ann", 3.0, key=True))).text
    assert tenant.weight == 3.0
    world.list(Terms(runs=7))  # another line with the same weight: what was set stays
    assert tenant.weight == 3.0
    world.list(Terms(weight=2.0))
    assert tenant.weight == 2.0
    assert "there are: ann, bob" in reply(world.say("admin", m.SetWeight(2, "eve", 3.0, key=True))).error
    assert "no priority" in reply(world.say("admin", m.SetWeight(3, "ann", None, 1, key=True))).error


def test_sessions_and_devices_over_the_limit_are_refused_by_name() -> None:
    world = KeyedWorld(Terms(sessions=2, devices=3))
    world.open("one")
    world.open("two")
    refusal = refused(world.open("three"))
    assert (refusal.kind, "sessions=2" in refusal.reason) == ("LimitError", True)
    assert sent(world.open("bob", "b"), "bob", m.Welcome)
    assert sent(world.slice("one", 1, 2), "one", m.SliceBound)
    [refusal] = sent(world.slice("two", 1, 2), "two", m.SliceRefused)
    assert (refusal.kind, "devices=3" in refusal.reason) == ("LimitError", True)
    world.say("one", m.ReleaseSlice(1))
    assert sent(world.slice("two", 2, 3), "two", m.SliceBound)
    world.say("one", m.Goodbye())
    assert sent(world.open("three"), "three", m.Welcome)


def test_bytes_over_the_limit_refuse_runs_until_they_are_released() -> None:
    world = KeyedWorld(Terms(bytes=1000))
    one, two = world.ready_to_run("one"), world.ready_to_run("two")
    bob = world.ready_to_run("bob", "b")
    report(world, "east", (one, 1, 600), (two, 1, 400), (bob, 1, 10_000))
    [failed] = sent(world.start("one", 1, 1), "one", m.RunFailed)
    assert (failed.error.kind, "bytes=1000" in failed.error.message) == ("LimitError", True)
    assert started(world.start("bob", 1, 1)) == [1]
    report(world, "east", (one, 1, 600), (bob, 1, 10_000))
    assert started(world.start("one", 2, 1)) == [2]
    [line] = [line for line in world.core.status(world.now)["keys"] if line["key"] == "ann"]
    assert (line["bytes"], line["runs_in_flight"], line["limits"]) == (600, 1, {"bytes": 1000})


def test_runs_over_the_limit_wait_in_line_and_hold_back_nobody() -> None:
    world = KeyedWorld(Terms(runs=2))
    one = world.ready_to_run("one")
    two = world.ready_to_run("two")
    world.ready_to_run("bob", "b")
    assert started(world.start("one", 1, 1)) == [1]
    assert started(world.start("two", 1, 1)) == [1]
    assert started(world.start("one", 2, 1)) == []
    assert started(world.start("two", 2, 1)) == []
    assert started(world.start("bob", 1, 1)) == [1]
    assert any("may have 2 (runs)" in wait.reason for wait in world.core.waits(world.now))
    out = world.say(executor_of("east"), m.PartsFinished(((one, 1),)))
    assert len(started(out)) == 1
    assert world.account().running == 2
    world.say("one", m.Goodbye())
    assert world.account().running <= 2
    world.say(executor_of("east"), m.PartsFinished(((two, 1), (two, 2))))
    assert world.account().running == 0


def test_a_limit_that_is_raised_lets_go_what_waited_for_it() -> None:
    world = KeyedWorld(Terms(runs=1))
    world.ready_to_run("one")
    assert started(world.start("one", 1, 1)) == [1]
    assert started(world.start("one", 2, 1)) == []
    assert started(world.list(Terms(runs=2))) == [2]
    assert started(world.start("one", 3, 1)) == []
    assert started(world.list(Terms())) == [3]


def test_a_lost_island_gives_its_keys_runs_back() -> None:
    world = KeyedWorld(Terms(runs=1))
    world.ready_to_run("one")
    world.start("one", 1, 1)
    world.start("one", 2, 1)
    world.close("worker-east-0", "the machine is gone")
    assert world.account().running == 0
    assert not world.account().held or not world.core.clients.lanes.active
