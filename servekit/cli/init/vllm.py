"""A converter of a `vllm serve` command line."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from servekit.cli.init import brought_models, gpu_pins
from servekit.cli.init.brought_models import BroughtModel, Carried, Command, quote_word
from servekit.cli.init.server_commands import ServerCommand, parse_server, parse_vllm
from servekit.errors import ConfigError
from servekit.system.gpu.gpus import Gpu

_FORM = "write it as it is typed, in quotes: servekit init --from vllm 'vllm serve org/name'"
#: Words that end a command in a shell.
_ENDS = re.compile(r"[|;&]+|\d?>{1,2}.*|\d>&\d|<.*")
_IMAGE = re.compile(r"(?:^|/)vllm[\w.-]*(?:/[\w.-]+)?(?::[\w.-]+)?$|vllm-openai")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
#: Why an option of vLLM has no key.
_WHY_NOT = {
    "--api-key": "requests need a key once there are `keys`; `servekit key new` makes one",
    "--host": "this service listens on `server.host`",
    "--reasoning-parser": "`reasoning_parser: auto` reads it off the chat template",
    "--enable-sleep-mode": "the model sleeps after `idle_sleep_s`",
    "--ssl-keyfile": "`server.tls` names the certificate and its key",
    "--ssl-certfile": "`server.tls` names the certificate and its key",
    "--api-server-count": "`server.gateways` is the number of front ends",
}
#: Words before a command that are not part of it.
_BEFORE = ("sudo", "nohup", "exec", "env", "export", "$")


@dataclass(slots=True)
class _Typed:
    """A command line in its parts."""

    env: dict[str, str] = field(default_factory=dict)
    program: str = "vllm"
    words: list[str] = field(default_factory=list)  # of the command
    arguments: list[str] | None = None  # of `vllm serve`, where the command is docker's
    gpus: str | None = None  # as CUDA_VISIBLE_DEVICES has them
    port: int | None = None  # that a container publishes
    notes: list[str] = field(default_factory=list)


def convert_command(text: str, gpus: tuple[Gpu, ...]) -> Carried:
    """Convert a command line. Raises ConfigError if it is none of vLLM."""
    typed = _split_command(text)
    found = parse_server(typed.words) if typed.arguments is None else parse_vllm(typed.arguments)
    if found is None or found.engine != "vllm":
        raise ConfigError(f"this is no `vllm serve` command; {_FORM}")
    if not found.model:
        raise ConfigError(f"the command names no model; {_FORM}")
    model = _bring_model(found, typed, gpus)
    server: dict[str, Any] = {"host": "127.0.0.1", "port": typed.port or found.port or 8000}
    notes = [
        "vllm serve listens on every interface; here it is this machine only, and others need"
        " `host: 0.0.0.0` with `keys`"
    ]
    brought_models.name_models([model])
    text = brought_models.compose_file(
        ["Made from a `vllm serve` command by `servekit init --from vllm`. Check it, serve it:"],
        [model],
        {"server": server},
        notes,
    )
    return Carried(text, brought_models.left_out_lines([model], notes))


# ---------------------------------------------------------------- the command


def _split_command(text: str) -> _Typed:
    try:
        words = shlex.split(re.sub(r"\\\r?\n", " ", text), comments=True)
    except ValueError as error:
        raise ConfigError(f"the command cannot be split into words ({error}); {_FORM}") from None
    end = next((i for i, word in enumerate(words) if _ENDS.fullmatch(word)), len(words))
    typed = _Typed()
    if words[end:]:
        typed.notes.append(f"after the command: {' '.join(words[end:])}")
    words = words[:end]
    while words and (words[0] in _BEFORE or _ASSIGNMENT.fullmatch(words[0])):
        _take_variable(typed, words[0])
        words = words[1:]
    if words and words[0].rpartition("/")[2] in ("docker", "podman"):
        _split_container(typed, words)
    elif words:
        typed.program, typed.words = words[0], words
    typed.gpus = typed.env.pop("CUDA_VISIBLE_DEVICES", typed.gpus)
    for name in [name for name in typed.env if _SECRET.search(name)]:
        del typed.env[name]
        typed.notes.append(f"{name}: set it for `servekit up`; its workers inherit it")
    return typed


def _split_container(typed: _Typed, words: list[str]) -> None:
    """Take the arguments of vLLM, and the variables, from a `docker run` of its image."""
    image = next((i for i, word in enumerate(words) if i > 1 and _is_image(word, words[i - 1])), 0)
    if not image:
        raise ConfigError(f"this runs no image of vLLM, such as vllm/vllm-openai; {_FORM}")
    typed.arguments = words[image + 1 :]
    for word, value in pairwise(words[:image]):
        if word in ("-e", "--env"):
            _take_variable(typed, value)
        elif word.startswith("--env="):
            _take_variable(typed, word.removeprefix("--env="))
        elif word == "--gpus" or word.startswith("--gpus="):
            typed.gpus = gpu_pins.of_docker(value if word == "--gpus" else word[7:])
        elif word in ("-p", "--publish") and (port := re.fullmatch(r"(?:.*:)?(\d+):\d+", value)):
            typed.port = int(port[1])
    options = " ".join(map(quote_word, _without_variables(words[:image])))
    typed.notes.append(f"the container ({options} …): vLLM runs here without one")


def _without_variables(words: list[str]) -> Iterator[str]:
    """Leave out variables, which may be secret."""
    for before, word in pairwise(["", *words]):
        named = word in ("-e", "--env") or word.startswith("--env=")
        if not named and before not in ("-e", "--env"):
            yield word


def _take_variable(typed: _Typed, word: str) -> None:
    if pair := _ASSIGNMENT.fullmatch(word):
        typed.env[pair[1]] = pair[2]


def _is_image(word: str, before: str) -> bool:
    return bool(_IMAGE.search(word)) and before not in ("--name", "-v", "--volume", "--network")


# ---------------------------------------------------------------- the model


def _bring_model(found: ServerCommand, typed: _Typed, gpus: tuple[Gpu, ...]) -> BroughtModel:
    path, reason = brought_models.resolve_model(found.model)
    first, *others = found.names or [found.model]
    model = BroughtModel(first, {"aliases": others} if others else {}, notes=list(typed.notes))
    if reason:
        model.notes.append(f"the model is written as it is, but {reason}")
    if found.unknown:
        _bring_as_command(model, path, found, typed)
    else:
        _bring_as_engine(model, path, found, typed)
    per_replica = found.keys.get("gpus_per_replica", 1)
    gpu_pins.pin_model(model, typed.gpus, gpus, per_replica=per_replica)
    model.keys |= {"env": typed.env} if typed.env else {}
    return model


def _bring_as_engine(model: BroughtModel, path: str, found: ServerCommand, typed: _Typed) -> None:
    model.keys |= {"engine": "vllm", "path": path} | _python_of(typed.program)
    model.keys |= {"replicas": 1} | found.nested_keys()
    if found.adapters:
        adapters = [{"name": name, "path": file} for name, file in found.adapters]
        model.keys["adapters"] = adapters
    for flag in dict.fromkeys(found.without):
        model.notes.append(f"{flag}: {_WHY_NOT.get(flag, 'it is about the server of vLLM')}")


def _bring_as_command(model: BroughtModel, path: str, found: ServerCommand, typed: _Typed) -> None:
    """Keep vLLM's own server, for options that servekit's engine has no key for."""
    words = typed.words if typed.arguments is None else ["vllm", "serve", *typed.arguments]
    model.comments.append(
        "Its own server runs it, for options that have no key of `engine: vllm`: "
        + ", ".join(map(str, found.unknown))
    )
    kept = list(_server_words(words, found))
    keys = {name: found.keys[name] for name in _KEPT if name in found.keys}
    options: dict[str, Any] = {"command": Command([*kept, "--host", "{host}", "--port", "{port}"])}
    if slots := found.keys.get("options.slots"):
        options["slots"] = slots
    model.keys |= {"engine": "command", "path": path, "replicas": 1} | keys | {"options": options}
    if found.adapters:
        model.notes.append("--lora-modules: adapters of its server are no models here")
    if "--api-key" in found.without:
        model.notes.append(f"--api-key: {_WHY_NOT['--api-key']}")


#: Keys beside a command that are servekit's to know.
_KEPT = ("max_context", "gpus_per_replica", "memory")


def _server_words(words: list[str], found: ServerCommand) -> Iterator[str]:
    """Yield the words of the command without its address and key, with {path} for the model."""
    skips = False
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if skips or flag in ("--host", "--port", "--api-key"):
            skips = not skips and "=" not in word
        elif word == found.model:
            yield "{path}"
        else:
            yield word


def _python_of(program: str) -> dict[str, str]:
    """Return the Python environment of a program as the key `python`, if it is not our own."""
    found = shutil.which(program)
    python = Path(found).resolve().with_name("python") if found else None
    if python is None or not python.is_file() or python.parent == Path(sys.executable).parent:
        return {}
    return {"python": str(python)}
