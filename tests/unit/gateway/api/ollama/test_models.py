"""Models in Ollama's words: sizes, families, capabilities and tags."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.errors import ModelNotFound
from servekit.gateway.api.ollama import models
from servekit.gateway.api.ollama.models import (
    describe_model,
    details,
    find_model,
    list_running,
    tags,
)
from servekit.gateway.api.ollama.response import timestamp
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.routing.router import Router
from servekit.protocol.messages import (
    Dialect,
    ModelInfo,
    ModelStatus,
    Preset,
    SamplingParams,
    Topology,
)
from servekit.protocol.residency import ResidencyStatus
from tests.unit.gateway.conftest import ENDLESS, ENDLESS_TOKENS, Service

INFO = ModelInfo(8192, 1, True, "LlamaForCausalLM", "float32", "cpu", parameters=134_515_008)
NEVER = "9999-12-31T23:59:59Z"
STATUS = ModelStatus("m", "transformers", "org/model", 1_700_000_000, (), INFO)


def serve(router: Router, *models: ModelStatus) -> None:
    router.apply_topology(Topology(models))


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    router = Router("gateway/test")
    yield router
    serve(router)


def described(router: Router, **fields: Any) -> Any:
    serve(router, replace(STATUS, info=replace(INFO, **fields)))
    return details(router.routes["m"])


async def test_a_model_is_found_with_its_tag_or_without(router: Router) -> None:
    serve(router, STATUS, replace(STATUS, name="n:7b"))
    for name in ("m", "m:latest"):
        assert find_model(router, name).status.name == "m"
    assert find_model(router, "n:7b").status.name == "n:7b"
    for name in ("m:7b", "n", "n:latest", "z:latest"):
        with pytest.raises(ModelNotFound):
            find_model(router, name)


async def test_a_model_without_a_tag_is_the_latest_one(router: Router) -> None:
    serve(router, STATUS, replace(STATUS, name="n:7b", path="other"))
    first, second = tags(router).models
    assert (first.name, first.model, second.name) == ("m:latest", "m:latest", "n:7b")
    assert first.modified_at == "2023-11-14T22:13:20Z"
    assert first.size == INFO.size_bytes == 4 * 134_515_008
    assert len(first.digest) == 64 and first.digest != second.digest


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (0, ""),
        (999, "999"),
        (1000, "1K"),
        (1500, "2K"),
        (10**6, "1M"),
        (134_515_008, "134.52M"),
        (999_999_999, "1000.00M"),
        (8 * 10**9, "8B"),
        (7_615_616_512, "7.6B"),
    ],
)
async def test_a_number_of_parameters_is_short(router: Router, parameters: int, said: str) -> None:
    assert described(router, parameters=parameters).parameter_size == said


@pytest.mark.parametrize(
    ("architecture", "family"),
    [
        ("LlamaForCausalLM", "llama"),
        ("Qwen3ForSequenceClassification", "qwen3"),
        ("BertModel", "bert"),
        ("gpt2", "gpt2"),
        ("Formula", "formula"),
    ],
)
async def test_a_family_is_the_architecture_without_its_task(
    router: Router, architecture: str, family: str
) -> None:
    found = described(router, architecture=architecture)
    assert (found.family, found.families) == (family, [family])


@pytest.mark.parametrize(
    ("dtype", "level"),
    [("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16"), ("Q4_K_M", "Q4_K_M")],
)
async def test_a_number_format_has_ollamas_name(router: Router, dtype: str, level: str) -> None:
    assert described(router, dtype=dtype).quantization_level == level


async def test_little_is_told_of_a_model_that_was_never_loaded(router: Router) -> None:
    serve(router, replace(STATUS, info=None))
    found = details(router.routes["m"])
    assert (found.family, found.families, found.parameter_size) == ("", [], "")
    assert (found.quantization_level, found.format) == ("", "safetensors")
    shown = describe_model(router.routes["m"])
    assert (shown.capabilities, shown.model_info) == ([], {})
    assert tags(router).models[0].size == 0


async def test_a_preset_names_the_model_that_it_is_of(router: Router) -> None:
    serve(router, replace(STATUS, presets=(Preset("p", {}),)))
    assert details(router.find("p")).parent_model == "m"
    assert details(router.find("m")).parent_model == ""


@pytest.mark.parametrize(
    ("fields", "capabilities"),
    [
        ({}, ["completion"]),
        ({"serves": ("generate", "images")}, ["completion", "vision"]),
        ({"serves": ("embed",)}, ["embedding"]),
        # tools need both a template that shows them and a way to read calls
        ({"serves": ("generate", "tools")}, ["completion"]),
        ({"dialect": Dialect("hermes")}, ["completion"]),
        (
            {"serves": ("generate", "tools"), "dialect": Dialect("hermes")},
            ["completion", "tools"],
        ),
        ({"dialect": Dialect(think_end="</think>")}, ["completion", "thinking"]),
        ({"dialect": Dialect("harmony")}, ["completion", "thinking"]),
    ],
)
async def test_what_a_model_can_do(
    router: Router, fields: dict[str, Any], capabilities: list[str]
) -> None:
    serve(router, replace(STATUS, info=replace(INFO, **fields)))
    assert describe_model(router.routes["m"]).capabilities == capabilities


async def test_facts_of_a_model_have_the_names_of_gguf(router: Router) -> None:
    serve(router, replace(STATUS, info=replace(INFO, embedding_size=576)))
    shown = describe_model(router.routes["m"])
    assert shown.model_info == {
        "general.architecture": "llama",
        "general.parameter_count": 134_515_008,
        "llama.context_length": 8192,
        "llama.embedding_length": 576,
    }
    assert shown.modelfile == "# transformers: org/model\n"
    serve(router, STATUS)
    assert "llama.embedding_length" not in describe_model(router.routes["m"]).model_info


async def test_only_models_that_can_serve_now_are_running(service: Service) -> None:
    [worker, _] = await service.up(2)
    router = service.router
    status = router.routes["m"].status
    replicas = tuple(replace(one, gpu_bytes=size) for size, one in enumerate(status.replicas, 3))
    loaded = replace(status, replicas=replicas, info=worker.runner.info)
    serve(router, loaded, replace(STATUS, name="n"))
    [running] = list_running(router).models
    assert (running.name, running.size_vram, running.context_length) == ("m:latest", 7, 8192)
    assert running.expires_at == NEVER


@pytest.mark.parametrize("stays_s", [math.inf, 2e9, None])
async def test_a_model_that_stays_loaded_never_leaves(
    service: Service, stays_s: float | None
) -> None:
    await service.up()
    residence = ResidencyStatus("on_demand", "resident", stays_s=stays_s)
    serve(service.router, replace(service.router.routes["m"].status, residence=residence))
    [running] = list_running(service.router).models
    assert running.expires_at == NEVER


async def test_a_model_stays_its_time_after_the_requests_that_it_has_now(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.up(**ENDLESS)
    residence = ResidencyStatus("on_demand", "resident", stays_s=300.0)
    serve(service.router, replace(service.router.routes["m"].status, residence=residence))
    params = SamplingParams(max_tokens=ENDLESS_TOKENS)
    call = service.router.queue_call(InflightRequest("m", params, prompt="x"))
    later = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + 10_000)
    monkeypatch.setattr(models, "time", later)
    [running] = list_running(service.router).models
    leaves = datetime.fromisoformat(running.expires_at).timestamp()
    assert leaves - time.time() == pytest.approx(300.0, abs=30)
    call.cancel()


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (0, "1970-01-01T00:00:00Z"),
        (1_700_000_000.25, "2023-11-14T22:13:20.250000Z"),
        (1_700_000_000.0000004, "2023-11-14T22:13:20Z"),
        (1_700_000_000.9999996, "2023-11-14T22:13:21Z"),
        (1_700_000_000.000001, "2023-11-14T22:13:20.000001Z"),
    ],
)
def test_a_time_is_utc_to_the_microsecond(at: float, said: str) -> None:
    assert timestamp(at) == said
