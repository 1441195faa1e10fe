"""What the leader's and the followers' cores share: a part seen as gangs and conditions, their events and instructions.

The cores know nothing of steps, shards or XLA. `part_info` reduces a part once, when it is registered, to what decides
its order: which gang waits for which edges, arguments and other gangs.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct

from pathway.dataflow.plan import Execute, Gang, Part
from pathway.errors import ErrorInfo
from pathway.transport.messages import AssembleOnIsland, Message, PutOnIsland, SpillBuffers, StartPart

# -- a part, as the order sees it ------------------------------------------------------------------------------------


class GangInfo(Struct, frozen=True):
    """The conditions of one gang. `needs`: gangs of this part that must have their place before it. `producers`: those
    of them whose values it reads, so that their errors are its own. `reads` and `donates`: positions in the part's
    arguments. `results`: the numbers of the results that exist once it is placed; `rereads`: results of earlier gangs
    that it reads, so that nobody may be given them meanwhile. `dependents`: the inverse of `needs`."""

    needs: tuple[int, ...] = ()
    producers: tuple[int, ...] = ()
    edges: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    donates: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    rereads: tuple[int, ...] = ()
    dependents: tuple[int, ...] = ()


class EdgeInfo(Struct, frozen=True):
    """An edge into the part: where it comes from, which hosts of this island need it, which gangs wait for it."""

    source_island: str
    hosts: tuple[int, ...]
    gangs: tuple[int, ...]


class PartInfo(Struct, frozen=True):
    """`single`: the part is one gang that waits for arguments only, the common case with a short way through.
    `arguments`: how many a run brings (None: not known, and not looked at). `results`: the numbers of all results."""

    name: str
    gangs: tuple[GangInfo, ...]
    edges: dict[int, EdgeInfo]
    single: bool
    arguments: int | None = None
    results: tuple[int, ...] = ()


def with_result_gangs(part: Part) -> Part:
    """The part with a gang of no steps for every result that is a bare edge or argument which no step reads: results
    then always come with a gang, and the order has one kind of thing in it."""
    known = {slot for gang in part.gangs for step in gang.steps for slot in _reads(step) + _writes(step)}
    by_target = {edge.target_slot: edge.index for edge in part.edges_in}
    extra = [
        Gang(steps=(), waits=(by_target[slot],)) if slot in by_target else Gang(steps=(), arguments=(slot,))
        for slot in dict.fromkeys(slot for _, slot in part.results)
        if slot not in known
    ]
    if not extra:
        return part
    return msgspec.structs.replace(part, gangs=part.gangs + tuple(extra))


def part_info(part: Part, devices_per_host: int) -> PartInfo:
    """The conditions of every gang of `part`, which `with_result_gangs` has completed.

    A gang may overtake another that is not ready, so a gang that frees or donates a slot also needs the earlier gangs
    that read it to have their place: the plan's own order would have protected them.
    """
    target_edges = {edge.target_slot: edge.index for edge in part.edges_in}
    edge_targets = {edge.index: edge.target_slot for edge in part.edges_in}
    argument_positions: dict[int, list[int]] = {}
    for position, slot in enumerate(part.arguments):
        argument_positions.setdefault(slot, []).append(position)
    result_numbers: dict[int, list[int]] = {}
    for number, slot in part.results:
        result_numbers.setdefault(slot, []).append(number)

    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    published: set[int] = set()
    edge_gangs: dict[int, list[int]] = {edge.index: [] for edge in part.edges_in}
    infos: list[GangInfo] = []
    for number, gang in enumerate(part.gangs):
        reads: dict[int, None] = dict.fromkeys(gang.arguments)
        own: set[int] = set()
        ends: set[int] = set()
        donated: list[int] = []
        for step in gang.steps:
            reads.update((slot, None) for slot in _reads(step) if slot not in own)
            own.update(_writes(step))
            ends.update(step.frees)
            if isinstance(step, Execute):
                donated += [step.inputs[index] for index in step.donates]
        edges = dict.fromkeys(gang.waits)
        edges.update((target_edges[slot], None) for slot in reads if slot in target_edges)
        producers = dict.fromkeys(writer[slot] for slot in reads if slot in writer)
        needs = dict.fromkeys((*gang.after, *producers))
        for slot in ends.union(donated):
            needs.update((reader, None) for reader in readers.get(slot, ()))
        for edge in edges:
            edge_gangs[edge].append(number)
        for slot in own:
            writer[slot] = number
        for slot in reads:
            readers.setdefault(slot, []).append(number)
        defined = [slot for slot in (*own, *reads) if slot not in published]
        defined += [slot for edge in edges if (slot := edge_targets[edge]) not in published and slot not in reads]
        rereads = [slot for slot in reads if slot in published]
        published.update(defined)
        infos.append(
            GangInfo(
                needs=tuple(sorted(needs)),
                producers=tuple(sorted(producers)),
                edges=tuple(sorted(edges)),
                reads=tuple(sorted(position for slot in reads for position in argument_positions.get(slot, ()))),
                donates=tuple(sorted(p for slot in set(donated) for p in argument_positions.get(slot, ()))),
                results=tuple(sorted(n for slot in set(defined) for n in result_numbers.get(slot, ()))),
                rereads=tuple(sorted(n for slot in rereads for n in result_numbers.get(slot, ()))),
            )
        )
    dependents: list[list[int]] = [[] for _ in infos]
    for number, info in enumerate(infos):
        for needed in info.needs:
            dependents[needed].append(number)
    gangs = tuple(msgspec.structs.replace(i, dependents=tuple(d)) for i, d in zip(infos, dependents, strict=True))
    edges_in = {
        edge.index: EdgeInfo(
            source_island=edge.source_island,
            hosts=tuple(sorted({device // devices_per_host for device in edge.target.devices})),
            gangs=tuple(edge_gangs[edge.index]),
        )
        for edge in part.edges_in
    }
    single = len(gangs) == 1 and not edges_in
    results = tuple(number for number, _ in part.results)
    return PartInfo(part.plan_name, gangs, edges_in, single, len(part.arguments), results)


def _reads(step: object) -> tuple[int, ...]:
    return step.inputs if isinstance(step, Execute) else (step.slot,)  # type: ignore[attr-defined]


def _writes(step: object) -> tuple[int, ...]:
    return step.outputs if isinstance(step, Execute) else ()


# -- events that are no messages -------------------------------------------------------------------------------------


class PartRegistered(Struct, frozen=True):
    """`RegisterPart` came and was decoded; the shell is compiling it. `PartBound` will follow from every host."""

    session: int
    plan: int
    info: PartInfo


class PartSubmitted(Struct, frozen=True):
    """`StartPart` came. `arguments` are its decoded arguments: buffer ids, and bytes of small host arrays."""

    message: StartPart
    arguments: tuple[int | bytes, ...]


_arguments_decoder = msgspec.msgpack.Decoder(tuple[int | bytes, ...])
_NO_ARGUMENTS = Raw(b"\x90")


def submitted(message: StartPart) -> PartSubmitted:
    """The event that `message` is. Clients write the arguments: where they are none, there are none."""
    try:
        return PartSubmitted(message, _arguments_decoder.decode(message.arguments))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return PartSubmitted(msgspec.structs.replace(message, arguments=_NO_ARGUMENTS), ())


class HostReported(Struct, frozen=True):
    """A host tells the leader: EdgeArrived, BufferArrived, PartBound, GangsDone or GangFailed. Host 0 is the leader's
    own."""

    host: int
    message: Message


class SessionClosed(Struct, frozen=True):
    """To a follower: `CloseSession` came straight from the scheduler."""

    session: int


# -- instructions ----------------------------------------------------------------------------------------------------


class Begin(Struct, frozen=True):
    """The run's part exists from here: name its buffers, expect its edges."""

    message: StartPart
    arguments: tuple[int | bytes, ...]


