"""Checks across several keys, or against the disk: name collisions, missing files."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from servekit.config import keys as api_keys
from servekit.config import paths
from servekit.config.engines import (
    environments,
    plugins,
    quantization_checks,
    requirements,
    speculative_checks,
    vllm_checks,
)
from servekit.config.engines.installed import Machine, find_module, install_command
from servekit.config.engines.options import KINDS, EngineKind
from servekit.config.engines.path_options import list_paths
from servekit.config.error_reporting import Problem, dotted_path, missing_key, shorten_text
from servekit.config.schema import (
    AdapterConfig,
    Config,
    ModelConfig,
    SamplingDefaults,
    names_of,
)
from servekit.config.sections.access import KeyConfig
from servekit.config.sections.chat_template import read_template
from servekit.config.sections.mcp import McpServerConfig
from servekit.config.sections.scale import ReplicaRange
from servekit.config.yaml.nodes import Node, find_node, plain_value
from servekit.system.python.installation import is_slim, make_pip_command

Place = tuple[str | int, ...]

#: Maximum hashes with the same prefix, as while a key is being replaced: each costs a scrypt.
_MAX_ALIKE = 3


def check_names(root: Node) -> Iterator[Problem]:
    """Find names that two models share, in a file that may have other errors."""
    seen: dict[str, Place] = {}
    for loc, name in _names_of_models(root):
        first = seen.setdefault(name, loc)
        if first != loc:
            line = find_node(root, first).node.mark.line
            yield Problem(
                loc, f"'{shorten_text(name)}' is taken by {dotted_path(first)} on line {line}."
            )


def _names_of_models(root: Node) -> Iterator[tuple[Place, str]]:
    models = _list_items(find_node(root, ("models",)).node)
    for i, model in enumerate(models):
        entries = model.value if isinstance(model.value, dict) else {}
        if (name := entries.get("name")) and isinstance(name.value, str):
            yield ("models", i, "name"), name.value
        for j, alias in enumerate(_list_items(entries.get("aliases"))):
            if isinstance(alias.value, str):
                yield ("models", i, "aliases", j), alias.value
        for key in ("presets", "adapters"):
            for j, one in enumerate(_list_items(entries.get(key))):
                keys = one.value if isinstance(one.value, dict) else {}
                if (name := keys.get("name")) and isinstance(name.value, str):
                    yield ("models", i, key, j, "name"), name.value


def check_paths(root: Node) -> Iterator[Problem]:
    """Find models without the `path` that their engine needs, in a file that may have other errors.

    A server's command needs one if it has a {path}.
    """
    for i, model in enumerate(_list_items(find_node(root, ("models",)).node)):
        if not isinstance(model.value, dict):
            continue
        path = model.value.get("path")
        if (path is None or path.value is None) and _needs_path(plain_value(model)):
            yield missing_key(("models", i, "path"), root, is_written=path is not None)


#: Values of `engine` for models with files.
_READ_FILES = ("auto", "transformers", "vllm", "llamacpp", "faster_whisper")


def check_written_paths(root: Node, folder: Path) -> Iterator[Problem]:
    """Find wrong paths in a file whose other errors hide what its models are."""
    for i, model in enumerate(_list_items(find_node(root, ("models",)).node)):
        keys = model.value if isinstance(model.value, dict) else {}
        engine, path = keys.get("engine"), keys.get("path")
        is_file = engine is None or engine.value in _READ_FILES
        if not is_file or path is None or not isinstance(path.value, str) or "$" in path.value:
            continue
        try:
            paths.check_model_path(path.value, folder)
        except ValueError as error:
            yield Problem(("models", i, "path"), f"{error}.")


def _needs_path(model: Any) -> bool:
    options = model.get("options")
    options = options if isinstance(options, dict) else {}
    engine = model.get("engine", "transformers")
    if engine == "command" or (engine == "auto" and "command" in options):
        return "{path}" in str(options.get("command"))
    if engine == "auto":
        return True
    # of an engine that is not known, this is not either
    known = isinstance(engine, str) and plugins.options_of(engine) is not None
    return known and "nothing" not in KINDS[engine].formats


def _list_items(node: Node | None) -> list[Node]:
    return node.value if node and isinstance(node.value, list) else []


def check_model(config: ModelConfig, at: Place, folder: Path) -> Iterator[Problem]:
    """Find errors in a model whose keys are each valid. Not every engine reads a file."""
    kind = find_engine_kind(config)
    if config.python is not None and config.engine in KINDS:
        kind = environments.find_kind_in_environment(config)
    if kind.formats == {"nothing"} and config.path and config.engine != "echo":
        # echo stands for other engines, in files that are tried without them
        message = f"the engine {config.engine} has no model: leave this out."
        yield Problem((*at, "path"), message, at_key=True)
    if kind.needs_files and config.path:
        yield from _check_source(paths.check_model_path, config, at, folder)
    if "remote" in kind.formats:
        yield from _check_remote(config, at)
    if config.engine == "command":
        yield from _check_command(config, at)
    if config.engine == "vllm":
        yield from vllm_checks.check_options(config, (*at, "options"))
    asks = requirements.requirements_of(config, folder)
    is_gguf = asks.format == "gguf"
    yield from quantization_checks.check_quantization(config, at, is_gguf=is_gguf)
    yield from speculative_checks.check_speculative(config, at, folder)
    if config.engine != "auto":
        for lack in requirements.find_lacks(kind, asks):
            message = f"the engine {config.engine} {lack.what}."
            yield Problem((*at, *lack.at), message, at_key=lack.at_key)
    if kind.adapters:
        yield from _check_adapters(config, at, folder)
    for place, text in list_paths(kind.options, config.options):
        yield from _check_option_path(text, (*at, "options", *place), folder)
    if kind.instead in config.options:
        yield from _check_library(config, (*at, "options", kind.instead), folder)
    for name, path in name_files(config, kind).items():
        yield from _check_file(path, (*at, "options", name), folder)
    if config.chat_template is not None and not kind.is_remote:
        yield from _check_chat_template(config, config.chat_template, at, folder)
    if config.gpus is not None:
        yield from _check_gpus(config, config.gpus, at)
    yield from _check_residency(config, at)
    yield from _check_scaling(config, at)
    yield from _check_sampling(config, config.sampling, (*at, "sampling"))
    yield from _check_presets(config, at, folder)


def _check_sampling(
    config: ModelConfig, sampling: SamplingDefaults, at: Place
) -> Iterator[Problem]:
    longest, context = sampling.max_tokens, config.max_context
    if longest and context and longest >= context:
        message = f"{longest} tokens and a prompt do not fit max_context, {context}."
        yield Problem((*at, "max_tokens"), message)
    if config.engine == "vllm" and (sampling.temperature or 0) > vllm_checks.MAX_TEMPERATURE:
        message = f"vLLM takes temperatures up to {vllm_checks.MAX_TEMPERATURE} only."
        yield Problem((*at, "temperature"), message)


#: Template variables that servekit sets.
_OF_THE_SERVER = ("messages", "tools", "add_generation_prompt", "continue_final_message")


def _generates(config: ModelConfig, folder: Path) -> bool:
    """Return whether a model may generate text, as far as its options and a local folder tell."""
    pooled = config.options.get("pooling", "auto") not in ("auto", "none")
    if pooled or config.options.get("task", "generate") not in ("auto", "generate"):
        return False
    try:
        path = paths.check_model_path(config.path, folder)
    except ValueError:
        return True
    return not (Path(path.text) / "modules.json").is_file()


def _check_presets(config: ModelConfig, at: Place, folder: Path) -> Iterator[Problem]:
    """Find presets of models that generate nothing, and values that would reach no template."""
    if config.presets and not _generates(config, folder):
        message = "a preset is for text, and this model generates none."
        yield Problem((*at, "presets"), message, at_key=True)
        return
    templates = config.options.get("chat_template_kwargs", not find_engine_kind(config).is_remote)
    for i, preset in enumerate(config.presets):
        here = (*at, "presets", i)
        yield from _check_sampling(config, preset.sampling, (*here, "sampling"))
        for name in preset.template:
            if name in _OF_THE_SERVER:
                yield Problem((*here, "template", name), "servekit sets this.", at_key=True)
            elif not templates and name != "reasoning_effort":
                yield Problem((*here, "template", name), _NO_TEMPLATE, at_key=True)
        if preset.thinking is not None and not templates:
            yield Problem((*here, "thinking"), _NO_TEMPLATE, at_key=True)


_NO_TEMPLATE = (
    "it would not reach the endpoint's chat template; if it has one, write"
    " `chat_template_kwargs: true` in `options`, else `template: {reasoning_effort: …}`."
)


def _check_residency(config: ModelConfig, at: Place) -> Iterator[Problem]:
    sleeps_s, unloads_s = config.idle_sleep_s, config.idle_unload_s
    if sleeps_s is not None and unloads_s is not None and unloads_s <= sleeps_s:
        message = f"it is unloaded before it sleeps, which it does after {sleeps_s:g} s."
        yield Problem((*at, "idle_unload_s"), message)


def _check_scaling(config: ModelConfig, at: Place) -> Iterator[Problem]:
    """Find scaling options without effect, and models that could never scale up from 0."""
    if not isinstance(config.replicas, ReplicaRange):
        if "scale" in config.model_fields_set:
            message = "a model is scaled only with `replicas: {min: …, max: …}`."
            yield Problem((*at, "scale"), message, at_key=True)
    elif config.replicas.min == 0 and config.load != "on_demand":
        message = "with 0 replicas no request is answered, unless `load: on_demand` starts one."
        yield Problem((*at, "replicas", "min"), message)


def check_tracing(config: Config, machine: Machine) -> Iterator[Problem]:
    """Find what tracing needs and this machine lacks."""
    if config.tracing is not None and not machine.has("opentelemetry.exporter.otlp.proto.http"):
        message = f"OpenTelemetry's exporter is not installed; {make_pip_command('otel')}."
        yield Problem(("tracing",), message, at_key=True)


def check_mcp(config: Config, folder: Path, machine: Machine | None) -> Iterator[Problem]:
    """Find MCP servers that share a name, or cannot be started on this machine."""
    names: set[str] = set()
    for i, server in enumerate(config.server.mcp):
        at: Place = ("server", "mcp", i)
        if server.name in names:
            yield Problem((*at, "name"), f"two MCP servers are named '{server.name}'.")
        names.add(server.name)
        if server.cwd is not None:
            yield from _check_folder(str(server.cwd), (*at, "cwd"), folder)
        if server.command and machine is not None:
            program = resolve_mcp_command(server, folder)[0]
            yield from _find_program(program, server.env, (*at, "command"))
    if config.server.mcp and not config.server.ui:
        message = "only the pages use MCP servers, and the file says `ui: false`."
        yield Problem(("server", "mcp"), message, at_key=True)
    if config.server.mcp and machine is not None and not machine.has("mcp"):
        message = f"the package mcp is not installed; {make_pip_command('mcp')}."
        yield Problem(("server", "mcp"), message, at_key=True)


def resolve_mcp_command(server: McpServerConfig, folder: Path) -> tuple[str, ...]:
    """Return the words of a command; a program with a slash is relative to `folder`."""
    if not server.command or "/" not in server.command[0]:
        return server.command
    return (str(paths.resolve_path(server.command[0], folder)), *server.command[1:])


def check_launcher(config: Config, machine: Machine | None) -> Iterator[Problem]:
    """Find keys that are invalid where a cluster places the workers, and missing packages."""
    if config.launcher == "local":
        if config.ray is not None:
            yield Problem(("ray",), "only `launcher: ray` reads this.", at_key=True)
        return
    for module, package in _OF_RAY if machine is not None else ():
        if machine is not None and not machine.has(module):
            message = f"{package} is not installed; {make_pip_command('ray')}."
            yield Problem(("launcher",), message, at_key=True)
            break
    if config.gpus.reserve is not None:
        yield Problem(("gpus", "reserve"), _BY_RAY, at_key=True)
    for i, model in enumerate(config.models):
        for key in ("gpus", "memory", "standby"):
            if key in model.model_fields_set:
                yield Problem(("models", i, key), _BY_RAY, at_key=True)
        if model.python is not None:
            message = "with `launcher: ray` workers run in their nodes' Python: leave this out."
            yield Problem(("models", i, "python"), message, at_key=True)


#: Modules that `launcher: ray` needs, with their packages.
_OF_RAY = (("ray", "ray"), ("cryptography", "cryptography"))
_BY_RAY = "with `launcher: ray` workers get whole GPUs, and Ray says which: leave this out."


def find_engine_kind(config: ModelConfig) -> EngineKind:
    """Return the kind of a model's engine; for an unresolved `auto`, that of a likely engine."""
    if config.engine == "auto":
        return KINDS[requirements.engine_of_options(config.options) or "transformers"]
    return KINDS[config.engine]


