"""Reader of configuration files, with actionable errors.

All problems are reported at once, one per line, in the order of the file:

    demo.yaml:7:5: models[0].replcas: unknown key. Did you mean 'replicas'?

An empty key counts as absent. Text is never taken for a number nor a number for text. Local paths
are relative to the file's own folder, and `~` is the user's home.

`load_config` reads the file alone; `load_here` also checks it against this machine, and resolves
every `engine: auto`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from servekit.config import checks, paths, shorthands
from servekit.config.engines import environments, plugins, requirements, speculative_checks
from servekit.config.engines.environments import Environment
from servekit.config.engines.installed import Machine
from servekit.config.engines.options import KINDS
from servekit.config.engines.path_options import resolve_options
from servekit.config.engines.selection import EngineChoice, choose_engine
from servekit.config.error_reporting import Problem, config_error, explain_errors, explain_mapping
from servekit.config.json_schema import json_schema
from servekit.config.schema import AdapterConfig, Config, ModelConfig, Section
from servekit.config.sections.access import KeyConfig, TlsConfig
from servekit.config.sections.chat_template import read_template
from servekit.config.sections.mcp import McpServerConfig
from servekit.config.yaml.file_reader import read_document
from servekit.config.yaml.nodes import Loc, Node, find_node, plain_value
from servekit.errors import ConfigError

__all__ = ["error_at", "json_schema", "load_config", "load_here"]

S = TypeVar("S", bound=Section)
Source = TypeVar("Source", ModelConfig, AdapterConfig)
#: Engine choices by model name, for models with `engine: auto`.
Choices = dict[str, EngineChoice]


def load_config(path: Path) -> Config:
    """Return the configuration in `path`, local paths made absolute; raises ConfigError."""
    return _load_resolved(path, None)[0]


def load_here(path: Path, machine: Machine) -> tuple[Config, Choices]:
    """Load as `load_config` does, for this machine; also return the choices for `engine: auto`."""
    plugins.look_again()
    return _load_resolved(path, machine)


def _load_resolved(path: Path, machine: Machine | None) -> tuple[Config, Choices]:
    root = read_document(path)
    folder = path.absolute().parent
    try:
        for spelling in (path.absolute(), path.resolve()):
            paths.refuse_undecodable(spelling)
    except ValueError as error:
        raise ConfigError(f"the configuration's path {error}") from None
    environ = machine.environ if machine is not None and machine.environ else os.environ
    unset = shorthands.expand(root, environ)
    if advice := explain_mapping(root):
        raise config_error(path, root, [advice])
    config, problems = _validate_section(Config, plain_value(root), root, ())
    choices: Choices = {}
    if config is not None and machine is not None:
        config, lost = _find_interpreters(config, folder, machine)
        problems += lost
        choices = dict(_choose_engines(config, folder, machine))
        config = _replace_auto(config, root, choices)
        config = _choose_environments(config, machine)
    problems += [
        *unset,
        *_engine_options(root),
        *checks.check_names(root),
        *checks.check_paths(root),
    ]
    if config is not None and problems == unset:
        known = {one.loc for one in unset}
        found = _check_meaning(config, folder, machine)
        problems += [one for one in found if one.loc not in known]
    elif config is None:
        blamed = {one.loc[:3] for one in problems}
        problems += [
            one
            for one in checks.check_written_paths(root, folder)
            if not {one.loc, (*one.loc[:2], "engine")} & blamed
        ]
    if config is None or problems:
        raise config_error(path, root, problems)
    try:
        return _resolve_paths(config, folder), choices
    except ValueError as error:  # a file has changed meanwhile
        raise ConfigError(f"{path}: {error}") from None


def _find_interpreters(
    config: Config, folder: Path, machine: Machine
) -> tuple[Config, list[Problem]]:
    """Replace each `python` by the path of its interpreter, which works."""
    models = list(config.models)
    problems: list[Problem] = []
    for index, model in enumerate(models):
        if model.python is None:
            continue
        try:
            found = environments.find_interpreter(model.python, folder, machine.environ or {})
            environments.read_environment(found)
        except (ValueError, OSError) as error:
            said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
            problems.append(Problem(("models", index, "python"), f"{said}."))
            models[index] = model.model_copy(update={"python": None})
        else:
            models[index] = model.model_copy(update={"python": str(found)})
    return config.model_copy(update={"models": tuple(models)}), problems


def _choose_environments(config: Config, machine: Machine) -> Config:
    """Set `python` of each model that names none, where not servekit's own environment serves."""
    models = list(config.models)
    for index, model in enumerate(models):
        chooses = config.launcher == "local" and model.python is None and model.engine in KINDS
        if chooses and KINDS[model.engine].instead not in model.options:
            found = environments.find_environment(KINDS[model.engine], machine)
            if found.python:
                models[index] = model.model_copy(update={"python": found.python})
    return config.model_copy(update={"models": tuple(models)})


def _choose_engines(
    config: Config, folder: Path, machine: Machine
) -> Iterator[tuple[str, EngineChoice]]:
    for model in config.models:
        if model.engine == "auto":
            asks = requirements.requirements_of(model, folder)
            yield model.name, choose_engine(asks, machine, _named_environment(model))


def suggest_engines(
    config: Config, folder: Path, machine: Machine
) -> Iterator[tuple[str, EngineChoice]]:
    """Yield what `engine: auto` would choose instead of the default, for models without either."""
    for model in config.models:
        if "engine" in model.model_fields_set or model.options:
            continue
        asks = requirements.requirements_of(model, folder)
        choice = choose_engine(asks, machine, _named_environment(model))
        if choice.engine != model.engine:
            yield model.name, choice


def _named_environment(model: ModelConfig) -> Environment | None:
    return None if model.python is None else environments.read_environment(Path(model.python))


