"""vLLM by its own server, `vllm serve`: for releases whose engine core servekit cannot use.

The server is a child of the worker, as any server of `engine: command`, and gets the model's
memory, context, GPUs and engine arguments as flags. Requests go by OpenAI's API: an answer
continues in another worker after its text, not after its tokens, and a seed's noise begins anew.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from msgspec import structs

from servekit.engines.api.base import Report
from servekit.engines.command.engine import CommandEngine
from servekit.engines.model_files.model_kind import find_model_kind, refuse_speech
from servekit.engines.model_files.source import resolve_folder
from servekit.engines.vllm import engine_args, library
from servekit.engines.vllm.argument_parser import format_flags
from servekit.errors import LoadError
from servekit.protocol.messages import ModelInfo, WorkerSpec

#: Arguments that only the core's client needs, and those of adapters.
_OF_THE_CORE = frozenset(
    {"model", "structured_outputs_config", "disable_log_stats", "mm_processor_cache_gb"}
    | {"enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank"}
)
_ADDRESS = ("--host={host}", "--port={port}")
#: Requests at once if the option `slots` does not say.
_SLOTS = 256
#: vLLM's names of servekit's tool parsers.
_TOOL_PARSERS = {
    **{name: name for name in ("hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral")},
    "kimi_k2": "kimi_k2",
    "deepseek": "deepseek_v3",
    "glm": "glm45",
    "harmony": "openai",
    "cohere": "cohere_command3",
    "gemma": "gemma4",
    "function_gemma": "functiongemma",
}


class VllmServerEngine(CommandEngine):
    """The engine vllm with the server; its options are `config.engines.VllmOptions`."""

    def load(self, report: Report) -> ModelInfo:
        if self.spec.adapters:
            raise LoadError("vLLM's own server serves here, with which servekit has no adapters.")
        folder = Path(resolve_folder(self.spec.path, self.spec.revision, report))
        refuse_speech(folder, self.spec)
        kind = find_model_kind(folder, self.spec)
        if kind in ("classify", "rerank"):
            raise LoadError(
                "vLLM's own server serves here, by which servekit has no rerankers and classifiers."
                " engine: command with `vllm serve` forwards /rerank, /score and /classify."
            )
        embeds = kind == "embed"
        self._flags = make_flags(self.spec, folder, embeds=embeds)
        library.keep_sockets(self.spec)
        if self.spec.sleeps:  # the pages for it are for developers
            os.environ["VLLM_SERVER_DEV_MODE"] = "1"
        options = make_command_options(self.spec.options, embeds=embeds)
        super().__init__(structs.replace(self.spec, options=options))
        return super().load(report)

    def _fill_command(self, report: Report) -> tuple[list[str], str]:
        words, origin = super()._fill_command(report)
        return [*words[: -len(_ADDRESS)], *self._flags, *words[-len(_ADDRESS) :]], origin


def make_flags(spec: WorkerSpec, folder: Path, *, embeds: bool) -> list[str]:
    """Return the model and the flags of `vllm serve`. Raises LoadError."""
    memory = engine_args.device_memory(spec)
    asked = engine_args.engine_arguments(spec, folder, memory, embeds=embeds)
    kept = {name: value for name, value in asked.items() if name not in _OF_THE_CORE}
    kept |= engine_args.passed_arguments(spec)
    model = [str(folder)] if _has_command() else [f"--model={folder}"]
    return [*model, *_front_flags(spec), *format_flags(kept)]


def _front_flags(spec: WorkerSpec) -> Iterator[str]:
    yield f"--served-model-name={spec.model}"
    yield "--uvicorn-log-level=warning"
    if spec.chat_template:
        yield f"--chat-template={_write_template(spec)}"
    if name := _TOOL_PARSERS.get(spec.tool_parser):
        yield from ("--enable-auto-tool-choice", f"--tool-call-parser={name}")


def _write_template(spec: WorkerSpec) -> Path:
    """Write the template beside the worker's socket, in the run directory."""
    file = Path(f"{spec.socket or tempfile.mkdtemp()}.jinja")
    file.write_text(spec.chat_template)
    return file


def make_command_options(options: dict[str, Any], *, embeds: bool) -> dict[str, Any]:
    """Return the options of the engine command."""
    module = "cli.main" if _has_command() else "openai.api_server"
    words = [sys.executable, "-m", f"vllm.entrypoints.{module}"]
    words += ["serve"] if _has_command() else []
    return {
        "command": [*words, *_ADDRESS],
        "key_environment": "VLLM_API_KEY",
        "base": "/v1",
        "health": "/health",
        "task": "embed" if embeds else "generate",
        "slots": options.get("slots") or _SLOTS,
        "sleep": f"/sleep?level={options.get('sleep_level', 1)}",
        "wake": "/wake_up",
        "chat_template_kwargs": True,
    }


def _has_command() -> bool:
    """Return whether `vllm serve` works: it asks for its package's version, which has two names."""
    try:
        return bool(metadata.version("vllm"))
    except metadata.PackageNotFoundError:
        return False
