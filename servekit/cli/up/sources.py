"""The configuration that a command is about: a file, or one written for models that were typed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from servekit.errors import ConfigError, StartError
from servekit.system.user_dirs import find_config_home

NAME = "servekit.yaml"
#: Of the files for typed models, beside the default run directory.
_FOLDER = "typed"
_SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The options of models that are typed instead of a file, as the user wrote them."""

    name: str | None = None
    engine: str | None = None
    gpus: str | None = None
    memory: str | None = None
    max_context: int | None = None

    def given(self) -> list[str]:
        """Return the flags that were set."""
        set_ = [one.name for one in fields(self) if getattr(self, one.name) is not None]
        return [f"--{name.replace('_', '-')}" for name in set_]


def find_source(
    words: Sequence[str],
    config: Path | None,
    options: ModelOptions,
    environ: Mapping[str, str],
) -> Path:
    """Return the file to serve: the one that was named, written for `words`, or found.

    Raises ConfigError if words and options contradict each other, or there is no file.
    """
    words = list(words)
    if config is not None and words:
        raise ConfigError(f"give {words[0]} or --config {config}, not both")
    if config is None and len(words) == 1 and is_config(words[0]):
        config, words = Path(words[0]), []
    if file := next(filter(is_config, words), ""):
        raise ConfigError(f"{file} is a configuration file: give it alone, without models")
    if words:
        return write_for_models(words, options, environ)
    if flags := options.given():
        raise ConfigError(f"{flags[0]} is for models that are named here; a file has its own keys")
    if config is None and environ.get("SERVEKIT_CONFIG"):
        config = Path(environ["SERVEKIT_CONFIG"])
    return config or find_default(environ)


def is_config(word: str) -> bool:
    """Return whether a word names a configuration file rather than a model."""
    return word.lower().endswith(_SUFFIXES)


def find_default(environ: Mapping[str, str]) -> Path:
    """Return servekit.yaml of the working directory, or of the user's configuration folder."""
    places = default_places(environ)
    for path in places:
        with contextlib.suppress(PermissionError):  # another user's home
            if path.is_file():
                return path
    raise ConfigError(
        f"no configuration: neither ./{NAME} nor {places[1]} exists. `servekit up FILE` serves "
        "another file, `servekit up ORG/NAME` a model without a file, and `servekit init` writes "
        "a first file"
    )


def default_places(environ: Mapping[str, str]) -> tuple[Path, Path]:
    """Return the paths that are looked at when no file is named, in their order."""
    return Path(NAME), find_config_home(environ) / "servekit" / NAME


def write_for_models(
    words: Sequence[str], options: ModelOptions, environ: Mapping[str, str]
) -> Path:
    """Write the file that serves these models; the same models always get the same file.

    A reload reads it again, and a later start of the same models reuses it.
    """
    from servekit.supervisor.process.run_dir import default_paths

    if options.name is not None and len(words) > 1:
        raise ConfigError("--name is for one model; several take their names from their paths")
    models = [_describe_model(word, options) for word in words]
    names = [model["name"] for model in models]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two of these models would be called {twice!r}; write a file for them")
    text = "# Written by `servekit up` for models without a file.\n"
    text += json.dumps({"models": models}, indent=2) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    label = names[0].replace("/", "-").replace(":", "-")
    path = default_paths(environ)[0].parent / _FOLDER / f"{label}-{digest}.yaml"
    _write_private(path, text)
    return path


def blame_options(path: Path, message: str) -> str:
    """Return an error about a file for typed models with the options that were typed."""
    if path.parent.name != _FOLDER:
        return message
    place = rf"^{re.escape(str(path))}:\d+:\d+: models\[\d+\]\.(\w+)(\[\d+\])?: "
    names = {one.name for one in fields(ModelOptions)}

    def name_option(found: re.Match[str]) -> str:
        option = found[1].replace("_", "-")
        return f"--{option}: " if found[1] in names else found[0]

    return re.sub(place, name_option, message, flags=re.MULTILINE)


def _describe_model(word: str, options: ModelOptions) -> dict[str, Any]:
    from servekit.cli.init.config_template import DEMO, DEMO_SAMPLING, name_of
    from servekit.config import paths

    path, revision = (DEMO, "") if word == "demo" else _check_path(word)
    model: dict[str, Any] = {"name": options.name or name_of(path), "path": path, "engine": "auto"}
    if path == DEMO:  # at four bits it wanders, too
        model |= {"engine": "transformers", "sampling": DEMO_SAMPLING}
    if revision:
        model["revision"] = revision
    is_hub = not path.startswith(("/", "pypi:"))
    if is_hub and (alias := paths.split_tag(path)[0]) != model["name"]:
        model["aliases"] = [alias]  # clients of other servers ask for the hub id
    given = {"engine": options.engine, "memory": options.memory, "max_context": options.max_context}
    model |= {key: value for key, value in given.items() if value is not None}
    return model | _describe_device(options.gpus)


def _check_path(word: str) -> tuple[str, str]:
    from servekit.config import paths

    try:
        found = paths.check_model_path(word, Path.cwd())
    except ValueError as error:
        raise ConfigError(f"{error}; a configuration file ends in .yaml") from None
    return found.text, found.revision


def _describe_device(gpus: str | None) -> dict[str, Any]:
    if gpus in (None, "all"):
        return {}
    if gpus == "none":
        return {"device": "cpu"}
    parts = [part.strip() for part in str(gpus).split(",")]
    return {"gpus": [int(part) if part.isdecimal() else part for part in parts]}


def _write_private(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(text)
        fresh.replace(path)
    except OSError as error:
        raise StartError(
            f"cannot write {path}: {error.strerror}; XDG_STATE_HOME moves it"
        ) from None
