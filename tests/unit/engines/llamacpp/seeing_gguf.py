"""GGUF files of small models of `transformers` that see or hear: the model and its projector.

They are converted as llama.cpp's own converter does it, in float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Array = NDArray[np.float32]
_ARCHITECTURES = {
    "idefics3": gguf.MODEL_ARCH.LLAMA,
    "qwen2_vl": gguf.MODEL_ARCH.QWEN2VL,
    "qwen3_vl": gguf.MODEL_ARCH.QWEN3VL,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "qwen2_audio": gguf.MODEL_ARCH.QWEN2,
}
_PROJECTORS = {
    "idefics3": gguf.VisionProjectorType.IDEFICS3,
    "qwen2_vl": gguf.VisionProjectorType.QWEN2VL,
    "qwen3_vl": gguf.VisionProjectorType.QWEN3VL,
    "gemma3": gguf.VisionProjectorType.GEMMA3,
    "qwen2_audio": gguf.VisionProjectorType.QWEN2A,
}
#: Where the tensors of the text model begin in a file, and what the map of names calls it.
_TEXT = {
    "model.text_model.": "model.",
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.",
    "model.": "model.",
    "lm_head.": "lm_head.",
}
_MEDIA = (
    *("model.vision_model.", "model.connector.", "visual.", "vision_tower.", "audio_tower."),
    *("multi_modal_projector.", "model.visual."),
)
_NORMAL, _CONTROL = 1, 3
#: Names that the map lacks, or has for another architecture.
_NAMES = {
    "model.visual.": "visual.",
    "visual.deepstack_merger_list.0.linear_": "v.deepstack.0.",
    "visual.deepstack_merger_list.": "v.deepstack.",
    "visual.merger.norm.": "v.post_ln.",
    "visual.merger.linear_fc1.": "mm.0.",
    "visual.merger.linear_fc2.": "mm.2.",
    "vision_tower.": "vision_tower.vision_model.",
    "mm_input_projection_weight": "mm_input_projection.weight",
}


def convert_model(folder: Path, out: Path, *, begins: bool = False) -> tuple[Path, Path]:
    """Convert a folder into `model.gguf` and `mmproj.gguf` of the folder `out`.

    `begins`: its texts begin with a token, which its chat template does not write.
    """
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    seen = {name: values for name, values in tensors.items() if name.startswith(_MEDIA)}
    text = {name: values for name, values in tensors.items() if name not in seen}
    return (
        _write_text(out / "model.gguf", folder, config, text, begins=begins),
        write_projector(out / "mmproj.gguf", folder, config, seen),
    )


def _write(writer: Any, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ---------------------------------------------------------------- the text model


def _write_text(
    path: Path, folder: Path, config: dict[str, Any], tensors: Any, *, begins: bool
) -> Path:
    kind, text = config["model_type"], config.get("text_config", config)
    architecture = _ARCHITECTURES[kind]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_name(kind)
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    rope = text["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    head = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    if kind in ("gemma3", "qwen3_vl"):
        writer.add_key_length(head)
        writer.add_value_length(head)
    if kind == "gemma3":
        writer.add_sliding_window(text["sliding_window"])
    else:
        writer.add_rope_dimension_count(head)
    if kind == "qwen3_vl":
        writer.add_num_deepstack_layers(len(config["vision_config"]["deepstack_visual_indexes"]))
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_add_bos_token(begins)
    if begins:
        writer.add_bos_token_id(text["vocab_size"] - 1)
    size = _add_vocabulary(writer, folder, text)
    names = gguf.get_tensor_name_map(architecture, text["num_hidden_layers"])
    for name, values in tensors.items():
        start = next(one for one in _TEXT if name.startswith(one))
        found = names.get_name(_TEXT[start] + name.removeprefix(start), (".weight", ".bias"))
        assert found is not None, name
        if kind == "idefics3":
            values = _undo_permutation(name, values, text)
        if kind == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        if len(values) == text["vocab_size"] and size > len(values):
            values = np.concatenate([values, values[: size - len(values)]])
        writer.add_tensor(found, np.ascontiguousarray(values))
    return _write(writer, path)


def _undo_permutation(name: str, values: Array, text: dict[str, Any]) -> Array:
    """Return the rows of a projection in the order in which llama.cpp rotates them."""
    for part, heads in (("q_proj.", "num_attention_heads"), ("k_proj.", "num_key_value_heads")):
        if part in name:
            halves = values.reshape(text[heads], 2, -1, *values.shape[1:])
            return halves.swapaxes(1, 2).reshape(values.shape)
    return values


def _add_vocabulary(writer: Any, folder: Path, text: dict[str, Any]) -> int:
    """Add the tokenizer, with a token for an empty line as llama.cpp looks for; return its size."""
    stated = json.loads((folder / "tokenizer.json").read_text())
    known: dict[str, int] = dict(stated["model"]["vocab"])
    added = {one["content"]: one["id"] for one in stated["added_tokens"]}
    tokens = {id: token for token, id in (known | added).items()}
    ordered = [tokens.get(id, f"[unused {id}]") for id in range(text["vocab_size"])]
    line = "ĊĊ"
    ordered += [] if line in known else [line]
    writer.add_vocab_size(len(ordered))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(ordered)
    writer.add_token_types([_CONTROL if token in added else _NORMAL for token in ordered])
    merges = stated["model"]["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    writer.add_eos_token_id(text["eos_token_id"])
    writer.add_pad_token_id(text["pad_token_id"])
    writer.add_chat_template((folder / "chat_template.jinja").read_text())
    return len(ordered)


# ---------------------------------------------------------------- the projector


def write_projector(path: Path, folder: Path, config: dict[str, Any], tensors: Any) -> Path:
    kind = config["model_type"]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.MMPROJ])
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_name(kind)
    writer.add_clip_projector_type(_PROJECTORS[kind])
    if kind == "qwen2_audio":
        _describe_ears(writer, config)
    else:
        _describe_eyes(writer, folder, config)
    for name, values in tensors.items():
        for found, part in _name_parts(name, values, apart=kind == "qwen2_vl"):
            writer.add_tensor(found, np.ascontiguousarray(part))
    return _write(writer, path)


def _describe_eyes(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    kind, eyes = config["model_type"], config["vision_config"]
    stated = folder / "preprocessor_config.json"
    if not stated.exists():
        stated = folder / "processor_config.json"
    images = json.loads(stated.read_text())
    images = images.get("image_processor", images)
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(config.get("text_config", config)["hidden_size"])
    positions = eyes.get("num_position_embeddings", 1600)
    writer.add_vision_image_size(eyes.get("image_size") or int(positions**0.5) * eyes["patch_size"])
    writer.add_vision_patch_size(eyes["patch_size"])
    width = eyes.get("embed_dim", eyes["hidden_size"])
    writer.add_vision_embedding_length(width)
    ratio = eyes.get("mlp_ratio")
    writer.add_vision_feed_forward_length(eyes.get("intermediate_size") or int(ratio * width))
    writer.add_vision_block_count(eyes.get("depth") or eyes["num_hidden_layers"])
    writer.add_vision_head_count(eyes.get("num_heads") or eyes["num_attention_heads"])
    writer.add_vision_image_mean(images["image_mean"])
    writer.add_vision_image_std(images["image_std"])
    writer.add_vision_attention_layernorm_eps(eyes.get("layer_norm_eps", 1e-6))
    if kind == "idefics3":
        writer.add_vision_projector_scale_factor(config["scale_factor"])
        writer.add_vision_preproc_image_size(images["size"]["longest_edge"])
    if kind == "gemma3":
        patches = eyes["image_size"] // eyes["patch_size"]
        writer.add_vision_projector_scale_factor(
            patches // int(config["mm_tokens_per_image"] ** 0.5)
        )
    if kind != "qwen2_vl":
        writer.add_vision_use_gelu(True)
    if kind == "qwen3_vl":
        writer.add_vision_spatial_merge_size(eyes["spatial_merge_size"])
        deep = eyes["deepstack_visual_indexes"]
        writer.add_vision_is_deepstack_layers([at in deep for at in range(eyes["depth"])])


def _describe_ears(writer: Any, config: dict[str, Any]) -> None:
    ears = config["audio_config"]
    writer.add_clip_has_audio_encoder(True)
    writer.add_audio_projection_dim(config["text_config"]["hidden_size"])
    writer.add_audio_embedding_length(ears["d_model"])
    writer.add_audio_feed_forward_length(ears["encoder_ffn_dim"])
    writer.add_audio_block_count(ears["encoder_layers"])
    writer.add_audio_head_count(ears["encoder_attention_heads"])
    writer.add_audio_num_mel_bins(ears["num_mel_bins"])
    writer.add_audio_attention_layernorm_eps(1e-5)


def _name_parts(name: str, values: Array, *, apart: bool) -> Iterator[tuple[str, Array]]:
    """Yield a tensor by its GGUF name, or the parts of one that llama.cpp has apart.

    `apart`: so it has queries, keys and values.
    """
    if name.startswith("vision_tower.head."):  # not used
        return
    for old, new in _NAMES.items():
        name = name.replace(old, new)
    if name == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", values[:, :, 0]
        yield "v.patch_embd.weight.1", values[:, :, 1]
        return
    if name.startswith("multi_modal_projector.linear."):
        yield name.replace("multi_modal_projector.linear", "mm.a.fc"), values
        return
    if name.startswith(("v.", "mm.")):
        yield name, values
        return
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 32)
    pieces = {name: values}
    if ".qkv." in name and apart:
        thirds = np.split(values, 3)
        pieces = {name.replace("qkv", one): third for one, third in zip("qkv", thirds, strict=True)}
    for own, part in pieces.items():
        found = names.get_name(own, (".weight", ".bias"))
        assert found is not None, own
        if name.endswith("mm_soft_emb_norm.weight"):
            part = part + 1
        if name.endswith(("conv1.bias", "conv2.bias")):
            part = part[:, None]
        yield found, part
