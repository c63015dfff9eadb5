"""Quantisations of a repository: which of its GGUF files a tag such as Q4_K_M names.

Publishers name their files freely. A name ends in its quantisation, or a folder has it; a large
one is in parts:

    Qwen3-8B-Q4_K_M.gguf              smollm2.Q4_1.gguf             qwen2.5-7b-instruct-q4_k_m.gguf
    Qwen3-8B-UD-Q4_K_XL.gguf          UD-IQ1_S/R1-UD-IQ1_S-00001-of-00003.gguf
    Q8_0/model-00001-of-00002.gguf    mmproj-F16.gguf (a projector for images: no model)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

_LABEL = (
    r"(?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|TQ\d_\d|TL\d|I2_S|B?F(?:16|32)|FP(?:16|32)"
    r"|(?:MX|NV)FP4(?:_[A-Z]+)*)"
)
_IN_NAME = re.compile(rf"(?:^|[-._])({_LABEL})(?=$|[-._])", re.IGNORECASE)
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_SAME = {"FP16": "F16", "FP32": "F32"}
#: Files beside models: projectors for images and sounds, and data for quantising.
_NO_MODEL = re.compile(r"(^|[-._])(mmproj|imatrix)([-._]|$)", re.IGNORECASE)
#: Most names in a message.
_MOST_SHOWN = 40


def find_label(name: str) -> str:
    """Return the quantisation that a file's name or a tag holds, such as "UD-Q4_K_XL"; else ""."""
    for part in reversed(_stem(name).split("/")):
        if found := _IN_NAME.findall(part):
            label = str(found[-1]).upper()
            return _SAME.get(label, label)
    return ""


def list_labels(names: Iterable[str]) -> list[str]:
    """Return the quantisations of the models among a repository's files, each once."""
    return sorted({label for stem, _ in _group_models(names) if (label := find_label(stem))})


def choose_files(names: Collection[str], tag: str) -> list[str]:
    """Return the file that `tag` names, or all its parts in order.

    `tag` is a quantisation, or the name of a file. Raises ValueError, with a sentence that lists
    what there is and that begins after the repository's name.
    """
    models = _group_models(names)
    for matches in (_is_path, _is_name, _has_label, _has_label_without_prefix, _ends_with):
        found = [files for (stem, _), files in models.items() if matches(stem, tag)]
        if len(found) > 1:
            several = ", ".join(files[0] for files in found[:_MOST_SHOWN])
            raise ValueError(f"has {len(found)} files for {tag}, write the name of one: {several}")
        if found:
            return _require_parts(found[0])
    raise ValueError(f"has no {tag}; {describe_models(names)}")


def list_parts(names: Collection[str], file: str) -> list[str]:
    """Return all parts of the model that `file` is, or is a part of, in order; [] if not there.

    Raises ValueError, as `choose_files` does, if a part is missing.
    """
    if file not in names:
        return []
    return _require_parts(sorted(name for name in names if _split(name) == _split(file)))


def describe_models(names: Collection[str]) -> str:
    """Return a clause with the quantisations there are, or with the files that name none."""
    if labels := list_labels(names):
        return f"its quantisations: {', '.join(labels[:_MOST_SHOWN])}"
    if files := [files[0] for files in _group_models(names).values()]:
        return f"its GGUF files: {', '.join(files[:_MOST_SHOWN])}"
    return "it has no GGUF files of a model"


def _split(name: str) -> tuple[str, str]:
    """Return the name without its ending and part number, and the number of parts or ""."""
    if found := _PART.fullmatch(name):
        return found["stem"], found["count"]
    return re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE), ""


def _stem(name: str) -> str:
    return _split(name)[0]


def _base(stem: str) -> str:
    return stem.rpartition("/")[2]


def _group_models(names: Iterable[str]) -> dict[tuple[str, str], list[str]]:
    """Return the files of each model, in order of its parts."""
    models: dict[tuple[str, str], list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not _NO_MODEL.search(_base(_stem(name))):
            models.setdefault(_split(name), []).append(name)
    return models


def _is_path(stem: str, tag: str) -> bool:
    return tag.lower().endswith(".gguf") and _stem(tag) == stem


def _is_name(stem: str, tag: str) -> bool:
    return tag.lower().endswith(".gguf") and _stem(tag) == _base(stem)


def _has_label(stem: str, tag: str) -> bool:
    label = tag.upper()
    return find_label(stem) == _SAME.get(label, label)


def _has_label_without_prefix(stem: str, tag: str) -> bool:
    return find_label(stem).removeprefix("UD-") == tag.upper()


def _ends_with(stem: str, tag: str) -> bool:
    return bool(re.search(rf"(^|[-._/]){re.escape(tag)}$", stem, re.IGNORECASE))


def _require_parts(files: list[str]) -> list[str]:
    """Return the files of a model. Raises ValueError if a part is missing."""
    first = _PART.fullmatch(files[0])
    count = int(first["count"]) if first else len(files)
    if len(files) < count:
        raise ValueError(f"has {len(files)} of the {count} parts of {files[0]} only")
    return files
