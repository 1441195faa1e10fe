"""Key files and allow-lists: modes, refusals, and that no secret key comes out anywhere (K-1 to K-3)."""

from __future__ import annotations

import logging
import os
import pickle
import stat
import traceback
from pathlib import Path

import pytest

from pathway.errors import ConfigError
from pathway.transport.keys import (
    AllowList,
    AllowListFile,
    Entry,
    KeyPair,
    PublicKey,
    Role,
    SecretKey,
    compare,
    fingerprint,
    generate,
    load_key_pair,
    load_public_key,
    parse_allow_list,
    write_key_pair,
)
from pathway.transport.terms import Terms

ALICE, BOB, CAROL = (PublicKey(letter * 40) for letter in "abc")


@pytest.fixture(autouse=True)
def _open_umask() -> object:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# -- key files --------------------------------------------------------------------------------------------------------


def test_a_pair_is_written_and_read_back(tmp_path: Path) -> None:
    made = generate(tmp_path, "alice", [Role.CLIENT, Role.ADMIN])
    pair = load_key_pair(tmp_path / "alice.key")
    assert load_public_key(tmp_path / "alice.key") == pair.public
    assert pair.secret.reveal() == (tmp_path / "alice.key_secret").read_bytes().strip()
    assert parse_allow_list(made.lines[0]).get(pair.public) == Entry(
        pair.public, frozenset({Role.CLIENT, Role.ADMIN}), "alice"
    )


def test_secret_files_are_for_their_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    made = generate(tmp_path / "keys")
    assert {mode(path) for path in made.secret_paths} == {0o600}
    assert {mode(path) for path in made.public_paths} == {0o644}
    assert mode(tmp_path / "keys") == 0o700


def test_a_cluster_directory_has_all_that_a_cluster_needs(tmp_path: Path) -> None:
    made = generate(tmp_path)
    allowed = AllowListFile(tmp_path / "allowed_keys").current
    roles = {entry.name: entry.roles for entry in allowed.entries.values()}
    assert roles == {
        "worker": {Role.WORKER},
        "client": {Role.CLIENT},
        "admin": {Role.ADMIN, Role.CLIENT},
    }
    for name in ("scheduler", "worker", "client", "admin"):
        assert load_key_pair(tmp_path / f"{name}.key").public == load_public_key(tmp_path / f"{name}.key")
    assert made.allow_list == tmp_path / "allowed_keys"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    generate(tmp_path, "alice")
    before = (tmp_path / "alice.key_secret").read_bytes()
    with pytest.raises(ConfigError, match=r"alice\.key.* exists"):
        generate(tmp_path, "alice")
    (tmp_path / "alice.key").unlink()
    with pytest.raises(ConfigError, match=r"alice\.key_secret exists"):
        generate(tmp_path, "alice")
    assert (tmp_path / "alice.key_secret").read_bytes() == before
    generate(tmp_path / "cluster")
    with pytest.raises(ConfigError, match="has its keys already"):
        generate(tmp_path / "cluster")


def test_a_secret_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "alice.key_secret").symlink_to(tmp_path / "elsewhere")
    with pytest.raises((ConfigError, OSError)):
        generate(tmp_path, "alice")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o666, 0o620])
def test_a_secret_file_that_others_can_touch_is_refused(tmp_path: Path, bits: int) -> None:
    generate(tmp_path, "alice")
    (tmp_path / "alice.key_secret").chmod(bits)
    with pytest.raises(ConfigError, match=r"can be read by others \(mode .*chmod 600"):
        load_key_pair(tmp_path / "alice.key")


@pytest.mark.parametrize("name", ["", "../alice", "a b", "-x", "x" * 65, "a/b"])
def test_names_that_are_no_file_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name of a key"):
        generate(tmp_path, name)


def test_files_that_hold_no_key_say_so_without_saying_what_they_hold(tmp_path: Path) -> None:
    path = tmp_path / "bad.key_secret"
    for content in (
        b"",
        b"SECRETWORD",
        b"SECRETWORD\nSECRETWORD\n",
        b"\xff\xfeSECRETWORD",
        b"'SECRETWORD'" + b"~" * 28,
    ):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match=r"bad\.key_secret") as caught:
            load_key_pair(path)
        assert "SECRETWORD" not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_key_pair(tmp_path / "none.key")
    with pytest.raises(ConfigError, match="is a secret key, where a public one"):
        load_public_key(path)


def test_a_secret_key_shows_itself_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pair = KeyPair.random()
    secret = pair.secret.reveal().decode()
    logging.getLogger("test").warning("pair %r, key %s", pair, pair.secret)
    write_key_pair(tmp_path, "alice", pair)
    with pytest.raises(ConfigError) as caught:
        write_key_pair(tmp_path, "alice", pair)
    with pytest.raises(TypeError, match="does not travel"):
        pickle.dumps(pair)
    shown = [
        repr(pair),
        str(pair),
        f"{pair}",
        f"{pair.secret}",
        caplog.text,
        repr(vars(caught.value)),
        repr(caught.value),
    ]
    assert not [text for text in shown if secret in text]
    assert not hasattr(pair.secret, "__dict__")


