"""Parameters of a request body that no schema declares.

Clients send parameters of other servers. Silently dropping one may break a client that relies on
it, and refusing one breaks clients that do not need it. Therefore the answer names the parameter in
a header, and the log names it at most every LOG_EVERY_S. The policy is `server.unknown_parameters`.

Objects of options within a body (`stream_options`) are checked as the body itself is. Items of
lists are not: clients return messages and tools with fields of any server they have met.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import structlog

from servekit.errors import RequestError
from servekit.gateway.http.request_context import ORIGIN

log: Any = structlog.get_logger("servekit.gateway")

#: The most names in a header, a log line or a refusal, and the most characters of each name.
MOST_NAMES, MOST_CHARS = 8, 64
#: The least time between two log lines about the same parameter.
LOG_EVERY_S = 600.0
#: The most parameters whose last log time is kept.
MOST_REMEMBERED = 256
_UNFIT = re.compile(r"[^A-Za-z0-9_.-]")

Policy = Literal["warn", "refuse", "ignore"]


class UnknownParameters:
    """The unknown parameters of one gateway: the policy, and when each was last logged."""

    def __init__(self) -> None:
        self.policy: Policy = "warn"
        self._logged_s: dict[str, float] = {}

    def check_body(self, body: bytes, kind: type[msgspec.Struct]) -> None:
        """Report the parameters of `body` that `kind` has not. Raises RequestError by policy.

        The body has been decoded as `kind`.
        """
        if self.policy == "ignore":
            return
        unknown = _find_unknown(msgspec.Raw(body), kind)
        names = sorted(map(clean_name, unknown))
        if not names:  # options that come twice: the last ones count
            return
        more = len(names) - MOST_NAMES
        told = ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
        said = f"unknown parameter{'s' if len(names) > 1 else ''}: {told}"
        if self.policy == "refuse":
            raise RequestError(
                f"{said}; leave out unknown parameters (server.unknown_parameters: refuse)",
                param=names[0],
            )
        self.warn(said, names)

    def warn(self, said: str, names: list[str]) -> None:
        """Tell the client in the header what of its request has no effect, and log the names."""
        if self.policy == "ignore":
            return
        if (origin := ORIGIN.get()) is not None:
            before = f"{origin.warning.decode()}; " if origin.warning else ""
            origin.warning = f"{before}{said}".encode()
        self._log(names)

    def _log(self, names: list[str]) -> None:
        now_s = time.monotonic()
        new = [n for n in names if now_s - self._logged_s.get(n, -LOG_EVERY_S) >= LOG_EVERY_S]
        if not new or len(self._logged_s) > MOST_REMEMBERED:
            if new and now_s - max(self._logged_s.values()) >= LOG_EVERY_S:
                self._logged_s.clear()  # full of made-up names from a while ago
            return
        self._logged_s |= dict.fromkeys(new[:MOST_NAMES], now_s)
        log.warning("unknown_parameters_ignored", names=new[:MOST_NAMES])


def clean_name(name: str) -> str:
    """Return a name that is fit for a header and the log."""
    return _UNFIT.sub("?", name[:MOST_CHARS])


def refusing(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return a subclass of `kind` whose decoder refuses unknown fields, within options, too.

    Options that a body may leave out are null by default.
    """
    options = [
        (field.name, _refusing_type(field, inner), _default(field))
        for field in msgspec.structs.fields(kind)
        if (inner := _options_of(field.type))
    ]
    return msgspec.defstruct(
        kind.__name__, options, bases=(kind,), forbid_unknown_fields=True, kw_only=True
    )


def _refusing_type(field: msgspec.structs.FieldInfo, options: type[msgspec.Struct]) -> Any:
    refuses = refusing(options)
    return refuses if field.required else refuses | None


def _default(field: msgspec.structs.FieldInfo) -> Any:
    name = field.encode_name
    return msgspec.field(name=name) if field.required else msgspec.field(name=name, default=None)


def _find_unknown(body: msgspec.Raw, kind: type[msgspec.Struct], within: str = "") -> Iterator[str]:
    """Yield the names of all unknown fields, with a dot after the name of their object."""
    known = _fields(kind)
    for name, value in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items():
        if name not in known:
            yield f"{within}{name}"
        elif (options := known[name]) and bytes(value) != b"null":
            yield from _find_unknown(value, options, f"{within}{name}.")


@cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct] | None]:
    """Return the fields of a body by name, each with the type of its options, if it has any."""
    return {f.encode_name: _options_of(f.type) for f in msgspec.structs.fields(kind)}


def _options_of(annotation: Any) -> type[msgspec.Struct] | None:
    """Return the struct that a field holds, itself or null."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation
    inner = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _options_of(inner[0])
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in inner if kind is not NoneType]
        return _options_of(kinds[0]) if len(kinds) == 1 else None
    return None


#: One for the process, which is one gateway.
UNKNOWN = UnknownParameters()
