"""Images in the llama.cpp engine: its answers are those of llama.cpp's own server."""

from __future__ import annotations

import base64
import contextlib
import gc
import io
import json
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image as Pillow
from safetensors.numpy import load_file

from servekit.engines.llamacpp import loading
from servekit.engines.llamacpp.engine import LlamaCppEngine
from servekit.engines.llamacpp.library.bindings import open_binding
from servekit.engines.llamacpp.media import chunk_encoder
from servekit.engines.llamacpp.media.media_prompts import MediaEncoder
from servekit.engines.llamacpp.media.mtmd import MediaChunk, Projector
from servekit.engines.llamacpp.model import Context, InsufficientMemory
from servekit.engines.media import media_warnings
from servekit.engines.text.tokenizer import REPLACEMENT
from servekit.errors import LoadError, RequestError, Unsupported
from servekit.model_metadata import projector
from servekit.model_metadata.gguf import read_header
from servekit.protocol.messages import ChatMessage, Media
from servekit.system import cgroup
from tests.llama_server import run_server
from tests.unit.engines.harness import Seeing, assert_alive, make_spec
from tests.unit.engines.hearing_model import make_samples, write_wav
from tests.unit.engines.llamacpp.seeing_gguf import convert_model, write_projector
from tests.unit.engines.seeing_model import (
    write_gemma3,
    write_idefics3,
    write_qwen2_audio,
    write_qwen2_vl,
    write_qwen3_vl,
)
from tests.unit.engines.transformers.vision.pictures import Reference, paint, say

#: Idefics3 cuts images into tiles, Qwen2-VL has positions of three parts, Qwen3-VL gives its layers
#: vectors of images, too, and Gemma 3 attends to an image in both directions.
WRITERS = {
    "idefics3": write_idefics3,
    "qwen2_vl": write_qwen2_vl,
    "qwen3_vl": write_qwen3_vl,
    "gemma3": write_gemma3,
}
#: Of sides that Qwen2-VL leaves as they are. llama.cpp's server has another decoder of JPEG.
RED, BLUE, TALL = paint("red", (112, 84)), paint("blue", (84, 112)), paint("green", (56, 140))
ONE = [say("user", RED, "What is this?")]
OTHER = [say("user", BLUE, "What is this?")]
HISTORY = [
    say("user", "Look ", RED, " and ", TALL, " here."),
    say("assistant", "Fine."),
    say("user", "And now?", BLUE),
]
NONE = [say("user", "What is this?")]
ALL = (ONE, OTHER, HISTORY, NONE)

Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Folders:
    """A function that returns the folder of an architecture, and writes it once."""
    return cache(lambda name: WRITERS[name](tmp_path_factory.mktemp(name), tiny_model))


@pytest.fixture(scope="module")
def convert(tmp_path_factory: pytest.TempPathFactory, write: Folders) -> Folders:
    """A function that returns a folder with the GGUF files of an architecture."""

    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(f"{name}-gguf")
        convert_model(write(name), folder)
        return folder

    return cache(make)


def open_engine(folder: Path, **fields: Any) -> Seeing:
    options = {"cache_type": "f32", "flash_attention": "off"} | fields.pop("options", {})
    spec = make_spec(folder / "model.gguf", engine="llamacpp", options=options, **fields)
    return Seeing(spec, LlamaCppEngine)


@pytest.fixture(scope="module", params=WRITERS)
def seeing(request: pytest.FixtureRequest, convert: Folders) -> Iterator[Seeing]:
    engine = open_engine(convert(request.param))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def folder(convert: Folders) -> Path:
    return convert("qwen2_vl")


@pytest.fixture(scope="module")
def eyes(folder: Path) -> Iterator[Seeing]:
    """One engine for what does not depend on the architecture."""
    engine = open_engine(folder)
    yield engine
    engine.close()


# ---------------------------------------------------------------- llama.cpp's answers


@pytest.fixture(scope="module")
def server(seeing: Seeing) -> Iterator[str]:
    """The URL of llama.cpp's own server of the same files, in a process of its own."""
    folder = Path(seeing.engine.spec.path).parent
    with run_server(f"{folder}/model.gguf", "f32", f"{folder}/mmproj.gguf") as url:
        yield url


