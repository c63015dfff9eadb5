"""The models as Ollama's clients see them: /api/tags, /api/ps, /api/show."""

from __future__ import annotations

import hashlib
import re
import time
from typing import Any

from servekit.errors import ModelNotFound
from servekit.gateway.api.ollama.response import timestamp
from servekit.gateway.api.ollama.response_types import (
    Capability,
    OllamaDetails,
    OllamaModel,
    OllamaModels,
    OllamaRunning,
    OllamaRunningModel,
    OllamaShown,
)
from servekit.gateway.routing.adapter_route import base_of
from servekit.gateway.routing.model_queue import ModelQueue
from servekit.gateway.routing.router import Router
from servekit.protocol.messages import ModelInfo

#: The version of Ollama's API that is served here; clients require a minimum.
API_VERSION = "0.12.6"

LATEST = ":latest"
_LEVELS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
#: Engines without local weights: made-up ones, and remote endpoints.
_NO_FILES = ("echo", "openai")
_KIND = re.compile(r"(For[A-Z]\w*|Model)$")
#: `expires_at` of models that stay loaded.
_NEVER = "9999-12-31T23:59:59Z"
_FOR_EVER_S = 1e9


def find_model(router: Router, name: str) -> ModelQueue:
    """Return the queue of a model under an Ollama name, with or without a tag.

    Raises ModelNotFound.
    """
    try:
        return router.find(name)
    except ModelNotFound:
        if not name.endswith(LATEST):
            raise
    return router.find(name.removesuffix(LATEST))


def tags(router: Router) -> OllamaModels:
    """Return the body of /api/tags: all models."""
    return OllamaModels([OllamaModel(**_entry(route)) for route in router.models()])


def list_running(router: Router) -> OllamaRunning:
    """Return the body of /api/ps: the models that can serve now."""
    return OllamaRunning([_running(route) for route in router.models() if route.ready])


def _entry(route: ModelQueue) -> dict[str, Any]:
    status = route.status
    name = status.name if ":" in status.name else status.name + LATEST
    identity = f"{status.name}\n{status.engine}\n{status.path}"
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp(status.created),
        "size": _size_bytes(status.info),
        "digest": hashlib.sha256(identity.encode()).hexdigest(),  # not of the weights
        "details": details(route),
    }


def _running(route: ModelQueue) -> OllamaRunningModel:
    gpu_bytes = sum(replica.gpu_bytes for replica in route.status.replicas)
    info = route.status.info
    return OllamaRunningModel(
        **_entry(route),
        expires_at=_expires_at(route),
        size_vram=gpu_bytes,
        context_length=info.max_context if info else 0,
    )


def _expires_at(route: ModelQueue) -> str:
    """Return when an unused model will be unloaded, as far as this gateway knows."""
    residence = route.status.residence
    stays_s = None if residence is None else residence.stays_s
    if stays_s is None or stays_s > _FOR_EVER_S:
        return _NEVER
    base = route.base
    used_at_s = max(base.pace.at, base.loaded_at_s)
    idle_s = 0.0 if base.in_flight else max(0.0, time.monotonic() - used_at_s)
    return timestamp(time.time() + max(0.0, stays_s - idle_s))


def _size_bytes(info: ModelInfo | None) -> int:
    return 0 if info is None else info.size_bytes


def details(route: ModelQueue) -> OllamaDetails:
    """Return a short description of a model; values are empty until its first load is done."""
    status = route.status
    info = status.info
    family = _family(info) if info else ""
    return OllamaDetails(
        parent_model=base_of(route),
        format=_format(status.engine, status.path),
        family=family,
        families=[family] if family else [],
        parameter_size=_count(info.parameters) if info and info.parameters else "",
        quantization_level=_LEVELS.get(info.dtype, info.dtype) if info else "",
    )


def _format(engine: str, path: str) -> str:
    """Return the format of the weights' files; "" if there are none here, as in Ollama."""
    if engine in _NO_FILES:
        return ""
    return "gguf" if path.endswith(".gguf") else "safetensors"


def _family(info: ModelInfo) -> str:
    """Return Ollama's name of a model family, such as "llama" for LlamaForCausalLM."""
    return _KIND.sub("", info.architecture).lower()


def _count(parameters: int) -> str:
    """Return a count in Ollama's format: 7.6B, 134.52M, 8B. Source: its format.HumanNumber."""
    for size, letter, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if parameters >= size:
            whole = parameters % size == 0
            return f"{parameters / size:.{0 if whole else digits}f}{letter}"
    return str(parameters)


def describe_model(route: ModelQueue) -> OllamaShown:
    """Return the body of /api/show: one model."""
    status = route.status
    return OllamaShown(
        modelfile=f"# {status.engine}: {status.path}\n",
        parameters="",
        template="",
        modified_at=timestamp(status.created),
        details=details(route),
        model_info=_info(status.info),
        capabilities=_capabilities(status.info),
    )


def _info(info: ModelInfo | None) -> dict[str, Any]:
    if info is None:
        return {}
    family = _family(info)
    known = {
        "general.architecture": family,
        "general.parameter_count": info.parameters,
        f"{family}.context_length": info.max_context,
    }
    if info.embedding_size:
        known[f"{family}.embedding_length"] = info.embedding_size
    return known


def _capabilities(info: ModelInfo | None) -> list[Capability]:
    if info is None:
        return []
    has: dict[Capability, bool] = {
        "completion": "generate" in info.serves,
        "vision": "images" in info.serves,
        "tools": "tools" in info.serves and bool(info.dialect.tools),
        "thinking": bool(info.dialect.think_end) or info.dialect.tools == "harmony",
        "embedding": "embed" in info.serves,
    }
    return [name for name, able in has.items() if able]
