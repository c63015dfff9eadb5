"""Ollama's answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from servekit.gateway.api.fields import (
    ANSWER,
    MODEL,
    FunctionName,
    IsoTime,
    Problem,
    Thoughts,
    doc,
)
from servekit.gateway.api.openai.response_types import ChatLogprob

_DIGEST = "9f0d6c1f7a0e4b6f8a3f0c52c5d2f8ad5b1b5a0e8f2c7d1b3a4c6e7f8091a2b3"
Name = Annotated[str, doc("The name of the model, with a tag", f"{MODEL}:latest")]


class OllamaFunction(Struct):
    """The function of a call, and its arguments."""

    name: FunctionName
    arguments: dict[str, Any]
    """The arguments; {"INVALID_JSON": text} if the model's text is not a JSON object."""


class OllamaToolCall(Struct):
    """A whole call of a tool by the model."""

    id: Annotated[str, doc("The id of the call")]
    function: Annotated[OllamaFunction, doc("The function and its arguments")]


class OllamaMessage(Struct):
    """The text of the model; in a stream, the new part."""

    role: Literal["assistant"]
    content: Annotated[str, doc("The text", ANSWER)]
    thinking: Thoughts | UnsetType = UNSET
    tool_calls: Annotated[list[OllamaToolCall], doc("Calls by the model")] | UnsetType = UNSET


class OllamaAnswer(Struct, kw_only=True):
    """The fields that both answers share; the figures come with `done`."""

    model: Annotated[str, doc("The model, as requested", MODEL)]
    created_at: IsoTime
    done: Annotated[bool, doc("Whether the answer is complete", True)]
    logprobs: Annotated[list[ChatLogprob], doc("If requested")] | UnsetType = UNSET
    done_reason: (
        Annotated[
            Literal["stop", "length", "load", "unload"],
            doc("Why the answer ended; `load` and `unload`: there was no prompt", "stop"),
        ]
        | UnsetType
    ) = UNSET
    total_duration: Annotated[int, doc("ns in all", 301000000)] | UnsetType = UNSET
    load_duration: Annotated[int, doc("ns of waiting for a worker", 0)] | UnsetType = UNSET
    prompt_eval_count: Annotated[int, doc("Tokens of the prompt", 37)] | UnsetType = UNSET
    prompt_eval_duration: Annotated[int, doc("ns to the first token", 91000000)] | UnsetType = UNSET
    eval_count: Annotated[int, doc("Tokens generated", 8)] | UnsetType = UNSET
    eval_duration: Annotated[int, doc("ns of the tokens after", 210000000)] | UnsetType = UNSET


class OllamaChat(OllamaAnswer, kw_only=True):
    """The answer of /api/chat, or a line of it; the last has `done` and the figures."""

    message: Annotated[OllamaMessage, doc("The answer, or its new part")]


class OllamaGenerated(OllamaAnswer, kw_only=True):
    """The answer of /api/generate, or a line of it; the last has `done` and the figures."""

    response: Annotated[str, doc("The text; in a stream, the new part", ANSWER)]
    thinking: Thoughts | UnsetType = UNSET


class OllamaEmbeddings(Struct):
    """The answer of /api/embed."""

    model: Annotated[str, doc("The model, as requested", "bge-small")]
    embeddings: list[Annotated[list[float], doc("A unit vector", [0.12, -0.03, 0.99])]]
    """The vectors, in the order of the inputs."""
    total_duration: Annotated[int, doc("ns in all", 31000000)]
    load_duration: Annotated[int, doc("ns of waiting for a worker", 0)]
    prompt_eval_count: Annotated[int, doc("Tokens of the inputs", 4)]


class OllamaEmbedding(Struct):
    """The answer of /api/embeddings."""

    embedding: Annotated[list[float], doc("The vector as the model made it", [0.12, -0.03, 0.99])]


class OllamaDetails(Struct):
    """A short description of a model; empty until its first load is done."""

    parent_model: Annotated[str, doc("The model of a preset, or the base model of an adapter")]
    format: Annotated[str, doc("gguf or safetensors; empty without weights here", "safetensors")]
    family: Annotated[str, doc("The architecture", "llama")]
    families: Annotated[list[str], doc("As `family`", ["llama"])]
    parameter_size: Annotated[str, doc("The number of parameters", "134.5M")]
    quantization_level: Annotated[str, doc("The number format", "F32")]


class OllamaModel(Struct):
    """A served model."""

    name: Name
    model: Name
    modified_at: IsoTime
    size: Annotated[int, doc("Bytes of the weights", 538060032)]
    digest: Annotated[str, doc("A hash of the entry in the file, not of the weights", _DIGEST)]
    details: Annotated[OllamaDetails, doc("A short description")]


class OllamaModels(Struct):
    """The answer of /api/tags."""

    models: Annotated[list[OllamaModel], doc("The models, in the order of the file")]


class OllamaRunningModel(OllamaModel):
    """A model that can serve now."""

    expires_at: Annotated[str, doc("When it is unloaded if it stays idle", "9999-12-31T23:59:59Z")]
    size_vram: Annotated[int, doc("Bytes on GPUs")]
    context_length: Annotated[int, doc("The context in tokens", 8192)]


class OllamaRunning(Struct):
    """The answer of /api/ps."""

    models: Annotated[list[OllamaRunningModel], doc("The models, in the order of the file")]


Capability = Literal["completion", "vision", "tools", "thinking", "embedding"]
_INFO = {"general.architecture": "llama", "llama.context_length": 8192}


class OllamaShown(Struct):
    """The answer of /api/show."""

    modelfile: Annotated[str, doc("A comment with engine and path", "# transformers: smollm2\n")]
    parameters: Annotated[str, doc("Always empty")]
    template: Annotated[str, doc("Always empty: the model's own is used")]
    modified_at: IsoTime
    details: Annotated[OllamaDetails, doc("A short description")]
    model_info: Annotated[dict[str, Any], Meta(examples=[_INFO])]
    """Architecture, parameters and context, under the names of GGUF."""
    capabilities: list[Capability]
    """What the model can do."""


class OllamaStatus(Struct):
    """The answer of /api/pull."""

    status: Literal["success"]


class OllamaVersion(Struct):
    """The answer of /api/version."""

    version: Annotated[str, doc("The version of Ollama's API that is served", "0.12.6")]
    servekit: Annotated[str, doc("servekit's version", "0.1.0")]


class OllamaError(Struct):
    """An error in Ollama's format; in a stream that has begun it is the last line."""

    error: Problem
