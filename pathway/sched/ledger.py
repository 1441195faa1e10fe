"""What lies in the memory of one incarnation of an island, as the scheduler keeps book of it. Pure.

Devices that every charge so far names together are one *block*, and are counted as one: the work for a run does not
grow with the devices (O-5). A charge that tells two devices of a block apart splits it, once, for good.

A buffer is charged from the start of the run that makes it, or from its put, until the client has released it and every
run of its session that was in flight then has ended: only then nobody reads it any more. In between it is *leaving*.
What is not leaving is *settled*: waiting does not free it.

Invariants
  B-1  `used` is the sum of the buffers on devices and of what the runs in flight, and those about to go, need beyond
       them; `settled` is the sum of the buffers on devices that their clients hold.
  B-2  A buffer that was moved to the host's memory counts there (`spilled_bytes`), and on no device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from pathway.dataflow.memory import Span

Amounts = list[tuple[int, int]]
"""(block, bytes on each of its devices)."""


class Charge:
    """Bytes on devices. It remembers what it is in blocks."""

    __slots__ = ("_amounts", "_version", "spans", "total")

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = tuple(span for span in spans if span[1] and span[0])
        self.total = sum(len(devices) * nbytes for devices, nbytes in self.spans)
        self._amounts: Amounts = []
        self._version: tuple[Ledger, int] | None = None

    def amounts(self, ledger: Ledger) -> Amounts:
        known = self._version
        if known is None or known[0] is not ledger or known[1] != ledger.version:
            self._amounts = ledger.measure(self.spans)
            self._version = (ledger, ledger.version)
        return self._amounts


NOTHING = Charge(())


class Entry:
    """One buffer. `holders`: its client, and every buffer that is assembled from it. `settled`: counted as such.
    `last_start`: the start, as its session counts them, of the last run that makes or reads it. `origin` says what it
    is and where it was made."""

    __slots__ = ("buffer", "charge", "holders", "last_start", "origin", "session", "settled", "sources", "spilled")

    def __init__(self, session: int, buffer: int, charge: Charge, origin: tuple[str, str], last_start: int) -> None:
        self.session = session
        self.buffer = buffer
        self.charge = charge
        self.origin = origin
        self.last_start = last_start
        self.holders = 1
        self.settled = False
        self.sources: tuple[Entry, ...] = ()
        self.spilled = False


class Usage:
    """One session's part of a ledger. `open`: its runs in flight, with the number of their start. `leaving`: released
    buffers, with the number of the last start at that time."""

    __slots__ = ("entries", "leaving", "open", "promised", "settled", "starts", "taken", "used", "void")

    def __init__(self, blocks: int) -> None:
        self.used = [0] * blocks
        self.settled = [0] * blocks
        self.entries: dict[int, Entry] = {}
        self.open: dict[int, int] = {}
        self.starts = 0
        self.taken: dict[int, list[Entry]] = {}  # donated, by the run in flight that took them
        self.void: set[int] = set()  # runs in flight that donate what is not there: their results will be errors
        self.leaving: deque[tuple[int, Entry]] = deque()
        self.promised: list[Charge] = []

    @property
    def oldest_start(self) -> int:
        """Of its runs in flight; that of the next run if there is none."""
        return next(iter(self.open.values())) if self.open else self.starts + 1


class Ledger:
    """`limit_bytes` is the capacity of each device."""

    def __init__(self, limit_bytes: int, devices: int, track_use: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self.version = 0
        self.used = [0]
        self.settled = [0]
        self.spilled_bytes = 0
        self.spills = 0
        self.admissions = 0
        self.usages: dict[int, Usage] = {}
        self.by_use: dict[Entry, None] | None = {} if track_use else None  # the least recently used first
        self._block_of = [0] * devices
        self._sizes = [devices]
        self._promises = False

    # -- blocks -----------------------------------------------------------------------------------------------------

    def measure(self, spans: tuple[Span, ...]) -> Amounts:
        """`spans` in blocks, which are split where they must be."""
        for devices, _ in spans:
            self._tell_apart(devices)
        totals: dict[int, int] = {}
        for devices, nbytes in spans:
            for block in {self._block_of[device] for device in devices}:
                totals[block] = totals.get(block, 0) + nbytes
        return list(totals.items())

    def _tell_apart(self, devices: Iterable[int]) -> None:
        named: dict[int, list[int]] = {}
        for device in dict.fromkeys(devices):
            named.setdefault(self._block_of[device], []).append(device)
        for block, members in named.items():
            if len(members) < self._sizes[block]:
                new = len(self._sizes)
                self._sizes[block] -= len(members)
                self._sizes.append(len(members))
                for device in members:
                    self._block_of[device] = new
                for amounts in (self.used, self.settled):
                    amounts.append(amounts[block])
                for usage in self.usages.values():
                    usage.used.append(usage.used[block])
                    usage.settled.append(usage.settled[block])
                self.version += 1

    def devices_of(self, block: int) -> list[int]:
        return [device for device, other in enumerate(self._block_of) if other == block]

    def block_of(self, device: int) -> int:
        return self._block_of[device]

    def usage(self, session: int) -> Usage:
        found = self.usages.get(session)
        if found is None:
            found = self.usages[session] = Usage(len(self.used))
        return found

    # -- amounts ----------------------------------------------------------------------------------------------------

    def add(self, session: int, charge: Charge, sign: int = 1) -> None:
        """What a run needs beyond buffers."""
        own = self.usage(session).used
        for block, nbytes in charge.amounts(self):
            self.used[block] += sign * nbytes
            own[block] += sign * nbytes

    def _settle(self, entry: Entry, settled: bool) -> None:
        if entry.settled is not settled:
            entry.settled = settled
            own = self.usage(entry.session).settled
            for block, nbytes in entry.charge.amounts(self):
                self.settled[block] += nbytes if settled else -nbytes
                own[block] += nbytes if settled else -nbytes

    def kept_from(self, session: int, block: int) -> int:
        """Bytes that were promised to other sessions there, and that they do not use."""
        if not self._promises:
            return 0
        kept = 0
        for other, usage in self.usages.items():
            if other != session and usage.promised:
                kept += max(0, self.promised(usage, block) - usage.used[block])
        return kept

    def promised(self, usage: Usage, block: int) -> int:
        return sum(nbytes for charge in usage.promised for of, nbytes in charge.amounts(self) if of == block)

    def promise(self, session: int, charge: Charge) -> None:
        """A slice was asked for with this memory: the session finds it there, whatever others do."""
        charge.amounts(self)
        self.usage(session).promised.append(charge)
        self._promises = True

    def take_back(self, session: int, charge: Charge) -> None:
        self.usage(session).promised.remove(charge)
        self._promises = any(usage.promised for usage in self.usages.values())

    # -- buffers ----------------------------------------------------------------------------------------------------

    def enter(self, session: int, buffer: int, charge: Charge, origin: tuple[str, str]) -> Entry:
        """The buffer exists from here on; its bytes are added by the caller."""
        usage = self.usage(session)
        entry = usage.entries[buffer] = Entry(session, buffer, charge, origin, usage.starts)
        self._settle(entry, True)
        if self.by_use is not None:
            self.by_use[entry] = None
        return entry

    def assemble(self, session: int, buffer: int, sources: Iterable[int], origin: tuple[str, str]) -> None:
        """The buffer is made of shards of others: it takes nothing of its own, and keeps them."""
        entries = self.usage(session).entries
        entry = self.enter(session, buffer, NOTHING, origin)
        entry.sources = tuple(entries[source] for source in dict.fromkeys(sources) if source in entries)
        for source in entry.sources:
            source.holders += 1

    def donate(self, session: int, buffer: int, run: int) -> None:
        """A run in flight takes the buffer's memory, which counts until the run has ended."""
        usage = self.usage(session)
        entry = usage.entries.pop(buffer, None)
        if entry is None:
            usage.void.add(run)
        else:
            if entry.holders == 1:
                self._settle(entry, False)
            usage.taken.setdefault(run, []).append(entry)

    def release(self, session: int, buffers: Iterable[int]) -> bool:
        """The client holds these no longer. True if something is free at once."""
        usage = self.usages.get(session)
        if usage is None:
            return False
        freed = False
        for buffer in buffers:
            entry = usage.entries.pop(buffer, None)
            if entry is None:
                continue
            if usage.open:
                if entry.holders == 1:
                    self._settle(entry, False)
                usage.leaving.append((usage.starts, entry))
            else:
                self._drop_holder(entry)
                freed = True
        return freed

    def _drop_holder(self, entry: Entry) -> None:
        entry.holders -= 1
        if entry.holders:
            return
        self._settle(entry, False)
        if entry.spilled:
            self.spilled_bytes -= entry.charge.total
        else:
            self.add(entry.session, entry.charge, -1)
        if self.by_use is not None:
            self.by_use.pop(entry, None)
        for source in entry.sources:
            self._drop_holder(source)

    # -- runs -------------------------------------------------------------------------------------------------------

    def started(self, session: int, run: int) -> int:
        usage = self.usage(session)
        usage.starts += 1
        usage.open[run] = usage.starts
        return usage.starts

    def ended(self, session: int, run: int) -> None:
        """What was released while it was in flight may be free now."""
        usage = self.usages[session]
        del usage.open[run]
        usage.void.discard(run)
        for entry in usage.taken.pop(run, ()):
            self._drop_holder(entry)
        leaving = usage.leaving
        while leaving and leaving[0][0] < usage.oldest_start:
            self._drop_holder(leaving.popleft()[1])

    def close(self, session: int) -> None:
        """The session is over, with all that it had here."""
        usage = self.usages.pop(session, None)
        if usage is None:
            return
        for block, nbytes in enumerate(usage.used):
            self.used[block] -= nbytes
        for block, nbytes in enumerate(usage.settled):
            self.settled[block] -= nbytes
        for entry in _all_of(usage):
            if entry.spilled:
                self.spilled_bytes -= entry.charge.total
            if self.by_use is not None:
                self.by_use.pop(entry, None)
        self._promises = any(other.promised for other in self.usages.values())

    # -- the host's memory ------------------------------------------------------------------------------------------

    def touch(self, entry: Entry) -> None:
        """It was used just now."""
        if self.by_use is not None and entry in self.by_use:
            del self.by_use[entry]
            self.by_use[entry] = None

    def spill(self, entry: Entry) -> None:
        self.add(entry.session, entry.charge, -1)
        self._settle(entry, False)
        entry.spilled = True
        self.spilled_bytes += entry.charge.total
        self.spills += 1

    def restore(self, entry: Entry) -> None:
        """Brought back for a run; the caller has seen to it that there is room."""
        self.add(entry.session, entry.charge)
        self._settle(entry, True)
        entry.spilled = False
        self.spilled_bytes -= entry.charge.total

    # -- for people and tests ---------------------------------------------------------------------------------------

    def largest(self, session: int, count: int = 4) -> list[Entry]:
        """The session's largest buffers on devices."""
        entries = self.usage(session).entries.values()
        on_devices = [entry for entry in entries if not entry.spilled and entry.charge.total]
        return sorted(on_devices, key=lambda entry: -max(nbytes for _, nbytes in entry.charge.spans))[:count]

    def validate(self) -> None:
        """Assert B-1, as far as buffers go, and B-2. For tests."""
        used, settled = [0] * len(self.used), [0] * len(self.used)
        spilled = 0
        for session, usage in self.usages.items():
            own = [0] * len(self.used)
            for entry in _all_of(usage):
                assert entry.session == session
                if entry.spilled:
                    assert not entry.settled
                    spilled += entry.charge.total
                    continue
                for block, nbytes in entry.charge.amounts(self):
                    own[block] += nbytes
                    if entry.settled:
                        settled[block] += nbytes
            if not usage.open:  # what runs in flight make is part of what they need
                assert all(some <= all_ for some, all_ in zip(own, usage.used, strict=True)), "B-1"
                assert not usage.leaving
                assert not usage.taken
            for block, nbytes in enumerate(usage.used):
                used[block] += nbytes
        assert used == self.used, "B-1"
        assert settled == self.settled, "B-1"
        assert spilled == self.spilled_bytes, "B-2"


def _all_of(usage: Usage) -> Iterator[Entry]:
    """Every buffer of a session that takes memory, on devices or off them, each once."""
    found: dict[Entry, None] = {}
    stack = [*usage.entries.values(), *(entry for _, entry in usage.leaving)]
    stack += [entry for taken in usage.taken.values() for entry in taken]
    while stack:
        entry = stack.pop()
        if entry not in found:
            found[entry] = None
            stack += entry.sources
    return iter(found)
