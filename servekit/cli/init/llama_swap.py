"""A converter of llama-swap's configuration file: each model becomes one of `engine: command`.

    cmd             options.command, with {port} for ${PORT}, or for the port in `proxy`
    env             env; CUDA_VISIBLE_DEVICES becomes `gpus`
    ttl, globalTTL  idle_unload_s; all models are loaded on demand, as there
    preload         load: on_start, for the first one
    checkEndpoint   options.health
    concurrencyLimit, or -np of llama-server   options.slots
    setParams       sampling, which a request may override here
    setParamsByID   presets, the same
    peers           models of `engine: openai`
    apiKeys         keys, where they are variables

Nothing else is dropped without a note in the file and on stderr.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from servekit.cli.init import brought_models, gpu_pins
from servekit.cli.init.brought_models import BroughtModel, Carried, Command
from servekit.cli.init.llama_swap_file import PORT, SwapFile, read_file, split_command, variable_of
from servekit.cli.init.server_commands import ServerCommand, parse_server
from servekit.config.keys import is_name
from servekit.system.gpu.gpus import Gpu

#: llama-swap's port.
_PORT = 8080
_MOST_SLOTS, _LEAST_CONTEXT = 4096, 16
_LOCAL = {"localhost", "127.0.0.1", "0.0.0.0", "::1", ""}
_CONTAINERS = {"docker", "podman"}
#: Servers for speech and images.
_OTHER_SERVERS = {"whisper-server", "sd-server", "audiocpp_server", "kokoro"}
_BRACES = re.compile(r"(?<!\$)\{[A-Za-z_]+\}")
_SAMPLING = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens")},
    "repetition_penalty": "repetition_penalty",
    "repeat_penalty": "repetition_penalty",
}
_HEAD = (
    "Made from llama-swap's {file} by `servekit init --from llama-swap`.",
    "Models are loaded by the first request for them, as there. On a GPU a model without `memory`"
    " has its GPUs to itself, so that models take turns; with `memory: 8GiB`, for example, on each"
    " of them, several stay loaded while they fit. Check the file, then serve it:",
)
#: Keys of the file and of a model that need no counterpart, and why.
_OF_THE_FILE = {
    "healthCheckTimeout": "",  # becomes load_timeout_s
    "globalTTL": "",
    "macros": "",
    "models": "",
    "startPort": "",  # a free port is chosen at each start
    "apiKeys": "",
    "peers": "",
    "groups": "",
    "matrix": "",
    "routing": "",
    "hooks": "",
    "logLevel": "the log of `servekit up` has all events; `servekit logs` has those of servers",
    "logToStdout": "`servekit logs` has what servers print",
    "logRequests": "`servekit docs watching` says how requests are watched",
    "logTimeFormat": "`logging` of this file says how the log is written",
    "unloadTimeout": "a server gets SIGTERM, and SIGKILL two seconds later",
    "metricsMaxInMemory": "/metrics has counters, for Prometheus",
    "captureBuffer": "requests and answers are not recorded",
    "store": "requests and answers are not recorded",
    "performance": "`servekit top` and /metrics show the machine",
    "ui": "the pages here are others",
    "upstream": "there is no /upstream",
    "sendLoadingState": "a request waits for its model without messages",
    "includeAliasesInList": "aliases are answered, and not listed",
    "profiles": "model names cannot be switched while it runs; edit `aliases` and reload",
    "selectors": "name a target itself, or give it the selector's name as an alias",
}
_OF_A_MODEL = {
    **dict.fromkeys(("cmd", "env", "proxy", "aliases", "ttl", "checkEndpoint", "useModelName"), ""),
    **dict.fromkeys(("name", "description", "concurrencyLimit", "filters", "capabilities"), ""),
    "healthCheckTimeout": "",
    "macros": "",
    "cmdStop": "a server gets SIGTERM, and SIGKILL two seconds later, with all its processes",
    "unloadTimeout": "a server gets SIGTERM, and SIGKILL two seconds later",
    "unlisted": "all models are listed; `models` of a key says who may use them",
    "metadata": "/v1/models has no such fields",
    "sendLoadingState": "a request waits for its model without messages",
    "timeouts": "`timeout_s` limits a request, `stall_timeout_s` the time without progress",
    "compat": "websockets are not passed on",
}


def convert_file(path: Path, environ: Mapping[str, str], gpus: tuple[Gpu, ...]) -> Carried:
    """Convert a file of llama-swap. Raises ConfigError."""
    file = read_file(path, environ)
    models = [_bring_model(file, name, told, gpus) for name, told in file.models.items()]
    _preload(file, models)
    models += _bring_peers(file, environ)
    keys, key_notes = _bring_keys(file, environ)
    notes = [*key_notes, *_file_notes(file), *_routing_notes(file), *_peer_notes(file)]
    if file.used:
        told = f"the values of {', '.join(sorted(file.used))} are written into this file"
        notes.append(f"variables: {told}, and are not read at a start")
    brought_models.require_models(models, path.name)
    brought_models.name_models(models)
    tail: dict[str, Any] = {"server": {"host": "127.0.0.1", "port": _PORT}} | keys
    head = [line.format(file=path.name) for line in _HEAD]
    text = brought_models.compose_file(head, models, tail, notes)
    return Carried(text, brought_models.left_out_lines(models, notes))


# ---------------------------------------------------------------- a model


def _bring_model(
    file: SwapFile, name: str, told: Mapping[str, Any], gpus: tuple[Gpu, ...]
) -> BroughtModel:
    model = BroughtModel(name, {"aliases": _texts(told.get("aliases"))})
    described = ": ".join(told[key] for key in ("name", "description") if told.get(key))
    if described:
        model.comments.append(described)
    try:
        words = split_command(told["cmd"])
        command = _place_port(words, told.get("proxy", "").strip(), model)
    except ValueError as error:
        model.notes.append(f"the model, because {error}: {' '.join(told['cmd'].split())}")
        return model
    parsed = parse_server([word.replace(PORT, "0") for word in words])
    model.keys |= {"engine": "command"}
    if used := told.get("useModelName"):
        model.keys["path"] = used  # the name that requests to the server have
    _bring_env(model, told, gpus, words, parsed)
    _bring_lifetime(model, file, told)
    if (context := _integer(told.get("capabilities", {}), "context")) >= _LEAST_CONTEXT:
        model.keys["max_context"] = context
    _bring_filters(model, told.get("filters"))
    model.keys["options"] = {"command": Command(command)} | _options_of(told, words, parsed)
    model.notes += _unread_notes(told, _OF_A_MODEL)
    model.notes += _capability_notes(told.get("capabilities"))
    if _makes_no_text(told, words):
        model.keys["options"]["task"] = "forward"
    if "task" in model.keys["options"]:  # presets are for text
        model.keys["aliases"] += [one["name"] for one in model.keys.pop("presets", ())]
    _note_container(model, words)
    _suggest_engine(model, parsed)
    return model


def _place_port(words: list[str], proxy: str, model: BroughtModel) -> list[str]:
    """Return the command with {port}. Raises ValueError if servekit could not start it."""
    if braces := [found[0] for word in words if (found := _BRACES.search(word))]:
        raise ValueError(f"{braces[0]} in its command would be taken for a placeholder")
    url = urlsplit(proxy.replace(PORT, "1"))
    if (url.hostname or "") not in _LOCAL:
        raise ValueError(f"its server answers at {url.hostname}, and not at this machine")
    if any(PORT in word for word in words):
        if proxy and PORT not in proxy:
            model.notes.append(f"proxy: {proxy}; the server is asked at the port that it is given")
        return [word.replace(PORT, "{port}") for word in words]
    port = url.port or _stated_port(words)
    places = list(_find_port(words, port)) if port else []
    if len(places) != 1:
        raise ValueError(
            "its command does not say its port once, as ${PORT} or as the port in `proxy`, and"
            " servekit gives a server its port"
        )
    at = places[0]
    fixed = re.compile(rf"(?<!\d){port}(?!\d)")
    return [*words[:at], fixed.sub("{port}", words[at], count=1), *words[at + 1 :]]


def _stated_port(words: list[str]) -> int:
    """Return the number after an option such as --listen-port, or 0."""
    pairs = [tuple(word.split("=", 1)) for word in words if "=" in word]
    for flag, value in (*pairwise(words), *pairs):
        if re.fullmatch(r"--?[\w-]*port", flag) and value.isdecimal():
            return int(value)
    return 0


def _find_port(words: list[str], port: int) -> Iterator[int]:
    """Yield the places of a port: of a container the published one, which comes first."""
    published = [
        i + 1 for i, word in enumerate(words[:-1]) if word in ("-p", "--publish") and _runs(words)
    ]
    places = published or range(1, len(words))
    for at in places:
        if re.search(rf"(?:^|[:=]){port}(?:$|[:/])", words[at]):
            yield at


def _runs(words: list[str]) -> bool:
    """Return whether a command runs a container."""
    return words[0].rpartition("/")[2] in _CONTAINERS


def _options_of(
    told: Mapping[str, Any], words: list[str], parsed: ServerCommand | None
) -> dict[str, Any]:
    """Return the options of `engine: command`, besides the command itself."""
    options: dict[str, Any] = {}
    base = urlsplit(told.get("proxy", "").replace(PORT, "1")).path.rstrip("/")
    if base:
        options["base"] = base if base.endswith("/v1") else f"{base}/v1"
    page = "/" + (told.get("checkEndpoint") or "health").strip().lstrip("/")
    health = base.removesuffix("/v1") + ("/health" if page == "/none" else page)
    if health != "/health":
        options["health"] = health
    slots = parsed.keys.get("options.slots") if parsed is not None else None
    if limit := max(0, _integer(told, "concurrencyLimit")) or slots:
        options["slots"] = min(limit, _MOST_SLOTS)
    if {"--embedding", "--embeddings"} & set(words):
        options["task"] = "embed"
    return options


def _makes_no_text(told: Mapping[str, Any], words: list[str]) -> bool:
    """Return whether a server has neither chats nor completions: it hears, draws, or ranks."""
    capabilities = _mapping(told.get("capabilities"))
    makes = _texts(capabilities.get("out"))
    program = words[0].rpartition("/")[2]
    return (
        program in _OTHER_SERVERS
        or bool({"--reranking", "--rerank"} & set(words))
        or bool(capabilities.get("reranker"))
        or bool(makes and "text" not in makes)
        or bool(re.search(r"/(audio|images)/", told.get("checkEndpoint", "")))
    )


def _bring_env(
    model: BroughtModel,
    told: Mapping[str, Any],
    gpus: tuple[Gpu, ...],
    words: list[str],
    parsed: ServerCommand | None,
) -> None:
    pairs = (text.partition("=") for text in _texts(told.get("env")))
    env = {name: value for name, _, value in pairs if name and not re.search(r"\s", name)}
    visible = env.pop("CUDA_VISIBLE_DEVICES", None)
    per_replica = 0
    if parsed is not None and parsed.engine == "vllm":
        per_replica = parsed.keys.get("gpus_per_replica", 1)
    if visible is None and _runs(words) and "--gpus" in words[:-1]:
        visible = gpu_pins.of_docker(words[words.index("--gpus") + 1])
    gpu_pins.pin_model(model, visible, gpus, per_replica=per_replica)
    if env:
        model.keys["env"] = env


def _bring_lifetime(model: BroughtModel, file: SwapFile, told: Mapping[str, Any]) -> None:
    model.keys["load"] = "on_demand"
    ttl = _integer(told, "ttl", default=-1)
    if ttl < 0:
        ttl = _integer({"ttl": file.expand(file.data.get("globalTTL"))}, "ttl")
    if ttl > 0:
        model.keys["idle_unload_s"] = ttl
    timeout = _integer({"it": file.expand(file.data.get("healthCheckTimeout"))}, "it")
    if timeout := _integer(told, "healthCheckTimeout") or timeout:
        model.keys["load_timeout_s"] = max(15, timeout)


def _bring_filters(model: BroughtModel, filters: object) -> None:
    if not isinstance(filters, dict):
        return
    for key, value in filters.items():
        if key == "setParams" and isinstance(value, dict):
            _bring_sampling(model, value)
        elif key == "setParamsByID" and isinstance(value, dict):
            presets = [*_bring_presets(model, value)]
            names = {preset["name"] for preset in presets}
            model.keys["aliases"] = [one for one in model.keys["aliases"] if one not in names]
            model.keys |= {"presets": presets} if presets else {}
        else:
            what = f"filters.{key}: {_in_json(value)}; a request's own parameters are passed on"
            model.notes.append(what)


def _bring_sampling(model: BroughtModel, params: Mapping[str, Any]) -> None:
    numbers = _read_sampling(params)
    if numbers:
        model.keys["sampling"] = numbers
        model.notes.append("filters.setParams: a request may override `sampling` here")
    for key, value in params.items():
        if _SAMPLING.get(key) not in numbers:
            model.notes.append(
                f"filters.setParams.{key}: {_in_json(value)}; a request has to send it"
            )


def _read_sampling(params: Mapping[str, Any]) -> dict[str, Any]:
    known = {_SAMPLING[key]: value for key, value in params.items() if key in _SAMPLING}
    return {key: value for key, value in known.items() if isinstance(value, int | float)}


def _bring_presets(model: BroughtModel, by_id: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a preset for each further name of the model that has parameters of its own."""
    for name, params in by_id.items():
        rest = dict(params) if isinstance(params, dict) else {}
        if name != model.name:
            template = rest.pop("chat_template_kwargs", {})
            sampling = _read_sampling(rest)
            rest = {key: value for key, value in rest.items() if _SAMPLING.get(key) not in sampling}
            keys = {"sampling": sampling, "template": _mapping(template)}
            yield {"name": name, **{key: value for key, value in keys.items() if value}}
        if rest:
            model.notes.append(
                f"filters.setParamsByID.{name}: {_in_json(rest)}; a request has to send it"
            )


