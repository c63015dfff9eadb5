"""Amounts of memory in the configuration file: 20GiB, 800 MB, 40%."""

from __future__ import annotations

import re

_AMOUNT = re.compile(r"(?P<number>[0-9]{1,15}(?:\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*|%)")
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_memory(text: str) -> tuple[float, bool]:
    """Return a number of bytes, or of percent (True). Raises ValueError with a sentence."""
    match = _AMOUNT.fullmatch(text.strip())
    if match is None or (match["unit"] != "%" and match["unit"].lower() not in _UNITS):
        raise ValueError(f"{text!r} is not an amount of memory; write 20GiB, or 40% of the GPU")
    number = float(match["number"])
    if match["unit"] == "%":
        if not 0 < number <= 100:
            raise ValueError("a share of a GPU is over 0% and at most 100%")
        return number, True
    if not number:
        raise ValueError("it must be more than 0 bytes")
    return number * _UNITS[match["unit"].lower()], False


def memory_bytes(text: str, total_bytes: int) -> int:
    """Return an amount in bytes; a share is one of `total_bytes`."""
    amount, is_share = parse_memory(text)
    return int(total_bytes * amount / 100) if is_share else int(amount)
