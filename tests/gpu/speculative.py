"""`python -m tests.gpu.speculative`: speculative decoding in the transformers engine, on a GPU.

--device cpu          try the script itself, with a tiny model
--shape 8B            sizes of the measured model (0.6B or 8B), with random weights in bfloat16
--draft 0.6B          sizes of its draft model
--streams 1 4 16 64   requests at the same time
--tokens 4            proposed tokens
--only NAME           one of: equal, speed

- equal: a random model in float32 says the same with proposals as without: greedy text, text of a
  seed, with penalties and with log probabilities; 8 requests at a time. Its draft is the model
  itself, so all but what penalties change is accepted. Then their caches are made anew. Then rows
  of which the first ones take all slots of a drafting pass, and a draft with a shorter context,
  whose embeddings of places end before the rows do.
- speed: tokens/s with and without proposals. A random model says nothing that makes sense, so its
  logits get a script on top, by place, and it says that: it computes as any model of its size, and
  what it says has the repetitions of a real text. One script is a file of servekit in which some
  names are changed, with the file itself as the prompt, as when an assistant edits code; the other
  is a page of the documentation, with a prompt that has nothing to do with it. Tokens are words and
  signs. The draft model's script has another token in a quarter of the places. The ways take turns;
  figures are medians of `--rounds`.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from servekit.engines.api.base import Job
from servekit.engines.api.speculation import Speculator, StepRates
from servekit.engines.text.sampling_params import Sampling
from servekit.engines.transformers import fused_layers
from servekit.engines.transformers.batching.continuous import ContinuousRunner
from servekit.engines.transformers.decode import draft_model
from servekit.engines.transformers.decode.speculation_setup import Draft
from servekit.engines.transformers.request_row import Row
from servekit.engines.transformers.runner_factory import make_causal_runner
from servekit.protocol.messages import SamplingParams
from tests.unit.engines.harness import make_spec

library: Any = transformers
ROOT = Path(__file__).parents[2]
CODE = ROOT / "servekit/metrics.py"
PROSE = ROOT / "servekit/docs/pages/guides/engines.md"
#: What the edit of the code replaces.
EDITS = {"_counter(": "_make_counter(", "kind": "sort", "bounds": "limits", "answers": "replies"}
#: hidden, layers, heads, kv heads, width, intermediate, vocabulary: of Qwen3.
SHAPES = {
    "tiny": (64, 2, 4, 2, 16, 128, 4096),
    "0.6B": (1024, 28, 16, 8, 128, 3072, 151936),
    "8B": (4096, 36, 32, 8, 128, 12288, 151936),
}
CONTEXT = 8192
#: What the script adds to the logit of its token: more than random logits differ.
LOUD = 1000.0
WAYS = {
    "greedy": Sampling(temperature=0.0),
    "of a seed": Sampling(temperature=0.7, seed=5),
    "top-k, top-p": Sampling(temperature=0.7, top_k=40, top_p=0.9, seed=6),
    "penalties": Sampling(temperature=0.0, repetition_penalty=1.05),
    "log probabilities": Sampling(temperature=0.0, logprobs=3),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.speculative")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shape", default="8B", choices=[*SHAPES])
    parser.add_argument("--draft", default="0.6B", choices=[*SHAPES])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--length", type=int, default=512, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["equal", "speed"])
    args = parser.parse_args()
    if args.device == "cpu":
        args.shape, args.draft, args.streams, args.length = "tiny", "tiny", [1, 4], 96
    right = True
    with torch.no_grad():
        if args.only != "speed":
            right &= compare_texts(args)
        if args.only != "equal":
            right &= measure_speed(args)
    return 0 if right else 1


# ---------------------------------------------------------------- a model with a script


@dataclass
class Script:
    """What a model is to say at each place, in a tensor that CUDA graphs know."""

    tokens: Tensor  # [context]
    loudness: Tensor  # of one number

    @classmethod
    def of(cls, device: str) -> Script:
        return cls(
            torch.zeros(CONTEXT, dtype=torch.int64, device=device), torch.zeros(1, device=device)
        )

    def write(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Let the answer follow the prompt."""
        whole = torch.tensor([*prompt[1:], *answer])
        self.tokens[: len(whole)] = whole
        self.loudness.fill_(LOUD)

    def add(self, module: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
        """Add to the logits, as a hook of the model's forward."""
        places = kwargs.get("position_ids")
        if places is None:
            places = torch.arange(out.logits.shape[1], device=out.logits.device).unsqueeze(0)
        kept = kwargs.get("logits_to_keep")
        if kept is not None:
            places = places[:, slice(-kept, None) if isinstance(kept, int) else kept]
        said = self.tokens[places].unsqueeze(-1)
        added = self.loudness.to(out.logits.dtype).expand(said.shape)
        out.logits = out.logits.scatter_add(-1, said, added)
        return out


def make_model(shape: str, device: str, dtype: torch.dtype, seed: int = 0) -> Any:
    hidden, layers, heads, kv_heads, width, intermediate, vocabulary = SHAPES[shape]
    config = library.Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=shape != "8B",
        initializer_range=0.05,
        attn_implementation="sdpa",
    )
    torch.backends.cuda.enable_cudnn_sdp(False)  # as the engine's `load_model` does
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = library.Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    fused_layers.fuse_layers(model)
    return model


