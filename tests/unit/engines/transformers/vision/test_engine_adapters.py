"""Images and recordings with adapters: the answers of plain PEFT and the library's `generate`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
from safetensors.torch import load_file, save_file

from servekit.engines.transformers.lora.adapter_files import WEIGHTS
from servekit.engines.transformers.lora.batched_lora import BatchedLora
from servekit.engines.transformers.vision.batched_images import BatchedImages
from servekit.errors import RequestError, Unsupported
from tests.unit.engines.harness import Seeing, assert_alive, make_spec
from tests.unit.engines.seeing_model import SEEING, write_qwen2_5_omni
from tests.unit.engines.transformers.lora import making
from tests.unit.engines.transformers.vision.media_adapters import MODES, AdapterFolders
from tests.unit.engines.transformers.vision.pictures import (
    HISTORY,
    NONE,
    ONE,
    OTHER,
    RED,
    WIDE,
    say,
)
from tests.unit.engines.transformers.vision.test_engine_recordings import HIGH, LOW

WRITERS = SEEING | {"qwen2_5_omni": write_qwen2_5_omni}
BATCHED = {"batching": "continuous"}
LANE = pytest.mark.lane("adapters")
CASES = [
    ("llava", BATCHED),
    pytest.param(("llava", {"batching": "static"}), marks=LANE),
    pytest.param(("idefics3", BATCHED), marks=LANE),
    pytest.param(("qwen2_vl", BATCHED | {"decode": "graph"}), marks=LANE),
    pytest.param(("qwen3_vl", BATCHED), marks=LANE),
    pytest.param(("gemma3", BATCHED), marks=LANE),  # whose images run beside the batch
    pytest.param(("qwen2_5_omni", BATCHED), marks=LANE),
]
Write = Callable[[str], AdapterFolders]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Write:
    def made(name: str) -> AdapterFolders:
        folder = WRITERS[name](tmp_path_factory.mktemp(name), tiny_model)
        return AdapterFolders(folder, tmp_path_factory.mktemp("adapters"))

    return cache(made)


@pytest.fixture(
    scope="module", params=CASES, ids=lambda case: "-".join((case[0], *case[1].values()))
)
def case(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    found: tuple[str, dict[str, Any]] = request.param
    return found


@pytest.fixture(scope="module")
def folders(case: tuple[str, dict[str, Any]], write: Write) -> AdapterFolders:
    return write(case[0])


@pytest.fixture(scope="module")
def seeing(case: tuple[str, dict[str, Any]], folders: AdapterFolders) -> Iterator[Seeing]:
    options = case[1]
    specs = tuple(making.spec(folders[name]) for name in MODES)
    engine = Seeing(make_spec(folders.folder, options=options, adapters=specs))
    yield engine
    engine.close()


def test_answers_are_those_of_peft(seeing: Seeing, folders: AdapterFolders) -> None:
    """All adapters and the base at once, with images and without, twice so that all is cached."""
    assert {one.name: one.mode for one in seeing.info.adapters} == MODES
    asked = [(name, messages) for name in ("", *MODES) for messages in (ONE, OTHER, NONE, HISTORY)]
    due = [folders.due(*one) for one in asked]
    for _ in range(2):
        jobs = [seeing.ask(messages, adapter=name) for name, messages in asked]
        assert [seeing.tokens(job) for job in jobs] == due
    for name in MODES:
        assert folders.due(name, ONE) != folders.due("", ONE), name
    assert folders.due("eyes", NONE) == folders.due("", NONE)


@pytest.mark.parametrize("name", MODES)
def test_another_worker_goes_on(seeing: Seeing, folders: AdapterFolders, name: str) -> None:
    due = folders.due(name, HISTORY)
    assert seeing.answer(HISTORY, adapter=name, emitted=due[:7]) == due[7:]


@LANE
def test_recordings(write: Write) -> None:
    made = write("qwen2_5_omni")
    both = ("tongue", "all")
    specs = tuple(making.spec(made[name]) for name in both)
    engine = Seeing(make_spec(made.folder, options=BATCHED, adapters=specs))
    asked = [
        (name, [say("user", sound, "What is this?")])
        for name in ("", *both)
        for sound in (LOW, HIGH)
    ]
    try:
        jobs = [engine.ask(messages, adapter=name) for name, messages in asked]
        assert [engine.tokens(job) for job in jobs] == [made.due(*one) for one in asked]
    finally:
        engine.close()
    assert made.due("all", asked[0][1]) != made.due("tongue", asked[0][1])


# ---------------------------------------------------------------- one engine, for all else


@pytest.fixture(scope="module")
def llava(write: Write) -> AdapterFolders:
    return write("llava")


@pytest.fixture
def bare(llava: AdapterFolders) -> Iterator[Seeing]:
    """An engine without adapters."""
    engine = Seeing(make_spec(llava.folder, options=BATCHED | {"block_size": 16}))
    yield engine
    engine.close()


def test_the_cache_knows_adapter_and_picture(bare: Seeing, llava: AdapterFolders) -> None:
    for name in ("tongue", "all"):
        bare.engine.load_adapter(making.spec(llava[name], name))
    lead = "This is a text of more than some tokens before a picture. " * 2
    whose = ("", "tongue", "all")
    asked = [(name, [say("user", lead, image, lead)]) for image in (WIDE, RED) for name in whose]
    answers: list[list[int]] = []
    cached = []
    for name, messages in asked * 2:
        job = bare.ask(messages, adapter=name)
        answers.append(bare.tokens(job))
        cached.append(max(output.cached_tokens for output in bare.outputs[job]))
    before = len(bare.engine.codec.encode(lead)) + 20  # beyond it is the picture
    assert cached[:3] == [0, 0, 0] and all(0 < count <= before for count in cached[3:6])
    assert all(count > before for count in cached[6:])
    assert answers == [llava.due(*one) for one in asked] * 2


def test_they_come_and_go_while_pictures_are_read(bare: Seeing, llava: AdapterFolders) -> None:
    """Those that are asked meanwhile are answered as ever, and nothing of them is left."""
    long = bare.ask(HISTORY, max_tokens=400)
    for name in MODES:
        bare.engine.load_adapter(making.spec(llava[name], name))
        beside = [bare.ask(ONE), bare.ask(OTHER, adapter=name), bare.ask(ONE, adapter=name)]
        due = [llava.due("", ONE), llava.due(name, OTHER), llava.due(name, ONE)]
        assert [bare.tokens(job) for job in beside] == due
    for name in MODES:
        bare.engine.unload_adapter(name)
    assert bare.tokens(long) == llava.due("", HISTORY, 400)
    assert not bare.engine._runner.texts.mixing._layers
    assert bare.answer(ONE) == llava.due("", ONE)


def test_they_sleep_and_wake(llava: AdapterFolders) -> None:
    specs = tuple(making.spec(llava[name], name) for name in ("all", "dora"))
    engine = Seeing(make_spec(llava.folder, options=BATCHED, adapters=specs, sleeps=True))
    try:
        engine.engine.sleep()
        engine.engine.wake()
        for name in ("", "all", "dora"):
            assert engine.answer(ONE, adapter=name) == llava.due(name, ONE)
    finally:
        engine.close()


def refused(engine: Seeing, folder: Path, words: str) -> None:
    """The adapter is refused, nothing of it is left, and the base goes on."""
    before = engine.answer(ONE)
    with pytest.raises(RequestError, match=words):
        engine.engine.load_adapter(making.spec(folder, "broken"))
    assert not engine.engine._adapters._served
    assert not engine.engine._runner.texts.mixing._layers
    assert engine.answer(ONE) == before
    assert_alive(engine)


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_weights_of_eyes_are_checked(
    bare: Seeing, llava: AdapterFolders, tmp_path: Path, value: float
) -> None:
    folder = shutil.copytree(llava["eyes"], tmp_path / "copy")
    tensors = load_file(folder / WEIGHTS)
    for name, weights in tensors.items():
        if "lora_B" in name:
            weights[:] = value
    save_file(tensors, folder / WEIGHTS)
    refused(bare, folder, "vision_tower.* NaN or Inf" if value else "has no effect: each of its")


@pytest.mark.parametrize(
    ("name", "owner", "what"),
    [
        ("eyes", BatchedLora, "lay_out_alone"),
        ("all", BatchedLora, "lay_out_alone"),
        ("dora", BatchedImages, "attach"),
    ],
)
def test_one_that_is_lost_on_the_way_to_a_picture(
    bare: Seeing,
    llava: AdapterFolders,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    owner: Any,
    what: str,
) -> None:
    """The proof with a picture finds it; texts have their adapter all the same."""
    monkeypatch.setattr(owner, what, lambda self, given: None)
    refused(bare, llava[name], "output differs in a batch with others")


def test_virtual_tokens_have_no_images(bare: Seeing, llava: AdapterFolders, tmp_path: Path) -> None:
    config = peft.PromptTuningConfig(num_virtual_tokens=5, task_type=making.TASK)
    made: Any = peft.get_peft_model(llava.load(), config)
    made.save_pretrained(str(tmp_path / "prompt"))
    bare.engine.load_adapter(making.spec(tmp_path / "prompt", "prompt"))
    assert len(bare.answer(NONE, adapter="prompt")) == Seeing.TOKENS
    with pytest.raises(Unsupported, match="'prompt' puts virtual tokens before the prompt"):
        bare.ask(ONE, adapter="prompt")
