"""Every message of the control plane and of the peer links: strict, versioned msgspec structs.

One frame carries a list of messages, as MessagePack: they leave as one when they queued while the socket was
busy (O-6).
Bulk data follows its message in frames of its own, so it is never copied into an encoder. A peer's first message is
`Hello`; the answer is `Welcome` or `Refused`. Nothing here is pickled; a frame that does not decode is refused whole.

Who speaks to whom:
  client      -> scheduler   sessions, slices, plans, runs, releases
  worker      -> scheduler   hosts that join, children that exit        (worker = supervisor)
  executor    -> scheduler   ready, parts finished                       (the leader answers for its island)
  leader     <-> followers   the island's order
  client, executor -> executor   bulk: puts, fetches, edges
"""

from __future__ import annotations

from collections.abc import Sequence
from types import GenericAlias
from typing import Any

import msgspec
from msgspec import Raw, Struct

from pathway.dataflow.layout import Layout
from pathway.errors import ErrorInfo, ProtocolError

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""No frame of the control plane may be larger. Computations are the largest things that travel there."""

INLINE_BYTES = 64 * 1024
"""Host arrays up to this size ride in the run's message (design, section 7)."""

OWN_RUNS = 1 << 48
"""Runs, and buffers that they make, are numbered by the client below this, and by the scheduler from here on: those of
scripts, and a client's that had to wait for one. On each island, either kind begins in the order of its numbers."""

CHUNK_BYTES = 1024 * 1024
"""Bulk data travels in frames of this size: large single frames are slow (design, section 13)."""


class Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The base of all messages. The tag of a message is its number on the wire and never changes its meaning."""


# -- opening and keeping a connection ---------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag=1):
    """The first message of every peer. `role`: client, worker, executor or peer (a bulk link). `resume` names a session
    that this client had before its connection broke (0: none). On a bulk link, `session` is the client's (0: an
    executor's link). `token` proves either (see `permissions`). `weight` is the share that a client asks for,
    `priority` how it stands under a policy of priorities; 0: what its key has."""

    protocol: int
    version: str
    role: str
    name: str = ""
    resume: int = 0
    token: int = 0
    session: int = 0
    weight: float = 0.0
    priority: int = 0


class Welcome(Message, frozen=True, tag=2):
    """`scheduler` identifies the scheduler process: another number means another scheduler, which knows nothing.
    `token` proves that the session is this client's: to executors, and to the scheduler when it resumes."""

    protocol: int
    version: str
    scheduler: int
    session: int = 0
    lease_s: float = 0.0
    heartbeat_s: float = 0.5
    token: int = 0


class Refused(Message, frozen=True, tag=3):
    """`kind` is a class of `pathway.errors`."""

    kind: str
    reason: str


class Ping(Message, frozen=True, tag=4):
    """Sent every heartbeat, answered with `Pong`. Also renews a client's lease."""

    number: int


class Pong(Message, frozen=True, tag=5):
    number: int


class Goodbye(Message, frozen=True, tag=6):
    """The peer ends by its own will: what it owned can go at once."""

    reason: str = ""


# -- client -> scheduler ----------------------------------------------------------------------------------------------


class RequestSlice(Message, frozen=True, tag=10):
    """`slice` is numbered by the client. `mesh` is (axis, size) pairs. `island` insists on one ("" for any)."""

    slice: int
    devices: int
    mesh: tuple[tuple[str, int], ...]
    island: str = ""
    platform: str = ""
    shared: bool = False
    memory_bytes: int = 0
    avoid: tuple[str, ...] = ()  # islands that already hold this session's slices: another is taken if one is free
    wait: bool = False


class ReleaseSlice(Message, frozen=True, tag=11):
    slice: int


class RegisterComputation(Message, frozen=True, tag=12):
    """A StableHLO portable artifact with its shardings. Content-addressed: `key` is its hash. `metadata` is MessagePack
    of `dataflow.computation.ComputationMetadata`; the scheduler only passes it on."""

    key: str
    metadata: bytes
    artifact: bytes


