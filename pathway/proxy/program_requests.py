"""Requests about programs: compiled, looked at, run, and dropped."""

from __future__ import annotations

from typing import Any

from pathway.proxy.executables import Compilation, Executable, Program, report_of
from pathway.proxy.plugins import plugin_executable
from pathway.proxy.state import SessionState
from pathway.proxy.status import StatusError, invalid, unimplemented


class ProgramRequests(SessionState):
    """Methods by the names of the requests; `session` calls them."""

    def _begin_compile(self, body: Any, made: Any, op_id: int, response: Any) -> None:
        if body.host_callbacks:
            raise unimplemented("host callbacks: the client of this jaxlib cannot serve them (docs/proxy.md)")
        handle = next(self._server_handles)
        if body.program.type_name.rpartition("::")[2] == "PluginProgram":
            plugin = plugin_executable(body.program.data, self._cluster, self._values, self._storage)
            self._executables[handle] = plugin
            made.loaded_executable_handle = handle
            made.name = "plugin program"
            made.num_devices = len(plugin.devices)
            made.device_ids.extend(plugin.devices)
            made.addressable_device_ids.extend(plugin.devices)
            self.respond(op_id, response)
            return
        program = Program(self._cluster, body.program, body.compile_options)

        def answered(answer: Any, error: StatusError | None) -> None:
            if error is not None:
                self.refuse(op_id, error)
                return
            report = report_of(answer)
            self._executables[handle] = Executable(self._cluster, self._values, self._moves, program, report)
            made.loaded_executable_handle = handle
            made.name = report.name
            made.num_devices = len(program.device_ids)
            made.device_ids.extend(program.device_ids)
            made.addressable_device_ids.extend(program.device_ids)
            made.fingerprint_value = report.fingerprint
            self.respond(op_id, response)

        Compilation(self._cluster, program).ask("report", answered, every_host=True)

    def _loaded_executable_metadata(self, body: Any, response: Any) -> None:
        self._executable(body.loaded_executable_handle).describe(response)

    def _begin_loaded_executable_cost_analysis(self, body: Any, made: Any, op_id: int, response: Any) -> None:
        self._ask(op_id, body, "cost", made, response)

    def _begin_loaded_executable_human_readable_program_text(
        self, body: Any, made: Any, op_id: int, response: Any
    ) -> None:
        self._ask(op_id, body, "text", made, response)

    def _loaded_executable_execute(self, body: Any, response: Any) -> None:
        executable = self._executable(body.loaded_executable_handle)
        arguments = [self._array(handle) for handle in body.args_handles]
        options = body.execute_options
        results, ended = executable.execute(arguments, frozenset(options.non_donatable_input_indices))
        handles = self._keep_all(body.result_array_handle, results)
        if not body.result_array_handle:
            for number, handle in enumerate(handles):
                output = response.outputs.add()
                output.array_handle = handle
                executable.describe_output(number, output)
        status = body.result_status_handle
        if status or options.fill_status:
            status = status or next(self._server_handles)
            self._statuses[status] = ended
            response.status_handle = status

    def _begin_loaded_executable_fetch_execute_result(self, body: Any, made: Any, op_id: int, response: Any) -> None:
        status = self._statuses.pop(body.result_status_handle, None)
        if status is None:
            raise invalid(f"status handle {body.result_status_handle} is not known")
        self._when_done(op_id, status, response)

    def _loaded_executable_destruct(self, body: Any, response: Any) -> None:
        found = self._executables.pop(body.loaded_executable_handle, None)
        if found is not None:
            found.release()

    def _loaded_executable_delete(self, body: Any, response: Any) -> None:
        self._executable(body.loaded_executable_handle).release()
        response.future_handle = next(self._server_handles)

    def _loaded_executable_is_deleted(self, body: Any, response: Any) -> None:
        response.is_deleted = body.loaded_executable_handle not in self._executables

    def _ask(self, op_id: int, body: Any, what: str, made: Any, response: Any) -> None:
        executable = self._executable(body.loaded_executable_handle)
        if not isinstance(executable, Executable):
            raise unimplemented(f"there is no {what} of a plugin program")

        def answered(answer: Any, error: StatusError | None) -> None:
            if error is not None:
                error.fill(made.status)
            elif what == "text":
                made.human_readable_program_text = answer.decode()
            else:
                made.attributes.SetInParent()
                for name, value in executable.costs(answer).items():
                    made.attributes.attributes[name].float_value = value
            self.respond(op_id, response)

        executable.compilation.ask(what, answered)
