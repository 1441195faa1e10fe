"""Settings: where they come from, which source wins, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from pathway.config import Settings, load_settings
from pathway.errors import ConfigError


def test_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_settings(environment={}) == Settings()


def test_flags_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "pathway.toml"
    file.write_text("lease_s = 1\nheartbeat_s = 0.1\ncredits_per_island = 2\n")
    environment = {"PATHWAY_LEASE_S": "2.5", "PATHWAY_HEARTBEAT_S": "0.2", "PATHWAY_INSECURE": "yes"}
    settings = load_settings({"lease_s": 3.0, "heartbeat_s": None}, environment=environment, file=file)
    assert (settings.lease_s, settings.heartbeat_s, settings.credits_per_island) == (3.0, 0.2, 2)
    assert settings.insecure
    assert settings.drain_s == Settings().drain_s


def test_the_file_in_the_working_directory_and_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pathway.toml").write_text("lease_s = 7.0\n")
    (tmp_path / "other.toml").write_text("lease_s = 8.0\n")
    monkeypatch.chdir(tmp_path)
    assert load_settings(environment={}).lease_s == 7.0
    assert load_settings(environment={"PATHWAY_CONFIG": "other.toml"}).lease_s == 8.0
    with pytest.raises(ConfigError, match=r"there is no missing\.toml"):
        load_settings(environment={"PATHWAY_CONFIG": "missing.toml"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("leese_s = 1", r"no setting 'leese_s'; did you mean lease_s\?"),
        ("colour = 1", "no setting 'colour'$"),
        ("lease_s = 'long'", "lease_s must be number, not 'long'"),
        ("credits_per_island = 1.5", "credits_per_island must be whole number"),
        ("insecure = 1", "insecure must be true or false"),
        ("log_format = 'xml'", "must be one of auto, terminal, json"),
        ("lease_s = 0", "lease_s must be above 0"),
        ("credits_per_island = 0", "at least 1"),
        ("heartbeat_s = 5.0", "more than two heartbeats"),
        ("lease_s = ", r"pathway\.toml"),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "pathway.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_settings(environment={}, file=file)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("PATHWAY_LEASE_S", "long", "PATHWAY_LEASE_S: 'long' is no number"),
        ("PATHWAY_INSECURE", "perhaps", "is no true or false"),
        ("PATHWAY_CREDITS_PER_ISLAND", "1.5", "is no whole number"),
        ("PATHWAY_LEASES_S", "1", r"no setting PATHWAY_LEASES_S; did you mean PATHWAY_LEASE_S\?"),
    ],
)
def test_what_the_environment_may_not_say(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(environment={variable: text})


def test_other_variables_of_the_environment_are_nobodys_business() -> None:
    load_settings(environment={"PATHWAY_BENCH_SOMETHING": "1", "HOME": "/"})


def test_keys_need_a_key_of_ones_own() -> None:
    assert Settings().key_paths("worker") is None
    with pytest.raises(ConfigError, match=r"need a key of one's own"):
        Settings(scheduler_key="scheduler.key").key_paths("worker")
    paths = Settings(key="a.key", scheduler_key="scheduler.key").key_paths("worker")
    assert paths is not None
    assert (paths.own, paths.scheduler) == (Path("a.key"), Path("scheduler.key"))


def test_the_place_of_compiled_programs_is_no_misspelt_setting() -> None:
    load_settings(environment={"PATHWAY_CACHE_DIR": "/tmp/cache"})
