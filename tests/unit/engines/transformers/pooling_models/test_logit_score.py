"""Causal rerankers: the scores of the code in Qwen3-Reranker's model card, in any company."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from servekit.engines.api.base import EmbedJob, Job
from servekit.engines.model_files.model_kind import find_model_kind
from servekit.errors import ContextLengthExceeded, LoadError, Unsupported
from servekit.protocol.messages import Generate, PoolingParams, SamplingParams
from servekit.worker.preparation.input_encoding import InputEncoder
from tests.unit.engines.harness import CORPUS, Harness, byte_level_tokenizer, make_spec

DOCUMENTS = [*CORPUS, "a", "jumps over the lazy dog. " * 6, "", " ends in space \n", "Москва"]
QUERY = "Which dog is lazy?"
INSTRUCTION = "Find text about a fox"
#: A template of another reranker, with content in parts.
OTHER = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content[0].text }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_end|>{% endif %}"
)
Config: Any = Qwen3Config
Classifier: Any = Qwen3ForSequenceClassification
Model: Any = Qwen3ForCausalLM


def save_tokenizer(folder: Path) -> Any:
    fast = byte_level_tokenizer()
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.add_tokens(["<think>", "</think>", "yes", "no"])
    fast.pad_token_id = 0
    fast.padding_side = "left"
    fast.save_pretrained(folder)
    return fast


def make_config(fast: Any, **more: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": len(fast),
        "max_position_embeddings": 1024,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.4,
    }
    return Config(**(sizes | more))


def make_reranker(folder: Path, **more: Any) -> Path:
    """A random model in the files of an original Qwen3-Reranker."""
    folder.mkdir(exist_ok=True)
    fast = save_tokenizer(folder)
    torch.manual_seed(7)
    Model(make_config(fast, **more)).save_pretrained(folder)
    return folder


def write_modules(folder: Path, template: str, scores: dict[str, Any], **more: Any) -> None:
    """Add the files of sentence-transformers."""
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_LogitScore",
            "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
        },
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(scores))
    stated = {
        "modality_config": {"message": {"method": "forward", "format": "structured"}},
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
    }
    (folder / "sentence_bert_config.json").write_text(json.dumps(stated))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(more))
    (folder / "chat_template.jinja").write_text(template)


def score_as_the_card(
    folder: Path, pairs: Sequence[tuple[str, str]], instruction: str | None = None
) -> list[float]:
    """The scores by the code of the model card, with the library alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    token_false_id = tokenizer.convert_tokens_to_ids("no")
    token_true_id = tokenizer.convert_tokens_to_ids("yes")
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query"
        ' and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    prefix_tokens = tokenizer.encode(prefix, add_special_tokens=False)
    suffix_tokens = tokenizer.encode(suffix, add_special_tokens=False)
    if instruction is None:
        instruction = "Given a web search query, retrieve relevant passages that answer the query"
    texts = [
        f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        for query, document in pairs
    ]
    inputs = tokenizer(texts, padding=False, return_attention_mask=False)
    for at, ids in enumerate(inputs["input_ids"]):
        inputs["input_ids"][at] = prefix_tokens + ids + suffix_tokens
    padded = tokenizer.pad({"input_ids": inputs["input_ids"]}, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**padded).logits[:, -1, :]
    both = torch.stack([logits[:, token_false_id], logits[:, token_true_id]], dim=1)
    scores: list[float] = torch.nn.functional.log_softmax(both, dim=1)[:, 1].exp().tolist()
    return scores


def submit(
    harness: Harness, pairs: Sequence[tuple[str, str]], raw: bool = False, told: str = ""
) -> int:
    harness._last += 1
    codec = harness.engine.codec
    ids = [codec.encode_parts(*pair, told).ids for pair in pairs]
    harness.engine.classify(EmbedJob(harness._last, ids, [], raw))
    return harness._last


