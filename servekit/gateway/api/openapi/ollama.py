"""Ollama's answers, and those of HuixiangDou's own LLM server."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from servekit.gateway.api.openapi.openai import ChatLogprob

DoneReason = Literal["stop", "length", "load", "unload"]


class OllamaFunction(Struct):
    """What is to be called, and with what."""

    name: str
    arguments: dict[str, Any]


class OllamaToolCall(Struct):
    """A call of a tool that the model asks for; told once it is whole."""

    id: str
    function: OllamaFunction


class OllamaMessage(Struct):
    """What the model said; in a stream, what is new."""

    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class OllamaEnd(Struct, kw_only=True):
    """What both answers end with."""

    model: str
    created_at: str
    done: bool
    logprobs: list[ChatLogprob] | UnsetType = UNSET
    done_reason: DoneReason | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaChat(OllamaEnd, kw_only=True):
    """The answer of /api/chat, or a line of it; the last has `done` and the figures."""

    message: OllamaMessage


class OllamaGenerated(OllamaEnd, kw_only=True):
    """The answer of /api/generate, or a line of it; the last has `done` and the figures."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaEmbeddings(Struct):
    """The answer of /api/embed, in the order of the inputs."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Struct):
    """The answer of /api/embeddings."""

    embedding: list[float]


class OllamaDetails(Struct):
    """A model in a few words; empty ones while it loads for the first time."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Struct):
    """A model that is served."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(Struct):
    """The answer of /api/tags."""

    models: list[OllamaModel]


class OllamaRunningModel(OllamaModel):
    """A model that can serve now."""

    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunning(Struct):
    """The answer of /api/ps."""

    models: list[OllamaRunningModel]


class OllamaShown(Struct):
    """The answer of /api/show."""

    modelfile: str
    parameters: str
    template: str
    modified_at: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking", "embedding"]]


class OllamaStatus(Struct):
    """The answer of /api/pull."""

    status: Literal["success"]


class OllamaVersion(Struct):
    """The answer of /api/version."""

    version: str
    servekit: str


class OllamaError(Struct):
    """An error as Ollama's clients know it; in a stream that has begun it is a line, the last."""

    error: str


class LegacyAnswer(Struct):
    """The answer of /inference, always 200: the text, or why there is none."""

    text: str
    error: str


class HuixiangDouError(Struct):
    """An error as HuixiangDou's old client knows it."""

    text: str
    error: str