def make_runner(
    model: Any, device: str, speculative: dict[str, Any] | None = None, draft: Draft | None = None
) -> ContinuousRunner:
    options: dict[str, Any] = {"decode": "graph", "kv_cache_bytes": 14 * 2**30, "slots": 128}
    if device == "cpu":
        options |= {"kv_cache_bytes": 2**28, "slots": 32}
    if speculative:
        options["speculative"] = speculative
    spec = make_spec("made", device=device, max_context=CONTEXT, options=options)
    model.set_attn_implementation("sdpa")
    runner, info = make_causal_runner(model, spec, False, None, draft)
    print(info.detail, flush=True)
    assert isinstance(runner, ContinuousRunner)
    return runner


def make_row(
    name: str, prompt: Sequence[int], length: int, sampling: Sampling | None = None
) -> Row:
    job = Job(0, list(prompt), SamplingParams(max_tokens=length))
    return Row(name, job, sampling or Sampling(temperature=0.0), frozenset(), length)


def run_rows(
    runner: ContinuousRunner, rows: Sequence[Row], clock: Callable[[], float] = time.perf_counter
) -> tuple[float, int]:
    """Return the tokens/s and the number of steps after all rows have had their first token."""
    for row in rows:
        runner.add(row)
    while not all(row.completion for row in rows):
        runner.step()
    before, began, steps = sum(len(row.completion) for row in rows), clock(), 0
    while runner.running or runner.waiting:
        runner.step()
        steps += 1
    made = sum(len(row.completion) for row in rows) - before
    return made / (clock() - began), steps


def counts_of(runner: ContinuousRunner) -> tuple[int, int]:
    """Return the numbers of proposed and accepted tokens so far."""
    counts = speculator_of(runner).counts
    return counts.draft_tokens, counts.accepted_tokens


def speculator_of(runner: ContinuousRunner) -> Speculator:
    options = runner._step_options
    assert options is not None
    assert options.speculator is not None
    return options.speculator


# ---------------------------------------------------------------- texts