def check_machine(
    config: ModelConfig, at: Place, machine: Machine, *, elsewhere: bool = False
) -> Iterator[Problem]:
    """Find what a model's engine needs and this machine lacks; `elsewhere`: for remote workers."""
    kind = environments.find_kind_in_environment(config)
    if config.engine == "vllm" and not elsewhere:
        yield from vllm_checks.check_arguments(config, (*at, "options", "engine_args"))
    if config.python is not None:
        yield from _check_environment(config, (*at, "python"), kind)
    elif remedy := install_command(kind, machine.has, config.options):
        message = f"the engine {config.engine} is not installed; servekit engine install "
        message += f"{config.engine} makes an environment for it"
        message += "." if is_slim() else f", {remedy} adds it to this one."
        yield Problem((*at, "engine"), message)
        return
    if not elsewhere:
        yield from quantization_checks.check_packages(config, at, machine)
    if kind.gpu_here == "must" and not (machine.has_gpu or elsewhere) and config.device == "auto":
        message = f"the engine {config.engine} runs on GPUs only, and no NVIDIA GPU was found here"
        yield Problem((*at, "engine"), f"{message}{requirements.suggest_engines(kind)}.")


def _check_environment(config: ModelConfig, at: Place, kind: EngineKind) -> Iterator[Problem]:
    """Find what the environment that `python` names lacks."""
    environment = environments.read_environment(Path(config.python or ""))
    if config.engine == "command":  # its command may use it, as {python}
        return
    lacking = environment.missing(kind)
    if kind.modules and not find_module(kind, environment.has):
        lacking.insert(0, kind.modules[0])
    if lacking:
        needs = " ".join(f"'{one}'" for one in lacking)
        message = f"it lacks what the engine {config.engine} needs: {environment.python} -m pip "
        yield Problem(at, f"{message}install {needs}.")


