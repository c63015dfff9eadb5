"""The API for engine plugins: `from servekit.plugin import Engine`.

Names are imported lazily: a worker loads no configuration schema, and the supervisor, which
reads `KIND`, loads no engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from servekit.config.base_model import Section as Section
    from servekit.config.engines.options import EngineKind as EngineKind
    from servekit.config.engines.path_options import ConfigPath as ConfigPath
    from servekit.engines.api.base import Codec as Codec
    from servekit.engines.api.base import Decoder as Decoder
    from servekit.engines.api.base import EmbedJob as EmbedJob
    from servekit.engines.api.base import Emit as Emit
    from servekit.engines.api.base import Engine as Engine
    from servekit.engines.api.base import Job as Job
    from servekit.engines.api.base import Load as Load
    from servekit.engines.api.base import PairCodec as PairCodec
    from servekit.engines.api.base import Report as Report
    from servekit.engines.api.base import StepOutput as StepOutput
    from servekit.engines.api.base import TokenizedText as TokenizedText
    from servekit.engines.api.base import TooManyTokens as TooManyTokens
    from servekit.engines.api.generation_identity import identify_files as identify_files
    from servekit.errors import LoadError as LoadError
    from servekit.errors import RequestError as RequestError
    from servekit.errors import Unsupported as Unsupported
    from servekit.protocol.adapters import AdapterInfo as AdapterInfo
    from servekit.protocol.adapters import AdapterSpec as AdapterSpec
    from servekit.protocol.messages import Capability as Capability
    from servekit.protocol.messages import ChatMessage as ChatMessage
    from servekit.protocol.messages import ModelInfo as ModelInfo
    from servekit.protocol.messages import Progress as Progress
    from servekit.protocol.messages import SamplingParams as SamplingParams
    from servekit.protocol.messages import WorkerSpec as WorkerSpec

_MODULES = {
    "servekit.config.base_model": ("Section",),
    "servekit.config.engines.options": ("EngineKind",),
    "servekit.config.engines.path_options": ("ConfigPath",),
    "servekit.engines.api.base": (
        "Codec",
        "Decoder",
        "EmbedJob",
        "Emit",
        "Engine",
        "Job",
        "Load",
        "PairCodec",
        "Report",
        "StepOutput",
        "TokenizedText",
        "TooManyTokens",
    ),
    "servekit.engines.api.generation_identity": ("identify_files",),
    "servekit.errors": ("LoadError", "RequestError", "Unsupported"),
    "servekit.protocol.adapters": ("AdapterInfo", "AdapterSpec"),
    "servekit.protocol.messages": (
        "Capability",
        "ChatMessage",
        "ModelInfo",
        "Progress",
        "SamplingParams",
        "WorkerSpec",
    ),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name from its module on first use. Raises AttributeError for any other name."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
