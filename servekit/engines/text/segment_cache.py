"""Token ids of the parts of texts that begin with an added token, kept for the next text.

A conversation repeats its earlier messages in each request, and a template begins each message with
an added token, as `<|im_start|>`. A tokenizer splits a text at such tokens before it does anything
else. So the ids of a text are those of its parts, each tokenised alone, if no part but the first
begins with text: a Metaspace pre-tokenizer may add a space to the text at the very beginning.
"""

from __future__ import annotations

import re
import string
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

#: Characters of text to keep, which with their ids take about 16 bytes each.
CAPACITY_CHARS = 2**20
#: Characters that are neither white space nor a part of a word.
_NO_WORD = frozenset(string.punctuation) - {"_"}


class SegmentCache:
    """A cache of the ids of a text's parts in front of `encode`; any thread may use it."""

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        borders: Sequence[str],
        capacity_chars: int = CAPACITY_CHARS,
    ) -> None:
        """Store the added tokens that may begin a part; see `safe_borders`."""
        self._encode = encode
        self._border = re.compile("|".join(map(re.escape, sorted(borders, key=len, reverse=True))))
        self._capacity_chars = capacity_chars
        self._chars = 0
        self._known: OrderedDict[tuple[bool, str], list[int]] = OrderedDict()
        self._lock = threading.Lock()

    def encode_segments(self, text: str) -> list[int]:
        ids: list[int] = []
        for at, part in enumerate(self._split_text(text)):
            ids += self._encode_part((at == 0, part))
        return ids

    def _split_text(self, text: str) -> Iterator[str]:
        start = 0
        for found in self._border.finditer(text):
            if found.start() > start:
                yield text[start : found.start()]
                start = found.start()
        yield text[start:]

    def _encode_part(self, key: tuple[bool, str]) -> list[int]:
        with self._lock:
            ids = self._known.get(key)
            if ids is not None:
                self._known.move_to_end(key)
                return ids
        ids = self._encode(key[1])
        if len(key[1]) <= self._capacity_chars:
            self._keep(key, ids)
        return ids

    def _keep(self, key: tuple[bool, str], ids: list[int]) -> None:
        with self._lock:
            if key not in self._known:
                self._chars += len(key[1])
            self._known[key] = ids
            while self._chars > self._capacity_chars:
                (_, part), _ = self._known.popitem(last=False)
                self._chars -= len(part)


def safe_borders(added: Iterable[Any], wanted: Callable[[str], bool]) -> list[str]:
    """Return those `wanted` of a tokenizer's `AddedToken`s before which a text can be cut.

    The tokenizer must find such a token wherever it is written: before normalization, whatever is
    beside it. No added token may begin before it and end in it or after it, nor take white space
    that belongs to it, nor be a whole word because the text ends there.
    """
    tokens = list(added)
    tails = [token.content[at:] for token in tokens for at in range(1, len(token.content))]
    beyond, ends = "\0".join(token.content[1:] for token in tokens), set(tails)

    def overlaps(text: str) -> bool:
        return text in beyond or any(text[:size] in ends for size in range(1, len(text) + 1))

    return [
        token.content
        for token in tokens
        if wanted(token.content)
        and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
        and token.content == token.content.rstrip()
        and token.content[:1] in _NO_WORD
        and not overlaps(token.content)
    ]
