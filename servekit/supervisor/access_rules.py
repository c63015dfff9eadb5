"""The access rules that gateways enforce: key hashes from the configuration, never clear keys."""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from servekit.config.base_model import Section
from servekit.config.keys import MAX_KEY_BYTES, fast_digest
from servekit.config.schema import Config, ModelConfig
from servekit.config.sections.access import KeyConfig
from servekit.config.sections.mcp import McpServerConfig
from servekit.protocol.access import (
    BatchRules,
    ImageFetching,
    McpServer,
    RequestLimits,
    ResponseStorage,
    Tracing,
)
from servekit.protocol.base import Value
from servekit.protocol.messages import AccessRules, KeyRule
from servekit.supervisor.admin import systemd

V = TypeVar("V", bound=Value)

#: Salt of the digests of keys whose clear text we have; differs between instances.
_SALT = secrets.token_bytes(32)
#: Secret of the UI's sign-in sessions; kept here, because gateways are replaced.
SESSIONS = secrets.token_bytes(32)

_PUBLIC = (
    "others can reach {host}, and there are no keys: anyone could use all models."
    " Make one with `servekit key new`, listen on 127.0.0.1 behind a proxy, or use --insecure"
)
_OVERHEARD = (
    "others can reach {host}, and without TLS they could read what the browser sends: set"
    " `server.tls`, or `server.browser_link: true` if this is intended"
)
_NO_KEY = "the variable {} holds no key: a key is"


class KeyMissing(ValueError):
    """The key is not where the configuration says; `at` is the path of that setting."""

    def __init__(self, at: tuple[str | int, ...], message: str) -> None:
        super().__init__(message)
        self.at = at


def rules(config: Config, environ: Mapping[str, str]) -> AccessRules:
    """Return the access rules for the gateways. Raises KeyMissing."""
    names = {alias: m.name for m in config.models for alias in (m.name, *m.aliases)}
    names |= {preset.name: preset.name for m in config.models for preset in m.presets}
    names |= {adapter.name: adapter.name for m in config.models for adapter in m.adapters}
    server = config.server
    return AccessRules(
        keys=tuple(_rule(key, i, names, environ) for i, key in enumerate(config.keys)),
        salt=_SALT,
        sessions=SESSIONS,
        cors=server.cors,
        hosts=_hosts(config),
        log_prompts=config.logging.prompts,
        log_requests=config.logging.requests,
        limits=_convert(server.limits, RequestLimits),
        store_responses=_convert(server.store_responses, ResponseStorage),
        mcp=tuple(_mcp_server(one) for one in server.mcp),
        batches=_convert(server.batches, BatchRules),
        fetch_images=_convert(server.fetch_images, ImageFetching),
        runtime_adapters=server.runtime_adapters,
        prefixes_by_key=bool(config.keys) and server.prefix_cache != "shared",
        open_metrics=server.open_metrics,
        unknown_parameters=server.unknown_parameters,
        default_model=server.default_model or "",
        tracing=_convert(config.tracing, Tracing),
        certificate="" if server.tls is None else _stamp(server.tls.certificate, server.tls.key),
        max_queue_bytes=server.max_queue_bytes,
        write_timeout_s=server.write_timeout_s,
        trusted_proxies=server.trusted_proxies,
        browser_link=not refuse_link(config),
    )


def _convert(given: Section | None, kind: type[V]) -> V:
    """Return a section of the file for gateways; the defaults of `kind` if it is not there."""
    return kind() if given is None else kind(**given.model_dump())


def _mcp_server(given: McpServerConfig) -> McpServer:
    return McpServer(**(given.model_dump() | {"cwd": str(given.cwd or ""), "url": given.url or ""}))


def _hosts(config: Config) -> tuple[str, ...]:
    """Return the accepted Host names; empty accepts all, as with keys or `--insecure`."""
    if config.keys or not is_loopback(config.server.host):
        return ()
    return ("localhost", socket.gethostname(), *config.server.hosts)


def refuse_public(config: Config) -> str:
    """Return why this configuration is not served without `--insecure`; "" if it is."""
    host = config.server.host
    return "" if config.keys or is_loopback(host) else _PUBLIC.format(host=host)


