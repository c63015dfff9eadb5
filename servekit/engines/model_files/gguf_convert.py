"""Conversion of a GGUF file, once, into a folder that transformers loads quickly.

transformers can read GGUF, but unpacks it in Python at every load, which is far slower than
safetensors. Tensors are stored as float32 below a billion parameters and as bfloat16 above: float32
holds every value that GGUF's blocks unpack to; bfloat16 rounds them (by less than the quantisation
did) and halves the disk space and the peak of memory. Everything runs on the CPU; no tensor is
placed on a GPU and no CUDA context is created.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from servekit.engines.api.base import Report
from servekit.errors import LoadError
from servekit.model_metadata.gguf import Header, read_header, read_sampling_defaults
from servekit.protocol.messages import Progress

#: Incremented when the conversion's result changes; part of the keys of cached conversions.
CONVERTER = "gguf-5"
#: Those of earlier versions, whose conversions a new one replaces.
EARLIER_CONVERTERS = ("gguf-1", "gguf-2", "gguf-3", "gguf-4")
FLOAT32_BELOW = 1_000_000_000
#: Tensors by which the frequencies of rotary embeddings are divided: one for all texts, as in
#: Llama 3, or of LongRoPE.
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
#: Layers of the models of Gemma whose attention is scaled by other than the size of a head. Source:
#: llama.cpp's models of gemma2 and gemma3.
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}
#: Kinds of tokenizers with a token before each text, unless the file says otherwise, and whose
#: whole words are looked up before any are merged. Source: llama-vocab.cpp of llama.cpp.
_LIKE_LLAMA_3 = {
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    *("jina-v5-nano", "tekken"),
}
_TEXT_BYTES = 64 * 2**20  # generous size of tokenizer and configuration


def converted_bytes(header: Header) -> int:
    """Return a generous estimate of the conversion's disk space, in bytes."""
    width = 4 if header.parameters < FLOAT32_BELOW else 2
    return header.parameters * width + _TEXT_BYTES


def convert_gguf(path: Path, folder: Path, report: Report) -> None:
    """Convert `path` into the empty `folder`: config, safetensors, tokenizer and chat template.

    Raises LoadError if the file is damaged or transformers does not know its architecture, and
    OSError if `folder` cannot be written.
    """
    header = read_header(path)
    # Progress bars have no place in a worker's log; `report` replaces them.
    _import_module("utils.logging").disable_progress_bar()
    report(Progress("convert", 0, header.tensors, "tensors"))
    with _explain_errors(path, header):
        with _hasten_library(report, header.tensors):
            tokenizer = _load_tokenizer(path, header)
            model = _load_model(path, header)
            _set_rotary_scaling(model, path, header)
        _set_attention_scale(model, header)
        _name_ends(model, header)
        _set_sampling(model, header)
        tokenizer.save_pretrained(folder)
        _save_model(model, folder)
    report(Progress("convert", header.tensors, header.tensors, "tensors"))
    del model
    gc.collect()


def _load_tokenizer(path: Path, header: Header) -> Any:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    # Use the file's own special tokens, as the library's reading of them differs by version: 5.17
    # uses the beginning-of-sequence token as the end-of-sequence token, and "cleans up" decoded
    # text.
    for name, token_id in header.special_ids.items():
        setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token_id))
    tokenizer.clean_up_tokenization_spaces = False
    if header.metadata.get("tokenizer.ggml.pre") in _LIKE_LLAMA_3:
        tokenizer.backend_tokenizer.model.ignore_merges = True
        if "tokenizer.ggml.add_bos_token" not in header.metadata:
            tokenizer.add_bos_token = True
    return tokenizer


def _load_model(path: Path, header: Header) -> Any:
    import torch
    import transformers

    # dequantize: if the library could keep the blocks packed, it would ask the hub for kernels.
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        dtype=torch.float32 if header.parameters < FLOAT32_BELOW else torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    model, info = loaded
    if info["missing_keys"] or info["mismatched_keys"]:
        # The library would fill them with random numbers and continue.
        lacking = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
        raise LoadError(f"{path} lacks {len(lacking)} tensors of its model, first {lacking[0]}.")
    return model


def _name_ends(model: Any, header: Header) -> None:
    """Set all end-of-generation tokens: the library reads `tokenizer.ggml.eos_token_id` alone.

    A model whose end of turn is another token (Gemma 3: 1 and 106) would not stop there.
    """
    rows = int(model.get_input_embeddings().weight.shape[0])
    ends = [token for token in header.end_ids if 0 <= token < rows]
    if len(ends) > 1 or (ends and model.generation_config.eos_token_id is None):
        model.generation_config.eos_token_id = ends


def _set_sampling(model: Any, header: Header) -> None:
    """Set the sampling defaults of the file, which the library does not read."""
    model.generation_config.do_sample = True
    for name, value in read_sampling_defaults(header.metadata.get).items():
        setattr(model.generation_config, name, value)


