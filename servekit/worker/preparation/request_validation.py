"""Validation of requests: an unsupported task or parameter is refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from servekit.errors import Unsupported
from servekit.protocol.messages import (
    Capability,
    Generate,
    ModelInfo,
    SamplingParams,
    WorkerSpec,
)
from servekit.protocol.tasks import explain_no_media, explain_refusal

#: Repetition penalties without effect.
_NEUTRAL = (None, 1.0)
#: The parameters that need a capability, and their values in nearly all requests.
_optional = attrgetter(
    "logprobs", "logit_bias", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "grammar", "stop_token_ids", "prompt_logprobs", "bad_words",
)  # fmt: skip
_NOTHING_ASKED = _optional(SamplingParams())
#: A grammar derived from tools: strict ones, or one whose call is required.
_ORDERED = ("grammar", "tools")


def check_request(request: Generate, info: ModelInfo, spec: WorkerSpec) -> None:
    """Raise Unsupported for a task or parameter that is not in `info.serves`."""
    if request.task not in info.serves:
        said = explain_refusal(request.task, spec.engine, spec.model, info.serves)
        raise Unsupported(said, param="model")
    for message in request.messages or ():
        for one in message.media:
            if one.modality not in info.serves:
                said = explain_no_media(one.modality, spec.engine, spec.model)
                raise Unsupported(said, param="messages")
    if _optional(request.params) == _NOTHING_ASKED and not request.tools:
        return  # nearly all requests
    for capability, param in _list_asked(request):
        if capability not in info.serves and not _is_forced(capability, request, info):
            what = "keep calls to a schema" if (capability, param) == _ORDERED else "take it"
            raise Unsupported(
                f"{param}: the {spec.engine} engine of '{spec.model}' does not {what}", param=param
            )


def _is_forced(capability: Capability, request: Generate, info: ModelInfo) -> bool:
    """Return whether tool calls are served because a grammar forces them."""
    return (
        capability == "tools"
        and "forced_tools" in info.serves
        and request.params.grammar is not None
        and request.params.grammar.param == "tools"
    )


def check_text(request: Generate, spec: WorkerSpec) -> None:
    """Raise Unsupported if a request needs tokens from an engine that takes only text."""
    ids = isinstance(request.prompt, list) or any(isinstance(one, list) for one in request.inputs)
    if ids:
        param = "prompt" if isinstance(request.prompt, list) else "input"
        raise Unsupported(
            f"{param}: the {spec.engine} engine of '{spec.model}' takes text, not token ids",
            param=param,
        )
    for asked, param in (
        (request.params.include_stop, "include_stop_str_in_output"),
        (request.params.truncate_prompt, "truncate_prompt_tokens"),
        (request.params.echo, "echo"),
        (request.pooling is not None and request.pooling.input_tokens, "max_tokens_per_doc"),
    ):
        if asked:
            raise Unsupported(
                f"{param}: the {spec.engine} engine of '{spec.model}' does not take it", param=param
            )


def _list_asked(request: Generate) -> Iterator[tuple[Capability, str]]:
    """Yield the optional capabilities that a request needs, each with its parameter's name."""
    params = request.params
    if params.logprobs is not None:
        yield "logprobs", "logprobs"
    if params.logit_bias:
        yield "logit_bias", "logit_bias"
    if params.min_p:
        yield "min_p", "min_p"
    if params.presence_penalty:
        yield "penalties", "presence_penalty"
    if params.frequency_penalty:
        yield "penalties", "frequency_penalty"
    if params.repetition_penalty not in _NEUTRAL:
        yield "penalties", "repetition_penalty"
    if params.grammar is not None:
        yield "grammar", params.grammar.param
    if params.stop_token_ids:
        yield "stop_token_ids", "stop_token_ids"
    if params.prompt_logprobs is not None:
        yield "prompt_logprobs", "echo" if params.echo else "prompt_logprobs"
    if params.bad_words:
        yield "bad_words", "bad_words"
    if request.tools:
        yield "tools", "tools"
