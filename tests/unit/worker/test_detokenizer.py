"""Stop strings and continuations, however the text is cut."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from servekit.worker.detokenizer import StopScanner, TextStream

texts = st.text(alphabet="abc", max_size=40)
stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3)
cuts = st.lists(st.integers(min_value=1, max_value=5), max_size=40)


def pieces(text: str, sizes: Sequence[int]) -> list[str]:
    found, at = [], 0
    for size in sizes:
        found.append(text[at : at + size])
        at += size
    return [*found, text[at:]]


def reference(text: str, stop: Sequence[str]) -> str:
    """What a client may see, knowing the whole text: all before the first stop string to end."""
    for end in range(1, len(text) + 1):
        matched = [s for s in stop if text[:end].endswith(s)]
        if matched:
            return min((text[: text.find(s)] for s in stop if s in text[:end]), key=len)
    return text


@given(texts, stops, cuts)
def test_one_character_at_a_time_stops_at_the_first_match(
    text: str, stop: list[str], _: list[int]
) -> None:
    scanner = StopScanner(stop)
    seen = ""
    for character in text:
        out, found = scanner.push(character)
        seen += out
        if found:
            assert seen == reference(text, stop)
            assert scanner.found in stop
            assert text.startswith(seen + scanner.found)
            return
    assert seen + scanner.flush() == text == reference(text, stop)


@given(texts, stops, cuts)
def test_no_stop_string_ever_leaves(text: str, stop: list[str], sizes: list[int]) -> None:
    scanner = StopScanner(stop)
    seen, found = "", False
    for piece in pieces(text, sizes):
        out, found = scanner.push(piece)
        seen += out
        if found:
            break
    if not found:
        seen += scanner.flush()
        assert seen == text
    assert text.startswith(seen)
    assert not any(s in seen for s in stop)
    assert found == any(s in text for s in stop)


class Letters:
    """A decoder whose tokens are characters; 0 is half a character, shown with the next token."""

    def __init__(self) -> None:
        self._half = False

    def push(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token in token_ids:
            if token == 0:
                self._half = True
            else:
                text += ("é" if self._half else "") + chr(token)
                self._half = False
        return text

    def flush(self) -> str:
        return "\ufffd" if self._half else ""


tokens = st.lists(st.sampled_from([0, *map(ord, "abc")]), max_size=30)


def run(stream: TextStream, ids: Sequence[int]) -> str:
    text = ""
    for token in ids:
        text += stream.push([token])
        if stream.stopped:
            return text
    return text + stream.finish()


@given(tokens, stops, st.integers(0, 30))
def test_a_continuation_says_exactly_what_was_missing(
    ids: list[int], stop: list[str], at: int
) -> None:
    whole = run(TextStream(Letters(), stop), ids)
    first = TextStream(Letters(), stop)
    sent = ""
    for token in ids[:at]:
        sent += first.push([token])
        if first.stopped:
            assert sent == whole
            return
    second = TextStream(Letters(), stop, len(sent))
    rest = second.push(ids[:at])
    assert not second.stopped
    assert sent + rest + run(second, ids[at:]) == whole


@given(tokens, stops, cuts)
def test_tokens_of_a_step_end_where_they_would_have_ended_alone(
    ids: list[int], stop: list[str], sizes: list[int]
) -> None:
    alone, count, expected = TextStream(Letters(), stop), 0, ""
    while count < len(ids) and not alone.stopped:
        expected += alone.push([ids[count]])
        count += 1

    stream, taken, text, rest = TextStream(Letters(), stop), 0, "", ids
    for size in [*sizes, len(ids)]:
        step, rest = rest[:size], rest[size:]
        told, used = stream.push_until_stop(step)
        text, taken = text + told, taken + used
        if stream.stopped:
            break
    assert (text, taken, stream.found_stop) == (expected, count, alone.found_stop)
    assert stream.stopped == alone.stopped


def test_nothing_follows_a_stop_string_that_has_been_found() -> None:
    """As when the tokens of a request that goes on elsewhere already hold it."""
    stream = TextStream(Letters(), ["bc"])
    assert stream.push([*map(ord, "abca")]) == "a"
    assert stream.push([]) == stream.push([ord("a")]) == stream.finish() == ""
    assert stream.stopped
