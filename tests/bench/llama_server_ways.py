"""Why engine llamacpp is not built over llama.cpp's own server, which xllamacpp has in process.

    python -m tests.bench.llama_server_ways [--rounds 3] [--tokens 24] [--clients 1 8 16]

Two ways of using the server are tried beside the engine: `stream` is one of its requests for each
answer, in process, with token ids among the log probabilities; `token` is one request for each
token, by its HTTP API on a Unix socket, with a seed for each position. The first table says which
promises each way keeps (the engine all of them), the second the CPU time per token, prompts
included, by turns: SmolLM2 in Q4_1, one thread, greedy, 42 prompt tokens, which begin unlike each
other.
"""

from __future__ import annotations

import argparse
import http.client
import json
import resource
import socket
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import xllamacpp

from servekit.engines.model_files.source import resolve_file
from tests.bench.table import spread
from tests.unit.engines.conftest import llamacpp
from tests.unit.engines.harness import Harness
from tests.unit.engines.origins import SMOLLM2

SLOTS = 16
PROMPT = [504, 2365, 6354, 16438]  # The quick brown fox
EMOJI = [10813, 116, 243]  # one character
#: Sampling from the unchanged distribution.
PLAIN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


class Connection(http.client.HTTPConnection):
    """A connection to a Unix socket, opened again when the server has closed it."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=600)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)

    def post(self, body: dict[str, Any]) -> dict[str, Any]:
        for _ in range(2):
            try:
                self.request("POST", "/completion", json.dumps(body))
                answer: dict[str, Any] = json.loads(self.getresponse().read())
                return answer
            except (BrokenPipeError, ConnectionResetError, http.client.RemoteDisconnected):
                self.close()  # it was idle for too long
        raise ConnectionError("the server closes every connection")


class Server:
    """llama.cpp's server in this process."""

    def __init__(self, model: str, folder: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_ctx, params.n_parallel, params.kv_unified = 8192, SLOTS, True
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.flash_attn_type = xllamacpp.llama_flash_attn_type(-1)
        params.cache_ram_mib, params.cache_idle_slots = 0, False  # each token would be copied
        params.no_perf, params.n_threads_http = True, SLOTS + 2
        params.hostnames = [str(folder / "server.sock")]
        self._server = xllamacpp.Server(params)
        self._connections = [Connection(folder / "server.sock") for _ in range(SLOTS)]

    def stream(self, index: int, prompt: list[int], tokens: int, **more: Any) -> list[int]:
        """Return the token ids of which a stream tells."""
        ids: list[int] = []

        def hear(chunk: dict[str, Any]) -> None:
            scores = chunk["choices"][0].get("logprobs") or {}
            ids.extend(one["id"] for one in scores.get("content", ()))

        wanted = {"prompt": prompt, "max_tokens": tokens, "stream": True, "n_probs": 1}
        self._server.handle_completions(wanted | {"temperature": 0.0} | PLAIN | more, hear)
        return ids

    def token(self, index: int, prompt: list[int], tokens: int, **more: Any) -> list[int]:
        """Return the token ids of one request each, with the sum of seed and position as seed."""
        ids: list[int] = []
        for position in range(tokens):
            seed = {"seed": more["seed"] + len(prompt) + position} if "seed" in more else {}
            ids += self.next(index, [*prompt, *ids], **more | seed)["tokens"]
        return ids

    def next(self, index: int, prompt: list[int], **more: Any) -> dict[str, Any]:
        wanted = {"prompt": prompt, "n_predict": 1, "return_tokens": True, "id_slot": index}
        return self._connections[index].post(wanted | {"temperature": 0.0} | PLAIN | more)


# ---------------------------------------------------------------- promises


def promises(server: Server) -> Iterator[tuple[str, bool, bool]]:
    """What the engine promises, and whether each way keeps it."""
    emoji: dict[str, Any] = {"grammar": 'root ::= "🦙"'}
    first = server.next(0, PROMPT, **emoji)["tokens"]
    streamed = server.stream(0, PROMPT, 4, **emoji)
    yield "ids of a character of several tokens", streamed[:3] == EMOJI, first == EMOJI[:1]
    scored = server.next(0, PROMPT, n_probs=1, **emoji)
    known = bool(scored.get("completion_probabilities"))
    yield "log probabilities of its tokens", streamed[:3] == EMOJI, known
    letters: dict[str, Any] = {"grammar": 'root ::= "ab" "cd" "ef" "gh" "ij" "kl" "mn" "op" "qr"'}
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 7, "ignore_eos": True}
    two: list[Callable[..., list[int]]] = [server.stream, server.token]
    begun, single = (_goes_on(way, way(0, PROMPT, 9, **drawn), **drawn) for way in two)
    yield "a seed goes on after 4 tokens", begun, single
    whole = server.stream(0, PROMPT, 9, **letters)
    begun, single = (_goes_on(way, whole, **letters) for way in two)
    yield "the server's grammar goes on after 4 tokens", begun, single
    early: dict[str, Any] = {"min_tokens": 8, "logit_bias": [[0, 99.0], [2, 99.0]]}
    yield "min_tokens", len(server.stream(0, PROMPT, 8, **early)) == 8, True  # by a bias
    told = server.next(0, PROMPT, echo=True, n_probs=1, prompt_logprobs=1)
    kept = len(told.get("completion_probabilities", ())) > 1 or "prompt_logprobs" in told
    yield "log probabilities of the prompt", kept, kept


