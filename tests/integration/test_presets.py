"""Presets on real instances: by every name, of any model, live, and past deaths and reloads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.api_keys import new_key
from tests.integration.instance import (
    Instance,
    bearer,
    echo,
    run,
    stream_completion,
    write_config,
)
from tests.integration.test_command import numbers, odd

pytestmark = pytest.mark.timeout(180)

(ADA, ADA_HASH), (BOB, BOB_HASH) = new_key("ada"), new_key("bob")
KEYS = [
    {"name": "ada", "hash": ADA_HASH},
    {"name": "bob", "hash": BOB_HASH, "models": ["fast"]},
]
FAST = {
    "name": "fast",
    "sampling": {"temperature": 0.5, "max_tokens": 5},
    "system": "Be short.",
    "thinking": False,
}
OFF = {"enable_thinking": False, "thinking": False}
LATER = {
    **echo("later"),
    "load": "on_demand",
    "presets": [{"name": "calm", "sampling": {"max_tokens": 5}}],
}


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    folder = tmp_path_factory.mktemp("presets")
    models = [odd("m", "--step-s", "0.005", presets=[FAST], aliases=["other"]), LATER]
    server: dict[str, Any] = {"store_responses": {}}
    with Instance.up(folder, models, server=server, sections={"keys": KEYS}) as instance:
        instance.until_settled()
        yield instance


def post(instance: Instance, path: str, key: str = ADA, **body: Any) -> httpx.Response:
    headers = bearer(key) if key else {}
    return httpx.post(f"{instance.url}{path}", json=body, headers=headers, timeout=60)


def chat(instance: Instance, model: str, text: str = "count", key: str = ADA) -> httpx.Response:
    messages = [{"role": "user", "content": text}]
    return post(instance, "/v1/chat/completions", key, model=model, messages=messages)


def said(answer: httpx.Response) -> tuple[str, str]:
    """The model that has answered, and its text."""
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return body["model"], body["choices"][0]["message"]["content"]


def asked(instance: Instance) -> Any:
    """The last chat, as the server behind the model got it."""
    return post(instance, "/v1/asked", model="fast").json()


def test_the_server_gets_what_it_sets(instance: Instance) -> None:
    assert said(chat(instance, "fast")) == ("fast", numbers(5))
    body = asked(instance)
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("counter", 0.5, 5)
    assert body["chat_template_kwargs"] == OFF
    assert body["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "count"},
    ]
    options = {"temperature": 0.25, "num_predict": 2}
    question = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "count"}]
    more: dict[str, Any] = {"messages": question, "options": options}
    answer = post(instance, "/api/chat", model="fast:latest", think=True, stream=False, **more)
    assert answer.json()["message"]["content"] == numbers(2)
    body = asked(instance)
    assert (body["temperature"], body["max_tokens"], body["messages"]) == (0.25, 2, question)
    assert body["chat_template_kwargs"] == {"enable_thinking": True, "thinking": True}


def test_a_stored_conversation_has_no_system_message_of_it(instance: Instance) -> None:
    client = openai.OpenAI(base_url=f"{instance.url}/v1", api_key=ADA, max_retries=0)
    first = client.responses.create(model="fast", input="One", instructions="Be long.")
    assert (first.model, first.output_text, first.temperature) == ("fast", numbers(5), 0.5)
    assert asked(instance)["messages"][0] == {"role": "system", "content": "Be long."}
    for model, begin in (("fast", [("system", "Be short.")]), ("m", [])):
        again = client.responses.create(
            model=model, input="Two", previous_response_id=first.id, max_output_tokens=5
        )
        assert again.model == model
        messages = [(one["role"], one["content"]) for one in asked(instance)["messages"]]
        turns = [("user", "One"), ("assistant", numbers(5)), ("user", "Two")]
        assert messages == [*begin, *turns]


def test_an_answer_that_goes_on_keeps_its_values(instance: Instance) -> None:
    assert said(chat(instance, "fast", "count DIE=3")) == ("fast", numbers(5))
    body = asked(instance)
    assert (body["temperature"], body["chat_template_kwargs"]) == (0.5, OFF)
    assert [one["role"] for one in body["messages"]] == ["system", "user", "assistant"]


def test_a_key_for_it_alone(instance: Instance) -> None:
    listed = httpx.get(f"{instance.url}/v1/models", headers=bearer(BOB)).json()["data"]
    assert [one["id"] for one in listed] == ["fast"]
    assert said(chat(instance, "fast", key=BOB))[0] == "fast"
    assert said(chat(instance, "", key=BOB))[0] == "fast", "the first that it may use"
    for model in ("m", "other", "calm"):
        refused = chat(instance, model, key=BOB)
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "model")


def test_a_model_on_demand_is_loaded_by_its_name(instance: Instance) -> None:
    assert said(chat(instance, "calm", "hello")) == ("calm", "hello")
    assert instance.run("unload", "calm").stdout.startswith("later is stopped")
    assert said(chat(instance, "calm", "hello")) == ("calm", "hello")
    for command in ("why", "restart", "load"):
        done = instance.run(command, "calm")
        assert done.returncode == 0, done.stderr


def test_the_command_line_knows_it(instance: Instance) -> None:
    config = instance.status().config
    rows = json.loads(run("ls", "--run-dir", str(instance.run_dir), "--json").stdout)
    found = {row["name"]: row["from"] for row in rows if row["name"]}
    assert found["fast"] == "a preset of m" and found["calm"] == "a preset of later"
    wanted = "fast m temperature 0.5, max_tokens 5, system message, thinking false"
    for done in (instance.run("ps"), instance.run("status"), run("check", "--config", config)):
        assert wanted in [" ".join(line.split()) for line in done.stdout.splitlines()], done.stdout
    assert run("requests", "--run-dir", str(instance.run_dir), "--model", "fast").returncode == 0


def test_a_reload_changes_them_and_no_worker(tmp_path: Path) -> None:
    model = echo("m", step_s=0.01)
    body: dict[str, Any] = {"model": "quick", "prompt": "hello ", "temperature": 0}
    with Instance.up(tmp_path, [{**model, "presets": [{"name": "quick"}]}]) as instance:
        instance.until_settled()
        pid = instance.replica("m/0").pid
        stream = stream_completion(instance.url, **body, max_tokens=120)
        begun = next(stream)
        write_config(tmp_path, [{**model, "presets": [{"name": "new"}, {"name": "new"}]}])
        refused = instance.run("reload")
        assert refused.returncode != 0 and "'new' is taken by" in refused.stderr
        assert post(instance, "/v1/completions", "", **body).status_code == 200, (
            "the old file goes on"
        )
        sampling = {"temperature": 0, "max_tokens": 3}
        write_config(tmp_path, [{**model, "presets": [{"name": "new", "sampling": sampling}]}])
        assert instance.reload() == "m updated"
        gone = post(instance, "/v1/completions", "", **body)
        assert gone.status_code == 404
        assert "the models are: m, new" in gone.json()["error"]["message"]
        assert said(chat(instance, "new", "hello", key="")) == ("new", "hel")
        sampling["max_tokens"] = 4
        write_config(tmp_path, [{**model, "presets": [{"name": "new", "sampling": sampling}]}])
        assert instance.reload() == "m updated"
        assert said(chat(instance, "new", "hello", key="")) == ("new", "hell")
        assert begun + "".join(stream) == "hello " * 20
        assert instance.replica("m/0").pid == pid