class PartPayload(Struct, frozen=True, array_like=True):
    """One part of a plan, encoded, as the scheduler passes it on; only `island` concerns it."""

    island: str
    incarnation: int
    computations: tuple[str, ...]
    payload: bytes  # MessagePack of dataflow.plan.Part


class RegisterPlan(Message, frozen=True, tag=13):
    """`results`: how many buffers a run of it makes."""

    plan: int
    name: str
    parts: tuple[PartPayload, ...]
    results: int = 0


class StartRun(Message, frozen=True, tag=14):
    """Start plan `plan` as run `run`. Results are buffers `first_result`, `first_result + 1`, .. `arguments[i]` is, for
    part i, a list with a buffer id or the bytes of a small host array for every argument slot; the scheduler does not
    look into it. Runs of one session start in the order of their messages (O-4)."""

    run: int
    plan: int
    first_result: int
    arguments: tuple[Raw, ...]


class PutBuffer(Message, frozen=True, tag=15):
    """The client makes a buffer on `island`: with `data` inline (dense, C order, the global array), or, where `data` is
    None, pushed straight to the hosts as `PutShard`. `source` is the user's line, of large ones."""

    buffer: int
    island: str
    incarnation: int
    layout: Layout
    data: bytes | None = None
    source: str = ""


class ReleaseBuffers(Message, frozen=True, tag=16):
    """The client holds these no longer. `island` is where they live."""

    island: str
    incarnation: int
    buffers: tuple[int, ...]


class AssembleBuffer(Message, frozen=True, tag=21):
    """The client makes a buffer out of shards of others, where they are: the shard on `layout.devices[i]` is the one
    that buffer `sources[i]` has there. Nothing is copied."""

    buffer: int
    island: str
    incarnation: int
    layout: Layout
    sources: tuple[int, ...]


class CancelRun(Message, frozen=True, tag=17):
    run: int


class ReleasePlan(Message, frozen=True, tag=18):
    plan: int


class RelayToHost(Message, frozen=True, tag=27):
    """What a client that cannot reach an executor would send it: a frame of messages, and the last one's data."""

    island: str
    incarnation: int
    host: int
    frame: bytes
    blob: bytes = b""


class RegisterScript(Message, frozen=True, tag=22):
    """What a program that is controlled by data does: MessagePack of `dataflow.script.Script`. It owns the plans that
    it names; `ReleasePlan` of the script releases them too."""

    script: int
    name: str
    payload: bytes


class StartScript(Message, frozen=True, tag=23):
    """As `StartRun`, of a script. `arguments` are buffers and the bytes of small host arrays."""

    run: int
    script: int
    first_result: int
    arguments: tuple[int | bytes, ...]


class StatusRequest(Message, frozen=True, tag=19):
    request: int


class AskMemory(Message, frozen=True, tag=26):
    """What do the plan's computations need beside arrays? Answered when all of them are compiled."""

    request: int
    plan: int


# -- scheduler -> client ----------------------------------------------------------------------------------------------


class SliceBound(Message, frozen=True, tag=30):
    """The slice's devices, as island indices in mesh order. Sent again with a new incarnation when its island returns,
    and with other devices when the slice moves."""

    slice: int
    island: str
    incarnation: int
    devices: tuple[int, ...]
    platform: str
    devices_per_host: int


class SliceRefused(Message, frozen=True, tag=31):
    slice: int
    kind: str
    reason: str


class RunsFinished(Message, frozen=True, tag=32):
    runs: tuple[int, ...]


class RunFailed(Message, frozen=True, tag=33):
    run: int
    error: ErrorInfo


class PlanFailed(Message, frozen=True, tag=34):
    """The plan can never run (a compile error, for example); its runs fail with the same error."""

    plan: int
    error: ErrorInfo


