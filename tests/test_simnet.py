"""Whole clusters over virtual time. A failure names its seed, which replays it."""

from __future__ import annotations

import os
import time

import pytest

from pathway.sched.core import SchedulerSettings
from pathway.testing.simnet import Faults, SimNet

FIRST_SEED = int(os.environ.get("PATHWAY_SIM_SEED", "0"))
"""Move it to look at other histories."""


def total(net: SimNet, name: str) -> int:
    return sum(getattr(client, name) for client in net.clients)


@pytest.mark.parametrize("block", range(4))
def test_without_faults_every_run_ends_with_the_right_results(block: int) -> None:
    finished = 0
    for seed in range(FIRST_SEED + block * 20, FIRST_SEED + (block + 1) * 20):
        net = SimNet(seed, validate=seed % 4 == 0)
        net.run()
        finished += total(net, "finished")
    assert finished > 250


@pytest.mark.parametrize("block", range(4))
def test_with_faults_every_run_ends_and_nothing_is_left(block: int) -> None:
    finished = failures = lost = 0
    for seed in range(FIRST_SEED + 1000 + block * 40, FIRST_SEED + 1000 + (block + 1) * 40):
        net = SimNet(seed, faults=Faults.some(), validate=seed % 4 == 0)
        net.run()
        finished += total(net, "finished")
        failures += total(net, "failures")
        lost += sum(island.incarnation - 1 for island in net.scheduler.core.cluster.islands.values())
    assert finished > 200
    assert failures > 50
    assert lost > 40


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 4, 2), (5, 1, 4), (3, 3, 2)])
def test_clusters_of_other_shapes(shape: tuple[int, int, int]) -> None:
    islands, hosts, devices = shape
    for seed in range(FIRST_SEED + 2000, FIRST_SEED + 2010):
        SimNet(seed, islands, hosts, devices, clients=4, runs=15, faults=Faults.some()).run()
        SimNet(seed, islands, hosts, devices, clients=4, runs=15).run()


def test_time_does_not_go_back_when_a_silent_link_is_finished() -> None:
    """Seed 1036 once did: the end of a link that carried nothing any more came before its last message."""
    SimNet(1036, faults=Faults.some(), validate=True).run()


def test_a_client_runs_no_plan_of_a_slice_that_it_has_no_more() -> None:
    """Seed 3003612 once did: after a broken connection a client is told of its slices again, one after the other."""
    SimNet(3003612, 1, 4, 2, clients=4, faults=Faults.some()).run()


def trace(seed: int) -> list[tuple[float, str]]:
    net = SimNet(seed, faults=Faults.some())
    seen: list[tuple[float, str]] = []
    handle = net.scheduler.handle

    def noted(event: object) -> None:
        seen.append((net.now, repr(event)))
        handle(event)  # type: ignore[arg-type]

    net.scheduler.handle = noted  # type: ignore[method-assign,assignment]
    net.run()
    return [(now, text.split(" at 0x")[0]) for now, text in seen]


def test_a_seed_replays_exactly() -> None:
    first = trace(FIRST_SEED + 7)
    assert len(first) > 200
    assert trace(FIRST_SEED + 7) == first
    assert trace(FIRST_SEED + 8) != first


def test_a_thousand_hosts_form_and_run() -> None:
    began = time.perf_counter()
    net = SimNet(
        FIRST_SEED, islands=500, hosts=2, devices=4, clients=8, runs=10, settings=SchedulerSettings(credits=16)
    )
    net.run()
    assert total(net, "finished") > 20
    assert time.perf_counter() - began < 60


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("block", range(10))
def test_ten_thousand_histories(block: int) -> None:
    shapes = ((2, 2, 2, 2), (1, 1, 1, 4), (1, 4, 2, 4), (5, 1, 4, 4), (3, 3, 2, 4))
    for seed in range(FIRST_SEED + 10_000 + block * 1000, FIRST_SEED + 10_000 + (block + 1) * 1000):
        islands, hosts, devices, clients = shapes[seed % len(shapes)]
        SimNet(seed, islands, hosts, devices, clients, faults=Faults.some(), validate=seed % 8 == 0).run()
