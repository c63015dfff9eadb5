"""Models with eyes in the engine: their answers are those of the library's own `generate`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from servekit.engines import media
from servekit.engines.media import media_warnings
from servekit.engines.transformers.vision import processor
from servekit.engines.transformers.vision.batched_images import BatchedImages
from servekit.engines.transformers.vision.image_reader import NotBatchable
from servekit.errors import LoadError, RequestError, Unsupported
from servekit.protocol.messages import ChatMessage
from tests.unit.engines.harness import Seeing, assert_alive, make_spec
from tests.unit.engines.seeing_model import (
    LIBRARY,
    SEEING,
)
from tests.unit.engines.transformers.vision.pictures import (
    BLUE,
    HISTORY,
    NONE,
    ONE,
    OTHER,
    RED,
    WIDE,
    Reference,
    say,
)

#: Those whose images are read outside the batch.
ALONE = ("gemma3",)
OPTIONS = {
    "continuous": {"batching": "continuous"},
    "own steps": {"batching": "continuous", "decode": "graph"},
    "speculating": {"speculative": {"method": "ngram", "ngram_min": 1}},
    "static": {"batching": "static"},
}
#: What differs for each architecture; the others of all pairs are rare.
COMMON = [
    ("llava", "continuous"),
    ("llava", "static"),
    ("idefics3", "continuous"),
    ("qwen2_vl", "continuous"),
    ("qwen2_vl", "own steps"),
    ("qwen3_vl", "own steps"),
    ("qwen2_vl", "speculating"),
    ("gemma3", "continuous"),
]
LONG = pytest.mark.lane("long")
CASES = [
    pytest.param(pair, marks=() if pair in COMMON else LONG, id="-".join(pair))
    for pair in product(SEEING, OPTIONS)
    # not all of gemma3's layers attend to the whole context
    if pair[0] != "gemma3" or pair[1] in ("continuous", "static")
]
TOKENS = Seeing.TOKENS


Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Folders:
    """A function that returns the folder of an architecture, and writes it once."""
    return cache(lambda name: SEEING[name](tmp_path_factory.mktemp(name), tiny_model))


@pytest.fixture(scope="module", params=["idefics3", "qwen2_vl"])
def folder(request: pytest.FixtureRequest, write: Folders) -> Path:
    return write(request.param)


@pytest.fixture(scope="module", params=CASES)
def seeing(request: pytest.FixtureRequest, write: Folders) -> Iterator[Seeing]:
    name, how = request.param
    engine = Seeing(make_spec(write(name), options=OPTIONS[how]))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reference(seeing: Seeing) -> Reference:
    return Reference(Path(seeing.engine.spec.path))


@pytest.fixture(scope="module")
def llava(write: Folders) -> Path:
    return write("llava")


@pytest.fixture(scope="module")
def reference_of_llava(llava: Path) -> Reference:
    return Reference(llava)


@pytest.fixture(scope="module")
def eyes(llava: Path) -> Iterator[Seeing]:
    """One engine for what does not depend on the architecture."""
    engine = Seeing(make_spec(llava))
    yield engine
    engine.close()


# ---------------------------------------------------------------- the library's answers


@pytest.mark.parametrize("messages", [ONE, OTHER, HISTORY, NONE], ids=["one", "other", "many", "0"])
def test_answers_are_the_library_s(
    seeing: Seeing, reference: Reference, messages: list[ChatMessage]
) -> None:
    assert "images" in seeing.info.serves
    ids, due = reference.ask(messages, TOKENS)
    job = seeing.ask(messages)
    assert seeing.tokens(job) == due
    if messages is not NONE:
        assert seeing.engine.encode_media(messages, (), {}, False).ids == ids


def test_pictures_and_texts_at_once(seeing: Seeing, reference: Reference) -> None:
    """Two pictures with one text never mix, whatever is cached, and texts go on beside them."""
    asked = [ONE, OTHER, NONE, HISTORY, ONE, NONE, OTHER]
    jobs = [seeing.ask(messages) for messages in asked]
    answers = [seeing.tokens(job) for job in jobs]
    assert answers == [reference.ask(messages, TOKENS)[1] for messages in asked]
    assert answers[0] != answers[1]


def test_where_images_run(seeing: Seeing) -> None:
    detail = seeing.info.detail
    if "one request at a time," in detail:  # texts, too
        assert detail.endswith("; images as texts")
    elif Path(seeing.engine.spec.path).name.startswith(ALONE):
        assert detail.endswith("images one at a time: its decoder takes attention_mask for images")
    else:
        assert detail.endswith("; images in the batch")


def test_a_crowd_of_pictures(seeing: Seeing, reference: Reference) -> None:
    """Each of many at once is answered as alone, and sampled ones as alone."""
    due = [reference.ask(messages, TOKENS)[1] for messages in (ONE, OTHER, HISTORY)]
    wild = {"temperature": 1.2, "seed": 3}
    drawn = seeing.answer(OTHER, **wild)
    jobs = [seeing.ask(messages) for messages in (ONE, OTHER, HISTORY) * 4]
    other = seeing.ask(OTHER, **wild)
    assert [seeing.tokens(job) for job in jobs] == due * 4
    assert seeing.tokens(other) == drawn


@pytest.mark.parametrize("name", [name for name in SEEING if name not in ALONE])
def test_a_picture_is_cached_by_its_content(write: Folders, name: str) -> None:
    engine = Seeing(make_spec(write(name), options={"batching": "continuous", "block_size": 16}))
    try:
        lead = "This is a text of more than some tokens before a picture. " * 2
        asked = [[say("user", lead, image, lead, RED, "?")] for image in (WIDE, RED, WIDE)]
        answers, cached = [], []
        for messages in asked:
            job = engine.ask(messages)
            answers.append(engine.tokens(job))
            cached.append(max(output.cached_tokens for output in engine.outputs[job]))
        ids = engine.engine.encode_media(asked[0], (), {}, False).ids
        first = len(engine.engine.codec.encode(lead)) + 20  # beyond it is the first picture
        assert cached[0] == 0 < cached[1] <= first < cached[2] <= len(ids)
        assert answers[0] == answers[2]
    finally:
        engine.close()


def test_a_prompt_that_is_not_batchable_runs_alone(
    eyes: Seeing, reference_of_llava: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(job: Any) -> Any:
        raise NotBatchable("its decoder takes more")

    monkeypatch.setattr(eyes.engine._runner._reader, "read_images", refuse)
    asked = [ONE, NONE, HISTORY]
    jobs = [eyes.ask(messages) for messages in asked]
    left = eyes.ask(OTHER, max_tokens=400)
    due = [reference_of_llava.ask(messages, TOKENS)[1] for messages in asked]
    assert [eyes.tokens(job) for job in jobs] == due
    eyes.engine.cancel(left)
    eyes.until_idle()


def test_a_batch_that_disagrees_is_not_used(
    llava: Path, reference_of_llava: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images that get lost on their way into the batch make other logits, not other answers."""
    monkeypatch.setattr(BatchedImages, "_put_rows", lambda self, module, args, out: out)
    engine = Seeing(make_spec(llava))
    try:
        assert "one at a time: Disagreement: its logits are off by" in engine.info.detail
        assert engine.answer(ONE) == reference_of_llava.ask(ONE, TOKENS)[1]
        assert engine.answer(NONE) == reference_of_llava.ask(NONE, TOKENS)[1]
    finally:
        engine.close()


