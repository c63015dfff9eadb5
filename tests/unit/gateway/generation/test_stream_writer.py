"""When a generation is written into its response, and how it ends; the API's bytes are made up."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from servekit.errors import ClientClosed, DeadlineExceeded, QueueFull, ServekitError
from servekit.gateway.generation.generation import Choice, Generation, GenerationChunk
from servekit.gateway.generation.stream_writer import ResponseEncoder, StreamWriter
from servekit.gateway.http.response import Response
from servekit.gateway.tool_parsing import Text, ToolCallStart


class MadeUpResponse:
    """A response whose client reads while `is_writable`."""

    def __init__(self) -> None:
        self.is_writable = True
        self.response_started = False
        self.on_writable: Any = None
        self.on_gone: Any = None
        self.written: list[bytes] = []
        self.ended = ""

    def begin_stream(self, headers: object) -> None:
        assert not self.response_started
        self.response_started = True

    def write(self, data: bytes, *, last: bool = False) -> None:
        assert self.is_writable and not self.ended
        self.written.append(data)
        self.ended = "last" if last else ""

    def send_json(self, body: bytes) -> None:
        self.written.append(body)
        self.ended = "answer"

    def send_error(self, error: ServekitError) -> None:
        self.ended = f"fail: {error.message}"

    def abort_stream(self) -> None:
        self.ended = "cut"


class MadeUpGeneration:
    """A generation of one choice, whose news the test puts in."""

    end_of_tick = None

    def __init__(self, *, stream: bool, follow: bool = False, parser: Any = None) -> None:
        self.request = SimpleNamespace(stream=stream, follow=follow)
        self.news: list[list[GenerationChunk]] = []
        self.whole: list[Choice] | None = None
        self.done = False
        self.place: int | None = None
        self.error: Exception | None = None
        self.cancelled = 0
        self.call = SimpleNamespace(texts=[], done=False, origin=None)
        self.first = self.call
        self.only = SimpleNamespace(parser=parser, call=self.call, parse=parser)

    def read_by(self, reader: StreamWriter) -> None:
        self.reader = reader

    def cancel(self) -> None:
        self.cancelled += 1

    def collect(self) -> list[GenerationChunk]:
        if self.error is not None:
            raise self.error
        return self.news.pop(0) if self.news else []

    def collect_whole(self) -> list[Choice] | None:
        if self.error is not None:
            raise self.error
        return self.whole


class Encoder(ResponseEncoder):
    """Shows what it is asked for."""

    def __init__(self, frame: tuple[bytes, bytes] | None = None, late: bool = True) -> None:
        self.frame = frame
        self._late = late

    def encode_response(self, generation: Generation, choices: list[Choice]) -> bytes:
        return b"whole:%d" % len(choices)

    def encode_start(self, generation: Generation) -> bytes:
        return b"open "

    def encode_chunks(self, generation: Generation, chunks: list[GenerationChunk]) -> bytes:
        names = [type(event).__name__ for chunk in chunks for event in chunk.events]
        return f"events:{','.join(names)} ".encode()

    def encode_end(self, generation: Generation) -> bytes:
        return b"close"

    def encode_late_error(self, error: ServekitError) -> bytes | None:
        return error.message.encode() if self._late else None


class Scene:
    def __init__(self, encoder: Encoder | None = None, **how: Any) -> None:
        self.response = MadeUpResponse()
        self.generation = MadeUpGeneration(**{"stream": True, **how})
        self.writer = StreamWriter(
            cast(Response, self.response),
            cast(Generation, self.generation),
            encoder or Encoder(),
        )

    def comes(self, *texts: str, done: bool = False) -> Scene:
        """Let a chunk come."""
        self.generation.news.append([GenerationChunk(0, [Text(text) for text in texts])])
        self.generation.done = done
        self.writer.read_news()
        return self

    def tokens(self, texts: Iterable[str]) -> list[bytes]:
        """Let tokens of the only choice come, and return what is written of them."""
        self.response.written.clear()
        self.generation.call.texts.extend(texts)
        self.writer.read_news()
        return self.response.written


def test_a_stream_opens_with_its_first_news_and_closes_with_its_last() -> None:
    scene = Scene()
    assert not scene.response.response_started, "an error may still come, with its own status"
    scene.writer.read_news()
    assert not scene.response.response_started
    scene.comes("a")
    assert scene.response.response_started
    assert scene.response.written == [b"open events:Text "]
    scene.generation.call.done = True
    scene.comes("b", "c", done=True)
    assert scene.response.written[1:] == [b"events:Text,Text close"]
    assert scene.response.ended == "last"


def test_all_that_has_come_is_written() -> None:
    scene = Scene()
    scene.generation.news.append([GenerationChunk(0, [Text("a")])])
    scene.comes("b")
    assert scene.response.written == [b"open events:Text ", b"events:Text "]


def test_tokens_take_the_short_way_in_one_write() -> None:
    scene = Scene(Encoder(frame=(b"<", b">"))).comes("a")
    assert scene.tokens(["b"]) == [b'<"b">']
    assert scene.tokens(['c"', "d"]) == [b'<"c\\"d">']
    assert scene.tokens([""]) == [], "half a character is nothing yet"
    assert scene.generation.call.texts == []
    assert scene.tokens([]) == []


def test_without_a_frame_the_encoder_is_asked() -> None:
    assert Scene().comes("a").tokens(["b"]) == [b"events:Text "]


def test_text_is_parsed_before_it_is_written() -> None:
    events: list[Any] = [Text("b")]
    scene = Scene(Encoder(frame=(b"<", b">")), parser=lambda text: events).comes("a")
    assert scene.tokens(["b"]) == [b'<"b">']
    events[:] = [ToolCallStart(0, "1", "look")]
    assert scene.tokens(["<tool>"]) == [b"events:ToolCallStart "]
    events[:] = [Text("a"), Text("b")]
    assert scene.tokens(["ab"]) == [b"events:Text,Text "]


def test_a_client_that_does_not_read_gets_nothing_until_it_reads_again() -> None:
    scene = Scene(Encoder(frame=(b"<", b">"))).comes("a")
    scene.response.is_writable = False
    assert scene.tokens(["b"]) == []
    assert scene.tokens(["c"]) == []
    scene.response.is_writable = True
    scene.response.on_writable()
    assert scene.response.written == [b'<"bc">']


def test_a_client_that_goes_cancels() -> None:
    scene = Scene()
    scene.response.on_gone()
    assert scene.generation.cancelled == 1


def test_a_whole_answer_is_written_once_it_is_there() -> None:
    scene = Scene(stream=False)
    scene.writer.read_news()
    assert scene.response.ended == ""
    scene.generation.whole = []
    scene.writer.read_news()
    assert (scene.response.written, scene.response.ended) == ([b"whole:0"], "answer")


def test_the_place_in_the_queue_is_told_when_it_changes() -> None:
    scene = Scene(follow=True)
    assert scene.response.response_started, "the client is to see that it waits"
    for place in (None, 2, 2, 1):
        scene.generation.place = place
        scene.writer.read_news()
    assert scene.response.written == [b": queue position 2\n\n", b": queue position 1\n\n"]
    scene.response.is_writable = False
    scene.generation.place = 0
    scene.writer.read_news()
    assert len(scene.response.written) == 2
    assert not Scene(follow=True, stream=False).response.response_started


@pytest.mark.parametrize(
    ("begun", "late", "ended"),
    [(False, True, "fail: too late"), (True, True, "last"), (True, False, "cut")],
)
def test_an_error_ends_a_response_as_far_as_it_has_come(
    begun: bool, late: bool, ended: str
) -> None:
    scene = Scene(Encoder(late=late))
    if begun:
        scene.comes("a")
        scene.generation.call.done = True
    scene.generation.error = DeadlineExceeded("too late")
    scene.response.written.clear()
    scene.writer.read_news()
    scene.writer.read_news()
    assert scene.response.ended == ended
    assert scene.response.written == ([b"too late"] if begun and late else [])
    assert scene.generation.cancelled == 1, "once"


def test_a_full_queue_is_told_to_a_whole_answer() -> None:
    scene = Scene(stream=False)
    scene.generation.error = QueueFull("full")
    scene.writer.read_news()
    assert scene.response.ended == "fail: full"


def test_nobody_is_told_of_a_client_that_has_gone() -> None:
    scene = Scene()
    scene.generation.error = ClientClosed("gone")
    scene.writer.read_news()
    assert (scene.response.ended, scene.generation.cancelled) == ("", 1)


def test_a_bug_ends_one_response_and_no_other() -> None:
    scene = Scene()
    scene.generation.error = ZeroDivisionError()
    scene.writer.read_news()
    assert scene.response.ended == "fail: an internal error; see the logs"
