"""Admission by memory: a run goes when its peak fits beside what lies on its devices, a put when the buffer does. Pure.

What a run needs is known before it runs: its plan's liveness and the temporaries that XLA reports (`dataflow.memory`).
What there is stands in the `ledger` of each island that has a limit; on others nothing is counted.

Invariants
  M-1  On no device is more used than its limit: what was admitted, and no more, ever gets there.
  M-2  All or nothing: a run gets its memory on all its islands at once, when it has all its turns (S-1) and before it
       claims credits (S-3). What it was given comes back when it ends; so whatever is in flight ends without waiting
       for memory, and waits for memory make no circle.
  M-3  A run that does not fit waits, and everybody else goes on. Nothing starves: when it was overtaken `OVERTAKEN`
       times, and would fit beside what clients hold, memory that comes free is kept for it. Where what clients hold is
       in its way, only they can help it, and it holds up nobody meanwhile.
  M-4  What can never fit is refused: at once where the devices are too small; after `patience_s` where those that hold
       the memory all wait themselves: its own session, which releases nothing, or several that wait for each other. Of
       those, one that is full of its own results, or that which holds most.
  M-5  A release does not stand behind a run that waits for memory, unless that run, or another that is queued before
       the release, reads what is released (O-4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from pathway.dataflow.memory import Use, largest_at_peak, origins, part_memory, size, spans
from pathway.dataflow.plan import Part
from pathway.errors import ErrorInfo
from pathway.sched.events import Instruction, Send
from pathway.sched.ledger import NOTHING, Charge, Entry, Ledger
from pathway.sched.queues import Lane, Put, Run
from pathway.transport.messages import INLINE_BYTES, SpillBuffers

OVERTAKEN = 64
"""How many others may be admitted on an island before memory there is kept for the one that has waited longest."""

_arguments_decoder = msgspec.msgpack.Decoder(tuple[int | bytes, ...])
_part_decoder = msgspec.msgpack.Decoder(Part)


class Demand:
    """What one part of a plan needs on a limited island. `beyond`: its peak without its arguments. `origins[i]`: what
    result i is."""

    __slots__ = ("beyond", "donates", "origins", "peak", "results", "written")

    def __init__(self, part: Part, temp_bytes: Mapping[str, int]) -> None:
        needs = part_memory(part, temp_bytes)
        beyond = dict(needs.beyond)
        for devices, nbytes in needs.arguments:
            if 0 < nbytes <= INLINE_BYTES:  # it may ride in the run's message, and then lies nowhere yet
                for device in devices:
                    beyond[device] += nbytes
        self.peak = needs.peak
        self.beyond = Charge(spans(beyond))
        self.donates = needs.donated
        self.results = tuple(
            (number, Charge((span,))) for (number, _), span in zip(part.results, needs.results, strict=True)
        )
        self.written = Charge(needs.results)
        made = origins(part)
        self.origins = tuple(made[slot] for _, slot in part.results)


class PlanNeeds:
    """What a plan needs on each of its islands (None: one without a limit), once its computations are compiled."""

    __slots__ = ("demands", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.demands: tuple[Demand | None, ...] | None = None

    def learn(self, lanes: Iterable[Lane], payloads: Iterable[bytes], compiled: bool) -> ErrorInfo | None:
        """Returns why the plan can never run (M-4), if it cannot. Where all its computations are `compiled`, its needs
        are known from here on; before that, its arrays alone may be too much."""
        demands: list[Demand | None] = []
        for lane, payload in zip(lanes, payloads, strict=True):
            if lane.ledger is None:
                demands.append(None)
                continue
            part = _part_decoder.decode(payload)
            demand = Demand(part, lane.temp_bytes)
            most = max(demand.peak.values(), default=0)
            if most > lane.ledger.limit_bytes:
                return too_large(part, lane, most)
            demands.append(demand)
        if compiled:
            self.demands = tuple(demands)
        return None


def too_large(part: Part, lane: Lane, nbytes: int) -> ErrorInfo:
    """A plan whose peak no device of the island can hold."""
    assert lane.ledger is not None
    uses = largest_at_peak(part, lane.temp_bytes)
    return ErrorInfo(
        "DeviceMemoryError",
        f"{part.plan_name} needs {size(nbytes)} on a device of island {lane.island}, which has "
        f"{size(lane.ledger.limit_bytes)}; the largest at its peak: {_listed(uses)}",
        program=part.plan_name,
        island=lane.island,
        source=next((use.source for use in uses if use.source), ""),
    )


class Waiting:
    """A run, or a put, that waits for memory. `needs`: what it must have beyond what is there."""

    __slots__ = ("needs", "own", "seen", "session", "what")

    def __init__(
        self, what: Run | Put, session: int, needs: dict[Ledger, tuple[Charge, ...]], own: frozenset[Entry]
    ) -> None:
        self.what = what
        self.session = session
        self.needs = needs
        self.own = own  # buffers that it reads
        self.seen = {ledger: ledger.admissions for ledger in needs}

    def amounts(self, ledger: Ledger) -> dict[int, int]:
        totals: dict[int, int] = {}
        for charge in self.needs[ledger]:
            for block, nbytes in charge.amounts(ledger):
                totals[block] = totals.get(block, 0) + nbytes
        return totals

    def is_aged(self, ledger: Ledger) -> bool:
        return ledger.admissions - self.seen[ledger] >= OVERTAKEN


class Memory:
    """`waiting`: in the order in which they began to wait. `stirred`: something has come free since `ready` last
    looked. `spill`: move what was not used for longest to the hosts' memory when that makes room."""

    def __init__(self, spill: bool = False, name_of: Callable[[int], str] = str) -> None:
        self.spill = spill
        self.name_of = name_of
        self.waiting: dict[Run | Put, Waiting] = {}
        self.stirred = False
        self._pinned: dict[Run, frozenset[Entry]] = {}  # what admitted runs read that have not gone yet
        self._stuck: dict[int, float] = {}  # sessions whose waits are hopeless, since when

    # -- asking -----------------------------------------------------------------------------------------------------

    def admit_run(self, run: Run, out: list[Instruction], wait: bool = True) -> bool:
        """The run has all its turns: give it all that it needs, or let it wait."""
        assert run.needs is not None
        demands = run.needs.demands
        if demands is None:
            if wait:
                self.waiting.setdefault(run, Waiting(run, run.session, {}, frozenset()))
            return False
        if not self.waiting and not self.spill and self._admit_at_once(run, demands):
            return True
        found = self.waiting.get(run)
        if found is None or not found.needs or self.spill:  # what it reads may have been moved away meanwhile
            before, found = found, self._waiting_for(run, demands)
            if before is not None:
                found.seen.update(before.seen)
        if not self._get(found, out):
            if wait:
                self.waiting[run] = found  # one that waits already keeps its place in line
            return False
        for lane, demand in zip(run.lanes, demands, strict=True):
            if demand is not None and lane.ledger is not None:
                lane.ledger.add(run.session, demand.beyond)
        run.admitted = True
        if found.own:
            self._pinned[run] = found.own
        return True

    def _admit_at_once(self, run: Run, demands: tuple[Demand | None, ...]) -> bool:
        """The common case: nobody waits, and it fits."""
        for lane, demand in zip(run.lanes, demands, strict=True):
            ledger = lane.ledger
            if demand is not None and ledger is not None:
                for block, nbytes in demand.beyond.amounts(ledger):
                    free = ledger.limit_bytes - ledger.used[block]
                    if nbytes > free - ledger.kept_from(run.session, block):
                        return False
        for lane, demand in zip(run.lanes, demands, strict=True):
            if demand is not None and lane.ledger is not None:
                lane.ledger.add(run.session, demand.beyond)
                lane.ledger.admissions += 1
        run.admitted = True
        return True

    def admit_put(self, put: Put, out: list[Instruction]) -> bool:
        """The put's place in its session's flow has come."""
        ledger = put.lane.ledger
        assert ledger is not None
        found = self.waiting.get(put) or Waiting(put, put.session, {ledger: (put.charge,)}, frozenset())
        if not self._get(found, out):
            self.waiting[put] = found
            return False
        put.admitted = True
        ledger.add(put.session, put.charge)
        ledger.enter(put.session, put.message.buffer, put.charge, put.origin)
        return True

    def _waiting_for(self, run: Run, demands: tuple[Demand | None, ...]) -> Waiting:
        needs: dict[Ledger, tuple[Charge, ...]] = {}
        own: set[Entry] = set()
        for index, (lane, demand) in enumerate(zip(run.lanes, demands, strict=True)):
            ledger = lane.ledger
            if demand is None or ledger is None:
                continue
            charges = [demand.beyond]
            if self.spill:
                entries = ledger.usage(run.session).entries
                for buffer in buffers_read(run, index):
                    entry = entries.get(buffer)
                    for each in (entry, *entry.sources) if entry is not None else ():
                        if each not in own:
                            own.add(each)
                            if each.spilled:
                                charges.append(each.charge)
            needs[ledger] = tuple(charges)
        return Waiting(run, run.session, needs, frozenset(own))

    def _get(self, found: Waiting, out: list[Instruction]) -> bool:
        """Whether it fits, perhaps after others were moved away. Then what it reads is on devices."""
        if not self._fits(found) and not (self.spill and self._make_room(found, out) and self._fits(found)):
            return False
        for entry in found.own:
            if entry.spilled:
                self._ledger_of(found, entry).restore(entry)
        for ledger in found.needs:
            ledger.admissions += 1
        if self.waiting.pop(found.what, None) is not None:
            self._stuck.pop(found.session, None)
        return True

    def _ledger_of(self, found: Waiting, entry: Entry) -> Ledger:
        return next(ledger for ledger in found.needs if entry in (ledger.by_use or ()))

    def _fits(self, found: Waiting) -> bool:
        for ledger in found.needs:
            first = self._kept_for(ledger, found)
            kept = first.amounts(ledger) if first is not None else {}
            for block, nbytes in found.amounts(ledger).items():
                beside = kept.get(block, 0) + ledger.kept_from(found.session, block)
                if nbytes > 0 and ledger.used[block] + nbytes + beside > ledger.limit_bytes:
                    return False
        return True

    def _kept_for(self, ledger: Ledger, asking: Waiting) -> Waiting | None:
        """For whom memory that comes free is kept now (M-3)."""
        for other in self.waiting.values():
            if other.what is asking.what:
                return None
            if ledger in other.needs and other.is_aged(ledger) and self._can_come(other):
                return other
        return None

    def _can_come(self, found: Waiting) -> bool:
        """It fits as soon as what is in flight has ended."""
        return all(
            ledger.settled[block] + nbytes + ledger.kept_from(found.session, block) <= ledger.limit_bytes
            for ledger in found.needs
            for block, nbytes in found.amounts(ledger).items()
        )

    # -- runs -------------------------------------------------------------------------------------------------------

    def started(self, run: Run) -> None:
        """The run leaves for its islands: its results exist from here on, and what it donates is its own."""
        demands = run.needs.demands if run.needs is not None else None
        if demands is None:
            return
        self._pinned.pop(run, None)
        for index, (lane, demand) in enumerate(zip(run.lanes, demands, strict=True)):
            ledger = lane.ledger
            if demand is None or ledger is None:
                continue
            start = ledger.started(run.session, run.number)
            if demand.donates or self.spill:
                self._note_reads(ledger, run, index, demand, start)
            void = run.number in ledger.usage(run.session).void
            for (number, charge), origin in zip(demand.results, demand.origins, strict=True):
                ledger.enter(run.session, run.first_result + number, NOTHING if void else charge, origin)

    def _note_reads(self, ledger: Ledger, run: Run, index: int, demand: Demand, start: int) -> None:
        arguments = arguments_of(run, index)
        entries = ledger.usage(run.session).entries
        if self.spill:
            for argument in arguments:
                entry = entries.get(argument) if isinstance(argument, int) else None
                for each in (entry, *entry.sources) if entry is not None else ():
                    each.last_start = start
                    ledger.touch(each)
        for position in demand.donates:
            argument = arguments[position] if position < len(arguments) else b""
            if isinstance(argument, int):
                ledger.donate(run.session, argument, run.number)

    def ended(self, lane: Lane, run: Run, index: int) -> None:
        """A part of the run is over, as a value or as an error."""
        ledger = lane.ledger
        demand = run.needs.demands[index] if run.needs is not None and run.needs.demands is not None else None
        if demand is None or ledger is None or run.number not in ledger.usage(run.session).open:
            return
        session = run.session
        ledger.add(session, demand.beyond, -1)
        if run.number not in ledger.usage(session).void:
            ledger.add(session, demand.written)
        ledger.ended(session, run.number)
        self.stirred = True

    def withdrawn(self, run: Run) -> None:
        """The run does not go."""
        if self.waiting.pop(run, None) is not None:
            self.stirred = True
        if run.admitted and run.needs is not None and run.needs.demands is not None:
            run.admitted = False
            self._pinned.pop(run, None)
            for lane, demand in zip(run.lanes, run.needs.demands, strict=True):
                if demand is not None and lane.ledger is not None:
                    lane.ledger.add(run.session, demand.beyond, -1)
            self.stirred = True

    # -- what comes free ---------------------------------------------------------------------------------------------

    def released(self, lane: Lane, session: int, buffers: Iterable[int]) -> None:
        """A release leaves for the island."""
        if lane.ledger is not None:
            self._stuck.pop(session, None)
            if lane.ledger.release(session, buffers):
                self.stirred = True

    def session_closed(self, session: int, lanes: Iterable[Lane]) -> None:
        for what in [what for what, found in self.waiting.items() if found.session == session]:
            del self.waiting[what]
        self._stuck.pop(session, None)
        for lane in lanes:
            if lane.ledger is not None:
                lane.ledger.close(session)
                self.stirred = True

    def lane_lost(self, lane: Lane) -> None:
        for what in [what for what, found in self.waiting.items() if lane.ledger in found.needs]:
            del self.waiting[what]
        self.stirred = True

    def ready(self, out: list[Instruction]) -> Iterator[Run | Put]:
        """Those that wait and fit now, the longest wait first. They are admitted."""
        self.stirred = False
        for what in list(self.waiting):
            if what not in self.waiting:
                continue
            if self.admit_put(what, out) if isinstance(what, Put) else self.admit_run(what, out):
                yield what

    # -- refusing (M-4) ---------------------------------------------------------------------------------------------

    def refused(self, patience_s: float, now: float) -> list[tuple[Run | Put, ErrorInfo]]:
        """What must be refused so that others, or later ones, can go on. Asked again when that is done."""
        hopeless = self._hopeless()
        sessions = {found.session for found, _, _ in hopeless}
        self._stuck = {session: self._stuck.get(session, now) for session in sessions}
        late = [one for one in hopeless if now - self._stuck[one[0].session] >= patience_s]
        alone = [one for one in late if _is_full_of_its_own(*one)]
        if not alone and late:
            alone = [max(late, key=lambda one: one[1].usage(one[0].session).settled[one[2]])]
        return [(found.what, self._full(found, ledger, block)) for found, ledger, block in alone]

    def _hopeless(self) -> list[tuple[Waiting, Ledger, int]]:
        """Those that no session which can go on could help, with where. A session can go on if it waits for nothing,
        has something in flight, or would get what it waits for if all that can go on released what they hold."""
        left = [found for found in self.waiting.values() if found.needs]
        still = {found.session for found in left}
        still -= {found.session for found in self.waiting.values() if not found.needs}
        still -= {session for session in still if self._has_in_flight(session)}
        while True:
            blocked = [(found, where) for found in left if (where := self._blocked(found, still)) is not None]
            waits = {found.what for found, _ in blocked}
            saved = still & {found.session for found in left if found.what not in waits}
            if not saved:
                return [(found, *where) for found, where in blocked if found.session in still]
            still -= saved

    def _has_in_flight(self, session: int) -> bool:
        ledgers = {ledger for found in self.waiting.values() for ledger in found.needs}
        usages = [ledger.usages[session] for ledger in ledgers if session in ledger.usages]
        return any(usage.open or usage.leaving for usage in usages)

    def _blocked(self, found: Waiting, still: set[int]) -> tuple[Ledger, int] | None:
        """Where it does not fit beside what these sessions hold."""
        for ledger in found.needs:
            for block, nbytes in found.amounts(ledger).items():
                held = sum(ledger.usages[session].settled[block] for session in still if session in ledger.usages)
                if nbytes > 0 and held + nbytes > ledger.limit_bytes:
                    return ledger, block
        return None

    def _full(self, found: Waiting, ledger: Ledger, block: int) -> ErrorInfo:
        lane = next(lane for lane in found.what.lanes if lane.ledger is ledger)
        usage = ledger.usage(found.session)
        need = found.amounts(ledger)[block]
        name = found.what.needs.name if isinstance(found.what, Run) and found.what.needs is not None else "a put"
        uses = [Use(max(n for _, n in entry.charge.spans), *entry.origin) for entry in ledger.largest(found.session)]
        others = "" if _is_full_of_its_own(found, ledger, block) else "; the rest by sessions that wait for it in turn"
        return ErrorInfo(
            "DeviceMemoryError",
            f"{name} needs {size(need)} on a device of island {lane.island}, which has {size(ledger.limit_bytes)}; "
            f"{size(usage.settled[block])} of that are held by results and arrays of this client, which it does not "
            f"release{others}; its largest: {_listed(uses)}",
            program=name,
            island=lane.island,
            source=next((use.source for use in uses if use.source), ""),
        )

    # -- moving away (B-2) ------------------------------------------------------------------------------------------

    def _make_room(self, found: Waiting, out: list[Instruction]) -> bool:
        """Move what nobody has used for longest, until it fits beside what stays. False where that does not help, or
        where waiting is enough."""
        if self._can_come(found):
            return False
        chosen: list[tuple[Ledger, Entry]] = []
        pinned = frozenset[Entry]().union(*self._pinned.values())
        for ledger in found.needs:
            missing = {
                block: ledger.settled[block] + nbytes + ledger.kept_from(found.session, block) - ledger.limit_bytes
                for block, nbytes in found.amounts(ledger).items()
                if nbytes > 0
            }
            for entry in ledger.by_use or ():
                if all(nbytes <= 0 for nbytes in missing.values()):
                    break
                if entry in found.own or entry in pinned or not _is_cold(ledger, entry):
                    continue
                amounts = dict(entry.charge.amounts(ledger))
                if any(missing.get(block, 0) > 0 for block in amounts):
                    chosen.append((ledger, entry))
                    for block, nbytes in amounts.items():
                        if block in missing:
                            missing[block] -= nbytes
            if any(nbytes > 0 for nbytes in missing.values()):
                return False
        lanes = {lane.ledger: lane for lane in found.what.lanes}
        for ledger, entry in chosen:
            out.append(Send(lanes[ledger].leader, SpillBuffers(entry.session, (entry.buffer,))))
            ledger.spill(entry)
            self.stirred = True  # there may be room for others, too
        return True

    # -- waits (O-8) ------------------------------------------------------------------------------------------------

    def reason(self, what: Run | Put) -> tuple[str, str]:
        """Why it waits, and on which islands."""
        found = self.waiting[what]
        if not found.needs:
            return "its plan is being compiled: only then it is known how much memory it needs", ""
        texts, islands = [], []
        for lane in what.lanes:
            ledger = lane.ledger
            if ledger not in found.needs or ledger is None:
                continue
            short = [(ledger.used[b] + n - ledger.limit_bytes, n, b) for b, n in found.amounts(ledger).items()]
            over, need, block = max(short, default=(0, 0, 0))
            if over <= 0 and len(found.needs) > 1:
                continue
            free = ledger.limit_bytes - ledger.used[block]
            islands.append(lane.island)
            texts.append(
                f"waits for {size(need)} on {lane.island}, where {size(free)} are free; {self._who(ledger, block)}"
            )
        return "; ".join(texts), ", ".join(islands)

    def _who(self, ledger: Ledger, block: int) -> str:
        holders = []
        for session, usage in ledger.usages.items():
            held, used = usage.settled[block], usage.used[block]
            kept = max(0, ledger.promised(usage, block) - used) if usage.promised else 0
            parts = [f"{size(held)} held by session {self.name_of(session)}"] if held else []
            if used > held:
                whose = "its runs" if held else f"runs of session {self.name_of(session)}"
                parts.append(f"{size(used - held)} in use by {whose}")
            parts += [f"{size(kept)} promised to a slice of session {self.name_of(session)}"] if kept else []
            if parts:
                holders.append((held + used + kept, ", ".join(parts)))
        holders.sort(reverse=True)
        return "; ".join(text for _, text in holders[:4]) or "nothing is held there"


def _is_full_of_its_own(found: Waiting, ledger: Ledger, block: int) -> bool:
    """It would not fit there if all others were gone."""
    return ledger.usage(found.session).settled[block] + found.amounts(ledger)[block] > ledger.limit_bytes


def _is_cold(ledger: Ledger, entry: Entry) -> bool:
    """A buffer that can be moved: its client holds it, and nothing in flight makes or reads it."""
    usage = ledger.usage(entry.session)
    return (
        entry.settled
        and entry.holders == 1
        and not entry.sources
        and bool(entry.charge.total)
        and entry.last_start < usage.oldest_start
    )


def arguments_of(run: Run, index: int) -> tuple[int | bytes, ...]:
    """The arguments of a run's part; none where they are not well-formed, which its island will say."""
    try:
        return _arguments_decoder.decode(run.arguments[index])
    except (msgspec.DecodeError, RecursionError):
        return ()


def buffers_read(run: Run, index: int) -> tuple[int, ...]:
    """The buffers among the arguments of a run's part."""
    return tuple(one for one in arguments_of(run, index) if isinstance(one, int))


def _listed(uses: Iterable[Use]) -> str:
    return ", ".join(map(str, uses)) or "nothing of it is known"
