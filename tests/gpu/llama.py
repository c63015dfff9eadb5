"""`python -m tests.gpu.llama --model GGUF`: llama.cpp on a GPU, against itself on the CPU.

--model PATH     a .gguf file, or any other `path` that names one; for `ways`
--only NAME      one of: ways, images, experts, speculation
--library DIR    llama.cpp's own libraries, built for CUDA; by default an installed package
--device cpu     try the script itself, all of it on the CPU
--split WAYS     over two GPUs; not every build of llama.cpp can split by rows
--plain PIN      (by itself) load the model as a program does that pins itself too late

One instance has every way of running it, side by side, each within its claim: `host` on the CPU,
`whole` on the last GPU, `half` of its layers on the first, and `layer`, split over two.
Beside it all a small model that knows texts by heart, in float32: on each of those ways it has to
recite them. Of a quantised model, whose activations are rounded to 8 bits, it is told how alike the
greedy texts are, and how far apart two tokens lie where they part.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from servekit.engines.llamacpp.memory_fit import read_parts
from servekit.engines.model_files.source import resolve_file
from servekit.system.gpu.gpus import find_gpus, gpu_memory_by_pid
from servekit.system.procfs import all_processes
from tests.gpu import images, reciting
from tests.gpu.checks import MIB, Row, gpu_count
from tests.gpu.engines import PROMPTS, entry, held_by_group, recited, serving
from tests.gpu.images import SIDE
from tests.gpu.reciting import write_gguf, write_reciter
from tests.integration.instance import Instance
from tests.polling import poll
from tests.unit.engines.harness import make_spec, write_tiny_llama
from tests.unit.engines.llamacpp.seeing_gguf import convert_model
from tests.unit.engines.origins import write_tiny_gguf
from tests.unit.engines.seeing_model import (
    LIBRARY,
    configure_qwen2_vl,
    write_qwen2_vl,
    write_qwen3_vl,
)
from tests.unit.engines.transformers.vision.pictures import HISTORY, NONE, ONE, OTHER

GIB = 2**30
#: Of each GPU, what one way of running may take; on a CPU nothing is claimed. It is less than the
#: cache of all slots would take, of which there is then as much as fits.
CLAIM = 2 * GIB
CONTEXT = 8192
TOKENS = 48
CLIENTS = (1, 8, 16)
#: Of a layer: of a model that recites, and of a random one for memory.
EXPERTS = (8, 256)
#: Of the model for which tokens are proposed.
LAYERS = 24


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.llama")
    parser.add_argument("--model")
    parser.add_argument("--only", choices=CHECKS)
    parser.add_argument("--library")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--split", nargs="*", default=["layer"], choices=["layer", "row"])
    parser.add_argument("--plain")
    args = parser.parse_args()
    if args.model:
        args.model = str(resolve_file(args.model, None, lambda progress: None))
    elif args.only in (None, "ways"):
        parser.error("--model is missing")
    if args.plain is not None:
        print(json.dumps(plain(args)))
        return 0
    failed = False
    checks = [args.only] if args.only else CHECKS
    for row in itertools.chain.from_iterable(CHECKS[name](args) for name in checks):
        mark = {True: "yes", False: "NO", None: ""}[row.ok]
        print(f"| {row.what:<60} | {row.measured:<64} | {mark:<3} |", flush=True)
        failed |= row.ok is False
    return int(failed)


def run_ways(args: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="servekit-model-") as folder:
        learnt = write_reciter(Path(folder) / "reciter", args.device)
        recites = str(write_gguf(learnt, Path(folder) / "reciter.gguf"))
        yield from rows_of(args, ways(args), ways(args, recites, "recites-"))


def rows_of(
    args: argparse.Namespace, models: list[dict[str, Any]], reciting: list[dict[str, Any]]
) -> Iterator[Row]:
    names = [model["name"] for model in models]
    began = time.monotonic()
    with serving([*models, *reciting]) as instance:
        yield Row("servekit up, until all are ready", f"{time.monotonic() - began:.1f} s")
        for name in names:
            info = instance.model(name).info
            yield Row(f"{name}: how", info.detail if info else "", info is not None)
        on_host = said(instance, "host")
        for name in names[1:]:
            yield same(name, on_host, said(instance, name))
        for model in reciting:
            yield recited(model["name"], instance, model["name"])
        for name in ("host", "whole"):
            yield rates(instance, name, TOKENS if name == "host" else 4 * TOKENS)
        for name in names:
            yield held(instance, name, args.device)
        yield from ended(instance)
    if args.device == "cuda":
        yield too_late(args)


def ways(args: argparse.Namespace, path: str = "", prefix: str = "") -> list[dict[str, Any]]:
    """A model of the file for each way of running one."""
    path = path or args.model
    count = gpu_count() if args.device == "cuda" else 0
    model = partial(make_entry, args, Path(path), prefix)

    half = len(layers(path)) // 2
    first: dict[str, Any] = {"gpus": [0]} if count else {}
    last: dict[str, Any] = {"gpus": [count - 1]} if count else {}
    made = [model("host", "cpu", {}), model("whole", args.device, last)]
    made.append(model("half", args.device, first, gpu_layers=half))
    if count > 1:
        both = {"gpus": [0, 1], "gpus_per_replica": 2}
        made += [model(split, "cuda", both, split=split) for split in args.split]
    return made


def make_entry(
    args: argparse.Namespace,
    path: Path,
    prefix: str,
    name: str,
    device: str,
    fields: dict[str, Any],
    **options: Any,
) -> dict[str, Any]:
    claim = {"memory": f"{CLAIM}B"} if device == "cuda" else {}
    own = {"library": args.library} if args.library else {}
    options = {"slots": max(CLIENTS)} | own | options
    known: dict[str, Any] = {"replicas": 1, "max_context": CONTEXT, "options": options}
    return entry(prefix + name, "llamacpp", path, device, **(known | claim | fields))


def layers(path: str) -> range:
    header = read_parts(Path(path))[0]
    return range(int(str(header.metadata[f"{header.architecture}.block_count"])))


# ---------------------------------------------------------------- what they say, and how fast


def ask(instance: Instance, model: str, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "temperature": 0, "ignore_eos": True} | fields
    answer = httpx.post(f"{instance.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def said(instance: Instance, model: str) -> list[dict[str, Any]]:
    """Of each prompt, all asked at once: its tokens, and the best few's log probabilities."""
    fields = {"max_tokens": TOKENS, "logprobs": 5}
    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = pool.map(lambda prompt: ask(instance, model, prompt, **fields), PROMPTS)
        return [one["choices"][0]["logprobs"] for one in found]


