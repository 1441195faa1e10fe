"""Keys: who may speak to a cluster. Key files, the allow-list, and the two kinds that code handles: public and secret.

A key pair is CURVE's (Curve25519), written as Z85, 40 characters. NAME.key holds the public half and may be shown to
anybody; NAME.key_secret holds the secret half, mode 600. The scheduler's allow-list has a line for every key that may
connect, with the roles it may take:

    # key                                     roles         name     options
    rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7  client        alice    weight=2
    Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID  client,admin  bob

Invariants
  K-1  A secret key leaves `SecretKey` only through `reveal`, into a socket option or a key file. Its repr, str, pickle,
       and all that an error or a log could make of it, do not have it. Paths of keys are passed around, never keys.
  K-2  A secret file that others can read is not used, and one that exists is not overwritten.
  K-3  An allow-list is taken whole or not at all: one with a mistake changes nothing, and the list before it stays.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import NewType, NoReturn

import zmq

from pathway.errors import ConfigError
from pathway.transport.terms import USUAL_TERMS, Terms

PublicKey = NewType("PublicKey", str)
"""The public half of a key pair, Z85. It is no secret, and it is a peer's identity."""

PUBLIC_SUFFIX = ".key"
SECRET_SUFFIX = ".key_secret"
ALLOW_LIST_NAME = "allowed_keys"
SCHEDULER_NAME = "scheduler"

_Z85_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


class Role(StrEnum):
    """What a key may do: `client` opens sessions; `worker` brings hosts and runs their executors; `admin` sees and ends
    other people's sessions."""

    CLIENT = "client"
    WORKER = "worker"
    ADMIN = "admin"


class SecretKey:
    """The secret half of a key pair, kept out of everything that prints (K-1)."""

    __slots__ = ("_z85",)

    def __init__(self, z85: str) -> None:
        if not _Z85_KEY.fullmatch(z85):
            raise ConfigError("this is no secret key: it should be 40 characters of Z85")
        self._z85 = z85

    def reveal(self) -> bytes:
        """The key itself, for a socket's option and a key file: nowhere else."""
        return self._z85.encode()

    def __repr__(self) -> str:
        return "SecretKey(hidden)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret key does not travel: pass the path of its file")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A process's own keys."""

    public: PublicKey = field(repr=False)
    secret: SecretKey

    @classmethod
    def random(cls) -> KeyPair:
        public, secret = zmq.curve_keypair()
        return cls(PublicKey(public.decode()), SecretKey(secret.decode()))

    @classmethod
    def of(cls, secret: SecretKey) -> KeyPair:
        """The pair of a secret key: its public half follows from it."""
        try:
            public = zmq.curve_public(secret.reveal())
        except zmq.ZMQError:  # not chained: nothing of the key may come along (K-1)
            raise ConfigError("this is no secret key: it does not decode") from None
        return cls(PublicKey(public.decode()), secret)


def parse_public_key(text: str) -> PublicKey:
    if not _Z85_KEY.fullmatch(text):
        raise ConfigError("this is no public key: it should be 40 characters of Z85")
    return PublicKey(text)


def fingerprint(key: str) -> str:
    """A short name for a public key, for logs: enough to tell two apart, and no key."""
    return hashlib.blake2b(key.encode(), digest_size=6).hexdigest()


# -- files ------------------------------------------------------------------------------------------------------------


