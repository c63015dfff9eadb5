"""Distributions of lengths in the command line's syntax: numbers of tokens or turns."""

from __future__ import annotations

import math
import random
import re
from typing import Literal

import msgspec

from servekit.errors import ConfigError

Kind = Literal["fixed", "uniform", "normal", "lognormal"]

_NUMBER = r"\s*(\d+(?:\.\d+)?)\s*"
_FIXED = re.compile(r"\s*(\d+)\s*")
_RANGE = re.compile(r"\s*(\d+)\s*\.\.\s*(\d+)\s*")
_NAMED = re.compile(rf"\s*(uniform|normal|lognormal):{_NUMBER},{_NUMBER}")

#: Maximum length; a longer one is a typo.
_MOST = 10_000_000


class Lengths(msgspec.Struct, frozen=True):
    """A distribution over whole numbers from 1.

    `fixed`: always `a`; `uniform`: from `a` to `b`, inclusive; `normal` and `lognormal`: `a` is the
    mean and `b` the standard deviation, both of the length itself.
    """

    kind: Kind
    a: float
    b: float = 0.0

    def draw(self, source: random.Random) -> int:
        """Draw one length, at least 1."""
        return max(1, round(self._draw(source)))

    def _draw(self, source: random.Random) -> float:
        if self.kind == "fixed":
            return self.a
        if self.kind == "uniform":
            return source.randint(int(self.a), int(self.b))
        if self.kind == "normal":
            return min(source.gauss(self.a, self.b), _MOST)
        return min(source.lognormvariate(*self._of_logarithm()), _MOST)

    def _of_logarithm(self) -> tuple[float, float]:
        """Return mean and deviation of the logarithm that give the length `a` and `b`."""
        variance = math.log1p((self.b / self.a) ** 2)
        return math.log(self.a) - variance / 2, math.sqrt(variance)

    def __str__(self) -> str:
        if self.kind == "fixed":
            return f"{self.a:g}"
        if self.kind == "uniform":
            return f"{self.a:g}..{self.b:g}"
        return f"{self.kind}:{self.a:g},{self.b:g}"


def parse_lengths(text: str, option: str) -> Lengths:
    """Parse `256`, `128..512`, `uniform:128,512`, `normal:256,64` or `lognormal:256,64`.

    Raises ConfigError, which names the option.
    """
    lengths = _read_lengths(text)
    if lengths is None:
        raise ConfigError(
            f"{option} {text!r} is not a distribution of lengths: write 256, 128..512, "
            "normal:256,64 or lognormal:256,64 (mean and standard deviation)"
        )
    if lengths.kind == "uniform" and lengths.a > lengths.b:
        raise ConfigError(f"{option} {text!r} begins above its end: write the smaller one first")
    if lengths.a < 1:
        raise ConfigError(f"{option} {text!r} begins below 1")
    if max(lengths.a, lengths.b) > _MOST:
        raise ConfigError(f"{option} {text!r} is more than {_MOST}")
    return lengths


def _read_lengths(text: str) -> Lengths | None:
    if found := _FIXED.fullmatch(text):
        return Lengths("fixed", float(found[1]))
    if found := _RANGE.fullmatch(text):
        return Lengths("uniform", float(found[1]), float(found[2]))
    if found := _NAMED.fullmatch(text):
        kind: Kind = msgspec.convert(found[1], Kind)
        a, b = float(found[2]), float(found[3])
        if kind == "uniform" and not (a.is_integer() and b.is_integer()):
            return None
        return Lengths(kind, a, b)
    return None
