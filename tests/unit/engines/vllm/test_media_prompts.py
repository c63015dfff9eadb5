"""Prompts with images for the core, with a processor as vLLM's; vLLM itself is not needed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import transformers

from servekit.engines.media import media_warnings
from servekit.engines.text.tokenizer import TokenizerCodec
from servekit.engines.vllm import media_prompts
from servekit.errors import EngineFailed, LoadError, RequestError
from servekit.protocol.messages import Media
from tests.unit.engines.harness import make_spec
from tests.unit.engines.transformers.vision.pictures import BLUE, HISTORY, ONE, RED, say

TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text or '<image>' }}{% endfor %}"
    "{% endif %}{% endfor %}"
)
EACH = 5  # tokens that an image becomes


@dataclass
class Feature:
    identifier: str


class FarProcessor:
    """As `InputProcessor`: each image becomes some tokens, and has a name."""

    def __init__(self, tokenizer: Any, template: str | None = TEMPLATE) -> None:
        library = SimpleNamespace(
            tokenizer=tokenizer, chat_template=template, image_processor=object()
        )
        self.limits: dict[str, Any] = {"image": None}
        info = SimpleNamespace(
            get_hf_processor=lambda: library, get_supported_mm_limits=lambda: self.limits
        )
        self.renderer = SimpleNamespace(
            mm_processor=SimpleNamespace(info=info), process_for_engine=self.expand
        )
        self.model_config = SimpleNamespace(max_model_len=100)
        self.supports_mm_inputs = True
        self.image = tokenizer.convert_tokens_to_ids("<image>")
        self.loses = 0

    def expand(self, prompt: Any, arrived_at: float, *, skip_mm_cache: bool) -> Any:
        assert skip_mm_cache
        given = prompt["multi_modal_data"]["image"]
        ids = [
            one
            for token in prompt["prompt_token_ids"]
            for one in [token] * (EACH if token == self.image else 1)
        ]
        return {"prompt_token_ids": ids, "pictures": given}

    def process_inputs(self, *, prompt: Any, **_: Any) -> Any:
        made = [Feature(str(one.getpixel((0, 0)))) for one in prompt["pictures"]]
        return SimpleNamespace(mm_features=made[self.loses :] or None)


@pytest.fixture(autouse=True)
def parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("vllm.sampling_params")
    module.SamplingParams = SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", module)


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    found = transformers.AutoTokenizer.from_pretrained(tiny_model)
    found.add_special_tokens({"additional_special_tokens": ["<image>"]})
    found.chat_template = TEMPLATE
    return found


@pytest.fixture
def far(tokenizer: Any) -> FarProcessor:
    return FarProcessor(tokenizer)


@pytest.fixture
def encoder(far: FarProcessor, tokenizer: Any) -> media_prompts.MediaEncoder:
    return media_prompts.MediaEncoder(far, TokenizerCodec(tokenizer))


def test_images_take_their_places(
    encoder: media_prompts.MediaEncoder, far: FarProcessor, tokenizer: Any
) -> None:
    ids, features = encoder.encode_chat(HISTORY)
    assert ids.count(far.image) == 3 * EACH
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Look  and  here.Fine.And now?"
    assert isinstance(features, list)
    assert len({one.identifier for one in features}) == 3


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((RED, "an <image>"), "a text has <image>, which stands for an image"),
        ((Media(RED.data[:60], RED.kind),), "image 1 cannot be decoded"),
    ],
)
def test_what_is_refused(
    encoder: media_prompts.MediaEncoder, parts: tuple[str | Media, ...], words: str
) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        encoder.encode_chat([say("user", *parts)])
    assert refused.value.param == "messages"


def test_what_vllm_refuses(encoder: media_prompts.MediaEncoder, far: FarProcessor) -> None:
    def refuse(**_: Any) -> Any:
        raise ValueError("At most 1 image(s) may be provided in one prompt.")

    far.process_inputs = refuse  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="refuses these images: ValueError: At most 1"):
        encoder.encode_chat(ONE)


def test_an_image_without_a_place(encoder: media_prompts.MediaEncoder, far: FarProcessor) -> None:
    far.loses = 1
    with pytest.raises(RequestError, match="has no place for these images"):
        encoder.encode_chat(ONE)


def test_a_prompt_beyond_the_context_is_only_counted(
    encoder: media_prompts.MediaEncoder, far: FarProcessor
) -> None:
    far.model_config.max_model_len = 50
    ids, features = encoder.encode_chat([say("user", *[RED, BLUE] * 5)])
    assert (len(ids), features) == (10 * EACH, [])


def test_adapters_read_images_in_their_own_way() -> None:
    features = [Feature("a"), Feature("b")]
    lora = SimpleNamespace(lora_name="tuned")
    named = media_prompts.name_features(features, lora)
    assert [one.identifier for one in named] == ["tuned:a", "tuned:b"]
    assert media_prompts.name_features(features, None) is features
    assert media_prompts.name_features(None, lora) is None


# ---------------------------------------------------------------- loading


def load(
    far: FarProcessor, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, **fields: Any
) -> Any | None:
    module: Any = ModuleType("vllm.v1.engine.input_processor")
    module.InputProcessor = lambda config: far
    for name in ("vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    sees = fields.pop("sees", True)
    config = SimpleNamespace(model_config=SimpleNamespace(is_multimodal_model=sees))
    spec = make_spec("/model", engine="vllm", **fields)
    return media_prompts.load_processor(config, tokenizer, spec)


def test_the_processor_brings_its_template(
    far: FarProcessor, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.chat_template = "of the tokenizer"
    assert load(far, tokenizer, monkeypatch, chat_template="of the file") is far
    assert tokenizer.chat_template == "of the tokenizer"  # which was the file's already
    assert load(far, tokenizer, monkeypatch) is far
    assert tokenizer.chat_template == TEMPLATE


def test_models_without_eyes(
    far: FarProcessor, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(far, tokenizer, monkeypatch, sees=False) is None
    far.limits = {"video": 1}
    assert load(far, tokenizer, monkeypatch) is None
    far.limits, far.supports_mm_inputs = {"image": 0}, False
    assert load(far, tokenizer, monkeypatch) is None


def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    log = SimpleNamespace(warning=lambda event, **why: told.append(why["reason"]))
    monkeypatch.setattr(media_warnings, "log", log)
    return told


def test_texts_are_served_without_a_processor(
    far: FarProcessor, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = warned(monkeypatch)
    far.renderer = SimpleNamespace()
    assert load(far, tokenizer, monkeypatch) is None
    assert len(told) == 1 and "AttributeError" in told[0]


def prove(far: FarProcessor, tokenizer: Any, error: Exception | None = None) -> Any:
    def read_media(prompt: Any) -> None:
        assert prompt.ids.count(far.image) == EACH
        if error is not None:
            raise error

    probes: Any = SimpleNamespace(read_media=read_media)
    spec = make_spec("/model", engine="vllm")
    return media_prompts.prove_media(far, TokenizerCodec(tokenizer), probes, spec)


def test_a_model_has_to_read_an_image(
    far: FarProcessor, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = warned(monkeypatch)
    encoder, read = prove(far, tokenizer)
    assert isinstance(encoder, media_prompts.MediaEncoder) and read == ("images",)
    assert prove(far, tokenizer, LoadError("vLLM did not answer a probe.")) == (None, ())
    with pytest.raises(LoadError, match="model died of its trial of images: the core is gone"):
        prove(far, tokenizer, EngineFailed("the core is gone"))
    tokenizer.chat_template = "{{ messages[0].content[0].text }}"
    assert prove(far, tokenizer) == (None, ())
    assert told == ["vLLM did not answer a probe.", "its chat template has no place for images"]
