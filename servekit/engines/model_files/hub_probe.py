"""A probe for a model of the hub, run with `python -m`; prints one or two lines of JSON.

{"level": …, "said": …}     whether the model can be fetched
{"files": …}                its files, once their headers are in the folder that was named

For commands that import no engine and wait a few seconds at most; they also end this process. The
list of the repository's files is fetched, and the headers of the model's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from servekit.engines.model_files import hub, remote_headers
from servekit.engines.model_files.cache import disk_free_bytes
from servekit.errors import LoadError
from servekit.units import format_bytes

#: Timeout of the hub's answer; there are no retries.
TIMEOUT_S = 5.0


def probe_hub(repo: str, file: str, revision: str | None, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what there is to say of a model that is not cached, and the files of its headers.

    `file` is as in `hub.fetch_repo`; without it the repository has to be loadable as a whole.
    """
    from huggingface_hub import constants

    wanted = repo + (file if file[:1] == ":" else f"/{file}" if file else "")
    if constants.HF_HUB_OFFLINE:
        said = f"{wanted} is not here, and the hub was not asked: HF_HUB_OFFLINE is set."
        yield {"level": "warning", "said": said}
        return
    try:
        sizes, files, commit = hub.list_wanted(repo, file, revision, TIMEOUT_S)
    except LoadError as error:
        yield {"level": "error" if error.permanent else "warning", "said": error.message}
        return
    needed = sum(sizes[name] for name in files)
    level, said = _of_room(f"{wanted} is {files[0]}" if file[:1] == ":" else wanted, needed)
    yield {"level": level, "said": said}
    remote_headers.write_headers(repo, sizes, files, commit, folder)
    yield {"files": files}


def _of_room(what: str, needed_bytes: int) -> tuple[str, str]:
    from huggingface_hub import constants

    root = Path(constants.HF_HUB_CACHE)
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    said = f"{what}, to be fetched: {format_bytes(needed_bytes)}"
    if (free_bytes := disk_free_bytes(there)) < needed_bytes:
        return "warning", f"{said}; {format_bytes(free_bytes)} are free in {root}. Free some."
    return "ok", f"{said}; the disk has room."


def main() -> None:
    repo, file, revision, folder = sys.argv[1:5]
    for line in probe_hub(repo, file, revision or None, Path(folder)):
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
