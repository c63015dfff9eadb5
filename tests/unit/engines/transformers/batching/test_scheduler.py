"""Groups take turns, and no one reads what another adapter has put into the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from servekit.engines.transformers.batching import continuous, scheduler
from tests.unit.engines.harness import Harness, reference
from tests.unit.engines.transformers.lora import making
from tests.unit.engines.transformers.lora.conftest import adapters as adapters  # a fixture

Make = Callable[..., Harness]
LONG = "jumps over the lazy dog. " * 8


@pytest.fixture
def folders(adapters: dict[str, Path]) -> dict[str, Path]:
    return {name: adapters[name] for name in ("lora", "rslora", "ia3", "boft", "prompt")}


def load(one: Harness, folders: dict[str, Path]) -> None:
    for folder in folders.values():
        one.engine.load_adapter(making.spec(folder))


@pytest.mark.lane("long")
def test_blocks_are_shared_within_an_adapter_only(
    harness: Make, tiny_model: Path, folders: dict[str, Path]
) -> None:
    """The same long prompt under each adapter and the base, again and again, in any order."""
    one = harness(options={"block_size": 8})
    load(one, folders)
    expected = {"": reference(tiny_model, [LONG], making.COUNT)[0]}
    for name, folder in folders.items():
        expected[name] = making.reference(tiny_model, folder, [LONG])[0]
    names = ["", *folders, *reversed(folders), ""]
    for name in names:
        found = one.generate(LONG, adapter=name, max_tokens=making.COUNT, ignore_eos=True)
        assert found == expected[name], name


def test_blocks_are_shared_within_an_adapter(harness: Make, folders: dict[str, Path]) -> None:
    one = harness(options={"block_size": 8})
    load(one, {"lora": folders["lora"]})
    runner: Any = one.engine._runner
    cache, found = runner._processor.cache, []
    search = cache.search_prefix_match

    def watched(request_id: str, prompt_ids: list[int]) -> int:
        found.append(search(request_id, prompt_ids))
        return int(found[-1])

    cache.search_prefix_match = watched
    for name in ("lora", "", "lora", ""):
        one.generate(LONG, adapter=name, max_tokens=2, ignore_eos=True)
    assert found[:2] == [0, 0]
    assert found[2] == found[3] > 40
    told = [max(output.cached_tokens for output in outputs) for outputs in one.outputs.values()]
    assert told == found


@pytest.mark.parametrize("adapter", ["", "lora"])
def test_blocks_are_shared_within_a_salt_only(
    harness: Make, folders: dict[str, Path], adapter: str
) -> None:
    """What one key's requests have left says nothing to another's, and serves its own."""
    one = harness(options={"block_size": 8})
    load(one, {"lora": folders["lora"]})
    texts, told = set(), []
    for salt in ("", "alice", "bob", "alice", "bob", ""):
        job = one.submit(LONG, adapter=adapter, cache_salt=salt, max_tokens=8, ignore_eos=True)
        texts.add(tuple(one.tokens(job)))
        told.append(max(output.cached_tokens for output in one.outputs[job]))
    assert told[:3] == [0, 0, 0] and min(told[3:]) > 40
    assert len(texts) == 1


def test_without_the_salt_the_text_is_wrong(
    harness: Make, tiny_model: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the test above cannot pass for another reason."""
    monkeypatch.setattr(scheduler, "_salt_tokens", lambda tokens, uid: list(tokens))
    one = harness(options={"block_size": 8})
    load(one, {"lora": folders["lora"]})
    one.generate(LONG, max_tokens=2, ignore_eos=True)
    found = one.generate(LONG, adapter="lora", max_tokens=making.COUNT, ignore_eos=True)
    assert found != making.reference(tiny_model, folders["lora"], [LONG])[0]


def test_tokens_differ_by_adapter_and_by_themselves() -> None:
    prompts = [[first, *range(20)] for first in range(50)]
    salted = {
        tuple(scheduler._salt_tokens(prompt, scheduler._token_changes(uid, salt)))
        for prompt in prompts
        for uid in range(20)
        for salt in ("", "alice", "bob")
    }
    assert len(salted) == 50 * 20 * 3
    assert all(0 <= token < 2**31 for tokens in salted for token in tokens)


@pytest.mark.lane("long")
def test_groups_take_turns(harness: Make, folders: dict[str, Path]) -> None:
    """Everyone moves on all the time: at no step is one far ahead of another."""
    one = harness()
    load(one, folders)
    names = ["", "lora", "ia3", "boft", "", "boft"]
    jobs = [one.submit("The", adapter=n, max_tokens=60, ignore_eos=True) for n in names]
    for job in jobs:
        one.tokens(job)
    done = dict.fromkeys(jobs, 0)
    for batch in one.batches:
        for output in batch:
            if output.id in done:
                done[output.id] += len(output.token_ids)
        assert max(done.values()) - min(done.values()) <= 12


def test_a_step_is_of_one_group(harness: Make, folders: dict[str, Path]) -> None:
    one = harness()
    load(one, folders)
    names = ["", "lora", "rslora", "prompt", "ia3", "boft"]
    jobs = {one.submit("The", adapter=n, max_tokens=40, ignore_eos=True): n for n in names}
    for job in jobs:
        one.tokens(job)
    seen = [{jobs[output.id] for output in batch} for batch in one.batches]
    assert {"", "lora", "rslora", "prompt"} in seen  # these share
    assert all(len(batch) == 1 for batch in seen if batch & {"ia3", "boft"})


@pytest.mark.lane("long")
def test_a_full_cache_holds_no_group_up(
    harness: Make, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More requests than the cache has room for: some are put back, and all end rightly."""
    monkeypatch.setattr(continuous, "ADMISSION_TOKENS", 4)
    one = harness(options={"kv_cache_bytes": 2**20, "block_size": 8})  # 2048 tokens
    names = ["lora", "ia3", "boft"]
    load(one, {name: folders[name] for name in names})
    runner: Any = one.engine._runner
    offloads = watch(runner._processor.offloading_manager)
    asked = [(name, f"{number}: {LONG}") for number in range(8) for name in names]
    fields: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
    alone = [one.generate(prompt, adapter=name, **fields) for name, prompt in asked]
    jobs = [one.submit(prompt, adapter=name, **fields) for name, prompt in asked]
    assert [one.tokens(job) for job in jobs] == alone
    assert any(offloads)


def watch(offloading: Any) -> list[bool]:
    """What each attempt to make room has come to."""
    found: list[bool] = []
    offload = offloading.offload_requests

    def watched() -> bool:
        found.append(bool(offload()))
        return found[-1]

    offloading.offload_requests = watched
    return found
