"""`python -m tests.gpu.quantization`: weights that are quantised while they are loaded.

--device cpu          try the script itself, with a small model
--size 8b             7.0e9 parameters instead of 1.1e9
--only int8,fp8,int4  some of the methods; `none` is the model as it is
--images              a Qwen2-VL of 2.2e9 parameters instead, which is asked about images

A Llama with random weights in bfloat16: the memory of its weights beside the
estimate of `servekit check`, tokens a second of one and of 32 requests, greedy texts beside those
of the library with the same quantisation, and a sleep.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from msgspec.structs import replace

from servekit.engines.text.tokenizer import REPLACEMENT
from servekit.engines.transformers.quantize import make_quantization_config
from servekit.model_metadata import safetensors, weight_quantization
from tests.gpu import images
from tests.gpu.checks import Row
from tests.gpu.engines import PROMPTS, alike, ask, entry, serving, texts
from tests.gpu.images import show
from tests.gpu.images_vllm import name_all_tokens
from tests.integration.instance import Instance, run
from tests.unit.engines.harness import byte_level_tokenizer, make_spec, write_tiny_llama
from tests.unit.engines.transformers.vision.pictures import HISTORY, NONE, ONE, OTHER, Reference

SIZES: dict[str, dict[str, int]] = {
    "cuda": {
        "vocab_size": 32_768,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "8b": {
        "vocab_size": 32_768,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "cpu": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
METHODS = {"cuda": ("none", "int8", "fp8", "int4"), "cpu": ("none", "int8")}
AT_ONCE, ANSWER, COMPARED = 32, 256, 16
#: What an estimate of the weights may be off by.
TOLERANCE = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.quantization")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--size", choices=list(SIZES))
    parser.add_argument("--only", default="")
    parser.add_argument("--images", action="store_true")
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="servekit-gpu-") as made:
        folder = Path(made) / "model"
        if args.images:
            write_seeing(folder, Path(made) / "tiny", args.device)
        else:
            write_model(folder, args.device, SIZES[args.size or args.device])
        run_method = measure_images if args.images else measure
        for method in args.only.split(",") if args.only else METHODS[args.device]:
            rows += show(run_method(folder, args.device, method))
    return 0 if all(row.ok is not False for row in rows) else 1


def write_model(folder: Path, device: str, sizes: dict[str, int]) -> None:
    byte_level_tokenizer().save_pretrained(folder)
    library: Any = transformers
    config = library.LlamaConfig(**sizes, max_position_embeddings=2048, tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = library.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()


def measure(folder: Path, device: str, method: str) -> list[Row]:
    options = {} if method == "none" else {"quantization": method}
    dtype = "bfloat16" if device == "cuda" else "float32"
    due = library_texts(folder, device, dtype, options)
    given: dict[str, Any] = {"dtype": dtype, "options": options}
    model = entry("m", "transformers", folder, device, **given)
    if device == "cuda":
        model["memory"] = "40GiB"
    with serving([model]) as instance:
        found = texts(instance, "m", max_tokens=COMPARED)
        rows = [compare_memory(instance, folder, method)]
        for count in (1, AT_ONCE):
            measure_rate(instance, count)
            rows.append(Row(f"{method}: {count} at once", measure_rate(instance, count)))
        alone = ask(instance, "m", PROMPTS[0])
        told = run("sleep", "m", "--run-dir", str(instance.run_dir))
        again = ask(instance, "m", PROMPTS[0])
    same = alike(found, due)
    exact = same.startswith(f"{len(due)} of") if dtype == "float32" else None
    rows.append(Row(f"{method}: {COMPARED} tokens as the library", same, exact))
    slept = told.stdout.strip() or told.stderr.strip()
    rows.append(Row(f"{method}: after a sleep", slept, again == alone and not told.returncode))
    return rows


def compare_memory(instance: Instance, folder: Path, method: str) -> Row:
    info = instance.model("m").info
    assert info is not None
    if method == "none":
        return Row("none: weights", f"{info.parameters * 2 / 2**20:.0f} MiB")
    width = 2 if info.device.startswith("cuda") else 4
    due = weight_quantization.count_quantized_bytes(method, safetensors.read_shapes(folder), width)
    found = info.weights_bytes
    measured = f"{found / 2**20:.0f} MiB, {due / 2**20:.0f} estimated"
    return Row(f"{method}: weights", measured, abs(found - due) <= TOLERANCE * due)


def measure_rate(instance: Instance, count: int) -> str:
    fields = {"max_tokens": ANSWER, "ignore_eos": True}
    prompts = [f"{n} {PROMPTS[0]}" for n in range(count)]
    began_s = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda prompt: ask(instance, "m", prompt, **fields), prompts))
    return f"{count * ANSWER / (time.monotonic() - began_s):.0f} tokens/s"


def library_texts(folder: Path, device: str, dtype: str, options: dict[str, Any]) -> list[str]:
    """Return the texts of the library's own `generate`, each prompt alone."""
    spec = replace(make_spec(folder, device=device), options=options)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        device_map={"": device},
        quantization_config=make_quantization_config(folder, spec),
    )
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    told = []
    for prompt in PROMPTS:
        asked = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(device)
        with torch.inference_mode():
            made = model.generate(**asked, max_new_tokens=COMPARED, do_sample=False)
        told.append(
            tokenizer.decode(made[0][asked["input_ids"].shape[1] :], skip_special_tokens=True)
        )
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return told


# ---------------------------------------------------------------- images


def write_seeing(folder: Path, tiny: Path, device: str) -> None:
    tiny.mkdir()
    write_tiny_llama(tiny)
    images.write_large(folder, tiny, device)
    name_all_tokens(folder)
    if device == "cuda":
        torch.cuda.empty_cache()


def measure_images(folder: Path, device: str, method: str) -> list[Row]:
    options = {} if method == "none" else {"quantization": method}
    dtype = "bfloat16" if device == "cuda" else "float32"
    spec = replace(make_spec(folder, device=device), options=options)
    reference = Reference(
        folder,
        dtype=getattr(torch, dtype),
        device_map={"": device},
        quantization_config=make_quantization_config(folder, spec, "see"),
    )
    chats = (ONE, OTHER, HISTORY, NONE)
    decode = reference.processor.tokenizer.decode
    due = [decode(reference.ask(one, COMPARED)[1], skip_special_tokens=True) for one in chats]
    del reference
    if device == "cuda":
        torch.cuda.empty_cache()
    fields: dict[str, Any] = {"dtype": dtype, "options": options}
    if device == "cuda":
        fields["memory"] = "20GiB"
    with serving([entry("m", "transformers", folder, device, **fields)]) as instance:
        found = [images.ask(instance, "m", one, COMPARED) for one in chats]
        rows = [compare_memory(instance, folder, method)]
        told = run("sleep", "m", "--run-dir", str(instance.run_dir))
        again = [images.ask(instance, "m", one, COMPARED) for one in chats]
    cut = ([text.rstrip(REPLACEMENT) for text in texts] for texts in (found, due))
    same = alike(*cut)
    exact = same.startswith(f"{len(due)} of") if dtype == "float32" else None
    rows.append(Row(f"{method}: {COMPARED} tokens about images as the library", same, exact))
    slept = told.stdout.strip() or told.stderr.strip()
    rows.append(Row(f"{method}: after a sleep", slept, again == found and not told.returncode))
    return rows


if __name__ == "__main__":
    sys.exit(main())
