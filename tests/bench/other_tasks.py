"""Transcriptions and reranking by the transformers engine, beside libraries, by turns, on the CPU.

    python -m tests.bench.other_tasks [--rounds 5] [--clients 1 4 8] [--only transcribe rerank]
                                      [--venv DIR] [--contestants NAME]

Random weights: a Whisper of tiny's size, which writes 60 tokens of each recording of 29 s, and a
cross-encoder of ms-marco-MiniLM-L6's size for queries with 16 documents. servekit is asked over
HTTP by so many clients at once; for recordings with the engine transformers, and faster_whisper
where that is installed. So is `transformers serve`, in an environment of its own, and stopped while
others have their turn. The libraries get the same work in this process, without a server:
transformers' pipeline one recording after another and as one batch; faster-whisper one after
another, which is its way; sentence-transformers' CrossEncoder and transformers' forward one query
after another, and all as one list. Those that are not installed are left out. Every contestant has
the same number of threads.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers

from tests.bench import peers
from tests.bench.cpu import await_calm
from tests.bench.figures import conditions
from tests.bench.table import Figure, markdown, spread
from tests.integration.instance import Instance
from tests.unit.engines.hearing_model import RATE, make_samples, write_wav, write_whisper
from tests.unit.engines.transformers.pooling_models.test_classification import pair_tokenizer

library: Any = transformers
SECONDS, TOKENS, DOCUMENTS = 29.0, 60, 16
#: Tokens of a Whisper's prompt for text without times.
PROMPT = 4
OURS = "servekit"
TINY: dict[str, Any] = {
    "num_mel_bins": 80,
    "d_model": 384,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "decoder_ffn_dim": 1536,
    "max_target_positions": 448,
    "vocab_size": 51865,
    "init_std": 0.02,
}
MINI_LM: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "num_labels": 1,
}

#: Does the work of so many clients, of one request each.
Work = Callable[[int], object]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--threads", type=int, default=1, help="torch threads of everyone")
    parser.add_argument("--calm-within", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--contestants", default="", help="those with this in their name only")
    parser.add_argument("--venv", type=Path, help="the peer's environment, kept; else a fresh one")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows: list[Figure] = []
    for task in options.only:
        open_task, unit, amount = TASKS[task]
        with (
            tempfile.TemporaryDirectory(prefix="servekit-bench-") as folder,
            open_task(Path(folder), options, max(options.clients)) as opened,
        ):
            works = {name: opened[name] for name in opened if options.contestants in name}
            for count in options.clients:
                print(f"measuring: {task}, {count} clients …", file=sys.stderr, flush=True)
                found = _measure(works, count, options.rounds, options.calm_within)
                rates = {
                    name: [amount * count / each for each in took] for name, took in found.items()
                }
                rows += _compare(f"{task}, {count} clients", rates, unit)
    print(f"{markdown(rows)}\n\nAfter: {conditions()}; {options.threads} torch thread(s) each")
    return 0


def _measure(
    works: Mapping[str, Work], count: int, rounds: int, calm_within_s: float
) -> dict[str, list[float]]:
    """Return the seconds of each round, after one that does not count."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for at in range(rounds + 1):
        for name, work in works.items():
            await_calm(calm_within_s)
            began = time.perf_counter()
            work(count)
            if at:
                found[name].append(time.perf_counter() - began)
    return found


def _compare(what: str, rates: Mapping[str, Sequence[float]], unit: str) -> Iterator[Figure]:
    for ours in (name for name in rates if name.startswith(OURS)):
        yield from _compare_one(f"{what}: {ours}", rates[ours], rates, unit)


def _compare_one(
    what: str, ours: Sequence[float], rates: Mapping[str, Sequence[float]], unit: str
) -> Iterator[Figure]:
    yield Figure(what, spread(ours, 1, unit))
    for name, theirs in rates.items():
        if not name.startswith(OURS):
            ratio = statistics.median(ours) / statistics.median(theirs)
            by_round = spread([a / b for a, b in zip(ours, theirs, strict=True)])
            yield Figure(
                f"… of {name}", f"{ratio:.2f}; by round {by_round}", "≥ 1", ratio >= 1,
                spread(theirs, 1, unit),
            )  # fmt: skip


@contextlib.contextmanager
def _serving(
    folder: Path, models: Mapping[str, dict[str, Any]], threads: int
) -> Iterator[httpx.Client]:
    """Serve models by name, given by the keys of their sections that are not these."""
    common = {"device": "cpu", "dtype": "float32", "replicas": 1}
    entries = [
        common | keys | {"name": name, "options": {"threads": threads, **keys.get("options", {})}}
        for name, keys in models.items()
    ]
    with Instance.up(folder, entries) as instance:
        instance.until_settled(within_s=240)
        with httpx.Client(base_url=instance.url, timeout=600) as client:
            yield client


def _ask_together(count: int, ask: Callable[[int], httpx.Response]) -> None:
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        for answer in pool.map(ask, range(count)):
            answer.raise_for_status()


# ---------------------------------------------------------------- recordings


