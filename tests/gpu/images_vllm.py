"""`python -m tests.gpu.images_vllm`: a model with eyes in `vllm serve` and in servekit, by turns.

--device cpu     try the script itself, with a small model; vLLM in it if there is one for CPUs
--clients 1 ...  clients with an image each, at once
--rounds 3       of which medians are told
--within 400     seconds; at least one round

Both have the same model, share of the GPU, KV cache and limits, and only one has work at a time: a
Qwen2-VL of 2.2e9 random parameters in bfloat16, images of 448 x 448 pixels (256 tokens) that no
cache has seen, 128 tokens for each answer, streamed. Then 64 clients with texts, alone and while
eight others send images without a pause.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.bench.crowd import Order, Round, ask
from tests.bench.vllm import KV_BYTES, PATHS, api_server, await_health, model_entry
from tests.gpu.checks import Row
from tests.gpu.engines import entry, serving
from tests.gpu.images import ANSWER, TEXTS_AT_ONCE, image_part, make_picture, show, write_large
from tests.unit.engines.harness import write_tiny_llama

OURS, THEIRS = "servekit", "`vllm serve`"
BESIDE, PROCESSES = 8, 4
#: Requests of each client with texts, and of each beside them with images, which ends last.
TEXTS, REPEATS = 4, 8


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.images_vllm")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=3, help="at most")
    parser.add_argument("--within", type=float, default=400.0)
    args = parser.parse_args()
    until_s = time.monotonic() + args.within
    with tempfile.TemporaryDirectory(prefix="servekit-gpu-") as made:
        folder, tiny = Path(made), Path(made) / "tiny"
        tiny.mkdir()
        write_tiny_llama(tiny)
        write_large(folder / "large", tiny, args.device)
        name_all_tokens(folder / "large")
        with _serve_all(folder, args.device) as ports:
            rows = show(list(_measure(ports, args, until_s)))
    return 0 if all(row.ok is not False for row in rows) else 1


def name_all_tokens(folder: Path) -> None:
    """Give each row of the embedding a word: without text, servekit sends no event for a token."""
    file = folder / "tokenizer.json"
    whole = json.loads(file.read_text())
    vocabulary: dict[str, int] = whole["model"]["vocab"]
    size: int = json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"]
    vocabulary |= {one["content"]: one["id"] for one in whole["added_tokens"]}  # else they move
    known = {*vocabulary.values()}
    vocabulary |= {f"w{id}": id for id in range(size) if id not in known}
    file.write_text(json.dumps(whole))


@contextmanager
def _serve_all(folder: Path, device: str) -> Iterator[dict[str, int]]:
    """Start servekit and then vLLM's server, which finds the kernels that the first compiled."""
    path, has_vllm = folder / "large", importlib.util.find_spec("vllm") is not None
    model, kv_bytes = model_entry("vllm", path), KV_BYTES
    if device == "cpu":
        engine, kv_bytes = "vllm" if has_vllm else "transformers", 2**28
        model = entry("m", engine, path, device, options={"kv_cache_bytes": kv_bytes})
    with ExitStack() as stack:
        up = stack.enter_context(serving([model]))
        ports = {OURS: urlsplit(up.url).port or 0}
        if has_vllm:
            log = folder / "log"
            ports[THEIRS] = stack.enter_context(api_server(path, log, kv_bytes=kv_bytes))[0]
            await_health(ports[THEIRS], log)
        yield ports


def _measure(ports: dict[str, int], args: argparse.Namespace, until_s: float) -> Iterator[Row]:
    loads = {f"{count} clients with an image": ("image", count) for count in args.clients}
    loads |= {f"{TEXTS_AT_ONCE} texts": ("text", TEXTS_AT_ONCE)}
    loads |= {f"{TEXTS_AT_ONCE} texts beside {BESIDE} with images": ("both", TEXTS_AT_ONCE)}
    found: dict[str, dict[str, list[Round]]] = {
        what: {name: [] for name in ports} for what in loads
    }
    for number in range(1 + args.rounds):  # the first warms up
        for what, (kind, count) in loads.items():
            for name, port in ports.items():
                if number > 1 and time.monotonic() > until_s:
                    break
                repeats = 1 if kind == "image" else TEXTS
                bodies = _make_bodies("image" if kind == "image" else "text", count, repeats)
                beside = _make_bodies("image", BESIDE, REPEATS) if kind == "both" else []
                one = _ask_both(port, bodies, beside)
                assert one.tokens == count * repeats * ANSWER, one
                assert one.gaps_s, f"{what}: {name} sends no text"
                if number:
                    found[what][name].append(one)
    for what, by_name in found.items():
        rates = {name: _describe(rounds)[0] for name, rounds in by_name.items()}
        for name, rounds in by_name.items():
            ratio = rates[OURS] / rates.get(THEIRS, rates[OURS])
            told = f"; {ratio:.2f} of theirs, {len(rounds)} rounds" if name == OURS else ""
            yield Row(f"{what}: {name}", _describe(rounds)[1] + told)


def _describe(rounds: list[Round]) -> tuple[float, str]:
    """Return the rate, tokens/s, and all figures as text: medians of the rounds."""
    rate = statistics.median(one.tokens_per_s for one in rounds)
    first, last = (statistics.median(one.first_s(at) for one in rounds) for at in (0.5, 0.99))
    gap = statistics.median(one.gap_s(0.99) for one in rounds)
    text = f"{rate:,.0f} tokens/s, TTFT {1e3 * first:.0f} / {1e3 * last:.0f} ms"
    return rate, f"{text}, gap p99 {1e3 * gap:.0f} ms"


def _ask_both(port: int, bodies: list[list[str]], beside: list[list[str]]) -> Round:
    """Return what the first saw, while others asked `beside` them."""
    orders = [Order(port, PATHS["chat"], one, stream=True) for one in (bodies, beside) if one]
    with concurrent.futures.ThreadPoolExecutor(len(orders)) as pool:
        return next(pool.map(lambda order: ask(order, PROCESSES), orders))


_COUNT = iter(range(10**9))


def _make_bodies(kind: str, clients: int, repeats: int = 1) -> list[list[str]]:
    return [[_make_body(kind, next(_COUNT)) for _ in range(repeats)] for _ in range(clients)]


def _make_body(kind: str, number: int) -> str:
    parts: list[dict[str, Any]] = [{"type": "text", "text": f"{number}. What is this? " * 12}]
    if kind == "image":
        parts.insert(0, image_part(make_picture(number)))
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    body |= {"max_tokens": ANSWER, "ignore_eos": True, "temperature": 0, "stream": True}
    return json.dumps(body | {"stream_options": {"include_usage": True}})


if __name__ == "__main__":
    sys.exit(main())
