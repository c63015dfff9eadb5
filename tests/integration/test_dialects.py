"""The real clients of Anthropic and Ollama, unmodified, against a real instance."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import ollama
import pytest

from tests.integration.instance import Instance, echo
from tests.unit.engines.conftest import SMOLLM2

if TYPE_CHECKING:  # thousands of modules, which only a process that runs its tests needs
    import anthropic

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
#: What ends the echo engine's answer where a model would end it itself.
END = "¤"
ANTHROPIC_TOOL: Any = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Its name.
    """
    return f"fine in {city}"


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    models = [
        echo("talks", step_s=0.001) | {"tool_parser": "hermes", "reasoning_parser": "think"},
        echo("plain", max_context=64),
    ]
    with Instance.up(tmp_path_factory.mktemp("dialects"), models) as instance:
        instance.until_settled()
        yield instance


@pytest.fixture(scope="module")
def claude(instance: Instance) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=instance.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def llama(instance: Instance) -> ollama.Client:
    return ollama.Client(host=instance.url)


def said(text: str) -> Any:
    return [{"role": "user", "content": f"{text}{END}"}]


# ---------------------------------------------------------------- anthropic


def test_anthropics_client_gets_a_message(claude: anthropic.Anthropic) -> None:
    import anthropic

    message = claude.messages.create(
        model="talks",
        max_tokens=100,
        system=[{"type": "text", "text": "Be brief."}],
        messages=said("Grüße"),
        stop_sequences=[END],
        extra_body={"temperature": 0, "top_k": 5},  # this client has no names for them any more
        metadata={"user_id": "u"},
    )
    [block] = message.content
    assert isinstance(block, anthropic.types.TextBlock)
    assert block.text == "Grüße"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", END)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (6, 6)


def test_anthropics_client_streams_text_thoughts_and_calls(claude: anthropic.Anthropic) -> None:
    import anthropic

    asked = f"<think>Hm.</think>Let me see.{CALL}{CALL}"
    with claude.messages.stream(
        model="talks",
        max_tokens=500,
        messages=said(asked),
        stop_sequences=[END],
        tools=[ANTHROPIC_TOOL],
        thinking={"type": "enabled", "budget_tokens": 100},
    ) as stream:
        first = next(iter(stream))
        assert first.type == "message_start"
        assert first.message.usage.input_tokens == len(said(asked)[0]["content"])
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == "Let me see."
    kinds = [block.type for block in message.content]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    calls = [b for b in message.content if isinstance(b, anthropic.types.ToolUseBlock)]
    assert [(call.name, call.input) for call in calls] == [("weather", {"city": "Köln"})] * 2
    assert message.stop_reason == "tool_use"
    assert message.usage.input_tokens == first.message.usage.input_tokens
    assert message.usage.output_tokens > 0


def test_anthropics_client_lists_the_models(claude: anthropic.Anthropic) -> None:
    assert [model.id for model in claude.models.list()] == ["talks", "plain"]
    assert claude.models.retrieve("talks").id == "talks"


def test_a_conversation_with_tools_goes_on(claude: anthropic.Anthropic) -> None:
    """What came is sent back as it is, with the result, as every loop over tools does."""

    import anthropic

    first = claude.messages.create(
        model="talks",
        max_tokens=500,
        messages=said(f"See.{CALL}"),
        stop_sequences=[END],
        tools=[ANTHROPIC_TOOL],
    )
    call = first.content[-1]
    assert isinstance(call, anthropic.types.ToolUseBlock)
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "is_error": True}
    messages: list[Any] = [
        *said("See."),
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result | {"content": [{"type": "text", "text": "no"}]}]},
    ]
    more: Any = {"model": "talks", "messages": messages, "tools": [ANTHROPIC_TOOL]}
    second = claude.messages.create(**more, max_tokens=9)
    assert second.content[0].to_dict() == {"type": "text", "text": "Error: no"}
    assert claude.messages.count_tokens(**more).input_tokens == len("Error: no")


def test_the_tool_runner_goes_on_without_a_thread(claude: anthropic.Anthropic) -> None:
    """It asks for one first, and with the next request sends what is new to it alone."""
    import anthropic

    runner = claude.beta.messages.tool_runner(
        model="talks",
        max_tokens=100,
        stop_sequences=[END],
        tools=[anthropic.beta_tool(weather)],
        messages=said(CALL),
    )
    first, last = runner
    assert (first.stop_reason, last.stop_reason) == ("tool_use", "max_tokens")
    assert last.content[0].to_dict()["text"].startswith("fine in Köln")


