"""Parameters that clients of vLLM send: each is kept to, or refused by name, by every engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.integration.instance import Instance, echo
from tests.unit.engines.harness import write_tiny_llama
from tests.unit.engines.origins import write_tiny_gguf

UP_S = 180.0
LOCAL = ["torch", "llama"]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    folder = tmp_path_factory.mktemp("parameters")
    torch = str(write_tiny_llama(folder / "torch"))
    llama = str(write_tiny_gguf(folder / "tiny.gguf", float32=True, context=512))
    models = [
        {"name": "torch", "path": torch, "device": "cpu", "options": {"threads": 1}},
        {"name": "llama", "path": llama, "engine": "llamacpp", "options": {"threads": 1}},
        echo("echo"),
    ]
    for model in models:
        model["standby"] = False
    with Instance.up(folder, models) as instance:
        instance.until_settled(UP_S)
        yield instance


def post(instance: Instance, path: str, model: str, **body: Any) -> httpx.Response:
    body = {"model": model, "max_tokens": 40, "temperature": 0, **body}
    return httpx.post(f"{instance.url}{path}", json=body, timeout=60)


def chat(instance: Instance, model: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "say a"}]
    answer = post(instance, "/v1/chat/completions", model, messages=messages, **body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def complete(instance: Instance, model: str, prompt: Any = "the fox", **body: Any) -> Any:
    answer = post(instance, "/v1/completions", model, prompt=prompt, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def refusal(instance: Instance, model: str, **body: Any) -> tuple[int, str, str]:
    answer = post(instance, "/v1/completions", model, prompt="the fox", **body)
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


FORMS: list[tuple[dict[str, Any], set[str]]] = [
    ({"guided_choice": ["yes", "no/maybe (1)"]}, {"yes", "no/maybe (1)"}),
    ({"structured_outputs": {"choice": ["a+", "b"]}}, {"a+", "b"}),
    ({"guided_regex": "(ab){3}c"}, {"abababc"}),
    ({"structured_outputs": {"regex": "[x]{4}"}}, {"xxxx"}),
    ({"guided_grammar": 'root ::= "u" v\nv ::= "w" | "x"'}, {"uw", "ux"}),
    ({"structured_outputs": {"grammar": 'start: "u" V\nV: "w" | "x"'}}, {"uw", "ux"}),
]


@pytest.mark.parametrize("model", LOCAL)
@pytest.mark.parametrize(("form", "texts"), FORMS)
def test_the_answer_has_the_form_that_is_asked_for(
    instance: Instance, model: str, form: dict[str, Any], texts: set[str]
) -> None:
    said = chat(instance, model, **form)
    assert (said["message"]["content"] in texts, said["finish_reason"]) == (True, "stop")
    assert complete(instance, model, **form)["text"] in texts


@pytest.mark.parametrize("model", LOCAL)
@pytest.mark.parametrize(
    "form",
    [
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)
def test_json_by_a_schema(instance: Instance, model: str, form: dict[str, Any]) -> None:
    bias = {str(ord(" ")): -100}  # a random model may go on with white space to the limit
    said = chat(instance, model, max_tokens=300, logit_bias=bias, **form)
    if said["finish_reason"] == "stop":
        assert json.loads(said["message"]["content"])["a"] in (1, 2)
    else:
        assert said["message"]["content"].lstrip().startswith("{")


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_regex": "(a"}, "guided_regex", "regular expression"),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_json": "[]"}, "guided_json", "an object"),
    ({"guided_choice": ["", "a"]}, "guided_choice", "empty"),
    ({"guided_grammar": "what"}, "guided_grammar", "neither Lark"),
    ({"guided_grammar": "root ::= " + "(" * 5000}, "guided_grammar", "neither Lark"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "grammar"),
    ({"structured_outputs": {}}, "structured_outputs", "give one of"),
    (
        {"structured_outputs": {"structural_tag": {"a": 1}}},
        "structured_outputs.structural_tag",
        "not supported",
    ),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "one form"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "one form"),
    (
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        "guided_regex",
        "one form",
    ),
    ({"stop_token_ids": [2**31 - 1]}, "stop_token_ids", "vocabulary"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids", "not supported"),
    ({"use_beam_search": True}, "use_beam_search", "not supported"),
]


@pytest.mark.parametrize("model", LOCAL)
@pytest.mark.parametrize(("body", "param", "words"), WRONG)
def test_what_cannot_be_done_is_refused_by_name(
    instance: Instance, model: str, body: dict[str, Any], param: str, words: str
) -> None:
    status, named, message = refusal(instance, model, **body)
    assert (status, named) == (400, param)
    assert words in message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"bad_words": ["a"]}, "bad_words"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_by_name(
    instance: Instance, body: dict[str, Any], param: str
) -> None:
    status, named, message = refusal(instance, "echo", **body)
    assert (status, named) == (400, param)
    assert "echo" in message


@pytest.mark.parametrize("model", [*LOCAL, "echo"])
def test_a_stop_token_ends_the_answer_and_is_named(instance: Instance, model: str) -> None:
    token, _, text = a_word(instance, model)
    said = complete(instance, model, stop_token_ids=[token])
    assert (said["finish_reason"], said["stop_reason"]) == ("stop", token)
    assert text.startswith(said["text"]) and len(said["text"]) < len(text)
    body = {"stop_token_ids": [token], "include_stop_str_in_output": True}
    whole = complete(instance, model, **body)
    assert text.startswith(whole["text"]) and len(whole["text"]) > len(said["text"])
    free = complete(instance, model, stop_token_ids=[2**20 if model == "echo" else 3], max_tokens=1)
    assert (free["finish_reason"], free["stop_reason"]) == ("length", None)


def a_word(instance: Instance, model: str) -> tuple[int, str, str]:
    """A token of what the model says, not its first: id, text; and all that it says."""
    plain = complete(instance, model, logprobs=0)
    said: list[str] = plain["logprobs"]["tokens"]
    for word in said[1:]:
        if word.isascii() and word.isalnum() and word != said[0]:
            ids = tokens(instance, model, word)
            if len(ids) == 1:
                return ids[0], word, plain["text"]
    raise AssertionError(f"no word among {said}")


def tokens(instance: Instance, model: str, text: str) -> list[int]:
    answer = httpx.post(f"{instance.url}/tokenize", json={"model": model, "prompt": text})
    ids: list[int] = answer.json()["tokens"]
    return ids


@pytest.mark.parametrize("model", [*LOCAL, "echo"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_string_is_in_the_answer_where_asked_for(
    instance: Instance, model: str, stream: bool
) -> None:
    text = complete(instance, model, max_tokens=12)["text"]
    stop = text[3:6]
    end = text.index(stop) + len(stop)
    for include in (False, True):
        body = {"stop": stop, "include_stop_str_in_output": include, "max_tokens": 12}
        if stream:
            said = "".join(chunks(instance, model, **body))
        else:
            said = complete(instance, model, **body)["text"]
        assert said == (text[:end] if include else text[: end - len(stop)])


def chunks(instance: Instance, model: str, **body: Any) -> list[str]:
    answer = post(instance, "/v1/completions", model, prompt="the fox", stream=True, **body)
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [choice["text"] for line in lines for choice in json.loads(line)["choices"]]


@pytest.mark.parametrize("model", LOCAL)
def test_bad_words_do_not_come(instance: Instance, model: str) -> None:
    _, word, text = a_word(instance, model)
    said = complete(instance, model, bad_words=[word], logprobs=0)
    assert word not in said["logprobs"]["tokens"]
    assert complete(instance, model)["text"] == text


@pytest.mark.parametrize("model", [*LOCAL, "echo"])
def test_a_prompt_is_cut_to_its_end(instance: Instance, model: str) -> None:
    ids = [60 + i % 30 for i in range(100)]
    short = complete(instance, model, ids[-7:], max_tokens=8)
    cut = complete(instance, model, ids, truncate_prompt_tokens=7, max_tokens=8)
    assert cut["text"] == short["text"]
    body = {"prompt": ids * 200, "truncate_prompt_tokens": -1, "max_tokens": 8}
    long = post(instance, "/v1/completions", model, **body)
    assert long.status_code == 200
    assert long.json()["usage"]["completion_tokens"] <= 8
    assert 100 < long.json()["usage"]["prompt_tokens"] <= 8192


# ---------------------------------------------------------------- log probabilities of prompts


@pytest.mark.parametrize("model", [*LOCAL, "echo"])
@pytest.mark.parametrize("limit", [0, 1, 4])
def test_what_lm_evaluation_harness_asks_for(instance: Instance, model: str, limit: int) -> None:
    ids = [60 + i % 25 for i in range(40)]
    ask = {"logprobs": 1, "echo": True, "max_tokens": limit, "seed": 1234}
    answer = post(instance, "/v1/completions", model, prompt=[ids, ids[:9]], **ask)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    for choice, prompt in zip(choices, (ids, ids[:9]), strict=True):
        told = choice["logprobs"]
        count = len(told["tokens"])
        assert len(prompt) <= count <= len(prompt) + limit
        assert count == len(prompt) + limit or choice["finish_reason"] == "stop"
        for name in ("token_logprobs", "top_logprobs", "text_offset"):
            assert len(told[name]) == count
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        for value, best in zip(told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True):
            assert value <= 1e-4 and len(best) == 1 and max(best.values()) >= value - 1e-4
        assert choice["text"] == "".join(told["tokens"]) or "�" in choice["text"]
    assert answer.json()["usage"]["prompt_tokens"] == len(ids) + 9
    if limit == 0:
        assert answer.json()["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("model", [*LOCAL, "echo"])
def test_an_echo_without_logprobs(instance: Instance, model: str) -> None:
    ids = tokens(instance, model, "the fox")
    for prompt in ("the fox", ids):
        said = complete(instance, model, prompt, echo=True, max_tokens=0)
        assert (said["text"], said["logprobs"]) == ("the fox", None)
        assert said["finish_reason"] == "length"
        body = {"echo": True, "max_tokens": 5, "stream": True}
        answer = post(instance, "/v1/completions", model, prompt=prompt, **body)
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        text = "".join(c["text"] for line in lines for c in json.loads(line)["choices"])
        whole = complete(instance, model, prompt, echo=True, max_tokens=5)["text"]
        assert text == whole and text.startswith("the fox")
        assert whole == "the fox" + complete(instance, model, prompt, max_tokens=5)["text"]


@pytest.mark.parametrize("model", [*LOCAL, "echo"])
def test_an_echo_in_a_stream_says_what_the_whole_says(instance: Instance, model: str) -> None:
    ask = {"echo": True, "logprobs": 2, "max_tokens": 5, "n": 2}
    whole = post(instance, "/v1/completions", model, prompt="the fox", **ask).json()["choices"]
    answer = post(instance, "/v1/completions", model, prompt="the fox", stream=True, **ask)
    found: dict[int, dict[str, list[Any]]] = {0: {}, 1: {}}
    for line in answer.text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                found[choice["index"]].setdefault(name, []).extend(values)
    for choice in whole:
        told = found[choice["index"]]
        assert told["tokens"] == choice["logprobs"]["tokens"]
        assert told["text_offset"] == choice["logprobs"]["text_offset"]
        assert told["token_logprobs"][1:] == pytest.approx(
            choice["logprobs"]["token_logprobs"][1:], abs=5e-3
        )


@pytest.mark.parametrize("model", [*LOCAL, "echo"])
def test_prompt_logprobs_as_vllm_tells_them(instance: Instance, model: str) -> None:
    ids = tokens(instance, model, "the fox")
    told = complete(instance, model, prompt_logprobs=2)["prompt_logprobs"]
    assert told[0] is None and len(told) == len(ids)
    for token, one in zip(ids[1:], told[1:], strict=True):
        assert one[str(token)]["rank"] >= 1 and one[str(token)]["logprob"] <= 1e-4
        assert 1 <= len(one) <= 3
    messages = [{"role": "user", "content": "hi"}]
    answer = post(
        instance, "/v1/chat/completions", model, messages=messages, prompt_logprobs=0
    ).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    stream = post(instance, "/v1/completions", model, prompt="a", prompt_logprobs=0, stream=True)
    assert (stream.status_code, stream.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_log_probabilities_of_a_long_prompt(instance: Instance) -> None:
    answer = post(
        instance, "/v1/completions", "echo", prompt="a" * 7000, prompt_logprobs=20, max_tokens=1
    )
    assert answer.status_code == 200
    assert len(answer.json()["choices"][0]["prompt_logprobs"]) == 7000


# ---------------------------------------------------------------- unknown ones, and models unnamed


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 2}),
        ("/v1/completions", {"prompt": "a", "stream": True}),
        ("/v1/completions", {"prompt": "a", "stream": True, "logprobs": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 4}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_the_answer_names_parameters_that_are_unknown(
    instance: Instance, path: str, body: dict[str, Any]
) -> None:
    limit = {} if path in ("/v1/responses", "/api/chat") else {"max_tokens": 4}
    known = {"model": "echo", **limit, **body}
    for more, warning in (({}, None), ({"f\u00f6o": 1}, "unknown parameter: f?o")):
        answer = httpx.post(f"{instance.url}{path}", json={**known, **more})
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("servekit-warning") == warning


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}], "stream": False}),
        ("/tokenize", {"prompt": "a"}),
    ],
)
def test_the_first_model_answers_what_names_none(
    instance: Instance, path: str, body: dict[str, Any]
) -> None:
    for named in ({}, {"model": ""}):
        answer = httpx.post(f"{instance.url}{path}", json={**body, **named}, timeout=60)
        assert answer.status_code == 200, answer.text
        assert path == "/tokenize" or answer.json()["model"] == "torch"
