"""Policies: whose run goes next on a group of devices. Pure values, which make pure state. Users can write their own.

A *group* is the devices of an island that its clients' slices have in common: work on it is time-shared, work on two
groups is not. Each group has a `Line`, made by the policy. Of every session with runs for the group, the first is
ranked by the line, once, when it becomes the session's first there; the least rank goes next. That is all a policy
decides: what goes together, how much is in flight and that nothing deadlocks is up to `lanes`.

Invariants (of `Fair`, after start-time fair queueing: Goyal, Vin and Cheng, 1996)
  F-1  While two sessions both have runs waiting, the device time that each was given, divided by its weight, differs by
       at most one run of each and what is in flight.
  F-2  A session that had nothing to run neither saves up time nor owes any: it starts at the group's present.
  F-3  Shares are of measured time. A run is charged what its plan took lately, at once, and the difference when the
       time is known; so an estimate that is wrong moves a session's next run and never its share.
  F-4  A line always has a next run while any waits: no device idles for the sake of a share.

What was rejected: lotteries (right on average, and not within the 5 s that people look at); deficit round robin (a
newcomer waits for a whole round); time slices by clock (devices cannot be interrupted, and work comes in pieces shorter
than a slice).
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pathway.errors import ConfigError

WINDOW_US = 1500.0
"""How much expected device time may be past the leader of a group: little, so that a policy can act, and enough for the
way to a busy machine and back."""


class Tenant:
    """A session, as policies see it. `weight` and `priority` can change at any time."""

    __slots__ = ("priority", "session", "weight")

    def __init__(self, session: int, weight: float = 1.0, priority: int = 0) -> None:
        self.session = session
        self.weight = weight
        self.priority = priority


class Line(Protocol):
    """The order of one group of devices."""

    def came(self, tenant: Tenant) -> None:
        """The tenant has runs for the group, and had none that waited."""

    def rank(self, tenant: Tenant, arrival: int, since_s: float) -> float:
        """The rank of the tenant's next run, which is the `arrival`-th of all and has waited since `since_s`. The least
        rank goes next; of equals, the one that came first. Asked again after `took`."""

    def went(self, tenant: Tenant, rank: float, expected_us: float) -> None:
        """The tenant's run was chosen. It is expected to hold the devices for `expected_us`."""

    def took(self, tenant: Tenant, expected_us: float, measured_us: float) -> bool:
        """One of its runs is over, and was measured. Whether that moves the rank of the run that waits now."""

    def left(self, session: int) -> None:
        """The session is closed."""


@runtime_checkable
class Policy(Protocol):
    """What makes the lines. A pure value: frozen, comparable, printable.

    `window_us`: how much expected device time may be in flight on a group, infinite for a policy that needs no say."""

    @property
    def name(self) -> str: ...

    @property
    def window_us(self) -> float: ...

    def line(self) -> Line: ...


# -- fifo --------------------------------------------------------------------------------------------------------------


class _InOrder:
    """Nothing that happens changes a rank."""

    def came(self, tenant: Tenant) -> None: ...

    def went(self, tenant: Tenant, rank: float, expected_us: float) -> None: ...

    def took(self, tenant: Tenant, expected_us: float, measured_us: float) -> bool:
        return False

    def left(self, session: int) -> None: ...


class _FifoLine(_InOrder):
    def rank(self, tenant: Tenant, arrival: int, since_s: float) -> float:
        return arrival


@dataclass(frozen=True)
class Fifo:
    """First come, first served. A run that waits for another island, too, is overtaken meanwhile."""

    name: str = "fifo"
    window_us: float = math.inf

    def line(self) -> Line:
        return _FifoLine()


# -- priority ----------------------------------------------------------------------------------------------------------


class _PriorityLine(_InOrder):
    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s

    def rank(self, tenant: Tenant, arrival: int, since_s: float) -> float:
        return since_s - tenant.priority * self._ageing_s


@dataclass(frozen=True)
class Priority:
    """The highest priority first. Waiting counts: a run of one priority less is as good after `ageing_s`, so nothing
    starves. All age at the same pace, so the order of two runs that wait never changes."""

    ageing_s: float = 10.0
    name: str = "priority"
    window_us: float = WINDOW_US

    def line(self) -> Line:
        return _PriorityLine(self.ageing_s)


# -- fair --------------------------------------------------------------------------------------------------------------


class _FairLine:
    """Virtual time is device time divided by weight. `_now` is the start of the run that went last; `_due[session]` is
    where the session's next run would start."""

    def __init__(self) -> None:
        self._now = 0.0
        self._due: dict[int, float] = {}

    def came(self, tenant: Tenant) -> None:
        if self._due.get(tenant.session, -math.inf) < self._now:
            self._due[tenant.session] = self._now  # F-2

    def rank(self, tenant: Tenant, arrival: int, since_s: float) -> float:
        return self._due.setdefault(tenant.session, self._now)

    def went(self, tenant: Tenant, rank: float, expected_us: float) -> None:
        if rank > self._now:
            self._now = rank
        self._due[tenant.session] = rank + expected_us / tenant.weight

    def took(self, tenant: Tenant, expected_us: float, measured_us: float) -> bool:
        due = self._due.get(tenant.session)
        if due is None or expected_us == measured_us:
            return False
        self._due[tenant.session] = due + (measured_us - expected_us) / tenant.weight  # F-3
        return True

    def left(self, session: int) -> None:
        self._due.pop(session, None)


@dataclass(frozen=True)
class Fair:
    """Device time in proportion to the sessions' weights."""

    name: str = "fair"
    window_us: float = WINDOW_US

    def line(self) -> Line:
        return _FairLine()


BUILT_IN: dict[str, Policy] = {policy.name: policy for policy in (Fifo(), Fair(), Priority())}


def load_policy(name: str) -> Policy:
    """A policy by its name, or by "module:object": a `Policy`, or what makes one when it is called. Raises
    `ConfigError`."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(f"there is no policy {name!r}; there are {', '.join(BUILT_IN)}, and yours as 'module:object'")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
        policy = found if isinstance(found, Policy) and not isinstance(found, type) else found()
    except Exception as error:
        raise ConfigError(f"policy {name!r}: {type(error).__name__}: {error}") from error
    if not isinstance(policy, Policy):
        raise ConfigError(
            f"policy {name!r} is a {type(policy).__name__}, which lacks what pathway.sched.policies.Policy has"
        )
    return policy
