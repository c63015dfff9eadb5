"""Endpoints that servekit does not know: recordings, images and scores, through all of servekit."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from servekit.system import procfs
from tests.api_keys import new_key
from tests.integration.instance import Instance, bearer, echo, write_config
from tests.integration.test_command import LLAMA_SERVER, odd, server_of
from tests.integration.test_remote import free_port
from tests.media_server import NAME
from tests.unit.engines.origins import SMOLLM2

pytestmark = pytest.mark.timeout(120)

SERVER = [sys.executable, str(Path(__file__).parents[1] / "media_server.py"), "--port", "{port}"]
LIMIT_BYTES = 16 * 2**20
ALICE, ALICE_HASH = new_key("alice")
BOB, BOB_HASH = new_key("bob")


def media(name: str, *args: str, options: dict[str, Any] | None = None, **more: Any) -> Any:
    known = {"command": [*SERVER, *args], "slots": 8, "task": "forward", **(options or {})}
    return {"name": name, "engine": "command", "path": name, "options": known, **more}


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    listed = {"endpoints": ["/v1/audio/transcriptions", "/tokenize"]}
    variable = {"key_environment": "MEDIA_KEY"}
    models = [
        media("two", "--key-variable", "MEDIA_KEY", options=variable, replicas=2)
        | {"aliases": ["whisper-1"], "stall_timeout_s": 2},
        media("listed", "--key", "{key}", options=listed, timeout_s=2),
        media("lazy", load="on_demand"),
        odd("chats", replicas=1),
        echo("text"),
    ]
    folder = tmp_path_factory.mktemp("forwarding")
    server = {"max_body_bytes": LIMIT_BYTES}
    with Instance.up(folder, models, server=server) as instance:
        instance.until_settled()
        yield instance


def post(instance: Instance, path: str = "/v1/audio/speech", **body: Any) -> httpx.Response:
    return httpx.post(f"{instance.url}{path}", json={"model": "two", **body}, timeout=60)


def transcribe(instance: Instance, recording: bytes = b"RIFF", **fields: Any) -> httpx.Response:
    """Send a form whose file comes before the model."""
    form = [("file", ("a.wav", recording, "audio/wav"))]
    form += [(name, (None, value)) for name, value in {"model": "two", **fields}.items()]  # type: ignore[misc]
    return httpx.post(f"{instance.url}/v1/audio/transcriptions", files=form, timeout=60)


def message_of(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


def figures(instance: Instance, worker: str) -> dict[str, int]:
    """Ask a server itself."""
    words = procfs.command_line(server_of(instance, worker).pid).split()
    answer = httpx.get(f"http://127.0.0.1:{words[words.index('--port') + 1]}/figures")
    return dict(answer.json())


# ---------------------------------------------------------------- forms, JSON, bytes, events


def test_openais_client(instance: Instance, tmp_path: Path) -> None:
    client = openai.OpenAI(base_url=f"{instance.url}/v1", api_key="none")
    recording = os.urandom(3 * 2**20)
    said = client.audio.transcriptions.create(model="whisper-1", file=("a.wav", recording))
    assert said.text == "hello"
    assert said.to_dict()["file"] == [len(recording), hashlib.sha256(recording).hexdigest()]
    events = client.audio.transcriptions.create(model="two", file=("a", b"b"), stream=True)
    assert [event.type for event in events] == 20 * ["transcript.text.delta"] + [
        "transcript.text.done"
    ]
    images = client.images.generate(model="two", prompt="a lighthouse")
    assert images.data is not None and images.data[0].b64_json == "aGVsbG8="
    with client.audio.speech.with_streaming_response.create(
        model="two", voice="alloy", input="hello", extra_body={"prompt": "BYTES=5000000"}
    ) as speech:
        speech.stream_to_file(tmp_path / "a.mp3")
        assert speech.headers["content-type"] == "audio/mpeg"
    assert (tmp_path / "a.mp3").stat().st_size == 5_000_000


def test_what_the_server_is_sent(instance: Instance) -> None:
    headers = {"authorization": "Bearer the-clients", "cookie": "a=b", "x-api-key": "c"}
    body = b'{"big": 123456789012345678901234567890, "model": "whisper-1", "prompt": "ECHO"}'
    url = f"{instance.url}/v1/rerank?model=ignored&a=b"
    answer = httpx.post(url, content=body, headers=headers | {"content-type": "application/json"})
    told = answer.json()
    assert told["fields"] == json.loads(body) | {"model": NAME}
    assert (told["path"], told["query"]) == ("/v1/rerank", "a=b")
    assert told["headers"]["content-type"] == "application/json"
    assert not {"cookie", "x-api-key"} & told["headers"].keys()
    assert "the-clients" not in answer.text
    in_form = transcribe(instance, b"abc", prompt="ECHO", model="whisper-1").json()
    assert in_form["fields"]["model"] == NAME
    assert in_form["fields"]["file"] == [3, hashlib.sha256(b"abc").hexdigest()]


def test_the_model_in_the_query_or_a_header_or_nowhere(instance: Instance) -> None:
    url = f"{instance.url}/v1/audio/transcriptions"
    by_query = httpx.post(f"{url}?model=tw%6F", content=b"\x00" * 9).json()
    assert by_query["text"] == "hello"
    wrong = httpx.post(url, content=b"RIFF", headers={"x-model": "nobody"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
    before = figures(instance, "listed/0")["requests"]
    assert httpx.post(url, content=b"RIFF").status_code == 200
    assert figures(instance, "listed/0")["requests"] == before + 1  # it lists the endpoint


def test_a_model_without_the_endpoint_names_those_with_it(instance: Instance) -> None:
    for model, path in (("text", "/v1/audio/speech"), ("listed", "/v1/moderations")):
        refused = post(instance, path, model=model)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        assert f"the model '{model}' has no {path}" in message_of(refused)
        assert "'two'" in message_of(refused)
    chat = httpx.post(f"{instance.url}/v1/chat/completions", json={"model": "two", "messages": []})
    assert chat.status_code == 400
    asked = {"model": "two", "messages": [{"role": "user", "content": "a"}]}
    refused = httpx.post(f"{instance.url}/v1/chat/completions", json=asked)
    assert "does not generate text; it serves its own endpoints only" in message_of(refused)


def test_other_paths_and_methods_are_unknown_as_before(instance: Instance) -> None:
    url = f"{instance.url}/v1/audio/speech"
    assert [httpx.get(url).status_code, httpx.head(url).status_code] == [404, 404]
    assert httpx.put(url, content=b"a").status_code == 404
    for path in ("/nothing", "/v1/../figures", "/v1/%2e%2e/figures", "/v1/a/.%2e/b", "/v1//a"):
        request = httpx.Request("POST", instance.url)
        request = httpx.Request("POST", request.url.copy_with(raw_path=path.encode()))
        with httpx.Client() as client:
            assert client.send(request).json()["error"]["code"] == "not_found", path


def test_an_endpoint_of_servekit_that_a_model_lists(instance: Instance) -> None:
    own = httpx.post(f"{instance.url}/tokenize", json={"model": "text", "prompt": "ab"})
    assert own.json()["count"] == 2
    theirs = httpx.post(f"{instance.url}/tokenize", json={"model": "listed", "prompt": "ECHO"})
    assert theirs.json()["path"] == "/tokenize"
    unlisted = httpx.post(f"{instance.url}/tokenize", json={"model": "two", "prompt": "a"})
    assert "does not tokenise" in message_of(unlisted)


def test_a_model_of_chats_forwards_too(instance: Instance) -> None:
    answer = httpx.post(f"{instance.url}/v1/score", json={"model": "chats", "a": 1})
    assert (answer.status_code, message_of(answer)) == (404, "no /v1/score")  # its server's words


def test_it_is_loaded_on_demand(instance: Instance) -> None:
    assert transcribe(instance, model="lazy").json()["text"] == "hello"


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(("status", "seen"), [(201, 201), (404, 404), (422, 422), (501, 501)])
def test_statuses_are_the_servers(instance: Instance, status: int, seen: int) -> None:
    answer = post(instance, prompt=f"STATUS={status}")
    assert (answer.status_code, answer.json()["secret"]) == (seen, "kept")
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(("status", "seen"), [(500, 502), (503, 503), (401, 502), (302, 502)])
def test_failures_are_servekits(instance: Instance, status: int, seen: int) -> None:
    answer = post(instance, prompt=f"STATUS={status}")
    assert answer.status_code == seen
    assert message_of(answer).startswith(f"the endpoint answered {status}: told to")


def test_what_is_no_http(instance: Instance) -> None:
    answer = post(instance, prompt="GARBAGE")
    assert (answer.status_code, "does not answer" in message_of(answer)) == (503, True)


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (b'{"model": "two", ', "application/json", "the body is not valid JSON"),
        (b'{"model": 7}', "application/json", "model: expected a string"),
        (b'{"model":"two","Model":"text"}', "application/json", "lower case"),
        (b"--x\r\n\r\nabc", "multipart/form-data; boundary=x", "incomplete"),
        (b"what", "multipart/form-data; boundary=x", "cannot be read"),
        (b"", "multipart/form-data", "incomplete"),
        (
            b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\ntwo\r\n'
            b"--x\r\nContent-Disposition: form-data; name=model\r\n\r\ntext\r\n--x--\r\n",
            "multipart/form-data; boundary=x",
            "more than once",
        ),
    ],
)
def test_bodies_that_cannot_be_read(instance: Instance, body: bytes, kind: str, said: str) -> None:
    url = f"{instance.url}/v1/audio/speech"
    refused = httpx.post(url, content=body, headers={"content-type": kind})
    assert (refused.status_code, said in message_of(refused)) == (400, True), refused.text
    packed = httpx.post(url, content=b"abc", headers={"content-encoding": "gzip"})
    assert "send the body as it is" in message_of(packed)


def test_bodies_up_to_the_limit(instance: Instance) -> None:
    largest = bytes(LIMIT_BYTES - 4096)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: transcribe(instance, largest), range(4)))
    digest = hashlib.sha256(largest).hexdigest()
    assert [one.json()["file"] for one in answers] == 4 * [[len(largest), digest]]
    assert transcribe(instance, bytes(LIMIT_BYTES)).status_code == 413
    pieces = (bytes(2**16) for _ in range(LIMIT_BYTES // 2**16 + 1))
    unmeasured = httpx.post(f"{instance.url}/v1/audio/speech", content=pieces)
    assert unmeasured.status_code == 413
    small = (piece for piece in (b'{"model":"two",', b'"prompt":"ECHO"}'))
    assert httpx.post(f"{instance.url}/v1/rerank", content=small).json()["fields"]["model"] == NAME


# ---------------------------------------------------------------- deaths


@pytest.mark.lane("long")
@pytest.mark.parametrize("trouble", ["DIE", "DIE_EARLY"])
def test_a_request_that_kills_servers(tmp_path: Path, trouble: str) -> None:
    """Those beside it are answered elsewhere; it is refused, and equal ones are at once."""
    with Instance.up(tmp_path, [media("two", replicas=2)]) as instance:
        instance.until_settled()
        form = [
            ("prompt", (None, trouble)),
            ("file", ("a", bytes(2**20))),
            ("model", (None, "two")),
        ]
        url = f"{instance.url}/v1/audio/transcriptions"
        with ThreadPoolExecutor(8) as pool:
            beside = [pool.submit(post, instance, prompt="SLOW") for _ in range(4)]
            killer = httpx.post(url, files=form, timeout=60)  # type: ignore[arg-type]
            assert killer.json()["error"]["code"] == "request_quarantined"
            assert [one.result().status_code for one in beside] == 4 * [200]
        instance.until_settled()
        restarts = [one.restarts for one in instance.model("two").replicas]
        headers = {"content-type": killer.request.headers["content-type"]}
        again = httpx.post(url, content=killer.request.read(), headers=headers)
        assert again.json()["error"]["code"] == "request_quarantined", again.text
        assert [one.restarts for one in instance.model("two").replicas] == restarts


def test_a_killed_server_loses_nothing(instance: Instance) -> None:
    instance.until_settled()
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(post, instance, prompt="SLOW", n=number) for number in range(12)]
        instance.until(
            "they run", lambda: instance.model("two").replicas[0].running >= 4, within_s=5
        )
        os.kill(server_of(instance, "two/0").pid, signal.SIGKILL)
        os.kill(instance.replica("two/1").pid, signal.SIGKILL)
        assert [one.result().status_code for one in answers] == 12 * [200]


def test_a_closed_connection_is_tried_again(instance: Instance) -> None:
    instance.until_settled()
    assert post(instance, prompt="CLOSE").status_code == 200


@pytest.mark.parametrize("trouble", ["BREAK", "DIE"])
def test_a_response_that_breaks_off(instance: Instance, trouble: str) -> None:
    instance.until_settled()
    with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
        post(instance, prompt=f"{trouble}=50000 BYTES=3000000")
    instance.until_settled()
    broken = transcribe(instance, stream="true", prompt=f"{trouble}=4")
    *_, last, _ = broken.text.split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] in ("endpoint_error", "worker_lost"), error


def test_a_request_beyond_its_time(instance: Instance) -> None:
    began_s = time.monotonic()
    body = {"model": "listed", "prompt": "SLEEP=30"}
    late = httpx.post(f"{instance.url}/tokenize", json=body, timeout=60)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
    assert time.monotonic() - began_s < 10
    instance.until("it is cancelled", lambda: figures(instance, "listed/0")["cancelled"])


# ---------------------------------------------------------------- clients


def test_a_client_that_leaves(instance: Instance) -> None:
    instance.until_settled()
    body = {"model": "lazy", "prompt": "SLEEP=60"}
    assert transcribe(instance, model="lazy").status_code == 200
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{instance.url}/v1/audio/speech", json=body, timeout=0.5)
    instance.until("it is cancelled", lambda: figures(instance, "lazy/0")["cancelled"])
    instance.until("nothing runs", lambda: instance.replica("lazy/0").running == 0)


@pytest.mark.lane("long")
def test_a_client_that_does_not_read(instance: Instance) -> None:
    """Its server has to wait, and is not taken for stalled; nothing of it is kept here."""
    instance.until_settled()
    before = sum(figures(instance, name)["sent_bytes"] for name in ("two/0", "two/1"))
    restarts = [one.restarts for one in instance.model("two").replicas]
    memory = psutil.Process(instance.gateway().pid).memory_info().rss
    body = json.dumps({"model": "two", "prompt": "BYTES=400000000"}).encode()
    host = httpx.URL(instance.url)
    with socket.create_connection((host.host, host.port or 80)) as client:
        head = f"POST /v1/audio/speech HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}"
        client.sendall(f"{head}\r\n\r\n".encode() + body)
        assert client.recv(12) == b"HTTP/1.1 200"
        now, since_s = before, time.monotonic()

        def stands_still() -> bool:
            """Whether nothing has been sent for longer than `stall_timeout_s` and a restart."""
            nonlocal now, since_s
            sent = sum(figures(instance, name)["sent_bytes"] for name in ("two/0", "two/1"))
            if sent != now:
                now, since_s = sent, time.monotonic()
            return time.monotonic() - since_s > 5

        instance.until("its server waits", stands_still)
        assert 0 < now - before < 40_000_000
        assert psutil.Process(instance.gateway().pid).memory_info().rss - memory < 40_000_000
        assert [one.restarts for one in instance.model("two").replicas] == restarts
        read = 0
        while read < 100_000_000:
            read += len(client.recv(2**20))
    instance.until(
        "nothing runs", lambda: all(not r.running for r in instance.model("two").replicas)
    )


# ---------------------------------------------------------------- operators and keys


def test_metrics_and_the_document(instance: Instance) -> None:
    assert post(instance, "/v1/rerank").json()["usage"] == {"total_tokens": 7}
    assert post(instance, "/v1/of/its/own").status_code == 404

    def told() -> bool:
        text = httpx.get(f"{instance.url}/metrics").text
        wanted = (
            r'servekit_http_requests_total\{route="/v1/rerank",status="200"',
            r'servekit_http_requests_total\{route="/v1/\*",status="404"',
            r'servekit_prompt_tokens_total\{.*model="two".*\} [1-9]',
            r'gen_ai_operation_name="forward"',
        )
        return all(re.search(one, text) for one in wanted) and "/v1/of/its" not in text

    instance.until("they are counted", told)
    paths = httpx.get(f"{instance.url}/openapi.json").json()["paths"]
    assert "multipart/form-data" in paths["/v1/audio/speech"]["post"]["requestBody"]["content"]
    assert "/v1/chat/completions" in paths


@pytest.mark.lane("long")
def test_a_remote_endpoint_forwards_too(tmp_path: Path) -> None:
    port = free_port()
    options = {"url": f"http://127.0.0.1:{port}/v1", "key_environment": "REMOTE_KEY", "retries": 1}
    remote = {"name": "remote", "engine": "openai", "path": NAME, "options": options}
    options["endpoints"] = ["/v1/audio/*"]
    command = [*SERVER[:-1], str(port), "--key-variable", "REMOTE_KEY"]
    env = {"REMOTE_KEY": "the-remote-key"}
    server = subprocess.Popen(command, env={**os.environ, **env})
    try:
        with Instance.up(tmp_path, [remote], env=env) as instance:
            instance.until_settled()
            assert transcribe(instance, b"abc", model="remote").json()["text"] == "hello"
            unknown = post(instance, "/v1/moderations", model="remote")
            assert unknown.json()["error"]["code"] == "not_found"
            server.kill()
            lost = transcribe(instance, model="remote")
            assert (lost.status_code, "the-remote-key" in lost.text) == (503, False)
    finally:
        server.kill()
        server.wait()


@pytest.mark.lane("long")
def test_two_gateways_and_a_worker_that_is_drained(tmp_path: Path) -> None:
    """Uploads and responses go on while the model is reloaded."""
    models = [media("two", replicas=2)]
    with Instance.up(tmp_path, models, server={"gateways": 2}) as instance:
        instance.until_settled()
        recording = bytes(5 * 2**20)
        with ThreadPoolExecutor(8) as pool:
            asked = [
                pool.submit(transcribe, instance, recording, prompt="SLEEP=1") for _ in range(8)
            ]
            again = [media("two", replicas=2, options={"slots": 7})]
            write_config(tmp_path, again, {"gateways": 2})
            instance.reload()
            assert [one.result().json()["file"][0] for one in asked] == 8 * [len(recording)]


@pytest.mark.lane("long")
def test_keys(tmp_path: Path) -> None:
    rules = [
        {"name": "alice", "hash": ALICE_HASH, "models": ["one"], "requests_per_minute": 3},
        {"name": "bob", "hash": BOB_HASH, "models": ["other"]},
    ]
    models = [media("one"), media("other", options={"endpoints": ["/v1/score"]})]
    with Instance.up(tmp_path, models, sections={"keys": rules}) as instance:
        instance.until_settled()
        url = f"{instance.url}/v1/audio/speech"
        assert httpx.post(url, json={"model": "one"}).status_code == 401
        assert httpx.post(url, json={"model": "one"}, headers=bearer("wrong")).status_code == 401
        refused = httpx.post(url, json={"model": "one"}, headers=bearer(BOB))
        assert (refused.status_code, "may not use 'one'" in message_of(refused)) == (403, True)
        hidden = httpx.post(url, json={}, headers=bearer(BOB))
        assert "none that you may use" in message_of(hidden), hidden.text
        statuses = [
            httpx.post(url, json={"model": "one"}, headers=bearer(ALICE)).status_code
            for _ in range(4)
        ]
        assert statuses == [200, 200, 200, 429]


@pytest.mark.model
@pytest.mark.lane("models")
def test_endpoints_of_llama_cpps_own_server(tmp_path: Path) -> None:
    options = {"command": [*LLAMA_SERVER, "{port}"], "slots": 4}
    options["endpoints"] = ["/v1/*", "/tokenize", "/completion"]
    model = {"name": "smol", "engine": "command", "path": SMOLLM2, "options": options}
    with Instance.up(tmp_path, [model]) as instance:
        instance.until_settled(within_s=180)
        tokens = httpx.post(f"{instance.url}/tokenize", json={"content": "Hello world"})
        assert tokens.json() == {"tokens": [19556, 905]}  # its own form, not servekit's
        asked = {"prompt": "Once upon a", "n_predict": 8, "temperature": 0, "stream": True}
        streamed = httpx.post(f"{instance.url}/completion", json=asked, timeout=60)
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line]
        text = "".join(event["content"] for event in events)
        body = {"model": "smol", "prompt": "Once upon a", "max_tokens": 8, "temperature": 0}
        known = httpx.post(f"{instance.url}/v1/completions", json=body, timeout=60)
        assert (len(events), text) == (9, known.json()["choices"][0]["text"])
        ranked = post(instance, "/v1/rerank", model="smol", query="a", documents=["b"])
        assert (ranked.status_code, "--reranking" in message_of(ranked)) == (501, True)
