"""An adapter that does nothing, or the wrong thing, is refused by the name of its layer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import peft.tuners.boft.layer as boft_layer
import pytest
import torch
from safetensors.torch import load_file, save_file

from servekit.engines.transformers.batching.self_check import probe_prompt
from servekit.engines.transformers.lora import (
    batched_lora,
    boft,
    peft_model,
    verify,
)
from servekit.engines.transformers.lora.adapter_files import WEIGHTS
from servekit.errors import EngineFailed, RequestError
from tests.unit.engines.harness import PROMPTS, Harness, assert_alive, make_spec
from tests.unit.engines.transformers.lora import making

LAYER = r"model\.layers\.0\.self_attn\.q_proj"


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Harness]:
    shared = Harness(make_spec(tiny_model))
    yield shared
    shared.close()


def refused(engine: Harness, folder: Path, message: str) -> None:
    """The adapter is refused, nothing of it is left, and the base is what it was."""
    before = engine.generate(PROMPTS[0], max_tokens=8, ignore_eos=True)
    with pytest.raises(RequestError, match=message):
        engine.engine.load_adapter(making.spec(folder, "broken"))
    shelf: Any = engine.engine._adapters
    assert not shelf._served and not shelf._runner.mixing._layers and not engine.engine._rows
    assert engine.generate(PROMPTS[0], max_tokens=8, ignore_eos=True) == before
    assert_alive(engine)


def test_a_boft_whose_layers_give_zeros(
    engine: Harness, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = boft_layer.Linear.forward

    def zeroed(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros_like(right(self, x, *args, **kwargs))

    monkeypatch.setattr(boft_layer.Linear, "forward", zeroed)
    refused(engine, adapters["boft"], f"{LAYER} gives only zeros")


@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_a_boft_whose_kernel_is_wrong(
    engine: Harness, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    """As the extension that PEFT compiles is known to do: its matrix is zeros."""

    class Broken:
        @staticmethod
        def forward(blocks: torch.Tensor) -> tuple[torch.Tensor]:
            return (boft.BlockDiagonal.forward(blocks)[0] * factor,)

    uses: list[Any] = [Broken]
    right = boft.use_torch

    def use() -> None:
        """The broken one when the layers are made, ours for the reference."""
        right()
        if uses:
            monkeypatch.setattr(boft_layer, "_FBD_CUDA", uses.pop())

    monkeypatch.setattr(boft, "use_torch", use)
    message = "gives only zeros" if factor == 0 else "in float32 on the CPU"
    refused(engine, adapters["boft"], f"{LAYER} .*{message}")


def test_one_that_has_not_been_trained_changes_nothing(
    engine: Harness, tiny_model: Path, tmp_path: Path
) -> None:
    fresh = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type=making.TASK)
    folder = making.write(tiny_model, tmp_path / "fresh", fresh)
    refused(engine, folder, f"has no effect: each of its 2 layers, such as {LAYER}")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(
    engine: Harness, adapters: dict[str, Path], tmp_path: Path, value: float
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(adapters["lora"], folder)
    tensors = load_file(folder / WEIGHTS)
    name = next(name for name in tensors if "layers.1.self_attn.v_proj.lora_B" in name)
    tensors[name][0, 0] = value
    save_file(tensors, folder / WEIGHTS)
    refused(engine, folder, r"model\.layers\.1\.self_attn\.v_proj gives NaN or Inf")


def test_virtual_tokens_that_are_no_numbers(
    engine: Harness, adapters: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(adapters["prompt"], folder)
    tensors = load_file(folder / WEIGHTS)
    tensors["prompt_embeddings"][2] = float("nan")
    save_file(tensors, folder / WEIGHTS)
    refused(engine, folder, "logits are NaN or Inf")


@pytest.mark.parametrize(
    ("name", "owner", "what"),
    [
        ("lora", batched_lora, "_add_products"),
        ("prompt", batched_lora.BatchedLora, "_embed_tokens"),
    ],
)
def test_one_that_is_wrong_in_a_batch_only(
    engine: Harness,
    adapters: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    owner: Any,
    what: str,
) -> None:
    """Right by itself, but the engine's batch does not add what it should."""
    nothing = {
        "_add_products": lambda *args: None,
        "_embed_tokens": lambda self, plain, *args: plain(*args),
    }
    monkeypatch.setattr(owner, what, nothing[what])
    refused(engine, adapters[name], "differs in a batch with others")


def test_one_that_disturbs_the_base(
    engine: Harness, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def everyone(self: Any, part: Any, adapter: Any) -> None:
        self.runs = [(adapter.uid, 0, 10**6)]

    monkeypatch.setattr(batched_lora.BatchLayout, "_take_part", everyone)
    refused(engine, adapters["lora"], "With the adapter loaded, the base model has other logits")


def test_a_merge_that_goes_wrong(
    engine: Harness, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = boft_layer.Linear.get_delta_weight

    def half(self: Any, adapter: str) -> Any:
        matrix, scale = right(self, adapter)
        return matrix * 0.5, scale

    monkeypatch.setattr(boft_layer.Linear, "get_delta_weight", half)
    refused(engine, adapters["boft"], f"{LAYER} is not right .* merged")


def test_a_base_that_is_written_to_ends_the_engine(
    tiny_model: Path, adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not happen; should it, no one is to be served by what is left."""
    folder = tmp_path / "copy"
    shutil.copytree(adapters["lora"], folder)
    tensors = load_file(folder / WEIGHTS)
    one = Harness(make_spec(tiny_model))
    try:
        tensors["base_model.model.model.embed_tokens.weight"] = torch.randn(
            one.engine.vocab_size, 64
        )
        save_file(tensors, folder / WEIGHTS)
        monkeypatch.setattr(peft_model, "_give_own_memory", lambda *args: None)
        with pytest.raises(EngineFailed, match="changed the weights of the base"):
            one.engine.load_adapter(making.spec(folder))
        one.until_true(lambda: one.engine.fatal is not None)
    finally:
        one.close()


def test_the_probes_prompt_is_in_the_vocabulary() -> None:
    for size in (16, 400, 150_000):
        ids = probe_prompt(11, size)
        assert len(ids) == 11 and all(0 <= token < size for token in ids)


def test_a_neighbour_is_compared_as_far_as_it_goes_on_alike() -> None:
    allowed = verify.tolerance_of(torch.device("cpu"), torch.bfloat16)
    logits = torch.eye(3)
    before = verify.PromptOutput((4, 5, 6), logits)
    parted = verify.PromptOutput(
        (4, 7, 8), logits[[0, 1, 0]]
    )  # after a near-tie at the second token
    assert verify.verify_undisturbed(parted, before, allowed, "adapter a") == 0
    for wrong in (
        verify.PromptOutput((4, 7, 8), logits[[0, 2, 0]]),
        verify.PromptOutput((4, 5, 6), logits[[0, 1, 0]]),
    ):
        with pytest.raises(
            RequestError, match="With the adapter loaded, adapter a has other logits"
        ):
            verify.verify_undisturbed(wrong, before, allowed, "adapter a")