def same(name: str, wanted: list[dict[str, Any]], found: list[dict[str, Any]]) -> Row:
    """How many texts are those of the CPU, and what the first says of where others part."""
    parted = [gap for one, other in zip(wanted, found, strict=True) if (gap := _gap(one, other))]
    shown = f"{len(wanted) - len(parted)} of {len(wanted)} texts the same"
    shown += "".join(f"; at {at} {size:.2f} apart" for at, size in parted)
    return Row(f"{name}: greedy text, against the CPU's", shown)


def _gap(one: dict[str, Any], other: dict[str, Any]) -> tuple[int, float] | None:
    """Where two texts part, and how far apart the two tokens were there to the first."""
    for at, (mine, theirs) in enumerate(zip(one["tokens"], other["tokens"], strict=True)):
        if mine != theirs:
            best: dict[str, float] = one["top_logprobs"][at]
            return at, max(best.values()) - best.get(theirs, -float("inf"))
    return None


def rates(instance: Instance, model: str, tokens: int) -> Row:
    """Tokens/s by the number of clients, each with a request of its own at a time."""
    found = []
    for clients in CLIENTS:
        prompts = [f"{clients}.{n} {PROMPTS[n % len(PROMPTS)]}" for n in range(clients)]
        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            list(pool.map(lambda one: ask(instance, model, one, max_tokens=4), prompts))
            began = time.monotonic()
            list(pool.map(lambda one: ask(instance, model, one, max_tokens=tokens), prompts))
            found.append(clients * tokens / (time.monotonic() - began))
    what = f"{model}: tokens/s at {', '.join(map(str, CLIENTS))} clients"
    return Row(what, ", ".join(f"{rate:,.0f}" for rate in found))


# ---------------------------------------------------------------- images


def run_images(args: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="servekit-model-") as made:
        folder, tiny = Path(made), Path(made) / "tiny"
        tiny.mkdir()
        write_tiny_llama(tiny)
        small = {"qwen2_vl": write_qwen2_vl, "qwen3_vl": write_qwen3_vl}
        folders = {name: write(folder / name, tiny) for name, write in small.items()}
        folders["large"] = _write_seeing(folder / "large", tiny)
        models = []
        for name, one in folders.items():
            path, projector = convert_model(one, folder / f"{name}-gguf")
            for where, device in (("host", "cpu"), ("whole", args.device)):
                more = {"mmproj": str(projector)}
                models.append(make_entry(args, path, f"{name}-", where, device, {}, **more))
        with serving(models) as instance:
            for name in small:
                yield _compare_images(instance, name)
            for where in ("host", "whole"):
                took_ms = 1e3 * _time_image(instance, f"large-{where}")
                yield Row(f"{where}: an image of {SIDE} x {SIDE} read", f"{took_ms:.0f} ms")
            yield held(instance, "large-whole", args.device)


