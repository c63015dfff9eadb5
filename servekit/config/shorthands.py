"""Shorthands of the configuration file: `5m`, `4k`, and variables of the environment.

idle_unload_s: 5m           300 seconds: any duration (…_s) may have a unit
max_context: 4k             4096 tokens; of budgets and limits, 4k is 4000
path: ${MODELS}/qwen        a variable; ${MODELS:-/srv/models} with a default; $HOME/qwen
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from servekit.config.engines import plugins
from servekit.config.engines.path_options import path_options
from servekit.config.error_reporting import Problem
from servekit.config.yaml.nodes import Node, plain_value
from servekit.units import parse_duration

Loc = tuple[str | int, ...]

_VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")
_PLAIN = re.compile(r"^\$(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?=/|$)")
#: Keys whose text may have variables. Other texts, such as templates and commands, may mean them.
_EXPANDED = {"cwd", "path", "python", "run_dir", "file", "certificate", "host", "url", "library"}
#: Mappings of MCP servers whose texts may have variables: secrets.
_EXPANDED_OF_MCP = (("env",), ("headers",))
_COUNT = re.compile(r"(?P<number>[0-9]{1,15}(?:\.[0-9]+)?)\s*(?P<unit>[kKmM])")
_BINARY = {"k": 2**10, "m": 2**20}
_DECIMAL = {"k": 10**3, "m": 10**6}
#: Keys with a number of tokens, and what k and m are there.
COUNTS = {
    "max_context": _BINARY,
    "max_tokens": _BINARY,
    "tokens_per_minute": _DECIMAL,
    "daily_tokens": _DECIMAL,
    "monthly_tokens": _DECIMAL,
}


def expand(root: Node, environ: Mapping[str, str]) -> list[Problem]:
    """Replace the shorthands in the nodes; return the variables that are not set."""
    return list(_expand(root, (), environ, _find_path_options(root)))


def _find_path_options(root: Node) -> set[Loc]:
    """Return the places of engines' options that are paths."""
    return {
        ("models", i, "options", name)
        for i, _, options in plugins.written_options(plain_value(root))
        for name in path_options(options)
    }


def _expand(
    node: Node, loc: Loc, environ: Mapping[str, str], path_places: Collection[Loc]
) -> Iterator[Problem]:
    if isinstance(node.value, dict):
        for key, child in node.value.items():
            yield from _expand(child, (*loc, key), environ, path_places)
    elif isinstance(node.value, list):
        for index, child in enumerate(node.value):
            yield from _expand(child, (*loc, index), environ, path_places)
    elif isinstance(node.value, str) and loc:
        key = str(loc[-1])
        of_mcp = loc[:2] == ("server", "mcp") and loc[3:4] in _EXPANDED_OF_MCP
        if key in _EXPANDED or loc[:4] in path_places or of_mcp:
            yield from _expand_variables(node, loc, environ)
        elif key.endswith("_s"):
            node.value = _parse_span(node.value)
        elif key in COUNTS:
            node.value = _parse_count(node.value, COUNTS[key])


def _expand_variables(node: Node, loc: Loc, environ: Mapping[str, str]) -> Iterator[Problem]:
    text = str(node.value)
    missing: list[str] = []

    def replace_variable(found: re.Match[str]) -> str:
        groups = found.groupdict()
        value = environ.get(groups["name"]) or groups.get("default")
        if value is None:
            missing.append(groups["name"])
        return value or ""

    filled = _VARIABLE.sub(replace_variable, _PLAIN.sub(replace_variable, text))
    if missing:
        names = ", ".join(dict.fromkeys(missing))
        yield Problem(
            loc, f"{names} is not set in the environment; ${{{missing[0]}:-…}} has a default."
        )
    else:
        node.value = filled


def _parse_span(text: str) -> str | float:
    """Return the seconds of a text with a unit; other texts unchanged, quoted numbers too."""
    if not text[-1:].isalpha():
        return text
    try:
        return parse_duration(text)
    except ValueError:
        return text


def _parse_count(text: str, units: Mapping[str, int]) -> str | int:
    found = _COUNT.fullmatch(text)
    return text if found is None else round(float(found["number"]) * units[found["unit"].lower()])
