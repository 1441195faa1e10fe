"""Programs of a proxied session: compiled by executors, which say what came of it, and run as plans of one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from pathway.client.pending import Pending
from pathway.content import content_key
from pathway.dataflow.layout import Layout
from pathway.dataflow.xla_program import ProgramReport, XlaProgram
from pathway.errors import ErrorInfo
from pathway.proxy import wire
from pathway.proxy.cluster import ClusterIsland, ClusterView
from pathway.proxy.runs import Moves, OneStepPlan, execution
from pathway.proxy.specs import DEFAULT_MEMORY, dtype_kind, fill_layout
from pathway.proxy.status import StatusError, invalid, of_info, unimplemented
from pathway.proxy.values import Buffer, Value, Values
from pathway.proxy.waiting import once
from pathway.transport import messages as m

_encode = msgspec.msgpack.Encoder().encode
_report_decoder = msgspec.msgpack.Decoder(ProgramReport)
_costs_decoder = msgspec.msgpack.Decoder(dict[str, float])

Answered = Callable[[Any, StatusError | None], None]
"""Called with an answer or an error, in whichever thread it came."""


class Program:
    """What a client wants compiled, and for which devices."""

    def __init__(self, cluster: ClusterView, program: Any, options: Any) -> None:
        kind = program.type_name.rpartition("::")[2]
        if kind not in ("XlaProgram", "HloProgram"):
            raise unimplemented(
                f"programs of class {kind or 'none'} are not supported: this server runs XLA programs, those of jax.jit"
            )
        if options.type_name.rpartition("::")[2] != "XlaCompileOptions":
            raise invalid(f"an XLA program has no compile options of class {options.type_name or 'none'}")
        try:
            parsed = wire.XlaCompileOptions.FromString(options.data).compile_options
        except Exception as error:
            raise invalid(f"compile options that cannot be read: {error}") from None
        build = parsed.executable_build_options
        replicas, partitions = max(1, build.num_replicas), max(1, build.num_partitions)
        if replicas > 1:
            raise unimplemented("programs with replicas: use jax.jit or shard_map over a mesh")
        self.device_ids = _assigned(build) or cluster.default_devices(replicas * partitions)
        if len(self.device_ids) != replicas * partitions:
            raise invalid(f"{len(self.device_ids)} devices for {replicas} x {partitions}")
        self.island, self.devices = cluster.locate(self.device_ids, "the program")
        build.ClearField("device_assignment")
        self.artifact: bytes = program.data
        metadata = XlaProgram(self.island.platform, parsed.SerializeToString(), replicas, partitions)
        self.metadata = _encode(metadata)
        self.key = content_key(self.metadata, self.artifact)


def _assigned(build: Any) -> tuple[int, ...]:
    if not build.HasField("device_assignment"):
        return ()
    columns = [tuple(each.replica_device_ids) for each in build.device_assignment.computation_devices]
    return tuple(device for row in zip(*columns, strict=True) for device in row)


class Compilation:
    """Asks all hosts of an island to compile a program, and for what came of it."""

    def __init__(self, cluster: ClusterView, program: Program) -> None:
        self._cluster = cluster
        self._program = program

    def ask(self, what: str, answered: Answered, every_host: bool = False) -> None:
        """`answered` gets the first host's answer, once all that were asked have answered."""
        program = self._program
        try:
            hosts = self._cluster.host_addresses(program.island)[: None if every_host else 1]
            peers = self._cluster.connection.peers
            replies: list[Pending] = []
            for address in hosts:
                request = m.AskProgram(
                    self._cluster.core.new_request(), program.key, program.metadata, program.artifact,
                    program.devices, what,
                )  # fmt: skip
                replies.append(peers.ask(address, request))
        except StatusError as error:
            answered(None, error)
            return
        left = len(replies)

        def one_came() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                error = _first_error(replies)
                if error is not None:
                    answered(None, of_info(error))
                else:
                    answered(replies[0].value.answer, None)

        for reply in replies:
            reply.add_waiter(once(one_came))


def _first_error(replies: Sequence[Pending]) -> ErrorInfo | None:
    for reply in replies:
        if reply.error is not None:
            return reply.error
        if reply.value.error is not None:
            error: ErrorInfo = reply.value.error
            return error
    return None