def test_texts_do_not_wait_for_pictures(folder: Path) -> None:
    engine = Seeing(make_spec(folder, options={"batching": "continuous"}))
    try:
        long = engine.ask(ONE, max_tokens=400)
        engine.until(lambda: len(engine.outputs.get(long, [])) > 2, "the picture is described")
        engine.answer(NONE, max_tokens=4)
        assert not engine.ended(long)
        engine.engine.cancel(long)
    finally:
        engine.close()


@pytest.mark.parametrize("done", [1, 7, TOKENS - 1])
def test_another_worker_goes_on(seeing: Seeing, reference: Reference, done: int) -> None:
    _, due = reference.ask(HISTORY, TOKENS)
    assert seeing.answer(HISTORY, emitted=due[:done]) == due[done:]


def test_an_emitted_mark_is_no_image(seeing: Seeing) -> None:
    """A model may write the token of an image; who goes on after it must not look for a second."""
    ids = seeing.engine.encode_media(ONE, (), {}, False).ids
    mark = max(set(ids), key=ids.count)
    assert len(seeing.answer(ONE, emitted=[mark, mark])) == TOKENS - 2


def test_sampling_as_for_other_requests(seeing: Seeing) -> None:
    wild = {"temperature": 1.5, "seed": 7, "top_p": 0.95}
    drawn = seeing.answer(ONE, **wild)
    assert drawn == seeing.answer(ONE, **wild) != seeing.answer(ONE, **wild | {"seed": 8})
    assert drawn[5:] == seeing.answer(ONE, emitted=drawn[:5], **wild)
    plain = seeing.answer(ONE)
    job = seeing.ask(ONE, logprobs=2, prompt_logprobs=1, max_tokens=5)
    assert len(seeing.logprobs(job)) == 5
    told = seeing.outputs[job][0].prompt
    ids = seeing.engine.encode_media(ONE, (), {}, False).ids
    assert told is not None and [one.id for one in told] == ids
    biased = seeing.answer(ONE, logit_bias=((plain[0], -100.0),))
    assert biased[0] != plain[0]
    assert seeing.answer(ONE, stop_token_ids=(plain[3],)) == plain[: plain.index(plain[3])]


