"""One servekit behind another: engine openai, with everything that passes through it."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest

from servekit.system import procfs
from tests.integration.instance import PROGRAM, Instance, bearer, echo, write_config
from tests.integration.test_faults_supervisor import cli
from tests.polling import poll
from tests.unit.engines.conftest import SMOLLM2

KEY = "sk-far-0123456789abcdef"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
#: What ends the echo engine's answer where a model would end it itself.
END = "¤"
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def far(name: str, url: str, path: str, **options: Any) -> dict[str, Any]:
    """A model of the instance that asks."""
    return {"name": name, "engine": "openai", "path": path, "options": {"url": url, **options}}


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """The endpoint: it takes one key, and says no more than one token at a time."""
    models = [
        echo("talks", step_s=0.001) | {"tool_parser": "hermes", "reasoning_parser": "think"},
        echo("slow", step_s=0.05),
    ]
    keys = {"keys": [{"name": "far", "environment": "UPSTREAM_KEY"}]}
    folder = tmp_path_factory.mktemp("upstream")
    with Instance.up(folder, models, sections=keys, env={"UPSTREAM_KEY": KEY}) as instance:
        instance.until_settled()
        yield instance


@pytest.fixture(scope="module")
def instance(upstream: Instance, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    url = f"{upstream.url}/v1"
    models = [
        far("far", url, "talks", key_environment="FAR_KEY"),
        far("slow", url, "slow", key_environment="FAR_KEY"),
        far("vectors", url, "talks", key_environment="FAR_KEY", task="embed"),
        echo("near"),
    ]
    folder = tmp_path_factory.mktemp("instance")
    server = {"legacy": "huixiangdou"}
    with Instance.up(folder, models, server=server, env={"FAR_KEY": KEY}) as instance:
        instance.until_settled()
        yield instance


@pytest.fixture(scope="module")
def client(instance: Instance) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{instance.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


# ---------------------------------------------------------------- what passes through


def test_a_stream_and_its_counts(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="far", messages=user("hello "), max_tokens=11, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == "hello hello"
    assert len([text for text in texts if text]) > 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    used = chunks[-1].usage
    assert used is not None
    assert (used.prompt_tokens, used.completion_tokens) == (6, 11)


def test_thoughts_and_calls_in_every_api(instance: Instance, client: openai.OpenAI) -> None:
    import anthropic

    said = f"<think>\nhm\n</think>\n\nSo:\n{CALL}{END}"
    whole: Any = client.chat.completions.create(
        model="far", messages=user(said), tools=[TOOL], stop=END
    )
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", "So:")
    [call] = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Köln"},
    )
    assert whole.choices[0].finish_reason == "tool_calls"

    tool: Any = {"type": "function", **TOOL["function"]}
    response: Any = client.responses.create(
        model="far", input=said, max_output_tokens=len(said) - 1, tools=[tool]
    )
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]

    claude = anthropic.Anthropic(base_url=instance.url, api_key="none", max_retries=0)
    told: Any = claude.messages.create(
        model="far", max_tokens=2048, messages=user(said), stop_sequences=[END],
        tools=[{"name": "weather", "input_schema": TOOL["function"]["parameters"]}],
        thinking={"type": "enabled", "budget_tokens": 1024},
    )  # fmt: skip
    assert [block.type for block in told.content] == ["thinking", "text", "tool_use"]
    assert told.content[2].input == {"city": "Köln"}

    llama = ollama.Client(host=instance.url)
    answer = llama.chat("far", messages=user(said), tools=[TOOL], options={"stop": [END]})
    assert answer.message.thinking == "hm"
    assert answer.message.tool_calls is not None
    assert answer.message.tool_calls[0].function.arguments == {"city": "Köln"}


def test_data_is_no_call_where_the_endpoint_says_it_is_text(client: openai.OpenAI) -> None:
    said = CALL + "\ufdd2id\ufdd3weather\ufdd4{}"
    whole: Any = client.chat.completions.create(
        model="far", messages=user(said), max_tokens=len(said)
    )
    assert whole.choices[0].message.tool_calls is None
    assert whole.choices[0].message.content.startswith(CALL)


def test_completions_embeddings_and_what_is_refused(client: openai.OpenAI) -> None:
    plain = client.completions.create(model="far", prompt="abc", max_tokens=5)
    assert plain.choices[0].text == "abcab"
    [vector] = client.embeddings.create(model="vectors", input="abc").data
    assert len(vector.embedding) == 16
    with pytest.raises(openai.BadRequestError, match="does not take it"):
        client.chat.completions.create(
            model="far", messages=user("x"), response_format={"type": "json_object"}
        )
    with pytest.raises(openai.BadRequestError, match="takes text, not token ids"):
        client.completions.create(model="far", prompt=[1, 2, 3])
    with pytest.raises(openai.BadRequestError, match="maximum context length is 8192 tokens"):
        client.chat.completions.create(model="far", messages=user("x"), max_tokens=9000)


def test_the_hybrid_of_huixiangdou_s_old_client(instance: Instance) -> None:
    for backend in ("near", "far"):
        body = {"prompt": f"<think>\nhm\n</think>\n\n{backend}", "backend": backend}
        answer = httpx.post(f"{instance.url}/inference", json=body, timeout=30).json()
        assert answer["error"] == ""
        assert answer["text"].startswith("far" if backend == "far" else "<think>")


def test_a_client_that_leaves_is_seen_upstream(upstream: Instance, instance: Instance) -> None:
    body = {"model": "slow", "messages": user("x" * 100), "stream": True, "max_tokens": 4000}

    def running() -> int:
        return upstream.replica("slow/0").running

    with httpx.stream("POST", f"{instance.url}/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        lines = response.iter_lines()  # kept: the response is closed with it
        assert next(lines).startswith("data: ")
        upstream.until("it runs there", lambda: running() == 1)
    upstream.until("it has ended there", lambda: running() == 0, within_s=30)


# ---------------------------------------------------------------- the key


def test_nobody_but_its_workers_has_the_key(instance: Instance) -> None:
    status = instance.status()
    remote = {r.pid for m in status.models if m.name != "near" for r in m.replicas}
    everybody = instance.survivors()
    assert remote < {process.pid for process in everybody}
    for process in everybody:
        environ = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert (KEY.encode() in environ) == (process.pid in remote), procfs.command_line(
            process.pid
        )
        assert KEY not in procfs.command_line(process.pid)


def test_the_key_is_in_no_log_and_no_status(instance: Instance) -> None:
    assert KEY not in instance.log
    assert KEY not in repr(instance.status())
    for path in instance.run_dir.rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path
    assert KEY not in httpx.get(f"{instance.url}/readyz").text


# ---------------------------------------------------------------- an endpoint that is not there


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@pytest.mark.lane("long")
def test_an_endpoint_that_comes_late_goes_and_comes_back(tmp_path: Path) -> None:
    port = free_port()
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    model = far("far", f"http://127.0.0.1:{port}/v1", "talks", retries=1)
    with Instance.up(here, [model, echo("near")]) as instance:

        def replica() -> Any:
            return instance.replica("far/0")

        instance.until("it says why", lambda: "does not answer" in replica().reason)
        instance.until("the banner does not wait for it", lambda: "is up" in instance.log)
        assert replica().state != "failed"
        ask = {"model": "far", "messages": user("hello"), "max_tokens": 5}
        url = f"{instance.url}/v1/chat/completions"
        assert httpx.post(url, json={**ask, "model": "near"}).status_code == 200
        with Instance.up(there, [echo("talks")], server={"port": port}) as upstream:
            upstream.until_settled()
            instance.until("it serves", lambda: replica().state == "ready", within_s=60)
            pid = replica().pid
            assert httpx.post(url, json=ask).json()["choices"][0]["message"]["content"] == "hello"
        refused = httpx.post(url, json=ask, timeout=30)
        assert refused.status_code == 503
        assert "does not answer" in refused.json()["error"]["message"]
        instance.until("it is in trouble", lambda: replica().trouble)
        readyz = poll("readyz", lambda: _not_ready(instance), within_s=30)
        assert readyz["models"]["near"]["ready"]
        assert "does not answer" in readyz["models"]["far"]["replicas"][0]["reason"]
        assert _ps_ready(instance) == (1, "does not answer")
        why = _said(instance, "why", "far")
        assert "does not answer" in why
        again = tmp_path / "again"
        again.mkdir()
        with Instance.up(again, [echo("talks")], server={"port": port}) as upstream:
            upstream.until_settled()
            assert httpx.post(url, json=ask).status_code == 200
            instance.until("it is well again", lambda: not replica().trouble)
            assert poll("readyz", lambda: _ready(instance), within_s=30)
            assert _ps_ready(instance) == (0, "")
            assert replica().pid == pid, "its worker was not restarted for it"


def _readyz(instance: Instance) -> httpx.Response:
    return httpx.get(f"{instance.url}/readyz")


def _not_ready(instance: Instance) -> Any:
    response = _readyz(instance)
    return response.json() if response.status_code == 503 else None


def _ready(instance: Instance) -> bool:
    return _readyz(instance).status_code == 200


def _ps_ready(instance: Instance) -> tuple[int, str]:
    """The health check of a container: its exit code, and what it says of the endpoint."""
    done = cli(instance, "ps", "--ready")
    return done.returncode, "does not answer" if "does not answer" in done.stderr else done.stderr


def _said(instance: Instance, *command: str) -> str:
    import subprocess

    run = subprocess.run(
        [*PROGRAM, *command, "--run-dir", str(instance.run_dir)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        env={**os.environ, "COLUMNS": "500"},
    )
    return run.stdout


@pytest.mark.lane("long")
def test_a_key_that_the_endpoint_does_not_take(upstream: Instance, tmp_path: Path) -> None:
    wrong = far("far", f"{upstream.url}/v1", "talks", key_environment="FAR_KEY")
    with Instance.begun(tmp_path, [wrong], env={"FAR_KEY": "sk-wrong-0123456789"}) as instance:
        assert instance.wait() == 1
        assert "the key in the variable FAR_KEY" in instance.log
        assert "sk-wrong" not in instance.log


def test_a_variable_that_is_not_set(tmp_path: Path) -> None:
    import subprocess

    model = far("far", "http://127.0.0.1:9/v1", "talks", key_environment="FAR_KEY")
    config = write_config(tmp_path, [model])
    for command in (["check", str(config)], ["up", "--config", str(config)]):
        run = subprocess.run(
            [*PROGRAM, *command], capture_output=True, text=True, timeout=30, check=False
        )
        assert run.returncode == 2
        assert "the variable FAR_KEY holds no key" in run.stderr


def test_its_worker_dies_and_what_was_not_streamed_is_asked_again(
    upstream: Instance, instance: Instance
) -> None:
    body = {"model": "slow", "messages": user("x"), "max_tokens": 20}
    with httpx.Client(base_url=instance.url, timeout=60) as client:
        import threading

        answers: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: answers.append(client.post("/v1/chat/completions", json=body))
        )
        thread.start()

        def runs_there() -> bool:  # by the gateway: the supervisor hears of it once a second
            answer = httpx.get(f"{upstream.url}/readyz", headers=bearer(KEY))
            return bool(answer.json()["models"]["slow"]["running"] == 1)

        upstream.until("it runs there", runs_there)
        os.kill(instance.replica("slow/0").pid, signal.SIGKILL)
        thread.join(60)
    assert answers[0].json()["choices"][0]["message"]["content"] == "x" * 20


@pytest.mark.lane("models")
def test_a_real_model_by_a_schema(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    smollm2 = {"name": "smollm2", "path": SMOLLM2, "device": "cpu", "options": {"threads": 1}}
    with Instance.up(there, [smollm2]) as upstream:
        upstream.until_settled(within_s=240)
        with Instance.up(here, [far("far", f"{upstream.url}/v1", "smollm2")]) as instance:
            instance.until_settled(within_s=120)
            schema = {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            }
            format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            ask = {"messages": user("The capital of France?"), "temperature": 0, "max_tokens": 30}
            both = [
                httpx.post(
                    f"{one.url}/v1/chat/completions",
                    json={**ask, "model": model, "response_format": format},
                    timeout=120,
                ).json()
                for one, model in ((upstream, "smollm2"), (instance, "far"))
            ]
    assert both[0]["choices"] == both[1]["choices"]
    assert both[0]["usage"] == both[1]["usage"]
    assert json.loads(both[1]["choices"][0]["message"]["content"])["city"] in ("Paris", "Rome")
