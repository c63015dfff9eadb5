"""Converts request bodies of OpenAI's API to servekit's types."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, cast

import msgspec

from servekit.errors import RequestError, Unsupported
from servekit.gateway.api.images import (
    make_message,
    read_base64_audio,
    read_data_uri,
    read_text_file,
)
from servekit.gateway.api.openai.schema import (
    PLAIN_MAX_TOKENS,
    AudioUrl,
    CalledTool,
    ChatRequest,
    Common,
    CompletionRequest,
    ContentPart,
    FileData,
    ImageUrl,
    InMessage,
    InputAudio,
    ResponseFormat,
    StructuredOutputs,
    refuse_unserved,
    unserved_fields,
)
from servekit.gateway.api.tool_arguments import object_text
from servekit.gateway.tool_parsing import close_objects, without_unknown_formats
from servekit.protocol.messages import ChatMessage, Grammar, Media, SamplingParams, ToolCall
from servekit.protocol.types import GrammarParam

Prompt = str | list[int]
#: The most choices of one request over all its prompts.
MAX_CHOICES = 128
ANY_OBJECT = '{"type":"object"}'
#: Converting longer GBNF takes more than a tenth of a second, on the event loop.
MAX_GBNF_CHARS = 16 * 1024
_UNSERVED_FORMS = unserved_fields(StructuredOutputs)
#: What tells Lark from GBNF, as in `llguidance.gbnf_to_lark.is_lark_syntax`, whose own expression
#: takes hours for a megabyte of line breaks.
_LARK = re.compile(r"^[^\S\n]*+(?:%llguidance\b|start\s*+:)", re.MULTILINE)
#: The characters with a special meaning in a regular expression, with slashes around it or not.
_ESCAPES = str.maketrans({sign: f"\\{sign}" for sign in r"\.+*?()|[]{}^$#&-~/"})


def sampling(request: Common) -> SamplingParams:
    """Return the request's sampling parameters; None leaves a choice to the model."""
    stop = request.stop
    limit = request.max_tokens
    if isinstance(request, ChatRequest):
        limit = request.max_completion_tokens or limit
    if request.min_tokens and limit is not None:
        _check_min_tokens(request.min_tokens, limit)
    params = SamplingParams(
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
    rarely = (
        request.stop_token_ids or request.bad_words or request.truncate_prompt_tokens
        or request.include_stop_str_in_output
    )  # fmt: skip
    return _with_vllm_s(params, request) if rarely else params


def _with_vllm_s(params: SamplingParams, request: Common) -> SamplingParams:
    """Add rare parameters separately: setting them would cost time in every request."""
    return msgspec.structs.replace(
        params,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        include_stop=bool(request.include_stop_str_in_output),
        bad_words=tuple(request.bad_words or ()),
        truncate_prompt=request.truncate_prompt_tokens or 0,
    )


def completion_sampling(request: CompletionRequest) -> SamplingParams:
    """Return `sampling` plus the parameters of completions, with OpenAI's default of 16 tokens."""
    params = sampling(request)
    if (form := constraint(request)) is not None:
        params = msgspec.structs.replace(params, grammar=form)
    if request.logprobs is not None:
        params = msgspec.structs.replace(params, logprobs=request.logprobs)
    if request.echo or request.prompt_logprobs is not None:
        params = _with_prompt(params, request)
    if params.max_tokens is not None:
        return params
    _check_min_tokens(params.min_tokens, PLAIN_MAX_TOKENS)
    return msgspec.structs.replace(params, max_tokens=PLAIN_MAX_TOKENS)


def _with_prompt(params: SamplingParams, request: CompletionRequest) -> SamplingParams:
    """Add the prompt's log probabilities, and an echo by the worker if the gateway cannot echo.

    An echoed prompt gets as many log probabilities as the answer.
    """
    told = max(
        (n for n in (request.logprobs if request.echo else None, request.prompt_logprobs)
         if n is not None),
        default=None,
    )  # fmt: skip
    known = _is_text(request.prompt) and not params.truncate_prompt
    own = request.echo and (told is not None or not known)
    return msgspec.structs.replace(params, prompt_logprobs=told, echo=bool(own))


def _is_text(prompt: Any) -> bool:
    """Return whether the client sent text, which the gateway can echo without the worker."""
    return isinstance(prompt, str) or isinstance(prompt[0], str)


def check_prompt_logprobs(request: ChatRequest | CompletionRequest) -> None:
    """Raise Unsupported for prompt_logprobs in a stream: vLLM's format has no place for them."""
    if request.prompt_logprobs is not None and request.stream:
        raise Unsupported(
            "prompt_logprobs: not in a stream; leave out `stream`, or take `echo` with `logprobs`",
            param="prompt_logprobs",
        )


def _check_min_tokens(least: int, most: int) -> None:
    if least > most:
        raise RequestError(
            f"min_tokens is {least}, over the limit of {most} tokens; raise max_tokens, too",
            param="min_tokens",
        )


def chat_sampling(request: ChatRequest) -> SamplingParams:
    """Return `sampling` plus the parameters that only chats have."""
    params = sampling(request)
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    if request.logprobs:
        params = msgspec.structs.replace(params, logprobs=request.top_logprobs or 0)
    if (form := constraint(request)) is not None:
        params = msgspec.structs.replace(params, grammar=form)
    if request.prompt_logprobs is not None:
        params = msgspec.structs.replace(params, prompt_logprobs=request.prompt_logprobs)
    return params


def constraint(request: ChatRequest | CompletionRequest) -> Grammar | None:
    """Return the constraint on the answer, from whichever parameter holds it; None for none."""
    if _forms_of(request) == _NO_FORMS:  # nearly all requests
        return None
    found: list[Grammar | None] = []
    if request.response_format is not None:
        found.append(grammar(request.response_format))
    if request.structured_outputs is not None:
        found += structured(request.structured_outputs)
    for param, make in _GUIDED.items():
        if (value := getattr(request, param)) is not None:
            found.append(make(value, param))
    forms = [one for one in found if one is not None]
    if len(forms) > 1:
        names = " and ".join(dict.fromkeys(form.param for form in forms))
        raise RequestError(f"{names}: ask for one form of the answer only", param=forms[1].param)
    return forms[0] if forms else None


def structured(asked: StructuredOutputs) -> list[Grammar]:
    """Convert vLLM's `structured_outputs`. Raises RequestError if they hold no constraint."""
    param: GrammarParam = "structured_outputs"
    refuse_unserved(asked, _UNSERVED_FORMS, f"{param}.")
    found = []
    if asked.json is not None:
        found.append(_by_schema(asked.json, param))
    if asked.regex is not None:
        found.append(_by_regex(asked.regex, param))
    if asked.choice is not None:
        found.append(_by_choice(asked.choice, param))
    if asked.grammar is not None:
        found.append(_by_grammar(asked.grammar, param))
    if asked.json_object:
        found.append(Grammar("json_schema", ANY_OBJECT, param))
    if not found:
        raise RequestError(f"{param}: give one of json, regex, choice and grammar", param=param)
    return found


def _by_schema(schema: dict[str, Any] | str, param: GrammarParam) -> Grammar:
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError):
            raise RequestError(f"{param}: the schema is not valid JSON", param=param) from None
        if not isinstance(schema, dict | bool):
            raise RequestError(f"{param}: a JSON schema is an object", param=param)
    return msgspec.structs.replace(schema_grammar(schema), param=param)


