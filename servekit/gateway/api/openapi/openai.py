"""OpenAI's answers: chat completions, completions, embeddings, models; and servekit's tokens."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

Finish = Literal["stop", "length", "tool_calls"]
#: `stop_reason` of requests with `stop_token_ids`: the string or token that ended the answer.
StopReason = str | int | UnsetType | None


class PromptTokensDetails(Struct):
    """Of the prompts' tokens."""

    cached_tokens: int


class Usage(Struct):
    """Tokens of a request: of its prompts, each counted once, and of all its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


class TopLogprob(Struct):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct):
    """A token that was chosen. Those of a stop string that was cut off are not told."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """The log probabilities of a message's tokens, or of a chunk's."""

    content: list[ChatLogprob]
    refusal: None


class FunctionCall(Struct):
    """What is to be called, and with what."""

    name: str
    arguments: str


class ToolCall(Struct):
    """A call of a tool that the model asks for."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(Struct):
    """What the model answered."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class PromptLogprob(Struct):
    """A token that stands in the prompt, or could have; the most probable has rank 1."""

    logprob: float
    rank: int
    decoded_token: str


#: `prompt_logprobs`: for each token of the prompt, by token id; None for the first token.
PromptLogprobs = list[dict[str, PromptLogprob] | None] | UnsetType


class ChatChoice(Struct):
    """One of the `n` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    stop_reason: StopReason = UNSET


class ChatCompletion(Struct):
    """The answer of /v1/chat/completions where it is not streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs = UNSET


class FunctionCallPiece(Struct):
    """A piece of a call: its name comes with the first, then its arguments bit by bit."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallPiece(Struct):
    """A piece of the call at `index`; only the first has its id and type."""

    index: int
    function: FunctionCallPiece
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct):
    """What is new since the chunk before; the role comes with the first."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """What is new of one of the `n` answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    stop_reason: StopReason = UNSET


class ChatChunk(Struct):
    """The data of one event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionLogprobs(Struct):
    """Log probabilities in the older form: lists with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]  # None: the first of an echoed prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    """One of the `n` answers to one of the prompts."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: StopReason = UNSET
    prompt_logprobs: PromptLogprobs = UNSET


class Completion(Struct):
    """The answer of /v1/completions where it is not streamed."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(Struct):
    """What is new of one of the answers."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: StopReason = UNSET


class CompletionChunk(Struct):
    """The data of one event of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class Embedding(Struct):
    """The vector of one input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Struct):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct):
    """The answer of /v1/embeddings, in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Tokens(Struct):
    """The answer of /tokenize."""

    count: int
    max_model_len: int | None
    tokens: list[int]


class Detokenized(Struct):
    """The answer of /detokenize."""

    prompt: str


class Model(Struct):
    """A model that is served, and how it does."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    engine: str
    aliases: list[str]
    state: str
    root: str
    parent: str | None
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None
    max_tokens: int | None


class ModelList(Struct):
    """The models that the key may use."""

    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


class OpenAIErrorObject(Struct):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(Struct):
    """An error in OpenAI's envelope; in a stream that has begun it is the data of an event."""

    error: OpenAIErrorObject
