"""Images to replicas of two ranks on the CPU: the library's answers, which outlive a rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.instance import Instance
from tests.integration.test_images_transformers import answer, ask, settle, stream
from tests.integration.test_spread import UP_S, ranks, spread
from tests.polling import poll
from tests.unit.engines.harness import write_tiny_llama
from tests.unit.engines.seeing_model import write_gemma3, write_qwen2_vl
from tests.unit.engines.transformers.vision.pictures import (
    HISTORY,
    NONE,
    ONE,
    OTHER,
    RED,
    Reference,
    say,
)

#: In the batch, and beside it.
WRITERS = {"qwen2_vl": write_qwen2_vl, "gemma3": write_gemma3}
#: Tokens of an answer in the midst of which a rank dies.
LONG = 400
pytestmark = [pytest.mark.lane("tensor-parallel"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tokenizer = write_tiny_llama(tmp_path_factory.mktemp("tiny"), spare_tokens=1)
    return {
        name: write(tmp_path_factory.mktemp(name), tokenizer) for name, write in WRITERS.items()
    }


@pytest.fixture(scope="module")
def instance(
    tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]
) -> Iterator[Instance]:
    models = [spread(path, name=name, standby=False) for name, path in folders.items()]
    with Instance.up(tmp_path_factory.mktemp("spread"), models) as instance:
        instance.until_settled(UP_S)
        yield instance


@pytest.mark.parametrize("name", WRITERS)
def test_answers_are_the_library_s(instance: Instance, folders: dict[str, Path], name: str) -> None:
    """Streamed and whole, of pictures and texts at once."""
    reference = Reference(folders[name])
    asked = [ONE, NONE, HISTORY, OTHER]
    due = []
    for messages in asked:
        _, ids = reference.ask(messages, 24)
        due.append(settle(reference.processor.tokenizer.decode(ids, skip_special_tokens=True)))
    assert len(set(due)) == len(asked)
    with ThreadPoolExecutor(2 * len(asked)) as clients:
        whole = [clients.submit(answer, instance, name, messages) for messages in asked]
        streams = [
            clients.submit(lambda one: "".join(stream(instance, name, one)), messages)
            for messages in asked
        ]
        assert [settle(one.result()[0]) for one in whole] == due
        assert [settle(one.result()) for one in streams] == due


@pytest.mark.parametrize("name", WRITERS)
def test_an_answer_outlives_a_rank(instance: Instance, name: str) -> None:
    """The replica is started again as a whole, reads the images again and goes on."""
    due, _ = answer(instance, name, HISTORY, max_tokens=LONG)
    coming = stream(instance, name, HISTORY, max_tokens=LONG)
    begun = [next(coming) for _ in range(5)]
    before = instance.replica(f"{name}/0")
    (rank,) = ranks(before.pid)
    os.kill(rank, signal.SIGKILL)
    assert "".join([*begun, *coming]) == due
    poll("the worker is replaced", lambda: instance.replica(before.name).restarts > before.restarts)
    assert instance.replica(before.name).pid != before.pid
    instance.until_settled(UP_S)


def test_what_is_refused_harms_no_rank(instance: Instance) -> None:
    damaged = say("user", "?", type(RED)(RED.data[:60], RED.kind))
    before = instance.replica("qwen2_vl/0")
    refused = ask(instance, "qwen2_vl", [damaged])
    assert refused.status_code == 400 and "image 1 cannot be decoded" in refused.text
    assert answer(instance, "qwen2_vl", ONE)[0]
    assert instance.replica("qwen2_vl/0").pid == before.pid
