"""`python -m tests.bench.llamacpp_images`: a stream beside an image, in llama.cpp on the CPU.

--side PIXELS    of the image; by default 448
--threads        of the model, and of the projector beside it

SmolLM2-135M, with a projector of random weights: a vision transformer of 12 layers, 768 numbers
wide. A stream runs while an image is read, in this engine and in llama.cpp's own server, which has
one thread for both.
"""

from __future__ import annotations

import argparse
import base64
import json
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np

from servekit.engines.api.base import StepOutput
from servekit.engines.llamacpp.engine import LlamaCppEngine
from servekit.engines.model_files.source import resolve_file
from tests.llama_server import run_server
from tests.polling import poll
from tests.unit.engines.harness import Seeing, make_spec
from tests.unit.engines.origins import SMOLLM2
from tests.unit.engines.transformers.vision.pictures import paint, say

WIDTH, INNER, LAYERS, HEADS, TEXT = 768, 3072, 12, 12, 576
#: Tokens of the stream, which ends with the image, and how many it has before that comes.
TOKENS, BEFORE = 6000, 20
STORY = "Tell a long story."


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.llamacpp_images")
    parser.add_argument("--side", type=int, default=448)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        projector = write_projector(Path(folder) / "mmproj.gguf")
        print(f"| llamacpp | {_of_engine(projector, args.side, args.threads)} |", flush=True)
        print(f"| llama.cpp's server | {_of_server(projector, args.side)} |")


def write_projector(path: Path) -> Path:
    """Write a projector of random weights, as Qwen2-VL's are laid out."""
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.MMPROJ])
    writer.add_clip_projector_type(gguf.VisionProjectorType.QWEN2VL)
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(TEXT)
    writer.add_vision_image_size(560)
    writer.add_vision_patch_size(14)
    writer.add_vision_embedding_length(WIDTH)
    writer.add_vision_feed_forward_length(INNER)
    writer.add_vision_block_count(LAYERS)
    writer.add_vision_head_count(HEADS)
    writer.add_vision_image_mean([0.5] * 3)
    writer.add_vision_image_std([0.5] * 3)
    writer.add_vision_attention_layernorm_eps(1e-6)
    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        weights = (random.standard_normal(shape) * 0.03).astype(np.float32)
        whole = len(shape) == 2
        writer.add_tensor(f"{name}.weight", weights.astype(np.float16) if whole else weights + 1)
        writer.add_tensor(f"{name}.bias", np.zeros(shape[0], np.float32))

    for part in ("v.patch_embd.weight", "v.patch_embd.weight.1"):
        values = random.standard_normal((WIDTH, 3, 14, 14)) * 0.03
        writer.add_tensor(part, values.astype(np.float32))
    for block in (f"v.blk.{n}." for n in range(LAYERS)):
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            add(block + name, WIDTH, WIDTH)
        for name in ("ln1", "ln2"):
            add(block + name, WIDTH)
        add(f"{block}ffn_up", INNER, WIDTH)
        add(f"{block}ffn_down", WIDTH, INNER)
    add("v.post_ln", WIDTH)
    add("mm.0", 4 * WIDTH, 4 * WIDTH)
    add("mm.2", TEXT, 4 * WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class _Timed(Seeing):
    """An engine that notes when a job's tokens come."""

    def _emit(self, outputs: Sequence[StepOutput]) -> None:
        now = time.monotonic()
        for output in outputs:
            self.__dict__.setdefault("times", {}).setdefault(output.id, []).append(now)
        super()._emit(outputs)


def _of_engine(projector: Path, side: int, threads: int) -> str:
    options = {"threads": threads, "mmproj": str(projector)}
    engine = _Timed(make_spec(SMOLLM2, engine="llamacpp", options=options), LlamaCppEngine)
    try:
        engine.answer([say("user", STORY)])
        stream = engine.ask([say("user", STORY)], max_tokens=TOKENS)
        engine.until(lambda: len(engine.outputs.get(stream, [])) > BEFORE, "it streams")
        began = time.monotonic()
        engine.answer([say("user", paint("blue", (side, side)), "What?")], max_tokens=1)
        took_s = time.monotonic() - began
        engine.engine.cancel(stream)
        times: dict[int, list[float]] = engine.__dict__["times"]
        return _tell(took_s, times[stream])
    finally:
        engine.close()


def _of_server(projector: Path, side: int) -> str:
    model = str(resolve_file(SMOLLM2, None, lambda progress: None))
    data = base64.b64encode(paint("blue", (side, side)).data).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    times: list[float] = []
    seen = threading.Event()
    with run_server(model, "f16", str(projector)) as url:

        def body(content: Any, tokens: int) -> dict[str, Any]:
            turns = [{"role": "user", "content": content}]
            return {"messages": turns, "max_tokens": tokens, "ignore_eos": True}

        def listen() -> None:
            asked = body(STORY, TOKENS) | {"stream": True}
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked, timeout=300) as it:
                for line in it.iter_lines():
                    if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                        times.append(time.monotonic())
                    if seen.is_set():
                        return

        httpx.post(f"{url}/v1/chat/completions", json=body(STORY, 4), timeout=60)
        stream = threading.Thread(target=listen)
        stream.start()
        poll("it streams", lambda: len(times) > BEFORE)
        began = time.monotonic()
        asked = body([image, {"type": "text", "text": "What?"}], 1)
        httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=300)
        took_s = time.monotonic() - began
        seen.set()
        stream.join()
    return _tell(took_s, times)


def _tell(took_s: float, times: list[float]) -> str:
    gaps = np.diff(times) * 1e3
    return (
        f"image {took_s:.1f} s | stream: median {np.median(gaps):.0f} ms a token, longest pause"
        f" {gaps.max():.0f} ms"
    )


if __name__ == "__main__":
    main()