def _by_regex(pattern: str, param: GrammarParam) -> Grammar:
    return Grammar("regex", pattern, param)


def _by_choice(texts: list[str], param: GrammarParam) -> Grammar:
    if not all(texts):
        raise RequestError(f"{param}: an empty text cannot be chosen", param=param)
    return Grammar("regex", "|".join(text.translate(_ESCAPES) for text in texts), param)


def _by_grammar(text: str, param: GrammarParam) -> Grammar:
    """Return the grammar in Lark; GBNF, vLLM's EBNF, is converted."""
    from llguidance.gbnf_to_lark import gbnf_to_lark  # megabytes: few need it

    if _LARK.search(text) is None:
        if len(text) > MAX_GBNF_CHARS:
            said = f"{param}: GBNF of more than {MAX_GBNF_CHARS} characters is not taken; use Lark"
            raise RequestError(said, param=param)
        try:
            text = gbnf_to_lark(text)
        except Exception as error:  # the library raises bare exceptions of many kinds
            why = str(error).partition("\n")[0][:200]
            raise RequestError(
                f"{param}: neither Lark (a rule `start:`) nor GBNF (`root ::=`): {why}", param=param
            ) from None
    return Grammar("lark", text, param)


_GUIDED: dict[str, Callable[[Any, Any], Grammar]] = {
    "guided_json": _by_schema,
    "guided_regex": _by_regex,
    "guided_choice": _by_choice,
    "guided_grammar": _by_grammar,
}
_forms_of = attrgetter("response_format", "structured_outputs", *_GUIDED)
_NO_FORMS = (None,) * (2 + len(_GUIDED))