def _replace_auto(config: Config, root: Node, choices: Choices) -> Config:
    """Replace each `auto` by the chosen engine: in `config`, and in the nodes with their marks."""
    models = list(config.models)
    for index, model in enumerate(models):
        if (choice := choices.get(model.name)) is not None:
            models[index] = model.model_copy(update={"engine": choice.engine})
            keys = find_node(root, ("models", index)).node.value
            assert isinstance(keys, dict)  # the section is valid
            keys["engine"] = replace(keys["engine"], value=choice.engine)
    return config.model_copy(update={"models": tuple(models)})


def error_at(path: Path, loc: Loc, message: str) -> ConfigError:
    """Return the error that blames the value at `loc` in the file `path`.

    For errors that only the machine reveals after `load_config`, such as too few GPUs:
    `raise complain(path, ("models", 0, "replicas"), "8 replicas, but there are 2 GPUs.")`
    """
    try:
        return config_error(path, read_document(path), [Problem(tuple(loc), message)])
    except ConfigError:  # the file has changed since
        return ConfigError(f"{path}: {message}")


def _validate_section(
    schema: type[S], data: object, root: Node, at: tuple[str | int, ...]
) -> tuple[S | None, list[Problem]]:
    """Validate strictly, by way of JSON, where strict mode accepts a list for a tuple."""
    try:
        return schema.model_validate_json(json.dumps(data), strict=True), []
    except ValidationError as error:
        details = error.errors(include_url=False)
        ours = [e for e in details if e["loc"] or e["type"] != "value_error"]  # checks.names
        return None, explain_errors(ours, root, at)


def _engine_options(root: Node) -> list[Problem]:
    """Return the problems in the options of each model whose engine is known."""
    problems: list[Problem] = []
    for i, model, schema in plugins.written_options(plain_value(root)):
        if isinstance(options := model.get("options", {}), dict):
            problems += _validate_section(schema, options, root, ("models", i, "options"))[1]
    return problems


def _check_meaning(config: Config, folder: Path, machine: Machine | None) -> list[Problem]:
    problems = [*checks.check_run_dir(config, folder), *checks.check_keys(config)]
    problems += [*checks.check_tls(config, folder), *checks.check_legacy(config)]
    problems += [*checks.check_default_model(config), *checks.check_profiles(config)]
    problems += checks.check_launcher(config, machine)
    problems += checks.check_mcp(config, folder, machine)
    elsewhere = config.launcher == "ray"
    if machine is not None:
        problems += checks.check_tracing(config, machine)
    for i, model in enumerate(config.models):
        problems += checks.check_model(model, ("models", i), folder)
        if machine is not None:
            problems += checks.check_machine(model, ("models", i), machine, elsewhere=elsewhere)
        if machine is not None and not elsewhere:
            problems += checks.check_program(model, ("models", i), folder)
    return problems


def _resolve_paths(config: Config, folder: Path) -> Config:
    run_dir = config.run_dir and paths.resolve_path(str(config.run_dir), folder)
    models = tuple(_absolute_model(model, folder) for model in config.models)
    keys = tuple(_absolute_key(key, folder) for key in config.keys)
    mcp = tuple(_absolute_mcp(server, folder) for server in config.server.mcp)
    tls = _absolute_tls(config.server.tls, folder)
    server = config.server.model_copy(update={"tls": tls, "mcp": mcp})
    update = {"models": models, "run_dir": run_dir, "keys": keys, "server": server}
    return config.model_copy(update=update)


def _absolute_key(key: KeyConfig, folder: Path) -> KeyConfig:
    if key.file is None:
        return key
    return key.model_copy(update={"file": paths.resolve_path(str(key.file), folder)})


def _absolute_mcp(server: McpServerConfig, folder: Path) -> McpServerConfig:
    cwd = server.cwd and paths.resolve_path(str(server.cwd), folder)
    command = checks.resolve_mcp_command(server, folder)
    return server.model_copy(update={"cwd": cwd, "command": command})


def _absolute_tls(tls: TlsConfig | None, folder: Path) -> TlsConfig | None:
    if tls is None:
        return None
    certificate = paths.resolve_path(str(tls.certificate), folder)
    return TlsConfig(certificate=certificate, key=paths.resolve_path(str(tls.key), folder))


def _absolute_model(model: ModelConfig, folder: Path) -> ModelConfig:
    update: dict[str, object] = {
        "adapters": tuple(
            _absolute_source(adapter, paths.check_adapter_path(adapter.path, folder))
            for adapter in model.adapters
        )
    }
    kind = checks.find_engine_kind(model)
    if model.chat_template is not None:
        update["chat_template"] = read_template(model.chat_template, folder)
    options = resolve_options(kind.options, model.options, folder)
    for name, path in checks.name_files(model, kind).items():
        options[name] = paths.check_model_path(path, folder).text
    if "model" in (asked := speculative_checks.get_speculative(model)):
        with contextlib.suppress(ValueError):  # reported by the checks
            asked = {**asked, "model": paths.check_model_path(str(asked["model"]), folder).text}
            options["speculative"] = asked
    update["options"] = options
    if model.engine == "command":
        update["options"] = {**model.options, "command": checks.resolve_command(model, folder)}
        update["python"] = None  # the server's, not the worker's
    if kind.reads_files:
        with contextlib.suppress(ValueError):  # the engine may need no files
            model = _absolute_source(model, paths.check_model_path(model.path, folder))
    return model.model_copy(update=update)


def _absolute_source(source: Source, path: paths.ModelPath) -> Source:
    """Return a model or adapter with the path in the form that engines know."""
    revision = source.revision or path.revision or None
    return source.model_copy(update={"path": path.text, "revision": revision})
