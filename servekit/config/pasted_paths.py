"""Names of models as people paste them: addresses of the hub, and commands of other programs.

hf.co/org/name:Q4_K_M                                 as Ollama and llama.cpp take it
https://huggingface.co/org/name/blob/main/file.gguf   from the address line of a browser
hf://org/name@v1/file.gguf                            as huggingface_hub writes it
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote

from servekit.config import ollama_names
from servekit.model_metadata.quantizations import find_label

_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<page>[^?#]*)(?:\?(?P<query>[^#]*))?.*"
    r"|hf://(?P<file>.+)",
    re.IGNORECASE,
)
#: Parts of the hub that are no models.
_NO_MODELS = {"datasets", "spaces", "collections", "papers", "docs", "blog", "models", "posts"}
#: Pages of a model with a revision in their address.
_PAGES = {"tree", "blob", "resolve", "raw", "edit", "commit", "commits"}
_PROGRAMS = re.compile(
    r"ollama|vllm|sglang|lms|hf|huggingface-cli|git|docker|podman|text-generation-launcher"
    r"|llama-(?:server|cli|run|swap)|(?:uv|uvx|python[\d.]*)"
)
_MODEL_FLAGS = ("-hf", "-hfr", "--hf-repo", "--model", "--model-path", "--model-id", "-m")
_VERBS = {"run", "pull", "show", "serve", "download", "get", "chat", "clone", "model"}


@dataclass(frozen=True, slots=True)
class HubAddress:
    """The model at an address: org/name, org/name:TAG or org/name/FILE.gguf."""

    text: str
    revision: str = ""


def parse_address(text: str) -> HubAddress | None:
    """Return the model at an address of the hub; None for other texts.

    Raises ValueError, with a sentence, for an address of something else.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None:
        return None
    parts = [part for part in (found["page"] or found["file"] or "").split("/") if part]
    if len(parts) < 2 or parts[0] in _NO_MODELS:
        raise ValueError(f"'{text}' is no address of a model; write its hub id: org/name")
    name, _, revision = parts[1].partition("@")
    repo, page, rest = f"{parts[0]}/{name}", "", parts[2:]
    if not found["file"] and rest and rest[0] in _PAGES:
        page, revision, rest = rest[0], *_split_revision(rest[1:])
    elif not found["file"] and rest and not rest[-1].lower().endswith(".gguf"):
        rest = []  # discussions and the like
    file = unquote("/".join(rest)) or _queried_file(found["query"] or "")
    revision = unquote(revision)
    return HubAddress(_join_file(repo, page, file), "" if revision == "main" else revision)


def _split_revision(parts: list[str]) -> tuple[str, list[str]]:
    """Split REVISION/FILE, where a pull request is refs/pr/1."""
    length = 3 if parts[:1] == ["refs"] else 1
    return "/".join(parts[:length]), parts[length:]


def _queried_file(query: str) -> str:
    """Return the file that the hub's page of a model shows the metadata of, or ""."""
    return parse_qs(query).get("show_file_info", [""])[0]


def _join_file(repo: str, page: str, file: str) -> str:
    """Return the path of the model that a file or folder of a repository belongs to."""
    if file.lower().endswith(".gguf"):
        return f"{repo}/{file}"
    if page == "tree" and (label := find_label(file)):
        return f"{repo}:{label}"
    if (page == "tree" and file) or "/" in file:
        raise ValueError(f"a part of a repository is no model; write {repo}, or {repo}/FILE.gguf")
    return repo


def explain_text(text: str) -> str:
    """Return a sentence for a name of Ollama, or for a command; "" for other texts."""
    return ollama_names.explain_name(text.removeprefix("ollama://")) or _explain_command(text)


def _explain_command(text: str) -> str:
    try:
        words = shlex.split(text)
    except ValueError:
        return ""
    while words and (words[0] in ("sudo", "$", "!") or re.match(r"[A-Z_]+=", words[0])):
        words = words[1:]
    if len(words) < 2 or not _PROGRAMS.fullmatch(words[0].rpartition("/")[2]):
        return ""
    model = _find_model(words)
    write = "org/name, a folder or a .gguf file"
    if model:
        write = _suggest_path(model, of_ollama=words[0].endswith("ollama"))
    whole = "; `servekit init --from vllm 'COMMAND'` writes a file with the command's options"
    is_vllm = any("vllm" in word for word in words[:3])
    return f"this is a command, and `path` is the model alone; write {write}" + whole * is_vllm


def _find_model(words: list[str]) -> str:
    """Return the word of a command that names its model, or ""."""
    if re.match(r"python|uv", words[0].rpartition("/")[2]) and "-m" in words[:-1]:
        words = words[words.index("-m") + 1 :]
    for flag in _MODEL_FLAGS:
        for word, value in zip(words, [*words[1:], ""], strict=True):
            if word == flag or word.startswith(f"{flag}="):
                return value if word == flag else word.partition("=")[2]
    names = [word for word in words[1:] if word[0:1] != "-" and word not in _VERBS]
    return names[0] if names else ""


def _suggest_path(model: str, *, of_ollama: bool) -> str:
    try:
        address = parse_address(model)
    except ValueError:
        return "its hub id: org/name"
    if address is not None:
        return address.text
    is_name = of_ollama or ollama_names.explain_name(model)
    return ollama_names.find_hub_id(model) or ("its hub id: org/name" if is_name else model)
