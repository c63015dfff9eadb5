"""Classifiers and cross-encoders: the scores of the plain model, alone and in any company."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BartConfig,
    BartForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLNetConfig,
    XLNetForSequenceClassification,
)

from servekit.engines.api.base import EmbedJob, Job
from servekit.engines.transformers.pooling_models.classification import choose_activation
from servekit.errors import ContextLengthExceeded, LoadError, RequestError, Unsupported
from servekit.protocol.messages import SamplingParams
from tests.unit.engines.harness import CORPUS, Harness, byte_level_tokenizer, make_spec

DOCUMENTS = [*CORPUS, "a", "jumps over the lazy dog. " * 6, "", "Москва"]
TORCH = "torch.nn.modules"
QUERY = "Which dog is lazy?"
#: The library's types lack the fields that all configurations take.
Bert: Any = BertConfig
Roberta: Any = XLMRobertaConfig
Deberta: Any = DebertaV2Config
Modern: Any = ModernBertConfig
Qwen: Any = Qwen3Config
Bart: Any = BartConfig
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.4,
}


def pair_tokenizer(folder: Path, pad: int = 0, *, marks: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer that joins the texts of a pair as BERT's does, or without any marks."""
    fast = byte_level_tokenizer()
    if marks:
        fast.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]"})
        ids = [(mark, fast.convert_tokens_to_ids(mark)) for mark in ("[CLS]", "[SEP]")]
        fast.backend_tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
        )
    fast.pad_token_id = pad
    fast.save_pretrained(folder)
    if marks:
        name_inputs(folder, "input_ids", "token_type_ids", "attention_mask")
    return fast


def name_inputs(folder: Path, *names: str) -> None:
    """Let the tokenizer return these: the library does not save their names."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"model_input_names": names}))


def bert(folder: Path, labels: int = 1, **more: Any) -> Path:
    fast = pair_tokenizer(folder)
    torch.manual_seed(1)
    names = {at: f"name-{at}" for at in range(labels)}
    config = Bert(
        vocab_size=len(fast),
        max_position_embeddings=128,
        num_labels=labels,
        id2label=names,
        **SMALL,
        **more,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def three_labels(folder: Path) -> Path:
    return bert(folder, 3)


def roberta(folder: Path) -> Path:
    fast = pair_tokenizer(folder, pad=1)
    torch.manual_seed(2)
    config = Roberta(
        vocab_size=len(fast),
        max_position_embeddings=130,
        pad_token_id=1,
        type_vocab_size=1,
        num_labels=1,
        **SMALL,
    )
    XLMRobertaForSequenceClassification(config).save_pretrained(folder)
    return folder


def deberta(folder: Path) -> Path:
    fast = pair_tokenizer(folder)
    torch.manual_seed(3)
    config = Deberta(
        vocab_size=len(fast), max_position_embeddings=128, type_vocab_size=2, num_labels=1, **SMALL
    )
    DebertaV2ForSequenceClassification(config).save_pretrained(folder)
    return folder


def modern(folder: Path) -> Path:
    fast = pair_tokenizer(folder)
    torch.manual_seed(4)
    config = Modern(
        vocab_size=len(fast),
        max_position_embeddings=128,
        num_labels=1,
        pad_token_id=0,
        cls_token_id=1,
        bos_token_id=1,
        eos_token_id=2,
        sep_token_id=2,
        **SMALL,
    )
    ModernBertForSequenceClassification(config).save_pretrained(folder)
    return folder


def qwen3(folder: Path) -> Path:
    fast = pair_tokenizer(folder, marks=False)
    torch.manual_seed(5)
    config = Qwen(
        vocab_size=len(fast),
        max_position_embeddings=128,
        num_key_value_heads=2,
        head_dim=8,
        num_labels=1,
        **SMALL,
    )
    model: Any = Qwen3ForSequenceClassification
    model(config).save_pretrained(folder)
    return folder


MODELS: dict[str, Callable[[Path], Path]] = {
    "bert": bert,
    "three_labels": three_labels,
    "roberta": roberta,
    "deberta": deberta,
    "modern": modern,
    "qwen3": qwen3,
}


def plain(folder: Path, *texts: str) -> list[float]:
    """The logits by the library alone, one text or pair at a time."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    pair = ([text] for text in texts)  # as a batch, in which an empty document makes a pair, too
    encoded = AutoTokenizer.from_pretrained(folder)(*pair, return_tensors="pt")
    if getattr(model.config, "type_vocab_size", 0) < 2:
        encoded.pop("token_type_ids", None)
    with torch.no_grad():
        logits: list[float] = model(**encoded).logits[0].tolist()
    return logits


