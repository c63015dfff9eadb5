"""Logging, configured once per process: named loggers, one line per event, to stderr.

Children write JSON lines, which the supervisor renders with the child's name; a terminal gets
the readable form. Records of the standard library's `logging` (uvicorn, transformers) are
rendered in the same way.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, MutableMapping
from typing import Any

import structlog


def _nobody() -> str:
    return ""


#: Returns the current request id for log lines, "" for none. A gateway sets its own function.
request_id: Callable[[], str] = _nobody


def _with_request(logger: Any, name: str, line: MutableMapping[str, Any]) -> Any:
    if "request" not in line and (id := request_id()):
        line["request"] = id
    return line


_SHARED: tuple[structlog.typing.Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    _with_request,
    structlog.stdlib.add_logger_name,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="%Y-%m-%dT%H:%M:%S.%fZ", utc=True),
    structlog.processors.StackInfoRenderer(),
)


def configure(process: str, *, json: bool = False, level: str = "info") -> None:
    """Set up logging for this process; JSON lines also carry `process`."""
    renderer: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if json
        else [structlog.dev.ConsoleRenderer(colors=_colours(), pad_event_to=0)]
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=list(_SHARED),
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_SHARED,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(**({"process": process} if json else {}))


def get(name: str) -> Any:
    """Return a logger by name: `get("servekit.worker").info("event", key=value)`."""
    return structlog.get_logger(name)


def _colours() -> bool:
    return sys.stderr.isatty() and "NO_COLOR" not in os.environ