def _write_seeing(folder: Path, tiny: Path) -> Path:
    """Write a Qwen2-VL with eyes of 0.2e9 random parameters in float32."""
    vision = {"depth": 16, "embed_dim": 1024, "num_heads": 16, "mlp_ratio": 4}
    text = {"max_position_embeddings": CONTEXT}
    config = configure_qwen2_vl(folder, tiny, most_tokens=256, text=text, vision=vision)
    LIBRARY.Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    return folder


def _compare_images(instance: Instance, name: str) -> Row:
    chats = (ONE, OTHER, NONE, HISTORY)
    said = [
        [images.ask(instance, f"{name}-{where}", chat) for chat in chats]
        for where in ("host", "whole")
    ]
    same = sum(one == other for one, other in zip(*said, strict=True))
    differing = len(set(said[0]))
    shown = f"{same} of {len(chats)} as on the CPU, {differing} different ones"
    return Row(f"{name}: texts with images", shown, same == differing == len(chats))


def _time_image(instance: Instance, model: str) -> float:
    """Return the time to the answer of one token about a new image, s: median of three."""
    took_s = []
    for number in range(4):
        content = [images.image_part(images.make_picture(number)), {"type": "text", "text": "?"}]
        body = {"model": model, "messages": [{"role": "user", "content": content}]}
        began = time.monotonic()
        url = f"{instance.url}/v1/chat/completions"
        answer = httpx.post(url, json=body | {"max_tokens": 1}, timeout=300)
        assert answer.status_code == 200, answer.text
        took_s.append(time.monotonic() - began)
    return statistics.median(took_s[1:])  # the first warms up


# ---------------------------------------------------------------- experts


def run_experts(args: argparse.Namespace) -> Iterator[Row]:
    """Recited texts with few experts, and memory with many."""
    few, many = EXPERTS
    with tempfile.TemporaryDirectory(prefix="servekit-model-") as made:
        learnt = write_reciter(Path(made) / "reciter", args.device, few)
        recites = write_gguf(learnt, Path(made) / "reciter.gguf")
        large = write_tiny_gguf(Path(made) / "large.gguf", float32=True, experts=many)
        models = []
        for count, path in ((few, recites), (many, large)):
            model = partial(make_entry, args, path, f"{count}-")
            models.append(model("whole", args.device, {"max_context": 256}))
            models.append(model("experts", args.device, {"max_context": 256}, cpu_moe_layers=99))
        models.append(make_entry(args, recites, f"{few}-", "host", "cpu", {"max_context": 256}))
        with serving(models) as instance:
            for how in ("host", "whole", "experts"):
                yield recited(f"{few} experts, {how}", instance, f"{few}-{how}")
            sizes = []
            for how in ("whole", "experts"):
                [replica] = instance.model(f"{many}-{how}").replicas
                sizes.append(sum(held_by_group(replica.pid).values()))
            size = many * 2 * 3 * 96 * 64 * 4  # of 2 layers
            shown = f"{sizes[0] / MIB:.0f} and {sizes[1] / MIB:.0f} MiB, experts {size // MIB} MiB"
            right = sizes[0] - sizes[1] > 0.9 * size or args.device == "cpu"
            yield Row(f"{many} experts on the GPU and on the CPU: held on the GPU", shown, right)


# ---------------------------------------------------------------- speculative decoding


def run_speculation(args: argparse.Namespace) -> Iterator[Row]:
    """Texts known by heart, with a draft model that knows them too and with one that does not.

    The model is as slow as one of many layers, so that proposals pay on a GPU.
    """
    with tempfile.TemporaryDirectory(prefix="servekit-model-") as made:
        folder, layers = Path(made), LAYERS if args.device == "cuda" else 4
        path = write_gguf(
            write_reciter(folder / "m", args.device, layers=layers), folder / "m.gguf"
        )
        learnt = write_reciter(folder / "draft", args.device)
        knows = write_gguf(learnt, folder / "knows.gguf")
        _spoil_weights(learnt / "model.safetensors")
        spoilt = write_gguf(learnt, folder / "spoilt.gguf")
        drafts = {"knows": knows, "spoilt": spoilt}
        ways: dict[str, dict[str, Any]] = {"plain": {}}
        ways["ngram"] = {"speculative": {"method": "ngram"}}
        for name, draft in drafts.items():
            ways[name] = {"speculative": {"method": "draft", "model": str(draft)}}
        fields = {"max_context": 512}
        models = [
            make_entry(args, path, "", name, args.device, fields, **ways[name]) for name in ways
        ]
        with serving(models) as instance:
            for name in ways:
                yield recited(f"proposals: {name}", instance, name)
                rate = _time_texts(instance, name)
                proposed, accepted = _count_proposals(instance, name)
                shown = (
                    f"{accepted:.0f} of {proposed:.0f} accepted; one by one {rate:,.0f} tokens/s"
                )
                made_some = proposed > 0 or name not in drafts or args.device == "cpu"
                yield Row(f"proposals: {name}", shown, made_some)