#: Keys about loading a model, without meaning for a remote model.
_OF_LOADING = [
    *("revision", "gpus", "memory", "dtype", "trust_remote_code", "tool_parser", "python"),
    *("reasoning_parser", "stray_memory", "chat_template"),
]


def _check_remote(config: ModelConfig, at: Place) -> Iterator[Problem]:
    """Reject keys without effect on a remote model: they show a wrong expectation."""
    for key in _OF_LOADING:
        if key in config.model_fields_set:
            message = "the model is loaded elsewhere: set this at its endpoint."
            yield Problem((*at, key), message, at_key=True)
    if config.device == "cuda":
        yield Problem((*at, "device"), "the model runs elsewhere: its worker uses no GPU.")
    limits = ("requests_per_minute", "tokens_per_minute")
    if config.replicas not in ("auto", 1) and any(config.options.get(key) for key in limits):
        message = "each replica would keep to the endpoint's limits by itself; use one."
        yield Problem((*at, "replicas"), message)


#: Keys that the server's own command has to say.
_OF_THE_COMMAND = ("revision", "dtype", "trust_remote_code", "tool_parser", "reasoning_parser")


def _check_command(config: ModelConfig, at: Place) -> Iterator[Problem]:
    """Reject keys that its server would not learn of, and sleep without pages for it."""
    for key in _OF_THE_COMMAND:
        if key in config.model_fields_set:
            message = "the server loads the model: set this in its command."
            yield Problem((*at, key), message, at_key=True)
    if config.idle_sleep_s is not None and not {"sleep", "wake"} <= config.options.keys():
        message = "it needs `sleep` and `wake` in `options`, the server's paths for it."
        yield Problem((*at, "idle_sleep_s"), message, at_key=True)


