"""The generated parts of the pages: tables of the file, the commands, HTTP, metrics and events.

A page marks each such part with two comments:

    <!-- generated: metrics -->
    …
    <!-- end -->

`renew_page` regenerates the text between them from the source. The tests compare it with the files
and, with SERVEKIT_REWRITE=1 in the environment, write it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from servekit.errors import ConfigError

_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _make_configuration() -> str:
    from servekit.docs.configuration import make_tables

    return make_tables()


def _make_commands() -> str:
    from servekit.docs.commands import make_sections

    return make_sections()


def _make_api() -> str:
    from servekit.docs.api import make_sections

    return make_sections()


def _make_parameters() -> str:
    from servekit.docs.parameters import make_table

    return make_table()


def _make_metrics() -> str:
    from servekit.metrics import reference

    return f"{reference()}\n"


def _make_events() -> str:
    from servekit.event_store import KINDS

    rows = [f"| `{kind}` | {meaning} |" for kind, meaning in KINDS.items()]
    return "\n".join(["| kind | |", "|---|---|", *rows]) + "\n"


def _make_log_events() -> str:
    from servekit.log_events import EVENTS

    # A cell ends at a bar, also within a code span, unless it is escaped.
    cell = {event: said.replace("|", "\\|") for event, said in EVENTS.items()}
    rows = [f"| `{event}` | `{said}` |" for event, said in cell.items()]
    return "\n".join(["| event | sentence |", "|---|---|", *rows]) + "\n"


def _make_status() -> str:
    from servekit.docs.status import make_tables

    return make_tables()


#: The generators of the parts, by name. Each imports its sources lazily.
PARTS: dict[str, Callable[[], str]] = {
    "configuration": _make_configuration,
    "commands": _make_commands,
    "api": _make_api,
    "parameters": _make_parameters,
    "metrics": _make_metrics,
    "events": _make_events,
    "log-events": _make_log_events,
    "status": _make_status,
}


def list_parts(text: str) -> list[str]:
    """Return the names of the generated parts of a page."""
    return [found[2] for found in _PART.finditer(text)]


def renew_page(text: str) -> str:
    """Return a page with its generated parts renewed. Raises ConfigError for an unknown part."""

    def renew(found: re.Match[str]) -> str:
        if found[2] not in PARTS:
            raise ConfigError(f"nothing generates {found[2]!r}; there are: {', '.join(PARTS)}")
        return f"{found[1]}{PARTS[found[2]]()}{found[3]}"

    return _PART.sub(renew, text)
