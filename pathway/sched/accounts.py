"""Accounts: what the sessions of one key have together, and the most that they may have. Pure.

A cluster without keys has no accounts. A limit that a request would pass refuses it at once with `LimitError`, but for
runs in flight: those over the limit wait in line (see `lanes`).

Invariants
  A-3  A session's weight is its key's weight times its own share, which is at most 1 unless an administrator gave it
       more: nobody gains by asking.
  A-4  Bytes are what executors have reported, as old as a heartbeat, and all puts since. What runs make is counted when
       it is reported, so a key passes its limit by what its runs in flight make, and no further.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pathway.errors import ErrorInfo
from pathway.transport.terms import Terms

if TYPE_CHECKING:
    from pathway.sched.queues import Flow, Lane
    from pathway.sched.sessions import Session


class Account:
    """`running`: its runs that have left for the islands and are not over. `held`: what waits for one of those to end,
    by lane and session. `weight`: as listed, or as an administrator has set it since."""

    __slots__ = ("_bytes", "_puts", "held", "name", "running", "sessions", "terms", "weight")

    def __init__(self, name: str, terms: Terms) -> None:
        self.name = name
        self.terms = terms
        self.weight = terms.weight
        self.sessions: dict[int, Session] = {}
        self.running = 0
        self.held: dict[tuple[Lane, int], Flow] = {}
        self._bytes: dict[Lane, int] = {}
        self._puts: dict[Lane, int] = {}

    @property
    def full(self) -> bool:
        """Whether no more runs may leave now."""
        return self.terms.runs is not None and self.running >= self.terms.runs

    @property
    def bytes(self) -> int:
        return sum(self._bytes.values()) + sum(self._puts.values())

    @property
    def devices(self) -> int:
        return sum(held.request.devices for session in self.sessions.values() for held in session.slices.values())

    # -- what there is ----------------------------------------------------------------------------------------------

    def reported(self, lane: Lane, nbytes: int) -> None:
        """What its sessions hold on the lane's island."""
        self._bytes[lane] = nbytes
        self._puts.pop(lane, None)

    def put(self, lane: Lane, nbytes: int) -> None:
        self._puts[lane] = self._puts.get(lane, 0) + nbytes

    def lane_lost(self, lane: Lane) -> None:
        self._bytes.pop(lane, None)
        self._puts.pop(lane, None)
        self.held = {key: flow for key, flow in self.held.items() if key[0] is not lane}

    # -- what may come ----------------------------------------------------------------------------------------------

    def may_open(self) -> ErrorInfo | None:
        limit = self.terms.sessions
        if limit is None or len(self.sessions) < limit:
            return None
        return self._over(f"it has {len(self.sessions)} sessions", "sessions", limit)

    def may_have_devices(self, devices: int) -> ErrorInfo | None:
        limit = self.terms.devices
        if limit is None or self.devices + devices <= limit:
            return None
        return self._over(f"a slice of {devices} devices, beside {self.devices} that it has", "devices", limit)

    def may_have_bytes(self, nbytes: int) -> ErrorInfo | None:
        """`nbytes` more; at least one, for a run whose results are counted later (A-4)."""
        limit = self.terms.bytes
        if limit is None or self.bytes + nbytes <= limit:
            return None
        return self._over(f"{nbytes} bytes more, beside {self.bytes} that it holds on devices", "bytes", limit)

    def _over(self, what: str, label: str, limit: int) -> ErrorInfo:
        return ErrorInfo("LimitError", f"the key {self.name!r} may have no more: {what} ({label}={limit})")


class Accounts:
    """Those of all keys on the allow-list. They outlive their sessions, with the weight that was set."""

    def __init__(self) -> None:
        self._by_key: dict[str, Account] = {}
        self._of_session: dict[int, Account] = {}

    def listed(self, keys: Mapping[str, tuple[str, Terms]]) -> list[Account]:
        """The allow-list, as it is now: name and terms of each key. Returns the accounts whose weight has changed. A
        weight that an administrator has set stays until another one stands in the list."""
        changed = []
        for key, (name, terms) in keys.items():
            account = self._by_key.get(key)
            if account is None:
                self._by_key[key] = Account(name, terms)
                continue
            before, account.name, account.terms = account.terms, name, terms
            if before.weight != terms.weight:
                account.weight = terms.weight
                changed.append(account)
        for key in [key for key, account in self._by_key.items() if key not in keys and not account.sessions]:
            del self._by_key[key]
        return changed

    def __iter__(self) -> Iterator[Account]:
        return iter(self._by_key.values())

    def of_key(self, key: str | None) -> Account | None:
        return self._by_key.get(key) if key is not None else None

    def of(self, session: int) -> Account | None:
        return self._of_session.get(session)

    def named(self, name: str) -> Account | None:
        return next((account for account in self._by_key.values() if account.name == name), None)

    def opened(self, session: Session) -> None:
        account = self.of_key(session.public_key)
        if account is not None:
            account.sessions[session.id] = session
            self._of_session[session.id] = account

    def closed(self, session: int) -> None:
        account = self._of_session.pop(session, None)
        if account is not None:
            del account.sessions[session]

    def reported(self, lane: Lane, bytes_by_session: Iterable[tuple[int, int, int]]) -> None:
        """A leader's report."""
        if not self._of_session:
            return
        held: dict[Account, int] = {}
        for session, _, nbytes in bytes_by_session:
            account = self._of_session.get(session)
            if account is not None:
                held[account] = held.get(account, 0) + nbytes
        for account in self._by_key.values():
            account.reported(lane, held.get(account, 0))

    def lane_lost(self, lane: Lane) -> None:
        for account in self._by_key.values():
            account.lane_lost(lane)

    def status(self) -> list[dict[str, Any]]:
        return [
            {
                "key": account.name,
                "weight": account.weight,
                "sessions": len(account.sessions),
                "devices": account.devices,
                "bytes": account.bytes,
                "runs_in_flight": account.running,
                "limits": {
                    label: limit
                    for label in ("sessions", "devices", "bytes", "runs")
                    if (limit := getattr(account.terms, label)) is not None
                },
            }
            for account in self._by_key.values()
        ]
