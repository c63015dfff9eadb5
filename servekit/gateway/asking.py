"""From OpenAI's bodies to our own terms: what is asked of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from servekit.errors import RequestError, Unsupported
from servekit.gateway.parsing import without_unknown_formats
from servekit.gateway.schema import (
    PLAIN_MAX_TOKENS,
    CalledTool,
    ChatRequest,
    Common,
    CompletionRequest,
    ContentPart,
    InMessage,
    ResponseFormat,
)
from servekit.wire.messages import ChatMessage, Grammar, SamplingParams, ToolCall

Prompt = str | list[int]
#: Choices of one request in all, over its prompts.
MAX_CHOICES = 128


def sampling(request: Common) -> SamplingParams:
    """The request's sampling, None where it leaves the choice to the model."""
    stop = request.stop
    limit = request.max_tokens
    if isinstance(request, ChatRequest):
        limit = request.max_completion_tokens or limit
    if request.min_tokens and limit is not None:
        _check_min_tokens(request.min_tokens, limit)
    return SamplingParams(
        max_tokens=limit,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=None if request.top_k is None else max(0, request.top_k),
        min_p=request.min_p,
        seed=request.seed,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=request.repetition_penalty,
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        ignore_eos=bool(request.ignore_eos),
        min_tokens=request.min_tokens or 0,
        logit_bias=_bias(request.logit_bias) if request.logit_bias else (),
    )


def completion_sampling(request: CompletionRequest) -> SamplingParams:
    """As `sampling`; OpenAI's default of 16 tokens applies to plain completions."""
    params = sampling(request)
    if request.response_format is not None:
        params = msgspec.structs.replace(params, grammar=grammar(request.response_format))
    if request.logprobs is not None:
        params = msgspec.structs.replace(params, logprobs=request.logprobs)
    if params.max_tokens:
        return params
    _check_min_tokens(params.min_tokens, PLAIN_MAX_TOKENS)
    return msgspec.structs.replace(params, max_tokens=PLAIN_MAX_TOKENS)


def _check_min_tokens(least: int, most: int) -> None:
    if least > most:
        raise RequestError(
            f"min_tokens is {least}, over the limit of {most} tokens; raise max_tokens, too",
            param="min_tokens",
        )


def chat_sampling(request: ChatRequest) -> SamplingParams:
    """As `sampling`, with what only chats can ask for."""
    params = sampling(request)
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    if request.logprobs:
        params = msgspec.structs.replace(params, logprobs=request.top_logprobs or 0)
    if request.response_format is not None:
        params = msgspec.structs.replace(params, grammar=grammar(request.response_format))
    return params


def _bias(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for token in bias:
        if not token.isascii() or not token.isdecimal() or int(token) > 2**31 - 1:
            raise RequestError(
                f"logit_bias: {token[:40]!r} is no token id; /tokenize tells them",
                param="logit_bias",
            )
    return tuple(sorted((int(token), value) for token, value in bias.items()))


def grammar(format: ResponseFormat, param: str = "response_format") -> Grammar | None:
    """What the answer has to be; None where it is free."""
    if format.type == "text":
        return None
    if format.type == "json_object":
        return Grammar("json_schema", '{"type":"object"}')
    if format.json_schema is None:
        raise RequestError(f"{param}.json_schema is required", param=f"{param}.json_schema")
    return schema_grammar(format.json_schema.schema)


def schema_grammar(schema: dict[str, Any] | bool) -> Grammar:
    """JSON by a schema."""
    schema = {} if schema is True else schema  # the same, in the form that compilers take
    return Grammar("json_schema", msgspec.json.encode(without_unknown_formats(schema)).decode())


def completion_prompts(request: CompletionRequest) -> list[Prompt]:
    """The prompts: one or several texts, or lists of token ids."""
    prompts = _prompts(request.prompt)
    n = request.n or 1
    if len(prompts) * n > MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts with {n} choices each are over the limit of {MAX_CHOICES}"
            " choices in one request",
            param="prompt",
        )
    return prompts


def _prompts(prompt: str | list[int | str | list[int]]) -> list[Prompt]:
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [cast(list[int], prompt)]
    if len(kinds) > 1:
        raise RequestError("prompt: text and token ids are mixed in one list", param="prompt")
    for at, one in enumerate(prompt):
        if one == []:
            raise RequestError(f"prompt[{at}]: expected at least one token id", param="prompt")
    return cast(list[Prompt], prompt)


def check_echo(request: CompletionRequest, prompts: list[Prompt]) -> None:
    """Raise for an echo that cannot be given."""
    if request.echo and not all(isinstance(prompt, str) for prompt in prompts):
        raise Unsupported("echo: the prompt has to be text, not token ids", param="echo")
    if request.echo and request.logprobs is not None:
        raise Unsupported("echo: the prompt's own logprobs are not supported", param="echo")


def continues(request: ChatRequest) -> bool:
    """Whether the last message is the beginning of the answer."""
    if not request.continue_final_message:
        if request.add_generation_prompt is False:
            raise Unsupported(
                "add_generation_prompt: false goes with continue_final_message: true only",
                param="add_generation_prompt",
            )
        return False
    if request.messages[-1].role != "assistant":
        raise RequestError(
            "continue_final_message: the last message has to be the assistant's",
            param="continue_final_message",
        )
    return True


def template_arguments(request: ChatRequest) -> dict[str, Any]:
    """What the chat template gets beside the messages. Thinking templates look for both names."""
    given = request.chat_template_kwargs or {}
    effort = request.reasoning_effort
    if effort is None:
        return given
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks, **given}


def chat_messages(messages: Sequence[InMessage]) -> list[ChatMessage]:
    """The messages as the chat template gets them; raises RequestError for what is not text."""
    return [_message(message, at) for at, message in enumerate(messages)]


def _message(message: InMessage, at: int) -> ChatMessage:
    where = f"messages[{at}].content"
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, str) and role in ("user", "system"):
        return ChatMessage(role, content, message.name)
    if content is None and not message.tool_calls:
        if message.refusal is None:
            raise RequestError(f"{where} is required", param=where)
        content = message.refusal
    if isinstance(content, list):
        content = "\n".join(_part(part, where) for part in content)
    return ChatMessage(
        role,
        content or "",
        message.name,
        tuple(_call(call, at) for call in message.tool_calls or ()),
        message.tool_call_id,
        message.reasoning_content or message.reasoning,
    )


def _call(call: CalledTool, at: int) -> ToolCall:
    where = f"messages[{at}].tool_calls"
    arguments = call.function.arguments or "{}"
    try:
        decoded = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        raise RequestError(f"{where}: the arguments are not valid JSON", param=where) from None
    if not isinstance(decoded, dict):
        raise RequestError(f"{where}: the arguments have to be a JSON object", param=where)
    return ToolCall(call.id, call.function.name, arguments)


def _part(part: ContentPart, where: str) -> str:
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type != "text":
        raise Unsupported(f"{where}: the model takes text, not {part.type!r}", param=where)
    if part.text is None:
        raise RequestError(f"{where}: a text part needs `text`", param=where)
    return part.text
