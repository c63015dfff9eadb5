"""Types inside messages, without tags: sampling parameters, deltas, and status.

Imported by way of `servekit.protocol.messages`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from servekit.protocol.adapters import AdapterInfo, AdapterSpec, AdapterStatus
from servekit.protocol.base import Message, Value
from servekit.protocol.control.startup_messages import Start
from servekit.protocol.forwarding import HttpPart
from servekit.protocol.residency import ResidencyStatus
from servekit.protocol.speech import Transcript

FinishReason = Literal["stop", "length", "cancelled"]
WorkerState = Literal[
    "starting",
    "loading",
    "ready",
    "stalled",  # makes no progress, or its engine has died: it is sent nothing new, and ended
    "draining",
    "backoff",
    "failed",
    "stopped",
    "asleep",  # its weights are in the host's memory, or are read again; it takes no requests
]

#: Tasks of a request.
Task = Literal[
    "generate",
    "embed",
    "tokenize",
    "detokenize",
    "forward",
    "classify",
    "score",
    "transcribe",
]
#: Tasks, and parameters that not every engine supports.
Capability = Literal[
    "generate",
    "embed",
    "tokenize",
    "detokenize",
    "forward",  # requests to endpoints that servekit does not know
    "classify",  # a score for each label of a text
    "score",  # the relevance of a document to a query, read together
    "transcribe",  # the text of a recording
    "logprobs",
    "logit_bias",
    "penalties",
    "min_p",
    "grammar",
    "stop_token_ids",
    "bad_words",
    "prompt_logprobs",
    "tools",
    "images",  # in messages
    "audio",  # recordings in messages
    "forced_tools",  # calls that a grammar asks for, of a model whose template has no tools
    "adapters",
    "instruction",  # of a query and a document, for a reranker
]


#: Capabilities of a model that reads more than text.
Modality = Literal["images", "audio"]
MODALITIES: tuple[Modality, ...] = ("images", "audio")
#: How one replica is spread over its GPUs: each layer over all; by layers; by llama.cpp.
Parallel = Literal["", "tensor", "device_map", "split"]
#: The request parameter that a grammar comes from: OpenAI's, or vLLM's, older and newer.
GrammarParam = Literal[
    "response_format",
    "tools",
    "text.format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
]


class Grammar(Value, frozen=True):
    """A constraint on the generated text, token by token.

    `text` is a JSON schema ("json_schema"; `true` allows any JSON), a regular expression in the
    Rust dialect ("regex"), or a grammar in llguidance's Lark dialect ("lark").
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    param: GrammarParam = "response_format"  # where it comes from


class SamplingParams(Value, frozen=True):
    """Sampling parameters. None means the model's own default (its generation config).

    The gateway checks the ranges; an engine may rely on them.
    """

    max_tokens: int | None = None  # None: up to the end of the context; 0: the prompt only
    temperature: float | None = None  # >= 0; 0 is greedy
    top_p: float | None = None  # (0, 1]
    top_k: int | None = None  # >= 0; 0 is off
    min_p: float | None = None  # [0, 1]
    seed: int | None = None  # signed 64 bit; None: a fresh one
    presence_penalty: float = 0.0  # [-2, 2]
    frequency_penalty: float = 0.0  # [-2, 2]
    repetition_penalty: float | None = None  # > 0; 1 is off
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, [-100, 100] added to its logit
    logprobs: int | None = None  # report log probabilities, with those of the N best, 0 to 20
    grammar: Grammar | None = None
    clamp: bool = False  # lower max_tokens to fit the context, instead of an error
    stop_token_ids: tuple[int, ...] = ()  # they end the text, like the end of sequence
    include_stop: bool = False  # include the stop string or token in the text
    bad_words: tuple[str, ...] = ()  # strings whose token sequences are never generated
    prompt_logprobs: int | None = None  # like `logprobs`, for the prompt's tokens
    echo: bool = False  # return the prompt's text as well
    #: Keep the last N tokens of the prompt; 0: all; -1: as fits. Of texts to embed, classify or
    #: score, the first.
    truncate_prompt: int = 0


class PoolingParams(Value, frozen=True):
    """Parameters of a request to embed, classify or score texts."""

    raw: bool = False  # return scores without the model's activation function
    input_tokens: int = 0  # keep the first N tokens of each input, special ones not counted; 0: all
    name: str = "input"  # the client's name of the inputs, for errors
    first: int = 0  # the place of the first input in the client's list
    instruction: str = ""  # of a query and a document; "": the model's own


