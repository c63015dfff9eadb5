"""`python -m tests.fuzz.operations`: an operator who does anything at any time, beside clients.

--seed 1        of the first run; each later run has the next one
--runs 1        instances, one after another
--steps 60      acts of the operator in each
--clients 6     that stream completions, or have responses made in the background, all the while
--gpus 0        made-up GPUs of 100 GiB; 0: all workers are on the CPU
--keep          stay, and print the folder, when something was wrong

The operator edits the file and reloads it, twice at once or in the middle of a change; switches
profiles; loads, sleeps, wakes, restarts; workers are killed or stopped below their supervisor. A
model that was in the file, and in the profile in force, all the time that a request took must
answer it, whole. What workers claim together never exceeds the memory. At the end all that the
file says must be so, also after the supervisor is killed in the middle of a reload and started
again, and nothing is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from servekit.errors import ServekitError
from tests.integration.instance import Instance, echo
from tests.integration.made_up_gpus import MadeUpGpus, on_gpu
from tests.polling import poll

#: In the file from the beginning to the end.
STABLE = ("a", "b")
COMING = ("c", "d", "e")
ADAPTERS = ("x", "y")
#: What a worker of each claims: percent of the machine's memory, or GiB of a made-up GPU.
CLAIMS = {"a": 8, "b": 12, "c": 25, "d": 45, "e": 30}
#: The adapter that an operator loads while its model runs.
ADDED = "z"
#: Words of the log that a fault of servekit's leaves.
FAULTS = (
    "Traceback",
    "tick_failed",
    "supervision_failed",
    "model_change_failed",
    "never retrieved",
)
SETTLED_WITHIN_S = 90.0
EVERY = (
    *STABLE,
    *COMING,
    *(f"{one}-{adapter}" for one in (*STABLE, *COMING) for adapter in (*ADAPTERS, ADDED)),
)
#: What is said of a file whose models do not fit together.
TOO_LARGE = ("too much", "do not fit", "does not fit", "no room", "have room", "has room")


@dataclass
class Asked:
    """A request: its model, when it ran, and what came of it."""

    model: str
    began: float
    ended: float = 0.0
    problem: str = ""
    is_cut: bool = False  # its connection


@dataclass
class World:
    """The file as it stands, and what was done to whom."""

    rng: random.Random
    instance: Instance
    folder: Path
    file: dict[str, Any]
    models: dict[str, dict[str, Any]]
    gpus: int = 0
    is_slim: bool = False  # the profile of the stable models and one more is in force
    crowded: list[str] = field(default_factory=list)  # moments with too large claims
    lacked: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    absent_since: dict[str, float] = field(default_factory=dict)
    added: set[str] = field(default_factory=set)  # adapters that an operator has loaded
    deaths: list[tuple[str, float]] = field(default_factory=list)
    acts: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    asked: list[Asked] = field(default_factory=list)

    def names(self) -> list[str]:
        served = self.served
        adapters = [one["name"] for name in served for one in self.models[name]["adapters"]]
        return [*served, *adapters, *self.added]

    @property
    def slim(self) -> list[str]:
        return [*STABLE, *[name for name in COMING if name in self.models][:1]]

    @property
    def served(self) -> list[str]:
        """The models of the profile in force."""
        return [name for name in self.models if not self.is_slim or name in self.slim]

    def leave(self) -> None:
        """Note what may be gone from now on."""
        there = self.names()
        for name in EVERY:
            if name not in there:
                self.remove(name)

    def come_back(self) -> None:
        """Note that what the file has is there, once a reload or a switch has taken it."""
        for name in self.names():
            if name in self.absent_since:
                self.add(name, time.monotonic() + 30)  # it loads

    def write(self) -> None:
        self.leave()
        self.file["models"] = list(self.models.values())
        self.file["profiles"] = {"slim": self.slim}
        path = self.folder / "servekit.yaml"
        path.with_suffix(".new").write_text(json.dumps(self.file, indent=1))
        path.with_suffix(".new").replace(path)

    def remove(self, name: str) -> None:
        self.absent_since.setdefault(name, time.monotonic())

    def add(self, name: str, settled: float) -> None:
        since = self.absent_since.pop(name, None)
        if since is not None:
            self.lacked.setdefault(name, []).append((since, settled))

    def was_there(self, asked: Asked) -> bool:
        """Whether the file had the model from the request's first moment to its last."""
        since = self.absent_since.get(asked.model)
        if since is not None and since <= asked.ended:
            return False
        gaps = self.lacked.get(asked.model, [])
        return not any(begin <= asked.ended and asked.began <= end for begin, end in gaps)

    def deaths_during(self, asked: Asked) -> list[str]:
        return [name for name, at in self.deaths if asked.began - 30 <= at <= asked.ended]