def scores(harness: Harness, job_id: int) -> list[float]:
    return [score for (score,) in harness.vectors(job_id)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reranker(tmp_path_factory.mktemp("models") / "Qwen3-Reranker-0.6B")


@pytest.fixture(scope="module")
def reranker(folder: Path) -> Iterator[Harness]:
    running = Harness(make_spec(folder))
    yield running
    running.close()


PAIRS = [(QUERY, document) for document in DOCUMENTS]


def test_it_says_what_it_is(reranker: Harness) -> None:
    info = reranker.info
    assert info.serves == ("score", "instruction", "tokenize", "detokenize")
    assert "scores by 'yes' and 'no'" in info.detail and "tokens a batch" in info.detail


def test_the_scores_are_those_of_the_card(reranker: Harness, folder: Path) -> None:
    found = scores(reranker, submit(reranker, PAIRS))
    assert found == pytest.approx(score_as_the_card(folder, PAIRS), abs=2e-5)
    assert max(found) - min(found) > 0.01  # else the test could not fail


def test_an_instruction_takes_the_place_of_the_cards(reranker: Harness, folder: Path) -> None:
    found = scores(reranker, submit(reranker, PAIRS, told=INSTRUCTION))
    assert found == pytest.approx(score_as_the_card(folder, PAIRS, INSTRUCTION), abs=2e-5)
    assert found != pytest.approx(scores(reranker, submit(reranker, PAIRS)), abs=1e-3)


def test_raw_scores_are_log_odds(reranker: Harness, folder: Path) -> None:
    found = torch.tensor(scores(reranker, submit(reranker, PAIRS, raw=True)))
    assert torch.sigmoid(found).tolist() == pytest.approx(
        score_as_the_card(folder, PAIRS), abs=2e-5
    )


def test_a_pair_has_the_same_score_alone_and_in_any_company(reranker: Harness) -> None:
    alone = [scores(reranker, submit(reranker, [pair]))[0] for pair in PAIRS]
    jobs = [submit(reranker, PAIRS[turn:] + PAIRS[:turn]) for turn in range(len(PAIRS))]
    for turn, job in enumerate(jobs):
        assert scores(reranker, job) == pytest.approx(alone[turn:] + alone[:turn], abs=2e-5)


def test_a_document_is_cut_at_its_end_only_if_asked(reranker: Harness) -> None:
    encoder = InputEncoder(reranker.engine, reranker.info)

    def encode(document: str, total: int = 0, most: int = 0) -> list[int]:
        asked = Generate(
            *(1, SamplingParams(truncate_prompt=total)),
            task="score",
            inputs=[document],
            queries=[QUERY],
            pooling=PoolingParams(input_tokens=most),
        )
        [[ids], _] = encoder.encode_input(asked)
        return ids

    long = "lazy dog " * 2000
    with pytest.raises(ContextLengthExceeded, match="at most 1024"):
        encode(long)
    whole, cut = encode("lazy dog " * 20), encode(long, total=-1)
    assert len(cut) == 1024 and cut[-8:] == whole[-8:] and cut[:40] == whole[:40]
    parts = reranker.engine.codec.encode_parts(QUERY, "lazy dog " * 20).parts
    begin = parts.index(2)
    end = begin + parts.count(2)
    assert encode("lazy dog " * 20, most=7) == whole[: begin + 7] + whole[end:]


def test_a_template_that_changes_texts_is_not_cut(tmp_path: Path) -> None:
    make_reranker(tmp_path)
    trims = "{{ messages[-2].content | trim }}: {{ messages[-1].content | trim }}"
    running = Harness(make_spec(tmp_path, options={"task": "rerank"}, chat_template=trims))
    try:
        assert running.info.serves == ("score", "tokenize", "detokenize")
        assert running.engine.codec.encode_parts("a", "b").parts == [1, 0, 0, 2]
        spaced = running.engine.codec.encode_parts(" a", "b ")
        assert spaced.ids == running.engine.codec.encode_plain("a: b") and spaced.parts == []
        request = Generate(
            *(1, SamplingParams()),
            task="score",
            inputs=["b"],
            queries=["a"],
            pooling=PoolingParams(instruction="c"),
        )
        with pytest.raises(Unsupported, match="has no place for one"):
            InputEncoder(running.engine, running.info).encode_input(request)
    finally:
        running.close()


def test_the_files_of_sentence_transformers_are_followed(tmp_path: Path) -> None:
    make_reranker(tmp_path)
    write_modules(
        tmp_path,
        OTHER,
        {"true_token_id": 9, "false_token_id": None},
        activation_fn="torch.nn.modules.linear.Identity",
        prompts={"search": "Seek"},
        default_prompt_name="search",
    )
    running = Harness(make_spec(tmp_path))
    try:
        assert running.info.serves[:2] == ("score", "instruction")
        [found] = scores(running, submit(running, [("a", "b")]))
        text = "<|im_start|>system: Seek<|im_start|>query: a<|im_start|>document: b<|im_end|>"
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            assert found == pytest.approx(model(**ids).logits[0, -1, 9].item(), abs=2e-5)
    finally:
        running.close()


def test_it_neither_generates_nor_embeds(reranker: Harness) -> None:
    with pytest.raises(Unsupported):
        reranker.engine.submit(Job(10**6, [1], SamplingParams(max_tokens=1)))
    with pytest.raises(Unsupported):
        reranker.engine.embed(EmbedJob(10**6, [[1]]))


def test_the_task_of_the_file_comes_before_the_name(folder: Path, tmp_path: Path) -> None:
    spec = make_spec(folder, options={"task": "generate"})
    assert find_model_kind(folder, spec) == "generate"
    assert find_model_kind(folder, make_spec(folder)) == "rerank"
    other = make_reranker(tmp_path / "tuned")
    assert find_model_kind(other, make_spec(other)) == "generate"
    assert find_model_kind(other, make_spec(other, options={"task": "rerank"})) == "rerank"
    (other / "config.json").write_text('{"architectures": ["BertModel"]}')
    with pytest.raises(LoadError, match="no causal language model; its files name BertModel"):
        find_model_kind(other, make_spec(other, options={"task": "rerank"}))


@pytest.mark.parametrize(
    ("scores", "sentence"),
    [
        ({"true_token_id": 10**6}, "scores by token 1000000, and its tokenizer has"),
        ({"true_token_id": "yes"}, r"1_LogitScore/config.json cannot be read: Expected `int`"),
        ({}, "missing required field `true_token_id`"),
    ],
)
def test_wrong_tokens_in_the_files_are_refused(
    tmp_path: Path, scores: dict[str, Any], sentence: str
) -> None:
    make_reranker(tmp_path)
    write_modules(tmp_path, OTHER, scores)
    with pytest.raises(LoadError, match=sentence):
        Harness(make_spec(tmp_path))


def test_a_template_without_the_roles_is_refused(tmp_path: Path) -> None:
    make_reranker(tmp_path)
    chat = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(LoadError, match="drops the messages of the roles query and document"):
        Harness(make_spec(tmp_path, options={"task": "rerank"}, chat_template=chat))


def test_a_model_without_a_prompt_is_refused(tmp_path: Path) -> None:
    make_reranker(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"model_type": "llama"}))
    with pytest.raises(LoadError, match="have no prompt for a reranker: write chat_template"):
        Harness(make_spec(tmp_path, options={"task": "rerank"}))


def test_a_conversion_to_a_classifier_takes_a_template(folder: Path, tmp_path: Path) -> None:
    """The weights of the one label are the difference of those of yes and no."""
    from servekit.engines.text.pair_template import QWEN3

    fast = save_tokenizer(tmp_path)
    original: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made = Classifier(make_config(fast, num_labels=1, pad_token_id=0))
    made.model.load_state_dict(original.model.state_dict())
    head = original.lm_head.weight
    yes, no = (head[fast.convert_tokens_to_ids(word)] for word in ("yes", "no"))
    with torch.no_grad():
        made.score.weight.copy_((yes - no)[None])
    made.save_pretrained(tmp_path)
    running = Harness(make_spec(tmp_path, chat_template=QWEN3))
    try:
        assert running.info.serves[:3] == ("classify", "score", "instruction")
        found = scores(running, submit(running, PAIRS, told=INSTRUCTION))
        assert found == pytest.approx(score_as_the_card(folder, PAIRS, INSTRUCTION), abs=2e-5)
    finally:
        running.close()
