"""The table of error codes over HTTP, from the exception classes."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

from servekit import gateway
from servekit.errors import RequestError, ServekitError


def make_table() -> str:
    """Return a Markdown table: a row for each code and status, with all that it may mean."""
    rows: dict[tuple[int, str], dict[str, None]] = {}
    for kind in list_errors():
        summary = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
        rows.setdefault((kind.status, kind.code), {})[summary] = None
    lines = [
        f"| `{code}` | {status} | {' Or: '.join(rows[status, code])} |"
        for status, code in sorted(rows)
    ]
    head = ["| code | status | what it means, and what to do |", "|---|---|---|"]
    return "\n".join([*head, *lines]) + "\n"


def list_errors() -> list[type[ServekitError]]:
    """Return the errors that clients may receive: those of requests, and those of gateways."""
    for module in pkgutil.walk_packages(gateway.__path__, "servekit.gateway."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    known: list[type[ServekitError]] = [ServekitError, *_subclasses(ServekitError)]
    return [
        kind
        for kind in known
        if kind is ServekitError
        or issubclass(kind, RequestError)
        or kind.__module__.startswith("servekit.gateway.")
    ]


def _subclasses(kind: type[ServekitError]) -> Iterator[type[ServekitError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)
