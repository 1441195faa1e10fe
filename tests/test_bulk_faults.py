"""Bulk with a fault at every message: what is dropped goes on both sides, what is not arrives whole, once, and no
credit is lost. No sockets, no clock: the messages of one link, delivered one by one, and answers late or at once."""

from __future__ import annotations

import functools
import random
import weakref
from typing import Any

import numpy as np
import pytest

from pathway.transport import messages as m
from pathway.transport.bulk import TELL_TAKEN_BYTES
from pathway.transport.bulklink import BULK, BulkLink
from pathway.transport.messages import CHUNK_BYTES

TRANSFERS = {1: (1, 1, 6), 2: (1, 2, 5), 3: (2, 1, 7), 4: (1, 1, 0), 5: (2, 2, 3)}
"""transfer -> session, run, chunks (0: so small that it comes with its header)"""


class Line:
    """Both ends of a link, and what is between them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.there: list[tuple[Any, Any]] = []
        self.back: list[Any] = []
        self.announced: set[int] = set()
        self.done: dict[int, Any] = {}
        self.data: dict[int, weakref.ref[Any]] = {}
        self.sending = BulkLink(lambda message: self.there.append((message, None)), self._with_blob)
        self.receiving = BulkLink(self.back.append, lambda message, blob: None)
        self.sending.sender._credit_bytes = TELL_TAKEN_BYTES
        for transfer, (session, run, chunks) in TRANSFERS.items():
            data = np.full(chunks * CHUNK_BYTES or 1000, transfer, np.uint8)
            self.data[transfer] = weakref.ref(data)
            header = m.EdgeShard(transfer, session, run, 0, 0, ((0, len(data)),), len(data))
            self.sending.sender.send(header, transfer, data)

    def _with_blob(self, message: Any, blob: Any) -> None:
        self.there.append((message, blob))

    def deliver(self) -> bool:
        """One message arrives, and some answers do; whether there was anything."""
        if self.there:
            message, blob = self.there.pop(0)
            if isinstance(message, m.EdgeShard):
                self.announced.add(message.transfer)
                self.receiving.receiver.header(
                    message.transfer, message.nbytes, blob, functools.partial(self._took, message.transfer),
                    checksum_given=message.checksum, session=message.session, run=message.run,
                )  # fmt: skip
            else:
                assert type(message) in BULK
                self.receiving.received(message, blob)
        elif not self.back:
            return False
        while self.back and (not self.there or self.random.random() < 0.3):
            self.sending.received(self.back.pop(0), None)
        return True

    def _took(self, transfer: int, data: Any) -> None:
        assert transfer not in self.done, "it came twice"
        assert (data == transfer).all()
        self.done[transfer] = len(data)


def messages_without_faults() -> int:
    line, count = Line(0), 0
    while line.deliver():
        count += 1
    assert sorted(line.done) == sorted(TRANSFERS)
    return count


FAULTS = ("sender drops a run", "receiver drops a run", "both drop a session", "cut")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_every_message(fault: str) -> None:
    for at in range(messages_without_faults() + 1):
        line = Line(seed=at)
        for _ in range(at):
            line.deliver()
        before = set(line.done)
        announced = set(line.announced)
        match fault:
            case "sender drops a run":
                line.sending.drop_run(1, 1)
            case "receiver drops a run":
                line.receiving.drop_run(1, 1)
            case "both drop a session":
                line.sending.drop_session(1)
                line.receiving.drop_session(1)
            case _:
                line.there.clear()
                line.back.clear()
                line.sending.close()
                line.receiving.close()
        while line.deliver():
            pass
        session_only = fault == "both drop a session"
        unwanted = {t for t, (session, run, _) in TRANSFERS.items() if session == 1 and (session_only or run == 1)}
        if fault == "cut":
            assert set(line.done) == before
            assert not line.there, "a closed sender sends no more"
            continue
        assert set(line.done) >= set(TRANSFERS) - unwanted, f"at message {at}"
        if fault == "sender drops a run" or session_only:
            left = [transfer for transfer in unwanted if line.data[transfer]() is not None]
            assert not left, f"at message {at} the sender keeps {left}"
        if fault != "sender drops a run":  # what is announced later is its owner's to refuse
            late = set(line.done) & unwanted & announced - before
            assert not late, f"at message {at} {late} were taken all the same"
        receiver = line.receiving.receiver
        assert not receiver._incoming, f"at message {at}"
        assert receiver._announced_bytes == 0
        assert line.sending.sender._not_taken < TELL_TAKEN_BYTES, "credit was lost"