class ToolCall(Value, frozen=True):
    """A tool call of an earlier turn. `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


class Media(Value, frozen=True):
    """An image or a recording of a message."""

    data: bytes  # the file
    kind: str  # "image/png", "audio/wav"
    at: int = 0  # how many characters of the content stand before it
    detail: str = ""  # OpenAI's wish for its resolution
    address: str = ""  # of a file that is not fetched yet; a worker gets none of these

    @property
    def modality(self) -> Modality:
        return "audio" if self.kind.startswith("audio/") else "images"

    def __repr__(self) -> str:  # prompts may be logged
        return f"Media({self.kind}, {len(self.data)} bytes)"


class ChatMessage(Value, frozen=True):
    """A turn of a conversation, as passed to the chat template."""

    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant
    tool_call_id: str | None = None  # which call a tool's message answers
    reasoning: str | None = None  # an assistant's thoughts before this text
    media: tuple[Media, ...] = ()

    @property
    def parts(self) -> list[str | Media]:
        """Return the content's texts, images and recordings in their order."""
        found: list[str | Media] = []
        start = 0
        for one in self.media:
            found += [self.content[start : one.at], one]
            start = one.at
        return [part for part in (*found, self.content[start:]) if part]


class Progress(Value, frozen=True):
    """The progress of a load. `done` and `total` count in `unit`; total 0 means unknown."""

    phase: str  # "fetch" | "convert" | "load" | "warm-up"
    done: int = 0
    total: int = 0
    unit: Literal["bytes", "tensors", "steps", ""] = ""


class Dialect(Value, frozen=True):
    """The format of a model's tool calls and thoughts, as its worker has found out."""

    tools: str = ""  # the family of its tool calls, a key of `gateway.parsing`; "": none known
    tool_begin: str = ""  # what stands around one call, where the family leaves that open
    tool_end: str = ""
    think_begin: str = ""  # "" for a model that does not think aloud
    think_end: str = ""
    thinks_at_once: bool = False  # the template has already written `think_begin`
    tokens: tuple[tuple[str, int], ...] = ()  # its markers that are tokens: text, id
    #: Settings of the template's switches for thoughts that make the opposite of `thinks_at_once`
    #: true: name, on or off.
    thinking_switches: tuple[tuple[str, bool], ...] = ()


class ModelInfo(Value, frozen=True):
    """The abilities and limits of a loaded model; sent once by its worker."""

    max_context: int  # tokens, prompt and completion together
    slots: int  # requests the engine runs at once
    chat: bool  # it has a chat template
    architecture: str  # e.g. "LlamaForCausalLM"; "echo"
    dtype: str  # e.g. "float32"
    device: str  # e.g. "cpu", "cuda:0" as the worker sees it
    parameters: int = 0
    kv_cache_bytes: int = 0
    detail: str = ""  # one line for people: attention, batching mode
    resumes: bool = True  # it can go on after token ids that another worker has produced
    #: Tasks and optional parameters that the engine serves: see `Capability`.
    serves: tuple[Capability, ...] = ("generate",)
    dialect: Dialect = Dialect()
    embedding_size: int = 0  # of its vectors, where it serves "embed"
    adapters: tuple[AdapterInfo, ...] = ()  # of its WorkerSpec, those that serve
    refused_adapters: dict[str, str] = {}  # the others: name, and why
    sleeps: bool = False  # it can give its device's memory back, and take it again
    prefix_block: int = 0  # tokens in a block of its prefix cache; 0: it has none
    prefix_tokens: int = 0  # that its prefix cache holds at most; 0: not known
    #: What it has loaded, as far as it decides what is said: the spec's `edition`, a dot, and the
    #: files' digest. Workers of one generation go on with each other's answers. "": not known.
    generation: str = ""
    token_bytes: int = 0  # of a text that one token stands for, at most; 0: not known
    weights_bytes: int = 0  # 0: as many as its parameters have in `dtype`
    labels: tuple[str, ...] = ()  # of its classes, where it serves "classify"
    max_audio_s: float = 0.0  # of a recording, where it serves "transcribe"; 0: not known

    @property
    def size_bytes(self) -> int:
        """Return the memory of its weights; 0 if it is not known."""
        return self.weights_bytes or self.parameters * (4 if self.dtype == "float32" else 2)


class WorkerSpec(Value, frozen=True):
    """The settings that a worker needs to load its model."""

    name: str  # the worker's own name, e.g. "smollm2/0"
    model: str
    engine: str
    path: str
    revision: str | None
    device: Literal["cpu", "cuda"]
    dtype: str
    max_context: int | None
    trust_remote_code: bool
    sampling: dict[str, float | int]  # defaults from the file, by SamplingParams field
    options: dict[str, Any]  # the engine's own, already checked against its schema
    socket: str  # where the worker listens
    tool_parser: str = ""  # a key of `tool_formats.MARKERS`, or "none"; "": from the template
    reasoning_parser: str = ""  # a key of `tool_formats.THOUGHTS`, or "none"; "": from the template
    adapters: tuple[AdapterSpec, ...] = ()
    gpus: int = 1  # number of visible GPUs, all of which it uses
    parallel: Parallel = ""  # how it is spread over several GPUs; "": one GPU
    memory_bytes: int = 0  # limit on each GPU; 0: all free memory
    host_memory_bytes: int = 0  # on a CPU, the file's limit of host memory; 0: none stated
    sleeps: bool = False  # prepare the engine for sleep
    edition: str = ""  # a digest of the settings that affect the text
    chat_template: str = ""  # jinja text; "": the model's own
    files: tuple[str, ...] = ()  # of its options, those paths whose content may affect the text


