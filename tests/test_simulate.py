"""`python -m pathway.testing.simulate`: what a scenario gives, and what a wrong one says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pathway.errors import ConfigError
from pathway.testing.sim_churn import churned
from pathway.testing.simulate import Scenario, describe, main, simulate


def test_weights_are_shares() -> None:
    result = simulate(Scenario(islands=1, clients=4, weights=(1, 2, 4, 8), seconds=4.0, seed=3))
    assert not result.violations
    assert [round(client.fair_share, 3) for client in result.clients] == [0.067, 0.133, 0.267, 0.533]
    for client in result.clients:
        assert abs(client.share - client.fair_share) < 0.02
    waits = [client.wait_median_ms for client in result.clients]
    assert waits == sorted(waits, reverse=True)
    assert 0.5 < result.busy <= 1.0
    assert "client3" in describe(result)


def test_first_come_first_served_goes_in_turns() -> None:
    result = simulate(Scenario(islands=1, clients=2, policy="fifo", seconds=1.0, lengths_us=(500, 1500), steady=True))
    first, second = result.clients
    assert first.runs == pytest.approx(second.runs, rel=0.1)  # turns, whatever they take
    assert second.device_s == pytest.approx(3 * first.device_s, rel=0.1)


def test_faults_lose_islands_and_break_no_rule() -> None:
    result = simulate(Scenario(islands=4, hosts=2, clients=4, spread=2, seconds=1.0, faults=True, seed=11))
    assert not result.violations
    assert result.islands_lost > 0
    assert sum(client.runs for client in result.clients) > 300


def test_a_scenario_replays_exactly() -> None:
    scenario = Scenario(islands=2, clients=3, seconds=0.5, seed=5)
    assert [c.runs for c in simulate(scenario).clients] == [c.runs for c in simulate(scenario).clients]


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        (Scenario(clients=0), "clients must be 1"),
        (Scenario(islands=4, spread=5), "as many slices"),
        (Scenario(policy="nothing"), "no policy 'nothing'"),
        (Scenario(seconds=0), "more than nothing"),
    ],
)
def test_a_scenario_that_cannot_be(scenario: Scenario, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(scenario)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "shares.svg"
    assert main(["--islands", "2", "--clients", "20", "--seconds", "0.3", "--json", "--draw", str(picture)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["clients"]) == 20
    assert shown["violations"] == []
    assert "4 others" in picture.read_text()
    assert main(["--policy", "nothing"]) == 2
    assert "there are fifo, fair, priority" in capsys.readouterr().err


def test_its_help_has_examples() -> None:
    command = [sys.executable, "-m", "pathway.testing.simulate", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "--policy my_module:MyPolicy" in shown


def test_sessions_come_and_go_and_leave_nothing() -> None:
    result = churned(islands=20, sessions=100, faults=40, seed=1, span_s=30.0)
    assert not result.violations
    assert result.islands_lost > 5
    assert result.runs > 200


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_day_of_a_large_cluster() -> None:
    result = churned(islands=1000, sessions=10_000, faults=2000, seed=1)
    assert not result.violations
    assert result.end_mb < 1.1 * result.tenth_mb