def test_it_sleeps_and_wakes(folder: Path) -> None:
    engine = Seeing(make_spec(folder, sleeps=True))
    try:
        due = engine.answer(HISTORY)
        engine.engine.sleep()
        engine.engine.wake()
        assert engine.answer(HISTORY) == due
    finally:
        engine.close()


def test_a_text_may_name_the_token_of_an_image(seeing: Seeing) -> None:
    ids = seeing.engine.encode_media(ONE, (), {}, False).ids
    mark = seeing.engine.codec.decoder().push([max(set(ids), key=ids.count)])
    named = seeing.engine._media._processor.image_token
    assert len(seeing.answer([say("user", f"What is {named}?{mark}")])) == TOKENS


# ---------------------------------------------------------------- faults


def test_a_cancelled_one_makes_room(eyes: Seeing) -> None:
    due = eyes.answer(ONE)
    first, second = eyes.ask(ONE, max_tokens=400), eyes.ask(OTHER, max_tokens=400)
    third = eyes.ask(ONE)
    eyes.until(lambda: bool(eyes.outputs.get(first)), "the first one runs")
    eyes.engine.cancel(second)
    eyes.engine.cancel(first)
    steps = eyes.count_steps()
    assert eyes.tokens(third) == due
    eyes.until_idle()
    assert not eyes.ended(first) and not eyes.ended(second)
    assert steps() < 200, "neither of them goes on"


def test_images_without_their_places_fail_alone(eyes: Seeing) -> None:
    """The worker's preparation prevents it; if it happens all the same, the engine lives."""
    prompt = eyes.engine.encode_media(ONE, (), {}, False)
    beside = eyes.ask(NONE, max_tokens=100)
    lost = eyes.submit(prompt.ids[:3], media=prompt.inputs)
    eyes.until(lambda: eyes.ended(lost), "it is refused")
    (output,) = eyes.outputs[lost]
    assert output.param == "messages" and "cannot read these images or recordings" in (
        output.error or ""
    )
    assert len(eyes.tokens(beside)) == 100
    assert_alive(eyes)


