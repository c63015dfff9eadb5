"""The request log: a line for each request, read by `servekit requests`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from servekit.request_log import RequestRecord, read_records
from tests.integration.instance import Instance, bearer, echo, run, stream_completion
from tests.polling import poll

#: Clients of other services send the key that they have.
KEY_OF_ELSEWHERE = "sk-proj-Ahgh3aiTeeQu2oo"


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """An instance that has answered one request of each kind; see `ids`."""
    folder = tmp_path_factory.mktemp("requests")
    with Instance.up(folder, [{**echo("a", step_s=0.01), "aliases": ["alpha"]}]) as running:
        running.until_settled()
        ask(running, "whole", {"model": "alpha", "prompt": "hello", "max_tokens": 5})
        stream: dict[str, Any] = {"model": "a", "prompt": "hello", "max_tokens": 4, "n": 2}
        list(stream_completion(running.url, {"x-request-id": "stream"}, **stream))
        ask(running, "broken", {"model": "a"})
        ask(running, "unknown", {"model": "zzz", "prompt": "x"})
        httpx.get(f"{running.url}/nowhere", headers={"x-request-id": "nowhere"})
        httpx.get(f"{running.url}/readyz", headers={"x-request-id": "probe"})
        leave(running)
        poll("the last request is logged", lambda: "left" in records(running))
        yield running


def ask(instance: Instance, id: str, body: dict[str, Any]) -> None:
    headers = {"x-request-id": id, **bearer(KEY_OF_ELSEWHERE)}
    httpx.post(f"{instance.url}/v1/completions", json=body, headers=headers)


def leave(instance: Instance) -> None:
    """Read the beginning of a stream, then disconnect."""
    body = {"model": "a", "prompt": "hello", "max_tokens": 5000, "stream": True}
    headers = {"x-request-id": "left"}
    url = f"{instance.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers) as answer:
        next(answer.iter_lines())


def records(instance: Instance) -> dict[str, RequestRecord]:
    return {record.id: record for record in read_records(instance.run_dir)}


def test_each_request_has_its_line(instance: Instance) -> None:
    found = records(instance)
    assert set(found) == {"whole", "stream", "broken", "unknown", "nowhere", "left"}
    whole, stream = found["whole"], found["stream"]
    assert (whole.model, whole.status, whole.outcome) == ("a", 200, "length")
    assert (whole.prompt_tokens, whole.completion_tokens) == (5, 5)
    assert 0 < whole.first_s < whole.total_s
    assert stream.completion_tokens == 8, "of both choices"
    assert (found["left"].status, found["left"].outcome) == (499, "client_closed")
    assert found["left"].completion_tokens > 0
    assert (found["unknown"].status, found["unknown"].outcome) == (404, "model_not_found")
    assert (found["broken"].status, found["broken"].model) == (400, "")
    assert (found["nowhere"].status, found["nowhere"].endpoint) == (404, "/nowhere")


@pytest.mark.lane("long")
@pytest.mark.parametrize(
    ("args", "ids"),
    [
        (["--errors"], {"broken", "unknown", "nowhere", "left"}),
        (["--model", "alpha"], {"whole", "stream", "left"}),
        (["--key", "nobody"], set()),
        (["--slow", "1h"], set()),
        (["--since", "1h", "-n", "1"], {"left"}),
    ],
)
def test_filters(instance: Instance, args: list[str], ids: set[str]) -> None:
    done = run("requests", "--run-dir", str(instance.run_dir), "--json", *args)
    assert {json.loads(line)["id"] for line in done.stdout.splitlines()} == ids


def test_a_key_that_nobody_asked_for_is_in_no_file(instance: Instance) -> None:
    written = [path for path in instance.run_dir.rglob("*") if path.is_file()]
    assert any(path.suffix == ".jsonl" for path in written)
    for path in (*written, instance.log_path):
        assert KEY_OF_ELSEWHERE.encode() not in path.read_bytes()


def test_people_get_columns_and_the_log_a_sentence(instance: Instance) -> None:
    done = run("requests", "--run-dir", str(instance.run_dir))
    head, *lines = done.stdout.splitlines()
    assert head.split()[:5] == ["TIME", "STATUS", "KEY", "MODEL", "ENDPOINT"]
    assert len(lines) == 6
    shown = run("logs", "gateway/0", "--run-dir", str(instance.run_dir)).stdout
    assert "200 /v1/completions a: 5 + 5 tokens in" in shown
    assert "404 /nowhere in" in instance.log_path.read_text() or "endpoint=/nowhere" in (
        instance.log_path.read_text()
    )


@pytest.mark.lane("long")
def test_no_log_where_the_file_says_so(tmp_path: Path) -> None:
    sections = {"logging": {"requests": False}}
    with Instance.up(tmp_path, [echo("a")], sections=sections) as quiet:
        quiet.until_settled()
        ask(quiet, "whole", {"model": "a", "prompt": "hello", "max_tokens": 5})
        done = run("requests", "--run-dir", str(quiet.run_dir))
    assert done.returncode == 1
    assert "logging.requests" in done.stderr
    assert not (quiet.run_dir / "requests").exists()
