"""`python -m tests.gpu.images`: images in the transformers engine on a GPU.

--device cpu   try the script itself, with a small model
--only NAME    one of: texts, adapters, speed
--engines ...  of speed: transformers, vllm, and server, which is vLLM's own behind servekit
--ranks ...    how many GPUs of a replica, by tensor parallelism: `1`, `2` or both

- texts: small models in float32 say what the library's own `generate` says of the same images; over
  several GPUs also if a rank is killed in the middle of an answer.
- adapters: the same models with five adapters each, which change the decoder, the vision part or
  both, as LoRA, DoRA and IA3: all of them and the base, asked at once about images and without,
  say what plain PEFT and the library's `generate` say, twice.
- speed: a Qwen2-VL of 2.2e9 random parameters in bfloat16: time to the first token, and tokens/s,
  of images beside the library's `generate`; tokens/s of texts alone, and with images beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import concurrent.futures
import io
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from PIL import Image as Pillow

from servekit.engines.text.tokenizer import REPLACEMENT
from servekit.protocol.messages import ChatMessage, Media
from servekit.system import procfs
from tests.gpu.checks import Row
from tests.gpu.engines import entry, serving
from tests.integration.instance import Instance
from tests.unit.engines.harness import write_tiny_llama
from tests.unit.engines.seeing_model import (
    LIBRARY,
    configure_qwen2_vl,
    write_gemma3,
    write_qwen2_vl,
    write_qwen3_vl,
    write_seeing_model,
)
from tests.unit.engines.transformers.vision.media_adapters import MODES, AdapterFolders
from tests.unit.engines.transformers.vision.pictures import HISTORY, NONE, ONE, OTHER, Reference

SMALL = {
    "llava": write_seeing_model,
    "qwen2_vl": write_qwen2_vl,
    "qwen3_vl": write_qwen3_vl,
    "gemma3": write_gemma3,
}
TOKENS = 24
#: Tokens of an answer in the midst of which a rank is killed.
LONG = 600
SIDE, IMAGE_TOKENS = 448, 256
#: Of Qwen2-VL-2B-Instruct.
TEXT = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "vocab_size": 151936,
}
VISION = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4}
ENGINES: dict[str, dict[str, Any]] = {
    "transformers": {"engine": "transformers"},
    "vllm": {"engine": "vllm"},
    "server": {"engine": "vllm", "options": {"api": "server"}},
}
ANSWER, TEXTS_AT_ONCE = 128, 64


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer: its tokens, and when the last came, s after the request."""

    tokens: int
    last_s: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.images")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", choices=["texts", "adapters", "speed"])
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=["transformers"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1])
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="servekit-gpu-") as made:
        tiny = Path(made) / "tiny"
        tiny.mkdir()
        write_tiny_llama(tiny, spare_tokens=1)
        if args.only in (None, "texts"):
            rows += compare_texts(Path(made), tiny, args.device, args.ranks)
        if args.only in (None, "adapters"):
            rows += show(compare_adapters(Path(made) / "adapters", tiny, args.device))
        if args.only in (None, "speed"):
            folder = Path(made) / "large"
            rows += measure_speed(folder, tiny, args.device, args.engines, args.ranks)
    return 0 if all(row.ok is not False for row in rows) else 1


def show(rows: list[Row]) -> list[Row]:
    for row in rows:
        bar = {None: "", True: "ok", False: "FAILED"}[row.ok]
        print(f"{row.what:<64} {row.measured:<40} {bar}", flush=True)
    return rows


# ---------------------------------------------------------------- texts


def compare_texts(folder: Path, tiny: Path, device: str, ranks: list[int]) -> list[Row]:
    paths = {name: write(folder / name, tiny) for name, write in SMALL.items()}
    references = {name: Reference(path) for name, path in paths.items()}
    rows = []
    for count in ranks:
        # transformers 5.17 has no plan for Qwen3-VL.
        served = [name for name in SMALL if count == 1 or references[name].model.tp_plan]
        fields = {"dtype": "float32", "memory": "4GiB"} | over(count)
        models = [entry(name, "transformers", paths[name], device, **fields) for name in served]
        with serving(models) as instance:
            for name in served:
                found = compare_model(instance, name, references[name])
                rows += show(
                    [Row(f"{count} GPU, {one.what}", one.measured, one.ok) for one in found]
                )
            if count > 1:
                rows += show([kill_a_rank(instance, name) for name in ("qwen2_vl", "gemma3")])
    return rows


