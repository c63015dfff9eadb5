"""Conversion of engine arguments between a YAML file and vLLM's command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from servekit.errors import LoadError

#: A line of pydantic's errors that says nothing about the value.
_FURTHER = "For further information"


def parse_arguments(passed: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values for `EngineArgs` by vLLM's own parser. Raises LoadError with its refusal.

    Its types are not those of a file: a mapping is a configuration object, "8k" a number.
    """
    if not passed:
        return {}
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc] # untyped here
        def error(self, message: str) -> NoReturn:
            raise LoadError(f"vLLM refuses engine_args: {_condense(message)}")

    parser = EngineArgs.add_cli_args(Parser())
    known = vars(parser.parse_args([]))
    # not every switch has a negative form, and some fields are no flags at all
    flags = {name: value for name, value in passed.items() if name in known and value is not False}
    read = parser.parse_args(format_flags(flags))
    return {name: getattr(read, name) if name in flags else passed[name] for name in passed}


def format_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line; arguments that are None are left out."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            words += [f"--{flag}", *map(_format_value, value)]
        elif value is not None:
            words.append(f"--{flag}={_format_value(value)}")
    return words


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _condense(message: str) -> str:
    lines = [line.strip() for line in message.splitlines()]
    return ": ".join(line for line in lines if line and not line.startswith(_FURTHER))
