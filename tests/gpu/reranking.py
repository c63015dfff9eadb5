"""`python -m tests.gpu.reranking`: rerankers in the transformers engine on a GPU.

--device cpu   try the script itself, with small models
--only NAME    one of: scores, speed

- scores: small rerankers in float32, a cross-encoder and a causal one (the code of Qwen3-Reranker's
  model card): queries asked at the same time have the scores of the library's forward, each alone.
- speed: the time of one client that asks for one document, and the documents a second of 1, 4 and
  16 clients that ask for 64 documents of 16 to 250 tokens each, with random weights in bfloat16: a
  cross-encoder of the size of bge-reranker-large, and a causal reranker of the size of
  Qwen3-Reranker-0.6B. Beside them the library's forward in this process, on one query after
  another, without a server, and, where it is installed, sentence-transformers' CrossEncoder.
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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers

from tests.gpu.checks import Row
from tests.gpu.engines import entry, serving
from tests.gpu.images import show
from tests.unit.engines.transformers.pooling_models.test_classification import pair_tokenizer
from tests.unit.engines.transformers.pooling_models.test_logit_score import (
    make_reranker,
    score_as_the_card,
)

library: Any = transformers
Pairs = Sequence[tuple[str, str]]
#: Of BAAI/bge-reranker-large, but for its vocabulary.
CROSS_ENCODER: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
#: Of Qwen/Qwen3-Reranker-0.6B, but for its vocabulary.
CAUSAL: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "initializer_range": 0.02,
}
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
#: Further keys of the measured models' entries, from the command line as JSON.
MORE: dict[str, Any] = {}
SENTENCE = "the quick brown fox jumps over the lazy dog. "
DOCUMENTS, ROUNDS = 64, 5
#: Clients, and the documents of a request of each.
LOADS = ((1, 1), (1, DOCUMENTS), (4, DOCUMENTS), (16, DOCUMENTS))
#: Rounds before those that count: a GPU's graphs of the shapes of batches are recorded in them.
WARM_ROUNDS = 6


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.reranking")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", choices=["scores", "speed"])
    parser.add_argument("--entry", type=json.loads, default={}, help="keys of the model's entry")
    args = parser.parse_args()
    MORE.update(args.entry)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="servekit-gpu-") as made:
        if args.only != "speed":
            rows += show(compare_scores(Path(made), args.device))
        if args.only != "scores":
            rows += show(measure_speed(Path(made), args.device))
    return 0 if all(row.ok is not False for row in rows) else 1


def write_cross_encoder(folder: Path, **sizes: Any) -> Path:
    tokenizer = pair_tokenizer(folder)
    (folder / "chat_template.jinja").unlink()  # with one, CrossEncoder would make chats of pairs
    torch.manual_seed(1)
    config = library.BertConfig(
        vocab_size=len(tokenizer), num_labels=1, max_position_embeddings=512, **sizes
    )
    library.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def make_documents(query: int, count: int, repeats: int = 24) -> list[str]:
    return [f"{query}.{at} " + SENTENCE * (1 + (at + query) % repeats) for at in range(count)]


def rerank(client: httpx.Client, model: str, query: str, documents: Sequence[str]) -> list[float]:
    body = {"model": model, "query": query, "documents": list(documents)}
    answer = client.post("/v1/rerank", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[int, float] = {
        one["index"]: one["relevance_score"] for one in answer.json()["results"]
    }
    return [found[at] for at in range(len(documents))]


def score_pairs(folder: Path, device: str, dtype: torch.dtype) -> Callable[[Pairs], list[float]]:
    """Return the library's scores of pairs, as one padded batch."""
    tokenizer = library.AutoTokenizer.from_pretrained(folder)
    cls = library.AutoModelForSequenceClassification
    model = cls.from_pretrained(folder, dtype=dtype).eval().to(device)

    def score(pairs: Pairs) -> list[float]:
        made = tokenizer([list(pair) for pair in pairs], padding=True, return_tensors="pt")
        with torch.inference_mode():
            logits = model(**made.to(device)).logits
        scores: list[float] = logits.float().sigmoid().flatten().tolist()
        return scores

    return score


# ---------------------------------------------------------------- scores


