"""The engine interface. Small on purpose: a new engine is one class of about a hundred lines.

A worker drives exactly one engine:

    engine = create_engine(spec)         # cheap; no torch yet
    info = engine.load(report)           # blocking, in the engine's loading thread
    engine.start(emit)                   # the engine's loop runs in a thread of its own
    engine.submit(job); engine.cancel(id)   # from the worker's I/O thread, never blocking
    engine.close()

`emit` takes all outputs of one step as one list; any thread may call it. The worker converts
between text and token ids with `engine.codec`, applies stop strings, and checks prompt length and
token range against `ModelInfo` before `submit`. It submits only requests that `ModelInfo.serves`
covers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

from servekit.engines.api.generation_identity import identify_files
from servekit.errors import Unsupported
from servekit.protocol.adapters import AdapterInfo, AdapterSpec
from servekit.protocol.messages import (
    ChatMessage,
    Grammar,
    ModelInfo,
    Progress,
    PromptToken,
    SamplingParams,
    SpeechParams,
    TokenLogprob,
    Transcript,
    WorkerSpec,
)

Report = Callable[[Progress], None]

#: Error text of an engine that fails after `fail_step`.
TOLD_TO_FAIL = "this step failed on purpose, for an experiment"


class Job(msgspec.Struct):
    """A request to the engine, with token ids as input and output.

    `params.max_tokens` is always set, and prompt + max_tokens fits the context. `emitted` are
    completion tokens that another worker generated; the engine continues after them, and penalties,
    `min_tokens`, the noise of a seed and `params.max_tokens` count them as its own.
    """

    id: int
    prompt_ids: list[int]
    params: SamplingParams
    emitted: list[int] = []
    constraint: object | None = None  # the result of `Engine.constrain` for `params.grammar`
    adapter: str = ""  # name of a loaded adapter; "": the base model
    #: Token sequences to avoid: the last token is forbidden after the others.
    banned: tuple[tuple[int, ...], ...] = ()
    cache_salt: str = ""  # jobs share prefix cache entries only with jobs of the same salt
    #: `MediaPrompt.inputs` of a conversation with images or recordings.
    media: object | None = None


@dataclass(slots=True)
class EmbedJob:
    """Texts to embed or classify, or pairs of texts to score, as token ids that fit the context."""

    id: int
    inputs: list[list[int]]
    types: list[list[int]] = field(default_factory=list)  # token types of pairs; []: all are 0
    raw: bool = False  # return the scores of a classifier without its activation function


@dataclass(slots=True)
class SpeechJob:
    """A recording to transcribe, as `Engine.read_recording` has made it.

    `params.temperature` and `params.seed` are heeded, and `params.max_tokens` limits each window.
    """

    id: int
    recording: object = field(repr=False)
    params: SamplingParams
    speech: SpeechParams


class StepOutput(msgspec.Struct, gc=False):
    """The output of one step for one job.

    `finish` is "stop" for an end-of-sequence token (which is not in `token_ids`) or a completed
    grammar, "length" for `max_tokens`. A failed job has `error` set and gets no further output; if
    `param` is set too, the request is at fault, not the engine. A cancelled job gets no further
    output. An EmbedJob gets one output, with all its `vectors` and "stop": of a classifier these
    are the scores of its labels.

    One is created per token; a Struct is created faster than a dataclass.
    """

    id: int
    token_ids: list[int]
    finish: Literal["stop", "length"] | None = None
    error: str | None = None
    param: str | None = None
    logprobs: list[TokenLogprob] | None = None  # of `token_ids`, if requested
    vectors: list[bytes] | None = None  # of all inputs, float32 [size or labels], little-endian
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache; any output may set it
    prompt: list[PromptToken] | None = None  # whole prompt, with the first output, if requested
    stop_token: int = -1  # the token of `params.stop_token_ids` that ended the job, if any


class SpeechOutput(StepOutput):
    """The output of one step for a SpeechJob: what was heard in the recording's next window.

    Its `token_ids` are only counted.
    """

    speech: Transcript | None = None
    prompt_tokens: int = 0


Emit = Callable[[Sequence[StepOutput]], None]


@dataclass(frozen=True, slots=True)
class Load:
    """The current load of the engine. `progress_age_s` is 0 while it is idle.

    The tokens of speculative decoding are counted from its start on.
    """

    running: int
    waiting: int
    kv_used: float
    progress_age_s: float
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Decoder(Protocol):
    """An incremental decoder of one token stream that never splits a character."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is final; "" while a character is incomplete."""

    def flush(self) -> str:
        """Return the rest of the text; an incomplete character is dropped."""