class ReplicaStatus(Value, frozen=True):
    """A worker, as seen by the supervisor."""

    name: str  # MODEL/0, MODEL/standby
    state: WorkerState
    socket: str  # where gateways reach it
    pid: int  # 0: no process runs
    device: str  # "cpu" or the GPU's index and name
    gpus: tuple[str, ...] = ()  # UUIDs
    progress: Progress | None = None  # how far its load is
    reason: str = ""  # why it failed, or died last
    restarts: int = 0  # starts after the first
    running: int = 0  # requests in its engine
    waiting: int = 0  # requests that wait in its engine
    rss_bytes: int = 0  # resident memory
    gpu_bytes: int = 0  # memory on its GPUs together
    timings_s: dict[str, float] = {}  # seconds of its last start, by phase
    stray: str = ""  # a sentence about memory that it holds on GPUs not its own
    claim_bytes: int = 0  # promised to it on its GPUs together
    excess: str = ""  # a sentence about memory that it holds beyond its claim
    kv_used: float = 0.0  # share of its KV cache in use, 0 to 1, in steps
    trouble: str = ""  # a sentence if it is ready but cannot serve: its endpoint is down
    held_bytes: tuple[int, ...] = ()  # on each of its `gpus`
    generation: str = ""  # of its ModelInfo; until it is ready the beginning: its `edition`


class ScaleStatus(Value, frozen=True):
    """The scaling of a model: its bounds, and the last change with its reason."""

    min: int  # fewest replicas
    max: int  # most replicas
    desired: int  # replicas wanted now
    reason: str = ""  # "scaled up to 3: 37 waited 3.2 s"
    at: float = 0.0  # Unix time of that, s; 0: it has not been scaled yet
    waits: str = ""  # what prevents scaling up


class Preset(Value, frozen=True):
    """A further name of a model, with what its requests leave out."""

    name: str
    sampling: dict[str, float | int]  # fields of `SamplingParams`
    system: str = ""  # the system message of chats without one
    template: dict[str, Any] = {}  # variables of the chat template


