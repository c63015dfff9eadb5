"""Which engine runs a model whose file leaves that open. A pure function of facts.

    the model is         it runs       engine: auto is
    an endpoint's        anywhere      openai (its options have a `url`)
    a GGUF file          anywhere      llamacpp, where it is installed and has all that is asked
    a folder, a hub id   on a GPU      vllm, likewise
    whatever is left     anywhere      transformers

What is asked: its adapters' types, sleep, how it is spread over GPUs (`fitting.lacks`). `echo` and
the engines of other packages are never chosen: the file has to name them.
"""

from __future__ import annotations

from dataclasses import dataclass

from servekit.config.engines.installed import Machine, found, lacking
from servekit.config.engines.options import KINDS
from servekit.config.engines.requirements import Asked, lacks


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine, and why that one: a few words that go on after its name."""

    engine: str
    why: str

    def __str__(self) -> str:
        return f"{self.engine}: {self.why}"


def choose(asks: Asked, machine: Machine) -> Choice:
    """The engine for one model."""
    if asks.remote:
        return Choice("openai", "its options name an endpoint")
    is_gguf = asks.format == "gguf"
    if not is_gguf and (asks.on_cpu or not machine.has_gpu):
        return Choice("transformers", "on a CPU" if asks.on_cpu else "no GPU was found here")
    first, what = ("llamacpp", "a GGUF file") if is_gguf else ("vllm", "on a GPU")
    if obstacle := _obstacle(first, asks, machine):
        return Choice("transformers", f"{what}; {first}{_praise(first)}, {obstacle}")
    kind = KINDS[first]
    if kind.instead in asks.options:
        return Choice(first, f"{what}, and its options name a {kind.instead}")
    return Choice(first, f"{what}, and {found(kind, machine.has)} is installed")


def _praise(engine: str) -> str:
    return ", which runs it as it is" if engine == "llamacpp" else ", which is faster there"


def _obstacle(engine: str, asks: Asked, machine: Machine) -> str:
    kind = KINDS[engine]
    if lack := next(lacks(kind, asks, unknown_too=True), None):
        return lack.what
    if kind.is_for_cpus:
        return "is built for CPUs here"
    remedy = lacking(kind, machine.has, asks.options)
    return f"is not installed ({remedy})" if remedy else ""
