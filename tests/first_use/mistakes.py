"""Mistakes in a first configuration file, and the advice that each has to get, in one round."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.first_use.report import Report
from tests.integration.instance import PROGRAM

FILES = Path(__file__).parent / "files"
#: The words of the advice by file. A file without advice is valid.
ADVICE: Mapping[str, tuple[str, ...]] = {
    "typo-key.yaml": ("Did you mean 'replicas'",),
    "device-gpu.yaml": ("Did you mean 'cuda'",),
    "tabs.yaml": ("a tab is used",),
    "missing-path.yaml": ("path: missing; a folder or .gguf file",),
    "nonexist-folder.yaml": ("nowhere: does not exist",),
    "dup-name.yaml": ("'a' is taken by models[0].name on line 2",),
    "alias-clash.yaml": ("'b' is taken by models[0].aliases[0] on line 2",),
    "no-models.yaml": ("models: missing; the models to serve",),
    "port-str.yaml": ("Leave out the quotes",),
    "host-open-nokeys.yaml": (
        "`servekit key new`",
        "127.0.0.1 behind a proxy",
    ),
    "vllm-noinstall.yaml": ("servekit engine install vllm",),
    "memory-unit.yaml": (
        "Write 50%",
        "Write 20GiB",
    ),
    "two-gpus-none.yaml": ("no NVIDIA GPU was found here",),
    "models-as-map.yaml": ("- name: qwen",),
    "vllm-args.yaml": (
        "`gpus_per_replica: 2`",
        "`memory: 90%`",
        "`max_context: 8192`",
        "{engine_args: {quantization: awq}}",
        "{engine_args: {enable_prefix_caching: true}}",
    ),
    "llamaswap.yaml": ("servekit init --from llama-swap",),
    "hf-url.yaml": (
        "write Qwen/Qwen3-0.6B, its hub id",
        "neither a hub id",
        "servekit init --from ollama",
    ),
    "ollama-options.yaml": (
        "`max_context: 4096`",
        "belongs under models[0].sampling",
    ),
    "key-plain.yaml": (
        "keys[0].key: unknown key; a key itself does not stand in the file",
        "keys[1]: is no mapping",
    ),
    "env-path.yaml": (
        "MODEL_DIR is not set",
        "qwen: does not exist",
    ),
    "idle-str.yaml": (
        "Write on_demand",
        "Leave out the quotes",
        "must be more than 0",
    ),
    "no-colon-space.yaml": ("write `name: a`",),
    "gguf-multi.yaml": (),
    "empty.yaml": ("the file is empty",),
    "broken.yaml": ("a bracket is not closed",),
    "models.json": (),
    "envvar.yaml": (
        'Put it in quotes: "1"',
        "choose GPUs with `gpus`",
    ),
    "dup-key.yaml": ("the key 'path' is written twice",),
    "name-odd.yaml": (
        "a name begins with a letter or digit",
        'Put it in quotes: "3"',
    ),
}


def walk_mistakes(folder: Path, report: Report) -> None:
    """Check each file as its user would."""
    for name, advice in ADVICE.items():
        path = shutil.copy(FILES / name, folder)
        command = [*PROGRAM, "check", name]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
        )
        said = done.stdout + done.stderr
        screen = re.sub(r"\s+", " ", said)
        wrong = [f"no {words!r}" for words in advice if words not in screen]
        if done.returncode != (2 if advice else 0):
            wrong.append(f"exit status {done.returncode}")
        seen = f"{Path(path).read_text()}\n{said}"
        report.add("mistakes", f"servekit check {name}", seen, "; ".join(wrong))