def _set_attention_scale(model: Any, header: Header) -> None:
    """Set the scale of Gemma's attention: the library takes every head for one of 256 numbers."""
    if header.architecture in _GEMMA_27B:
        config = model.config
        of_27b = config.num_hidden_layers == _GEMMA_27B[header.architecture]
        per_head = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = per_head if of_27b else config.head_dim


def _set_rotary_scaling(model: Any, path: Path, header: Header) -> None:
    """Set the scaling of rotary embeddings of the file, which the library reads for gpt-oss alone.

    Where layers differ, as in Gemma 3, it is of those with full attention, as in llama.cpp.
    """
    config = model.config.get_text_config()
    stated = getattr(config, "rope_parameters", None) or {}
    layers = "full_attention"
    own = dict(stated.get(layers, stated))
    size = header.metadata.get(f"{header.architecture}.rope.dimension_count")
    if size and "partial_rotary_factor" in own:
        width = getattr(config, "head_dim", None) or config.hidden_size / config.num_attention_heads
        own["partial_rotary_factor"] = size / width
    if own.get("rope_type") == "default":
        own |= _read_rotary_scaling(path, header)
    if own:
        config.rope_parameters = stated | {layers: own} if layers in stated else own
    if hasattr(config, "original_max_position_embeddings"):  # of Phi 3, beside its LongRoPE
        config.original_max_position_embeddings = own.get(
            "original_max_position_embeddings", config.max_position_embeddings
        )


def _read_rotary_scaling(path: Path, header: Header) -> dict[str, Any]:
    """Return the library's parameters of rotary embeddings; {} if they are not scaled.

    Factors of a tensor are those of LongRoPE, which has them, too, and for texts of any length.
    """
    metadata, of = header.metadata, f"{header.architecture}.rope"
    factor = float(metadata.get(f"{of}.scaling.factor", metadata.get(f"{of}.scale_linear", 0)) or 1)
    context = int(metadata.get(f"{header.architecture}.context_length", 1))
    original = int(metadata.get(f"{of}.scaling.original_context_length", context))
    attention = float(metadata.get(f"{of}.scaling.attn_factor", 1))
    freqs, long, short = (_read_numbers(path, header, name) for name in _FACTORS)
    if freqs or (long and short):
        return {
            "rope_type": "longrope",
            "long_factor": freqs or long,
            "short_factor": freqs or short,
            "original_max_position_embeddings": original,
            "factor": max(1.0, context / original),
            "attention_factor": attention,
        }
    match metadata.get(f"{of}.scaling.type", "linear"):
        case "linear" if factor != 1:
            return {"rope_type": "linear", "factor": factor}
        case "yarn":
            return {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
                "attention_factor": attention * (1 + 0.1 * math.log(max(factor, 1))),
            }
    return {}


def _read_numbers(path: Path, header: Header, name: str) -> list[float]:
    """Return the numbers of a small tensor; [] without it."""
    if name not in header.sizes:
        return []
    import gguf

    tensors = gguf.GGUFReader(str(path)).tensors
    return next([float(n) for n in one.data] for one in tensors if one.name == name)


def _save_model(model: Any, folder: Path) -> None:
    """Save the model as plain tensors, without any trace of quantisation."""
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)


@contextlib.contextmanager
def _hasten_library(report: Report, total: int) -> Iterator[None]:
    """Report each tensor that the library unpacks, and cache its repeated work.

    The library parses the file three times, which is slow in the `gguf` package, and requests the
    same map of tensor names once per module of the model.
    """
    import gguf

    library = _import_module("modeling_gguf_pytorch_utils")

    def counted(tensors: Any, *_: Any, **__: Any) -> Iterator[Any]:
        for done, tensor in enumerate(tensors):
            report(Progress("convert", done, total, "tensors"))
            yield tensor

    with (
        _replace_attribute(library, "tqdm", counted),
        _replace_attribute(gguf, "GGUFReader", functools.cache(gguf.GGUFReader)),
        _replace_attribute(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
    ):
        yield


def _import_module(name: str) -> Any:
    """Import a module of transformers, as Any: it has too few annotations for mypy."""
    return importlib.import_module(f"transformers.{name}")


@contextlib.contextmanager
def _replace_attribute(module: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextlib.contextmanager
def _explain_errors(path: Path, header: Header) -> Iterator[None]:
    """Convert errors: those of the disk become OSErrors, those of the file LoadErrors."""
    try:
        yield
    except LoadError:
        raise
    except Exception as error:  # any error of the library for an unknown file
        if isinstance(error, OSError) and error.errno is not None:
            raise
        if from_rust := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(from_rust[1]), os.strerror(int(from_rust[1]))) from error
        raise LoadError(
            f"{path.name} (architecture {header.architecture or 'unknown'}) cannot be converted: "
            f"{type(error).__name__}: {error}"
        ) from error