class IslandLost(Message, frozen=True, tag=35):
    """To clients and to executors: all buffers of this incarnation are gone."""

    island: str
    incarnation: int
    error: ErrorInfo


class IslandEntry(Struct, frozen=True, array_like=True):
    """One formed island, for the directory. `hosts` are the peer addresses of its executors, host 0 first."""

    island: str
    incarnation: int
    platform: str
    devices_per_host: int
    hosts: tuple[str, ...]
    device_kind: str = ""
    transfer: str = "pathway"  # how its executors take edges: see `executor.transfers`


class Directory(Message, frozen=True, tag=36):
    """Formed islands. To a client: all of them, first of all. To an executor: its neighbours, on every change."""

    islands: tuple[IslandEntry, ...]


class DirectoryChange(Message, frozen=True, tag=38):
    """To clients: these islands are formed now, and those are not any more."""

    formed: tuple[IslandEntry, ...] = ()
    gone: tuple[str, ...] = ()


class RelayFromHost(Message, frozen=True, tag=39):
    """What an executor would send a client that cannot reach it."""

    island: str
    incarnation: int
    host: int
    frame: bytes
    blob: bytes = b""


class StatusReply(Message, frozen=True, tag=37):
    """`status` is JSON (see docs/cli.md for its keys)."""

    request: int
    status: bytes


class MemoryAnswer(Message, frozen=True, tag=44):
    """(computation, bytes of its temporaries on each device), or why there is no such plan."""

    request: int
    temp_bytes: tuple[tuple[str, int], ...]
    error: ErrorInfo | None = None


# -- admin -> scheduler -----------------------------------------------------------------------------------------------


class SetWeight(Message, frozen=True, tag=40):
    """From now on, `session` (as people write it: a name, or a number in hexadecimal) has this weight and priority;
    None leaves as it is. With `key`, `session` is the name of a key, and the weight is that of its sessions."""

    request: int
    session: str
    weight: float | None = None
    priority: int | None = None
    key: bool = False


class DrainIsland(Message, frozen=True, tag=41):
    """Bind no more slices to the island, move those that are idle, and let the runs end; or take it into use again."""

    request: int
    island: str
    drain: bool


class KillSession(Message, frozen=True, tag=42):
    """End a session and free all that it owns."""

    request: int
    session: str


class AdminReply(Message, frozen=True, tag=43):
    """What became of the order; `error` is "" if it was carried out."""

    request: int
    text: str
    error: str = ""


# -- worker (supervisor) <-> scheduler --------------------------------------------------------------------------------


class HostJoined(Message, frozen=True, tag=50):
    """A host offers itself to an island. `coordinator_address` is where it would run the island's jax.distributed
    coordinator, should the scheduler choose it."""

    island: str
    hosts: int
    host_index: int
    devices: int
    platform: str
    hostname: str
    pid: int
    coordinator_address: str


class FormIsland(Message, frozen=True, tag=51):
    """Start the executor child as host `host_index` of this incarnation."""

    island: str
    incarnation: int
    coordinator_address: str
    hosts: int
    host_index: int


class StopExecutor(Message, frozen=True, tag=52):
    """End the executor child of this incarnation, if it still runs; answered by `ExecutorExited`."""

    island: str
    incarnation: int


class ExecutorExited(Message, frozen=True, tag=53):
    """`cause` is for people: exit code 1, signal SIGKILL, killed for memory, ..."""

    island: str
    incarnation: int
    host_index: int
    cause: str


class ExecutorPaused(Message, frozen=True, tag=54):
    """The executor child has been stopped (SIGSTOP, a debugger), or goes on: not dead, and silent for a reason."""

    island: str
    incarnation: int
    host_index: int
    paused: bool


# -- executor <-> scheduler -------------------------------------------------------------------------------------------


class ExecutorReady(Message, frozen=True, tag=60):
    island: str
    incarnation: int
    host_index: int
    peer_address: str
    device_kind: str
    devices: int
    pid: int
    memory_bytes: int = 0  # of each device, for programs; 0: nobody knows, and nothing is limited
    transfer: str = "pathway"


