"""Headers of a model's files on the hub, fetched without the weights.

They are written as sparse files of the full size and the same names, so that the readers of local
files read them as well. Files that only have to exist are written without content.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from servekit.errors import LoadError
from servekit.model_metadata import ctranslate2, gguf

#: Most bytes of one header, and of one small file.
_MOST_BYTES = 64 * 2**20
#: First guesses at the length of a header; a vocabulary of GGUF takes several MB.
_FIRST_BYTES = {"gguf": 2 * 2**20, "safetensors": 64 * 2**10}
#: Of CTranslate2's file the beginning, which says the kind of model: it has no header as a whole.
_CTRANSLATE2_BYTES = 64
_PARALLEL = 8
#: Small files that are fetched whole.
_WHOLE = ("config.json", ".index.json", "modules.json")


def write_headers(
    repo: str, sizes: dict[str, int], names: Sequence[str], revision: str, folder: Path
) -> None:
    """Write the headers of the files `names` of a repository below `folder`.

    Raises LoadError or an error of the HTTP client.
    """

    def write_shard(name: str) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_header(path, sizes[name], lambda length: _fetch_start(repo, name, revision, length))

    with ThreadPoolExecutor(_PARALLEL) as pool:
        list(pool.map(write_shard, names))


def write_header(path: Path, size: int, fetch: Callable[[int], bytes]) -> None:
    """Write the header of a file of `size` bytes at `path`, and a hole for the rest.

    `fetch` returns the first bytes of the file. Raises LoadError if the header has no end.
    """
    kind = path.suffix.removeprefix(".").lower()
    if kind in _FIRST_BYTES:
        length = min(size, _FIRST_BYTES[kind])
        path.write_bytes(fetch(length))
        while (needed := _header_length(path, kind)) > length:
            if length >= min(size, _MOST_BYTES):
                raise LoadError(f"the header of {path.name} cannot be read")
            length = min(size, needed, _MOST_BYTES)
            path.write_bytes(fetch(length))
    elif path.name == ctranslate2.FILE:
        path.write_bytes(ctranslate2.cut_start(fetch(min(size, _CTRANSLATE2_BYTES))))
    else:
        path.write_bytes(fetch(min(size, _MOST_BYTES)) if path.name.endswith(_WHOLE) else b"")
    with path.open("r+b") as file:
        file.truncate(size)


def _header_length(path: Path, kind: str) -> int:
    """Return the least length that holds the header of a file; a guess while it is not known."""
    start = path.read_bytes()
    if kind == "safetensors":
        return 8 + struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else len(start) + 1
    # under a name that is no part of several, which are not all here yet
    alone = path.with_name(f"{path.name}.start")
    alone.write_bytes(start)
    try:
        gguf.read_gguf(alone)
    except ValueError:
        return 4 * len(start)
    finally:
        alone.unlink()
    return len(start)


def _fetch_start(repo: str, name: str, revision: str, length: int) -> bytes:
    """Return the first `length` bytes of a file, also from a server without byte ranges."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils._headers import build_hf_headers
    from huggingface_hub.utils._http import get_session, hf_raise_for_status

    headers = {
        **build_hf_headers(),
        "Range": f"bytes=0-{length - 1}",
        "Accept-Encoding": "identity",
    }
    url = hf_hub_url(repo, name, revision=revision)
    held = bytearray()
    with get_session().stream(
        "GET", url, headers=headers, timeout=5.0, follow_redirects=True
    ) as answer:
        hf_raise_for_status(answer)
        for chunk in answer.iter_bytes():
            held += chunk
            if len(held) >= length:
                break
    return bytes(held[:length])
