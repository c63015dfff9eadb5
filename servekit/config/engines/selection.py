"""The choice of an engine for `engine: auto`. A pure function of facts.

    model                     device       engine
    a remote endpoint         any          openai (its options have a `url`)
    a server's command        any          command (its options have a `command`)
    a folder of CTranslate2   any          faster_whisper
    a GGUF file               any          llamacpp, if installed and if it meets all requirements
    a folder, a hub id        GPU          vllm, likewise
    all others                any          transformers

Requirements are adapter types, sleep, and the spread over GPUs (`requirements.find_lacks`). `echo`
and plugins are never chosen: the file has to name them.
"""

from __future__ import annotations

from dataclasses import dataclass

from servekit.config.engines.environments import Environment, adapt_kind, find_environment
from servekit.config.engines.installed import Machine, find_module, install_command
from servekit.config.engines.options import KINDS, EngineKind
from servekit.config.engines.requirements import Asked, engine_of_options, find_lacks

_TOLD_BY_OPTIONS = {
    "openai": "its options name an endpoint",
    "command": "its options name a command",
}


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """A chosen engine, and the reason: a few words that follow its name."""

    engine: str
    why: str

    def __str__(self) -> str:
        return f"{self.engine}: {self.why}"


def choose_engine(asks: Asked, machine: Machine, named: Environment | None = None) -> EngineChoice:
    """Choose the engine for one model; `named` is the environment that its `python` names."""
    if engine := engine_of_options(asks.options):
        return EngineChoice(engine, _TOLD_BY_OPTIONS[engine])
    if asks.format == "ctranslate2":
        return EngineChoice("faster_whisper", "a model of CTranslate2")
    is_gguf = asks.format == "gguf"
    if not is_gguf and (asks.on_cpu or not machine.has_gpu):
        return EngineChoice("transformers", "on a CPU" if asks.on_cpu else "no GPU was found here")
    first, what = ("llamacpp", "a GGUF file") if is_gguf else ("vllm", "on a GPU")
    environment = named or find_environment(KINDS[first], machine)
    kind = adapt_kind(KINDS[first], environment)
    if obstacle := _find_obstacle(first, kind, asks, environment):
        return EngineChoice("transformers", f"{what}; {first}{_state_advantage(first)}, {obstacle}")
    if kind.instead in asks.options:
        return EngineChoice(first, f"{what}, and its options name a {kind.instead}")
    where = f" in {environment}" if environment.python else ""
    return EngineChoice(
        first, f"{what}, and {find_module(kind, environment.has)} is installed{where}"
    )


def _state_advantage(engine: str) -> str:
    return ", which runs it as it is" if engine == "llamacpp" else ", which is faster there"


def _find_obstacle(engine: str, kind: EngineKind, asks: Asked, environment: Environment) -> str:
    if lack := next(find_lacks(kind, asks, unknown_too=True), None):
        return lack.what
    if kind.is_for_cpus:
        return "is built for CPUs here"
    remedy = install_command(kind, environment.has, asks.options)
    return f"is not installed (servekit engine install {engine})" if remedy else ""
