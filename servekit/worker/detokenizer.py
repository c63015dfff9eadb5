"""Decoding of an engine's token ids to text, with stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from servekit.engines.api.base import Decoder


class StopScanner:
    """Search for the first stop string in a stream of text, however the text is split.

    Text that could be the beginning of a stop string is held back until that is decided.
    """

    __slots__ = ("_begins", "_held", "_include", "_longest", "_stops", "found")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """Prepare the search; with `include`, a stop string that is found remains in the text."""
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, stops)) if stops else 0
        self._begins = "".join([stop[:-1] for stop in stops])  # all characters to hold back
        self._held = ""
        self.found = ""  # the stop string that was found

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that may be sent, and whether a stop string was found right after it."""
        if not self._stops:
            return text, False
        text = self._held + text
        for stop in self._stops:
            if stop in text:
                return self._cut_text(text), True
        keep = self._could_begin(text)
        if not keep:
            self._held = ""
            return text, False
        self._held = text[-keep:]
        return text[:-keep], False

    def would_stop(self, text: str) -> bool:
        """Return whether `push(text)` would find a stop string; nothing is pushed."""
        text = self._held + text
        return any(stop in text for stop in self._stops)

    def _cut_text(self, text: str) -> str:
        """Return the text up to the stop string that begins first."""
        at, self.found = min((text.find(stop), stop) for stop in self._stops if stop in text)
        self._held = ""
        return text[: at + len(self.found) if self._include else at]

    def flush(self) -> str:
        """Return the text held back, once no stop string can complete it."""
        held, self._held = self._held, ""
        return held

    def _could_begin(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that begins a stop string."""
        if text[-1:] not in self._begins:
            return 0
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-size:]
            for stop in self._stops:  # no `any`: its generator would cost more than the search
                if stop.startswith(end):
                    return size
        return 0


#: The search of all streams without stop strings: it holds no text.
_NO_STOPS = StopScanner(())


class TextStream:
    """Incremental decoder of one completion's token ids to text.

    A continuation is primed with the ids that another worker has reported: their text is decoded
    again, and the `sent_chars` characters that the client already has are skipped.
    """

    __slots__ = (
        "_decoder",
        "_include",
        "_scanner",
        "_skip",
        "_stops",
        "decode",
        "plain",
        "stopped",
    )

    def __init__(
        self, decoder: Decoder, stops: Sequence[str], sent_chars: int = 0, include: bool = False
    ) -> None:
        """Set up the decoding; with `include`, the stop string or token remains in the text."""
        self._decoder, self.decode = decoder, decoder.push
        self._scanner = StopScanner(stops, include) if stops else _NO_STOPS
        self._include = include
        self._skip = sent_chars
        self._stops = bool(stops)
        self.stopped = False
        #: Whether `push` would return the output of `decode` unchanged from here on.
        self.plain = not (stops or sent_chars)

    @property
    def found_stop(self) -> str:
        """Return the stop string that was found, or ""."""
        return self._scanner.found

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that may be sent; `stopped` is set once a stop string has been found."""
        text = self.decode(token_ids)
        return text if self.plain else self._scan_text(text)

    def push_until_stop(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Push tokens one by one, as if each came alone; also return how many there are up to a
        stop string, the one that completes it included.
        """
        count = len(token_ids)
        if not self._stops or count < 2:
            return self.push(token_ids), count
        decode = self.decode
        pieces = [decode([token]) for token in token_ids]
        text = "".join(pieces)
        if not self._scanner.would_stop(text):
            return self._scan_text(text), count
        text, count = "", 0
        for piece in pieces:
            text += self._scan_text(piece)
            count += 1
            if self.stopped:
                break
        return text, count

    def finish(self, stop_token: int = -1) -> str:
        """Return the remaining text after the last token; `stop_token` ended the completion."""
        text = self.decode([stop_token]) if self._include and stop_token >= 0 else ""
        text += self._decoder.flush()
        if self.plain:
            return text
        text = self._scan_text(text)
        return text if self.stopped else text + self._skip_sent(self._scanner.flush())

    def _scan_text(self, decoded: str) -> str:
        if self.stopped:  # text after a stop string is not part of the answer
            return ""
        text, self.stopped = self._scanner.push(decoded)
        return self._skip_sent(text)

    def _skip_sent(self, text: str) -> str:
        if not self._skip:
            return text
        skip = min(self._skip, len(text))
        self._skip -= skip
        self.plain = not (self._skip or self._stops)
        return text[skip:]


class CountedText(TextStream):
    """A `TextStream` that counts the decoded characters and those certain to be sent."""

    __slots__ = ("certain", "decoded")

    def __init__(
        self, decoder: Decoder, stops: Sequence[str], sent_chars: int = 0, include: bool = False
    ) -> None:
        super().__init__(decoder, stops, sent_chars, include)
        self.decoded = self.certain = 0

    def _scan_text(self, decoded: str) -> str:
        self.decoded += len(decoded)
        return super()._scan_text(decoded)

    def _skip_sent(self, text: str) -> str:
        self.certain += len(text)
        return super()._skip_sent(text)