def _note_container(model: BroughtModel, words: list[str]) -> None:
    if not _runs(words):
        return
    model.comments.append(
        "A container ends with SIGTERM to `docker run`; one whose `docker run` was killed goes on,"
        " and keeps its --name. Its GPUs are those of --gpus, whatever `gpus` says."
    )


def _suggest_engine(model: BroughtModel, parsed: ServerCommand | None) -> None:
    """Add the keys of servekit's own engine, where it does all that the command says."""
    if parsed is None or not parsed.model or parsed.unknown:
        return
    path, reason = brought_models.resolve_model(parsed.model)
    if reason and "does not exist" not in reason:
        return
    keys = {"engine": parsed.engine, "path": path} | parsed.nested_keys()
    model.hints += [
        "servekit's own engine does the same; instead of `engine` and `options`:",
        *brought_models.emit_lines({key: v for key, v in keys.items() if v != {}}),
    ]


# ---------------------------------------------------------------- the rest of the file


def _preload(file: SwapFile, models: list[BroughtModel]) -> None:
    hooks = file.expand(file.data.get("hooks"))
    startup = hooks.get("on_startup") if isinstance(hooks, dict) else None
    names = _texts(startup.get("preload")) if isinstance(startup, dict) else []
    listed = [m for name in names for m in models if name.strip() in _all_names(m) and m.keys]
    for at, model in enumerate(listed):
        if "load" in model.keys and not at:
            model.keys["load"] = "on_start"
        elif at:
            model.notes.append("preload: say `load: on_start`, if it fits beside the first one")