class Executable:
    """A compiled program."""

    def __init__(
        self, cluster: ClusterView, values: Values, moves: Moves, program: Program, report: ProgramReport
    ) -> None:
        self._cluster = cluster
        self._values = values
        self._moves = moves
        self.program = program
        self.report = report
        self.compilation = Compilation(cluster, program)
        kinds = report.output_memory_kinds or ("",) * len(report.out_avals)
        self._inputs = [
            Layout(aval, sharding, program.devices)
            for aval, sharding in zip(report.in_avals, report.in_shardings, strict=True)
        ]
        self._outputs = [
            Layout(aval, sharding, program.devices, "" if kind == DEFAULT_MEMORY else kind)
            for aval, sharding, kind in zip(report.out_avals, report.out_shardings, kinds, strict=True)
        ]
        self._plans: dict[frozenset[int], tuple[OneStepPlan, tuple[int, ...]]] = {}
        self._registered = False

    @property
    def island(self) -> ClusterIsland:
        return self.program.island

    def _plan(self, kept: frozenset[int]) -> tuple[OneStepPlan, tuple[int, ...]]:
        """The plan in which the inputs of `kept` are not given away, and those that are."""
        found = self._plans.get(kept)
        if found is None:
            if not self._registered:
                program = self.program
                self._cluster.send(m.RegisterComputation(program.key, program.metadata, program.artifact))
                self._registered = True
            program = self.program
            donated = tuple(self.report.donated)
            plan = execution(
                self._cluster, program.island, self.report.name, program.key, program.devices,
                self._inputs, self._outputs, donated,
            )  # fmt: skip
            found = self._plans[kept] = plan, tuple(number for number in donated if number not in kept)
        return found

    def execute(self, arguments: Sequence[Value], kept: frozenset[int]) -> tuple[list[Value], Pending]:
        """Run it. Returns at once: values that are there when the run has ended, and the run."""
        if len(arguments) != len(self._inputs):
            raise invalid(f"{self.report.name} takes {len(self._inputs)} arguments, not {len(arguments)}")
        if any(value.buffer.pins for value in arguments):
            kept |= {position for position, value in enumerate(arguments) if value.buffer.pins}
        plan, given = self._plan(kept)
        values = self._values
        numbers = []
        copies = []
        for position, value in enumerate(arguments):
            if value.island is not self.program.island or len(value.layout.devices) != len(self.program.devices):
                raise invalid(
                    f"argument {position} of {self.report.name} is on devices {value.devices}, and the program runs on "
                    f"{self.program.device_ids}"
                )
            if kept and position in kept and position in self.report.donated:
                value = self._moves.move(value, value.island, value.layout)
                copies.append(value)
            numbers.append(values.whole(value).number)
        run, first = plan.start((Raw(_encode(numbers)),))
        for position in given:
            arguments[position].buffer.deleted = True
        for copy in copies:
            values.release(copy)
        island = self.program.island
        results = [
            Value(island, Buffer(values.kind(island, layout), first + number, run), layout)
            for number, layout in enumerate(self._outputs)
        ]
        return results, run

    def release(self) -> None:
        """The client does not need it any more."""
        for plan, _ in self._plans.values():
            plan.release()

    # -- what the client asks of it ----------------------------------------------------------------------------------

    def describe_output(self, number: int, output: Any) -> None:
        """Fill an Output of the response to an execution: dtype, shape, sharding."""
        layout = self._outputs[number]
        output.dtype.kind = dtype_kind(layout.aval.dtype)
        output.shape.dims.extend(layout.aval.shape)
        hlo = wire.HloSharding()
        hlo.devices.device_ids.extend(self.program.device_ids)
        hlo.memory_kind = layout.memory or DEFAULT_MEMORY
        if self.report.output_shardings:
            hlo.xla_op_sharding.ParseFromString(self.report.output_shardings[number])
        output.sharding.serialized_sharding.type_name = "xla::ifrt::HloSharding"
        output.sharding.serialized_sharding.data = hlo.SerializeToString()

    def describe(self, response: Any) -> None:
        """Fill a LoadedExecutableMetadataResponse."""
        report = self.report
        if report.parameter_shardings or not report.in_avals:
            response.parameter_shardings.SetInParent()
            for each in report.parameter_shardings:
                response.parameter_shardings.shardings.add().ParseFromString(each)
        if report.output_shardings or not report.out_avals:
            response.output_shardings.SetInParent()
            for each in report.output_shardings:
                response.output_shardings.shardings.add().ParseFromString(each)
        response.parameter_layouts_list.SetInParent()
        for text in report.parameter_layouts:
            fill_layout(text, response.parameter_layouts_list.layouts.add())
        response.output_layouts_list.SetInParent()
        for text in report.output_layouts:
            fill_layout(text, response.output_layouts_list.layouts.add())
        response.output_memory_kinds.status.SetInParent()
        response.output_memory_kinds.memory_kind_lists.add().memory_kinds.extend(report.output_memory_kinds)
        response.donated_input_indices.SetInParent()
        response.donated_input_indices.donated_input_indices.extend(report.donated)
        response.compiled_memory_stats.SetInParent()
        for field, value in report.memory.items():
            if field in response.compiled_memory_stats.DESCRIPTOR.fields_by_name:
                setattr(response.compiled_memory_stats, field, value)
        response.size_of_generated_code_in_bytes = report.code_bytes

    @staticmethod
    def costs(answer: bytes) -> dict[str, float]:
        """The answer to a question for costs."""
        return _costs_decoder.decode(answer)


def report_of(answer: bytes) -> ProgramReport:
    """The answer to a question for a report."""
    return _report_decoder.decode(answer)