def compare_adapters(folder: Path, tiny: Path, device: str) -> list[Row]:
    rows = []
    for name, write in SMALL.items():
        made = AdapterFolders(write(folder / name, tiny), folder / f"{name}-adapters")
        adapters = [{"name": one, "path": str(made[one])} for one in MODES]
        asked = [(one, chat) for one in ("", *MODES) for chat in (ONE, OTHER, NONE, HISTORY)] * 2
        decode = made.reference.processor.tokenizer.decode
        due = [decode(made.due(*one, TOKENS), skip_special_tokens=True) for one in asked]
        model = entry("m", "transformers", made.folder, device, dtype="float32", memory="4GiB")
        with (
            serving([model | {"adapters": adapters}]) as up,
            concurrent.futures.ThreadPoolExecutor(len(asked) // 2) as pool,
        ):
            said = list(pool.map(lambda one: ask(up, one[0] or "m", one[1]), asked))
        same = sum(
            one.rstrip(REPLACEMENT) == other.rstrip(REPLACEMENT)
            for one, other in zip(said, due, strict=True)
        )
        pairs = zip(asked, due, strict=True)
        apart = len({text for (_, chat), text in pairs if chat is HISTORY})
        shown = f"{same} of {len(due)} the same, {apart} different ones of {1 + len(MODES)}"
        right = same == len(due) and apart == 1 + len(MODES)
        rows.append(Row(f"{name}: texts of {len(MODES)} adapters and the base", shown, right))
    return rows


def over(ranks: int) -> dict[str, Any]:
    """Fields of a model over some GPUs."""
    return {"gpus_per_replica": ranks, "parallel": "tensor"} if ranks > 1 else {}


def compare_model(instance: Instance, name: str, reference: Reference) -> Iterator[Row]:
    tokenizer = reference.processor.tokenizer
    for kind, messages in {"one": ONE, "other": OTHER, "three": HISTORY, "none": NONE}.items():
        _, ids = reference.ask(messages, TOKENS)
        text = tokenizer.decode(ids, skip_special_tokens=True).rstrip(REPLACEMENT)
        same = bool(text) and ask(instance, name, messages).rstrip(REPLACEMENT) == text
        yield Row(f"{name}, {kind}: the library's text", "same" if same else "other", same)


def kill_a_rank(instance: Instance, name: str) -> Row:
    """Kill a rank in the middle of an answer about images."""
    due = ask(instance, name, HISTORY, tokens=LONG)
    began, said, killed_s = time.perf_counter(), "", 0.0
    worker = instance.replica(f"{name}/0").pid
    for piece in stream(instance, name, HISTORY, tokens=LONG):
        said += piece
        if said and not killed_s:
            killed_s = time.perf_counter() - began
            os.kill(procfs.find_descendants(worker)[0].pid, signal.SIGKILL)
    instance.until_settled(within_s=400)
    new = instance.replica(f"{name}/0").pid != worker
    measured = f"the same {time.perf_counter() - began - killed_s:.1f} s later" if new else "unhurt"
    return Row(f"{name}: its answer outlives a rank", measured, said == due and new)


def ask(instance: Instance, model: str, messages: list[ChatMessage], tokens: int = TOKENS) -> str:
    return "".join(stream(instance, model, messages, tokens))


def stream(
    instance: Instance, model: str, messages: list[ChatMessage], tokens: int
) -> Iterator[str]:
    body = {
        "model": model,
        "messages": [{"role": one.role, "content": parts_of(one)} for one in messages],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    url = f"{instance.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=300) as coming:
        assert coming.status_code == 200, coming.read()
        for line in coming.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or ""


def parts_of(message: ChatMessage) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": part} if isinstance(part, str) else image_part(part)
        for part in message.parts
    ]


def image_part(image: Media) -> dict[str, Any]:
    data = base64.b64encode(image.data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{image.kind};base64,{data}"}}


# ---------------------------------------------------------------- speed


def measure_speed(
    folder: Path, tiny: Path, device: str, engines: list[str], ranks: list[int]
) -> list[Row]:
    write_large(folder, tiny, device)
    rows = show([library_alone(folder, device)])
    memory = "40GiB" if device == "cuda" else "2GiB"
    for engine in engines:
        for count in ranks:
            fields = {"memory": memory, "dtype": "bfloat16"} | ENGINES[engine] | over(count)
            named = engine if count == 1 else f"{engine}, {count} GPUs"
            rows += show(measure_engine(named, entry("m", path=folder, device=device, **fields)))
    return rows


def measure_engine(engine: str, model: dict[str, Any]) -> list[Row]:
    with serving([model]) as instance, client_of(instance) as send:
        for _ in ("warm-up", "measured"):
            first = send(["image"], tokens=1)
            alone = send(["image"])
            eight = send(["image"] * 8)
            texts = send(["text"] * TEXTS_AT_ONCE)
            mixed = send(["text"] * TEXTS_AT_ONCE + ["image"] * 2)
    beside, images = mixed[:TEXTS_AT_ONCE], mixed[TEXTS_AT_ONCE:]
    return [
        Row(f"{engine}: one image", describe(alone, first_s=first[0].last_s)),
        Row(f"{engine}: eight images at once", describe(eight)),
        Row(f"{engine}: {TEXTS_AT_ONCE} texts", describe(texts)),
        Row(f"{engine}: {TEXTS_AT_ONCE} texts beside two images", describe(beside)),
        Row(f"{engine}: the two images beside them", describe(images)),
    ]


def describe(answers: list[Answer], first_s: float | None = None) -> str:
    """Tokens/s of all, and if known the time to the first token."""
    longest = max(one.last_s for one in answers)
    rate = sum(one.tokens for one in answers) / longest
    first = "" if first_s is None else f", TTFT {first_s * 1000:.0f} ms"
    return f"{rate:.0f} tokens/s{first}, last {longest:.2f} s"


def write_large(folder: Path, tiny: Path, device: str) -> None:
    folder.mkdir()
    sizes = {"text": TEXT, "vision": VISION} if device == "cuda" else {}
    config = configure_qwen2_vl(folder, tiny, most_tokens=IMAGE_TOKENS, **sizes)
    torch.manual_seed(1)
    with torch.device(device):
        model = LIBRARY.Qwen2VLForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(folder)


def library_alone(folder: Path, device: str) -> Row:
    """The library's `generate`, with its defaults, in this process."""
    reference = Reference(folder)
    reference.model.to(device, torch.bfloat16)
    picture = Pillow.open(io.BytesIO(make_picture(0).data))
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "What is this?"}]
    asked = reference.processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    ).to(device)
    took = []
    for tokens in (1, ANSWER, 1, ANSWER):
        started = time.perf_counter()
        reference.model.generate(
            **asked, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
        took.append(time.perf_counter() - started)
    del reference
    torch.cuda.empty_cache()
    first_s, whole_s = took[-2:]
    shown = describe([Answer(ANSWER, whole_s)], first_s)
    return Row("one image by the library's generate, image processed before", shown)


def make_picture(number: int) -> Media:
    picture = Pillow.effect_noise((SIDE, SIDE), 20 + number % 60).convert("RGB")
    file = io.BytesIO()
    picture.save(file, "JPEG")
    return Media(file.getvalue(), "image/jpeg")


@contextmanager
def client_of(instance: Instance) -> Iterator[Any]:
    """A function that sends a chat for each of its kinds at once, and returns the answers."""
    url, count = f"{instance.url}/v1/chat/completions", iter(range(10**6))

    def make_body(kind: str, tokens: int) -> dict[str, Any]:
        number = next(count)
        parts: list[dict[str, Any]] = [{"type": "text", "text": f"{number}. What is this? " * 12}]
        if kind == "image":
            parts.insert(0, image_part(make_picture(number)))
        return {
            "model": "m",
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def read(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
        started = time.perf_counter()
        last, tokens = 0.0, 0
        async with client.stream("POST", url, json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                last = time.perf_counter() - started
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        assert tokens == body["max_tokens"], tokens
        return Answer(tokens, last)

    async def send_all(bodies: list[dict[str, Any]]) -> list[Answer]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=300, limits=limits) as client:
            return await asyncio.gather(*(read(client, body) for body in bodies))

    def send(kinds: list[str], tokens: int = ANSWER) -> list[Answer]:
        return asyncio.run(send_all([make_body(kind, tokens) for kind in kinds]))

    yield send


if __name__ == "__main__":
    sys.exit(main())