def submit(harness: Harness, *texts: Sequence[str], raw: bool = False) -> int:
    """Submit texts, or pairs of texts."""
    harness._last += 1
    found = [harness.engine.codec.encode_parts(*one) for one in texts]
    types = [one.types for one in found] if len(texts[0]) > 1 else []
    harness.engine.classify(EmbedJob(harness._last, [one.ids for one in found], types, raw))
    return harness._last


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / str(request.param)
    folder.mkdir()
    return MODELS[request.param](folder)


@pytest.fixture(scope="module")
def classifier(model: Path) -> Iterator[Harness]:
    running = Harness(make_spec(model))
    yield running
    running.close()


def test_it_says_what_it_is(classifier: Harness, model: Path) -> None:
    info = classifier.info
    score = () if model.name == "three_labels" else ("score",)
    assert info.serves == ("classify", *score, "tokenize", "detokenize")
    assert (info.chat, info.max_context, info.embedding_size) == (False, 128, 0)
    assert "tokens a batch" in info.detail
    if model.name == "three_labels":
        assert info.labels == ("name-0", "name-1", "name-2")


def test_the_scores_of_pairs_are_those_of_the_plain_model(classifier: Harness, model: Path) -> None:
    pairs = [(QUERY, document) for document in DOCUMENTS]
    found = classifier.vectors(submit(classifier, *pairs, raw=True))
    for pair, logits in zip(pairs, found, strict=True):
        assert logits == pytest.approx(plain(model, *pair), abs=2e-5)


def test_the_scores_of_texts_are_those_of_the_plain_model(classifier: Harness, model: Path) -> None:
    texts = [(text,) for text in DOCUMENTS if text]
    for text, found in zip(texts, classifier.vectors(submit(classifier, *texts)), strict=True):
        logits = torch.tensor(plain(model, *text))
        expected = torch.softmax(logits, 0) if len(found) > 1 else torch.sigmoid(logits)
        assert found == pytest.approx(expected.tolist(), abs=2e-5)


def test_a_pair_has_the_same_score_alone_and_in_any_company(classifier: Harness) -> None:
    pairs = [(QUERY, document) for document in DOCUMENTS]
    alone = [classifier.vectors(submit(classifier, pair))[0] for pair in pairs]
    jobs = [
        submit(classifier, *pairs[turn:], *pairs[:turn], raw=turn % 2 > 0)
        for turn in range(len(pairs))
    ]
    jobs.append(submit(classifier, (QUERY,), ("a",)))  # texts and pairs share a batch
    for turn, job in enumerate(jobs[:-1]):
        found = classifier.vectors(job)
        if turn % 2 == 0:
            for expected, score in zip(alone[turn:] + alone[:turn], found, strict=True):
                assert score == pytest.approx(expected, abs=2e-5)


def test_pairs_without_token_types_are_served(tmp_path: Path) -> None:
    name_inputs(bert(tmp_path), "input_ids", "attention_mask")
    running = Harness(make_spec(tmp_path))
    try:
        assert running.engine.codec.encode_parts(QUERY, "a").types == []
        [logits] = running.vectors(submit(running, (QUERY, "a"), raw=True))
        assert logits == pytest.approx(plain(tmp_path, QUERY, "a"), abs=2e-5)
    finally:
        running.close()


