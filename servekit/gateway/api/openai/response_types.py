"""OpenAI's answers: chat completions, completions, embeddings, models; and servekit's tokens.

The byte templates of streams write the same fields; tests hold their output against these types.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from servekit.gateway.api.fields import (
    ANSWER,
    MODEL,
    Answering,
    AnswerTokens,
    Arguments,
    CachedTokens,
    FunctionName,
    Index,
    IsoTime,
    Problem,
    PromptTokens,
    Thoughts,
    TotalTokens,
    UnixTime,
    doc,
)

_FINISH = doc(
    "`length`: the limit was reached; `tool_calls`: the model calls tools; `stop`: all other ends,"
    " also of a call that a stop string cut off and of the function that `tool_choice` names",
    "stop",
)
Finish = Annotated[Literal["stop", "length", "tool_calls"], _FINISH]
CompletionFinish = Annotated[Literal["stop", "length"], _FINISH]
StopReason = Annotated[
    str | int | None,
    doc("With `stop_token_ids`: the string or token that ended the answer; null: neither"),
]
ChatId = Annotated[str, doc("The id of the answer", "chatcmpl-jT09y9SKnUo8f13")]
CompletionId = Annotated[str, doc("The id of the answer", "cmpl-jT09y9SKnUo8f14")]


class PromptTokensDetails(Struct):
    """Details of the prompt's tokens."""

    cached_tokens: CachedTokens


class Usage(Struct):
    """Tokens of a request: of its prompts, each counted once, and of all its choices."""

    prompt_tokens: PromptTokens
    completion_tokens: AnswerTokens
    total_tokens: TotalTokens
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    """Left out if there are no cached tokens."""


class TopLogprob(Struct):
    """A token that could have been chosen."""

    token: Annotated[str, doc("The text; a replacement character for a part of a character")]
    logprob: Annotated[float, doc("The natural logarithm of the probability, at least -9999")]
    bytes: Annotated[list[int], doc("The bytes, which may be a part of a character")]


class ChatLogprob(TopLogprob):
    """A token that was chosen. The tokens of a stop string that was cut off are left out."""

    top_logprobs: Annotated[list[TopLogprob], doc("The most probable tokens, the best first")]


class ChatLogprobs(Struct):
    """The log probabilities of the tokens of a message, or of a chunk."""

    content: Annotated[list[ChatLogprob], doc("An entry for each token")]
    refusal: None


Logprobs = Annotated[ChatLogprobs | None, doc("Log probabilities, if requested")]


class FunctionCall(Struct):
    """The function of a call, and its arguments."""

    name: FunctionName
    arguments: Arguments


class ToolCall(Struct):
    """A call of a tool by the model."""

    id: Annotated[str, doc("The id of the call")]
    type: Literal["function"]
    function: Annotated[FunctionCall, doc("The function and its arguments")]


class AssistantMessage(Struct):
    """The answer of the model."""

    role: Literal["assistant"]
    content: Annotated[str | None, doc("The text; null only beside tool calls", ANSWER)]
    refusal: None
    reasoning_content: Thoughts | UnsetType = UNSET
    tool_calls: Annotated[list[ToolCall], doc("Calls by the model")] | UnsetType = UNSET


class PromptLogprob(Struct):
    """A token of the prompt, or an alternative to one."""

    logprob: Annotated[float, doc("The natural logarithm of the probability, at least -9999")]
    rank: Annotated[int, doc("1 is the most probable")]
    decoded_token: Annotated[str, doc("The text of the token")]


PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None],
    doc("For each token of the prompt, if requested: by token id; null for the first"),
]


class ChatChoice(Struct):
    """An answer, one of `n`."""

    index: Index
    message: Annotated[AssistantMessage, doc("The answer")]
    logprobs: Logprobs
    finish_reason: Finish
    stop_reason: StopReason | UnsetType = UNSET


class ChatCompletion(Struct):
    """The answer of /v1/chat/completions if it is not streamed."""

    id: ChatId
    object: Literal["chat.completion"]
    created: UnixTime
    model: Answering
    choices: Annotated[list[ChatChoice], doc("The answers, by `index`")]
    usage: Annotated[Usage, doc("Token counts")]
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionCallPiece(Struct):
    """A piece of a call: first the name, then pieces of the arguments."""

    name: FunctionName | UnsetType = UNSET
    arguments: Arguments | UnsetType = UNSET