def _time_texts(instance: Instance, model: str) -> float:
    """Return the tokens/s of all texts, asked one by one."""
    began, tokens = time.monotonic(), 0
    for begun in reciting.prompts():
        body = {"model": model, "prompt": begun, "max_tokens": 200, "temperature": 0}
        answer = httpx.post(f"{instance.url}/v1/completions", json=body, timeout=120).json()
        tokens += answer["usage"]["completion_tokens"]
    return tokens / (time.monotonic() - began)


def _spoil_weights(file: Path) -> None:
    """Have the model say other texts now and then."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.manual_seed(1)
    found = load_file(file)
    for name in [name for name in found if "down_proj" in name]:
        found[name] += torch.randn_like(found[name]) * 2 * found[name].std()
    save_file(found, file, metadata={"format": "pt"})


def _count_proposals(instance: Instance, model: str) -> tuple[float, float]:
    """Return how many tokens were proposed, and how many of them accepted."""
    found = [0.0, 0.0]
    for line in httpx.get(f"{instance.url}/metrics").text.splitlines():
        for at, kind in enumerate(("draft", "accepted")):
            name = f"servekit_spec_decode_num_{kind}_tokens_total{{"
            if line.startswith(name) and f'"{model}' in line:
                found[at] += float(line.rsplit(" ", 1)[1])
    return found[0], found[1]


# ---------------------------------------------------------------- what they hold


def held(instance: Instance, name: str, device: str) -> Row:
    """After load: within the claim on each of its GPUs, and nothing on any other."""
    [replica] = instance.model(name).replicas
    if device == "cpu":
        return Row(f"{name}: resident", f"{replica.rss_bytes // MIB} MiB", replica.rss_bytes > 0)
    found = held_by_group(replica.pid)
    own = [found.get(uuid, 0) for uuid in replica.gpus]
    stray = sum(found.values()) - sum(own)
    shown = ", ".join(f"GPU {_index(uuid)}: {_gib(found.get(uuid, 0))}" for uuid in replica.gpus)
    shown = f"{shown or 'none'}; {stray} B elsewhere"
    right = all(0 < size <= CLAIM for size in own) and not stray
    return Row(f"{name}: held of {_gib(CLAIM)} of each GPU, after load", shown, right)


def _index(uuid: str) -> int:
    return next(gpu.index for gpu in find_gpus() if gpu.uuid == uuid)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def ended(instance: Instance) -> Iterator[Row]:
    """SIGKILL of the supervisor."""
    groups = {r.pid for m in instance.status().models for r in m.replicas}
    pids = {process.pid for process in all_processes() if process.group in groups}
    instance.signal(signal.SIGKILL)
    began = time.monotonic()

    def gone() -> bool:
        return not instance.survivors() and not pids & gpu_memory_by_pid().keys()

    poll("nothing is left", gone, 20)
    took_s = time.monotonic() - began
    what = f"kill -9 of the supervisor: {len(pids)} workers and their memory gone"
    yield Row(what, f"{took_s:.2f} s", took_s < 2)


# ---------------------------------------------------------------- the plain way


def too_late(args: argparse.Namespace) -> Row:
    """The known case, for comparison: torch is asked for CUDA, and the pin is set after that."""
    pin = str(gpu_count() - 1) if gpu_count() > 1 else ""
    command = [sys.executable, "-m", "tests.gpu.llama", "--model", args.model, "--plain", pin]
    command += ["--library", args.library] if args.library else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    shown = ", ".join(f"GPU {_index(uuid)}: {_gib(size)}" for uuid, size in found.items())
    return Row(f"a plain program: torch asked, CUDA_VISIBLE_DEVICES={pin or '(none)'}", shown)


def plain(args: argparse.Namespace) -> dict[str, int]:
    """Bytes by GPU."""
    import torch

    from servekit.engines.llamacpp.engine import LlamaCppEngine

    assert torch.cuda.is_available()
    os.environ["CUDA_VISIBLE_DEVICES"] = args.plain
    options = {"library": args.library} if args.library else {}
    spec = make_spec(args.model, device="cuda", gpus=8, max_context=CONTEXT, options=options)
    engine = LlamaCppEngine(spec)
    engine.load(lambda progress: None)
    found = dict(gpu_memory_by_pid().get(os.getpid(), {}))
    engine.close()
    return found


CHECKS = {
    "ways": run_ways,
    "images": run_images,
    "experts": run_experts,
    "speculation": run_speculation,
}


if __name__ == "__main__":
    sys.exit(main())