def _all_names(model: BroughtModel) -> list[str]:
    presets = (preset["name"] for preset in model.keys.get("presets", ()))
    return [model.name, *model.keys.get("aliases", ()), *presets]


def _bring_peers(file: SwapFile, environ: Mapping[str, str]) -> list[BroughtModel]:
    return [
        _bring_peer_model(str(peer), file.expand(told), model, environ)
        for peer, told in _mapping(file.data.get("peers")).items()
        if isinstance(told, dict)
        for model in _texts(told.get("models"))
    ]


def _bring_peer_model(
    peer: str, told: Mapping[str, Any], name: str, environ: Mapping[str, str]
) -> BroughtModel:
    url = f"{str(told.get('proxy', '')).rstrip('/')}/v1"
    options: dict[str, Any] = {"url": url}
    model = BroughtModel(f"{peer}/{name}", {"aliases": [name]})
    if key := told.get("apiKey"):
        variable = variable_of(key) or f"{re.sub(r'[^A-Za-z0-9]', '_', peer).upper()}_API_KEY"
        if environ.get(variable):
            options["key_environment"] = variable
        else:
            model.notes.append(
                f"apiKey: put it into the variable {variable}, and add"
                f" `key_environment: {variable}` to `options`"
            )
    model.keys |= {"engine": "openai", "path": name, "load": "on_demand", "options": options}
    return model


