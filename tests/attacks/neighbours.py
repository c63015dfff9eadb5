"""Attacks of one key, or of one adapter, on those that share an instance with it."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.attacks.client import Answer, Client
from tests.attacks.scene import Attack, Scene, due_text, fragile
from tests.unit.engines.harness import write_tiny_llama

GOOD, BAD = "good-key-0123456789", "bad-key-0123456789"
KEYS = [{"name": "good", "environment": "GOOD_KEY"}, {"name": "bad", "environment": "BAD_KEY"}]
ENV = {"GOOD_KEY": GOOD, "BAD_KEY": BAD}
#: Rows and columns of the tiny model's first projection of queries, and the adapters' rank.
WIDTH, RANK = 64, 4
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


def holder(scene: Scene, key: str) -> Client:
    """Return a client with a key."""
    return Client(scene.client.host, scene.client.port, key)


# ---------------------------------------------------------------- keys


def two_replicas(folder: Path) -> list[dict[str, Any]]:
    return [fragile(folder, replicas=2)]


async def send_poison_by_key(scene: Scene, *, at_once: int = 1) -> None:
    """One key sends 25 different poisons: it is refused, and the holder of the other is served.

    So many of them are under way `at_once`; those may take workers before the key is known.
    """
    good, bad = holder(scene, GOOD), holder(scene, BAD)

    async def ask(number: int) -> tuple[Answer, str]:
        prompt = f"question {number}"
        answer = await good.complete("m", prompt, 40, stream=number % 2 == 0)
        return answer, due_text("upper", prompt, 40)

    async def poison(number: int) -> None:
        async with turns:
            answer = await bad.complete("m", f"boom {number}", 50, stream=False)
        scene.account.check_form(answer)
        ended = answer.error in ("request_quarantined", "source_quarantined")
        scene.account.expect(ended, f"poison was answered {answer.status} {answer.error!r}")

    turns = asyncio.Semaphore(at_once)
    async with scene.bystanders(4, ask):
        await asyncio.gather(*map(poison, range(25)))
        refused = await bad.complete("m", "harmless", 5, stream=False)
        scene.account.check_form(refused)
        scene.account.expect(
            refused.error == "source_quarantined",
            f"the key that kills was answered {refused.status} {refused.error!r}",
        )
    await scene.until_serving(2)
    await scene.expect_deaths(10, "one key's 25 requests")


def a_tiny_llama(folder: Path) -> list[dict[str, Any]]:
    path = write_tiny_llama(folder / "tiny")
    return [{"name": "m", "path": str(path), "device": "cpu", "dtype": "float32"}]


async def look_into_the_cache(scene: Scene) -> None:
    """One key asks again for another's prompts: nothing tells it that they have been asked."""
    prompt = "The password of the vault is in the drawer below. " * 6
    texts = set()
    for key in (GOOD, BAD):
        for turn in range(2):
            answer = await holder(scene, key).complete("m", prompt, 8, stream=False)
            scene.account.check(answer, None)
            texts.add(answer.text)
            cached = cached_tokens(answer)
            scene.account.expect(
                bool(cached) == bool(turn),
                f"{cached} cached tokens for the key {key[:4]!r} at its request {turn + 1}",
            )
    scene.account.expect(len(texts) == 1, f"one prompt has {len(texts)} answers")


def cached_tokens(answer: Answer) -> int:
    """Return the tokens of the prompt that were in the cache."""
    usage = json.loads(answer.body).get("usage") or {}
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


# ---------------------------------------------------------------- adapters


async def load_bad_adapters(scene: Scene) -> None:
    """Adapters of NaN and of what overflows: refused, or harmful to their own requests alone."""
    prompt = "The quick brown fox jumps"
    due = (await scene.client.complete("m", prompt, 12, stream=False)).text

    async def ask(number: int) -> tuple[Answer, str]:
        return await scene.client.complete("m", prompt, 12, stream=number % 2 == 0), due

    async with scene.bystanders(2, ask):
        for name, down, up in (("nan", np.nan, 1.0), ("inf", 1.0, np.inf), ("loud", 3e38, 3e38)):
            folder = write_lora(scene.folder / name, down, up)
            answer = await load(scene, name, folder)
            scene.account.check_form(answer)
            scene.account.expect(
                answer.status in (200, 400), f"{name} was answered {answer.status}"
            )
            asked = (scene.client.complete(name, prompt, 8, stream=False) for _ in range(4))
            for told in await asyncio.gather(*asked):
                scene.account.check_form(told)
                scene.account.expect(told.failed, f"the adapter {name} was answered {told.text!r}")
    await scene.expect_deaths(0, "adapters that are not numbers")


async def load_a_second_model(scene: Scene) -> None:
    """An adapter that names a model to load beside its base is refused, and loads nothing."""
    config = {"peft_type": "SHADOW", "task_type": "CAUSAL_LM", "shadow_model": "somebody/model"}
    for name, more in (("shadow", config), ("other-kind", config | {"peft_type": "MAGIC"})):
        folder = write_lora(scene.folder / name, 0.01, 0.01, **more)
        answer = await load(scene, name, folder)
        scene.account.requests += 1
        scene.account.check_form(answer)
        said = json.loads(answer.body)["error"]["message"] if answer.status == 400 else ""
        refused = str(more["peft_type"]) in said and "not served" in said
        scene.account.expect(refused, f"{name} was answered {answer.status}: {said[:80]}")
        gone = await scene.client.complete(name, "a", 4, stream=False)
        scene.account.expect(gone.status == 404, f"{name} is served: {gone.status}")
    scene.account.check(await scene.client.complete("m", "a", 4, stream=True), None)
    await scene.expect_deaths(0, "adapters that are refused")


async def load(scene: Scene, name: str, folder: Path) -> Answer:
    """Load an adapter while the service runs."""
    body = {"lora_name": name, "lora_path": str(folder)}
    return await scene.client.post("/v1/load_lora_adapter", body, stream=False)


def write_lora(folder: Path, down: float, up: float, **config: Any) -> Path:
    """Write an adapter of one projection, whose factors hold one number each."""
    folder.mkdir()
    lora = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK}
    stated = lora | {"target_modules": ["q_proj"], "layers_to_transform": [0]} | config
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    factors = {
        f"{LAYER}.lora_A.weight": np.full((RANK, WIDTH), down, np.float32),
        f"{LAYER}.lora_B.weight": np.full((WIDTH, RANK), up, np.float32),
    }
    save_file(factors, folder / "adapter_model.safetensors")
    return folder


ATTACKS = [
    Attack(
        "poison-by-key",
        "25 poisons of one key beside another key",
        two_replicas,
        send_poison_by_key,
        sections={"keys": KEYS},
        env=ENV,
    ),
    Attack(
        "poisons-by-key",
        "the same, all 25 at once",
        two_replicas,
        partial(send_poison_by_key, at_once=25),
        sections={"keys": KEYS},
        env=ENV,
    ),
    Attack(
        "cache-of-another-key",
        "another key's prompts, to find them in the prefix cache",
        a_tiny_llama,
        look_into_the_cache,
        sections={"keys": KEYS},
        env=ENV,
    ),
    Attack(
        "adapter-nan",
        "adapters whose products are no numbers",
        a_tiny_llama,
        load_bad_adapters,
        server={"runtime_adapters": True},
    ),
    Attack(
        "adapter-shadow",
        "an adapter that names a second model",
        a_tiny_llama,
        load_a_second_model,
        server={"runtime_adapters": True},
    ),
]
