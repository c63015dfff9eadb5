"""Names of files as publishers write them, and which of them a tag means."""

from __future__ import annotations

import pytest

from servekit.model_metadata.quantizations import choose_files, find_label, list_labels, list_parts

UNSLOTH = [
    *("README.md", "config.json", "mmproj-F16.gguf", "mmproj-BF16.gguf", "imatrix_unsloth.dat"),
    *("Qwen3-8B-Q4_K_M.gguf", "Qwen3-8B-UD-Q4_K_XL.gguf", "Qwen3-8B-UD-IQ1_S.gguf"),
    *(f"BF16/Qwen3-8B-BF16-0000{n}-of-00002.gguf" for n in (2, 1)),
]
BARTOWSKI = ["X-Q6_K.gguf", "X-Q6_K_L.gguf", "X-IQ4_XS.gguf", "X-f16.gguf", "X-imatrix.gguf"]


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("Qwen3-0.6B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("qwen2.5-7b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("qwen2.5-7b-instruct-fp16-00001-of-00004.gguf", "F16"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("Model.i1-IQ4_XS.gguf", "IQ4_XS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("X-MXFP4_MOE.gguf", "MXFP4_MOE"),
        ("ggml-model-i2_s.gguf", "I2_S"),
        ("X-Q4_0_4_4.gguf", "Q4_0_4_4"),
        ("X-Q8_0-v2.gguf", "Q8_0"),
        ("UD-IQ1_S/R1-UD-IQ1_S-00001-of-00003.gguf", "UD-IQ1_S"),
        ("Q8_0/model-00001-of-00002.gguf", "Q8_0"),
        ("Llama-3.2-3B.gguf", ""),
        ("QwQ-32B.gguf", ""),
        ("latest", ""),
        ("8b", ""),
    ],
)
def test_labels(name: str, label: str) -> None:
    assert find_label(name) == label


@pytest.mark.parametrize(
    ("names", "tag", "files"),
    [
        (UNSLOTH, "Q4_K_M", ["Qwen3-8B-Q4_K_M.gguf"]),
        (UNSLOTH, "q4_k_m", ["Qwen3-8B-Q4_K_M.gguf"]),
        (UNSLOTH, "UD-Q4_K_XL", ["Qwen3-8B-UD-Q4_K_XL.gguf"]),
        (UNSLOTH, "Q4_K_XL", ["Qwen3-8B-UD-Q4_K_XL.gguf"]),
        (UNSLOTH, "Qwen3-8B-Q4_K_M.gguf", ["Qwen3-8B-Q4_K_M.gguf"]),
        (UNSLOTH, "BF16", [f"BF16/Qwen3-8B-BF16-0000{n}-of-00002.gguf" for n in (1, 2)]),
        (BARTOWSKI, "Q6_K", ["X-Q6_K.gguf"]),
        (BARTOWSKI, "FP16", ["X-f16.gguf"]),
        (["M.i1-Q4_K_M.gguf", "M.i1-Q2_K.gguf"], "i1-Q4_K_M", ["M.i1-Q4_K_M.gguf"]),
        (["a.gguf", "sub/a.gguf"], "a.gguf", ["a.gguf"]),
        (["Q8_0/m.gguf", "Q4_0/m.gguf"], "Q4_0", ["Q4_0/m.gguf"]),
    ],
)
def test_what_a_tag_chooses(names: list[str], tag: str, files: list[str]) -> None:
    assert choose_files(names, tag) == files


@pytest.mark.parametrize(
    ("names", "tag", "said"),
    [
        (UNSLOTH, "Q5_K_M", "no Q5_K_M; its quantisations: BF16, Q4_K_M, UD-IQ1_S, UD-Q4_K_XL"),
        (UNSLOTH, "F16", "no F16; its quantisations: BF16"),  # mmproj-F16 is no model
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "Q4_0", "2 files for Q4_0, write the name of one: a-Q4_0"),
        (["m.gguf"], "Q4_0", "has no Q4_0; its GGUF files: m.gguf"),
        (["model.safetensors"], "Q4_0", "it has no GGUF files of a model"),
        (["m-Q4_0-00002-of-00003.gguf"], "Q4_0", "has 1 of the 3 parts of m-Q4_0-00002-of-00003"),
        (["m-Q4_0.gguf", "m-Q4_0-00001-of-00001.gguf"], "Q4_0", "has 2 files for Q4_0"),
    ],
)
def test_what_a_tag_does_not_choose(names: list[str], tag: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^has ") as caught:
        choose_files(names, tag)
    assert said in str(caught.value)


def test_a_part_stands_for_all() -> None:
    parts = [f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    assert list_parts([*parts, "m.gguf"], parts[1]) == parts
    assert list_parts([*parts, "m.gguf"], "m.gguf") == ["m.gguf"]
    assert list_parts(parts, "other.gguf") == []
    assert list_labels(parts) == []
