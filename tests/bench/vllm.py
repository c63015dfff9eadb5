"""servekit's vLLM engine, streamed, against vLLM itself: one GPU, one model, by turns.

    python -m tests.bench.vllm [--model PATH] [--streams 128 512] [--prompt 64] [--output 256]

The engine's own rate is the better of two that stream nothing: `LLM.generate` of the requests of
all streams at once, and vLLM's API server asked for whole answers; for chats it is that of the same
chats, whose prompts are longer by what the model's template adds. Beside it stand completions and
chats streamed through `servekit up`, and through the API server. All three hold their memory from
the beginning, a share and a KV cache of the same size each, and only one has work at a time.
Prompts are random token ids (of a chat: random letters), new ones in each round and as long for
all.

--model   a folder of safetensors; by default a random Llama of 0.35e9 parameters in bfloat16;
          a larger one is made by `tests.gpu.adapters.write_large`, of 7e9 in the shape of an 8B
--engine echo  try the script itself, without a GPU: servekit alone, and no engine's own rate
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from transformers import AutoTokenizer

from tests.bench.crowd import Order, Round, ask
from tests.bench.figures import conditions
from tests.bench.offline import Offline
from tests.bench.table import Figure, markdown, spread
from tests.integration.instance import Instance

SHARE = 0.3
KV_BYTES = 12 * 2**30
#: Requests in one batch at most, and tokens in one step: the same for all.
SLOTS, STEP_TOKENS = 512, 8192
AIM, AIM_OF_SERVE, AIM_OF_FIRST = 0.95, 1.6, 0.5
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
#: Who tells the engine's own rate, of each.
OWN_GENERATE = {"completions": "generate", "chat": "generate chat"}
OWN_SERVE = {"completions": "serve whole", "chat": "serve whole chat"}
START_S = 200.0
#: The beginning of a vocabulary is special tokens and bytes in many a tokenizer.
_FIRST_TOKEN = 3


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of everybody."""

    prompt: int
    output: int
    repeats: int  # requests of each stream, one after the other
    vocab: int
    clients: int  # processes

    def prompts(self, streams: int, number: int, stream: bool) -> list[list[int]]:
        """Those of one round, for all of its requests.

        Streams have others: the API server, asked for whole answers before, has these in its cache.
        """
        chance = random.Random(f"{streams} {number} {stream}")
        count = streams * self.repeats
        return [
            [chance.randrange(_FIRST_TOKEN, self.vocab) for _ in range(self.prompt)]
            for _ in range(count)
        ]

    def bodies(self, kind: str, prompts: Sequence[list[int]], *, stream: bool) -> list[list[str]]:
        bodies = [self._body(kind, ids, stream) for ids in prompts]
        streams = len(bodies) // self.repeats
        return [bodies[at::streams] for at in range(streams)]

    def _body(self, kind: str, ids: Sequence[int], stream: bool) -> str:
        body: dict[str, Any] = {"model": "m", "max_tokens": self.output, "ignore_eos": True}
        body |= {"temperature": 1.0, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        if kind == "chat":
            return json.dumps(body | {"messages": _messages(ids)})
        return json.dumps(body | {"prompt": ids})


def _messages(ids: Sequence[int]) -> list[dict[str, str]]:
    """A chat as long as these tokens."""
    text = "".join(string.ascii_letters[token % 52] for token in ids)
    return [{"role": "user", "content": text}]


# ---------------------------------------------------------------- who takes part

#: Tokens/s of all requests of one round: streams, and its number.
Turn = Callable[[int, int], Round]


def ask_server(port: int, kind: str, load: Load, *, stream: bool = True) -> Turn:
    def turn(streams: int, number: int) -> Round:
        bodies = load.bodies(kind, load.prompts(streams, number, stream), stream=stream)
        return ask(Order(port, PATHS[kind], bodies, stream), load.clients)

    return turn


def _generating(offline: Offline, load: Load, tokenizer: Any = None) -> Turn:
    """With a tokenizer, of the chats."""

    def turn(streams: int, number: int) -> Round:
        prompts = load.prompts(streams, number, stream=False)
        if tokenizer is not None:
            render = tokenizer.apply_chat_template
            texts = [
                render(_messages(ids), tokenize=False, add_generation_prompt=True)
                for ids in prompts
            ]
            prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
        waves = [prompts[at : at + streams] for at in range(0, len(prompts), streams)]
        took_s = sum(offline.seconds(wave, load.output) for wave in waves)
        tokens = len(prompts) * load.output
        return Round(tokens / took_s, 0, tokens, (), 0.0)

    return turn


@contextlib.contextmanager
def api_server(
    model: Path,
    log: Path,
    share: float = SHARE,
    env: Mapping[str, str] | None = None,
    *,
    kv_bytes: int = KV_BYTES,
) -> Iterator[tuple[int, int]]:
    """vLLM's own server, started but not awaited; its port and PID."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    options = {"served-model-name": "m", "host": "127.0.0.1", "port": port}
    options |= {"gpu-memory-utilization": share, "kv-cache-memory-bytes": kv_bytes}
    options |= {"max-num-seqs": SLOTS, "max-num-batched-tokens": STEP_TOKENS}
    told = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *told, "--disable-uvicorn-access-log"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})},
            start_new_session=True,
        )
    try:
        yield port, process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def await_health(port: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                return
        time.sleep(0.2)  # between two looks, up to the deadline
    raise RuntimeError(f"vLLM's server did not start:\n{log.read_text(errors='replace')[-3000:]}")


def model_entry(engine: str, model: Path, share: float = SHARE) -> dict[str, Any]:
    """The model of servekit's configuration file."""
    if engine == "echo":
        options: dict[str, Any] = {"slots": SLOTS, "step_s": 0.01}
        return {"name": "m", "engine": "echo", "path": "m", "options": options}
    options = {"slots": SLOTS, "max_batch_tokens": STEP_TOKENS, "kv_cache_bytes": KV_BYTES}
    place = {"device": "cuda", "gpus": [0], "memory": f"{share:.0%}"}
    return {"name": "m", "engine": engine, "path": str(model), "options": options} | place


def make_arguments(model: Path, share: float = SHARE) -> dict[str, Any]:
    """Those of `vllm.LLM` that are like the options of `model_entry`."""
    return {
        "model": str(model),
        "gpu_memory_utilization": share,
        "kv_cache_memory_bytes": KV_BYTES,
        "max_num_seqs": SLOTS,
        "max_num_batched_tokens": STEP_TOKENS,
    }


@contextlib.contextmanager
def contestants(options: argparse.Namespace, model: Path, load: Load) -> Iterator[dict[str, Turn]]:
    """All of them, ready, by name. The first to load fills vLLM's cache of compiled kernels."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="servekit-bench-")))
        turns: dict[str, Turn] = {}
        own = options.engine == "vllm"
        if own:
            _say("starting LLM.generate")
            arguments = make_arguments(model)
            offline = stack.enter_context(Offline(arguments, folder / "offline.log"))
            turns["generate"] = _generating(offline, load)
            tokenizer = AutoTokenizer.from_pretrained(model)
            turns["generate chat"] = _generating(offline, load, tokenizer)
        _say("starting servers")
        log = folder / "serve.log"
        theirs = stack.enter_context(api_server(model, log))[0] if own else 0
        models, server = [model_entry(options.engine, model)], {"gateways": options.gateways}
        instance = stack.enter_context(Instance.up(folder, models, server=server))
        status = instance.until_settled(within_s=START_S)
        states = [(one.state, one.reason) for one in status.models[0].replicas]
        assert all(state == "ready" for state, _ in states), states
        ours = urlsplit(status.url).port or 0
        turns |= {kind: ask_server(ours, kind, load) for kind in PATHS}
        if own:
            await_health(theirs, log)
            for kind, name in OWN_SERVE.items():
                turns[name] = ask_server(theirs, kind, load, stream=False)
            turns |= {f"serve {kind}": ask_server(theirs, kind, load) for kind in PATHS}
        yield turns


def _say(what: str) -> None:
    print(f"{time.monotonic():.0f} s: {what}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- the table


@dataclass(slots=True)
class Outcome:
    """All rounds of one contestant at one number of streams."""

    rounds: list[Round] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        return [one.tokens_per_s for one in self.rounds]

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def first_s(self, fraction: float) -> float:
        return statistics.median(one.first_s(fraction) for one in self.rounds)

    def told(self) -> str:
        return f"{spread(self.rates, 0)} tok/s"

    def notes(self) -> str:
        """How it was streamed, and whether the clients were the limit."""
        share = statistics.median(one.tokens / max(1, one.events) for one in self.rounds)
        busy = max(one.own_cores for one in self.rounds)
        limit = "; THE CLIENTS WERE THE LIMIT" if busy > 0.9 else ""
        return f"{share:.1f} tokens an event; busiest client {busy:.2f} of a core{limit}"


Outcomes = dict[tuple[int, str], Outcome]


def run(turns: dict[str, Turn], options: argparse.Namespace, until: float) -> Outcomes:
    """Rounds by turns, as many as asked for; fewer where time is up."""
    outcomes = {(streams, name): Outcome() for streams in options.streams for name in turns}
    for streams in options.streams:
        for name in turns:  # what is made once is made: connections, caches, memory
            turns[name](min(streams, 32), -1)
    longest_s = 0.0
    for number in range(options.rounds):
        began = time.monotonic()
        if number and began + longest_s > until:
            print(f"time is up after {number} rounds", file=sys.stderr)
            break
        for streams, name in outcomes:
            outcomes[streams, name].rounds.append(turns[name](streams, number))
            rate = outcomes[streams, name].rates[-1]
            print(f"{number}: {streams} {name}: {rate:,.0f} tok/s", file=sys.stderr, flush=True)
        longest_s = max(longest_s, time.monotonic() - began)
    return outcomes


def figures(outcomes: Outcomes, streams: int) -> Iterator[Figure]:
    found = {name: one for (count, name), one in outcomes.items() if count == streams}
    for kind in PATHS:
        ours, theirs = found[kind], found.get(f"serve {kind}")
        sources = (OWN_GENERATE[kind], OWN_SERVE[kind])
        own = [(found[name].rate, name) for name in sources if name in found]
        for _, name in own:
            what = "`LLM.generate`" if name in OWN_GENERATE.values() else "its API server, whole"
            yield Figure(f"vLLM's own rate, {what}, {kind}, {streams} at once", found[name].told())
        yield _rate(f"{kind} streamed through servekit, {streams} streams", ours, own)
        if theirs is not None:
            aim = AIM_OF_SERVE if streams >= 512 else 1.0
            yield _ratio(f"… to vLLM's API server streaming {kind}", ours, theirs, aim)
        yield _first(f"… time to first token, {kind}, p50 / p99", ours, theirs)


def _rate(what: str, ours: Outcome, own: Sequence[tuple[float, str]]) -> Figure:
    if not own:
        return Figure(what, ours.told(), how=ours.notes())
    best, name = max(own)
    ratio = ours.rate / best
    said = f"{ratio:.2f} of `{name}`; {ours.told()}"
    return Figure(what, said, f"≥ {AIM}", ratio >= AIM, ours.notes())


def _ratio(what: str, ours: Outcome, theirs: Outcome, aim: float) -> Figure:
    ratio = ours.rate / theirs.rate
    said = f"{ratio:.2f}; {theirs.told()}"
    return Figure(what, said, f"≥ {aim}", ratio >= aim, theirs.notes())


def _first(what: str, ours: Outcome, theirs: Outcome | None) -> Figure:
    said = f"{ours.first_s(0.5):.2f} / {ours.first_s(0.99):.2f} s"
    if theirs is None:
        return Figure(what, said)
    met = ours.first_s(0.99) <= AIM_OF_FIRST * theirs.first_s(0.99)
    beside = f"{said}, against {theirs.first_s(0.5):.2f} / {theirs.first_s(0.99):.2f} s"
    return Figure(what, beside, f"p99 ≤ {AIM_OF_FIRST} of it", met)


# ---------------------------------------------------------------- the command


def vocabulary(model: Path | None) -> int:
    """Tokens that a prompt may have."""
    if model is None:
        return 256  # the echo engine's are bytes
    config = json.loads((model / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"]) - 8  # padding, or special


def main(arguments: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m tests.bench.vllm", description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--engine", choices=("vllm", "echo"), default="vllm")
    parser.add_argument("--streams", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=1, help="requests of each stream, a round")
    parser.add_argument("--rounds", type=int, default=5, help="at most")
    parser.add_argument("--clients", type=int, default=4, help="processes that ask")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--within", type=float, default=280.0, help="seconds; at least one round")
    options = parser.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        model = options.model
        if model is None and options.engine == "vllm":
            from tests.gpu.adapters import write_middle

            model = write_middle(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "m")
        numbers = (options.prompt, options.output, options.repeats)
        load = Load(*numbers, vocabulary(model), options.clients)
        turns = stack.enter_context(contestants(options, model or Path(), load))
        _say(f"ready after {time.monotonic() - began:.0f} s")
        outcomes = run(turns, options, began + options.within)
    rows = [row for streams in options.streams for row in figures(outcomes, streams)]
    rounds = min(len(one.rounds) for one in outcomes.values())
    about = f"{options.prompt} tokens in, {options.output} out, {rounds} rounds"
    gateways = f"{options.gateways} gateway(s), {options.clients} client processes"
    print(f"{markdown(rows)}\n\n{about}, {gateways}; {conditions()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