def ask_server(url: str, messages: list[ChatMessage]) -> tuple[str, int]:
    """The text of its greedy answer, and the tokens of the prompt."""
    turns = [{"role": one.role, "content": [_part(part) for part in one.parts]} for one in messages]
    body = {"messages": turns, "temperature": 0, "max_tokens": Seeing.TOKENS}
    told = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    return told["choices"][0]["message"]["content"], told["usage"]["prompt_tokens"]


def _part(part: str | Media) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    data = base64.b64encode(part.data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{part.kind};base64,{data}"}}


def settle(text: str) -> str:
    """A text without half characters, of which llama.cpp's server writes another number."""
    return text.replace(REPLACEMENT, "")


@pytest.mark.parametrize("messages", ALL, ids=["one", "other", "many", "none"])
def test_answers_are_llama_cpp_s(seeing: Seeing, server: str, messages: list[ChatMessage]) -> None:
    assert "images" in seeing.info.serves
    text, tokens = ask_server(server, messages)
    prompt = seeing.engine.encode_media(messages, (), {}, False)
    assert len(prompt.ids) == tokens
    assert settle(seeing.text(seeing.ask(messages, ignore_eos=False))) == settle(text)


def test_a_text_begins_with_its_token(write: Folders, tmp_path: Path) -> None:
    """Which the file wants, and the chat template leaves out."""
    convert_model(write("gemma3"), tmp_path, begins=True)
    engine = open_engine(tmp_path)
    try:
        files = f"{tmp_path}/model.gguf", "f32", f"{tmp_path}/mmproj.gguf"
        with run_server(*files) as url:
            for messages in (ONE, NONE):
                text, tokens = ask_server(url, messages)
                job = engine.ask(messages, ignore_eos=False)
                assert settle(engine.text(job)) == settle(text)
                ids = engine.engine.codec.render_chat(messages)
                if messages is ONE:
                    ids = engine.engine.encode_media(messages, (), {}, False).ids
                assert len(ids) == tokens and ids[0] > ids[1]  # it is the last of the vocabulary
    finally:
        engine.close()


def test_answers_are_those_of_transformers(write: Folders, eyes: Seeing) -> None:
    """Of Qwen2-VL, whose chat template puts around an image what llama.cpp does."""
    reference = Reference(write("qwen2_vl"))
    for messages in ALL:
        ids, due = reference.ask(messages, Seeing.TOKENS)
        prompt = eyes.engine.encode_media(messages, (), {}, False)
        assert len(prompt.ids) == len(ids)
        assert eyes.answer(messages) == due
    assert len({tuple(eyes.answer(messages)) for messages in ALL}) == len(ALL)


def test_pictures_and_texts_at_once(seeing: Seeing) -> None:
    """Each of many at once is answered as alone, and sampled ones as alone."""
    due = {id(messages): seeing.answer(messages) for messages in ALL}
    wild = {"temperature": 1.2, "seed": 3}
    drawn = seeing.answer(OTHER, **wild)
    jobs = [seeing.ask(messages) for messages in ALL * 4]
    other = seeing.ask(OTHER, **wild)
    assert [seeing.tokens(job) for job in jobs] == [due[id(messages)] for messages in ALL * 4]
    assert seeing.tokens(other) == drawn
    assert max(len(batch) for batch in seeing.batches) > 2  # they did share steps


def test_two_jobs_of_one_prompt(seeing: Seeing) -> None:
    """As of a request for several answers."""
    due = seeing.answer(HISTORY)
    prompt = seeing.engine.encode_media(HISTORY, (), {}, False)
    asked: dict[str, Any] = {"media": prompt.inputs, "max_tokens": Seeing.TOKENS}
    asked |= {"ignore_eos": True, "cache_salt": "of two"}
    for cancelled in (False, True):
        jobs = [seeing.submit(prompt.ids, **asked) for _ in range(3)]
        if cancelled:
            seeing.engine.cancel(jobs.pop(0))
        assert [seeing.tokens(job) for job in jobs] == [due] * len(jobs)


def test_a_picture_is_cached_by_its_content(seeing: Seeing) -> None:
    lead = "This is a text of more than some tokens before a picture. " * 2
    asked = [[say("user", lead, image, " and ", RED, "?")] for image in (TALL, TALL, BLUE)]
    answers, cached = [], []
    for messages in asked:
        job = seeing.ask(messages)
        answers.append(seeing.tokens(job))
        cached.append(max(output.cached_tokens for output in seeing.outputs[job]))
    prompt = seeing.engine.encode_media(asked[0], (), {}, False)
    first = prompt.inputs.chunks[0].start
    assert cached[0] < cached[2] <= first
    assert cached[1] == len(prompt.ids) - 1
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize("done", [1, 7, 23])
def test_another_worker_goes_on(seeing: Seeing, done: int) -> None:
    due = seeing.answer(HISTORY)
    prompt = seeing.engine.encode_media(HISTORY, (), {}, False)
    job = seeing.submit(
        *(prompt.ids, due[:done]),
        media=prompt.inputs,
        cache_salt="another worker's",
        max_tokens=Seeing.TOKENS,
        ignore_eos=True,
    )
    assert seeing.tokens(job) == due[done:]


def test_a_prompt_may_end_with_an_image(eyes: Seeing) -> None:
    whole = eyes.engine.encode_media(ONE, (), {}, False)
    chunk = whole.inputs.chunks[0]
    del whole.ids[chunk.end :]
    job = eyes.submit(whole.ids, media=whole.inputs, max_tokens=8, ignore_eos=True)
    first = eyes.tokens(job)
    again = eyes.engine.encode_media(ONE, (), {}, False)
    del again.ids[chunk.end :]
    again.ids.extend(first[:3])  # as text after the image
    job = eyes.submit(again.ids, media=again.inputs, max_tokens=5, ignore_eos=True)
    assert eyes.tokens(job) == first[3:]


# ---------------------------------------------------------------- beside others


def test_an_image_larger_than_a_pass(eyes: Seeing, folder: Path) -> None:
    wide = [say("user", paint("red", (1400, 560)), "What is this?")]  # 1000 tokens
    due = eyes.answer(wide)
    engine = open_engine(folder, options={"batch_tokens": 16, "slots": 2})
    try:
        text = engine.ask(NONE, max_tokens=200)
        assert engine.answer(wide) == due
        engine.tokens(text)
    finally:
        engine.close()


def test_an_image_that_has_to_fit_into_a_pass(convert: Folders) -> None:
    """llama.cpp aborts the process for an image that is read whole, in too small a pass."""
    engine = open_engine(convert("gemma3"))
    try:
        loaded, codec = engine.engine._loaded, engine.engine.codec
        encoder = MediaEncoder(loaded.projector, codec, 60.0, batch_tokens=3)
        with pytest.raises(RequestError, match=r"image of 4 tokens in one pass, and a pass has 3"):
            encoder.encode_chat(ONE)
    finally:
        engine.close()


def test_texts_go_on_while_an_image_is_encoded(
    eyes: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running stream has all of its tokens before the encoding is let go on."""
    encode = Projector.encode
    begun, go_on = threading.Event(), threading.Event()

    def encode_slowly(self: Projector, chunk: MediaChunk) -> Any:
        begun.set()
        assert go_on.wait(60)
        return encode(self, chunk)

    monkeypatch.setattr(Projector, "encode", encode_slowly)
    with contextlib.ExitStack() as held:
        held.callback(go_on.set)
        picture = eyes.ask(OTHER, cache_salt="not known")
        assert begun.wait(60)
        eyes.answer(NONE)  # ends meanwhile
        assert not eyes.ended(picture) and eyes.engine.load_now().running == 1
        # A job that is cancelled while its image is encoded frees its place at once.
        eyes.engine.cancel(picture)
        eyes.until_true(lambda: eyes.engine.load_now().running == 0)
        eyes.until_idle()
    monkeypatch.undo()
    assert eyes.answer(OTHER) == eyes.answer(OTHER, cache_salt="again")


def test_an_encoding_that_hangs_is_no_progress(
    eyes: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take minutes on a CPU, but not for ever: then the supervisor replaces the worker."""
    go_on = threading.Event()

    def hang(self: Projector, chunk: MediaChunk) -> Any:
        assert go_on.wait(60)
        raise RuntimeError("it was let go")

    monkeypatch.setattr(Projector, "encode", hang)
    with contextlib.ExitStack() as held:
        held.callback(go_on.set)
        job = eyes.ask(OTHER, cache_salt="never seen")
        steps = eyes.count_steps()
        eyes.until_true(lambda: steps() > 10)
        assert eyes.engine.load_now().progress_age_s < 5
        monkeypatch.setattr(chunk_encoder, "HANGS_S", 0.01)
        eyes.until_true(lambda: eyes.engine.load_now().progress_age_s > 0.3)
    eyes.until(lambda: eyes.ended(job), "it ends")
    monkeypatch.undo()
    assert_alive(eyes)


def test_no_more_is_encoded_of_what_has_failed(
    eyes: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three images the first fails, and the second is encoded meanwhile."""
    encode, encoded, ended = Projector.encode, list[MediaChunk](), threading.Event()

    def encode_some(self: Projector, chunk: MediaChunk) -> Any:
        encoded.append(chunk)
        if len(encoded) == 1:
            raise RuntimeError("no such picture")
        assert ended.wait(60)
        return encode(self, chunk)

    monkeypatch.setattr(Projector, "encode", encode_some)
    with contextlib.ExitStack() as held:
        held.callback(ended.set)
        job = eyes.ask(HISTORY, cache_salt="not read")
        eyes.until(lambda: eyes.ended(job), "it ends")
        assert "no such picture" in (eyes.outputs[job][-1].error or "")
    eyes.answer(OTHER, cache_salt="not read either")
    assert len(encoded) <= 3


def test_many_are_cancelled_at_any_time(eyes: Seeing) -> None:
    drawn = random.Random(5)
    due = eyes.answer(HISTORY)
    for turn in range(30):
        size = (drawn.randrange(40, 300), drawn.randrange(40, 300))
        messages = [say("user", paint("red", size), paint("blue", size), "?")]
        job = eyes.ask(messages, max_tokens=40)
        eyes.until(partial(_has_run, eyes, job, turn % 5), "it has some tokens")
        eyes.engine.cancel(job)
    eyes.until_idle()
    assert eyes.answer(HISTORY) == due


def _has_run(engine: Seeing, job: int, steps: int) -> bool:
    return len(engine.outputs.get(job, [])) >= steps


def test_a_preempted_request_reads_its_images_again(folder: Path) -> None:
    engine = open_engine(folder, max_context=256, options={"slots": 2})
    try:
        due = engine.answer(HISTORY, max_tokens=60)
        capacity = engine.engine._loaded.context.capacity
        jobs = [engine.ask(HISTORY, max_tokens=60, cache_salt=str(i)) for i in range(2)]
        engine.engine._loaded.context.capacity = 250  # too little for both
        assert [engine.tokens(job) for job in jobs] == [due, due]
        engine.engine._loaded.context.capacity = capacity
    finally:
        engine.close()


def test_a_pass_without_room(convert: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp finds no place for an image: others, who had a token in that step, make room."""
    engine = open_engine(convert("gemma3"), options={"slots": 2})
    try:
        due = [engine.answer(messages, max_tokens=600) for messages in (ONE, NONE)]
        encode, decode = Projector.encode, Context.decode_embeddings
        go_on, refusals = threading.Event(), iter(range(2))

        def encode_late(self: Projector, chunk: MediaChunk) -> Any:
            assert go_on.wait(60)
            return encode(self, chunk)

        def refuse(self: Context, *arguments: Any, **more: Any) -> None:
            if next(refusals, None) is not None:
                raise InsufficientMemory
            decode(self, *arguments, **more)

        monkeypatch.setattr(Projector, "encode", encode_late)
        monkeypatch.setattr(Context, "decode_embeddings", refuse)
        picture = engine.ask(ONE, max_tokens=600, cache_salt="anew")
        text = engine.ask(NONE, max_tokens=600, cache_salt="anew")
        engine.until(lambda: len(engine.outputs.get(text, [])) > 5, "the text is under way")
        go_on.set()
        assert [engine.tokens(job) for job in (picture, text)] == due
        assert next(refusals, None) is None
    finally:
        engine.close()


def test_an_image_that_cannot_be_encoded_fails_alone(
    eyes: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Projector, chunk: MediaChunk) -> Any:
        raise RuntimeError("llama.cpp cannot encode it: no memory")

    due = eyes.answer(NONE)
    monkeypatch.setattr(Projector, "encode", fail)
    job = eyes.ask(OTHER, cache_salt="not known to fail")
    text = eyes.ask(NONE)
    eyes.until(lambda: eyes.ended(job), "it fails")
    (output,) = eyes.outputs[job]
    assert output.param == "messages" and "no memory" in (output.error or "")
    assert eyes.tokens(text) == due
    monkeypatch.undo()
    assert_alive(eyes)


def test_memory_of_images_is_freed(eyes: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a prompt are in llama.cpp's memory."""
    mtmd = eyes.engine._loaded.projector._mtmd
    free, calls = mtmd.mtmd_input_chunks_free, []

    def note_freed(chunks: int) -> None:
        calls.append(chunks)
        free(chunks)

    monkeypatch.setattr(mtmd, "mtmd_input_chunks_free", note_freed)
    eyes.answer(OTHER)
    eyes.until_idle()
    eyes.until_true(lambda: gc.collect() >= 0 and len(calls) > 0)


# ---------------------------------------------------------------- what is refused


def bomb() -> Media:
    """A few kilobytes for as many pixels as take a quarter of a gigabyte."""
    file = io.BytesIO()
    Pillow.new("1", (9000, 9000)).save(file, "PNG")
    return Media(file.getvalue(), "image/png")


@pytest.mark.parametrize(
    ("media", "words"),
    [
        (Media(RED.data[:60], RED.kind), "image 1 cannot be decoded"),
        (Media(b"", RED.kind), "image 1 cannot be decoded"),
        (bomb(), r"image 1 has 9000 × 9000 pixels, and 67108864 are allowed"),
        (paint("red", (8, 900)), "no side may be more than 100 times as long"),
    ],
)
def test_what_is_no_picture(eyes: Seeing, media: Media, words: str) -> None:
    beside = eyes.ask(ONE)
    with pytest.raises(RequestError, match=words) as caught:
        eyes.ask([say("user", "?", media)])
    assert caught.value.param == "messages"
    eyes.tokens(beside)


def test_odd_sizes(seeing: Seeing) -> None:
    """An image of any size is read, or refused: llama.cpp does not end the process."""
    for size in [(1, 1), (1, 2), (1, 100), (100, 1), (3, 3), (5, 499), (4000, 40), (2000, 1500)]:
        file = io.BytesIO()
        Pillow.new("RGB", size, "red").save(file, "PNG")
        try:
            seeing.answer([say("user", Media(file.getvalue(), "image/png"), "?")], max_tokens=2)
        except RequestError as error:
            assert "cannot prepare" in error.message or "tokens" in error.message
    assert_alive(seeing)


def test_ten_pictures(seeing: Seeing) -> None:
    colours = ("red", "green", "blue", "white", "black", "grey", "pink", "gold", "cyan", "navy")
    many = [say("user", *[paint(one, (84, 84)) for one in colours], "How many?")]
    prompt = seeing.engine.encode_media(many, (), {}, False)
    assert len({chunk.mark for chunk in prompt.inputs.chunks}) == len(prompt.inputs.chunks) >= 10
    assert len(seeing.answer(many)) == Seeing.TOKENS


@pytest.mark.parametrize("text", ["<__media__>", "<image>", "<|image_pad|>", "f" * 32 + "_0_"])
def test_a_text_is_never_taken_for_an_image(eyes: Seeing, text: str) -> None:
    with_text = eyes.engine.encode_media([say("user", text, RED)], (), {}, False)
    plain = eyes.engine.encode_media([say("user", RED)], (), {}, False)
    assert len(with_text.inputs.chunks) == len(plain.inputs.chunks)
    assert len(with_text.ids) - len(plain.ids) == len(eyes.engine.codec.encode_plain(text))


def test_a_template_without_a_place(folder: Path) -> None:
    engine = open_engine(folder, chat_template="{{ messages[-1]['content'] }}")
    try:
        with pytest.raises(RequestError, match="has places for 1 of these 3 images only"):
            engine.ask(HISTORY)
        assert engine.answer(ONE)
    finally:
        engine.close()


def test_no_scores_of_images(eyes: Seeing) -> None:
    with pytest.raises(Unsupported, match="prompt_logprobs: the llamacpp engine tells none"):
        eyes.ask(ONE, prompt_logprobs=1)


def test_a_recording_is_refused_by_eyes(eyes: Seeing) -> None:
    with pytest.raises(Unsupported, match="it takes no recordings"):
        eyes.ask([say("user", Media(write_wav(make_samples(1.0)), "audio/wav"))])


# ---------------------------------------------------------------- loading


def refusal(folder: Path, **options: Any) -> str:
    spec = make_spec(folder / "model.gguf", engine="llamacpp", options=options)
    with pytest.raises(LoadError) as caught:
        LlamaCppEngine(spec).load(lambda progress: None)
    return caught.value.message


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    events: list[tuple[str, str]] = []

    class Log:
        def warning(self, event: str, **fields: str) -> None:
            events.append((event, fields["reason"]))

    monkeypatch.setattr(media_warnings, "log", Log())
    return events


def wider(tmp_path: Path, write: Folders) -> Path:
    """A projector whose embeddings are not as wide as the model's."""
    other = shutil.copytree(write("qwen2_vl"), tmp_path / "wider")
    config = json.loads((other / "config.json").read_text())
    config["text_config"]["hidden_size"] = 96
    (other / "config.json").write_text(json.dumps(config))
    tensors = load_file(other / "model.safetensors")
    for part in ("weight", "bias"):
        name = f"visual.merger.mlp.2.{part}"
        tensors[name] = tensors[name][:96].copy()
    seen = {name: values for name, values in tensors.items() if name.startswith("visual.")}
    return write_projector(tmp_path / "mmproj-wider.gguf", other, config, seen)


def test_a_projector_for_another_model(
    folder: Path, tmp_path: Path, write: Folders, warned: list[tuple[str, str]]
) -> None:
    """A named one is an error; one that only lies beside the model leaves it without eyes."""
    file = wider(tmp_path, write)
    said = refusal(folder, mmproj=str(file))
    assert said.startswith(
        f"options.mmproj: {file} belongs to another model: it makes embeddings of"
    )
    assert "of 96 numbers, and this model's have 128" in said
    shutil.copy(folder / "model.gguf", tmp_path)
    engine = open_engine(tmp_path)
    try:
        assert "images" not in engine.info.serves and engine.answer(NONE)
        with pytest.raises(Unsupported, match="takes no images"):
            engine.ask(ONE)
    finally:
        engine.close()
    assert [event for event, _ in warned] == ["images_unavailable"]
    assert "belongs to another model" in warned[0][1]


def test_what_is_no_projector(folder: Path, tmp_path: Path) -> None:
    said = refusal(folder, mmproj=str(folder / "model.gguf"))
    assert "is no projector: it is a model of the architecture 'qwen2vl'" in said
    assert "no such file" in refusal(folder, mmproj=str(tmp_path / "none.gguf"))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes((folder / "mmproj.gguf").read_bytes()[:-1000])
    assert str(cut) in refusal(folder, mmproj=str(cut))
    cut.write_bytes(b"GGUF" + bytes(100))
    assert str(cut) in refusal(folder, mmproj=str(cut))


def test_a_vocabulary_without_the_tokens_around_images(convert: Folders, folder: Path) -> None:
    """Of Idefics3's projector, whose embeddings are as wide as Qwen2-VL's."""
    said = refusal(folder, mmproj=str(convert("idefics3") / "mmproj.gguf"))
    assert "options.mmproj" in said and "cannot read a sample" in said


def test_two_projectors_beside_a_model(
    folder: Path, tmp_path: Path, warned: list[tuple[str, str]]
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    shutil.copy(tmp_path / "mmproj.gguf", tmp_path / "mmproj-Q8_0.gguf")
    engine = open_engine(tmp_path)
    engine.close()
    assert "images" not in engine.info.serves
    assert "options.mmproj says which" in warned[0][1]
    engine = open_engine(tmp_path, options={"mmproj": str(tmp_path / "mmproj-Q8_0.gguf")})
    engine.close()
    assert "images" in engine.info.serves
    assert engine.info.detail.endswith("; images by mmproj-Q8_0.gguf")
    engine = open_engine(tmp_path, options={"mmproj": False})
    engine.close()
    assert "images" not in engine.info.serves and len(warned) == 1


def test_a_folder_stands_for_its_model(folder: Path) -> None:
    engine = Seeing(make_spec(folder, engine="llamacpp"), LlamaCppEngine)
    engine.close()
    assert "images" in engine.info.serves


def test_a_library_without_libmtmd(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of llama.cpp's own builds, where the other library is not beside it."""
    library = open_binding("auto").library
    monkeypatch.setattr(library, "path", "libc.so.6")
    named = str(folder / "mmproj.gguf")
    assert "comes without libmtmd, llama.cpp's library for images" in refusal(folder, mmproj=named)
    engine = open_engine(folder)
    engine.close()
    assert "images" not in engine.info.serves


def test_limits_of_an_image(folder: Path) -> None:
    """Of Qwen2-VL, which takes images of any size; llama.cpp's own limits are 8 and 4096 tokens."""
    pictures = [paint("red", size) for size in ((56, 56), (1120, 1120))]
    counts = []
    for options in ({}, {"image_min_tokens": 30, "image_max_tokens": 60}):
        engine = open_engine(folder, options=options)
        prompts = [
            engine.engine.encode_media([say("user", one)], (), {}, False) for one in pictures
        ]
        counts.append([prompt.inputs.chunks[0].count for prompt in prompts])
        engine.close()
    assert counts[0][0] < 30 and counts[0][1] == 1600
    assert 30 <= counts[1][0] <= counts[1][1] <= 60
    assert "options.mmproj" in refusal(
        folder, mmproj=str(folder / "mmproj.gguf"), image_min_tokens=60, image_max_tokens=30
    )


def test_files_tell_a_worker_from_another(folder: Path, tmp_path: Path) -> None:
    """Streams go on only where the projector is the same, too."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    found = []
    for options in ({}, {"mmproj": False}):
        engine = open_engine(tmp_path, options=options)
        found.append(engine.engine.identify(portable=True))
        engine.close()
    assert found[0] != found[1]
    assert found[0].startswith(found[1])


def test_the_projector_takes_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = read_header(folder / "mmproj.gguf")
    taken = projector.estimate_bytes(header)
    assert taken > (folder / "mmproj.gguf").stat().st_size
    monkeypatch.setattr(cgroup, "available_memory_bytes", lambda: taken + 1000)
    with pytest.raises(LoadError, match="Memory is enough for a context of 0 tokens only"):
        open_engine(folder)
    engine = open_engine(folder, options={"mmproj": False})
    engine.close()


def test_the_projector_takes_memory_of_the_first_gpu() -> None:
    assert loading.reserve_bytes((10, 10), 4) == (6, 10)
    assert loading.reserve_bytes((3, 10), 4) == (0, 10)
    assert loading.reserve_bytes((), 4) == ()


# ---------------------------------------------------------------- recordings


def test_recordings(tmp_path: Path, tiny_model: Path) -> None:
    """A projector that hears, by windows of 30 s as llama.cpp has them."""
    convert_model(write_qwen2_audio(tmp_path / "ears", tiny_model, hears_s=30), tmp_path)
    engine = open_engine(tmp_path, options={"max_audio_s": 5})
    try:
        assert "audio" in engine.info.serves and "images" not in engine.info.serves
        heard = [Media(write_wav(make_samples(s)), "audio/wav") for s in (1.5, 3.0)]
        answers = [engine.answer([say("user", one, "What is this?")]) for one in heard]
        assert answers[0] != answers[1]
        jobs = [engine.ask([say("user", one, "What is this?")]) for one in heard]
        assert [engine.tokens(job) for job in jobs] == answers
        # libmtmd's process ended for one sample; it reads on behind less than 201
        answers = [
            engine.answer([say("user", Media(write_wav(sound), "audio/wav"))])
            for count in (1, 2, 150)
            for sound in (make_samples(1)[:count], np.pad(make_samples(1)[:count], (0, 400)))
        ]
        assert answers[::2] == answers[1::2]
        long = Media(write_wav(make_samples(6.0)), "audio/wav")
        with pytest.raises(RequestError, match="recording 1: the recording is longer than 5 s"):
            engine.ask([say("user", long)])
        with pytest.raises(Unsupported, match="it takes no images"):
            engine.ask(ONE)
    finally:
        engine.close()