def ask(world: World, url: str, rng: random.Random) -> None:
    """Stream one completion and check each of its characters."""
    name = rng.choice([*STABLE, *STABLE, *world.names()])
    prompt = "".join(rng.choices("abcdefgh ", k=rng.randint(3, 30))) + "."
    tokens = rng.choice([1, 5, 40, 150])
    asked = Asked(name, time.monotonic())
    body = {"model": name, "prompt": prompt, "max_tokens": tokens, "stream": True}
    text, finish = "", ""
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
            if answer.status_code != 200:
                asked.problem = f"{answer.status_code} {answer.read().decode()[:300]}"
            else:
                for line in answer.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        asked.problem = f"in the stream: {event['error']}"
                        break
                    for choice in event["choices"]:
                        text += choice["text"]
                        finish = choice["finish_reason"] or finish
    except httpx.HTTPError as error:
        asked.problem, asked.is_cut = repr(error), isinstance(error, httpx.TransportError)
    asked.ended = time.monotonic()
    expected = (prompt * tokens)[:tokens]
    if not asked.problem and (text.lower() != expected or finish != "length"):
        asked.problem = f"{text!r} ({finish}) instead of {expected!r}"
    world.asked.append(asked)


def ask_later(world: World, url: str, rng: random.Random) -> None:
    """Have a response made in the background, and read it once it is done."""
    name = rng.choice([*STABLE, *world.models])
    prompt = "".join(rng.choices("abcdefgh ", k=rng.randint(3, 30))) + "."
    tokens = rng.choice([5, 60])
    asked = Asked(name, time.monotonic())
    body = {"model": name, "input": prompt, "max_output_tokens": tokens, "background": True}
    try:
        answer = httpx.post(f"{url}/v1/responses", json=body, timeout=60)
    except httpx.TransportError:
        return  # whether it was taken is not known
    if answer.status_code == 200:
        found = wait_for_response(url, answer.json()["id"])
        output = found.get("output", ())
        texts = [part["text"] for one in output for part in one["content"]]
        if texts != [(prompt * tokens)[:tokens]]:
            asked.problem = f"in the background: {texts or found}"
    else:
        asked.problem = f"{answer.status_code} {answer.text[:300]}"
    asked.ended = time.monotonic()
    world.asked.append(asked)


def wait_for_response(url: str, id: str) -> dict[str, Any]:
    def find() -> dict[str, Any]:
        with contextlib.suppress(httpx.TransportError):
            found: dict[str, Any] = httpx.get(f"{url}/v1/responses/{id}", timeout=60).json()
            if found.get("status") not in ("queued", "in_progress"):
                return found
        return {}

    try:
        return poll("the response is there", find, 120)
    except AssertionError:
        return {"status": "not done after 120 s", "error": None, "output": []}


def run_client(world: World, url: str, seed: int) -> None:
    rng = random.Random(seed)
    while not world.over.is_set():
        rng.choices([ask, ask_later], [5, 1])[0](world, url, rng)
        world.over.wait(rng.choice([0, 0, 0.05, 0.3]))