class TooManyTokens(Exception):
    """A text has more than `count` tokens; the exact number is not known.

    A codec raises it; the worker words the refusal.
    """

    def __init__(self, count: int) -> None:
        super().__init__(f"more than {count} tokens")
        self.count = count


class TokenizedText(NamedTuple):
    """The token ids of a text or of a pair of texts, with special tokens."""

    ids: list[int]
    types: list[int]  # token types; []: the tokenizer has none
    parts: list[int]  # 1 or 2: from that text, 0: a special token; []: not known


class MediaPrompt(NamedTuple):
    """A conversation with images or recordings: its token ids, and what else it has become."""

    ids: list[int]
    inputs: object


class Codec(Protocol):
    """The model's tokenizer and chat template."""

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        """Return the token ids of a plain prompt, with the special tokens that the model expects.

        May raise TooManyTokens if the text has far more than `limit` tokens, and never for a text
        of at most `limit` tokens.
        """

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
        continues: bool = False,
        limit: int | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, rendered by the model's chat template.

        The generation prompt is included. `tools` are OpenAI tool definitions, `template` holds
        further template arguments. With `continues` the model continues the last message, which is
        the beginning of its answer. Raises RequestError if the template refuses, and TooManyTokens
        as `encode` does.
        """

    def decoder(self, markers: Collection[str] = ()) -> Decoder:
        """Return a new incremental decoder.

        It omits special tokens, except those whose text is in `markers`.
        """


@runtime_checkable
class PairCodec(Codec, Protocol):
    """A codec of an engine that scores pairs of texts, or whose inputs can be cut."""

    def encode_parts(
        self, text: str, second: str | None = None, instruction: str = ""
    ) -> TokenizedText:
        """Return the token ids of a text, or of a pair of texts, as for a cross-encoder.

        An `instruction` is for models whose `ModelInfo.serves` has it; "": the model's own.
        """


class Engine(ABC):
    """The base class of engines: a model, loaded once. Only `load` may block."""

    codec: Codec
    vocab_size: int
    #: The engine accepts jobs with a prompt as long as the context and `max_tokens` 1. The one
    #: token is not read, and clients that asked for no tokens do not get it.
    fills_context = False
    #: Called as soon as `fatal` is set, by the thread that sets it. The worker sets this callback.
    on_death: Callable[[], None] | None = None
    _fatal: BaseException | None = None

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec

    @property
    def fatal(self) -> BaseException | None:
        """Return the error that stopped the engine; None while it runs.

        The worker sets it to an error that escapes from a thread of `start`. Otherwise an engine
        sets it, from any thread, when its loop cannot continue, after it has emitted the outputs of
        its completed steps, and emits nothing afterwards. The worker then sends the emitted outputs
        and exits at once, to be replaced. The engine reports no failure for its jobs, because they
        continue in other workers.
        """
        return self._fatal

    @fatal.setter
    def fatal(self, error: BaseException | None) -> None:
        self._fatal = error
        if error is not None and self.on_death is not None:
            self.on_death()

    @classmethod  # noqa: B027 - not every engine has something to prepare
    def prepare(cls, spec: WorkerSpec) -> None:
        """Do the part of `load` that a fork of this process inherits; see `worker.fork_server`.

        Must leave no thread running and touch no device. Raises LoadError.
        """

    @abstractmethod
    def load(self, report: Report) -> ModelInfo:
        """Fetch and load the model. Raises LoadError with a message for the user."""

    def identify(self, *, portable: bool = False) -> str:
        """Return a digest of the files that `load` has read; see `api.generation_identity`.

        A worker continues another worker's streams only if their digests are equal. It covers
        `path` and the options that are a `ConfigPath`; "" if none of them names a file.
        """
        spec = self.spec
        found = [
            identify_files(
                *(spec.path, spec.revision),
                portable=portable,
                trust_remote_code=spec.trust_remote_code,
            ),
            *(identify_files(file, None, portable=portable) for file in spec.files),
        ]
        return ".".join(filter(None, found))

    def identify_adapter(self, adapter: AdapterSpec, *, portable: bool = False) -> str:
        """Return the name and digest of a loaded adapter, as `identify` does for the model."""
        found = identify_files(adapter.path, adapter.revision, portable=portable, adapter=True)
        return f"{adapter.path}@{adapter.revision or ''}.{found}"

    @abstractmethod
    def start(self, emit: Emit) -> None:
        """Start the engine's loop, in a thread of its own."""

    @abstractmethod
    def submit(self, job: Job) -> None:
        """Queue a job. Raises RequestError if the engine cannot run it; never kills the loop."""

    def embed(self, job: EmbedJob) -> None:
        """Queue texts to embed; raises as `submit` does."""
        raise Unsupported("this engine makes no embeddings", param="model")

    def classify(self, job: EmbedJob) -> None:
        """Queue texts to classify, or pairs of texts to score; raises as `submit` does."""
        raise Unsupported("this engine does not classify", param="model")

    def read_recording(self, file: bytes, speech: SpeechParams) -> object:
        """Decode a recording for `SpeechJob.recording`, and check what is asked about it.

        Called from any thread, if `ModelInfo.serves` has "transcribe"; may take seconds. Raises
        RequestError for a file that cannot be read as audio.
        """
        raise Unsupported("this engine does not transcribe", param="model")

    def transcribe(self, job: SpeechJob) -> None:
        """Queue a recording to transcribe; raises as `submit` does."""
        raise Unsupported("this engine does not transcribe", param="model")

    def load_adapter(self, adapter: AdapterSpec) -> AdapterInfo:
        """Load and verify an adapter while jobs run; later jobs may name it.

        Called from a thread, one call at a time; may block for long. Raises RequestError if the
        adapter does not fit this model or fails its verification, LoadError if the failure is
        temporary; in both cases nothing of the adapter stays loaded.
        """
        raise Unsupported("this engine has no adapters", param="lora_name")

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter that no job uses and free its memory; called as `load_adapter`."""
        raise Unsupported("this engine has no adapters", param="lora_name")

    def constrain(self, grammar: Grammar, emitted: Sequence[int]) -> object:
        """Compile a grammar for one job and advance it over the tokens `emitted` so far.

        Called from any thread, concurrently; may take a second or two. Raises RequestError if the
        grammar cannot be compiled or is too large.
        """
        raise Unsupported("this engine does not support grammars", param=grammar.param)

    def encode_media(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        template: Mapping[str, Any],
        continues: bool,
    ) -> MediaPrompt:
        """Render a conversation with images or recordings, as `Codec.render_chat` does, and decode
        these.

        Called from any thread, if `ModelInfo.serves` has "images" or "audio"; may take seconds.
        Raises RequestError for a file that cannot be decoded.
        """
        raise Unsupported("this engine takes no images and no recordings", param="messages")

    def sleep(self) -> None:
        """Free the device memory and keep the weights in host memory, until `wake`.

        Called from a thread while no job runs; no job is submitted before `wake` has returned. The
        KV cache may be dropped. Called only if `ModelInfo.sleeps`. Raises LoadError if the engine
        cannot sleep; it then stays awake.
        """
        raise Unsupported("this engine cannot sleep", param="model")

    def wake(self) -> None:
        """Allocate the device memory again and restore the state before `sleep`.

        Called from a thread. Raises LoadError if the memory is not available; the engine then stays
        asleep.
        """
        raise Unsupported("this engine cannot sleep", param="model")

    @abstractmethod
    def cancel(self, job_id: int) -> None:
        """Stop a job; its slot is free in the next step. Unknown ids are ignored."""

    @abstractmethod
    def load_now(self) -> Load:
        """Return the current load. Must be cheap: called for every Ping."""

    def fail_step(self) -> None:
        """Make the next step raise, for `servekit chaos`; called from the worker's I/O thread.

        Called only in a worker that was started for such experiments.
        """
        raise Unsupported("this engine cannot be made to fail in a step")

    @abstractmethod
    def close(self) -> None:
        """Stop the loop and free the device. Not called after `fatal` was set."""
