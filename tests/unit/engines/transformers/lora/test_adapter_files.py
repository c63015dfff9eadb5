"""What is refused before anything is loaded: with a sentence, and with nothing left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from servekit.engines.transformers.lora.adapter_files import CONFIG, WEIGHTS
from servekit.errors import RequestError
from servekit.protocol.adapters import AdapterSpec
from tests.unit.engines.harness import PROMPTS, Harness, make_spec, write_tiny_llama
from tests.unit.engines.transformers.lora import making

Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Any:
    shared = Harness(make_spec(tiny_model, options={"max_lora_rank": 6}))
    yield shared
    shared.close()


def config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return rewrite


def as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


def cut(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-100])


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
WRONG: dict[str, tuple[Change, str]] = {
    "no configuration": (lambda folder: (folder / CONFIG).unlink(), "no adapter_config.json"),
    "broken configuration": (lambda folder: _write(folder, "{"), "cannot be read"),
    "a list": (lambda folder: _write(folder, "[]"), "not a JSON object"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), f"no {WEIGHTS}"),
    "a pickle": (as_pickle, "adapter_model.bin, a pickle"),
    "cut short": (cut, "damaged"),
    "no kind": (config(peft_type=None), "no peft_type"),
    "no known kind": (config(peft_type="MAGIC"), "MAGIC adapters are not served: no test"),
    "not proved": (config(peft_type="LILY"), "LILY adapters are not served: no test has proved"),
    "a second model": (
        config(peft_type="SHADOW", shadow_model="somebody/elses-model"),
        "SHADOW adapters are not served: it loads a second model",
    ),
    "Megatron": (config(megatron_config={"a": 1}, megatron_core="os"), "megatron_config"),
    "files to begin with": (
        config(init_lora_weights="corda", corda_config={"cache_file": "/tmp/x"}),
        "corda_config",
    ),
    "quantised to begin with": (config(init_lora_weights="loftq"), "initialised with loftq"),
    "covariances": (config(lora_ga_config={"cache_file": "/tmp/x"}), "lora_ga_config"),
    "prefix tuning": (config(peft_type="PREFIX_TUNING"), "PREFIX_TUNING adapters are not served"),
    "another task": (config(task_type="SEQ_CLS"), "SEQ_CLS"),
    "repeated layers": (config(layer_replication=[[0, 2]]), "layer_replication"),
    "rank": (config(r=7), "rank is 7, and at most 6"),
    "rank pattern": (config(rank_pattern={"q_proj": 64}), "rank is 64"),
    "no such layers": (config(target_modules=["wq", "wv"]), "Target modules"),
    "rank unlike the file": (config(r=2), r"\[4, 64\].*q_proj.*needs \[2, 64\]"),
    "a tensor less": (weights(lambda t: t.pop(FIRST)), "lacks model.layers.0.self_attn.q_proj"),
    "a tensor more": (
        weights(lambda t: t.update({FIRST.replace("layers.0", "layers.7"): t[FIRST].clone()})),
        "layers.7.self_attn.q_proj.lora_A.weight, which model does not have",
    ),
}


def _write(folder: Path, text: str) -> None:
    (folder / CONFIG).write_text(text)


@pytest.mark.parametrize("case", sorted(WRONG))
def test_what_is_wrong_is_named(
    engine: Harness, adapters: dict[str, Path], tmp_path: Path, case: str
) -> None:
    change, message = WRONG[case]
    folder = tmp_path / "copy"
    shutil.copytree(adapters["lora"], folder)
    change(folder)
    with pytest.raises(RequestError, match=message) as caught:
        engine.engine.load_adapter(making.spec(folder))
    assert caught.value.status == 400 and str(caught.value).endswith((".", "…"))
    shelf: Any = engine.engine._adapters
    assert not shelf._served and not shelf._runner.mixing._layers


def test_an_adapter_for_another_base_is_refused_by_its_shapes(
    engine: Harness, tmp_path: Path
) -> None:
    wide = write_tiny_llama(tmp_path / "wide", hidden_size=96)
    made = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type=making.TASK)
    folder = making.write(wide, tmp_path / "adapter", made)
    spec = making.spec(folder)
    with pytest.raises(RequestError, match=r"made for .*wide .*, and this model is model"):
        engine.engine.load_adapter(spec)
    with pytest.raises(RequestError, match=r"\[4, 96\] .* model needs \[4, 64\].*wide"):
        engine.engine.load_adapter(structs.replace(spec, any_base=True))


def test_another_name_for_the_base_is_refused_unless_any_will_do(
    engine: Harness, adapters: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(adapters["lora"], folder)
    config(base_model_name_or_path="somebody/elses-model")(folder)
    spec = making.spec(folder, "moved")
    with pytest.raises(RequestError, match="made for somebody/elses-model") as caught:
        engine.engine.load_adapter(spec)
    assert caught.value.status == 400
    info = engine.engine.load_adapter(structs.replace(spec, any_base=True))
    assert "made for somebody/elses-model" in info.why
    engine.engine.unload_adapter("moved")
    assert "made for" not in engine.engine.load_adapter(making.spec(adapters["lora"])).why
    engine.engine.unload_adapter("lora")


def test_what_is_no_folder(engine: Harness, tmp_path: Path, tiny_model: Path) -> None:
    for path, revision, message in (
        (str(tmp_path / "none"), None, "no such file or folder"),
        (str(tiny_model), None, "a whole model, not an adapter"),
        (str(tmp_path), "main", "no revisions"),
        ("pypi:thing==1/x.gguf", None, "is no adapter"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.engine.load_adapter(AdapterSpec("x", path, revision))
    assert len(engine.generate(PROMPTS[0], max_tokens=2, ignore_eos=True)) == 2


def test_weights_of_the_base_in_the_file_stay_the_adapters(
    engine: Harness, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """A file may bring embeddings of the base along, trained further; the base keeps its own."""
    folder = tmp_path / "copy"
    shutil.copytree(adapters["lora"], folder)
    name = "base_model.model.model.embed_tokens.weight"
    shape = (engine.engine.vocab_size, 64)
    weights(lambda t: t.update({name: torch.randn(shape)}))(folder)
    before = engine.generate(PROMPTS[0], max_tokens=8, ignore_eos=True)
    info = engine.engine.load_adapter(making.spec(folder, "embeds"))
    assert info.mode == "grouped" and "weights of the base" in info.why
    assert engine.generate(PROMPTS[0], max_tokens=8, ignore_eos=True) == before
    assert engine.generate(PROMPTS[0], adapter="embeds", max_tokens=8, ignore_eos=True) != before
    engine.engine.unload_adapter("embeds")


def test_factors_that_overflow_the_models_type_are_refused(
    tiny_model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Right as PEFT computes it, and infinite once the scaling is in the weights."""
    folder = tmp_path / "copy"
    shutil.copytree(adapters["lora"], folder)

    def stretch(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.sign() * (1e-6 if "lora_A" in name else 3e4)

    weights(stretch)(folder)
    config(lora_alpha=16)(folder)  # of rank 4
    half = Harness(make_spec(tiny_model, dtype="float16"))
    try:
        before = half.generate(PROMPTS[0], max_tokens=8, ignore_eos=True)
        with pytest.raises(
            RequestError, match=r"beyond the range of float16, the model's own"
        ) as e:
            half.engine.load_adapter(making.spec(folder))
        assert e.value.status == 400
        assert half.generate(PROMPTS[0], max_tokens=8, ignore_eos=True) == before
    finally:
        half.close()
