"""Compiling off the dispatch thread, in parallel, each computation once per set of devices (O-3)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from pathway.content import content_key
from pathway.dataflow.computation import ComputationMetadata
from pathway.dataflow.xla_program import XlaProgram
from pathway.errors import CompileError, ErrorInfo, PermissionDeniedError, describe
from pathway.executor.backend import Backend, Compiled
from pathway.executor.bind import Wanted
from pathway.executor.completion import Outbox
from pathway.executor.culprits import Culprits
from pathway.transport.messages import AskProgram, ProgramAnswer, RegisterComputation

Failures = dict[Wanted, ErrorInfo]

_metadata_decoder = msgspec.msgpack.Decoder(ComputationMetadata | XlaProgram)


class Compiler:
    """What is registered, what is compiled, and who waits for what. Used in the trio thread."""

    def __init__(self, backend: Backend, outbox: Outbox, culprits: Culprits | None = None) -> None:
        self._backend = backend
        self._culprits = culprits
        self._outbox = outbox
        self._registered: dict[str, RegisterComputation] = {}
        self.compiled: dict[Wanted, Compiled] = {}
        self._failed: Failures = {}
        self._waiting: dict[Wanted, list[Callable[[], None]]] = {}
        self._threads = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="pathway-compile")

    def register(self, message: RegisterComputation) -> None:
        self._registered.setdefault(message.key, message)

    def ensure(self, wanted: Iterable[Wanted], done: Callable[[Failures], None]) -> None:
        """Have all of `wanted` compiled; then call `done` with those that cannot be. At once when nothing is to do."""
        wanted = tuple(wanted)
        open_ = {item for item in wanted if item not in self.compiled and item not in self._failed}

        def finish() -> None:
            done({item: self._failed[item] for item in wanted if item in self._failed})

        if not open_:
            finish()
            return
        left = len(open_)

        def one_ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                finish()

        for item in open_:
            waiting = self._waiting.get(item)
            if waiting is not None:
                waiting.append(one_ended)
                continue
            self._waiting[item] = [one_ended]
            self._threads.submit(self._compile, item, self._registered.get(item[0]))

    def ask(self, question: AskProgram, reply: Callable[[ProgramAnswer], None]) -> None:
        """Answer a question about a program, which is compiled if need be. `reply` is called in the trio thread."""
        item = (question.key, question.devices)
        if question.key != content_key(question.metadata, question.artifact):
            refused = PermissionDeniedError("the key of a computation is not that of its content")
            reply(ProgramAnswer(question.request, b"", describe(refused)))
            return
        self.register(RegisterComputation(question.key, question.metadata, question.artifact))

        def look(failures: Failures) -> None:
            if failures:
                reply(ProgramAnswer(question.request, b"", failures[item]))
            else:
                self._threads.submit(self._answer, self.compiled[item], question, reply)

        self.ensure([item], look)

    def _answer(self, compiled: Compiled, question: AskProgram, reply: Callable[[ProgramAnswer], None]) -> None:
        """On a thread of the pool: the text of a large program takes a while."""
        try:
            if compiled.answer is None:
                raise CompileError("it did not come as an XLA program")
            answer = ProgramAnswer(question.request, compiled.answer(question.what))
        except Exception as error:
            answer = ProgramAnswer(question.request, b"", describe(error, CompileError))
        self._outbox.put(lambda: reply(answer))

    def _compile(self, item: Wanted, registered: RegisterComputation | None) -> None:
        """On a thread of the pool."""
        result: Compiled | ErrorInfo
        try:
            if registered is None:
                raise CompileError(f"computation {item[0]} was never registered here")
            culprits = self._culprits
            cause = culprits.why_refused(item[0]) if culprits is not None else ""
            if cause:
                raise CompileError(
                    f"INVALID_ARGUMENT: it is refused, because an executor ended when it compiled it ({cause})"
                )
            metadata = _metadata_decoder.decode(registered.metadata)
            with culprits.compiling(item[0]) if culprits is not None else contextlib.nullcontext():
                if isinstance(metadata, XlaProgram):
                    result = self._backend.compile_program(item[0], metadata, registered.artifact, item[1])
                else:
                    result = self._backend.compile(item[0], metadata, registered.artifact, item[1])
        except Exception as error:
            result = describe(error, CompileError)
        self._outbox.put(lambda: self._compile_ended(item, result))

    def _compile_ended(self, item: Wanted, result: Compiled | ErrorInfo) -> None:
        if isinstance(result, Compiled):
            self.compiled[item] = result
        else:
            self._failed[item] = result
        for callback in self._waiting.pop(item):
            callback()