class ModelStatus(Value, frozen=True):
    """A model and its replicas, as seen by the supervisor."""

    name: str  # the name that requests use
    engine: str  # which engine runs it
    path: str  # as the file says
    created: int  # Unix time, s
    replicas: tuple[ReplicaStatus, ...]
    info: ModelInfo | None = None  # what it can do; None until it was loaded once
    aliases: tuple[str, ...] = ()  # further names
    timeout_s: float = 600.0  # longest time of a request
    max_queue: int = 1024  # requests that may wait
    quarantine_s: float = 600.0  # how long a request that kills workers is refused
    adapters: tuple[AdapterStatus, ...] = ()
    standbys: tuple[ReplicaStatus, ...] = ()  # they fork the next workers, and take no requests
    residence: ResidencyStatus | None = None  # None: it is loaded at the start, and stays
    routing: Literal["auto", "least_loaded", "round_robin"] = "auto"  # as the file says
    scale: ScaleStatus | None = None  # None: its number of replicas is fixed
    changing: bool = False  # its replicas are being replaced: one will come, even if none is there
    endpoints: tuple[str, ...] = ()  # patterns of the endpoints that are forwarded to its server
    presets: tuple[Preset, ...] = ()
    left_out: str = ""  # the profile in force, if the model is not in it
    has_served: bool = False  # this or an earlier version of it

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names of the model itself: its own, aliases and presets."""
        return (self.name, *self.aliases, *(preset.name for preset in self.presets))


class TokenLogprob(Value, frozen=True):
    """A sampled token, its log probability before any sampling filter, and the best tokens.

    Tokens are bytes because a token may be a part of a character.
    """

    token: bytes
    logprob: float
    best: tuple[tuple[bytes, float], ...] = ()  # the most probable first


class Continuation(Value, frozen=True):
    """The facts that another worker needs, beside the tokens so far, to continue a request."""

    generation: str  # of the worker and, after a plus sign, of the request's adapter
    max_tokens: int  # as determined by the first worker
    #: Token ids of a prompt from a chat template, which may contain the time, or of one that was
    #: cut to fit: unsigned, 4 bytes each, little-endian. b"": the request's own prompt gives the
    #: same ids again.
    prompt: bytes = b""
    #: The engine continues the text of the answer, as it does not know its tokens.
    by_text: bool = False


class PromptToken(Value, frozen=True):
    """A token of a prompt, and its probability after those before it.

    The first token has no `logprob`. The most probable token has rank 1.
    """

    id: int
    token: bytes
    logprob: float | None = None
    rank: int = 0
    best: tuple[tuple[int, bytes, float], ...] = ()  # ids, texts, log probabilities


class Prompt(Value, frozen=True):
    """The parts of its own prompt that a request asked for."""

    text: str = ""  # with `echo`
    tokens: list[PromptToken] = []  # with `prompt_logprobs`: all


class Delta(Value, frozen=True):
    """The output of one engine step for one request.

    The last one has `finish` and `completion_tokens`; each one has `prompt_tokens`, for clients
    that report it at once. `token_ids` are those sampled since the last Delta, without the
    end-of-sequence token; `text` may lag behind them while a character or a possible stop string is
    incomplete. With `logprobs` and stop strings the ids wait for their text, and those of a stop
    string are never sent. The answer to "tokenize" is one Delta with the ids, to "detokenize" one
    with the text.
    """

    id: int
    text: str
    token_ids: list[int] = []
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    logprobs: list[TokenLogprob] = []  # one for each of `token_ids`, if requested
    #: Of each input, float32, little-endian: "embed": [embedding_size], "classify": [labels],
    #: "score": [labels], of which the first counts.
    vectors: list[bytes] = []
    stop: str = ""  # the stop string that ended the text, if any
    cached_tokens: int = 0  # prompt tokens from the engine's prefix cache
    # of a traced request, with `finish`: Unix times in ns of its acceptance, its start in the
    # engine, its first token, and its end
    times_ns: tuple[int, ...] = ()
    stop_token: int = -1  # the one of `stop_token_ids` that ended the text, if any
    http: HttpPart | None = None  # "forward": the next part of the response
    continuation: Continuation | None = None  # on the first with tokens, if more follow
    prompt: Prompt | None = None  # with the first one, if requested
    speech: Transcript | None = None  # "transcribe": what was heard next


class TokenBatch(Message, frozen=True):
    """A token for each of many requests that have had a Delta: the usual result of a step.

    Columns, because three lists in one message decode three times faster than as many Deltas.
    """

    ids: list[int]
    texts: list[str]
    token_ids: list[int]


class ExitRecord(Value, frozen=True):
    """A death of a worker, as far as it can be reconstructed."""

    at: float  # Unix time, s
    pid: int
    lived_s: float
    what: str  # one sentence: code or signal, and the reason
    code: int | None
    signal: int | None
    phase: str  # "loading", "ready", ...: its state when it died
    out_of_memory: str  # "", "host" or "gpu": a guess from kernel counters and the worker's output
    served: int  # requests it had completed
    running: int  # requests that were in its engine, by its last Pong
    rss_bytes: int  # when last measured
    gpu_bytes: int
    tail: tuple[str, ...]  # its last lines
    stacks: tuple[str, ...]  # of all its threads, if it has dumped them
    start: Start | None = None  # its phases, if it was never ready


class ReplicaHistory(Value, frozen=True):
    """The history of one replica, the last exit last."""

    name: str
    state: str
    reason: str
    restarts: int
    next_attempt_s: float | None  # seconds from now; None if none is planned
    exits: tuple[ExitRecord, ...]
    alert: str = ""  # a sentence about a problem of a live worker


class GatewayStatus(Value, frozen=True):
    name: str  # gateway/0, gateway/ADDRESS
    pid: int  # 0: no process runs
    state: str  # as of a replica
    restarts: int = 0  # starts after the first
    rss_bytes: int = 0  # resident memory
    requests: int = 0  # taken since its start
    in_flight: int = 0  # requests that wait or run
    node: str = ""  # its address, if it is not on the supervisor's node
    reason: str = ""  # why it does not serve, or why it ended last


class GpuStatus(Value, frozen=True):
    """A GPU, whoever uses it."""

    index: int  # NVML's
    uuid: str
    name: str
    total_bytes: int  # its memory
    used_bytes: int  # memory in use, by servekit and by others
    utilisation: float | None = None  # share of the last moments with a kernel running, 0 to 1
    node: str = ""  # address of its machine in a cluster; "": this machine


def as_builtins(value: Any) -> Any:
    """Convert structs to dicts by field name (on the wire they are arrays)."""
    if isinstance(value, msgspec.Struct):
        return {name: as_builtins(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: as_builtins(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_builtins(item) for item in value]
    return value
