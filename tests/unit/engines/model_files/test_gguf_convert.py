"""GGUF to safetensors: the same model comes out, and a bad file is refused with its reason."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from servekit.engines.model_files import gguf_convert
from servekit.errors import LoadError
from servekit.model_metadata.gguf import END_KEYS, END_TOKENS, read_header
from servekit.protocol.messages import Progress
from tests.unit.engines.conftest import llamacpp
from tests.unit.engines.harness import Harness, make_spec, write_tiny_llama
from tests.unit.engines.llamacpp.making import write_sentencepiece
from tests.unit.engines.origins import (
    HIDDEN,
    SMOLLM2,
    SPECIAL,
    TEMPLATE,
    shared_cache,
    write_tiny_gguf,
)

HARMONY = ["<|return|>", "<|call|>", "<|calls|>", "<|flush|>"]


def ignore(_: Progress) -> None:
    pass


def load(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options)


def tokenizer(folder: Path, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, **options)


def logits(model: Any, ids: list[int]) -> Any:
    import torch

    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("tied", [True, False])
def test_the_conversion_is_the_model_that_the_file_holds(tmp_path: Path, tied: bool) -> None:
    import torch

    path = write_tiny_gguf(tmp_path / "tiny.gguf", tied=tied)
    (folder := tmp_path / "out").mkdir()
    gguf_convert.convert_gguf(path, folder, ignore)
    direct = load(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    converted = load(folder)
    assert converted.dtype == torch.float32
    assert torch.equal(logits(direct, [1, 50, 60, 7]), logits(converted, [1, 50, 60, 7]))
    shares = converted.lm_head.weight.data_ptr() == converted.model.embed_tokens.weight.data_ptr()
    assert shares == tied == converted.config.tie_word_embeddings
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def test_tokenizer_template_and_generation_config_come_along(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", general__sampling__top_k=7)
    (folder := tmp_path / "out").mkdir()
    gguf_convert.convert_gguf(path, folder, ignore)
    ours, theirs = tokenizer(folder), tokenizer(tmp_path, gguf_file="tiny.gguf")
    text = "the hello <|im_end|> wörld 🙂"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.decode(ours(text, add_special_tokens=False)["input_ids"]) == text
    assert (ours.bos_token, ours.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert not ours.clean_up_tokenization_spaces and ours.chat_template == TEMPLATE
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, [0, 2])
    assert (generation["temperature"], generation["top_k"]) == (0.8, 7)


def test_the_ends_of_a_generation_are_those_that_llama_cpp_takes(tmp_path: Path) -> None:
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", tokenizer__ggml__eot_token_id=7, tokenizer__ggml__eom_token_id=9
    )
    # 0 and 2 by their names, <|endoftext|> and <|im_end|>; 1 is <|im_start|>
    assert read_header(path).end_ids == (0, 2, 7, 9)
    llama = pytest.importorskip("xllamacpp") and llamacpp(path)
    assert llama.engine._eos == {0, 2, 7, 9}
    llama.close()


def ends_of_llama_cpp(path: Path) -> set[int]:
    """The ends of a generation by the library itself, which reads the vocabulary alone."""
    from servekit.engines.llamacpp.library.bindings import Settings, open_binding
    from servekit.engines.llamacpp.vocabulary import Vocabulary

    binding = open_binding("auto")
    settings = Settings(str(path), 0, "layer", 64, 32, 1, 1, "off", "f32", None)
    model = binding.load_model(settings)
    assert model is not None
    try:
        return set(Vocabulary(binding.library, model).eos)
    finally:
        binding.library.call("llama_model_free", model)


TEXTS = sorted(END_TOKENS.union(*END_KEYS.values()) - set(SPECIAL))
#: Texts that look as if they ended something.
OTHERS = ["<|eos|>", "<|eot|>", "<|end_of_turn|>", "<im_end>", "<|turn_end|>", "<|fim_middle|>"]
PLAIN, CONTROL, ADDED = 1, 3, 4


@pytest.mark.lane("long")
@pytest.mark.parametrize("kind", [PLAIN, CONTROL, ADDED])
@pytest.mark.parametrize("byte_level", [True, False], ids=["byte-level", "sentencepiece"])
def test_each_token_that_llama_cpp_takes_for_an_end_is_one(
    tmp_path: Path, kind: int, byte_level: bool
) -> None:
    pytest.importorskip("xllamacpp")
    for at, text in enumerate([*TEXTS, *OTHERS]):
        path = tmp_path / f"{at}.gguf"
        if byte_level:
            write_tiny_gguf(path, added=([text], kind))
        else:
            pieces = ["<unk>", "<s>", "end", text, "a", "b"]
            write_tiny_gguf(path, sentencepiece=(pieces, [0.0] * 6, [2, 3, 3, kind, 1, 1]))
        ours = set(read_header(path).end_ids)
        assert ours == ends_of_llama_cpp(path), text
        assert len(ours) == (2 if byte_level else 1) + (text in TEXTS)


@pytest.mark.parametrize(
    ("texts", "keys"),
    [
        *((["<|end|>", *rest], {}) for rest in combinations(HARMONY, 2)),
        (["<|end|>", *HARMONY], {}),
        (["</s>", "<|tool_response>"], {}),
        *((["</s>", "<|tool_response>"], {key: 261}) for key in END_KEYS),
        *((["<PAD>", "<REPO>", "<|file_sep|>"], {key: 1}) for key in END_KEYS),
        *((["<PAD>", "<REPO>", "<|file_sep|>"], {key: 99999}) for key in END_KEYS if key != "eos"),
    ],
)
def test_what_llama_cpp_makes_of_several_ends_and_of_keys(
    tmp_path: Path, texts: list[str], keys: dict[str, int]
) -> None:
    pytest.importorskip("xllamacpp")
    stated: dict[str, Any] = {
        f"tokenizer__ggml__{key}_token_id": token for key, token in keys.items()
    }
    path = write_tiny_gguf(tmp_path / "tiny.gguf", added=(texts, CONTROL), **stated)
    assert set(read_header(path).end_ids) == ends_of_llama_cpp(path)


def test_an_end_of_turn_that_is_not_the_end_of_sequence_ends_the_answer(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", tokenizer__ggml__eot_token_id=40)
    (folder := tmp_path / "out").mkdir()
    gguf_convert.convert_gguf(path, folder, ignore)
    harness = Harness(make_spec(folder))
    try:
        job = harness.submit([50, 60], max_tokens=8, logit_bias=((40, 100.0),))
        assert (harness.tokens(job), harness.finish(job)) == ([], "stop")
    finally:
        harness.close()


def test_the_token_that_closes_a_turn_in_the_template_ends_the_answer(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    for name, key in (("config.json", "eos_token_id"), ("generation_config.json", "eos_token_id")):
        stated = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(stated | {key: 0}))
    stated = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(stated | {"eos_token": "<|endoftext|>"})
    )
    harness = Harness(make_spec(folder))
    try:
        end = tokenizer(folder).convert_tokens_to_ids("<|im_end|>")
        assert tokenizer(folder).eos_token_id == 0 != end
        job = harness.submit([50, 60], max_tokens=8, logit_bias=((end, 100.0),))
        assert (harness.tokens(job), harness.finish(job)) == ([], "stop")
    finally:
        harness.close()


@pytest.mark.parametrize("kind", ["llama-bpe", "tekken", "qwen2"])
def test_a_text_has_the_tokens_that_it_has_in_llama_cpp(tmp_path: Path, kind: str) -> None:
    """Llama 3's and Mistral's begin with a token of its own, and have words that no merge makes."""
    metadata: dict[str, Any] = {"tokenizer__ggml__pre": kind}
    path = write_tiny_gguf(tmp_path / "tiny.gguf", added=(["sea"], 1), **metadata)
    (folder := tmp_path / "out").mkdir()
    gguf_convert.convert_gguf(path, folder, ignore)
    found = tokenizer(folder)
    engine = llamacpp(path)
    try:
        for text in ("sea", "the sea", "12 seas", ""):
            assert found(text)["input_ids"] == engine.engine.codec.encode(text)
    finally:
        engine.close()


LONG = {
    "rope_factors_long.weight": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
    "rope_factors_short.weight": [1.0] * 6,
}
ORIGINAL = "rope__scaling__original_context_length"
#: By the name of a way to scale: an architecture, further tensors and metadata.
SCALINGS: dict[str, tuple[str, dict[str, list[float]], dict[str, Any]]] = {
    "llama3": ("llama", {"rope_freqs.weight": [1.0, 1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]}, {}),
    "linear": ("llama", {}, {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}),
    "older": ("llama", {}, {"rope__scale_linear": 4.0}),
    "none": ("llama", {}, {"rope__scaling__type": "none", "rope__scaling__factor": 4.0}),
    "yarn": (
        "llama",
        {},
        {
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 4.0,
            ORIGINAL: 64,
            "rope__scaling__attn_factor": 1.3,
        },
    ),
    "partly": ("phi3", {}, {"rope__dimension_count": 12}),
    "longrope": (
        "phi3",
        LONG,
        {"rope__dimension_count": 12, ORIGINAL: 64, "rope__scaling__attn_factor": 1.19},
    ),
}


@pytest.mark.parametrize("way", SCALINGS)
def test_rotary_embeddings_are_scaled_as_in_llama_cpp(tmp_path: Path, way: str) -> None:
    """Llama 3.1, Phi 4 mini, Gemma 3 and whatever has YaRN: the library forgets the scaling."""
    architecture, more, stated = SCALINGS[way]
    metadata = {f"{architecture}__{key}": value for key, value in stated.items()}
    metadata["tokenizer__ggml__padding_token_id"] = 0
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", architecture=architecture, float32=True, more=more, **metadata
    )
    (folder := tmp_path / "out").mkdir()
    gguf_convert.convert_gguf(path, folder, ignore)
    assert_as_llama_cpp(path, folder, 1e-3)


def assert_as_llama_cpp(path: Path, folder: Path, within: float) -> None:
    """The model in the folder has the logits that llama.cpp computes from the file."""
    prompt = [3 + 7919 * at % 250 for at in range(200)]
    found = logits(load(folder), prompt)[-1].log_softmax(-1).topk(20).values.tolist()
    engine = llamacpp(path)
    try:
        (token,) = engine.logprobs(engine.submit(prompt, max_tokens=1, logprobs=20))
    finally:
        engine.close()
    assert [logprob for _, logprob in token.best] == pytest.approx(found, abs=within)


def test_gemmas_attention_is_scaled_as_in_llama_cpp(tmp_path: Path) -> None:
    stated = {"key_length": 16, "value_length": 16, "sliding_window": 32}
    metadata = {f"gemma2__attention__{key}": value for key, value in stated.items()}
    caps = {"gemma2__attn_logit_softcapping": 50.0, "gemma2__final_logit_softcapping": 30.0}
    path = write_sentencepiece(tmp_path / "tiny.gguf", architecture="gemma2", **metadata, **caps)
    (folder := tmp_path / "out").mkdir()
    gguf_convert.convert_gguf(path, folder, ignore)
    assert_as_llama_cpp(path, folder, 2e-2)  # which has a table of GELU


def test_progress_counts_every_tensor(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    (folder := tmp_path / "out").mkdir()
    seen: list[Progress] = []
    gguf_convert.convert_gguf(path, folder, seen.append)
    assert [p.done for p in seen] == [0, *range(20), 20]
    assert {(p.phase, p.total, p.unit) for p in seen} == {("convert", 20, "tensors")}


def test_the_library_is_left_as_it_was(tmp_path: Path) -> None:
    import gguf as gguf_package
    from transformers import modeling_gguf_pytorch_utils as library

    before = (gguf_package.GGUFReader, gguf_package.get_tensor_name_map, vars(library)["tqdm"])
    path = write_tiny_gguf(tmp_path / "tiny.gguf", architecture="nonesuch")
    with pytest.raises(LoadError):
        gguf_convert.convert_gguf(path, tmp_path, ignore)
    after = (gguf_package.GGUFReader, gguf_package.get_tensor_name_map, vars(library)["tqdm"])
    assert after == before


def test_a_large_model_is_stored_as_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    header = read_header(path)
    wide = gguf_convert.converted_bytes(header)
    monkeypatch.setattr(gguf_convert, "FLOAT32_BELOW", header.parameters)
    (folder := tmp_path / "out").mkdir()
    gguf_convert.convert_gguf(path, folder, ignore)
    assert load(folder, dtype="auto").dtype == torch.bfloat16
    assert wide - gguf_convert.converted_bytes(header) == 2 * header.parameters


def test_the_header_is_read_without_the_tensors(tmp_path: Path) -> None:
    header = read_header(write_tiny_gguf(tmp_path / "tiny.gguf"))
    assert (header.architecture, header.tensors) == ("llama", 20)
    assert header.special_ids == {"bos_token": 1, "eos_token": 2}
    per_layer = 2 * HIDDEN + 2 * HIDDEN * HIDDEN + 2 * HIDDEN * 32 + 3 * HIDDEN * 96
    assert header.parameters == 2 * per_layer + HIDDEN + 261 * HIDDEN


@pytest.mark.parametrize("keep", [0, 3, 4, 30, 2000, -1])
def test_a_file_cut_short_is_refused(tmp_path: Path, keep: int) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(LoadError, match=r"tiny\.gguf is not a whole GGUF file: .*Fetch it again"):
        read_header(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"PK\3\4" + bytes(64), "does not start with GGUF"),
        (b"GGUF" + bytes([0, 0, 0, 3]) + bytes(64), "version is 0x3000000"),
        (b"GGUF\3\0\0\0" + b"\xff" * 16, "not a whole GGUF file"),
        (b"GGUF\3\0\0\0" + bytes(8) + b"\1" + bytes(7) + bytes(8) + b"\x63" + bytes(11), "type 99"),
    ],
)
def test_what_is_no_gguf_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(LoadError, match=reason):
        read_header(tmp_path / "x.gguf")


def test_bytes_flipped_anywhere_in_the_header_raise_nothing_but_load_errors(tmp_path: Path) -> None:
    whole = write_tiny_gguf(tmp_path / "tiny.gguf").read_bytes()
    path = tmp_path / "flipped.gguf"
    refused = 0
    for at in range(0, 9000, 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            read_header(path)
        except LoadError:
            refused += 1
    assert refused > 100


def test_one_part_of_many_says_how_to_join_them(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny-00001-of-00002.gguf", split=2)
    with pytest.raises(LoadError, match=r"one of 2 parts.*--merge"):
        read_header(path)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", architecture="nonesuch")
    with pytest.raises(LoadError, match=r"tiny\.gguf \(architecture nonesuch\) cannot") as caught:
        gguf_convert.convert_gguf(path, tmp_path, ignore)
    assert caught.value.permanent


def test_a_tensor_that_is_lacking_is_not_made_up(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", skip="blk.1.ffn_up")
    with pytest.raises(LoadError, match=r"lacks 1 tensors.*layers\.1\.mlp\.up_proj"):
        gguf_convert.convert_gguf(path, tmp_path, ignore)


@pytest.mark.model
@pytest.mark.lane("models")
def test_smollm2_converted_equals_smollm2_loaded_from_its_gguf() -> None:
    import torch

    from servekit.engines.model_files.source import resolve_folder

    folder = resolve_folder(SMOLLM2, None, ignore, cache=shared_cache())
    file = next(folder.parent.glob("*-file-*/SmolLM2-135M-Instruct.Q4_1.gguf"))
    ids = tokenizer(folder)("The capital of France is")["input_ids"]
    direct = load(file.parent, gguf_file=file.name, dtype=torch.float32)
    converted = load(folder)
    assert torch.equal(logits(direct, ids), logits(converted, ids))
    assert tokenizer(folder).decode(logits(converted, ids)[-1].argmax()).strip() == "Paris"