class Launch(Struct, frozen=True):
    """Start the gang's steps now (O-1)."""

    session: int
    run: int
    gang: int


class Poison(Struct, frozen=True):
    """Do not start the gang: its results are `error`, and nothing will come on the edges it would have sent on."""

    session: int
    run: int
    gang: int
    error: ErrorInfo


class Put(Struct, frozen=True):
    """Store the data inside the message, or expect it from the client."""

    message: PutOnIsland


class Assemble(Struct, frozen=True):
    """Make a buffer out of shards that are here, or will be."""

    message: AssembleOnIsland


class Spill(Struct, frozen=True):
    """Move these to the host's memory; they come back when they are read."""

    message: SpillBuffers


class Free(Struct, frozen=True):
    session: int
    buffers: tuple[int, ...]


class End(Struct, frozen=True):
    """The run is over here: forget its slots and whatever is parked for it."""

    session: int
    run: int


class ForgetPlan(Struct, frozen=True):
    session: int
    plan: int


class GiveUp(Struct, frozen=True):
    """The run was cancelled, or never begins here: drop what is on its way to it or from it, with its memory."""

    session: int
    run: int


class DropSession(Struct, frozen=True):
    """Drop all that the session owns."""

    session: int


class SendToFollowers(Struct, frozen=True):
    message: Message


class SendToLeader(Struct, frozen=True):
    message: Message


class SendToScheduler(Struct, frozen=True):
    message: Message


Instruction = (
    Begin
    | Launch
    | Poison
    | Put
    | Assemble
    | Spill
    | Free
    | End
    | ForgetPlan
    | DropSession
    | GiveUp
    | SendToFollowers
    | SendToLeader
    | SendToScheduler
)