def _peer_notes(file: SwapFile) -> Iterator[str]:
    for peer, told in _mapping(file.data.get("peers")).items():
        for key, value in _mapping(told).items():
            if key == "timeouts":
                yield f"peers.{peer}.{key}: `connect_timeout_s` and the like are `options` here"
            elif key not in ("proxy", "models", "apiKey"):
                yield f"peers.{peer}.{key}: {_in_json(value)}; a request's parameters are passed on"


def _bring_keys(file: SwapFile, environ: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return `keys`, and notes on those that stand in the file itself, which are secrets."""
    listed = file.data.get("apiKeys")
    keys, left = [], 0
    for key in listed if isinstance(listed, list) else ():
        variable = variable_of(key)
        name = variable.lower().strip("_")
        if variable and is_name(name) and len(environ.get(variable, "")) >= 8:
            keys.append({"name": name, "environment": variable})
        else:
            left += 1
    notes = []
    if left:
        those = f"{left} of the keys" if keys else "the keys"
        notes.append(
            f"apiKeys: {those} cannot be brought, for a key stands in no file here: `servekit key"
            " new` makes new ones, and `environment` or `file` of `keys` names a present one"
        )
    return ({"keys": keys} if keys else {}), notes


def _file_notes(file: SwapFile) -> Iterator[str]:
    yield from _unread_notes(file.data, _OF_THE_FILE)
    yield (
        "--listen: llama-swap listened on every interface; here it is this machine only, and others"
        " need `host: 0.0.0.0` with `keys`"
    )


def _unread_notes(told: Mapping[str, Any], known: Mapping[str, str]) -> Iterator[str]:
    """Yield a note for each key that is not carried over, with the reason."""
    for key, value in told.items():
        reason = known.get(key, "not known here")
        if reason and value not in (None, "", False, {}, []):
            yield f"{key}: {reason}"


def _capability_notes(capabilities: object) -> Iterator[str]:
    if isinstance(capabilities, dict) and (rest := sorted(capabilities.keys() - {"context"})):
        yield f"capabilities ({', '.join(rest)}): /v1/models has no such fields"


def _routing_notes(file: SwapFile) -> Iterator[str]:
    """Yield notes on groups and the like: memory says here which models are loaded together."""
    routing = _mapping(file.data.get("routing"))
    settings = _mapping(_mapping(routing.get("router")).get("settings"))
    for data in (file.data, settings):
        for name, group in _mapping(data.get("groups")).items():
            yield f"groups.{name}: {_explain_group(_mapping(group))}"
        if data.get("matrix"):
            yield "matrix: models are loaded together while their `memory` fits"
    scheduler = _mapping(_mapping(routing.get("scheduler")).get("settings"))
    if _mapping(_mapping(scheduler.get("fifo")).get("priority")):
        yield "scheduler.fifo.priority: keys and requests have priorities here, not models"


def _explain_group(group: Mapping[str, Any]) -> str:
    members = ", ".join(_texts(group.get("members")))
    if group.get("persistent"):
        return f"{members} stay loaded with `load: on_start`, and `memory` beside others"
    if group.get("swap", True) is False:
        return f"{members} are loaded together if `memory` of each says what it takes"
    return f"{members} take turns as long as they have no `memory`"


# ---------------------------------------------------------------- values


def _texts(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _in_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _integer(told: object, key: str, default: int = 0) -> int:
    value = told.get(key) if isinstance(told, dict) else None
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and isinstance(value, int) else default
