"""`python -m tests.bench.adapters`: LoRA adapters mixed in one batch, as a ratio to the base model.

--device cuda    by default cpu, where the model is tiny and the figures say little
--hidden, --layers, --heads, --intermediate, --vocab    the random model's size
--rank, --requests, --tokens, --adapters 1 8 32         what is asked of it
--stacked, --runs                                        one way of adding them only

Each request has an adapter, in turn; the base is measured before and after, in the same engine. How
long a load takes is shown beside it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from servekit.engines.transformers.lora import batched_lora
from servekit.protocol.adapters import AdapterSpec
from tests.unit.engines.harness import Harness, byte_level_tokenizer, make_spec

_TARGETS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


@dataclass(frozen=True, slots=True)
class Size:
    """A Llama's, with one key head for four query heads."""

    hidden: int = 256
    layers: int = 4
    heads: int = 8
    intermediate: int = 768
    vocab: int = 8192


@dataclass(frozen=True, slots=True)
class Measured:
    adapters: int
    tokens_per_s: float
    ratio: float
    load_s: float  # of one adapter, the mean


def measure(
    size: Size,
    device: str,
    *,
    dtype: str = "auto",
    rank: int = 16,
    counts: tuple[int, ...] = (1, 8, 32),
    requests: int = 32,
    tokens: int = 64,
) -> list[Measured]:
    """Make a model and adapters of this size, and run them; the first row is the base's own."""
    with tempfile.TemporaryDirectory(prefix="servekit-adapters-") as name:
        folder = Path(name)
        _write_model(folder / "base", size, device)
        specs = [_write_adapter(folder / f"a{n}", size, rank, n) for n in range(max(counts))]
        engine = Harness(make_spec(folder / "base", device=device, dtype=dtype))
        try:
            return _measured(engine, specs, counts, requests, tokens)
        finally:
            engine.close()


def _measured(
    engine: Harness, specs: list[AdapterSpec], counts: tuple[int, ...], requests: int, tokens: int
) -> list[Measured]:
    _rate(engine, [""], requests, tokens)  # warm
    before = _rate(engine, [""], requests, tokens)
    rows, loaded, took_s = [], 0, 0.0
    for count in sorted(counts):
        began = time.monotonic()
        for spec in specs[loaded:count]:
            engine.engine.load_adapter(spec)
        took_s, loaded = took_s + time.monotonic() - began, count
        names = [spec.name for spec in specs[:count]]
        _rate(engine, names, requests, 8)
        with_them = _rate(engine, names, requests, tokens)
        rows.append((count, with_them, took_s / count))
    base = (before + _rate(engine, [""], requests, tokens)) / 2
    return [Measured(0, base, 1.0, 0.0)] + [
        Measured(count, rate, rate / base, load_s) for count, rate, load_s in rows
    ]


def _rate(engine: Harness, names: list[str], requests: int, tokens: int) -> float:
    """Tokens per second, all requests at once."""
    prompts = [[(31 * n + i) % 400 for i in range(16)] for n in range(requests)]
    began = time.monotonic()
    jobs = [
        engine.submit(prompt, adapter=names[n % len(names)], max_tokens=tokens, ignore_eos=True)
        for n, prompt in enumerate(prompts)
    ]
    made = sum(len(engine.tokens(job)) for job in jobs)
    return made / (time.monotonic() - began)


def _write_model(folder: Path, size: Size, device: str) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=max(1, size.heads // 4),
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
    model.to(dtype).save_pretrained(folder)


def _write_adapter(folder: Path, size: Size, rank: int, seed: int) -> AdapterSpec:
    """As PEFT would write it, without the model that PEFT needs to write one."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    keys = size.hidden // size.heads * max(1, size.heads // 4)
    wide = {"gate_proj": size.intermediate, "up_proj": size.intermediate}
    outs = {"k_proj": keys, "v_proj": keys} | wide
    tensors = {}
    for layer in range(size.layers):
        for part, names in _TARGETS.items():
            for name in names:
                to = outs.get(name, size.hidden)
                of = size.intermediate if name == "down_proj" else size.hidden
                key = f"base_model.model.model.layers.{layer}.{part}.{name}"
                for which, shape in (("A", (rank, of)), ("B", (to, rank))):
                    made = torch.randn(shape, generator=generator) * of**-0.5
                    tensors[f"{key}.lora_{which}.weight"] = made
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [name for names in _TARGETS.values() for name in names],
        "base_model_name_or_path": "base",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return AdapterSpec(folder.name, str(folder))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.adapters")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    for name, value in (("hidden", 256), ("layers", 4), ("heads", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--stacked", action="store_true")
    parser.add_argument("--runs", action="store_true")
    args = parser.parse_args()
    if args.stacked or args.runs:
        batched_lora._LAUNCH_WORTH = dict.fromkeys(("cpu", "cuda"), 1e18 if args.stacked else -1e18)
    size = Size(args.hidden, args.layers, args.heads, args.intermediate, args.vocab)
    counts, rank = tuple(args.adapters), args.rank
    for row in measure(
        size, args.device, rank=rank, counts=counts, requests=args.requests, tokens=args.tokens
    ):
        print(
            f"| {row.adapters:3} adapters | {row.tokens_per_s:8.0f} tokens/s | "
            f"{row.ratio:.2f} of the base | {row.load_s:5.2f} s to load one |",
            flush=True,
        )


if __name__ == "__main__":
    main()
