"""Adapters on GPUs: memory where it belongs, memory given back, and what they cost in speed.

Part of `python -m tests.gpu`; each check returns rows of its table.
"""

from __future__ import annotations

import concurrent.futures
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers
from safetensors.torch import save_file

from servekit.protocol.messages import ReplicaStatus
from servekit.system.gpu.gpus import gpu_memory_by_pid
from tests.gpu.checks import MIB, PROMPT, Row, complete
from tests.integration.instance import Instance

#: How often an adapter is loaded, asked and unloaded under traffic.
LOADS = 8
#: What the allocator may keep of the traffic itself, which never pauses.
SLACK_BYTES = 64 * MIB


def write_middle(folder: Path, tokenizer: Any = None) -> Path:
    """A random Llama of 0.35e9 parameters in bfloat16, in the shape of a small Qwen, for speed.

    With a tokenizer it has its vocabulary; by default one of bytes.
    """
    shape = {"hidden": 1024, "intermediate": 3072, "layers": 28, "heads": 16}
    return write_llama(folder, tokenizer=tokenizer, **shape)


def write_billion(folder: Path) -> Path:
    """As `write_middle`, of 1.1e9 parameters."""
    return write_llama(folder, hidden=2048, intermediate=8192, layers=18, heads=32)


def write_large(folder: Path) -> Path:
    """As `write_middle`, of 7e9 parameters: an 8B without most of its vocabulary."""
    return write_llama(folder, hidden=4096, intermediate=12288, layers=36, heads=32)


