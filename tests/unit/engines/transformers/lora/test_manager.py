"""Adapters beside their base: what PEFT says, whoever shares the batch, and nothing left after."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from servekit.engines.transformers.lora.adapter import Adapter
from servekit.errors import ContextLengthExceeded, LoadError, RequestError
from servekit.system import cgroup
from tests.unit.engines.harness import PROMPTS, Harness, assert_alive, make_spec
from tests.unit.engines.text.test_structured_output import DIGITS
from tests.unit.engines.transformers.lora import making
from tests.unit.engines.transformers.lora.conftest import ALL_IN_LANE, Answers

Make = Callable[..., Harness]
GREEDY: dict[str, Any] = {"max_tokens": making.COUNT, "ignore_eos": True}


def names(harness: Harness) -> list[str]:
    return sorted(info.name for info in harness.info.adapters)


def modes(harness: Harness) -> dict[str, str]:
    return {info.name: info.mode for info in harness.info.adapters}


def ask(harness: Harness, name: str, prompt: str, **params: Any) -> list[int]:
    return harness.tokens(harness.submit(prompt, adapter=name, **GREEDY | params))


# ---------------------------------------------------------------- the text is right


def test_every_kind_is_verified_and_says_how_it_runs(served: Harness) -> None:
    assert not served.info.refused_adapters
    assert modes(served) == {name: making.MODES[name] for name in names(served)}
    assert "adapters" in served.info.serves
    for info in served.info.adapters:
        assert info.why.endswith(".") and info.bytes > 0 and info.parameters > 0
        assert info.figures["effect"] > 1e-3
        assert info.figures["batch_error"] < 1e-4 and info.figures["base_error"] < 1e-4
        if info.name not in ("prompt", "encoder"):
            assert info.figures["layers"] > 0 and info.figures["layer_error"] < 1e-4
    ranks = {info.name: info.rank for info in served.info.adapters}
    assert ranks.items() >= {"lora": 4, "ia3": 0}.items() and ranks.get("patterns", 6) == 6
    kinds = {info.name: info.kind for info in served.info.adapters}
    assert kinds.items() >= {"lora": "LORA", "boft": "BOFT"}.items()
    assert kinds.get("dora", "DORA") == "DORA" and kinds.get("butterfly", "BOFT") == "BOFT"


@pytest.mark.lane("long")
def test_alone_it_says_what_peft_says(served: Harness, answers: Answers) -> None:
    said = {name: [ask(served, name, prompt) for prompt in PROMPTS] for name in names(served)}
    assert said == {name: answers(name) for name in said}
    assert not [name for name in said if said[name] == answers("")]


def test_all_together_beside_the_base(served: Harness, answers: Answers) -> None:
    """Every adapter and the base at once, twice, so that the cache's blocks are shared, too."""
    for _ in range(2):
        jobs = [
            (name, turn, served.submit(prompt, adapter=name, **GREEDY))
            for turn, prompt in enumerate(PROMPTS)
            for name in ("", *names(served))
        ]
        wrong = [(n, turn) for n, turn, job in jobs if served.tokens(job) != answers(n)[turn]]
        assert not wrong


@pytest.mark.parametrize("bare", ["static"], indirect=True)
def test_one_request_at_a_time_it_is_the_same(
    bare: Harness, adapters: dict[str, Path], answers: Answers
) -> None:
    for name in ("lora", "dora", "ia3", "prompt"):
        bare.engine.load_adapter(making.spec(adapters[name]))
    jobs = [
        (name, turn, bare.submit(prompt, adapter=name, **GREEDY))
        for turn, prompt in enumerate(PROMPTS)
        for name in ("", "lora", "dora", "ia3", "prompt")
    ]
    assert all(bare.tokens(job) == answers(name)[turn] for name, turn, job in jobs)


@pytest.mark.lane("long")
@pytest.mark.parametrize("name", ["rslora", "boft", "encoder"])
def test_long_prompts_are_read_in_chunks(
    harness: Make, adapters: dict[str, Path], answers: Answers, name: str
) -> None:
    one = harness(options={"max_batch_tokens": 16})
    one.engine.load_adapter(making.spec(adapters[name]))
    jobs = [one.submit(prompt, adapter=name, **GREEDY) for prompt in PROMPTS]
    assert [one.tokens(job) for job in jobs] == answers(name)


