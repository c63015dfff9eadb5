"""A probe for a GGUF model of the hub, run with `python -m`; prints a line of JSON.

For `servekit check` and `servekit doctor`, which import no engine and wait a few seconds at most;
they also end this process. Only the list of the repository's files is fetched.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from servekit.engines.model_files import hub
from servekit.engines.model_files.cache import disk_free_bytes
from servekit.errors import LoadError
from servekit.units import format_bytes

#: Timeout of the hub's answer; there are no retries.
TIMEOUT_S = 5.0


def probe_hub(repo: str, tag: str, revision: str | None) -> tuple[str, str]:
    """Return a level (ok, warning, error) and a message on a model that is not cached.

    Without `tag` the repository has to be loadable as a whole.
    """
    from huggingface_hub import constants

    wanted = f"{repo}:{tag}" if tag else repo
    if constants.HF_HUB_OFFLINE:
        return "warning", f"{wanted} is not here, and the hub was not asked: HF_HUB_OFFLINE is set."
    try:
        sizes, files = hub.list_wanted(repo, f":{tag}" if tag else "", revision, TIMEOUT_S)
    except LoadError as error:
        return "error" if error.permanent else "warning", error.message
    needed = sum(sizes[name] for name in files)
    return _of_room(f"{wanted} is {files[0]}" if tag else wanted, needed)


def _of_room(what: str, needed_bytes: int) -> tuple[str, str]:
    from huggingface_hub import constants

    root = Path(constants.HF_HUB_CACHE)
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    said = f"{what}, to be fetched: {format_bytes(needed_bytes)}"
    if (free_bytes := disk_free_bytes(there)) < needed_bytes:
        return "warning", f"{said}; {format_bytes(free_bytes)} are free in {root}. Free some."
    return "ok", f"{said}; the disk has room."


def main() -> None:
    repo, tag, revision = sys.argv[1:4]
    level, said = probe_hub(repo, tag, revision or None)
    sys.stdout.write(json.dumps({"level": level, "said": said}) + "\n")


if __name__ == "__main__":
    main()