class RegisterPart(Message, frozen=True, tag=61):
    """To every host of the part's island: compile and bind it."""

    session: int
    plan: int
    payload: bytes


class StartPart(Message, frozen=True, tag=62):
    """To the island's leader, which passes it to its followers: one run's part. `arguments` as in `StartRun`."""

    session: int
    run: int
    plan: int
    first_result: int
    arguments: Raw


class PutOnIsland(Message, frozen=True, tag=63):
    """`PutBuffer`, as passed to the leader and by it to its followers. With `error`, the buffer is that in place of a
    value: there is no room for it, or the run that would have made it was refused."""

    session: int
    buffer: int
    layout: Layout
    data: bytes | None = None
    error: ErrorInfo | None = None
    source: str = ""


class AssembleOnIsland(Message, frozen=True, tag=74):
    """`AssembleBuffer`, as passed to the leader and by it to its followers."""

    session: int
    buffer: int
    layout: Layout
    sources: tuple[int, ...]


class FreeBuffers(Message, frozen=True, tag=64):
    session: int
    buffers: tuple[int, ...]


class CloseSession(Message, frozen=True, tag=65):
    """Drop all that the session owns, whatever it waits for."""

    session: int


class CancelPart(Message, frozen=True, tag=66):
    session: int
    run: int
    error: ErrorInfo


class PartsFinished(Message, frozen=True, tag=67):
    """Leader -> scheduler: (session, run) of parts that every host of the island has finished. `device_us` is how long
    the island was busy with them together, `part_us[i]` how long part i held its devices."""

    parts: tuple[tuple[int, int], ...]
    device_us: int = 0
    part_us: tuple[int, ...] = ()


class PartFailed(Message, frozen=True, tag=68):
    """Leader -> scheduler: the part is over, its results are poisoned with `error`."""

    session: int
    run: int
    error: ErrorInfo


class PartRefused(Message, frozen=True, tag=69):
    """Host -> scheduler: this plan can never run here (it does not compile)."""

    session: int
    plan: int
    error: ErrorInfo


class DropPlan(Message, frozen=True, tag=70):
    session: int
    plan: int


class ExecutorReport(Message, frozen=True, tag=71):
    """Leader -> scheduler, each heartbeat: bytes held per session, and what waits for what: (session, run or plan,
    reason, since seconds ago). A follower sends one when it has received damaged data, of which alone it then tells."""

    bytes_by_session: tuple[tuple[int, int, int], ...]  # session, buffers, bytes
    waits: tuple[tuple[int, int, str, float], ...]
    busy_us: int
    damaged_transfers: int = 0  # that this process has received, so far
    spilled_bytes: int = 0  # of them, in the host's memory


class SpillBuffers(Message, frozen=True, tag=76):
    """Scheduler -> leader -> followers: move these buffers to the host's memory. They come back when they are read."""

    session: int
    buffers: tuple[int, ...]


class ComputationsCompiled(Message, frozen=True, tag=77):
    """Host -> scheduler: (computation, bytes of its temporaries on each device), of the plan's computations whose first
    device is this host's."""

    session: int
    plan: int
    temp_bytes: tuple[tuple[str, int], ...]


class Relayed(Message, frozen=True, tag=78):
    """Scheduler <-> executor: a frame of messages on the link of this session's client, which goes by the scheduler."""

    session: int
    frame: bytes
    blob: bytes = b""


class PartsLate(Message, frozen=True, tag=73):
    """Leader -> scheduler: (session, run) of parts which cannot start yet, for their inputs or computations are not
    there. Others may take their place meanwhile (O-7)."""

    parts: tuple[tuple[int, int], ...]


class Decided(Message, frozen=True, tag=75):
    """Host -> scheduler: values of a run, by result number, that decide what runs next (see `dataflow.script`)."""

    session: int
    run: int
    decisions: tuple[tuple[int, int], ...]