@pytest.mark.parametrize("name", ["lora", "boft", "prompt"])
def test_a_seed_a_continuation_and_penalties_hold_with_it(served: Harness, name: str) -> None:
    params: dict[str, Any] = {"temperature": 0.9, "seed": 7, "repetition_penalty": 1.2}
    whole = ask(served, name, PROMPTS[0], **params)
    crowd = [served.submit(PROMPTS[1], adapter=other, **GREEDY) for other in ("", "lora", "ia3")]
    assert ask(served, name, PROMPTS[0], **params) == whole
    rest = served.submit(PROMPTS[0], emitted=whole[:7], adapter=name, **GREEDY | params)
    assert served.tokens(rest) == whole[7:]
    assert ask(served, "", PROMPTS[0], **params) != whole
    assert all(served.tokens(job) for job in crowd)


@pytest.mark.parametrize("name", ["lora", "boft", "prompt"])
def test_log_probabilities_and_grammars_are_the_adapters(served: Harness, name: str) -> None:
    scored = served.submit(PROMPTS[0], adapter=name, logprobs=2, **GREEDY)
    found = served.logprobs(scored)
    assert len(found) == making.COUNT and all(one.logprob <= 0 for one in found)
    assert all(one.best[0][1] == pytest.approx(one.logprob) for one in found)
    bound = served.submit(PROMPTS[0], adapter=name, grammar=DIGITS, max_tokens=20)
    assert served.text(bound).isdigit()


def test_virtual_tokens_take_room_in_the_context(served: Harness) -> None:
    assert len(served.generate([5] * 505, adapter="prompt", max_tokens=2, ignore_eos=True)) == 2
    with pytest.raises(ContextLengthExceeded):
        served.submit([5] * 505, adapter="prompt", max_tokens=3)
    served.tokens(served.submit([5] * 505, max_tokens=7))


@pytest.mark.lane("long")
@pytest.mark.parametrize("kinds", ALL_IN_LANE)
def test_in_bfloat16_every_kind_is_verified_too(
    tiny_model: Path, adapters: dict[str, Path], kinds: tuple[str, ...]
) -> None:
    specs = tuple(making.spec(adapters[name]) for name in kinds)
    one = Harness(make_spec(tiny_model, dtype="bfloat16", adapters=specs))
    try:
        assert not one.info.refused_adapters
        assert modes(one) == {name: making.MODES[name] for name in kinds}
        for info in one.info.adapters:  # wide tolerances, and yet room in them
            assert info.figures["batch_error"] < 0.1 < info.figures["effect"] or info.name == "loha"
        assert all(len(ask(one, name, PROMPTS[0])) == making.COUNT for name in kinds)
    finally:
        one.close()


@pytest.mark.lane("long")
def test_without_memory_for_copies_a_costly_one_is_grouped(
    bare: Harness, adapters: dict[str, Path], answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "available_memory_bytes", lambda: 1000)
    for name in ("boft", "dora"):
        info = bare.engine.load_adapter(making.spec(adapters[name]))
        assert info.mode == "grouped" and "are free" in info.why
        assert [ask(bare, name, prompt) for prompt in PROMPTS] == answers(name)


# ---------------------------------------------------------------- coming and going


def test_one_that_is_wrong_does_not_keep_the_model_from_serving(
    tiny_model: Path, adapters: dict[str, Path], answers: Answers, tmp_path: Path
) -> None:
    specs = (making.spec(tmp_path, "empty"), making.spec(adapters["lora"]))
    one = Harness(make_spec(tiny_model, adapters=specs))
    try:
        assert [info.name for info in one.info.adapters] == ["lora"]
        assert "adapter_config.json" in one.info.refused_adapters["empty"]
        assert ask(one, "lora", PROMPTS[0]) == answers("lora")[0]
        with pytest.raises(RequestError, match="no adapter 'empty'"):
            one.submit(PROMPTS[0], adapter="empty")
    finally:
        one.close()


