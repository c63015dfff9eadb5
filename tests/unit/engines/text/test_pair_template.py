"""The prompt of a reranker, and where the texts of a pair stand in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest

from servekit.engines.text.pair_template import QWEN3, PairTemplate, find_pair_template
from servekit.errors import LoadError, RequestError
from tests.unit.engines.contract.subjects import spec

PLAIN = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}{{ mark }}"
)


class Tokenizer:
    """The part of a tokenizer that renders chats."""

    chat_template: str | None = PLAIN

    def apply_chat_template(
        self, messages: Any, *, chat_template: str, tokenize: bool, **arguments: Any
    ) -> str:
        assert not tokenize
        environment = jinja2.Environment(undefined=jinja2.ChainableUndefined)
        environment.globals["refuse"] = self.refuse
        return environment.from_string(chat_template).render(messages=messages, **arguments)

    def refuse(self, text: str) -> str:
        raise ValueError(text)


def make(source: str = PLAIN, arguments: Any = None, instruction: str = "") -> PairTemplate:
    return PairTemplate(Tokenizer(), source, arguments or {}, instruction)


def test_the_places_of_both_texts_are_known() -> None:
    text, places = make().render_pair("which?", "this")
    assert text == "q:which?;d:this;"
    assert places is not None
    assert [text[place.start : place.stop] for place in places] == ["which?", "this"]


def test_texts_that_the_template_changes_have_no_places() -> None:
    found = make("{{ messages[0].content | upper }}sentinel_query{{ messages[1].content }}")
    prompt = found.render_pair("a", "b")
    assert prompt == ("Asentinel_queryb", None)
    turned = make("{{ messages[1].content }}|{{ messages[0].content }}").render_pair("a", "b")
    assert turned == ("b|a", None), "the document comes first"


def test_an_instruction_of_the_request_goes_before_the_models_own() -> None:
    found = make(instruction="own")
    assert found.render_pair("a", "b").text == "s:own;q:a;d:b;"
    text, places = found.render_pair("a", "b", "told")
    assert text == "s:told;q:a;d:b;" and places is not None and places[0].start == 9
    text, places = found.render_pair("a", "b")
    assert text == "s:own;q:a;d:b;" and places is not None and places[0].start == 8


def test_whether_an_instruction_is_shown() -> None:
    assert make().takes_instruction
    assert not make("{{ messages[-2].content }}{{ messages[-1].content }}").takes_instruction


def test_arguments_of_the_model_are_given() -> None:
    assert make(arguments={"mark": "!"}).render_pair("a", "b").text == "q:a;d:b;!"
    assert make(arguments={"add_generation_prompt": True}).render_pair("a", "b").text.endswith(">")


def test_contents_may_have_to_be_parts() -> None:
    source = "{% for m in messages %}{{ m.content[0].text }};{% endfor %}"
    assert make(source).render_pair("a", "b").text == "a;b;"


def test_a_template_that_drops_a_text_is_refused() -> None:
    for source in ("{{ messages[0].content }}", "fixed", "{{ refuse('x') }}"):
        with pytest.raises(LoadError, match="drops the messages of the roles query and document"):
            make(source)


def test_a_pair_that_the_template_refuses_is_the_clients_error() -> None:
    source = PLAIN + "{% if messages[0].content == 'bad' %}{{ refuse('not that') }}{% endif %}"
    with pytest.raises(
        RequestError, match=r"^The reranker's template refuses this pair: not that$"
    ):
        make(source).render_pair("bad", "b")


# ---------------------------------------------------------------- which template


def find(folder: Path, kind: Any = "rerank", chat_template: str = "", **files: Any) -> Any:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    given = spec("transformers", "m")
    if chat_template:
        given = spec("transformers", "m", chat_template=chat_template)
    return find_pair_template(folder, given, kind, Tokenizer())


def test_only_rerankers_and_classifiers_have_one(tmp_path: Path) -> None:
    stated: dict[str, Any] = {"modality_config": {"message": {}}}
    for kind in ("generate", "embed", "transcribe"):
        assert find(tmp_path, kind, sentence_bert_config=stated) is None
    assert find(tmp_path, "classify", sentence_bert_config=stated) is not None
    assert find(tmp_path, "rerank", sentence_bert_config=stated) is not None


def test_a_classifier_without_one_reads_pairs_as_its_tokenizer_joins_them(tmp_path: Path) -> None:
    assert find(tmp_path, "classify") is None


def test_one_of_the_configuration_or_the_files_is_used(tmp_path: Path) -> None:
    assert find(tmp_path, chat_template="{{x}}").render_pair("a", "b").text == "q:a;d:b;"
    found = find(
        tmp_path,
        sentence_bert_config={
            "modality_config": {"message": {}},
            "processing_kwargs": {"chat_template": {"mark": "!"}},
        },
        config_sentence_transformers={
            "prompts": {"web": "find it", "none": None},
            "default_prompt_name": "web",
        },
    )
    assert found.render_pair("a", "b").text == "s:find it;q:a;d:b;!"
    found = find(tmp_path, config_sentence_transformers={"prompts": {"web": "find it"}})
    assert found.render_pair("a", "b").text == "q:a;d:b;!", "none is the default"


def test_qwen3s_is_known_and_that_of_others_has_to_be_written(tmp_path: Path) -> None:
    found = find(tmp_path, config={"model_type": "qwen3"})
    text, places = found.render_pair("a?", "b!")
    assert "<Query>: a?\n<Document>: b!<|im_end|>" in text and places is not None
    assert "Given a web search query" in text
    assert "<Instruct>: mine\n" in found.render_pair("a?", "b!", "mine").text
    assert QWEN3.startswith("<|im_start|>system")
    with pytest.raises(LoadError, match="have no prompt for a reranker: write chat_template"):
        find(tmp_path, config={"model_type": "llama"})
    scoring = [{"type": "x.LogitScore", "path": "1"}]
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "config.json").write_text('{"true_token_id": 1}')
    assert find(tmp_path, modules=scoring) is None, "it has a head for pairs"