class AccessList(Message, frozen=True, tag=72):
    """Scheduler -> executors, after `Welcome` and on each change: who may connect to their peer sockets. `secret` is
    what tokens are made with; `allow_list` the text of the allow-list ("" in a cluster without keys)."""

    secret: bytes
    allow_list: str = ""

    def __repr__(self) -> str:
        return "AccessList(hidden)"


# -- leader <-> followers (on the leader's peer socket) ---------------------------------------------------------


class FollowerHello(Message, frozen=True, tag=80):
    host_index: int
    incarnation: int


class LaunchGang(Message, frozen=True, tag=81):
    """The next gang in the island's order (O-1)."""

    session: int
    run: int
    gang: int


class EdgeArrived(Message, frozen=True, tag=82):
    """Follower -> leader: all of this edge's shards for my devices are here (or never will be: `error`)."""

    session: int
    run: int
    edge: int
    error: ErrorInfo | None = None


class BufferArrived(Message, frozen=True, tag=83):
    """Follower -> leader: my shards of a buffer that a client puts are here."""

    session: int
    buffer: int
    error: ErrorInfo | None = None


class PartBound(Message, frozen=True, tag=84):
    """Follower -> leader: the plan's part is compiled and bound here."""

    session: int
    plan: int
    error: ErrorInfo | None = None


class GangsDone(Message, frozen=True, tag=85):
    """Follower -> leader: gangs that this host's devices have finished, in order. (session, run, gang)."""

    gangs: tuple[tuple[int, int, int], ...]


class GangFailed(Message, frozen=True, tag=86):
    session: int
    run: int
    gang: int
    error: ErrorInfo


class PoisonGang(Message, frozen=True, tag=87):
    """In place of `LaunchGang`, in the same order: this gang will not start. Its results are `error`, and so is what it
    would have sent."""

    session: int
    run: int
    gang: int
    error: ErrorInfo


# -- peer links: bulk -------------------------------------------------------------------------------------------------


class EdgeShard(Message, frozen=True, tag=90):
    """A piece of an edge's value for one device of the receiver. `region` is in the coordinates of the array. The data
    is the frame after this message, with `checksum`. A message without that frame announces a transfer, `transfer`,
    of which the data comes as `Chunk`s or as `Shared`."""

    transfer: int
    session: int
    run: int
    edge: int
    device: int  # island index of the receiving device
    region: tuple[tuple[int, int], ...]
    nbytes: int
    checksum: int = 0


class EdgeOffer(Message, frozen=True, tag=105):
    """As `EdgeShard`, of a piece that the sender's server of jax.experimental.transfer, at `address`, has as `uuid`."""

    uuid: int
    session: int
    run: int
    edge: int
    device: int
    region: tuple[tuple[int, int], ...]
    dtype: str
    address: str


class OfferTaken(Message, frozen=True, tag=106):
    """The sender of an `EdgeOffer` need not remember it any more."""

    uuid: int


class EdgeFailed(Message, frozen=True, tag=91):
    """Nothing will come on this edge."""

    session: int
    run: int
    edge: int
    error: ErrorInfo


class PutShard(Message, frozen=True, tag=92):
    """A client's data for one region of a buffer: every device of the host that holds the region gets it."""

    transfer: int
    session: int
    buffer: int
    region: tuple[tuple[int, int], ...]
    nbytes: int
    checksum: int = 0


class Fetch(Message, frozen=True, tag=93):
    """Send me these shards (island device indices) of a buffer, when it is there. May come before it is known."""

    request: int
    session: int
    buffer: int
    devices: tuple[int, ...]


class FetchedShard(Message, frozen=True, tag=94):
    """One shard for a `Fetch`: data as for `EdgeShard`. `region` is what it covers."""

    transfer: int
    request: int
    device: int
    region: tuple[tuple[int, int], ...]
    nbytes: int
    checksum: int = 0


