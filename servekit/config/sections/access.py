"""Access control in the configuration file: keys, TLS, limits, logging, tracing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from servekit.config import keys
from servekit.config.base_model import Section, VariableName, require_form

_LABEL = "[A-Za-z0-9-]+"
_ORIGIN = r"^(\*|https?://[^/\s*]+)$"


def _key_name(value: str) -> str:
    if not keys.is_name(value):
        raise ValueError(keys.NAME_RULE)
    return value


def _hash(value: str) -> str:
    keys.parse_hash(value)
    return value


KeyName = Annotated[str, AfterValidator(_key_name)]
KeyHash = Annotated[str, AfterValidator(_hash), WithJsonSchema({"type": "string"})]
ImageHost = Annotated[
    str,
    require_form(
        rf"^(\*|(\*\.)?{_LABEL}(\.{_LABEL})*|\[[0-9A-Fa-f:]+\])(:\d{{1,5}})?$",
        "a host, such as example.com, *.example.com or example.com:8443, without https://, or *",
    ),
]
PerMinute = Annotated[int, Field(ge=1, le=10**12)]


class KeyConfig(Section):
    """An API key, and the rights of its holder. `servekit key new` makes one."""

    name: KeyName
    """Shown in logs; keys take turns in the queues by it."""
    hash: KeyHash | None = None
    """The key's hash, as `servekit key new` prints it. One of `hash`, `file` and `environment`."""
    file: Path | None = None
    """A file whose first line is the key, relative to this file."""
    environment: VariableName | None = None
    """An environment variable of `servekit up` that is the key; no worker sees it."""
    requests_per_minute: PerMinute | None = None
    """Further requests get 429 with `Retry-After`; a minute's worth may come at once."""
    tokens_per_minute: PerMinute | None = None
    """Tokens of prompt and completion, charged at a request's end; while they are used up, requests
    get 429."""
    daily_tokens: PerMinute | None = None
    """Tokens of prompt and completion in a day of the local time, charged at a request's end, and
    counted across restarts; once they are used up, requests get 429 until midnight."""
    monthly_tokens: PerMinute | None = None
    """The same for a calendar month."""
    max_concurrent: Annotated[int | None, Field(ge=1)] = None
    """Generations at the same time, waiting ones included; further requests get 429."""
    models: Annotated[tuple[str, ...] | None, Field(min_length=1)] = None
    """Models that the key may use, by name or alias, with their presets and adapters; or a preset
    or an adapter alone. Other models return 403. By default all."""
    priority: Annotated[int, Field(ge=-10, le=10)] = 0
    """Priority of requests that state none, and the best that a request of this key can have. Lower
    is earlier."""
    admin: bool = False
    """The key may also use the administration over HTTP."""
    metrics: bool = False
    """The key may read /metrics, which reports all models and keys; a key with `admin` may read it,
    too."""
    tools: bool = False
    """The key may use the tools of `server.mcp` on the chat page; a key with `admin` may, too."""

    @model_validator(mode="after")
    def _has_one_source(self) -> KeyConfig:
        given = [x for x in (self.hash, self.file, self.environment) if x is not None]
        if len(given) != 1:
            raise ValueError(
                "a key has exactly one of `hash`, `file` and `environment`;"
                " `servekit key new` prints a hash"
            )
        return self


class TlsConfig(Section):
    """HTTPS. A reload takes renewed files."""

    certificate: Path
    """PEM file with the certificate, and those between it and its authority."""
    key: Path
    """PEM file with its private key, without a passphrase."""


class LimitsConfig(Section):
    """The bounds of one request; more is 400, naming the parameter."""

    messages: Annotated[int, Field(ge=1, le=4096)] = 4096
    """Most messages of a conversation."""
    stop_strings: Annotated[int, Field(ge=1, le=32)] = 32
    """Most stop strings."""
    images: Annotated[int, Field(ge=0, le=1024)] = 16
    """Most images of a conversation."""
    json_depth: Annotated[int, Field(ge=8, le=256)] = 64
    """Depth of nested brackets in parts without a fixed form: tools, schemas, arguments of the chat
    template."""
    schema_depth: Annotated[int, Field(ge=1, le=64)] = 16
    """Depth of nested schemas, in a JSON schema for the answer."""


class FetchImagesConfig(Section):
    """Images that requests name by their address, and that gateways fetch."""

    hosts: Annotated[tuple[ImageHost, ...], Field(min_length=1)]
    """Where images may be fetched: example.com, *.example.com (the hosts below it), * (every host),
    and with a port example.com:8443; without one, 443 for https and 80 for http. Redirects are
    followed to these hosts only."""
    private_addresses: bool = False
    """These hosts may have addresses of a private network, of this machine, or of a link."""
    timeout_s: Annotated[float, Field(gt=0, le=300)] = 10.0
    """How long the images of a request may take to arrive."""
    max_bytes: Annotated[int, Field(ge=1024, le=48 * 2**20)] = 20 * 2**20
    """Size of a request's images together, in bytes."""


class StoreResponsesConfig(Section):
    """The responses of /v1/responses that are kept, in the run directory: for those that name one
    as `previous_response_id`, and to be read again."""

    max_bytes: Annotated[int, Field(ge=2**20, le=2**50)] = 2**30
    """Size of all of them, compressed; the oldest of the keys that hold most make room."""
    days: Annotated[float, Field(gt=0, le=3650)] = 30.0
    """How long each is kept."""


class BatchesConfig(Section):
    """The files of /v1/files and the batches of /v1/batches, in the run directory. Requests of
    batches run when no other request waits for their model."""

    max_bytes: Annotated[int, Field(ge=2**20, le=2**50)] = 2**30
    """Size of all files of a key, in bytes; more is 413."""
    max_files: Annotated[int, Field(ge=1, le=10**6)] = 1000
    """Files of a key, those that batches write included; more is 429."""
    max_batches: Annotated[int, Field(ge=1, le=1000)] = 16
    """Batches of a key that are not done; more is 429."""
    days: Annotated[float, Field(gt=0, le=3650)] = 30.0
    """How long files, and batches that are done, are kept; of these no more than `max_files`."""
    concurrent: Annotated[int, Field(ge=1, le=1024)] = 8
    """Requests of batches that each gateway runs at the same time."""


class LoggingConfig(Section):
    """The contents of the log."""

    format: Literal["pretty", "json"] = "pretty"
    """How `servekit up` writes its log with the lines of its children: for people, or an object in
    each line. `--log-format` overrides it. The files of the children are always JSON."""
    requests: bool = True
    """Note each request: time, key, model, endpoint, status, tokens and times, for `servekit
    requests` and, up to 20 a second, as lines of the log. No prompt and no answer is in it."""
    prompts: bool = False
    """Log each request's prompt. Off: no prompt is ever in a log, in `why` or in a message."""


class TracingConfig(Section):
    """Spans of requests, exported by OpenTelemetry (the extra `servekit[otel]`)."""

    endpoint: Annotated[
        str, require_form(r"^https?://[^/\s]+", "an address, such as http://localhost:4318")
    ]
    """A receiver of OTLP over HTTP, such as http://localhost:4318. OpenTelemetry's own environment
    variables, such as OTEL_EXPORTER_OTLP_HEADERS, configure the rest."""
    sample: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of requests that are traced. A client that sends `traceparent` decides itself."""
    service: Annotated[str, Field(min_length=1, max_length=256)] = "servekit"
    """`service.name` of the spans."""


Origin = Annotated[
    str,
    require_form(_ORIGIN, "an origin, such as https://app.example, without a / at its end, or *"),
]