def resolve_command(config: ModelConfig, folder: Path) -> list[str]:
    """Return the words of a server's command; a program with a slash is relative to `folder`."""
    words = config.engine_options().model_dump()["command"]
    program, *rest = (word.replace("{python}", config.python or sys.executable) for word in words)
    return [str(paths.resolve_path(program, folder)) if "/" in program else program, *rest]


def check_program(config: ModelConfig, at: Place, folder: Path) -> Iterator[Problem]:
    """Find a command whose program is not on this machine."""
    if config.engine != "command":
        return
    program = resolve_command(config, folder)[0]
    yield from _find_program(program, config.env, (*at, "options", "command"))


def _find_program(program: str, env: Mapping[str, str], at: Place) -> Iterator[Problem]:
    if shutil.which(program, path=env.get("PATH", os.environ.get("PATH"))) is None:
        where = "" if "/" in program else " in PATH"
        message = f"there is no program {shorten_text(program)}{where} that can be run."
        yield Problem(at, message)


def _check_chat_template(
    config: ModelConfig, text: str, at: Place, folder: Path
) -> Iterator[Problem]:
    at = (*at, "chat_template")
    if config.engine != "auto" and not find_engine_kind(config).chat_templates:
        message = f"the engine {config.engine} renders no chat template."
        yield Problem(at, message, at_key=True)
        return
    try:
        read_template(text, folder)
    except ValueError as error:
        yield Problem(at, f"{error}.")