def _goes_on(way: Callable[..., list[int]], whole: list[int], **params: Any) -> bool:
    """Return whether the end of an answer follows its beginning."""
    return way(1, [*PROMPT, *whole[:4]], len(whole) - 4, **params) == whole[4:]


# ---------------------------------------------------------------- cost


def cpu_ms_per_token(run: Callable[[], int]) -> float:
    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    began = used()
    tokens = run()
    return (used() - began) * 1000 / tokens


def engine_way(engine: Harness) -> Callable[..., list[int]]:
    def answer(index: int, prompt: list[int], tokens: int, **more: Any) -> list[int]:
        job = engine.submit(prompt, max_tokens=tokens, ignore_eos=True)
        return engine.tokens(job)

    return answer


def costs(
    several: dict[str, Callable[..., list[int]]], clients: Sequence[int], rounds: int, tokens: int
) -> Iterator[tuple[int, dict[str, list[float]]]]:
    serial = count()
    for number in clients:
        found: dict[str, list[float]] = {name: [] for name in several}
        for turn in range(rounds + 1):
            for name, way in several.items():
                cost = cpu_ms_per_token(partial(_crowd, way, number, tokens, next(serial)))
                if turn:  # the first warms up
                    found[name].append(cost)
        yield number, found


def _crowd(way: Callable[..., list[int]], clients: int, tokens: int, mark: int) -> int:
    """Return the number of tokens of as many clients at once."""

    def ask(index: int) -> int:
        prompt = [1000 + mark, 2000 + index, *range(3000 + mark, 3040 + mark)]
        return len(way(index, prompt, tokens, ignore_eos=True))

    with ThreadPoolExecutor(clients) as pool:
        return sum(pool.map(ask, range(clients)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.llama_server_ways")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 16])
    args = parser.parse_args()
    model = str(resolve_file(SMOLLM2, None, lambda progress: None))
    with tempfile.TemporaryDirectory(prefix="servekit-bench-") as folder:
        server = Server(model, Path(folder))
        print("| promise | stream | token |\n| --- | --- | --- |")
        for promise, *kept in promises(server):
            print(f"| {promise} | {' | '.join('yes' if one else 'no' for one in kept)} |")
        options = {"slots": SLOTS, "cache_type": "f16", "flash_attention": "auto"}
        engine = llamacpp(model, options)
        several = {"engine": engine_way(engine), "stream": server.stream, "token": server.token}
        print(f"\n| CPU ms per token | {' | '.join(several)} |\n|{' --- |' * 4}")
        for number, found in costs(several, args.clients, args.rounds, args.tokens):
            row = " | ".join(f"{statistics.median(c):.1f}" for c in found.values())
            print(f"| {number} | {row} |", *(spread(c) for c in found.values()), flush=True)
        engine.close()


if __name__ == "__main__":
    main()