def test_a_full_device_fails_the_request_only(
    eyes: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong: Any = torch.OutOfMemoryError("CUDA out of memory")

    def fail(job: Any) -> Any:
        raise wrong

    monkeypatch.setattr(eyes.engine._runner._reader, "read_images", fail)
    lost = eyes.ask(ONE)
    eyes.until(lambda: eyes.ended(lost), "it fails")
    assert "no memory left" in (eyes.outputs[lost][0].error or "")
    monkeypatch.undo()
    assert_alive(eyes)
    assert len(eyes.answer(ONE)) == TOKENS


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_a_failed_step_ends_the_engine(
    llava: Path, monkeypatch: pytest.MonkeyPatch, batching: str
) -> None:
    """An error in the middle of an answer is no fault of its images; another worker goes on."""
    engine = Seeing(make_spec(llava, options={"batching": batching}))
    died = threading.Event()
    engine.engine.on_death = died.set
    try:
        job = engine.ask(ONE, max_tokens=400)
        engine.until(lambda: bool(engine.outputs.get(job)), "it runs")
        runner = engine.engine._runner if batching == "static" else engine.engine._runner.texts

        def fail(*args: Any) -> Any:
            raise ValueError("a device is lost")

        work = "_read_tokens" if batching == "static" else "_run_step"
        monkeypatch.setattr(runner, work, fail)
        assert died.wait(60)
        assert not engine.ended(job)
    finally:
        engine.close()


def test_twenty_images(eyes: Seeing) -> None:
    many = [say("user", *[RED, BLUE, WIDE, RED] * 5, "How many?")]
    assert len(eyes.answer(many)) == TOKENS


def test_a_text_that_writes_the_mark(eyes: Seeing) -> None:
    with pytest.raises(RequestError, match="a text has <image>, which stands for an image"):
        eyes.ask([say("user", "an <image> ", RED)])
    assert len(eyes.answer([say("user", "an <image>")])) == TOKENS  # without images it is a token


def test_an_encoder_of_prompts_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2, "num_hidden_layers": 1}
    text = sizes | {"num_layers": 1, "vocab_size": 400, "decoder_start_token_id": 0}
    config = LIBRARY.Pix2StructConfig(text_config=text, vision_config=sizes | {"seq_len": 64})
    LIBRARY.Pix2StructForConditionalGeneration(config).save_pretrained(tmp_path)
    LIBRARY.AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    with pytest.raises(LoadError, match="has an encoder for its prompt"):
        Seeing(make_spec(tmp_path))


# ---------------------------------------------------------------- what is missing


def assert_serves_texts_only(folder: Path, **fields: Any) -> None:
    engine = Seeing(make_spec(folder, **fields))
    try:
        assert "images" not in engine.info.serves
        assert len(engine.answer(NONE)) == TOKENS
        with pytest.raises(Unsupported, match="takes no images"):
            engine.ask(ONE)
    finally:
        engine.close()


@pytest.mark.parametrize("package", ["torchvision", "Pillow"])
def test_a_package_is_missing(llava: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def load(*args: Any) -> Any:
        raise ImportError(f"\nLlavaProcessor requires the {package} library but it was not found")

    monkeypatch.setattr(processor, "_load", load)
    monkeypatch.setattr(
        media_warnings.log, "warning", lambda event, **why: told.append(why["reason"])
    )
    assert_serves_texts_only(llava)
    assert told == [
        f"ImportError: LlavaProcessor requires the {package} library but it was not found"
    ]


def test_what_decodes_images_is_missing(llava: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without Pillow, where the library's processor loads."""
    monkeypatch.delattr(media, "media_prompts", raising=False)
    monkeypatch.setitem(sys.modules, "servekit.engines.media.media_prompts", None)
    assert_serves_texts_only(llava)


def test_a_folder_without_a_processor(llava: Path, tmp_path: Path) -> None:
    for file in llava.iterdir():
        if file.name != "processor_config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert_serves_texts_only(tmp_path)


def test_a_template_without_images(llava: Path) -> None:
    source = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    assert_serves_texts_only(llava, chat_template=source)
