"""Clients that people have, unmodified: openai, langchain-openai and LiteLLM, over real sockets.

The echo engine, told to speak Hermes' dialect, calls a tool or thinks when the prompt does; what
needs a model (structured output, choices, log probabilities) is asked of SmolLM2.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from tests.integration.instance import Instance, echo
from tests.unit.engines.conftest import SMOLLM2

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the internet when imported

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at something",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string"}},
            "required": ["at"],
        },
    },
}
CALLS = "".join(
    f'<tool_call>\n{{"name": "look", "arguments": {{"at": "{at}"}}}}\n</tool_call>'
    for at in ("the sky", "the sea")
)
THOUGHTS = "<think>hm</think>"


def says(text: str) -> list[dict[str, str]]:
    """What makes the echo engine say `text` and stop: it stops at the mark."""
    return [{"role": "user", "content": f"{text}¤"}]


class Person(pydantic.BaseModel):
    name: str
    age: int


ECHO = echo("echo", step_s=0.001) | {"tool_parser": "hermes", "reasoning_parser": "think"}
SMOL = {
    "name": "smollm2",
    "path": SMOLLM2,
    "device": "cpu",
    "sampling": {"temperature": 0.2, "repetition_penalty": 1.1},
}
#: For a test of the two, which is one of the echo engine alone in the ordinary run.
REAL_IN_LANE = [
    pytest.param("echo", id="echo"),
    pytest.param("smollm2", id="smollm2", marks=pytest.mark.lane("models")),
]
lane = pytest.mark.lane("models")


def connected(instance: Instance) -> Any:
    return openai.OpenAI(base_url=f"{instance.url}/v1", api_key="any", timeout=120, max_retries=0)


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    with Instance.up(tmp_path_factory.mktemp("clients"), [ECHO]) as instance:
        instance.until_settled()
        yield instance


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    with Instance.up(tmp_path_factory.mktemp("real"), [ECHO, SMOL]) as instance:
        instance.until_settled(within_s=240)
        yield instance


@pytest.fixture(scope="module")
def client(instance: Instance) -> Any:
    return connected(instance)


@pytest.fixture(scope="module")
def real_client(real: Instance) -> Any:
    return connected(real)


# ---------------------------------------------------------------- openai


def chat(client: Any, text: str, **more: Any) -> Any:
    return client.chat.completions.create(model="echo", messages=says(text), stop="¤", **more)


def test_parallel_calls_of_tools_whole_and_streamed(client: Any) -> None:
    whole = chat(client, f"{THOUGHTS}so {CALLS}", tools=[LOOK]).choices[0]
    assert whole.finish_reason == "tool_calls"
    asked = [json.loads(call.function.arguments)["at"] for call in whole.message.tool_calls]
    assert asked == ["the sky", "the sea"]
    assert whole.message.reasoning_content == "hm"
    ids, arguments, text = [], ["", ""], ""
    for chunk in chat(client, f"{THOUGHTS}so {CALLS}", tools=[LOOK], stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for call in delta.tool_calls or ():
            ids += [call.id] if call.id else []
            arguments[call.index] += call.function.arguments or ""
    assert [json.loads(one)["at"] for one in arguments] == asked
    assert len(set(ids)) == 2
    assert text.strip() == "so"


def test_a_conversation_with_calls_goes_round(client: Any) -> None:
    first = chat(client, CALLS, tools=[LOOK]).choices[0].message
    messages: list[Any] = [*says("x"), first.model_dump(exclude_none=True)]
    for call in first.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "blue"})
    answer = client.chat.completions.create(
        model="echo", messages=messages, tools=[LOOK], max_tokens=5
    )
    assert answer.choices[0].message.content is not None


def test_usage_comes_only_where_it_was_asked_for(client: Any) -> None:
    plain = list(chat(client, "hello", stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in plain)
    asked = list(chat(client, "hello", stream=True, n=2, stream_options={"include_usage": True}))
    assert asked[-1].choices == []
    assert asked[-1].usage.completion_tokens >= 10
    assert all(chunk.usage is None for chunk in asked[:-1])


@lane
def test_choices_log_probabilities_and_bias_of_a_model(real_client: Any) -> None:
    client = real_client
    question = [{"role": "user", "content": "Name a colour."}]
    answer = client.chat.completions.create(
        model="smollm2", messages=question, n=3, seed=5, temperature=1.0, max_tokens=6,
        logprobs=True, top_logprobs=3,
    )  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        tokens = choice.logprobs.content
        assert (
            b"".join(bytes(token.bytes) for token in tokens)
            .decode()
            .startswith(choice.message.content[:3])
        )
        for token in tokens:
            assert token.logprob <= 0
            best = [other.logprob for other in token.top_logprobs]
            assert best == sorted(best, reverse=True)
            assert math.fsum(map(math.exp, best)) <= 1.0001
    favourite = answer.choices[0].logprobs.content[0].top_logprobs[0].token
    [banned] = client.post(
        "/../tokenize", body={"model": "smollm2", "prompt": favourite}, cast_to=object
    )["tokens"]
    other = client.chat.completions.create(
        model="smollm2", messages=question, temperature=0, max_tokens=1,
        logit_bias={str(banned): -100},
    )  # fmt: skip
    assert other.choices[0].message.content.strip() != favourite.strip()


@lane
def test_structured_output_of_a_model(real_client: Any) -> None:
    client = real_client
    question = [{"role": "user", "content": "Describe a person."}]
    parsed = client.chat.completions.parse(
        model="smollm2", messages=question, response_format=Person, max_tokens=200
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)
    answer = client.responses.parse(
        model="smollm2", input="Describe a person.", text_format=Person, max_output_tokens=200
    )
    assert isinstance(answer.output_parsed, Person)
    loose = client.chat.completions.create(
        model="smollm2", messages=question, response_format={"type": "json_object"}, max_tokens=200
    )
    if loose.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(loose.choices[0].message.content), dict)


@lane
def test_a_streamed_response(real_client: Any) -> None:
    asked = {"model": "smollm2", "input": "Say hi.", "temperature": 0}
    with real_client.responses.stream(**asked) as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
        final = stream.get_final_response()
    assert text
    assert final.output_text == text
    assert final.usage.output_tokens > 0


def test_embeddings_and_models(client: Any) -> None:
    listed = client.embeddings.create(model="echo", input=["one", "two"]).data
    assert [one.index for one in listed] == [0, 1]
    short = client.embeddings.create(model="echo", input="one", dimensions=4).data[0].embedding
    assert math.fsum(value * value for value in short) == pytest.approx(1.0, abs=1e-5)
    assert {model.id for model in client.models.list()} == {"echo"}
    assert client.models.retrieve("echo").id == "echo"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "echo", "response_format": {"type": "json_object"}}, "response_format"),
        ({"model": "echo", "logit_bias": {"5": 1}}, "logit_bias"),
        ({"model": "echo", "presence_penalty": 1}, "presence_penalty"),
        ({"model": "echo", "frequency_penalty": -1}, "frequency_penalty"),
        ({"model": "echo", "extra_body": {"min_p": 0.1}}, "min_p"),
        ({"model": "echo", "extra_body": {"repetition_penalty": 1.1}}, "repetition_penalty"),
        ({"model": "echo", "tools": [{"type": "function", "function": {"name": "a b"}}]}, None),
        ({"model": "echo", "tools": [LOOK], "tool_choice": "other"}, "tool_choice"),
    ],
)
def test_what_an_engine_lacks_is_said_by_name(
    client: Any, fields: dict[str, Any], param: str | None
) -> None:
    assert_refused(client, fields, param)


PATTERN = {"name": "x", "schema": {"type": "string", "pattern": "(?=a)"}}


@lane
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [LOOK]}, "tools"),
        ({"response_format": {"type": "json_schema", "json_schema": PATTERN}}, "response_format"),
    ],
)
def test_what_a_model_lacks_is_said_by_name(
    real_client: Any, fields: dict[str, Any], param: str
) -> None:
    assert_refused(real_client, {"model": "smollm2", **fields}, param)


def assert_refused(client: Any, fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(messages=says("x"), max_tokens=5, **fields)
    error: Any = refused.value.body
    assert error["message"]
    assert param is None or error["param"] == param


@pytest.mark.parametrize("model", REAL_IN_LANE)
def test_what_asks_for_nothing_is_taken_by_every_engine(
    model: str, request: pytest.FixtureRequest
) -> None:
    """As clients send it that write out all defaults."""
    client = request.getfixturevalue("client" if model == "echo" else "real_client")
    answer = client.chat.completions.create(
        model=model, messages=says("x"), max_tokens=2, presence_penalty=0,
        frequency_penalty=0, logit_bias={}, temperature=0, top_p=1, n=1,
        extra_body={"min_p": 0, "repetition_penalty": 1, "top_k": -1, "min_tokens": 0},
    )  # fmt: skip
    assert answer.choices[0].message.content


# ---------------------------------------------------------------- langchain


@lane
def test_a_langchain_chain(instance: Instance) -> None:
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    talker: Any = ChatOpenAI
    embedder: Any = OpenAIEmbeddings
    options: dict[str, Any] = {"base_url": f"{instance.url}/v1", "api_key": "any"}
    llm = talker(model="echo", **options).bind(stop=["¤"])
    chain = ChatPromptTemplate.from_messages([("user", "{text}¤")]) | llm | StrOutputParser()
    assert chain.invoke({"text": "hello there"}) == "hello there"
    assert "".join(chain.stream({"text": "hello there"})) == "hello there"
    bound = talker(model="echo", **options).bind_tools([LOOK]).bind(stop=["¤"])
    called = bound.invoke(f"{CALLS}¤")
    assert [call["args"]["at"] for call in called.tool_calls] == ["the sky", "the sea"]
    embed = embedder(model="echo", check_embedding_ctx_length=False, **options)
    assert len(embed.embed_documents(["one", "two"])) == 2


@lane
def test_langchain_parses_what_a_model_says(real: Instance) -> None:
    from langchain_openai import ChatOpenAI

    talker: Any = ChatOpenAI
    speaking = talker(model="smollm2", max_tokens=200, base_url=f"{real.url}/v1", api_key="any")
    person = speaking.with_structured_output(Person).invoke("Describe a person.")
    assert isinstance(person, Person)


# ---------------------------------------------------------------- LiteLLM


@lane
def test_litellm_as_a_client(instance: Instance) -> None:
    litellm: Any = importlib.import_module("litellm")
    at: dict[str, Any] = {"api_base": f"{instance.url}/v1", "api_key": "any"}
    answer = litellm.completion("openai/echo", messages=says("hello"), stop=["¤"], **at)
    assert answer.choices[0].message.content == "hello"
    pieces = litellm.completion(
        "openai/echo", messages=says(f"{THOUGHTS}so {CALLS}"), stop=["¤"], tools=[LOOK],
        stream=True, **at,
    )  # fmt: skip
    built = litellm.stream_chunk_builder(list(pieces))
    assert built is not None
    assert len(built.choices[0].message.tool_calls) == 2
    vectors = litellm.embedding("openai/echo", input=["one"], **at)
    assert len(vectors.data) == 1
    through = {"api_base": instance.url, "api_key": "any"}
    said = litellm.completion("anthropic/echo", messages=says("hello"), stop=["¤"], **through)
    assert said.choices[0].message.content == "hello"


@lane
def test_litellm_asks_a_model_by_a_schema(real: Instance) -> None:
    litellm: Any = importlib.import_module("litellm")
    at: dict[str, Any] = {"api_base": f"{real.url}/v1", "api_key": "any"}
    schema = Person.model_json_schema() | {"additionalProperties": False}  # so that it ends
    made = litellm.completion(
        "openai/smollm2", messages=[{"role": "user", "content": "Describe a person."}],
        response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": schema}},
        max_tokens=200, temperature=0, **at,
    )  # fmt: skip
    jsonschema.validate(json.loads(made.choices[0].message.content), schema)