def compare_texts(args: argparse.Namespace) -> bool:
    shape = "tiny" if args.shape == "tiny" else "0.6B"
    model = make_model(shape, args.device, torch.float32)
    plain = make_runner(model, args.device)
    ngram = {"method": "ngram", "tokens": args.tokens, "ngram_min": 1}
    draft = Draft(make_model(shape, args.device, torch.float32), 0.0)
    drafts = {"method": "draft", "tokens": args.tokens, "model": "itself"}
    guessing = {
        "n-gram": make_runner(model, args.device, ngram),
        "draft": make_runner(model, args.device, drafts, draft),
    }
    right = True
    print(f"\n| float32, {shape} | proposals | the same | proposed | accepted |")
    print("|---|---|---|---|---|")
    for turn in ("", ", caches anew"):
        # a draft as slow as the model would not be asked
        _propose_always(guessing["draft"])
        for name, sampling in WAYS.items():
            expected = _say(plain, f"{name}{turn}", sampling, args.length)
            for how, runner in guessing.items():
                before = counts_of(runner)
                said = _say(runner, f"{name}{turn}", sampling, args.length)
                same = sum(one == other for one, other in zip(said, expected, strict=True))
                proposed, accepted = _since(before, runner)
                print(
                    f"| {name}{turn} | {how} | {same}/{len(said)} | {proposed} | {accepted} |",
                    flush=True,
                )
                right &= same == len(said)
                if how == "draft" and name != "penalties":
                    right &= accepted >= 0.97 * proposed > 0
        if not turn:
            for runner in guessing.values():
                runner.drop_pages()
                runner.make_pages()
    _propose_always(guessing["draft"])
    right &= _compare_wide(plain, guessing["draft"])
    for runner in guessing.values():
        runner.close()
    right &= _compare_short(plain, model, args)
    plain.close()
    return right