def refuse_link(config: Config) -> str:
    """Return why no browser may become the owner's by a link; "" if one may."""
    server = config.server
    if not server.ui:
        return "there are no pages to open: the file says `ui: false`"
    if server.browser_link is not None:
        return "" if server.browser_link else "the file says `browser_link: false`"
    private = server.tls is not None or is_loopback(server.host)
    return "" if private else _OVERHEARD.format(host=server.host)


def secret_variables(config: Config) -> frozenset[str]:
    """Return the environment variables that hold keys; children get them only through `handed`."""
    ours = {key.environment for key in config.keys if key.environment}
    return frozenset(ours | {name for model in config.models if (name := key_variable(model))})


def public(environ: Mapping[str, str], config: Config) -> Mapping[str, str]:
    """Return the part of our environment that every child may have."""
    hidden = secret_variables(config) | systemd.VARIABLES
    return {name: value for name, value in environ.items() if name not in hidden}


def handed(environ: Mapping[str, str], model: ModelConfig) -> Mapping[str, str]:
    """Return the variable for this model's workers only: the key to the endpoint behind it."""
    name = key_variable(model)
    return {name: environ[name]} if name in environ else {}


def key_variable(model: ModelConfig) -> str:
    """Return the variable that holds the key to the endpoint behind a model; "" for none."""
    options = model.options if model.engine == "openai" else {}
    return options.get("key_environment") or ""


def check_handed(config: Config, environ: Mapping[str, str]) -> None:
    """Raise KeyMissing for a model without its endpoint's key: all requests would fail."""
    for i, model in enumerate(config.models):
        if name := key_variable(model):
            value = (model.env.get(name) or environ.get(name, "")).strip()
            at = ("models", i, "options", "key_environment")
            if not value:
                raise KeyMissing(at, f"the variable {name} holds no key: it is not set, or empty.")
            if not value.isascii() or not value.isprintable() or " " in value:
                raise KeyMissing(at, f"{_NO_KEY.format(name)} printable ASCII without spaces.")


def _rule(key: KeyConfig, at: int, names: Mapping[str, str], environ: Mapping[str, str]) -> KeyRule:
    models = None
    if key.models is not None:
        models = tuple(sorted({names[model] for model in key.models}))
    return KeyRule(
        name=key.name,
        hash=key.hash or "",
        digest=b"" if key.hash else fast_digest(_clear(key, at, environ), _SALT),
        requests_per_minute=key.requests_per_minute,
        tokens_per_minute=key.tokens_per_minute,
        max_concurrent=key.max_concurrent,
        models=models,
        priority=key.priority,
        admin=key.admin,
        metrics=key.metrics,
        tools=key.tools,
    )


def _clear(key: KeyConfig, at: int, environ: Mapping[str, str]) -> bytes:
    """Return the clear key from the variable or file that the configuration names."""
    if key.environment is not None:
        value = environ.get(key.environment, "").strip()
        return _usable(value, ("keys", at, "environment"), f"the variable {key.environment}")
    assert key.file is not None
    where = ("keys", at, "file")
    try:
        if key.file.exists() and not key.file.is_file():  # a pipe's reader waits for ever
            raise KeyMissing(where, f"{key.file} is not a regular file.")
        with key.file.open("rb") as file:
            value = file.readline(2 * MAX_KEY_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise KeyMissing(where, f"cannot read the key in {key.file}: {reason}.") from None
    return _usable(value, where, str(key.file))


def _usable(value: str, at: tuple[str | int, ...], source: str) -> bytes:
    if not value:
        raise KeyMissing(at, f"{source} holds no key: it is not set, or empty.")
    if not value.isascii() or not value.isprintable() or " " in value:
        raise KeyMissing(at, f"{source} holds no key: a key is printable ASCII without spaces.")
    if not 8 <= len(value) <= MAX_KEY_BYTES:
        raise KeyMissing(at, f"the key in {source} must be 8 to {MAX_KEY_BYTES} characters long.")
    return value.encode()


def is_loopback(host: str) -> bool:
    """Return whether all addresses of `host` are loopback addresses."""
    return all(ipaddress.ip_address(address).is_loopback for address in _addresses(host))


def _addresses(host: str) -> Iterator[str]:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return  # binding this host fails soon, with its own message
    for _, _, _, _, address in found:
        yield str(address[0]).partition("%")[0]


def _stamp(*files: Path) -> str:
    """Return a digest of the files' content."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()