def compare_scores(folder: Path, device: str) -> list[Row]:
    queries = [f"Which dog of {at} is lazy?" for at in range(8)]
    documents = [make_documents(at, 9, 4) for at in range(8)]
    pairs = [
        [(query, one) for one in found] for query, found in zip(queries, documents, strict=True)
    ]
    cross = write_cross_encoder(folder / "cross", initializer_range=0.4, **SMALL)
    causal = make_reranker(folder / "Qwen3-Reranker")
    plain = score_pairs(cross, device, torch.float32)
    due = {
        "cross": [[plain([pair])[0] for pair in group] for group in pairs],
        "causal": [score_as_the_card(causal, group) for group in pairs],
    }
    models = [
        entry(name, "transformers", path, device, dtype="float32", memory="4GiB")
        for name, path in (("cross", cross), ("causal", causal))
    ]
    rows = []
    with (
        serving(models) as up,
        httpx.Client(base_url=up.url, timeout=300) as client,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        for name, wanted in due.items():

            def ask(at: int, name: str = name) -> list[float]:
                return rerank(client, name, queries[at], documents[at])

            found = list(pool.map(ask, range(8)))
            apart = max(
                abs(one - other)
                for told, group in zip(found, wanted, strict=True)
                for one, other in zip(told, group, strict=True)
            )
            spread = max(map(max, wanted)) - min(map(min, wanted))
            measured = f"{apart:.1e} apart at most, scores {spread:.2f} wide"
            rows.append(
                Row(f"scores, {name}, 8 queries at once", measured, apart < 2e-4 < spread / 50)
            )
    return rows


# ---------------------------------------------------------------- speed


def measure_speed(folder: Path, device: str) -> list[Row]:
    large = device == "cuda"
    cross = write_cross_encoder(folder / "cross-large", **(CROSS_ENCODER if large else SMALL))
    causal = make_reranker(folder / "Qwen3-Reranker-large", **(CAUSAL if large else {}))
    rows = []
    for name, path in (("cross-encoder", cross), ("causal reranker", causal)):
        rows += _measure_model(name, path, device, is_causal=path is causal)
    return rows


def _measure_model(name: str, path: Path, device: str, *, is_causal: bool) -> list[Row]:
    dtype = "bfloat16" if device == "cuda" else "float32"
    documents = [make_documents(at, DOCUMENTS) for at in range(16)]
    queries = [f"Which dog of {at} is lazy?" for at in range(16)]
    peers: dict[str, Callable[[Pairs], object]] = {}
    if not is_causal:
        peers["the library's forward"] = score_pairs(path, device, getattr(torch, dtype))
        if importlib.util.find_spec("sentence_transformers"):
            from sentence_transformers import CrossEncoder

            more = {"dtype": getattr(torch, dtype)}
            encoder = CrossEncoder(str(path), device=device, model_kwargs=more)
            peers["CrossEncoder"] = lambda pairs: encoder.predict(list(pairs), batch_size=DOCUMENTS)
    else:
        peers["the library's forward"] = score_causal(path, device, getattr(torch, dtype))
    rows = []
    model = entry("m", "transformers", path, device, dtype=dtype, memory="12GiB", **MORE)
    with serving([model]) as up, httpx.Client(base_url=up.url, timeout=300) as client:
        for count, size in LOADS:

            def ask_all(count: int = count, size: int = size) -> None:
                with concurrent.futures.ThreadPoolExecutor(count) as pool:
                    list(
                        pool.map(
                            lambda at: rerank(client, "m", queries[at], documents[at][-size:]),
                            range(count),
                        )
                    )

            def loop(
                score: Callable[[Pairs], object], count: int = count, size: int = size
            ) -> None:
                for at in range(count):
                    score([(queries[at], one) for one in documents[at][-size:]])

            works: dict[str, Callable[[], None]] = {"servekit": ask_all}
            works |= {peer: partial(loop, score) for peer, score in peers.items()}
            rates = _time_in_turns(works, count * size)
            ours = rates.pop("servekit")
            told = [f"{ours / rate:.2f} of {peer} ({rate:,.0f})" for peer, rate in rates.items()]
            rate = f"{ours:,.0f} documents/s" if size > 1 else f"{1000 / ours:.1f} ms"
            measured = f"{rate}; {'; '.join(told)}"
            ahead = ours >= max(rates.values())
            rows.append(
                Row(f"{name}, {count} × {size} documents", measured, ahead or device == "cpu")
            )
    return rows


def _time_in_turns(works: dict[str, Callable[[], None]], amount: int) -> dict[str, float]:
    """Return the median rate of each."""
    took_s: dict[str, list[float]] = {name: [] for name in works}
    for at in range(WARM_ROUNDS + ROUNDS):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            if at >= WARM_ROUNDS:
                took_s[name].append(time.perf_counter() - began)
    return {name: amount / statistics.median(found) for name, found in took_s.items()}


def score_causal(folder: Path, device: str, dtype: torch.dtype) -> Callable[[Pairs], list[float]]:
    """Return the scores of the model card's code, with the model loaded once."""
    tokenizer = library.AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = library.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
    yes, no = map(tokenizer.convert_tokens_to_ids, ("yes", "no"))
    asked = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query"
        ' and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that"
        " answer the query\n<Query>: {}\n<Document>: {}<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    )

    def score(pairs: Pairs) -> list[float]:
        texts = [asked.format(*pair) for pair in pairs]
        made = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
        made.pop("token_type_ids", None)
        with torch.inference_mode():
            logits = model(**made.to(device), logits_to_keep=1).logits[:, -1].float()
        scores: list[float] = (logits[:, yes] - logits[:, no]).sigmoid().tolist()
        return scores

    return score


if __name__ == "__main__":
    sys.exit(main())