def test_anthropics_asynchronous_client_is_let_go(instance: Instance) -> None:
    """Left in the middle, its request ends in the engine, too."""

    import anthropic

    url = instance.url

    async def leave() -> None:
        asked: Any = {"model": "talks", "max_tokens": 8000, "messages": said("abc")}
        async with (
            anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
            client.messages.stream(**asked) as stream,
        ):
            async for event in stream:
                if event.type == "text":
                    return

    def idle() -> bool:
        return instance.replica("talks/0").running == 0 and instance.gateway().in_flight == 0

    asyncio.run(leave())
    instance.until("the engine is idle", idle)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": "nope"}, "NotFoundError"),
        ({"max_tokens": 0}, "BadRequestError"),
        ({"extra_body": {"temperature": 99}}, "BadRequestError"),
        ({"model": "plain", "tools": [ANTHROPIC_TOOL]}, "BadRequestError"),
        ({"model": "plain", "messages": said("a" * 100)}, "BadRequestError"),
    ],
)
def test_anthropics_client_knows_the_errors(
    claude: anthropic.Anthropic, change: Any, error: str
) -> None:
    import anthropic

    with pytest.raises(getattr(anthropic, error)) as caught:
        claude.messages.create(
            **{"model": "talks", "max_tokens": 9, "messages": said("a")} | change
        )
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert len(body["error"]["message"]) > 10


# ---------------------------------------------------------------- ollama


def test_ollamas_client_chats(llama: ollama.Client) -> None:
    options = {"stop": [END], "num_predict": 100, "temperature": 0, "num_ctx": 4096}
    whole = llama.chat(model="talks", messages=said("Grüße"), options=options)
    assert whole.message.content == "Grüße"
    assert (whole.done, whole.done_reason) == (True, "stop")
    assert whole.prompt_eval_count == 6
    assert whole.total_duration and whole.eval_duration is not None
    parts = list(
        llama.chat(model="talks:latest", messages=said("Grüße"), options=options, stream=True)
    )
    assert "".join(part.message.content or "" for part in parts) == "Grüße"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count


