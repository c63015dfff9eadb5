"""The cut of texts and pairs: that of the library, with its special tokens in place."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace
from transformers import AutoTokenizer

from servekit.engines.api.base import TokenizedText
from servekit.engines.echo.engine import EchoEngine
from servekit.engines.text.tokenizer import TokenizerCodec
from servekit.errors import ContextLengthExceeded, RequestError
from servekit.protocol.messages import Generate, SamplingParams, WorkerSpec
from servekit.worker.preparation.input_encoding import InputEncoder, cut_text
from tests.unit.engines.transformers.pooling_models.test_classification import pair_tokenizer

QUERY, DOCUMENT = "Which dog is lazy?", "The quick brown fox jumps over the lazy dog."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    pair_tokenizer(made)
    return made


@pytest.mark.parametrize(
    "texts", [(QUERY, DOCUMENT), (DOCUMENT, QUERY), (QUERY, QUERY), ("", QUERY)]
)
def test_pairs_are_cut_as_by_the_library(folder: Path, texts: tuple[str, str]) -> None:
    library = AutoTokenizer.from_pretrained(folder)
    pair = TokenizerCodec(AutoTokenizer.from_pretrained(folder)).encode_parts(*texts)
    for total in range(5, len(pair.ids) + 2):
        expected = library(*texts, truncation="longest_first", max_length=total)
        found = cut_text(pair, 0, 0, total)
        assert found.ids == expected["input_ids"], total
        assert found.types == expected["token_type_ids"]


def test_a_text_is_cut_as_by_the_library(folder: Path) -> None:
    library = AutoTokenizer.from_pretrained(folder)
    text = TokenizerCodec(AutoTokenizer.from_pretrained(folder)).encode_parts(DOCUMENT)
    for total in range(3, len(text.ids) + 2):
        expected = library(DOCUMENT, truncation=True, max_length=total)
        assert cut_text(text, 0, 0, total).ids == expected["input_ids"]


def test_a_document_is_cut_and_its_query_is_not(folder: Path) -> None:
    codec = TokenizerCodec(AutoTokenizer.from_pretrained(folder))
    query, document = codec.encode_plain(QUERY), codec.encode_plain(DOCUMENT)
    pair = codec.encode_parts(QUERY, DOCUMENT)
    found = cut_text(pair, 0, 4, 0)
    first, middle, last = pair.ids[0], pair.ids[len(query) + 1], pair.ids[-1]
    assert found.ids == [first, *query, middle, *document[:4], last]
    assert found.parts == [0, *[1] * len(query), 0, *[2] * 4, 0]


def test_a_cut_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(RequestError, match="3 leaves no room for text beside 3 special tokens"):
        cut_text(TokenizedText([1, 5, 2, 6, 2], [], [0, 1, 0, 2, 0]), 0, 0, 3)


@pytest.fixture
def encoder() -> Iterator[InputEncoder]:
    path = ""
    spec = WorkerSpec("m/0", "m", "echo", path, None, "cpu", "auto", None, False, {}, {}, "socket")
    engine = EchoEngine(spec)
    info = engine.load(lambda progress: None)
    with ThreadPoolExecutor(4) as threads:
        yield InputEncoder(engine, replace(info, max_context=20), threads)


def test_other_threads_encode_the_same_in_the_same_order(encoder: InputEncoder) -> None:
    texts: list[str | list[int]] = [f"text {at}" for at in range(100)]
    plain = SamplingParams()
    pairs = Generate(1, plain, inputs=texts, queries=["q"], task="score")
    for request in (pairs, Generate(1, plain, inputs=texts, task="embed")):
        found = encoder.encode_input(request, spread=True)
        assert found == encoder.encode_input(request)
        assert len(found[0]) == 100


def test_the_first_input_that_is_too_long_is_told(encoder: InputEncoder) -> None:
    texts: list[str | list[int]] = ["short"] * 100
    texts[57] = texts[90] = "x" * 21
    request = Generate(1, SamplingParams(), inputs=texts, task="embed")
    with pytest.raises(ContextLengthExceeded, match=r"input\[57\] has"):
        encoder.encode_input(request, spread=True)
