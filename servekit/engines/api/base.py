"""What an engine is. Small on purpose: a new engine is one class of about a hundred lines.

A worker drives exactly one engine:

    engine = create(spec)                # cheap; no torch yet
    info = engine.load(report)           # blocking, in the engine's loading thread
    engine.start(emit)                   # the engine's loop runs in a thread of its own
    engine.submit(job); engine.cancel(id)   # from the worker's I/O thread, never blocking
    engine.close()

`emit` takes all that one step brought, as one list; it may be called from any thread. The worker
turns text into token ids and token ids into text with `engine.codec`, applies stop strings, and
checks prompt length and token range against `ModelInfo` before `submit`. It submits nothing that
`ModelInfo.serves` does not name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from servekit.engines.api.generation_identity import identify
from servekit.errors import Unsupported
from servekit.protocol.adapters import AdapterInfo, AdapterSpec
from servekit.protocol.messages import (
    ChatMessage,
    Grammar,
    ModelInfo,
    Progress,
    PromptToken,
    SamplingParams,
    TokenLogprob,
    WorkerSpec,
)

Report = Callable[[Progress], None]

#: What an engine dies of after `fail_step`.
TOLD_TO_FAIL = "this step was told to fail, by an experiment"


@dataclass(slots=True)
class Job:
    """One request as an engine sees it: token ids in, token ids out.

    `params.max_tokens` is always set and prompt + max_tokens fits the context. `emitted` are
    completion tokens that another worker produced; the engine goes on after them, and penalties,
    `min_tokens` and the noise of a seed count them as its own. `params.max_tokens` counts them
    too.
    """

    id: int
    prompt_ids: list[int]
    params: SamplingParams
    emitted: list[int] = field(default_factory=list)
    constraint: object | None = None  # what `Engine.constrain` made of `params.grammar`
    adapter: str = ""  # one that is loaded; "": the base model
    #: What must not come: the last of each, where the completion ends with those before it.
    banned: tuple[tuple[int, ...], ...] = ()
    cache_salt: str = ""  # a prefix cache is shared with jobs of the same one only


@dataclass(slots=True)
class EmbedJob:
    """Texts to embed, as token ids; each fits the context."""

    id: int
    inputs: list[list[int]]


class StepOutput(msgspec.Struct, gc=False):
    """What one step brought to one job.

    `finish` is "stop" for an end-of-sequence token (which is not among `token_ids`) or where a
    grammar has come to its end, "length" for `max_tokens`. A failed job has `error` set and gets no
    further output; with `param` it is the request that is wrong, not the engine. A cancelled job
    gets no further output at all. An EmbedJob gets one, with all its `vectors` and "stop".

    One is made for each token: as a Struct in a third of the time that a dataclass takes.
    """

    id: int
    token_ids: list[int]
    finish: Literal["stop", "length"] | None = None
    error: str | None = None
    param: str | None = None
    logprobs: list[TokenLogprob] | None = None  # of `token_ids`, where asked for
    vectors: list[bytes] | None = None  # of all inputs, float32 [embedding_size], little-endian
    cached_tokens: int = 0  # of the prompt, those taken from a prefix cache; any output may say
    prompt: list[PromptToken] | None = None  # all of them, with the first output, where asked for
    stop_token: int = -1  # with "stop": that of `params.stop_token_ids` that ended it, if one did


Emit = Callable[[Sequence[StepOutput]], None]


@dataclass(frozen=True, slots=True)
class Load:
    """The engine's load now. `progress_age_s` is 0 when it has nothing to do."""

    running: int
    waiting: int
    kv_used: float
    progress_age_s: float


class Decoder(Protocol):
    """Turns one stream of token ids into text, never splitting a character."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that has become certain; "" while a character is incomplete."""

    def flush(self) -> str:
        """Return what is left at the end; an incomplete character is left out."""


class TooManyTokens(Exception):
    """A text has more than `count` tokens; that is all that was found out about it.

    From a codec to the worker, which words the refusal; nobody else sees it.
    """

    def __init__(self, count: int) -> None:
        super().__init__(f"more than {count} tokens")
        self.count = count


class Codec(Protocol):
    """The model's tokenizer and chat template."""

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        """Token ids of a plain prompt, special tokens added as the model expects.

        Where far more than `limit` tokens come out, it may raise TooManyTokens instead. It never
        does for a text that has no more than `limit`.
        """

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a piece of text: nothing is added to it."""

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
        continues: bool = False,
        limit: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation by the model's own template, generation prompt included.

        `tools` are OpenAI's definitions, `template` further arguments of the template. With
        `continues` the last message is the model's own beginning, to be gone on with. Raises
        RequestError if the template refuses, and as `encode` does.
        """

    def decoder(self, markers: Collection[str] = ()) -> Decoder:
        """A fresh incremental decoder.

        Special tokens have no text, but for those whose text is one of `markers`.
        """


