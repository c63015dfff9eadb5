"""Settings that gateways take over at a reload, and the key usage that they report to each other.

Imported by way of `servekit.protocol.messages`.
"""

from __future__ import annotations

from typing import Literal

from servekit.protocol.base import Message, Value


class KeyRule(Value, frozen=True):
    """An API key as gateways know it: its hash or digest, and the permissions of its holder.

    Exactly one of `hash` (from the file) and `digest` (`config.keys.fast_digest`, of a key that the
    supervisor has in the clear) is set.
    """

    name: str
    hash: str = ""
    digest: bytes = b""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    models: tuple[str, ...] | None = None  # by their own names; None: all
    priority: int = 0
    admin: bool = False
    metrics: bool = False
    tools: bool = False  # the MCP servers, on the chat page


class KeyUse(Value, frozen=True):
    """Usage of one key at one gateway since the last report, and its active requests."""

    name: str
    requests: int
    tokens: int
    active: int


class SpentBudget(Value, frozen=True):
    """A key that has used up its tokens of a day or month, and when the next one begins."""

    name: str
    period: str  # "daily" or "monthly"
    limit: int  # tokens
    resets_at: float  # Unix time, s


class KeyBudgets(Message, frozen=True):
    """All keys whose token budget is used up, from the supervisor to each gateway on a change."""

    spent: tuple[SpentBudget, ...] = ()


class McpServer(Value, frozen=True):
    """An MCP server, by a command or a URL; see `config.mcp.McpServerConfig`."""

    name: str
    command: tuple[str, ...] = ()
    env: dict[str, str] = {}
    cwd: str = ""
    url: str = ""
    headers: dict[str, str] = {}
    start_timeout_s: float = 30.0
    call_timeout_s: float = 60.0
    idle_s: float = 600.0  # without a call, after which it is ended


class RequestLimits(Value, frozen=True):
    """Limits of one request; see `config.access.LimitsConfig`."""

    messages: int = 4096
    stop_strings: int = 32
    images: int = 16
    json_depth: int = 64
    schema_depth: int = 16


class ImageFetching(Value, frozen=True):
    """The images that gateways fetch; see `config.access.FetchImagesConfig`."""

    hosts: tuple[str, ...] = ()  # "example.com", "*.example.com", "example.com:8443"
    private_addresses: bool = False
    timeout_s: float = 10.0
    max_bytes: int = 20 * 2**20  # of all images of a request


class ResponseStorage(Value, frozen=True):
    """The responses that gateways keep; see `config.access.StoreResponsesConfig`."""

    max_bytes: int = 0  # 0: none is kept
    days: float = 30.0


class BatchRules(Value, frozen=True):
    """Files and batches; see `config.access.BatchesConfig`."""

    max_bytes: int = 0  # of the files of a key; 0: there are no files and no batches
    max_files: int = 0
    max_batches: int = 0
    days: float = 30.0
    concurrent: int = 0


class Tracing(Value, frozen=True):
    """Export of trace spans; see `config.access.TracingConfig`."""

    endpoint: str = ""  # OTLP over HTTP; "": requests are not traced
    sample: float = 1.0  # share of requests, 0 to 1, of those whose client has not decided
    service: str = "servekit"


class AccessRules(Value, frozen=True):
    """The keys of the file that gateways take over at a reload: permissions, limits and defaults.

    Without API keys, any client that reaches the port may do all but administer.
    """

    keys: tuple[KeyRule, ...] = ()
    salt: bytes = b""  # of every `digest`
    sessions: bytes = b""  # secret that signs sessions of the UI
    cors: tuple[str, ...] = ()  # origins, or "*"
    hosts: tuple[str, ...] = ()  # accepted host names; empty: all
    log_prompts: bool = False
    limits: RequestLimits = RequestLimits()
    certificate: str = ""  # changes when the TLS files do: read them again
    runtime_adapters: bool = False  # without keys: any client may load adapters
    open_metrics: bool = False  # with keys: /metrics is read without one
    tracing: Tracing = Tracing()
    unknown_parameters: Literal["warn", "refuse", "ignore"] = "warn"
    default_model: str = ""  # for requests without a model; "": the first
    max_queue_bytes: int = 256 * 2**20  # of waiting requests at one gateway
    write_timeout_s: float = 60.0  # without any progress in writing an answer
    trusted_proxies: tuple[str, ...] = ()  # addresses and networks whose X-Forwarded-… holds
    prefixes_by_key: bool = False  # prefix caches are shared by requests of one key only
    fetch_images: ImageFetching = ImageFetching()
    store_responses: ResponseStorage = ResponseStorage()
    log_requests: bool = True  # note each request for the request log
    browser_link: bool = False  # a browser may be the owner's, by a one-time link
    batches: BatchRules = BatchRules()
    mcp: tuple[McpServer, ...] = ()  # whose tools the chat page offers