def load_public_key(path: Path) -> PublicKey:
    """The public key in a file written by `generate`."""
    if path.name.endswith(SECRET_SUFFIX):
        raise ConfigError(f"{path} is a secret key, where a public one ({PUBLIC_SUFFIX}) belongs")
    try:
        return parse_public_key(_only_line(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def load_key_pair(path: Path) -> KeyPair:
    """The pair whose secret half is in `path`; NAME.key stands for NAME.key_secret beside it. A file that others than
    its owner can read is refused (K-2)."""
    if path.name.endswith(PUBLIC_SUFFIX):
        path = path.with_name(path.name.removesuffix(PUBLIC_SUFFIX) + SECRET_SUFFIX)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"the secret key {path} can be read by others (mode {stat.S_IMODE(mode):o}): run chmod 600 on it, "
            f"and make a new key if somebody may have read it"
        )
    try:
        return KeyPair.of(SecretKey(_only_line(path)))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def write_key_pair(directory: Path, name: str, pair: KeyPair) -> tuple[Path, Path]:
    """NAME.key and NAME.key_secret in `directory`, which is made if need be. Neither may exist before (K-2)."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be the name of a key: use letters, digits and . _ @ -, at most 64")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    public_path, secret_path = directory / (name + PUBLIC_SUFFIX), directory / (name + SECRET_SUFFIX)
    for path in (public_path, secret_path):
        if path.exists():
            raise ConfigError(f"{path} exists: a key is never overwritten. Move it away, or take another name")
    _write_new(secret_path, pair.secret.reveal() + b"\n", 0o600)
    _write_new(public_path, f"{pair.public}\n".encode(), 0o644)
    return public_path, secret_path


@dataclass(frozen=True, slots=True)
class Generated:
    """What `generate` wrote. `allow_list` is a file it made or added to; `lines` are the lines for an allow-list."""

    public_paths: tuple[Path, ...]
    secret_paths: tuple[Path, ...]
    lines: tuple[str, ...]
    allow_list: Path | None = None


def generate(directory: Path, name: str | None = None, roles: Iterable[Role] = (Role.CLIENT,)) -> Generated:
    """Make keys, as `pathway keygen` does. With a `name`: one pair, and the line that lets it in. Without: all that a
    cluster needs, in one directory: pairs for the scheduler, the workers, a client and an admin, and the allow-list."""
    if name is not None:
        pair = KeyPair.random()
        public_path, secret_path = write_key_pair(directory, name, pair)
        return Generated((public_path,), (secret_path,), (Entry(pair.public, frozenset(roles), name).line(),))
    allow_list = directory / ALLOW_LIST_NAME
    if allow_list.exists():
        raise ConfigError(f"{allow_list} exists: this directory has its keys already. Add one with --name NAME")
    public_paths, secret_paths, lines = [], [], []
    for member, member_roles in (
        (SCHEDULER_NAME, ()),
        ("worker", (Role.WORKER,)),
        ("client", (Role.CLIENT,)),
        ("admin", (Role.ADMIN, Role.CLIENT)),
    ):
        pair = KeyPair.random()
        public_path, secret_path = write_key_pair(directory, member, pair)
        public_paths.append(public_path)
        secret_paths.append(secret_path)
        if member_roles:
            lines.append(Entry(pair.public, frozenset(member_roles), member).line())
    header = (
        "# key, roles (client, worker, admin), name, options (weight=2 runs=9 ...). Read again whenever it changes.\n"
    )
    _write_new(allow_list, (header + "".join(line + "\n" for line in lines)).encode(), 0o644)
    return Generated(tuple(public_paths), tuple(secret_paths), tuple(lines), allow_list)


def _write_new(path: Path, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)  # whatever the umask
        file.write(content)


def _only_line(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError("not a key file") from None
    except OSError as error:
        raise ConfigError(f"the key file cannot be read: {error.strerror}") from None
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("# ")]
    if len(lines) != 1:
        raise ConfigError(f"a key file has one line with the key, and this one has {len(lines)}")
    return lines[0].strip()


# -- the allow-list ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of the allow-list."""

    key: PublicKey
    roles: frozenset[Role]
    name: str
    terms: Terms = USUAL_TERMS

    def line(self) -> str:
        """This entry as a line of an allow-list."""
        roles = ",".join(role for role in Role if role in self.roles)
        return f"{self.key}  {roles}  {self.name}  {self.terms.options()}".rstrip()


@dataclass(frozen=True, slots=True)
class AllowList:
    """Who may connect. Immutable: a reload makes another."""

    entries: Mapping[PublicKey, Entry] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> AllowList:
        return cls(MappingProxyType({entry.key: entry for entry in entries}))

    def get(self, key: str | None) -> Entry | None:
        return None if key is None else self.entries.get(PublicKey(key))

    def text(self) -> str:
        """The list as a file's content: how it travels to the workers."""
        return "".join(entry.line() + "\n" for entry in self.entries.values())


def parse_allow_list(text: str, source: str = "the allow-list") -> AllowList:
    """The allow-list in `text`. A mistake raises `ConfigError` with the line's number and refuses the whole (K-3)."""
    entries: dict[PublicKey, Entry] = {}
    names: dict[str, int] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line == "#" or (line.startswith("#") and not _Z85_KEY.fullmatch(line.split()[0])):
            continue
        try:
            entry = _parse_line(line)
            if entry.key in entries:
                raise ConfigError(f"this key was given before, as {entries[entry.key].name!r}")
            if entry.name in names:
                raise ConfigError(f"the name {entry.name!r} was given before, at line {names[entry.name]}")
        except ConfigError as error:
            raise ConfigError(f"{source}, line {number}: {error}") from None
        entries[entry.key] = entry
        names[entry.name] = number
    return AllowList(MappingProxyType(entries))


def _parse_line(line: str) -> Entry:
    words = line.split()
    if len(words) < 3:
        raise ConfigError("a line has a key, its roles (client,worker,admin) and a name")
    key, roles_text, name, *options = words
    if name.startswith("#"):
        raise ConfigError("the name is missing")
    roles = set()
    for word in roles_text.split(","):
        try:
            roles.add(Role(word))
        except ValueError:
            raise ConfigError(f"{word!r} is no role: there are {', '.join(Role)}") from None
    if not _NAME.fullmatch(name):
        raise ConfigError("a name has letters, digits and . _ @ -, at most 64")
    terms = USUAL_TERMS
    for option in options:
        if option.startswith("#"):
            break
        terms = terms.with_option(option)
    return Entry(parse_public_key(key), frozenset(roles), name, terms)


@dataclass(frozen=True, slots=True)
class Change:
    """What a reload changed. `revoked`: keys that are no longer there, or have lost a role. `error`: why the file was
    not taken (then nothing changed)."""

    added: tuple[Entry, ...] = ()
    revoked: tuple[Entry, ...] = ()
    error: str = ""


class AllowListFile:
    """The allow-list of a file, read again when it changes. `refresh` costs one `stat` while it does not: call it when
    somebody connects and at every heartbeat, so that no notification service is needed."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` for a file that is missing or wrong."""
        self.path = path
        self._stamp = self._stat()
        self._complaint = ""
        self.current = self._read()

    def refresh(self, force: bool = False) -> Change | None:
        """What changed since the last call, or None. A file that cannot be read or has a mistake leaves the list as it
        was (K-3), and is reported once. `force` reads it whatever its stamp says (SIGHUP)."""
        try:
            stamp = self._stat()
            if stamp == self._stamp and not force:
                return None
            self._stamp = stamp
            after = self._read()
        except ConfigError as error:
            complaint, self._complaint = self._complaint, str(error)
            return Change(error=str(error)) if force or complaint != str(error) else None
        self._complaint = ""
        before, self.current = self.current, after
        change = compare(before, after)
        return change if change.added or change.revoked else None

    def _stat(self) -> tuple[int, int, int]:
        try:
            status = self.path.stat()
        except OSError as error:
            raise ConfigError(f"the allow-list {self.path} cannot be read: {error.strerror}") from None
        if status.st_mode & stat.S_IWOTH:
            raise ConfigError(f"the allow-list {self.path} can be written by everybody: run chmod o-w on it")
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> AllowList:
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise ConfigError(f"the allow-list {self.path} cannot be read as text") from None
        return parse_allow_list(text, str(self.path))


def compare(before: AllowList, after: AllowList) -> Change:
    """The difference of two lists. A key that lost a role counts as revoked: whoever uses it connects again."""
    revoked = tuple(
        entry
        for key, entry in before.entries.items()
        if key not in after.entries or not entry.roles <= after.entries[key].roles
    )
    added = tuple(entry for key, entry in after.entries.items() if before.entries.get(key) != entry)
    return Change(added, revoked)
