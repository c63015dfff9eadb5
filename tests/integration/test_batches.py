"""Files and batches through the openai client, with kills in the middle."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from tests.api_keys import new_key
from tests.integration.instance import Instance
from tests.integration.test_command import numbers, odd
from tests.polling import poll

(ADA, ADA_HASH), (BOB, BOB_HASH) = new_key("ada"), new_key("bob")
CHAT = "/v1/chat/completions"
MIB = 2**20


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    folder = tmp_path_factory.mktemp("batches")
    server = {"batches": {"max_bytes": 4 * MIB, "concurrent": 2}, "gateways": 2}
    keys = [{"name": "ada", "hash": ADA_HASH}, {"name": "bob", "hash": BOB_HASH}]
    models = [odd("m", "--step-s", "0.02")]
    with Instance.up(folder, models, server=server, sections={"keys": keys}) as instance:
        instance.until_settled()
        yield instance


@pytest.fixture
def ada(instance: Instance) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{instance.url}/v1", api_key=ADA, max_retries=5)


@pytest.fixture
def bob(instance: Instance) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{instance.url}/v1", api_key=BOB, max_retries=0)


def chat(id: str, tokens: int = 5, **changed: Any) -> str:
    body = {"model": "m", "max_tokens": tokens, "messages": [{"role": "user", "content": id}]}
    line = {"custom_id": id, "method": "POST", "url": CHAT, "body": body}
    return json.dumps(line | changed)


def start(client: openai.OpenAI, *lines: str, window: Any = "24h", endpoint: Any = CHAT) -> Batch:
    content = "\n".join(lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window=window, metadata={"a": "b"}
    )


def until(client: openai.OpenAI, batch: Batch, *states: str) -> Batch:
    def look() -> Batch | None:
        try:
            now = client.batches.retrieve(batch.id)
        except openai.APIConnectionError:
            return None
        return now if now.status in states else None

    found = poll(f"the batch is {states}", look, 60)
    assert found is not None
    return found


def until_done(client: openai.OpenAI, batch: Batch, count: int) -> None:
    def are_done() -> bool:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts is not None and counts.completed >= count

    poll(f"{count} are done", are_done, 30)


def read(client: openai.OpenAI, id: str | None) -> list[Any]:
    assert id is not None
    return [json.loads(line) for line in client.files.content(id).text.splitlines()]


def test_bad_lines_are_errors_and_the_others_run(instance: Instance, ada: openai.OpenAI) -> None:
    batch = start(
        ada, chat("a"), "no JSON", chat("b", url="/v1/completions"), chat("a"), chat("c"), "",
        chat("d", body={"model": "nobody", "messages": [{"role": "user", "content": "x"}]}),
        chat("e", body={"model": "m", "stream": True}), chat("f", body=[]), '{"custom_id": "g"}',
    )  # fmt: skip
    assert (batch.status, batch.metadata) == ("validating", {"a": "b"})
    done = until(ada, batch, "completed", "failed")
    counts = done.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (9, 2, 7)
    good = read(ada, done.output_file_id)
    assert [one["custom_id"] for one in good] == ["a", "c"]
    for one in good:
        assert (one["error"], one["response"]["status_code"]) == (None, 200)
        assert one["response"]["request_id"]
        assert one["response"]["body"]["choices"][0]["message"]["content"] == numbers(5)
    bad = read(ada, done.error_file_id)
    told = {one["custom_id"]: one for one in bad[1:]}
    assert (bad[0]["custom_id"], bad[0]["error"]["code"]) == (None, "invalid_line")
    assert told["b"]["error"]["code"] == "mismatched_endpoint"
    assert told["a"]["error"]["code"] == "duplicate_custom_id"
    assert told["d"]["response"]["status_code"] == 404
    assert told["d"]["response"]["body"]["error"]["code"] == "model_not_found"
    assert told["e"]["error"]["code"] == "unsupported_parameter"
    assert told["f"]["error"]["code"] == "invalid_body"
    assert told["g"]["error"]["code"] == "invalid_line"

    files = instance.run_dir / "files"
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.iterdir()} == {0o600}
    kinds = [one.purpose for one in ada.files.list()]
    assert kinds.count("batch_output") == 2
    [listed, *_] = ada.batches.list(limit=1)
    assert listed == done


def test_a_file_without_requests_fails(ada: openai.OpenAI) -> None:
    for content, code in (("no\nJSON", "invalid_json_line"), ("\n", "empty_file")):
        failed = until(ada, start(ada, content), "failed")
        assert failed.errors is not None and failed.errors.data is not None
        assert [error.code for error in failed.errors.data] == [code]


def test_files_and_batches_are_of_their_key(ada: openai.OpenAI, bob: openai.OpenAI) -> None:
    batch = start(ada, chat("a"))
    file = batch.input_file_id
    attempts: list[Callable[[], object]] = [
        lambda: bob.files.retrieve(file),
        lambda: bob.files.content(file),
        lambda: bob.files.delete(file),
        lambda: bob.batches.retrieve(batch.id),
        lambda: bob.batches.cancel(batch.id),
        lambda: bob.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h"),
    ]
    for attempt in attempts:
        with pytest.raises(openai.NotFoundError, match="the key has no"):
            attempt()
    assert not [*bob.files.list(), *bob.batches.list()]
    assert until(ada, batch, "completed").output_file_id
    assert ada.files.delete(file).deleted
    with pytest.raises(openai.NotFoundError):
        ada.files.content(file)


def test_files_expire_when_their_key_asks_for_it(ada: openai.OpenAI) -> None:
    policy: Any = {"anchor": "created_at", "seconds": 3600}
    content = ("in.jsonl", chat("a").encode())
    file = ada.files.create(file=content, purpose="batch", expires_after=policy)
    assert (file.expires_at or 0) - file.created_at == 3600
    batch = ada.batches.create(
        input_file_id=file.id,
        endpoint=CHAT,
        completion_window="24h",
        output_expires_after=policy | {"seconds": 7200},
    )
    output = ada.files.retrieve(until(ada, batch, "completed").output_file_id or "")
    assert (output.expires_at or 0) - output.created_at == 7200
    with pytest.raises(openai.BadRequestError, match="output_expires_after"):
        ada.batches.create(
            input_file_id=file.id,
            endpoint=CHAT,
            completion_window="24h",
            output_expires_after=policy | {"seconds": 1},
        )


def test_the_limits_of_files(instance: Instance, bob: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        bob.files.create(file=("big.jsonl", b"x" * 100 * MIB), purpose="batch")
    assert refused.value.status_code == 413
    assert "server.batches.max_bytes" in refused.value.message
    with pytest.raises(openai.BadRequestError, match="purpose: expected `batch`"):
        bob.files.create(file=("in.jsonl", b"{}"), purpose="fine-tune")
    assert not [*bob.files.list()]

    def pieces() -> Iterator[bytes]:  # chunked: no length is declared
        yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(8):
            yield b"x" * MIB

    headers = {"authorization": f"Bearer {BOB}", "content-type": "multipart/form-data; boundary=x"}
    answer = httpx.post(f"{instance.url}/v1/files", content=pieces(), headers=headers)
    assert answer.status_code == 413
    headers["content-type"] += "x" * 300
    answer = httpx.post(f"{instance.url}/v1/files", content=b"--x", headers=headers)
    assert (answer.status_code, "form" in answer.text) == (400, True)
    assert not [path for path in (instance.run_dir / "files").iterdir() if path.name[0] == "."]


def test_cancelled_and_expired_ones_keep_what_is_done(ada: openai.OpenAI) -> None:
    lines = [chat("quick"), *(chat(f"slow{n}", 5000) for n in range(4))]
    for window, status in (("24h", "cancelled"), ("3s", "expired")):
        batch = start(ada, *lines, window=window)

        def is_begun(batch: Batch = batch) -> bool:
            counts = ada.batches.retrieve(batch.id).request_counts
            return counts is not None and counts.completed == 1

        poll("one is done", is_begun, 30)
        if status == "cancelled":
            ada.batches.cancel(batch.id)
        done = until(ada, batch, status)
        assert [one["custom_id"] for one in read(ada, done.output_file_id)] == ["quick"]
        if status == "expired":
            codes = [one["error"]["code"] for one in read(ada, done.error_file_id)]
            assert codes == ["batch_expired"] * 4
        else:
            assert done.error_file_id is None


def test_kills_lose_nothing_and_double_nothing(instance: Instance, ada: openai.OpenAI) -> None:
    ids = [f"line{n}" for n in range(60)]
    batch = start(ada, *(chat(id, 10) for id in ids))

    until_done(ada, batch, 3)
    killed = [instance.gateway(at).pid for at in (0, 1)]
    for pid in killed:
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    done = until(ada, batch, "completed", "failed")
    counts = done.request_counts
    assert counts is not None
    assert (counts.completed, counts.failed) == (60, 0)
    assert [one["custom_id"] for one in read(ada, done.output_file_id)] == ids


def test_a_killed_supervisor_is_followed_by_one_that_goes_on(tmp_path: Path) -> None:
    models = [odd("m", "--step-s", "0.02")]
    server: dict[str, Any] = {"batches": {"concurrent": 2}}
    with Instance.up(tmp_path, models, server=server) as first:
        first.until_settled()
        client = openai.OpenAI(base_url=f"{first.url}/v1", api_key="x", max_retries=0)
        ids = [f"line{n}" for n in range(30)]
        batch = start(client, *(chat(id, 10) for id in ids))
        until_done(client, batch, 3)
        first.process.kill()
        first.process.wait()
        with Instance.up(tmp_path, models, server=server) as second:
            second.until_settled()
            client = openai.OpenAI(base_url=f"{second.url}/v1", api_key="x", max_retries=0)
            os.kill(second.replica("m/0").pid or 0, signal.SIGKILL)  # and a worker
            done = until(client, batch, "completed", "failed")
            assert [one["custom_id"] for one in read(client, done.output_file_id)] == ids


def test_a_batch_waits_while_others_do(tmp_path: Path) -> None:
    models = [odd("m", "--step-s", "0.02", options={"slots": 1})]
    with Instance.up(tmp_path, models, server={"batches": {"concurrent": 8}}) as instance:
        instance.until_settled()
        client = openai.OpenAI(base_url=f"{instance.url}/v1", api_key="x", max_retries=0)
        batch = start(client, *(chat(f"line{n}") for n in range(60)))
        until_done(client, batch, 3)

        def count_done() -> int:
            counts = client.batches.retrieve(batch.id).request_counts
            return 0 if counts is None else counts.completed

        before = count_done()
        with ThreadPoolExecutor(24) as clients:  # at once: there is always one that waits
            asked = json.loads(chat("x"))["body"]
            calls = [
                clients.submit(lambda: client.chat.completions.create(**asked)) for _ in range(24)
            ]
            assert all(call.result().choices for call in calls)
        assert count_done() - before <= 6  # a quarter of what clients got: some were running
        assert until(client, batch, "completed").output_file_id
