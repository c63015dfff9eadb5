"""servekit's llamacpp engine against the servers of llama.cpp's bindings: same file, by turns.

    python -m tests.bench.llama_servers [--rounds 5] [--clients 1 8 16] [--venv DIR]

SmolLM2-135M-Instruct in Q4_1 on the CPU; for all one thread, as many slots as clients at most, one
f16 cache of 8192 tokens, flash attention. Chats, streamed, greedy, that begin unlike each other, so
that no prompt cache helps. Tokens are counted by the model's own tokenizer, which a start of
configs/demo.yaml has left in the cache. llama-cpp-python is compiled into --venv if it is missing.
Its server has one request cut off another unless it is told not to, as it is here; with
--interrupts it is as it starts. What is cut off is no answer, and its tokens do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from servekit.engines.model_files.source import resolve_file
from tests.bench import llama_peers
from tests.bench.chats import Contest, Round, Server, first, rate, rates, ratios, same
from tests.bench.contest import Plan
from tests.bench.figures import conditions
from tests.bench.llama_peers import Setting
from tests.bench.table import Figure, markdown
from tests.bench.transformers_serve import cached_model
from tests.integration.instance import Instance
from tests.unit.engines.origins import SMOLLM2

CONTEXT = 8192
NAMES = {
    "xllamacpp": "xllamacpp's server (llama.cpp's own)",
    "llama-cpp-python": "llama-cpp-python's server",
}
#: By peer and clients.
AIMS = {("xllamacpp", n): 0.97 for n in (1, 8, 16)} | {("llama-cpp-python", 8): 3.0}


# ---------------------------------------------------------------- the servers


@contextlib.contextmanager
def servers(
    setting: Setting, tokens: int, python: Path | None, folder: Path
) -> Iterator[list[Server]]:
    """servekit's, xllamacpp's, and with its interpreter llama-cpp-python's."""
    body = {"max_tokens": tokens, "stream": True, "temperature": 0, "model": "smollm2"}
    options = {"threads": setting.threads, "slots": setting.slots, "binding": "xllamacpp"}
    ours = {
        "name": "smollm2",
        "engine": "llamacpp",
        "path": setting.model,
        "device": "cpu",
        "replicas": 1,
        "options": options,
    }
    with contextlib.ExitStack() as stack:
        instance = stack.enter_context(Instance.up(folder, [ours]))
        instance.until_settled(within_s=120)
        found = [Server("ours", instance.url, body, contextlib.nullcontext)]
        peer = stack.enter_context(llama_peers.xllamacpp(setting, folder / "xllamacpp.log"))
        uncached = {**body, "cache_prompt": False}  # nothing to look up or to keep
        found.append(Server("xllamacpp", peer.url, uncached, peer.turn))
        if python is not None:
            log = folder / "llama_cpp.log"
            peer = stack.enter_context(llama_peers.llama_cpp_python(setting, python, log))
            found.append(Server("llama-cpp-python", peer.url, body, peer.turn))
        yield found


# ---------------------------------------------------------------- the table


def figures(contest: Contest, clients: Sequence[int], plan: Plan) -> Iterator[Figure]:
    contest.warm()
    for count in clients:
        print(f"measuring: {count} clients …", file=sys.stderr, flush=True)
        yield from rows(count, contest.run(count, plan))


def rows(clients: int, rounds: Mapping[str, Sequence[Round]]) -> Iterator[Figure]:
    ours = rounds["ours"]
    for name, theirs in rounds.items():
        if name == "ours":
            continue
        aim = AIMS.get((name, clients))
        ratio = rate(ours) / rate(theirs)
        yield Figure(
            f"tokens/s of {NAMES[name]}, {clients} client{'s' * (clients > 1)}",
            f"{ratio:.2f}; by round {ratios(ours, theirs)}",
            f"≥ {aim}" if aim else "",
            ratio >= aim if aim else None,
            f"{rates(ours)} against {rates(theirs)}; {len(ours)} rounds; {same(ours, theirs)}",
        )
    yield Figure(
        "… time to the first text",
        ", ".join(f"{name} {first(several)}" for name, several in rounds.items()),
        how="median over requests, then over rounds",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--questions", type=int, default=16, help="of each round")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--threads", type=int, default=1, help="of every server's engine")
    parser.add_argument("--prebuilt", action="store_true", help="without llama-cpp-python")
    parser.add_argument(
        "--interrupts", action="store_true", help="llama-cpp-python's, as it starts"
    )
    parser.add_argument("--calm-within", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--venv", type=Path, help="llama-cpp-python's environment, kept")
    options = parser.parse_args(arguments)
    plan = Plan(options.rounds, calm_within_s=options.calm_within)
    file = resolve_file(SMOLLM2, None, lambda progress: None)
    slots = max(options.clients)
    setting = Setting(str(file), options.threads, slots, CONTEXT, interrupts=options.interrupts)
    with tempfile.TemporaryDirectory(prefix="servekit-bench-") as name:
        folder, python = Path(name), None
        if not options.prebuilt:
            python = llama_peers.installed(options.venv or folder / "venv")
        with servers(setting, options.tokens, python, folder) as several:
            contest = Contest(several, cached_model(), options.questions, marked=True)
            table = markdown(figures(contest, options.clients, plan))
    print(f"{table}\n\nAfter: {conditions()}; {options.threads} thread(s) each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
