"""A Dockerfile's instructions, as far as ours uses them: what the tests and `image` go by."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Instruction:
    word: str
    rest: str

    @property
    def flags(self) -> dict[str, str]:
        return dict(re.findall(r"--([\w-]+)=(\S+)", self.rest))

    @property
    def operands(self) -> list[str]:
        return [one for one in self.rest.split() if not one.startswith("--")]

    @property
    def command(self) -> list[str]:
        """Of CMD, HEALTHCHECK and SHELL, which we write as lists only."""
        found: list[str] = json.loads(self.rest[self.rest.index("[") :])
        return found


@dataclass(slots=True)
class Stage:
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def last(self, word: str) -> Instruction:
        return [one for one in self.instructions if one.word == word][-1]


def stages(text: str) -> list[Stage]:
    """The stages in their order."""
    found: list[Stage] = []
    for one in _instructions(text):
        if one.word == "FROM":
            found.append(Stage(one.rest.partition(" AS ")[2] or str(len(found))))
        elif found:  # an ARG before the first FROM is for FROM alone
            found[-1].instructions.append(one)
    return found


def _instructions(text: str) -> Iterator[Instruction]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield Instruction(word, rest.strip())


def variables(instruction: Instruction, given: Mapping[str, str]) -> dict[str, str]:
    """What an ARG or ENV sets; of an ARG, `given` has what is given for it."""
    if instruction.word == "ARG":
        name, _, default = instruction.rest.partition("=")
        return {name: given.get(name, default.strip('"'))}
    pairs = (one.partition("=") for one in shlex.split(instruction.rest))
    return {name: expanded(value, given) for name, _, value in pairs}


def expanded(text: str, known: Mapping[str, str]) -> str:
    """With `$NAME` and `${NAME}` replaced."""
    return re.sub(r"\$\{?(\w+)\}?", lambda found: known.get(found[1], ""), text)