class ToolCallPiece(Struct):
    """A piece of the call at `index`. Only the first piece has an id and a type."""

    index: Index
    function: Annotated[FunctionCallPiece, doc("The function, or more of its arguments")]
    id: Annotated[str, doc("The id of the call")] | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct):
    """The text and calls that are new since the last chunk. Only the first chunk has a role."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: Annotated[str, doc("More text")] | UnsetType = UNSET
    reasoning_content: Thoughts | UnsetType = UNSET
    tool_calls: Annotated[list[ToolCallPiece], doc("More of calls")] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """The new part of an answer, one of `n`."""

    index: Index
    delta: Annotated[ChatDelta, doc("The new part of the answer")]
    finish_reason: Finish | None
    logprobs: Logprobs | UnsetType = UNSET
    stop_reason: StopReason | UnsetType = UNSET


ChunkUsage = Annotated[
    Usage | None, doc("With `stream_options.include_usage`: null, except in the last chunk")
]


class ChatChunk(Struct):
    """The data of one event of a streamed chat completion."""

    id: ChatId
    object: Literal["chat.completion.chunk"]
    created: UnixTime
    model: Answering
    choices: list[ChatChunkChoice]
    """What is new; empty in the chunk with the token counts."""
    usage: ChunkUsage | UnsetType = UNSET


class CompletionLogprobs(Struct):
    """Log probabilities in the older form: lists with an entry for each token."""

    tokens: Annotated[list[str], doc("The texts of the tokens")]
    token_logprobs: list[float | None]
    """The log probabilities of the tokens; null for the first of an echoed prompt."""
    top_logprobs: list[dict[str, float] | None]
    """The most probable tokens and their log probabilities."""
    text_offset: Annotated[list[int], doc("The characters at which the tokens begin")]


class CompletionChunkChoice(Struct):
    """The new part of an answer."""

    index: Index
    text: Annotated[str, doc("The text", " Paris.")]
    logprobs: Annotated[CompletionLogprobs | None, doc("Log probabilities, if requested")]
    finish_reason: CompletionFinish | None
    stop_reason: StopReason | UnsetType = UNSET


class CompletionChoice(CompletionChunkChoice):
    """An answer to a prompt, of `n` for each."""

    finish_reason: CompletionFinish
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct):
    """The answer of /v1/completions if it is not streamed."""

    id: CompletionId
    object: Literal["text_completion"]
    created: UnixTime
    model: Answering
    choices: Annotated[list[CompletionChoice], doc("The answers, by `index`")]
    usage: Annotated[Usage, doc("Token counts")]


class CompletionChunk(Struct):
    """The data of one event of a streamed completion."""

    id: CompletionId
    object: Literal["text_completion"]
    created: UnixTime
    model: Answering
    choices: list[CompletionChunkChoice]
    """What is new; empty in the chunk with the token counts."""
    usage: ChunkUsage | UnsetType = UNSET


class Embedding(Struct):
    """The vector of one input."""

    object: Literal["embedding"]
    index: Index
    embedding: Annotated[list[float] | str, doc("Numbers, or base64", [0.12, -0.03, 0.99])]


class EmbeddingUsage(Struct):
    """Tokens of all inputs."""

    prompt_tokens: Annotated[int, doc("Tokens of the inputs", 4)]
    total_tokens: Annotated[int, doc("The same", 4)]


class EmbeddingList(Struct):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    data: Annotated[list[Embedding], doc("The vectors, in the order of the inputs")]
    model: Annotated[str, doc("The name of the model that answered", "bge-small")]
    usage: Annotated[EmbeddingUsage, doc("Token counts")]


class Tokens(Struct):
    """The answer of /tokenize."""

    count: Annotated[int, doc("The number of tokens", 2)]
    max_model_len: Annotated[int | None, doc("The model's context in tokens, once known", 8192)]
    tokens: Annotated[list[int], doc("Token ids", [19556, 905])]


class Detokenized(Struct):
    """The answer of /detokenize."""

    prompt: Annotated[str, doc("The text", "Hello world")]


class Model(Struct):
    """A served model and its state."""

    id: Annotated[str, doc("The name of the model", MODEL)]
    object: Literal["model"]
    created: UnixTime
    owned_by: Literal["servekit"]
    max_model_len: Annotated[int | None, doc("The context in tokens, once known", 8192)]
    engine: Annotated[str, doc("The engine that runs the model", "transformers")]
    aliases: Annotated[list[str], doc("Other names of the model", ["smollm2"])]
    state: Annotated[str, doc("The best state of the model's workers", "ready")]
    root: Annotated[str, Meta(examples=["HuggingFaceTB/SmolLM2-135M-Instruct"])]
    """The source: `path` in the configuration file, or the source of the adapter."""
    parent: Annotated[str | None, doc("The model of a preset, or the base model of an adapter")]
    tasks: Annotated[list[str], doc("The tasks that it serves, once known", ["generate"])]
    # Anthropic's clients read the same list:
    type: Literal["model"]
    display_name: Annotated[str, doc("The name of the model", MODEL)]
    created_at: IsoTime
    lifecycle: Literal["active"]
    max_input_tokens: Annotated[int | None, doc("As `max_model_len`", 8192)]
    max_tokens: Annotated[int | None, doc("As `max_model_len`", 8192)]


class ModelList(Struct):
    """The models that the key may use."""

    object: Literal["list"]
    data: Annotated[list[Model], doc("The models, in the order of the configuration file")]
    has_more: Annotated[bool, doc("Whether `limit` has left models out", False)]
    first_id: Annotated[str | None, doc("The name of the first model", MODEL)]
    last_id: Annotated[str | None, doc("The name of the last model", MODEL)]


class OpenAIErrorObject(Struct):
    """The error's sentence, type, parameter and code."""

    message: Problem
    type: Annotated[str, doc("The kind of error, by its status", "invalid_request_error")]
    param: Annotated[str | None, doc("The field that caused the error", "temperature")]
    code: Annotated[str | None, doc("The name of the error", "invalid_request")]


class OpenAIError(Struct):
    """An error in OpenAI's format; in a stream that has begun it is the data of an event."""

    error: Annotated[OpenAIErrorObject, doc("What went wrong")]