def test_a_key_that_is_none_is_refused_without_being_shown() -> None:
    for text in ("", "short", "~" * 40, "x" * 41):
        with pytest.raises(ConfigError) as caught:
            SecretKey(text)
        assert not text or text not in str(caught.value)


def test_a_fingerprint_is_no_key() -> None:
    assert fingerprint(ALICE) != fingerprint(BOB)
    assert fingerprint(ALICE) not in ALICE
    assert len(fingerprint(ALICE)) == 12


# -- allow-lists ------------------------------------------------------------------------------------------------------


def test_an_allow_list_with_comments_roles_and_options() -> None:
    allowed = parse_allow_list(
        f"# who may come in\n\n  {ALICE}   client,admin  alice  weight=2.5 # option, comment\n#\n{BOB} worker bob\n"
    )
    assert allowed.get(ALICE) == Entry(ALICE, frozenset({Role.CLIENT, Role.ADMIN}), "alice", Terms(2.5))
    assert allowed.get(BOB) == Entry(BOB, frozenset({Role.WORKER}), "bob")
    assert allowed.get(CAROL) is None
    assert allowed.get(None) is None
    assert parse_allow_list(allowed.text()) == allowed


def test_a_key_may_begin_with_a_hash() -> None:
    key = "#" + "a" * 39
    assert parse_allow_list(f"{key} client alice\n#{ALICE} client nobody").get(key) is not None


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("abc client alice", "no public key"),
        (f"{BOB} client", "a key, its roles"),
        (f"{BOB} root bob", "'root' is no role: there are client, worker, admin"),
        (f"{BOB} client,root bob", "'root' is no role"),
        (f"{BOB} client, bob", "'' is no role"),
        (f"{BOB} client # bob", "the name is missing"),
        (f"{BOB} client b/b", "a name has letters"),
        (f"{BOB} client bob wait=2", "'wait' is no option"),
        (f"{BOB} client bob weight=much", "a weight is a number"),
        (f"{BOB} client bob weight=0", "a weight is a number"),
        (f"{BOB} client bob weight=nan", "a weight is a number"),
        (f"{ALICE} client bob", "this key was given before, as 'alice'"),
        (f"{BOB} client alice", "the name 'alice' was given before, at line 2"),
    ],
)
def test_a_mistake_names_its_line_and_refuses_the_whole(line: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"file.txt, line 4: .*{complaint}") as caught:
        parse_allow_list(f"# list\n{ALICE} client alice\n\n{line}\n{CAROL} client carol", "file.txt")
    assert BOB not in str(caught.value)


def test_what_changed_between_two_lists() -> None:
    alice, bob = (
        Entry(ALICE, frozenset({Role.CLIENT, Role.ADMIN}), "alice"),
        Entry(BOB, frozenset({Role.CLIENT}), "bob"),
    )
    less = Entry(ALICE, frozenset({Role.CLIENT}), "alice")
    assert compare(AllowList.of([alice]), AllowList.of([alice, bob])).added == (bob,)
    assert compare(AllowList.of([alice, bob]), AllowList.of([bob])).revoked == (alice,)
    assert compare(AllowList.of([alice]), AllowList.of([less])).revoked == (alice,)
    assert compare(AllowList.of([less]), AllowList.of([alice])).revoked == ()


# -- reloading --------------------------------------------------------------------------------------------------------


def rewrite(path: Path, text: str) -> None:
    """As an editor does: another file takes the place."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o644)
    new.replace(path)


def test_a_list_is_read_again_when_its_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "allowed_keys"
    rewrite(path, f"{ALICE} client alice\n")
    file = AllowListFile(path)
    assert file.refresh() is None
    rewrite(path, f"{BOB} client bob\n")
    change = file.refresh()
    assert change is not None
    assert [entry.name for entry in change.revoked] == ["alice"]
    assert [entry.name for entry in change.added] == ["bob"]
    assert file.refresh() is None


def test_a_list_with_a_mistake_changes_nothing_and_is_reported_once(tmp_path: Path) -> None:
    path = tmp_path / "allowed_keys"
    rewrite(path, f"{ALICE} client alice\n")
    file = AllowListFile(path)
    for spoil in (lambda: rewrite(path, "nonsense\n"), path.unlink, lambda: path.write_bytes(b"\xff\xff")):
        spoil()
        change = file.refresh()
        assert change is not None
        assert str(path) in change.error
        assert file.refresh() is None
        assert file.current.get(ALICE) is not None
    rewrite(path, f"{BOB} client bob\n")
    change = file.refresh()
    assert change is not None
    assert change.revoked[0].key == ALICE


def test_a_list_that_everybody_can_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "allowed_keys"
    path.write_text(f"{ALICE} client alice\n")
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="can be written by everybody"):
        AllowListFile(path)


def test_a_forced_reload_reads_whatever_the_stamp_says(tmp_path: Path) -> None:
    path = tmp_path / "allowed_keys"
    rewrite(path, f"{ALICE} client alice\n")
    file = AllowListFile(path)
    status = path.stat()
    with path.open("r+") as open_file:
        open_file.write(str(BOB))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.refresh() is None
    change = file.refresh(force=True)
    assert change is not None
    assert change.added[0].key == BOB
