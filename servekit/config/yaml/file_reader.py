"""Reader of a configuration file from disk, robust against any kind of file."""

from __future__ import annotations

import stat
from difflib import get_close_matches
from pathlib import Path

from servekit.config.yaml.loader import parse_document
from servekit.config.yaml.nodes import DocumentError, Node, format_place, mark_at
from servekit.errors import ConfigError

MAX_BYTES = 2**20


def read_document(path: Path) -> Node:
    """Return the root mapping of `path`; raises ConfigError that names file, line and column."""
    try:
        return parse_document(_decode_text(_read_bytes(path)))
    except DocumentError as error:
        raise ConfigError(f"{format_place(path, error.mark)}: {error}") from None


def _read_bytes(path: Path) -> bytes:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise DocumentError("is a folder, not a configuration file." + _yaml_files_in(path))
        if not stat.S_ISREG(status.st_mode):
            raise DocumentError("is not a regular file.")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise DocumentError("there is no such file." + _suggest_file(path)) from None
    except OSError as error:
        raise DocumentError(f"cannot be read: {error.strerror}.") from None
    except ValueError as error:  # a NUL in the name
        raise DocumentError(f"is not a file name: {error}.") from None
    if len(data) > MAX_BYTES:
        raise DocumentError("is larger than 1 MiB; a configuration file is a few lines of YAML.")
    return data


def _suggest_file(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    except OSError:
        return ""
    close = get_close_matches(path.name, names, n=1)
    return f" Did you mean '{path.with_name(close[0])}'?" if close else ""


def _yaml_files_in(folder: Path) -> str:
    try:
        names = sorted(p.name for p in folder.iterdir() if p.suffix in {".yaml", ".yml"})
    except OSError:
        return ""
    return f" It holds {', '.join(names[:5])}." if names else ""


def _decode_text(data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DocumentError("is saved as UTF-16; save it as UTF-8.")
    if b"\0" in data:
        raise DocumentError("is binary, not YAML.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8", "replace")
        raise DocumentError(
            f"not UTF-8 text (byte 0x{data[error.start]:02x}).", mark_at(before, len(before))
        ) from None
