"""The choice between vLLM's engine core and its own server, before anything of vLLM is imported."""

from __future__ import annotations

from servekit.engines import ENGINES, LIBRARIES
from servekit.engines.vllm import library
from servekit.protocol.messages import WorkerSpec

SERVER = "servekit.engines.vllm.server:VllmServerEngine"


def choose_class(spec: WorkerSpec) -> tuple[str, tuple[str, ...]]:
    """Return the engine's class, as "module:class", and the slow imports that it needs.

    Raises LoadError.
    """
    if library.choose_api(spec) == "core":
        return ENGINES["vllm"], LIBRARIES["vllm"]
    return SERVER, ()