def _check_adapters(config: ModelConfig, at: Place, folder: Path) -> Iterator[Problem]:
    for i, adapter in enumerate(config.adapters):
        yield from _check_source(paths.check_adapter_path, adapter, (*at, "adapters", i), folder)


def _check_source(
    check: Callable[[str, Path], paths.ModelPath],
    config: ModelConfig | AdapterConfig,
    at: Place,
    folder: Path,
) -> Iterator[Problem]:
    """Find a `path` that names nothing, and a revision of what has none."""
    try:
        path = check(config.path, folder)
    except ValueError as error:
        yield Problem((*at, "path"), f"{error}.")
        return
    if config.revision is not None and path.kind != "hub":
        message = "only a hub id has revisions, and `path` is not one."
        yield Problem((*at, "revision"), message, at_key=True)
    elif config.revision is not None and path.revision not in ("", config.revision):
        message = f"the address in `path` names another revision: {path.revision}."
        yield Problem((*at, "revision"), message)


def _check_option_path(text: str, at: Place, folder: Path) -> Iterator[Problem]:
    """Find an option that names no file or folder."""
    try:
        path = paths.resolve_path(text, folder)
        path.stat()
    except ValueError as error:
        yield Problem(at, f"{error}.")
    except OSError as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else error.strerror
        yield Problem(at, f"{path}: {reason}.")


def _check_library(config: ModelConfig, at: Place, folder: Path) -> Iterator[Problem]:
    if config.options.get("binding", "auto") != "auto":
        yield Problem(at, "`binding` also says where llama.cpp is; leave one out.", at_key=True)
    with contextlib.suppress(ValueError, OSError):  # `_check_option_path` has told
        path = paths.resolve_path(str(config.options[str(at[-1])]), folder)
        if path.is_dir() and not any(path.glob("libllama*")):
            yield Problem(at, f"there is no libllama.so in {path}.")


def name_files(config: ModelConfig, kind: EngineKind) -> dict[str, str]:
    """Return the further files that a model's options name, by the options' names."""
    named = {name: config.options.get(name) for name in kind.file_options}
    return {name: path for name, path in named.items() if isinstance(path, str)}


def _check_file(path: str, at: Place, folder: Path) -> Iterator[Problem]:
    try:
        found = paths.check_model_path(path, folder)
    except ValueError as error:
        yield Problem(at, f"{error}.")
        return
    if not found.is_gguf:
        yield Problem(at, f"{path} is no GGUF file.")


def _check_gpus(config: ModelConfig, gpus: tuple[int | str, ...], at: Place) -> Iterator[Problem]:
    if config.device == "cpu":
        yield Problem((*at, "gpus"), "`device: cpu` uses no GPUs.", at_key=True)
    for i, gpu in enumerate(gpus):
        if gpu in gpus[:i]:
            yield Problem((*at, "gpus", i), f"the GPU {gpu} is listed twice.")
    each = config.gpus_per_replica
    most = config.replicas.max if isinstance(config.replicas, ReplicaRange) else config.replicas
    too_many = isinstance(most, int) and most * each > len(gpus)
    if too_many and config.memory is None:  # with `memory` replicas may share a GPU
        need = "a GPU" if each == 1 else f"{each} GPUs"
        message = f"{most} replicas need {need} each, and `gpus` lists {len(gpus)}; "
        message += "with `memory`, they can share GPUs."
        yield Problem((*at, "replicas"), message)


