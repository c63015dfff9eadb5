"""Estimates by headers, and the refusal of what cannot fit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from servekit.config.schema import ModelConfig
from servekit.engines.model_files import gguf_convert as engines_gguf
from servekit.errors import ConfigError
from servekit.supervisor.deployments.plan import Source
from servekit.supervisor.scheduling import memory_estimator
from servekit.supervisor.scheduling.memory_estimator import (
    Estimate,
    estimate,
)
from servekit.supervisor.scheduling.memory_requests import CONTEXT_BYTES, Misplaced
from servekit.supervisor.scheduling.placement import place
from servekit.system.gpu.gpus import Gpu
from tests.integration.instance import write_config
from tests.unit.engines.origins import write_tiny_gguf
from tests.unit.model_metadata.ctranslate2_file import write_model
from tests.unit.model_metadata.test_kv_cache_shape import LLAMA_8B
from tests.unit.model_metadata.test_safetensors import write

GIB = 2**30
#: Numbers in Llama 3.1 8B.
NUMBERS = 8_030_261_248


def gpus(count: int = 1, total: int = 80) -> tuple[Gpu, ...]:
    return tuple(Gpu(i, f"GPU-{i}", "H100", total * GIB, total * GIB) for i in range(count))


def folder(path: Path, kind: str = "BF16", **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**LLAMA_8B, "torch_dtype": "bfloat16", **config}))
    write(path / "model.safetensors", {"all": (kind, [NUMBERS])})
    return path


def of(path: Path, count: int = 1, **keys: Any) -> Estimate:
    model = ModelConfig.model_validate(
        {"name": "a", "path": str(path), "gpus_per_replica": max(1, count), **keys}
    )
    found = estimate(model, place([model], gpus(count), 4)[0], {"HOME": str(path)})
    assert found is not None
    return found


def test_a_model_of_ctranslate2(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m", a=2**20)
    found = of(path, engine="faster_whisper")
    assert found.weights_bytes == 2 * 2**20 and not found.on_each_requests
    assert found.on_each_workspace_bytes == CONTEXT_BYTES
    for keys, size in (
        ({"dtype": "float32"}, 4),
        ({"options": {"compute_type": "int8_float16"}}, 1),
        ({"dtype": "float32", "options": {"compute_type": "int8"}}, 1),
    ):
        assert of(path, engine="faster_whisper", **keys).weights_bytes == size * 2**20


def test_llama_on_one_gpu(tmp_path: Path) -> None:
    found = of(folder(tmp_path / "m"))
    assert found.weights_bytes == 2 * NUMBERS
    assert found.kv_1k_bytes == 128 * 2**20
    assert found.context == 131072
    assert found.on_each_kv_bytes == 16 * GIB
    assert CONTEXT_BYTES < found.on_each_workspace_bytes < 2 * GIB
    assert found.on_each_least_bytes == pytest.approx(32.3 * GIB, abs=0.5 * GIB)


@pytest.mark.parametrize(
    ("keys", "config", "kind", "each"),
    [
        ({"dtype": "float32"}, {}, "BF16", 4),
        ({}, {}, "F32", 2),  # as config.json says
        ({}, {"torch_dtype": None}, "F32", 4),
        ({"engine": "vllm"}, {"torch_dtype": "float32"}, "F32", 2),
        ({}, {"quantization_config": {}}, "I8", 1),
        ({"engine": "vllm", "options": {"quantization": "fp8"}}, {}, "BF16", 1),
        (
            {"engine": "vllm", "options": {"engine_args": {"quantization": "fp8"}}},
            *({}, "BF16", 1),
        ),
        ({"device": "cpu"}, {}, "BF16", 4),
    ],
)
def test_types(
    tmp_path: Path, keys: dict[str, Any], config: dict[str, Any], kind: str, each: int
) -> None:
    found = of(folder(tmp_path / "m", kind, **config), **keys)
    assert found.weights_bytes == each * NUMBERS


def test_what_is_quantised_while_it_loads_caches_as_ever(tmp_path: Path) -> None:
    found = of(folder(tmp_path / "m"), engine="vllm", options={"quantization": "fp8"})
    assert found.kv_1k_bytes == 128 * 2**20


@pytest.mark.parametrize(
    ("method", "linear"),
    [
        ("int8", 4096 * (14336 + 5)),
        ("fp8", 4096 * (14336 + 4)),
        ("int4", 4096 * 14336 * 9 // 16),
    ],
)
def test_transformers_quantises_linear_layers_alone(
    tmp_path: Path, method: str, linear: int
) -> None:
    path = folder(tmp_path / "m")
    shapes = {
        "model.embed_tokens.weight": [128256, 4096],
        "model.layers.0.mlp.down_proj.weight": [4096, 14336],
        "model.layers.0.mlp.experts.0.down_proj.weight": [4096, 64],
        "model.norm.weight": [4096],
        "lm_head.weight": [128256, 4096],
    }
    write(path / "model.safetensors", {name: ("BF16", shape) for name, shape in shapes.items()})
    found = of(path, options={"quantization": method})
    kept = 2 * 128256 * 4096 + 4096 * 64 + 4096
    assert found.weights_bytes == linear + 2 * kept
    assert found.kv_1k_bytes == 128 * 2**20


@pytest.mark.parametrize(
    "options", [{"cache_type": "fp8"}, {"engine_args": {"kv_cache_dtype": "fp8_e5m2"}}]
)
def test_a_cache_of_8_bits_is_half_as_large(tmp_path: Path, options: dict[str, Any]) -> None:
    found = of(folder(tmp_path / "m"), engine="vllm", options=options)
    assert found.kv_1k_bytes == 64 * 2**20
    assert found.weights_bytes == 2 * NUMBERS


def test_a_converted_file_is_as_large_as_the_engine_makes_it() -> None:
    assert memory_estimator._FLOAT32_BELOW == engines_gguf.FLOAT32_BELOW


def test_it_is_divided_among_gpus_with_one_head_on_each_at_least(tmp_path: Path) -> None:
    one, four = of(folder(tmp_path / "m")), of(folder(tmp_path / "m"), 4)
    assert four.on_each_weights_bytes == one.weights_bytes // 4
    assert four.on_each_kv_bytes == one.on_each_kv_bytes // 4
    sixteen = of(folder(tmp_path / "m"), 16)
    assert sixteen.on_each_kv_bytes == one.on_each_kv_bytes // 8
    assert sixteen.weights_bytes == one.weights_bytes


@pytest.mark.parametrize(
    ("keys", "each"),
    [
        ({}, 1000 + 600),
        ({"parallel": "device_map"}, (2000 + 600) // 2),
        ({"engine": "vllm"}, (2000 + 600) // 2),
    ],
)
def test_what_reads_media_is_on_each_gpu(tmp_path: Path, keys: dict[str, Any], each: int) -> None:
    path = folder(tmp_path / "m")
    names = {
        "language_model.model.layers.0.self_attn.q_proj.weight": 999,
        "lm_head.weight": 1,
        "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight": 100,
        "multi_modal_projector.linear_1.weight": 50,
        "model.visual.blocks.0.attn.qkv.weight": 50,
        "thinker.audio_tower.layers.0.fc1.weight": 50,
        "model.connector.modality_projection.proj.weight": 25,
        "model.embed_audio.embedding.weight": 25,
    }
    tensors = {name: ("BF16", [count]) for name, count in names.items()}
    write(path / "model.safetensors", tensors)
    assert of(path, 2, **keys).on_each_weights_bytes == each
    assert of(path, 1, **keys).on_each_weights_bytes == 2600


def test_a_shorter_context_takes_less(tmp_path: Path) -> None:
    found = of(folder(tmp_path / "m"), max_context=8192)
    assert (found.context, found.on_each_kv_bytes) == (8192, GIB)


def test_a_draft_model_is_counted_too(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    large, small = folder(tmp_path), folder(tmp_path / "small")
    alone, draft = of(large), of(small)
    asked: dict[str, Any] = {"method": "draft", "model": str(small)}
    both = of(large, options={"speculative": asked})
    assert both.weights_bytes == alone.weights_bytes + draft.weights_bytes
    assert both.on_each_kv_bytes == alone.on_each_kv_bytes + draft.on_each_kv_bytes
    assert both.on_each_least_bytes > alone.on_each_least_bytes + draft.weights_bytes
    assert both.on_each_requests[0][1] == 2 * alone.on_each_requests[0][1]
    missing = of(large, options={"speculative": asked | {"model": str(tmp_path / "none")}})
    assert missing.unknown.startswith("draft model: ")
    plain = of(large, options={"speculative": {"method": "ngram"}})
    assert plain == alone


def test_a_draft_in_llama_cpp_is_counted_too(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    asked = {"method": "draft", "model": str(path)}
    alone = of(path, engine="llamacpp")
    both = of(path, engine="llamacpp", options={"speculative": asked, "cpu_moe_layers": None})
    assert both.weights_bytes == 2 * alone.weights_bytes > 0
    assert both.on_each_kv_bytes == 2 * alone.on_each_kv_bytes > 0


def test_an_embedding_model_remembers_nothing(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    (path / "modules.json").write_text("[]")
    assert of(path).kv_1k_bytes == 0


def test_gguf(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    asis, converted = of(path, engine="llamacpp"), of(path)
    assert path.stat().st_size > asis.weights_bytes > 0
    assert converted.weights_bytes > 3 * asis.weights_bytes  # float32 for eight bits and a scale
    assert asis.on_each_floor_bytes == 0, "what does not fit stays in the host's memory"


def test_a_width_that_is_no_number_is_told(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", llama__embedding_length=math.inf)
    assert of(path, engine="llamacpp").unknown == "its embedding_length is inf"


def test_experts_on_the_host_take_no_gpu_memory(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "moe.gguf", float32=True, experts=4)
    plain = of(path, engine="llamacpp").weights_bytes
    found = [
        plain - of(path, engine="llamacpp", options={"cpu_moe_layers": layers}).weights_bytes
        for layers in (0, 1, 99)
    ]
    experts = 4 * 4 * 3 * 96 * 64
    assert found == [0, experts, 2 * experts]


def test_the_projector_of_a_gguf_model(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    plain = of(path, engine="llamacpp").weights_bytes
    (tmp_path / "mmproj-F16.gguf").write_bytes(bytes(1000))
    elsewhere = tmp_path / "other.gguf"
    elsewhere.write_bytes(bytes(500))
    options: list[dict[str, Any]] = [{}, {"mmproj": False}, {"mmproj": str(elsewhere)}]
    found = [of(path, engine="llamacpp", options=one).weights_bytes - plain for one in options]
    assert found == [1000, 0, 500]
    (tmp_path / "mmproj-Q8_0.gguf").touch()  # none is taken then
    assert of(path, engine="llamacpp").weights_bytes == plain


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 200_000])
def test_a_damaged_folder_is_told_in_a_sentence(tmp_path: Path, text: str) -> None:
    path = folder(tmp_path / "m")
    (path / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json is damaged: it has to be JSON" in of(path).describe_claim(
        0
    )
    (path / "config.json").write_text(text)
    assert of(path).describe_claim(0).endswith("config.json is damaged: it has to be a JSON object")


def test_what_is_not_here_is_not_known(tmp_path: Path) -> None:
    model = ModelConfig.model_validate({"name": "a", "path": "org/name"})
    [spot] = place([model], gpus(), 4)
    found = estimate(model, spot, {"HOME": str(tmp_path)})
    assert found is not None
    assert found.unknown == "not fetched yet, so its size is not known"
    assert found.describe_claim(0) == found.unknown
    echo = ModelConfig.model_validate({"name": "a", "path": "x", "engine": "echo"})
    assert estimate(echo, spot, {}) is None
    texts = ModelConfig(name="m", path=str(tmp_path))  # as the folder of a plugin's engine
    assert estimate(texts, spot, {}) is None


@pytest.mark.parametrize(
    ("total", "keys", "at", "words"),
    [
        (
            10,
            {},
            "models[0].path",
            "model 'a' does not fit: its weights alone take 15.0 GiB of each GPU, and GPU 0 (H100) "
            "has 10.0 GiB, less 1.0 GiB reserved: 6.0 GiB too few",
        ),
        (
            80,
            {"memory": "12GiB"},
            "models[0].memory",
            "its weights alone take 15.0 GiB of each GPU, and it claims 12.0 GiB of GPU 0 (H100): "
            "3.0 GiB too few",
        ),
        (
            80,
            {"memory": "6GiB", "gpus_per_replica": 2},
            "models[0].memory",
            "its weights alone take 15.0 GiB in all, 7.5 GiB of each GPU, and it claims 6.0 GiB",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_file_and_line(
    tmp_path: Path, total: int, keys: dict[str, Any], at: str, words: str
) -> None:
    model = {"name": "a", "path": str(folder(tmp_path / "m")), **keys}
    file = write_config(tmp_path, [model], sections={"gpus": {"reserve": "1GiB"}})
    with pytest.raises(ConfigError) as caught:
        Source(file, environ={"HOME": str(tmp_path)}).plan(
            gpus(2, total)[: 1 + ("gpus_per_replica" in keys)]
        )
    assert words in caught.value.message
    assert at in caught.value.message


def test_so_they_are_on_the_cpu(tmp_path: Path) -> None:
    model = {"name": "a", "path": str(folder(tmp_path / "m")), "device": "cpu", "memory": "50MiB"}
    source = Source(write_config(tmp_path, [model]), environ={"HOME": str(tmp_path)})
    with pytest.raises(ConfigError) as caught:
        source.plan(())
    said = "model 'a' does not fit: its weights alone take 29.9 GiB of this machine's memory, and "
    assert f"{said}it claims 50 MiB: 29.9 GiB too few" in caught.value.message
    assert "models[0].memory" in caught.value.message


def test_one_that_fits_is_told_with_the_plan(tmp_path: Path) -> None:
    model = {"name": "a", "path": str(folder(tmp_path / "m")), "memory": "20GiB"}
    file = write_config(tmp_path, [model])
    plan = Source(file, environ={"HOME": str(tmp_path)}).plan(gpus())
    note = plan.estimates["a"].describe_claim(20 * GIB)
    assert note.endswith("too few for a request that fills the context")


def test_requests_that_fit_beside_the_weights(tmp_path: Path) -> None:
    found = of(folder(tmp_path / "m"))
    room = 80 * GIB - found.on_each_weights_bytes - found.on_each_workspace_bytes
    count = room // (8 * 128 * 2**20)
    assert f"{count} of 8192 tokens" in found.describe_requests(80 * GIB)
    assert found.describe_requests(found.on_each_weights_bytes) == ""


@pytest.mark.parametrize(
    ("keys", "advice"),
    [
        (
            {"engine": "transformers"},
            "What would fit: `options: {quantization: int4}` at least halves",
        ),
        ({"engine": "vllm"}, "What would fit: `options: {quantization: fp8}` takes about 7.5 GiB"),
    ],
)
def test_advice_for_weights_that_do_not_fit(
    tmp_path: Path, keys: dict[str, Any], advice: str
) -> None:
    path = folder(tmp_path / "m")
    model = ModelConfig.model_validate({"name": "a", "path": str(path), **keys})
    where = place([model], gpus(1, 12), 4)[0]
    found = of(path, **keys)
    with pytest.raises(Misplaced) as caught:
        memory_estimator.check_weights_fit(0, model, where, found, None)
    assert advice in caught.value.message