# ---------------------------------------------------------------- the operator


def make_echo(world: World, name: str, **options: Any) -> dict[str, Any]:
    if not world.gpus:
        made = {**echo(name, **options), "memory": f"{CLAIMS[name]}%"}
    else:
        made = on_gpu(name, f"{CLAIMS[name]}GiB", CLAIMS[name] - 1, **options)
    return made | {"load_timeout_s": 20}  # one may be stopped while it loads


def make_model(world: World, name: str) -> dict[str, Any]:
    rng = world.rng
    model = make_echo(world, name, step_s=rng.choice([0, 0.01]), load_s=rng.choice([0, 0.3, 1.0]))
    if world.gpus and rng.random() < 0.3:
        model["gpus"] = [rng.randrange(world.gpus)]
    if rng.random() < 0.2:
        model["standby"] = True
    model |= {"replicas": rng.choice([1, 2]), "stall_timeout_s": 2, "adapters": []}
    if rng.random() < 0.5:
        model |= {"load": "on_demand", "replicas": 1}
        if rng.random() < 0.5:
            model["idle_unload_s"] = 1.0
        if rng.random() < 0.3:
            model["idle_sleep_s"] = 0.5
        if rng.random() < 0.4:
            model |= {"replicas": {"min": 0, "max": 3}, "scale": {"wait_s": 0.2, "down_s": 1.0}}
            model["options"]["slots"] = 2
    elif rng.random() < 0.3:
        model |= {"replicas": {"min": 1, "max": 3}, "scale": {"wait_s": 0.2, "down_s": 1.0}}
        model["options"]["slots"] = 2
    return model


def edit_file(world: World) -> str:
    """Change the file in one or two places."""
    rng = world.rng
    told = []
    for _ in range(rng.choice([1, 1, 2])):
        name = rng.choice([*STABLE, *COMING])
        there = name in world.models
        if name in COMING and (not there or rng.random() < 0.4):
            if there:
                for one in (name, *(a["name"] for a in world.models[name]["adapters"])):
                    world.remove(one)
                del world.models[name]
            else:
                world.models[name] = make_model(world, name)
            told.append(f"{'-' if there else '+'}{name}")
            continue
        model = world.models[name]
        match rng.choice(["options", "replicas", "adapter", "order", "whole"]):
            case "options":
                model["options"] = {
                    "step_s": rng.choice([0, 0.01, 0.02]),
                    "load_s": rng.choice([0, 0.5]),
                }
            case "replicas" if model.get("load") != "on_demand":
                model["replicas"] = rng.choice([1, 2, 3])
                model.pop("scale", None)
            case "adapter" if model.get("load") != "on_demand":
                flip_adapter(world, name)
            case "order":
                world.models = dict(rng.sample(list(world.models.items()), len(world.models)))
            case _:
                kept = model["adapters"]
                world.models[name] = make_model(world, name) | {"adapters": kept}
        told.append(name)
    return " ".join(told)


def flip_adapter(world: World, name: str) -> None:
    adapters = world.models[name]["adapters"]
    adapter = f"{name}-{world.rng.choice(ADAPTERS)}"
    if known := [one for one in adapters if one["name"] == adapter]:
        adapters.remove(known[0])
        world.remove(adapter)
    else:
        adapters.append({"name": adapter, "path": str(world.folder / "adapter")})


def reload(world: World) -> str:
    before, told = copy.deepcopy(world.models), edit_file(world)
    return f"reload {told}{apply_file(world, before)}"


def apply_file(world: World, before: dict[str, dict[str, Any]]) -> str:
    """Reload; if the models are too large, go back to those before, and say so."""
    world.write()
    done = world.instance.run("reload")
    fits = done.returncode == 0
    if not fits:
        if not any(words in done.stderr for words in TOO_LARGE):
            raise AssertionError(f"reload refused: {done.stderr}")
        world.models = before
        world.write()
        done = world.instance.run("reload")
        if done.returncode:
            raise AssertionError(f"reload of what fitted refused: {done.stderr}")
    world.come_back()
    return "" if fits else ": too large"


