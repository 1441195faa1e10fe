"""What ran where and when: the executors' own records of steps, asked for by the client."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from pathway.client.pending import Pending
from pathway.transport import messages as m

if TYPE_CHECKING:
    from pathway.client.client import Client

ANSWER_TIMEOUT_S = 10.0


class RecordedStep(NamedTuple):
    """One computation of one run on an island. Times are seconds of its first host's monotonic clock."""

    island: str
    program: str
    label: str  # the node's name
    run: int
    start_s: float
    end_s: float


class Recording:
    """`with pathway.record_steps() as recording:` what this client's programs do in the block. Read `steps` after it.

    Each island is asked at its first host, which starts the same steps in the same order as the others.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.steps: tuple[RecordedStep, ...] = ()

    def __enter__(self) -> Self:
        self._ask(record=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client.is_closed:
            return
        session = self._client.core.session
        recorded = [
            RecordedStep(island, program, label, run, start_s, end_s)
            for island, reply in self._ask(record=False).items()
            for owner, run, program, label, _, start_s, end_s in reply.steps
            if owner == session
        ]
        self.steps = tuple(sorted(recorded, key=lambda step: step.start_s))

    def draw(self, title: str = "") -> str:
        """Each island's steps over time, as SVG."""
        from pathway.dataflow.draw import draw_timeline

        steps = [(step.island, step.label, step.run, step.start_s, step.end_s) for step in self.steps]
        return draw_timeline(steps, title)

    def _ask(self, record: bool) -> dict[str, m.TraceReply]:
        """The answers of the islands that answer: one that is lost meanwhile has no record."""
        asked: dict[str, Pending] = {}
        for entry in self._client.core.islands.values():
            request = m.TraceRequest(self._client.core.new_request(), record)
            asked[entry.island] = self._client.connection.peers.ask(entry.hosts[0], request)
        return {
            island: reply.value
            for island, reply in asked.items()
            if reply.wait(ANSWER_TIMEOUT_S) and reply.error is None
        }