def test_it_neither_generates_nor_embeds(classifier: Harness) -> None:
    with pytest.raises(Unsupported, match="does not generate text"):
        classifier.engine.submit(Job(10**6, [1], SamplingParams(max_tokens=1)))
    with pytest.raises(Unsupported, match="no pooling"):
        classifier.engine.embed(EmbedJob(10**6, [[1]]))


def test_wrong_ids_and_lengths_are_refused(classifier: Harness) -> None:
    for ids, error in (([10**6], RequestError), ([1] * 129, ContextLengthExceeded)):
        with pytest.raises(error):
            classifier.engine.classify(EmbedJob(10**6, [ids]))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, torch.sigmoid),
        ({"problem_type": "regression"}, lambda logits: logits),
        ({"sentence_transformers": {"activation_fn": f"{TORCH}.linear.Identity"}}, None),
        ({"sbert_ce_default_activation_function": f"{TORCH}.linear.Identity"}, None),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
            torch.tanh,
        ),
        ({"num_labels": 3}, lambda logits: torch.softmax(logits, -1)),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, torch.sigmoid),
    ],
)
def test_the_activation_is_what_the_files_say(
    config: dict[str, Any], expected: Callable[[torch.Tensor], torch.Tensor] | None
) -> None:
    logits = torch.tensor([[-2.0, 0.5, 3.0][: config.get("num_labels", 1)]])
    wanted = logits if expected is None else expected(logits)
    assert torch.equal(choose_activation(Bert(**({"num_labels": 1} | config)))(logits), wanted)


def test_an_activation_of_another_library_is_refused() -> None:
    named = {"activation_fn": "os.system"}
    with pytest.raises(LoadError, match=r"os\.system is not supported"):
        choose_activation(Bert(num_labels=1, sentence_transformers=named))


def test_a_head_without_weights_is_refused(tmp_path: Path) -> None:
    fast = pair_tokenizer(tmp_path)
    BertModel(Bert(vocab_size=len(fast), **SMALL)).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_bytes())
    path.write_text(json.dumps(config | {"architectures": ["BertForSequenceClassification"]}))
    with pytest.raises(LoadError, match=r"have no classifier\.\w+, and lack 2 .* random weights"):
        Harness(make_spec(tmp_path))


def test_an_encoder_with_a_decoder_is_refused(tmp_path: Path) -> None:
    fast = pair_tokenizer(tmp_path)
    sizes: dict[str, Any] = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "d_model": 16,
        "max_position_embeddings": 64,
    }
    heads: dict[str, Any] = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = Bart(vocab_size=len(fast), num_labels=3, **sizes, **heads)
    BartForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(LoadError, match="has a decoder"):
        Harness(make_spec(tmp_path))


def test_a_model_that_reads_padding_runs_its_texts_alone(tmp_path: Path) -> None:
    fast = pair_tokenizer(tmp_path)
    torch.manual_seed(6)
    config = XLNetConfig(vocab_size=len(fast), d_model=32, n_layer=2, n_head=4, d_inner=64)
    config.num_labels, config.initializer_range = 2, 0.4
    XLNetForSequenceClassification(config).save_pretrained(tmp_path)
    running = Harness(make_spec(tmp_path, max_context=128))
    try:
        assert "one text at a time" in running.info.detail
        texts = [("a",), ("jumps over the lazy dog. " * 3,)]
        found = running.vectors(submit(running, *texts, raw=True))
        for text, logits in zip(texts, found, strict=True):
            ids = running.engine.codec.encode(*text)
            model: Any = XLNetForSequenceClassification.from_pretrained(tmp_path)
            with torch.no_grad():
                expected = model(torch.tensor([ids])).logits[0].tolist()
            assert logits == pytest.approx(expected, abs=2e-5)
    finally:
        running.close()
