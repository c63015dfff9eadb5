"""Checks of models with `engine: vllm`: engine arguments, and the interface that is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from servekit.config.engines.environments import Environment, read_environment
from servekit.config.engines.installed import packages_of
from servekit.config.error_reporting import Problem
from servekit.config.schema import ModelConfig
from servekit.vllm_source import arguments, contract

Place = tuple[str | int, ...]
_PACKAGE = "vllm"
#: It refuses requests above this. Source: vllm/sampling_params.py, `SamplingParams._verify_args`.
MAX_TEMPERATURE = 2


def check_options(config: ModelConfig, at: Place) -> Iterator[Problem]:
    """Find engine arguments that servekit sets itself, and adapters that are out of reach."""
    for name in _passed(config):
        if sentence := arguments.explain_own(name):
            yield Problem((*at, "engine_args", name), sentence, at_key=True)
    passed = {arguments.normalize_name(name) for name in _passed(config)}
    if config.options.get("quantization") and "quantization" in passed:
        message = "`options` has a `quantization`, too: leave one of them out."
        yield Problem((*at, "engine_args"), message, at_key=True)
    if config.options.get("cache_type", "auto") != "auto" and "kv_cache_dtype" in passed:
        message = "`options` has a `cache_type`, too: leave one of them out."
        yield Problem((*at, "engine_args"), message, at_key=True)
    if config.options.get("api") == "server" and config.adapters:
        message = "servekit has no adapters with vLLM's own server: leave this out, or `adapters`."
        yield Problem((*at, "api"), message)


def check_arguments(config: ModelConfig, at: Place) -> Iterator[Problem]:
    """Find engine arguments that the vLLM in the model's environment does not have."""
    passed = _passed(config)
    environment = _environment_of(config)
    folder = environment.folder_of(_PACKAGE) if passed else None
    if folder is None or not (known := arguments.read_arguments(folder)):
        return
    for name in passed:
        if arguments.explain_own(name):  # reported already
            continue
        if sentence := arguments.explain_unknown(name, known, _version_in(environment)):
            yield Problem((*at, name), sentence, at_key=True)


def describe_api(config: ModelConfig) -> str:
    """Return a sentence about the interface to the model's vLLM; "" for its tested core."""
    environment = _environment_of(config)
    if (folder := environment.folder_of(_PACKAGE)) is None:
        return ""
    asked = str(config.options.get("api", "auto"))
    choice = contract.choose_api(asked, folder, _version_in(environment))
    if choice.api == "server" and not choice.warning:
        return "served by vLLM's own server, as its options say"
    return choice.warning


def _passed(config: ModelConfig) -> Mapping[str, Any]:
    found = config.options.get("engine_args")
    return found if isinstance(found, dict) else {}


def _environment_of(config: ModelConfig) -> Environment:
    return Environment() if config.python is None else read_environment(Path(config.python))


def _version_in(environment: Environment) -> str:
    found = (environment.version_of(package) for package in packages_of(_PACKAGE))
    return next(filter(None, found), "")
