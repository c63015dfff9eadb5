"""Every tuner that is served says in the engine what it says in PEFT."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest

from servekit.engines.transformers.lora.config_checks import PROVED
from tests.unit.engines.harness import PROMPTS, Harness, make_spec
from tests.unit.engines.transformers.lora import making

QV: dict[str, Any] = {"target_modules": making.QV, "task_type": making.TASK}
RANKED: dict[str, Any] = QV | {"r": 4}
TASK: dict[str, Any] = {"task_type": making.TASK}
#: Beside those of `making.configs`; weights are as PEFT makes them, and noise.
CONFIGS: dict[str, Any] = {
    "ADALORA": lambda: peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, **QV),
    "BEFT": lambda: peft.BeftConfig(**QV),
    "C3A": lambda: peft.C3AConfig(block_size=16, **QV),
    "CPT": lambda: peft.CPTConfig(
        cpt_token_ids=[1, 5, 6, 7], cpt_mask=[1] * 4, cpt_tokens_type_mask=[1, 2, 2, 4], **TASK
    ),
    "DEFT": lambda: peft.DeftConfig(**RANKED),
    "DELORA": lambda: peft.DeloraConfig(**RANKED),
    "FOURIERFT": lambda: peft.FourierFTConfig(n_frequency=50, **QV),
    "FROD": lambda: peft.FrodConfig(**QV),
    "GLORA": lambda: peft.GloraConfig(**RANKED),
    "GRALORA": lambda: peft.GraloraConfig(gralora_k=2, **RANKED),
    "HIRA": lambda: peft.HiraConfig(**RANKED),
    "HRA": lambda: peft.HRAConfig(**RANKED),
    "LN_TUNING": lambda: peft.LNTuningConfig(**TASK),
    "MISS": lambda: peft.MissConfig(**RANKED),
    "OSF": lambda: peft.OSFConfig(effective_rank=4, **QV),
    "PEANUT": lambda: peft.PeanutConfig(**RANKED),
    "PSOFT": lambda: peft.PsoftConfig(**RANKED),
    "PVERA": lambda: peft.PveraConfig(r=4, target_modules=["q_proj"], **TASK),
    "RANDLORA": lambda: peft.RandLoraConfig(**RANKED),
    "ROAD": lambda: peft.RoadConfig(group_size=16, **QV),
    "SHIRA": lambda: peft.ShiraConfig(**RANKED),
    "TINYLORA": lambda: peft.TinyLoraConfig(**(RANKED | {"r": 2})),
    "TRAINABLE_TOKENS": lambda: peft.TrainableTokensConfig(token_indices=[*range(390)], **TASK),
    "UNILORA": lambda: peft.UniLoraConfig(**RANKED),
    "VBLORA": lambda: peft.VBLoRAConfig(num_vectors=16, vector_length=16, **RANKED),
    "WAVEFT": lambda: peft.WaveFTConfig(n_frequency=50, **QV),
}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Harness]:
    shared = Harness(make_spec(tiny_model))
    yield shared
    shared.close()


def test_nothing_else_is_served() -> None:
    others = {str(config.peft_type.value) for config in making.configs().values()}
    assert {*CONFIGS} | others == PROVED


@pytest.mark.lane("adapters")
@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_it_says_what_peft_says(
    engine: Harness, tiny_model: Path, tmp_path: Path, kind: str
) -> None:
    folder = making.write(tiny_model, tmp_path / kind, CONFIGS[kind](), seed=1, noise=0.05)
    info = engine.engine.load_adapter(making.spec(folder))
    assert info.kind == kind
    jobs = [
        engine.submit(prompt, adapter=kind, max_tokens=12, ignore_eos=True)
        for prompt in PROMPTS[:2]
    ]
    said = [engine.tokens(job) for job in jobs]
    assert said == making.reference(tiny_model, folder, PROMPTS[:2], 12)
    engine.engine.unload_adapter(kind)