class Engine(ABC):
    """One model, loaded once. Only `load` may block."""

    codec: Codec
    vocab_size: int
    #: It runs jobs with a prompt as long as the context and `max_tokens` 1: of its only token
    #: nothing is read, and where a client asks for no tokens, nothing is told.
    fills_context = False
    #: Called as soon as `fatal` is set, by the thread that sets it; the worker puts itself here.
    on_death: Callable[[], None] | None = None
    _fatal: BaseException | None = None

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec

    @property
    def fatal(self) -> BaseException | None:
        """The error that the engine has died of; None while it lives.

        An engine sets it when its loop cannot go on, from any thread, after it has emitted what
        its completed steps brought, and emits nothing more. An engine's death is its worker's:
        the worker sends what was emitted, and exits at once to be replaced. So the engine says
        nothing of the jobs that it had: they go on in other workers.
        """
        return self._fatal

    @fatal.setter
    def fatal(self, error: BaseException | None) -> None:
        self._fatal = error
        if error is not None and self.on_death is not None:
            self.on_death()

    @classmethod  # noqa: B027 - not every engine has something to prepare
    def prepare(cls, spec: WorkerSpec) -> None:
        """Do what `load` will find done in a fork of this process; see `worker.standby`.

        No thread may be left running, and no device touched. Raises LoadError.
        """

    @abstractmethod
    def load(self, report: Report) -> ModelInfo:
        """Fetch and load; raises LoadError with a sentence for the user."""

    def identify(self, *, portable: bool = False) -> str:
        """A digest of the files that `load` has read; see `engines.identity`.

        Workers whose digests differ do not go on with each other's answers. "" for an engine whose
        `path` is no file, and not the name of any.
        """
        spec = self.spec
        return identify(
            *(spec.path, spec.revision), portable=portable, trust_remote_code=spec.trust_remote_code
        )

    def identify_adapter(self, adapter: AdapterSpec, *, portable: bool = False) -> str:
        """The same of an adapter that it has loaded, with its name."""
        found = identify(adapter.path, adapter.revision, portable=portable, adapter=True)
        return f"{adapter.path}@{adapter.revision or ''}.{found}"

    @abstractmethod
    def start(self, emit: Emit) -> None:
        """Start the engine's loop."""

    @abstractmethod
    def submit(self, job: Job) -> None:
        """Queue a job. Raises RequestError if the engine cannot run it; never kills the loop."""

    def embed(self, job: EmbedJob) -> None:
        """Queue texts to embed; as `submit`."""
        raise Unsupported("this engine makes no embeddings", param="model")

    def load_adapter(self, adapter: AdapterSpec) -> AdapterInfo:
        """Load and verify an adapter beside what runs; jobs may name it from then on.

        Called from a thread, one at a time; may block for long. Raises RequestError if the adapter
        is wrong for this model or does not pass its verification, LoadError if only now is wrong;
        in both cases nothing of it is left.
        """
        raise Unsupported("this engine has no adapters", param="lora_name")

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter that no job names any more, and free its memory; as `load_adapter`."""
        raise Unsupported("this engine has no adapters", param="lora_name")

    def constrain(self, grammar: Grammar, emitted: Sequence[int]) -> object:
        """Compile a grammar for one job, and lead it through the tokens `emitted` before.

        Called from any thread, several at once; may take a second or two. Raises RequestError if
        the grammar cannot be compiled or is too large.
        """
        raise Unsupported("this engine keeps to no grammar", param=grammar.param)

    def sleep(self) -> None:
        """Give the device's memory back, weights kept in the host's; `wake` undoes it.

        Called from a thread, while no job runs; none is submitted before `wake` has returned. The
        KV cache and what it holds of prompts may be forgotten. Raises LoadError where it cannot be;
        the engine then goes on awake. Only where `ModelInfo.sleeps`.
        """
        raise Unsupported("this engine cannot sleep", param="model")

    def wake(self) -> None:
        """Take the device's memory again and be as before `sleep`; as there, from a thread.

        Raises LoadError where the memory is not to be had; the engine then is still asleep.
        """
        raise Unsupported("this engine cannot sleep", param="model")

    @abstractmethod
    def cancel(self, job_id: int) -> None:
        """Stop a job; its slot is free in the next step. Unknown ids are ignored."""

    @abstractmethod
    def load_now(self) -> Load:
        """Cheap: called for every Ping."""

    def fail_step(self) -> None:
        """Have the next step raise, as `servekit chaos` wishes; from the worker's I/O thread.

        Called only in a worker that was started for such experiments.
        """
        raise Unsupported("this engine cannot be made to fail in a step")

    @abstractmethod
    def close(self) -> None:
        """Stop the loop and free the device. Not called once the engine has died."""