def check_run_dir(config: Config, folder: Path) -> Iterator[Problem]:
    if config.run_dir is not None:
        yield from _check_folder(str(config.run_dir), ("run_dir",), folder, is_made=True)


def _check_folder(
    text: str, at: Place, folder: Path, *, is_made: bool = False
) -> Iterator[Problem]:
    """Find what is no folder, or out of reach; if it `is_made` by servekit, it may be missing."""
    try:
        path = paths.resolve_path(text, folder)
        if not path.is_dir() and not (is_made and not path.exists()):
            yield Problem(at, f"{path} is not a folder.")
    except ValueError as error:
        yield Problem(at, f"{error}.")
    except OSError as error:
        yield Problem(at, f"{path}: {error.strerror}.")


def check_keys(config: Config) -> Iterator[Problem]:
    """Find keys that share a name, or are the same key, or that name an unknown model."""
    known = set(names_of(config))
    names: set[str] = set()
    owners: dict[tuple[str, str], str] = {}
    prefixes: list[bytes] = []
    for i, key in enumerate(config.keys):
        if key.name in names:
            yield Problem(("keys", i, "name"), f"two keys are named '{key.name}'.")
        names.add(key.name)
        kind = "hash" if key.hash else "file" if key.file else "environment"
        owner = owners.setdefault((kind, str(getattr(key, kind))), key.name)
        if owner != key.name:
            message = f"the same as that of '{owner}'; each name needs a key of its own."
            yield Problem(("keys", i, kind), message)
        yield from _check_models(key, ("keys", i, "models"), known)
        if key.hash is not None:
            prefixes.append(prefix := api_keys.parse_hash(key.hash).prefix)
            if prefixes.count(prefix) > _MAX_ALIKE:
                message = f"more than {_MAX_ALIKE} hashes begin with {prefix.decode()}."
                yield Problem(("keys", i, "hash"), message)


def _check_models(key: KeyConfig, at: Place, known: set[str]) -> Iterator[Problem]:
    for i, model in enumerate(key.models or ()):
        if model not in known:
            yield _unknown_model(model, (*at, i), known)


def _unknown_model(model: str, at: Place, known: Collection[str]) -> Problem:
    there = ", ".join(sorted(known))
    return Problem(at, f"no model is called '{shorten_text(model)}'; there are: {there}.")


def check_default_model(config: Config) -> Iterator[Problem]:
    """Find a default model that does not exist."""
    model, known = config.server.default_model, names_of(config)
    if model is not None and model not in known:
        yield _unknown_model(model, ("server", "default_model"), known)


def check_profiles(config: Config) -> Iterator[Problem]:
    """Find models of profiles that do not exist."""
    known = [model.name for model in config.models]
    for profile, names in config.profiles.items():
        for i, name in enumerate(names):
            if name not in known:
                yield _unknown_model(name, ("profiles", profile, i), known)


def check_tls(config: Config, folder: Path) -> Iterator[Problem]:
    """Find a certificate that cannot be used to serve."""
    if (files := config.server.tls) is None:
        return
    from servekit.config import tls  # OpenSSL loads slowly

    try:
        certificate = paths.resolve_path(str(files.certificate), folder)
        tls.check_certificate(certificate, paths.resolve_path(str(files.key), folder))
    except ValueError as error:
        yield Problem(("server", "tls"), f"{error}.")


def check_legacy(config: Config) -> Iterator[Problem]:
    """Find a legacy port without a legacy API, or equal to the main port."""
    server = config.server
    if server.legacy_port is None:
        return
    if server.legacy is None:
        message = "only `legacy: huixiangdou` has a port of its own."
        yield Problem(("server", "legacy_port"), message, at_key=True)
    elif server.legacy_port == server.port and server.port:
        message = "it is `port` already; leave this out, and both are served there."
        yield Problem(("server", "legacy_port"), message)