def write_llama(
    folder: Path,
    *,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    tokenizer: Any = None,
) -> Path:
    """As `write_middle`, in any shape."""
    from tests.unit.engines.harness import byte_level_tokenizer

    tokenizer = tokenizer or byte_level_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=-(-len(tokenizer) // 8) * 8,  # what ranks can share
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="bfloat16",
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        kind: Any = transformers.AutoModelForCausalLM
        model = kind.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def write_lora(base: Path, folder: Path, seed: int, rank: int = 16) -> Path:
    """Random factors on every linear layer but the head, in PEFT's format; loads no weights."""
    config = transformers.AutoConfig.from_pretrained(base)
    with torch.device("meta"):
        kind: Any = transformers.AutoModelForCausalLM
        model = kind.from_config(config)
    noise = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    targets: set[str] = set()
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        key = f"base_model.model.{name}"
        down = torch.randn(rank, module.in_features, generator=noise) / module.in_features**0.5
        up = torch.randn(module.out_features, rank, generator=noise) * 0.05
        tensors |= {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
        targets.add(name.rsplit(".", 1)[-1])
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(targets),
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


def ask(instance: Instance, model: str, prompt: str = PROMPT, **fields: Any) -> str:
    """One completion's text, greedy unless told otherwise."""
    body = {"model": model, "prompt": prompt, "max_tokens": 32, "temperature": 0, **fields}
    return complete(instance, body)


def change(instance: Instance, verb: str, name: str, path: Path | None = None) -> float:
    """Load or unload an adapter; returns the seconds it took."""
    body = {"lora_name": name} | ({"lora_path": str(path)} if path else {})
    began = time.monotonic()
    answer = httpx.post(f"{instance.url}/v1/{verb}_lora_adapter", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return time.monotonic() - began


@contextmanager
def traffic(instance: Instance, clients: int) -> Iterator[list[str]]:
    """Requests to the base without a pause; what failed of them is in the list."""
    failed: list[str] = []
    over = threading.Event()

    def client(number: int) -> None:
        while not over.is_set():
            try:
                ask(instance, "m", f"{number} {PROMPT}")
            except (AssertionError, httpx.HTTPError) as error:
                failed.append(repr(error))

    threads = [threading.Thread(target=client, args=(n,)) for n in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield failed
    finally:
        over.set()
        for thread in threads:
            thread.join()


def loads(instance: Instance, paths: Sequence[Path]) -> list[Row]:
    """Load and unload adapters on all replicas, under traffic, and watch each worker's memory."""
    replicas = instance.model("m").replicas
    with traffic(instance, 4 * len(replicas)) as failed:
        change(instance, "load", "first", paths[0])  # what is made once is made
        ask(instance, "first")
        change(instance, "unload", "first")
        before = _own(replicas)
        took_s, strays, texts = [], [], set()
        base = ask(instance, "m")
        for number, path in enumerate(paths):
            took_s.append(change(instance, "load", f"lora-{number}", path))
            strays.append(_stray(replicas))
            texts.add(ask(instance, f"lora-{number}"))
        held = _own(replicas)
        for number in range(len(paths)):
            change(instance, "unload", f"lora-{number}")
            strays.append(_stray(replicas))
        after = _own(replicas)
    kept = max((after[name] - before[name] for name in before), default=0)
    grown = max((held[name] - before[name] for name in before), default=0)
    distinct = len(texts - {base})
    return [
        Row(f"{len(paths)} LoRA loaded and unloaded under traffic", f"{max(took_s):.1f} s", True),
        Row("… requests of the traffic that failed", str(len(failed)), not failed),
        Row("… adapters with a text of their own", f"{distinct}", distinct == len(paths)),
        Row("… a worker's memory elsewhere, at most", f"{max(strays)} B", max(strays) == 0),
        Row("… a worker's memory, all loaded", f"+{grown / MIB:.0f} MiB"),
        Row("… after unloading, against before", f"{kept / MIB:+.0f} MiB", kept <= SLACK_BYTES),
    ]


def _own(replicas: Sequence[ReplicaStatus]) -> dict[str, int]:
    """Bytes that each worker holds on all GPUs together."""
    held = gpu_memory_by_pid()
    return {r.name: sum(held.get(r.pid, {}).values()) for r in replicas}


def _stray(replicas: Sequence[ReplicaStatus]) -> int:
    """Bytes that workers hold on GPUs that are not their own."""
    held = gpu_memory_by_pid()
    return sum(
        size for r in replicas for uuid, size in held.get(r.pid, {}).items() if uuid not in r.gpus
    )


_PLAIN = """
import json, os, sys
import pynvml, torch
from peft import AutoPeftModelForCausalLM
model = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1], device_map={"": 1})
torch.cuda.synchronize()
pynvml.nvmlInit()
held = {}
for index in range(pynvml.nvmlDeviceGetCount()):
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
        if process.pid == os.getpid():
            held[index] = process.usedGpuMemory
print(json.dumps(held))
"""


def plain_way(adapter: Path) -> list[Row]:
    """What PEFT's own way of loading onto GPU 1 leaves on GPU 0."""
    done = subprocess.run(
        [sys.executable, "-c", _PLAIN, str(adapter)], capture_output=True, text=True, timeout=300
    )
    what = "plain AutoPeftModelForCausalLM on GPU 1: left on GPU 0"
    if done.returncode:
        return [Row(what, done.stderr.strip()[-120:])]
    held = json.loads(done.stdout.strip().splitlines()[-1])
    return [Row(what, f"{held.get('0', 0) / MIB:.0f} MiB")]


def throughput(
    instance: Instance, paths: Sequence[Path], clients: int, tokens: int = 128
) -> list[Row]:
    """Tokens/s of a crowd spread over 1, 8 and 32 adapters, against the same crowd on the base."""
    base = _rate(instance, ["m"], clients, tokens)
    rows = [Row(f"tokens/s of the base, {clients} requests of {tokens}", f"{base:,.0f}")]
    names: list[str] = []
    for count in (1, 8, 32):
        for number in range(len(names), count):
            names.append(f"crowd-{number}")
            change(instance, "load", names[-1], paths[number])
        rate = _rate(instance, names, clients, tokens)
        again = _rate(instance, ["m"], clients, tokens)
        beside = f"{rate / max(base, again):.2f}"
        rows.append(Row(f"… the same over {count} LoRA of rank 16, to the base", beside))
        base = max(base, again)
    for name in names:
        change(instance, "unload", name)
    return rows


def _rate(instance: Instance, models: Sequence[str], clients: int, tokens: int) -> float:
    fields = {"max_tokens": tokens, "ignore_eos": True}

    def one(number: int) -> str:
        return ask(instance, models[number % len(models)], f"{number} {PROMPT}", **fields)

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        list(pool.map(one, range(clients)))  # kernels, caches and connections are warm after it
        began = time.monotonic()
        list(pool.map(one, range(clients)))
        return clients * tokens / (time.monotonic() - began)


def folder_of(model: str) -> Path:
    """Where the model's configuration is, whatever the file's `path` says."""
    from servekit.engines.model_files.source import resolve_folder

    return Path(resolve_folder(model, None, lambda progress: None))


def numerics(model: str, device: str) -> list[Row]:
    """First-token logits on the device against those on the CPU in float32."""
    command = [sys.executable, "-m", "tests.gpu.numerics", "--model", model, "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    rows = [
        Row(
            f"first-token logits, {one['device']} {one['dtype']} to CPU float32",
            f"{one['error']:.1e} (≤ {one['tolerance']:.0e}), same token "
            f"{one['same_token']} of {one['prompts']}",
            one["error"] <= one["tolerance"] and one["decided"] == one["decided_same"],
        )
        for one in found
    ]
    return rows or [Row("first-token logits", done.stderr.strip()[-200:], False)]