@contextlib.contextmanager
def _transcribe(folder: Path, options: argparse.Namespace, most: int) -> Iterator[dict[str, Work]]:
    threads: int = options.threads
    model = write_whisper(folder / "model", window_s=30, ends=False, **TINY)
    config = library.GenerationConfig.from_pretrained(model)
    config.max_length = PROMPT + TOKENS
    config.language, config.task = "en", "transcribe"  # `transformers serve` takes no language
    config.save_pretrained(model)
    recordings = [make_samples(SECONDS, number) for number in range(most)]
    wavs = [write_wav(each) for each in recordings]
    served: dict[str, dict[str, Any]] = {"m": {"path": str(model)}}
    if has_faster_whisper := bool(importlib.util.find_spec("faster_whisper")):
        from tests.unit.engines.ctranslate2_model import convert_whisper

        converted = convert_whisper(model, folder / "converted")
        greedy = {"beam_size": 1, "max_new_tokens": TOKENS, "no_speech_threshold": None}
        served["f"] = {"path": str(converted), "engine": "faster_whisper", "options": greedy}
    python = peers.installed(options.venv or folder / "venv", "librosa", "python-multipart")
    environ = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    log = folder / "peer.log"
    with (
        _serving(folder, served, threads) as http,
        peers.serve(python, model, (), environ, log) as peer,
        httpx.Client(base_url=peer.url, timeout=600) as theirs,
    ):
        peer.rest()

        def ask(client: httpx.Client, form: dict[str, str], at: int) -> httpx.Response:
            file = {"file": ("a.wav", wavs[at])}
            return client.post("/v1/audio/transcriptions", data=form, files=file)

        def ask_peer(count: int) -> None:
            with peer.turn():
                _ask_together(count, partial(ask, theirs, {"model": str(model)}))

        def ask_ours(name: str, count: int) -> None:
            _ask_together(count, partial(ask, http, {"model": name, "language": "en"}))

        works: dict[str, Work] = {OURS: partial(ask_ours, "m")}
        if has_faster_whisper:
            works[f"{OURS}, faster_whisper"] = partial(ask_ours, "f")
        works["transformers serve"] = ask_peer
        works |= _make_pipelines(model, recordings)
        if has_faster_whisper:
            works["faster-whisper"] = _make_faster_whisper(converted, recordings, threads)
        yield works


def _make_pipelines(model: Path, recordings: Sequence[Any]) -> dict[str, Work]:
    pipe = library.pipeline("automatic-speech-recognition", str(model), device="cpu")
    pipe.tokenizer.pad_token = pipe.tokenizer.eos_token  # as OpenAI's models have it
    asked = {"language": "en", "task": "transcribe"}

    def run(count: int, batch: int) -> list[Any]:
        inputs = [{"raw": each, "sampling_rate": RATE} for each in recordings[:count]]
        return list(pipe(inputs, batch_size=batch, generate_kwargs=asked))

    return {
        "the library's pipeline": lambda count: run(count, 1),
        "the library's pipeline, one batch": lambda count: run(count, count),
    }


def _make_faster_whisper(converted: Path, recordings: Sequence[Any], threads: int) -> Work:
    import faster_whisper

    whisper = faster_whisper.WhisperModel(
        str(converted), device="cpu", compute_type="float32", cpu_threads=threads
    )
    new = 2 * TOKENS - PROMPT  # CTranslate2 writes half of this and the prompt

    def run(count: int) -> None:
        for each in recordings[:count]:
            segments, _ = whisper.transcribe(
                each, language="en", beam_size=1, temperature=0.0, without_timestamps=True,
                max_new_tokens=new, condition_on_previous_text=False,
                log_prob_threshold=None, no_speech_threshold=None,
                compression_ratio_threshold=None,
            )  # fmt: skip
            [segment] = segments
            assert len(segment.tokens) == TOKENS

    return run


# ---------------------------------------------------------------- reranking


@contextlib.contextmanager
def _rerank(folder: Path, options: argparse.Namespace, most: int) -> Iterator[dict[str, Work]]:
    model = folder / "model"
    tokenizer = pair_tokenizer(model)
    (model / "chat_template.jinja").unlink()  # with one, CrossEncoder would make chats of pairs
    torch.manual_seed(1)
    plain = library.BertForSequenceClassification(library.BertConfig(**MINI_LM)).eval()
    plain.save_pretrained(model)
    documents = [
        [
            f"{query}.{number} the lazy dog jumps over. " * (2 + number % 4)
            for number in range(DOCUMENTS)
        ]
        for query in range(most)
    ]
    queries = [f"Which dog of {query} is lazy?" for query in range(most)]
    with _serving(folder, {"m": {"path": str(model)}}, options.threads) as http:

        def ask(at: int) -> httpx.Response:
            body = {"model": "m", "query": queries[at], "documents": documents[at]}
            return http.post("/v1/rerank", json=body)

        def score(pairs: Sequence[tuple[str, str]]) -> list[float]:
            with torch.inference_mode():
                made = tokenizer([list(pair) for pair in pairs], padding=True, return_tensors="pt")
                scores: list[float] = plain(**made).logits.sigmoid().flatten().tolist()
            return scores

        def list_pairs(at: int) -> list[tuple[str, str]]:
            return [(queries[at], document) for document in documents[at]]

        works: dict[str, Work] = {OURS: lambda count: _ask_together(count, ask)}
        works |= _make_loops("the library's forward", score, list_pairs)
        if importlib.util.find_spec("sentence_transformers"):
            from sentence_transformers import CrossEncoder

            encoder = CrossEncoder(str(model), device="cpu")
            works |= _make_loops("CrossEncoder", encoder.predict, list_pairs)
        yield works


def _make_loops(
    name: str,
    score: Callable[[Sequence[tuple[str, str]]], object],
    list_pairs: Callable[[int], list[tuple[str, str]]],
) -> dict[str, Work]:
    return {
        name: lambda count: [score(list_pairs(at)) for at in range(count)],
        f"{name}, one list": lambda count: score(
            [pair for at in range(count) for pair in list_pairs(at)]
        ),
    }


#: How to open a task, the unit of its rate, and the amount of one request.
TASKS: dict[str, tuple[Callable[..., Any], str, float]] = {
    "transcribe": (_transcribe, " s of audio/s", SECONDS),
    "rerank": (_rerank, " documents/s", DOCUMENTS),
}


if __name__ == "__main__":
    sys.exit(main())
