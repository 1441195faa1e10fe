"""Logging: readable on a terminal, one JSON object a line elsewhere. On stderr, through structlog.

Modules log with the standard library (`logging.getLogger(__name__)`) or with `structlog.get_logger()`, as they like:
both come out the same way. A library that is imported into a user's program configures nothing; only the commands of
Pathway and its processes call `configure`.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal

import structlog


def configure(log_format: Literal["auto", "terminal", "json"] = "auto", level: str = "info", **fields: Any) -> None:
    """Send this process's log to stderr. `fields`, for example the island, are on every line."""
    terminal = sys.stderr.isatty() if log_format == "auto" else log_format == "terminal"
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        _with_fields(fields),
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if terminal else "iso", utc=not terminal),
        structlog.processors.StackInfoRenderer(),
    ]
    if terminal:
        renderer: list[Any] = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    else:
        renderer = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def _with_fields(fields: dict[str, Any]) -> Any:
    def add(logger: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
        return {**fields, **event}

    return add