class FetchFailed(Message, frozen=True, tag=95):
    request: int
    error: ErrorInfo


class Chunk(Message, frozen=True, tag=96):
    """The next piece of a transfer larger than CHUNK_BYTES: the frame after this message, at `offset` of the transfer.
    The last has the checksum of the whole transfer."""

    transfer: int
    offset: int
    checksum: int = 0


class TraceRequest(Message, frozen=True, tag=97):
    """Switch the recording of steps on or off at this executor, and send what was recorded."""

    request: int
    record: bool


class TraceReply(Message, frozen=True, tag=98):
    """(session, run, plan name, node name, gang, start, end), seconds of the host's CLOCK_MONOTONIC."""

    request: int
    steps: tuple[tuple[int, int, str, str, int, float, float], ...]


class Taken(Message, frozen=True, tag=99):
    """So many bytes of chunks, or more, have come to where they belong since the last time: as many may follow."""

    nbytes: int


class TransferDropped(Message, frozen=True, tag=104):
    """The rest of this transfer does not come: what it belongs to is cancelled, lost or closed."""

    transfer: int


# -- peer links: programs of the IFRT proxy's clients ------------------------------------------------------------------


class AskProgram(Message, frozen=True, tag=110):
    """Compile this for these devices (island indices), and say what came of it. `what`: report (MessagePack of
    `dataflow.xla_program.ProgramReport`), cost (of a dict of floats), or text (UTF-8). `key` is the content's."""

    request: int
    key: str
    metadata: bytes
    artifact: bytes
    devices: tuple[int, ...]
    what: str


class ProfileHost(Message, frozen=True, tag=112):
    """Start to profile this executor, or stop: the answer is then the profile, as XProf has it (an XSpace)."""

    request: int
    start: bool


class ProgramAnswer(Message, frozen=True, tag=111):
    request: int
    answer: bytes
    error: ErrorInfo | None = None


# -- peer links: shared memory (see `shm`) ---------------------------------------------------------------------------

MemoryFile = tuple[int, str, int]
"""A sealed memfd of the sender's: its descriptor there, its name, its size."""


class ShareOffer(Message, frozen=True, tag=100):
    """Both ends of a peer link say this first. Who can open the `beacon` of process `pid` shares its machine, and says
    so with a proof. `board` is where borrowers return what they have; `link` is what this link is called there."""

    boot_id: str
    pid: int
    beacon: MemoryFile
    board: MemoryFile
    link: int


class ShareProof(Message, frozen=True, tag=101):
    """I can read your memory: data for me may come as `Shared`. Empty: I cannot."""

    proof: bytes


class ShareArena(Message, frozen=True, tag=102):
    """The next arena that data for you may lie in; they are numbered from 0 on each link and direction."""

    arena: MemoryFile


class Shared(Message, frozen=True, tag=103):
    """In place of the `Chunk`s of a transfer: all of its data, in an arena. Clearing `cell` of the board returns it."""

    transfer: int
    arena: int
    offset: int
    cell: int


CONTROL_MESSAGES: tuple[type[Message], ...] = tuple(
    value
    for value in list(globals().values())
    if isinstance(value, type) and issubclass(value, Message) and value is not Message
)
"""Every message type, by definition order."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[list[Any]]


def encode(messages: Sequence[Message]) -> bytes:
    """One frame for `messages`, in order."""
    return _encoder.encode(messages)


def decode(frame: bytes | memoryview) -> list[Any]:
    """The messages of one frame. Raises `ProtocolError` for anything but a list of known, well-formed messages."""
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a frame of {len(frame):,} bytes is over the limit of {MAX_MESSAGE_BYTES:,}")
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a message of this protocol: {error}") from None


def _union(types: tuple[type[Message], ...]) -> Any:
    union: Any = types[0]
    for kind in types[1:]:
        union = union | kind
    return union


_decoder = msgspec.msgpack.Decoder(GenericAlias(list, (_union(CONTROL_MESSAGES),)))