@pytest.mark.parametrize("stream", [False, True])
def test_ollamas_client_gets_thoughts_and_calls(llama: ollama.Client, stream: bool) -> None:
    asked: Any = {"messages": said(f"<think>Hm.</think>Let me see.{CALL}"), "stream": stream}
    options = {"stop": [END], "num_predict": 500}
    answer: Any = llama.chat("talks", **asked, tools=[weather], think=True, options=options)
    messages = [part.message for part in answer] if stream else [answer.message]
    assert "".join(message.thinking or "" for message in messages) == "Hm."
    assert "".join(message.content or "" for message in messages) == "Let me see."
    [call] = [call for message in messages for call in message.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Köln"})
    history: Any = [
        *said("?"),
        *messages,
        {"role": "tool", "tool_name": "weather", "content": "fine"},
    ]
    more = llama.chat(model="talks", messages=history, tools=[weather], options={"num_predict": 4})
    assert more.message.content == "fine"


def test_ollamas_client_generates(llama: ollama.Client) -> None:
    options = {"num_predict": 3}
    assert llama.generate("plain", "abc", system="x", options=options).response == "abc"
    parts = list(llama.generate("plain", "abc", raw=True, options=options, stream=True))
    assert "".join(part.response or "" for part in parts) == "abc"
    assert parts[-1].done_reason == "length"


def test_ollamas_client_embeds(llama: ollama.Client) -> None:
    vectors = llama.embed("plain", ["ab", "cd"]).embeddings
    assert [len(vector) for vector in vectors] == [16, 16]
    assert list(llama.embeddings("plain", "ab").embedding) == pytest.approx(vectors[0])


def test_ollamas_client_is_told_of_the_models(llama: ollama.Client) -> None:
    names = [model.model for model in llama.list().models]
    assert names == ["talks:latest", "plain:latest"]
    assert [model.name for model in llama.ps().models] == names
    shown = llama.show("plain")
    assert shown.modelinfo is not None
    assert shown.modelinfo["echo.context_length"] == 64
    assert "completion" in (shown.capabilities or ())
    assert "tools" in (llama.show("talks").capabilities or ())
    assert llama.pull("plain").status == "success"


@pytest.mark.parametrize(
    ("asked", "status", "says"),
    [
        ({"model": "nope"}, 404, "not served here"),
        ({"format": {"type": "object"}}, 400, "^format: the echo engine"),
        ({"options": {"top_p": 7}}, 400, "options.top_p"),
        ({"options": {"repeat_penalty": 1.1}}, 400, "^repeat_penalty: the echo engine"),
        ({"think": True}, 400, "does not think"),
        ({"tools": [weather]}, 400, "tool_parser"),
        ({"messages": said("a" * 100)}, 400, "context"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_ollamas_client_knows_the_errors(
    llama: ollama.Client, asked: Any, status: int, says: str, stream: bool
) -> None:
    with pytest.raises(ollama.ResponseError, match=says) as caught:
        list(llama.chat(**{"model": "plain", "messages": said("a"), "stream": stream} | asked))
    assert caught.value.status_code == status


@pytest.mark.parametrize("path", ["/", "/api/tags", "/api/version"])
def test_it_runs_as_far_as_ollamas_clients_can_tell(instance: Instance, path: str) -> None:
    answer = httpx.head(f"{instance.url}{path}", follow_redirects=True)
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.lane("models")
@pytest.mark.model
def test_all_dialects_say_the_same(tmp_path: Path) -> None:
    """A real model's greedy answer, and its count of tokens, by every API."""

    import anthropic

    model = {"name": "smollm2", "path": SMOLLM2}
    question = [{"role": "user", "content": "What is the capital of France?"}]
    server = {"legacy": "huixiangdou"}
    with Instance.up(tmp_path, [model], server=server) as instance:
        instance.until_settled(within_s=200)
        body = {"messages": question, "temperature": 0, "max_tokens": 30}
        openai = httpx.post(f"{instance.url}/v1/chat/completions", json=body, timeout=60).json()
        text, usage = openai["choices"][0]["message"]["content"], openai["usage"]
        counts = (usage["prompt_tokens"], usage["completion_tokens"])
        with anthropic.Anthropic(base_url=instance.url, api_key="none") as claude:
            asked: Any = {"model": "smollm2", "messages": question}
            more = {"temperature": 0}
            message: Any = claude.messages.create(**asked, max_tokens=30, extra_body=more)
            assert claude.messages.count_tokens(**asked).input_tokens == counts[0]
        assert (message.content[0].text, message.stop_reason) == (text, "end_turn")
        read = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
        assert (read, message.usage.output_tokens) == counts  # Anthropic tells the two apart
        options = {"temperature": 0, "num_predict": 30}
        chat = ollama.Client(host=instance.url).chat("smollm2", question, options=options)
        assert (chat.message.content, chat.done_reason) == (text, "stop")
        assert (chat.prompt_eval_count, chat.eval_count) == counts
        old = httpx.post(
            f"{instance.url}/inference", json={"prompt": question[0]["content"]}, timeout=60
        )
        assert old.json() == {"text": text, "error": ""}


@pytest.mark.lane("long")
def test_each_dialect_is_refused_in_its_own_words_without_a_key(tmp_path: Path) -> None:
    import anthropic

    rule = {"name": "mine", "environment": "THE_KEY"}
    config = tmp_path / "servekit.yaml"
    settings = {"models": [echo("a")], "server": {"port": 0, "ui": False}, "keys": [rule]}
    config.write_text(json.dumps(settings))
    keyed = Instance(tmp_path, config, env={"THE_KEY": "sk-0123456789abcdef0123456789abcdef"})
    try:
        keyed.until("it answers", keyed.running, within_s=60)
        keyed.until_settled()
        key = "sk-0123456789abcdef0123456789abcdef"
        for api_key in (key, "sk-wrong"):
            with anthropic.Anthropic(base_url=keyed.url, api_key=api_key, max_retries=0) as client:
                if api_key == key:
                    client.messages.create(model="a", max_tokens=2, messages=said("a"))
                    continue
                with pytest.raises(anthropic.AuthenticationError) as caught:
                    client.messages.create(model="a", max_tokens=2, messages=said("a"))
                body: Any = caught.value.body
                assert body["error"]["type"] == "authentication_error"
        with pytest.raises(ollama.ResponseError, match="API key") as refused:
            ollama.Client(host=keyed.url).list()
        assert refused.value.status_code == 401
        bearer = {"authorization": f"Bearer {key}"}
        assert ollama.Client(host=keyed.url, headers=bearer).list().models
    finally:
        keyed.end()
