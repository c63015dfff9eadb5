"""The generated parts of the pages: tables of the file, the commands, HTTP, metrics and events.

A page marks each such part with two comments:

    <!-- generated: metrics -->
    …
    <!-- end -->

`renew_page` regenerates the text between them from the source. The tests compare it with the files
and, with SERVEKIT_REWRITE=1 in the environment, write it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from servekit import metrics
from servekit.engines.api import base
from servekit.errors import ConfigError
from servekit.event_store import KINDS
from servekit.log_events import EVENTS
from servekit.protocol.types import ModelInfo
from servekit.supervisor.deployments.config_diff import LIVE_SERVER_KEYS
from tests import markov
from tests.reference import api, commands, configuration, errors, parameters, status

_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _make_metrics() -> str:
    return f"{metrics.metrics_reference()}\n"


def _make_events() -> str:
    rows = [f"| `{kind}` | {meaning} |" for kind, meaning in KINDS.items()]
    return "\n".join(["| kind | |", "|---|---|", *rows]) + "\n"


def _make_log_events() -> str:
    # A cell ends at a bar, also within a code span, unless it is escaped.
    cell = {event: said.replace("|", "\\|") for event, said in EVENTS.items()}
    rows = [f"| `{event}` | `{said}` |" for event, said in cell.items()]
    return "\n".join(["| event | sentence |", "|---|---|", *rows]) + "\n"


def _make_live_keys() -> str:
    return f"{', '.join(f'`{key}`' for key in sorted(LIVE_SERVER_KEYS))}\n"


def _make_engine_types() -> str:
    types = base.Job, base.StepOutput, base.Load, base.Decoder, base.Codec, ModelInfo
    return _show_python(inspect.getsource(one) for one in types)


def _make_engine_example() -> str:
    folder = Path(markov.__file__).parent
    files = {"pyproject.toml": "toml", "markov_kind.py": "python", "markov_engine.py": "python"}
    return "\n".join(
        f"`{name}`:\n\n```{language}\n{(folder / name).read_text()}```\n"
        for name, language in files.items()
    )


def _show_python(sources: Iterable[str]) -> str:
    return "\n".join(f"```python\n{source}```\n" for source in sources)


#: The generators of the parts, by name.
PARTS: dict[str, Callable[[], str]] = {
    "configuration": configuration.make_tables,
    "commands": commands.make_sections,
    "api": api.make_sections,
    "parameters": parameters.make_table,
    "errors": errors.make_table,
    "metrics": _make_metrics,
    "events": _make_events,
    "log-events": _make_log_events,
    "status": status.make_tables,
    "live-keys": _make_live_keys,
    "engine-types": _make_engine_types,
    "engine-example": _make_engine_example,
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
