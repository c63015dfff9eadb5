"""Small models with eyes or ears, of random weights: LLaVA, Idefics3, Qwen2-VL, Qwen3-VL, Gemma 3,
Gemma 3n, Qwen2-Audio and Qwen2.5-Omni.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.utils.import_utils import is_torchvision_available

LIBRARY: Any = transformers  # whose types leave these models out
NO_SIZES: Mapping[str, Any] = {}
PIXELS, PATCH = 56, 14
TOKENS_PER_IMAGE = (PIXELS // PATCH) ** 2
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<image>{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if not (loop.last and continue_final_message) %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: A template as most of such models have it: it leaves out content that is a plain text.
_PARTS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}MARK{% endif %}{% endfor %}"
    "{% if not (loop.last and continue_final_message) %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_GEMMA3N_TOKENS = ("image", "boi", "eoi", "audio", "boa", "eoa")


def write_seeing_model(folder: Path, tokenizer_from: Path) -> Path:
    """Write the model; its answers depend on the image, as its weights are large."""
    tokenizer = LIBRARY.AutoTokenizer.from_pretrained(tokenizer_from)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    vision = LIBRARY.CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=PIXELS,
        patch_size=PATCH,
    )
    text = LIBRARY.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config = LIBRARY.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=TOKENS_PER_IMAGE,
    )
    torch.manual_seed(1)
    model = LIBRARY.LlavaForConditionalGeneration(config).float()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim > 1:
                weights.mul_(6.0 if "language" in name else 12.0)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"  # with the names of published models, which vLLM knows
    tower = "vision_tower."
    named = {
        name.replace(tower, f"{tower}vision_model."): weights
        for name, weights in load_file(file).items()
    }
    save_file(named, file, metadata={"format": "pt"})
    images = LIBRARY.CLIPImageProcessorPil(
        size={"shortest_edge": PIXELS}, crop_size={"height": PIXELS, "width": PIXELS}
    )
    LIBRARY.LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=_TEMPLATE,
    ).save_pretrained(folder)
    return folder


def write_idefics3(folder: Path, tokenizer_from: Path) -> Path:
    """Write a model that cuts larger images into tiles."""
    if LIBRARY.__version__.startswith("5.17.") and not is_torchvision_available():
        import pytest

        pytest.skip("transformers 5.17 reads the images of Idefics3 with torchvision only")
    added = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    tokenizer = _load_tokenizer(tokenizer_from, added)
    vision = {"hidden_size": 32, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
    config = LIBRARY.Idefics3Config(
        vision_config=vision | {"num_hidden_layers": 2, "num_attention_heads": 4},
        text_config={"model_type": "llama"} | _describe_text(tokenizer),
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
    )
    _save_loud(LIBRARY.Idefics3ForConditionalGeneration, config, folder)
    images = LIBRARY.Idefics3ImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
    )
    template = _PARTS.replace("MARK", "<image>")
    processor = LIBRARY.Idefics3Processor(images, tokenizer, image_seq_len=4)
    processor.chat_template = template
    processor.save_pretrained(folder)
    return folder


def write_qwen2_vl(folder: Path, tokenizer_from: Path) -> Path:
    """Write a model whose positions have three parts, and whose processor also reads videos."""
    config = configure_qwen2_vl(folder, tokenizer_from, most_tokens=16)
    _save_loud(LIBRARY.Qwen2VLForConditionalGeneration, config, folder)
    return folder


def configure_qwen2_vl(
    folder: Path,
    tokenizer_from: Path,
    *,
    most_tokens: int,
    text: Mapping[str, Any] = NO_SIZES,
    vision: Mapping[str, Any] = NO_SIZES,
) -> Any:
    """Write all but the weights, and return the configuration.

    `most_tokens` is the limit of an image; `text` and `vision` are sizes beside the small ones.
    """
    tokenizer, tokens = _load_qwen_tokenizer(tokenizer_from)
    sizes = _describe_text(tokenizer) | dict(text)
    eighth = sizes["hidden_size"] // sizes["num_attention_heads"] // 8
    parts = [eighth, 3 * eighth // 2, 3 * eighth // 2]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": parts}
    eyes = {"depth": 2, "embed_dim": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 14}
    config = LIBRARY.Qwen2VLConfig(
        vision_config=eyes | {"hidden_size": sizes["hidden_size"]} | dict(vision),
        text_config={"rope_parameters": rope} | sizes,
        **tokens,
    )
    _save_qwen_processor(folder, tokenizer, patch=14, most_tokens=most_tokens)
    return config


def write_qwen3_vl(folder: Path, tokenizer_from: Path) -> Path:
    """Write a model whose first layer, too, is given vectors for each token of an image."""
    tokenizer, tokens = _load_qwen_tokenizer(tokenizer_from)
    sizes = _describe_text(tokenizer) | {"head_dim": 16}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    eyes = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64}
    config = LIBRARY.Qwen3VLConfig(
        vision_config=eyes
        | {"out_hidden_size": sizes["hidden_size"], "deepstack_visual_indexes": [0]}
        | {"num_position_embeddings": 64},
        text_config=sizes | {"rope_parameters": rope | {"mrope_interleaved": True}},
        **tokens,
    )
    _save_qwen_processor(folder, tokenizer, patch=16, most_tokens=16)
    _save_loud(LIBRARY.Qwen3VLForConditionalGeneration, config, folder)
    return folder


def write_gemma3(folder: Path, tokenizer_from: Path) -> Path:
    """Write a model that attends to the tokens of an image in both directions."""
    names = {"image": "<image_soft_token>", "boi": "<start_of_image>", "eoi": "<end_of_image>"}
    tokenizer = LIBRARY.AutoTokenizer.from_pretrained(
        tokenizer_from,
        extra_special_tokens={f"{name}_token": token for name, token in names.items()},
    )
    tokenizer.chat_template = None
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    eyes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LIBRARY.Gemma3Config(
        vision_config=eyes | {"num_attention_heads": 4, "image_size": 32, "patch_size": 8},
        text_config=_describe_text(tokenizer) | {"head_dim": 16, "sliding_window": 64},
        mm_tokens_per_image=4,
        image_token_index=ids["image"],
        boi_token_index=ids["boi"],
        eoi_token_index=ids["eoi"],
        tie_word_embeddings=False,
    )
    _save_loud(LIBRARY.Gemma3ForConditionalGeneration, config, folder)
    images = LIBRARY.Gemma3ImageProcessorPil(
        size={"height": 32, "width": 32}, do_pan_and_scan=False
    )
    template = _PARTS.replace("MARK", names["boi"])
    processor = LIBRARY.Gemma3Processor(
        images, tokenizer, chat_template=template, image_seq_length=4
    )
    processor.save_pretrained(folder)
    return folder


def write_qwen2_audio(folder: Path, tokenizer_from: Path, hears_s: int = 2) -> Path:
    """Write a model that hears recordings of `hears_s` seconds at the most."""
    names = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    tokenizer = _load_tokenizer(tokenizer_from, names)
    ears = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4}
    config = LIBRARY.Qwen2AudioConfig(
        audio_config=ears
        | {"encoder_ffn_dim": 64, "num_mel_bins": 16, "max_source_positions": 50 * hears_s},
        text_config={"model_type": "qwen2"} | _describe_text(tokenizer),
        audio_token_index=tokenizer.convert_tokens_to_ids(names[0]),
    )
    _save_loud(LIBRARY.Qwen2AudioForConditionalGeneration, config, folder)
    file, doubled = folder / "model.safetensors", "language_model.model.model."  # 5.19 writes that
    named = {
        # as in published models, which vLLM knows
        name.replace(doubled, "language_model.model."): weights
        for name, weights in load_file(file).items()
    }
    save_file(named, file, metadata={"format": "pt"})
    extractor = LIBRARY.WhisperFeatureExtractor(feature_size=16, chunk_length=hears_s)
    template = _PARTS.replace("'image'", "'audio'").replace(
        "MARK", "".join(names[i] for i in (1, 0, 2))
    )
    processor = LIBRARY.Qwen2AudioProcessor(extractor, tokenizer, chat_template=template)
    processor.save_pretrained(folder)
    return folder


def write_qwen2_5_omni(folder: Path, tokenizer_from: Path) -> Path:
    """Write the thinker of a model that sees and hears."""
    names = ("vision_bos", "vision_eos", "image", "video", "audio_bos", "audio_eos", "audio")
    tokenizer = LIBRARY.AutoTokenizer.from_pretrained(
        tokenizer_from, extra_special_tokens={f"{name}_token": f"<|{name}|>" for name in names}
    )
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names}
    seen = "<|vision_bos|><|image|><|vision_eos|>"
    heard = "{% elif part['type'] == 'audio' %}<|audio_bos|><|audio|><|audio_eos|>{% endif %}{% end"
    tokenizer.chat_template = _PARTS.replace("MARK", seen).replace("{% endif %}{% end", heard, 1)
    sizes = _describe_text(tokenizer)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    ears = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "n_window": 10}
    eyes = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64}
    thinker = {
        "audio_config": ears
        | {"encoder_ffn_dim": 64, "num_mel_bins": 16, "output_dim": sizes["hidden_size"]}
        | {"max_source_positions": 1500},
        "vision_config": eyes
        | {"out_hidden_size": sizes["hidden_size"], "fullatt_block_indexes": [1]},
        "text_config": sizes | {"rope_parameters": rope},
        "audio_token_index": ids["audio"],
        "image_token_index": ids["image"],
        "video_token_index": ids["video"],
        "audio_start_token_id": ids["audio_bos"],
        "audio_end_token_id": ids["audio_eos"],
        "vision_start_token_id": ids["vision_bos"],
        "vision_end_token_id": ids["vision_eos"],
    }
    config = LIBRARY.Qwen2_5OmniThinkerConfig(**thinker)
    _save_loud(LIBRARY.Qwen2_5OmniThinkerForConditionalGeneration, config, folder)
    _save_qwen_processor(folder, tokenizer, patch=14, most_tokens=16)
    images = json.loads((folder / "preprocessor_config.json").read_text())
    extractor = LIBRARY.WhisperFeatureExtractor(feature_size=16)
    named = {"processor_class": "Qwen2_5OmniProcessor"}
    both = (
        images | named | json.loads(extractor.to_json_string())
    )  # one file, as in published models
    (folder / "preprocessor_config.json").write_text(json.dumps(both))
    return folder


def write_whole_qwen2_5_omni(folder: Path, tokenizer_from: Path) -> Path:
    """Write that thinker with what speaks, as it is published."""
    write_qwen2_5_omni(folder, tokenizer_from)
    kind = LIBRARY.Qwen2_5OmniThinkerForConditionalGeneration
    thinker = kind.from_pretrained(folder)
    hidden = thinker.config.text_config.hidden_size
    small: dict[str, Any] = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "hidden_size": 32,
        "head_dim": 16,
    }
    talker = small | {"embedding_size": hidden, "num_key_value_heads": 1, "intermediate_size": 32}
    sound = small | {"ff_mult": 1, "emb_dim": 16, "num_embeds": 64, "enc_dim": 16}
    sound |= {"enc_emb_dim": 16, "enc_channels": [16, 16, 16, 16, 48]}
    sound |= {"enc_attention_channels": 8, "enc_se_channels": 8}
    config = LIBRARY.Qwen2_5OmniConfig(
        thinker_config=thinker.config.to_dict(),
        talker_config=talker | {"vocab_size": 300},
        token2wav_config={"dit_config": sound, "bigvgan_config": {"upsample_initial_channel": 32}},
        enable_audio_output=False,
    )
    whole = LIBRARY.Qwen2_5OmniForConditionalGeneration(config).float()
    whole.thinker.load_state_dict(thinker.state_dict())
    whole.save_pretrained(folder)
    return folder


def write_gemma3n(folder: Path, tokenizer_from: Path) -> Path:
    """Write a model whose decoder adds something of its own to each layer, for media too.

    Its eyes are timm's, which has to be installed with torchvision: a small ResNet.
    """
    tokenizer = write_gemma3n_processor(folder, tokenizer_from)
    size = len(tokenizer)
    text = _describe_text(tokenizer) | {"vocab_size": size + 16, "head_dim": 16}
    text |= {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": [128] * 4}
    text |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64}
    text |= {"activation_sparsity_pattern": [0.5, 0.0] * 2, "laurel_rank": 8}
    text |= {"vocab_size_per_layer_input": size, "hidden_size_per_layer_input": 8}
    eyes = {"architecture": "resnet18", "hidden_size": 512, "model_args": None}
    ears: dict[str, Any] = {"input_feat_size": 16, "hidden_size": 32, "conf_num_attention_heads": 4}
    ears |= {"conf_num_hidden_layers": 1, "sscp_conv_channel_size": [8, 4]}
    config = LIBRARY.Gemma3nConfig(
        text_config=text,
        vision_config=eyes | {"vocab_size": 8, "vocab_offset": size},
        audio_config=ears | {"vocab_size": 8, "vocab_offset": size + 8},
        audio_soft_tokens_per_image=12,
        vision_soft_tokens_per_image=49,
        tie_word_embeddings=False,
        **{
            f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}|>")
            for name in _GEMMA3N_TOKENS
        },
    )
    _save_loud(LIBRARY.Gemma3nForConditionalGeneration, config, folder)
    return folder


def write_gemma3n_processor(folder: Path, tokenizer_from: Path) -> Any:
    """Write all but the model, and return the tokenizer."""
    tokenizer = LIBRARY.AutoTokenizer.from_pretrained(
        tokenizer_from,
        extra_special_tokens={f"{name}_token": f"<|{name}|>" for name in _GEMMA3N_TOKENS},
    )
    tokenizer.chat_template = None
    heard = "{% elif part['type'] == 'audio' %}<|audio|>{% endif %}{% end"
    LIBRARY.Gemma3nProcessor(
        LIBRARY.Gemma3nAudioFeatureExtractor(feature_size=16),
        LIBRARY.SiglipImageProcessorPil(size={"height": 224, "width": 224}),
        tokenizer,
        chat_template=_PARTS.replace("MARK", "<|image|>").replace("{% endif %}{% end", heard, 1),
        audio_seq_length=12,
        image_seq_length=49,
    ).save_pretrained(folder)
    return tokenizer


def _load_qwen_tokenizer(folder: Path) -> tuple[Any, dict[str, int]]:
    """Return the tokenizer, and the ids in a configuration of the tokens around an image."""
    names = ("vision_start", "vision_end", "image_pad", "video_pad")
    tokenizer = _load_tokenizer(folder, [f"<|{name}|>" for name in names])
    tokenizer.chat_template = _PARTS.replace("MARK", "<|vision_start|><|image_pad|><|vision_end|>")
    fields = ("vision_start", "vision_end", "image", "video")
    return tokenizer, {
        f"{field}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}|>")
        for field, name in zip(fields, names, strict=True)
    }


def _save_qwen_processor(folder: Path, tokenizer: Any, *, patch: int, most_tokens: int) -> None:
    side = 2 * patch  # of the square that becomes a token
    LIBRARY.Qwen2VLImageProcessorPil(
        min_pixels=side**2, max_pixels=most_tokens * side**2, patch_size=patch
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _load_tokenizer(folder: Path, added: Iterable[str]) -> Any:
    tokenizer = LIBRARY.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(added)})
    tokenizer.chat_template = None
    return tokenizer


def _describe_text(tokenizer: Any) -> dict[str, Any]:
    """The text part of a configuration."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "max_position_embeddings": 2048}
    # heads of 32 numbers: vLLM has no smaller ones on a CPU
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return {"vocab_size": len(tokenizer)} | sizes | layers | tokens


def _save_loud(kind: Any, config: Any, folder: Path) -> None:
    """Save a model whose answers depend on the image, as its weights are large."""
    torch.manual_seed(1)
    model = kind(config).float()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim > 1:
                weights.mul_(6.0)
            if not weights.any():  # such as Gemma 3's projection of images
                weights.normal_()
    model.save_pretrained(folder)


#: Writers of models with eyes, by the names of their architectures.
SEEING = {
    "llava": write_seeing_model,
    "idefics3": write_idefics3,
    "qwen2_vl": write_qwen2_vl,
    "qwen3_vl": write_qwen3_vl,
    "gemma3": write_gemma3,
}
