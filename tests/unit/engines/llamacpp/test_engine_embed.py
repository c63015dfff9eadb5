"""Embeddings by llama.cpp: each way of pooling, of one vector a text, of length 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from servekit.engines.api.base import EmbedJob, Job, TokenizedText
from servekit.errors import ContextLengthExceeded, LoadError, Unsupported
from servekit.protocol.messages import SamplingParams
from tests.unit.engines.conftest import llamacpp
from tests.unit.engines.harness import Harness
from tests.unit.engines.llamacpp import making

Make = Callable[..., Harness]
Vector = NDArray[np.float32]
TEXTS = [[5, 6, 7], [9], [200, 100, 50, 25, 12, 6], [5, 6], list(range(3, 100))]


def embed(harness: Harness, texts: list[list[int]]) -> list[Vector]:
    harness._last += 1
    job = harness._last
    harness.engine.embed(EmbedJob(job, texts))
    return [np.array(vector, np.float32) for vector in harness.vectors(job)]


@pytest.fixture(scope="module", params=["mean", "cls", "last"])
def pooled(request: pytest.FixtureRequest, gguf_file: Path) -> Iterator[Harness]:
    shared = llamacpp(gguf_file, {"pooling": request.param})
    yield shared
    shared.close()


def test_vectors_have_length_one_and_repeat(pooled: Harness) -> None:
    vectors = embed(pooled, TEXTS)
    assert [len(vector) for vector in vectors] == [64] * len(TEXTS)
    for vector in vectors:
        assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)
    for text, vector in zip(TEXTS, vectors, strict=True):
        [alone] = embed(pooled, [text])
        assert np.abs(alone - vector).max() < 1e-4
    assert pooled.info.serves == ("embed", "tokenize", "detokenize")
    assert pooled.info.embedding_size == 64


def test_each_pooling_is_what_its_name_says(gguf: Make) -> None:
    """The model is causal: what it makes of a token does not change by what follows."""
    raw = gguf({"pooling": "last"}).engine._runner._context
    text = TEXTS[2]
    states = []
    for prefix in accumulate(([token] for token in text), lambda all, new: all + new):
        raw.clear_batch()
        raw.put(0, 0, prefix, output=True)
        raw.decode_batch()
        states.append(raw.embedding(0))
        raw.clear_cache()
    expected = {"cls": states[0], "last": states[-1], "mean": np.mean(states, axis=0)}
    for name, vector in expected.items():
        [found] = embed(gguf({"pooling": name}), [text])
        assert np.abs(found - vector / np.linalg.norm(vector)).max() < 1e-4, name


def test_more_texts_than_there_are_sequences(pooled: Harness) -> None:
    many = [[token, token + 1] for token in range(3, 103)]
    vectors = embed(pooled, many)
    assert np.abs(vectors[40] - embed(pooled, [many[40]])[0]).max() < 1e-4
    assert len({vector.tobytes() for vector in vectors}) > 90


def test_the_file_says_how(gguf: Make) -> None:
    stated = gguf(llama__pooling_type=1)
    assert stated.info.embedding_size == 64
    [found] = embed(stated, [TEXTS[0]])
    [asked] = embed(gguf({"pooling": "mean"}), [TEXTS[0]])
    assert np.abs(found - asked).max() < 1e-5
    assert "generate" in gguf({"pooling": "none"}, llama__pooling_type=1).info.serves
    with pytest.raises(LoadError, match=r"options\.pooling"):
        gguf(llama__pooling_type=4, llama__attention__causal=False)


def test_what_it_refuses(pooled: Harness) -> None:
    with pytest.raises(ContextLengthExceeded, match="1 to 256"):
        pooled.engine.embed(EmbedJob(10**6, [[5] * 257]))
    with pytest.raises(Unsupported, match="does not generate"):
        pooled.engine.submit(Job(10**6, [5], SamplingParams(max_tokens=1)))
    assert len(embed(pooled, [[5] * 256])) == 1


@pytest.mark.parametrize("pooling", [1, 2])
def test_an_encoder_says_what_transformers_says(tmp_path: Path, pooling: int) -> None:
    import torch

    reference = making.bert_by_transformers(making.write_tiny_bert(tmp_path / "b.gguf", pooling))
    encoder = llamacpp(tmp_path / "b.gguf")
    try:
        assert encoder.info.embedding_size == making.WIDTH
        texts = [
            encoder.engine.codec.encode(text) for text in ("the sea is blue", "deep", "the seas")
        ]
        assert texts == [[2, 4, 5, 6, 7, 3], [2, 9, 3], [2, 4, 5, 8, 3]]
        for ids, vector in zip(texts, embed(encoder, texts), strict=True):
            with torch.inference_mode():
                states = reference(torch.tensor([ids])).last_hidden_state[0].numpy()
            expected = states[0] if pooling == 2 else states.mean(0)
            assert np.abs(vector - expected / np.linalg.norm(expected)).max() < 2e-3
        assert len(embed(encoder, [[2] * making.POSITIONS])) == 1
    finally:
        encoder.close()


def head(tensors: making.Tensors, ids: list[int], reference: Any) -> NDArray[np.float32]:
    """The logits of a BERT with a head: of its first token, through a tanh."""
    import torch

    with torch.inference_mode():
        first = reference(torch.tensor([ids])).last_hidden_state[0, 0].numpy()
    hidden = np.tanh(tensors["cls.weight"] @ first + tensors["cls.bias"])
    found: NDArray[np.float32] = tensors["cls.output.weight"] @ hidden + tensors["cls.output.bias"]
    return found


@pytest.mark.parametrize("labels", [("LABEL_0",), ("bad", "good", "fair")])
def test_a_head_scores_as_transformers_does(tmp_path: Path, labels: tuple[str, ...]) -> None:
    tensors = making.write_tiny_bert(tmp_path / "b.gguf", 4, labels)
    heads = {name for name in tensors if name.startswith("cls")}
    reference = making.bert_by_transformers({n: t for n, t in tensors.items() if n not in heads})
    ranker = llamacpp(tmp_path / "b.gguf")
    try:
        assert ranker.info.labels == (("LABEL_0",) if len(labels) == 1 else labels)
        assert ("score" in ranker.info.serves) is (len(labels) == 1)
        assert "classify" in ranker.info.serves and "embed" not in ranker.info.serves
        pairs = [
            ranker.engine.codec.encode_parts("the sea", document)
            for document in ("deep", "the sea is blue", "the seas")
        ]
        ids = [pair.ids for pair in pairs]
        assert all(len(pair.parts) == len(pair.ids) for pair in pairs)
        assert [t for t, part in zip(ids[0], pairs[0].parts, strict=True) if part] == [4, 5, 9]
        for raw in (True, False):
            ranker._last += 1
            job = ranker._last
            ranker.engine.classify(EmbedJob(job, ids, raw=raw))
            ranker.until(lambda job=job: job in ranker.outputs, "the scores are there")  # type: ignore[misc]
            for one, vector in zip(ids, ranker.outputs[job][0].vectors or (), strict=True):
                logits = head(tensors, one, reference)
                powers = np.exp(logits)
                scores = powers / powers.sum() if len(labels) > 1 else powers / (1 + powers)
                found = np.frombuffer(vector, "<f4")
                assert np.abs(found - (logits if raw else scores)).max() < 5e-3
    finally:
        ranker.close()


def test_the_parts_of_a_text_are_told_apart(tmp_path: Path) -> None:
    making.write_tiny_bert(tmp_path / "b.gguf", 4, ("LABEL_0",))
    ranker = llamacpp(tmp_path / "b.gguf")
    try:
        found = ranker.engine.codec.encode_parts("the sea")
        assert found == TokenizedText([2, 4, 5, 3], [], [0, 1, 1, 0])
    finally:
        ranker.close()