@pytest.mark.lane("long")
def test_loading_and_unloading_disturb_no_one(
    bare: Harness, adapters: dict[str, Path], answers: Answers
) -> None:
    calm = bare.generate(PROMPTS[0], max_tokens=300, ignore_eos=True)
    for name in ("lora", "prompt", "boft", "ia3"):
        running = bare.submit(PROMPTS[0], max_tokens=300, ignore_eos=True)
        bare.engine.load_adapter(making.spec(adapters[name]))
        assert ask(bare, name, PROMPTS[1]) == answers(name)[1]
        bare.engine.unload_adapter(name)
        assert bare.tokens(running) == calm
    assert not bare.engine._rows


def test_a_name_that_is_loaded_unknown_or_in_use(bare: Harness, adapters: dict[str, Path]) -> None:
    bare.engine.load_adapter(making.spec(adapters["lora"], "a"))
    with pytest.raises(RequestError, match="already"):
        bare.engine.load_adapter(making.spec(adapters["rslora"], "a"))
    with pytest.raises(RequestError, match="no adapter 'b'"):
        bare.engine.unload_adapter("b")
    job = bare.submit(PROMPTS[0], adapter="a", max_tokens=400, ignore_eos=True)
    with pytest.raises(RequestError, match="under way"):
        bare.engine.unload_adapter("a")
    bare.engine.cancel(job)
    bare.engine.unload_adapter("a")
    assert_alive(bare)


@pytest.mark.lane("long")
def test_a_name_may_come_again_for_another_adapter(
    bare: Harness, adapters: dict[str, Path], answers: Answers
) -> None:
    """Blocks that were cached under the first are not the second's."""
    for name in ("lora", "rslora", "ia3", "lora"):
        bare.engine.load_adapter(making.spec(adapters[name], "same"))
        assert [ask(bare, "same", prompt) for prompt in PROMPTS] == answers(name)
        bare.engine.unload_adapter("same")
    assert [ask(bare, "", prompt) for prompt in PROMPTS] == answers("")


@pytest.mark.lane("long")
@pytest.mark.parametrize("bare", ["continuous", "static"], indirect=True)
@pytest.mark.parametrize("name", ["lora", "prompt", "saved", "boft", "ia3"])
def test_unloading_frees_its_memory_and_restores_the_base(
    bare: Harness, adapters: dict[str, Path], name: str
) -> None:
    bare.engine.load_adapter(making.spec(adapters["patterns"]))
    ask(bare, "patterns", PROMPTS[0])
    before = held_bytes()
    bare.engine.load_adapter(making.spec(adapters[name]))
    ask(bare, name, PROMPTS[0])
    shelf: Any = bare.engine._adapters
    tensors = [weakref.ref(tensor) for tensor in own_tensors(shelf.get(name), shelf)]
    assert tensors and held_bytes() > before
    bare.engine.unload_adapter(name)
    assert not [tensor for tensor in tensors if tensor() is not None]
    ask(bare, "patterns", PROMPTS[0])  # what the last step has left is as long as it was before
    assert held_bytes() == before
    bare.engine.unload_adapter("patterns")
    model: Any = shelf._model
    assert not [name for name, module in model.named_modules() if "forward" in module.__dict__]


@pytest.mark.lane("long")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_asleep_and_awake_again_it_is_the_same(
    harness: Make, adapters: dict[str, Path], dtype: str
) -> None:
    """In bfloat16 the base's weights are dropped under the adapters that share them."""
    names = ("lora", "prompt", "saved", "dora")
    specs = tuple(making.spec(adapters[name]) for name in names)
    one = harness(dtype=dtype, adapters=specs)
    before = [ask(one, name, PROMPTS[0]) for name in ("", *names)]
    one.engine.sleep()
    with pytest.raises(LoadError, match="asleep"):
        one.engine.load_adapter(making.spec(adapters["rslora"]))
    one.engine.wake()
    assert [ask(one, name, PROMPTS[0]) for name in ("", *names)] == before
    one.engine.unload_adapter("dora")
    one.engine.load_adapter(making.spec(adapters["dora"]))
    assert ask(one, "dora", PROMPTS[0]) == before[-1]


def own_tensors(adapter: Adapter, shelf: Any) -> list[torch.Tensor]:
    if adapter.model is not None:
        found: list[torch.Tensor] = shelf._skeletons.own_tensors(adapter.model)
        return found
    if adapter.prompt is not None:
        return [adapter.prompt]
    return [tensor for one in adapter.factors.values() for tensor in (one.down, one.up)]


def held_bytes() -> int:
    """Memory of all tensors there are, each storage once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