def reload_twice(world: World) -> str:
    before, told = copy.deepcopy(world.models), edit_file(world)
    world.write()
    first = threading.Thread(target=world.instance.run, args=("reload",))
    first.start()
    told += " then " + edit_file(world)
    told += apply_file(world, before)
    first.join()
    return f"reload {told}"


def switch(world: World) -> str:
    """Switch to the other profile, at times in the middle of a reload."""
    told = ""
    reloading = threading.Thread(target=world.instance.run, args=("reload",))
    if world.rng.random() < 0.3:
        reloading.start()
        told = " in a reload"
    world.is_slim = not world.is_slim
    world.leave()
    done = world.instance.run("profile", "slim" if world.is_slim else "all")
    if done.returncode:
        # only what the profile serves had to fit
        if world.is_slim or not any(words in done.stderr for words in TOO_LARGE):
            raise AssertionError(f"profile refused: {done.stderr}")
        world.is_slim = True
        world.leave()
    world.come_back()
    if told:
        reloading.join()
    return f"{(done.stdout + done.stderr).strip()[:90]}{told}"


def reload_nonsense(world: World) -> str:
    path = world.folder / "servekit.yaml"
    text = path.read_text()
    path.write_text(
        world.rng.choice([text[: len(text) // 2], "[]", text.replace('"echo"', '"ecko"', 1)])
    )
    done = world.instance.run("reload")
    path.write_text(text)
    if done.returncode == 0:
        raise AssertionError(f"nonsense was taken: {done.stdout}")
    return "nonsense"


def hang_up(world: World) -> str:
    before, told = copy.deepcopy(world.models), edit_file(world)
    world.write()
    world.instance.signal(signal.SIGHUP)
    return f"SIGHUP {told}{apply_file(world, before)}"


def command(world: World) -> str:
    name = world.rng.choice(world.served)
    words = ["load", "sleep", "wake", "restart", "restart"]
    if world.models[name].get("load") == "on_demand":
        words += ["unload", "unload"]  # the next request loads it
    word = world.rng.choice(words)
    more = ["--no-wait"] if world.rng.random() < 0.7 else []
    done = world.instance.run(word, name, *more)
    return f"{word} {name} {' '.join(more)}: {(done.stdout + done.stderr).strip()[:90]}"


def change_adapter(world: World) -> str:
    """Load an adapter, in place of itself if it is there, or unload it, while the model runs."""
    name = world.rng.choice(STABLE)
    adapter = f"{name}-{ADDED}"
    if adapter in world.added and world.rng.random() < 0.3:
        world.remove(adapter)
        world.added.discard(adapter)
        return f"unload {adapter}: {post(world, 'unload_lora_adapter', lora_name=adapter)}"
    world.remove(adapter)  # while it is loaded in place of itself, too
    body = {"lora_path": str(world.folder / "adapter"), "load_inplace": True}
    said = post(world, "load_lora_adapter", lora_name=adapter, base_model_name=name, **body)
    if said.startswith("200"):
        world.added.add(adapter)
    if adapter in world.added:
        world.add(adapter, time.monotonic() + 30)  # a model that sleeps loads it later
    return f"load {adapter}: {said}"


def post(world: World, action: str, **body: object) -> str:
    try:
        answer = httpx.post(f"{world.instance.url}/v1/{action}", json=body, timeout=90)
    except httpx.TransportError as error:  # its gateway was killed
        return repr(error)
    return f"{answer.status_code} {answer.text[:90]}"


def hurt(world: World) -> str:
    """Kill or stop a worker, or at times a gateway, below the supervisor."""
    status = world.instance.status()
    processes = [(one.name, one.pid) for model in status.models for one in model.replicas] * 3
    processes += [(one.name, one.pid) for one in status.gateways]
    name, pid = world.rng.choice([one for one in processes if one[1]])
    number = world.rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
    world.deaths.append((name, time.monotonic()))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    return f"{number.name} {name}"


def change_server(world: World) -> str:
    world.file["server"]["drain_timeout_s"] = world.rng.choice([10, 20, 30])
    return f"server{apply_file(world, world.models)}"


ACTS = (
    switch,
    change_server,
    reload,
    reload,
    reload,
    reload_twice,
    reload_nonsense,
    hang_up,
    command,
    command,
    change_adapter,
    change_adapter,
    hurt,
    hurt,
)


# ---------------------------------------------------------------- the verdict


def find_wrong(world: World) -> Iterator[str]:
    for asked in world.asked:
        if asked.problem and world.was_there(asked):
            deaths = world.deaths_during(asked)
            if len(deaths) >= 2 and "quarantine" in asked.problem:
                continue
            of_gateway = any(name.startswith("gateway") for name in deaths)
            if of_gateway and asked.is_cut:
                continue
            when = f"{asked.began:.2f} to {asked.ended:.2f}"
            yield f"{asked.model} at {when}, deaths of {deaths}: {asked.problem}"
    yield from world.crowded[:3]
    yield from (f"the log has {word}" for word in FAULTS if word in world.instance.log)


def watch_memory(world: World) -> None:
    """Note when workers claim more than there is, until it is over."""
    asleep: set[int] = set()  # these are told to end as they are
    while not world.over.wait(0.1):
        with contextlib.suppress(ServekitError, OSError):
            claimed: dict[str, list[str]] = {}
            for model in world.instance.status().models:
                for one in model.replicas:
                    if one.state != "draining":
                        (asleep.add if one.state == "asleep" else asleep.discard)(one.pid)
                    if one.pid and one.pid not in asleep:
                        for place in one.gpus or ("cpu",):
                            claimed.setdefault(place, []).append(f"{one.name} {one.state}")
            for place, workers in claimed.items():
                if sum(CLAIMS[worker[0]] for worker in workers) > 100:
                    world.crowded.append(f"{time.monotonic():.2f} claimed of {place}: {workers}")


def find_unsettled(world: World) -> str:
    """Return what is not as the file says; "" if all is."""
    status = world.instance.status()
    if sorted(model.name for model in status.models) != sorted(world.models):
        return f"models {[model.name for model in status.models]}, not {list(world.models)}"
    for model in status.models:
        if model.left_out:
            continue
        given = world.models[model.name]
        states = [one.state for one in model.replicas]
        least = given["replicas"] if isinstance(given["replicas"], int) else 1
        if (
            given.get("load") != "on_demand"
            and states.count("ready") + states.count("asleep") < least
        ):
            return f"{model.name}: {states}, of {given['replicas']}"
        found = sorted(one.name for one in model.adapters if one.state == "serving")
        wanted = [one["name"] for one in given["adapters"]]
        wanted += [f"{model.name}-{ADDED}"] if f"{model.name}-{ADDED}" in world.added else []
        if given.get("load") != "on_demand" and found != sorted(wanted):
            return f"{model.name}: adapters {found}, of {wanted}"
    return ""


def run(seed: int, steps: int, clients: int, folder: Path, gpus: int = 0) -> list[str]:
    rng = random.Random(seed)
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    made_up = MadeUpGpus(folder, gpus) if gpus else None
    world = World(rng, None, folder, {}, {}, gpus)  # type: ignore[arg-type]
    for name in STABLE:
        world.models[name] = make_echo(world, name, step_s=0.01) | {
            "replicas": 2, "adapters": [], "stall_timeout_s": 2,
        }  # fmt: skip
    server = {"gateways": 2, "store_responses": {}, "runtime_adapters": True}
    env = {} if made_up is None else made_up.env
    start, sections = list(world.models.values()), {"profiles": {"slim": world.slim}}
    with Instance.up(folder, start, server=server, sections=sections, env=env) as instance:
        instance.until_settled()
        world.instance = instance
        world.file = json.loads((folder / "servekit.yaml").read_text())
        for name in EVERY:
            if name not in STABLE:
                world.absent_since[name] = 0.0
        url = instance.url
        threads = [
            threading.Thread(target=run_client, args=(world, url, seed * 1000 + at), daemon=True)
            for at in range(clients)
        ]
        threads.append(threading.Thread(target=watch_memory, args=(world,), daemon=True))
        for thread in threads:
            thread.start()
        wrong = []
        try:
            for _ in range(steps):
                world.acts.append(f"{time.monotonic():.2f} {rng.choice(ACTS)(world)}")
                time.sleep(rng.choice([0, 0.1, 0.5, 1.5]))  # an operator's pause is what is tried
        except AssertionError as error:
            wrong.append(str(error))
        with contextlib.suppress(AssertionError):
            instance.until(
                "all is as the file says", lambda: not find_unsettled(world), SETTLED_WITHIN_S
            )
        if unsettled := find_unsettled(world):
            wrong.append(f"not settled: {unsettled}")
        for name in world.names():
            body = {"model": name, "prompt": "end", "max_tokens": 3}
            try:
                answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
                said = "" if answer.status_code == 200 else answer.text[:300]
            except httpx.TransportError as error:
                said = repr(error)
            if said:
                wrong.append(f"at the end {name}: {said}")
        world.over.set()
        for thread in threads:
            thread.join()
        wrong += find_wrong(world)
        done = len([one for one in world.asked if not one.problem])
        print(f"seed {seed}: {steps} acts, {done} of {len(world.asked)} requests answered")
        wrong += find_wrong_after_a_kill(world, env)
        if wrong:
            (folder / "acts").write_text("\n".join(world.acts))
        return wrong


def find_wrong_after_a_kill(world: World, env: dict[str, str]) -> Iterator[str]:
    """Kill the supervisor in the middle of a reload, and start another with the same file."""
    first = world.instance
    for model in world.models.values():
        model["options"] = {**model["options"], "step_s": 0.003}
    world.write()
    reloading = threading.Thread(target=first.run, args=("reload",))
    reloading.start()
    time.sleep(world.rng.choice([0, 0.5, 0.8, 1.2]))  # any moment of the reload
    first.signal(signal.SIGKILL)
    first.wait()
    reloading.join()
    try:
        poll("nothing is left", lambda: not first.survivors(), 4.0)
    except AssertionError:
        yield f"left behind by SIGKILL: {first.survivors()}"
    (world.folder / "up.log").rename(world.folder / "killed.log")
    again = world.instance = Instance(world.folder, world.folder / "servekit.yaml", env=env)
    world.added.clear()  # the workers that knew them are gone
    try:
        again.until("it is up again", again.running)
        again.until("all is as the file says", lambda: not find_unsettled(world), SETTLED_WITHIN_S)
        again.signal(signal.SIGTERM)
        if (code := again.wait(60)) != 0:
            yield f"exit code {code}"
        if left := again.survivors():
            yield f"left behind: {left}"
        yield from (f"the log has {word}" for word in FAULTS if word in again.log)
    except AssertionError as error:
        yield f"after SIGKILL: {str(error)[:600]}"
    finally:
        again.end()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args(argv)
    failed = 0
    for seed in range(args.seed, args.seed + args.runs):
        folder = Path(tempfile.mkdtemp(prefix="operations-"))
        wrong = run(seed, args.steps, args.clients, folder, args.gpus)
        for line in wrong[:20]:
            print(f"  {line}")
        failed += bool(wrong)
        if wrong and args.keep:
            print(f"  kept in {folder}")
        else:
            shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