def _bias(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for token in bias:
        if not token.isascii() or not token.isdecimal() or int(token) > 2**31 - 1:
            raise RequestError(
                f"logit_bias: {token[:40]!r} is not a token id; /tokenize returns them",
                param="logit_bias",
            )
    return tuple(sorted((int(token), value) for token, value in bias.items()))


def grammar(format: ResponseFormat, param: str = "response_format") -> Grammar | None:
    """Return the constraint of a `response_format`; None: no constraint."""
    if format.type == "text":
        return None
    if format.type == "json_object":
        return Grammar("json_schema", ANY_OBJECT)
    if format.json_schema is None:
        raise RequestError(f"{param}.json_schema is required", param=f"{param}.json_schema")
    return schema_grammar(format.json_schema.schema)


def schema_grammar(schema: dict[str, Any] | bool) -> Grammar:
    """Return the constraint to JSON that fits `schema`."""
    schema = {} if schema is True else schema  # equivalent, in the form that compilers accept
    compiled = close_objects(without_unknown_formats(schema))
    return Grammar("json_schema", msgspec.json.encode(compiled).decode())


def completion_prompts(request: CompletionRequest) -> list[Prompt]:
    """Return the prompts: one or several texts, or lists of token ids."""
    prompts = _prompts(request.prompt)
    n = request.n or 1
    if request.best_of is not None and request.best_of != n:
        raise Unsupported(
            f"best_of is {request.best_of}, and n is {n}: only the choices that are returned are"
            " generated; request n choices and choose among them",
            param="best_of",
        )
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


def continues(request: ChatRequest) -> bool:
    """Return whether the answer continues the last message."""
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
    """Return the chat template's arguments. Templates of reasoning models use either name."""
    given = request.chat_template_kwargs or {}
    effort = request.reasoning_effort
    if effort is None:
        return given
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks, **given}


def chat_messages(messages: Sequence[InMessage]) -> list[ChatMessage]:
    """Return the messages for the chat template. Raises RequestError for wrong content."""
    return [_message(message, at) for at, message in enumerate(messages)]


def _message(message: InMessage, at: int) -> ChatMessage:
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, str) and role in ("user", "system"):
        return ChatMessage(role, content, message.name)
    where = f"messages[{at}].content"
    if content is None and not message.tool_calls:
        if message.refusal is None:
            raise RequestError(f"{where} is required", param=where)
        content = message.refusal
    media: tuple[Media, ...] = ()
    if isinstance(content, list):
        parts = [_part(part, f"{where}[{place}]") for place, part in enumerate(content)]
        made = make_message(role, parts, where)
        content, media = made.content, made.media
    return ChatMessage(
        role,
        content or "",
        message.name,
        tuple(_call(call) for call in message.tool_calls or ()),
        message.tool_call_id,
        message.reasoning_content or message.reasoning,
        media,
    )


def _call(call: CalledTool) -> ToolCall:
    return ToolCall(call.id, call.function.name, object_text(call.function.arguments))


def _part(part: ContentPart, where: str) -> str | Media:
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type == "image_url":
        return _image(part.image_url, f"{where}.image_url")
    if part.type == "input_audio":
        return read_audio(part.input_audio, f"{where}.input_audio")
    if part.type == "audio_url":
        return _audio_url(part.audio_url, f"{where}.audio_url")
    if part.type == "file":
        file = part.file or FileData()
        return read_text_file(file.file_data, file.filename, f"{where}.file")
    if part.type != "text":
        raise Unsupported(
            f"{where}: parts are of type text, image_url, input_audio or file, not {part.type!r}",
            param=where,
        )
    if part.text is None:
        raise RequestError(f"{where}: a text part needs `text`", param=where)
    return part.text


def read_audio(given: InputAudio | None, where: str) -> Media:
    """Return a recording. Raises RequestError."""
    if given is None:
        raise RequestError(f"{where} is required", param=where)
    return read_base64_audio(given.data, f"{where}.data")


def _audio_url(given: AudioUrl | str | None, where: str) -> Media:
    if given is None:
        raise RequestError(f"{where} is required", param=where)
    url = given if isinstance(given, str) else given.url
    if not url[:5].lower() == "data:":
        raise RequestError(f"{where}: expected data:audio/wav;base64,…", param=where)
    return read_base64_audio(url, where)


def _image(given: ImageUrl | str | None, where: str) -> Media:
    if given is None:
        raise RequestError(f"{where} is required", param=where)
    url, detail = (given, None) if isinstance(given, str) else (given.url, given.detail)
    return read_data_uri(url, where, detail)