def _compare_wide(plain: ContinuousRunner, drafting: ContinuousRunner) -> bool:
    """One row's prompt has been read by the draft, and others take all slots of a pass."""
    slots, block = drafting.plan.slots, drafting.plan.block_size
    few = min(draft_model._FEW, slots)
    full = _circle(0, block)
    prompts = [_circle(at, few - 1) for at in range(1, 1 + slots // few)] + [full]
    run_rows(drafting, [make_row("read", full, 40)])
    return _compare_rows("no slots left", plain, drafting, prompts)


def _compare_short(plain: ContinuousRunner, model: Any, args: argparse.Namespace) -> bool:
    """A draft with learnt places, of which it has 64."""
    config = library.GPT2Config(
        vocab_size=model.config.vocab_size, n_positions=64, n_embd=128, n_layer=1, n_head=2,
        attn_implementation="sdpa",
    )  # fmt: skip
    draft = Draft(library.GPT2LMHeadModel(config).eval().to(args.device), 0.0)
    asked = {"method": "draft", "tokens": args.tokens, "model": "short"}
    drafting = make_runner(model, args.device, asked, draft)
    _propose_always(drafting)
    prompts = [_circle(at, length) for at, length in enumerate((50, 30, 200, 63, 64))]
    right = _compare_rows("a draft's context of 64", plain, drafting, prompts)
    drafting.close()
    return right


def _propose_always(drafting: ContinuousRunner) -> None:
    """Let every step have proposals, whether or not they pay."""
    speculator = speculator_of(drafting)
    speculator.proposer.cost = 0.0
    for bits in range(8):
        speculator._rates[bits] = StepRates(
            speculator.proposer.pause, rest=0
        )  # and no more is known


def _compare_rows(
    what: str, plain: ContinuousRunner, drafting: ContinuousRunner, prompts: Sequence[list[int]]
) -> bool:
    before, said = counts_of(drafting), []
    for runner in (plain, drafting):
        rows = [make_row(f"{what}{at}", prompt, 60) for at, prompt in enumerate(prompts)]
        run_rows(runner, rows)
        said.append([row.completion for row in rows])
    same = sum(one == other for one, other in zip(*said, strict=True))
    proposed, accepted = _since(before, drafting)
    failure = speculator_of(drafting).failure
    print(f"| {what} | draft | {same}/{len(prompts)} | {proposed} | {accepted} | {failure}")
    return same == len(prompts) and proposed > 0 and not failure


def _say(runner: ContinuousRunner, name: str, sampling: Sampling, length: int) -> list[list[int]]:
    rows = [make_row(f"{name}{at}", _circle(at), min(length, 200), sampling) for at in range(8)]
    run_rows(runner, rows)
    return [row.completion for row in rows]


def _since(before: tuple[int, int], runner: ContinuousRunner) -> tuple[int, int]:
    proposed, accepted = counts_of(runner)
    return proposed - before[0], accepted - before[1]


def _circle(at: int, length: int = 60) -> list[int]:
    """A prompt that repeats itself, as what follows may."""
    return [8 + (at * 37 + place % (5 + at)) % 4000 for place in range(length)]


# ---------------------------------------------------------------- speed


def read_scripts(length: int, vocabulary: int) -> dict[str, tuple[list[int], list[int]]]:
    """Return prompts and answers as tokens: words with their space, line beginnings, signs."""
    code, prose = CODE.read_text(), PROSE.read_text()
    edited = code
    for old, new in EDITS.items():
        edited = edited.replace(old, new)
    split = partial(re.findall, r"\n *| ?\w+|[^\w\s]|\s")
    ids: dict[str, int] = {}
    original, changed, told = (
        [ids.setdefault(word, 8 + len(ids)) for word in split(text)]
        for text in (code, edited, prose)
    )
    assert len(ids) + 8 < vocabulary
    prompt = original[: length + length // 4]
    return {"code edit": (prompt, changed[:length]), "prose": (prompt, told[:length])}


def measure_speed(args: argparse.Namespace) -> bool:
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    model, small = (
        make_model(shape, args.device, dtype, seed)
        for seed, shape in enumerate((args.shape, args.draft))
    )
    script, of_draft = Script.of(args.device), Script.of(args.device)
    model.register_forward_hook(script.add, with_kwargs=True)
    small.register_forward_hook(of_draft.add, with_kwargs=True)
    sizes = [sum(one.numel() for one in each.parameters()) for each in (small, model)]
    draft = Draft(small, 0.1 if args.device == "cpu" else sizes[0] / sizes[1])
    asked = {"tokens": args.tokens}
    runners = {
        "plain": make_runner(model, args.device),
        "n-gram": make_runner(model, args.device, {"method": "ngram", **asked}),
        "draft": make_runner(model, args.device, {"method": "draft", "model": "m", **asked}, draft),
    }
    right = True
    print(
        f"\n| {args.shape}, draft {args.draft}, {args.tokens} tokens | streams | proposals | tok/s"
        " | ratio | accepted | tokens a row and step | as written |"
        "\n|---|---|---|---|---|---|---|---|"
    )
    scripts = read_scripts(args.length, SHAPES[args.shape][-1])
    for name, (prompt, answer) in scripts.items():
        script.write(prompt, answer)
        luck = random.Random(5)
        of_draft.write(prompt, [9 if luck.random() < 0.25 else token for token in answer])
        for streams in args.streams:
            right &= _compare_speeds(args, runners, name, prompt, answer, streams)
    for runner in runners.values():
        runner.close()
    return right


def _compare_speeds(
    args: argparse.Namespace,
    runners: dict[str, ContinuousRunner],
    name: str,
    prompt: list[int],
    answer: list[int],
    streams: int,
) -> bool:
    speeds: dict[str, list[float]] = {how: [] for how in runners}
    before = {how: counts_of(runner) for how, runner in runners.items() if how != "plain"}
    same, steps = dict.fromkeys(runners, True), dict.fromkeys(runners, 0)
    for turn in range(1 + args.rounds):
        for how, runner in runners.items():
            rows = [
                make_row(f"{name}{streams}.{turn}.{at}", prompt, len(answer))
                for at in range(streams)
            ]
            speed, steps[how] = run_rows(runner, rows)
            same[how] &= all(row.completion == answer for row in rows)
            if turn:  # the first one warms up
                speeds[how].append(speed)
    plain = statistics.median(speeds["plain"])
    for how, runner in runners.items():
        speed, share = statistics.median(speeds[how]), ""
        if how != "plain":
            proposed, accepted = _since(before[how], runner)
            share = f"{accepted / proposed:.0%} of {proposed}" if proposed else "none proposed"
        print(
            f"| {name} | {streams} | {how} | {speed:.0f} | {speed / plain:.2f} | {share} |"
            f" {(len(answer) - 1) / steps[how]:.2f} | {'yes' if same[how] else 'NO'} |",
            flush=True,
        )
    return all(same.values())


if __name__ == "__main__":
    sys.exit(main())
