"""A small Llama that has learnt a few texts by heart: its greedy text has no near-ties.

Of random weights two tokens often lie so close that bfloat16 alone decides between them, so two
right ways to compute them may say different things. What this one says is known beforehand, and
whoever computes it wrongly says something else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

#: What it learns. Each begins otherwise, so that BEGUN characters tell which one is meant.
TEXTS = [
    "A process supervisor starts the workers of a service, watches over them, and starts them "
    "again when they end. It holds no request itself, so that no request can hurt it.",
    "Back-off means to wait a little before the next attempt, and longer before each one after "
    "that, with some chance in it, so that many who wait do not all come back at once.",
    "Continuous batching lets a new sequence join the batch at any step and lets one that has "
    "ended leave it, so the graphics processor is never kept waiting for the longest of them.",
    "During a drain nothing new is taken in; what is under way goes on to its end, or to the "
    "moment when the time that was given for it is over, and only then is the process ended.",
    "Every worker listens on a socket of its own. Whoever is connected knows of its death in the "
    "moment it happens, since the kernel closes what a process that has ended held open.",
    "Finding the longest prefix that two prompts share saves the time to compute it twice: keys "
    "and values of those tokens lie in the cache of the replica that saw them first.",
    "Graphs of kernels are recorded once and started as one, which spares the host the work of "
    "starting each of them by itself, and for small batches that work is most of a step.",
    "Health that is true says yes only while a request can be answered. A page that says it is "
    "well while nothing behind it moves has told a machine the opposite of what it asked.",
]
BEGUN = 24
_STEPS, _SURE, _FIRST = 600, 0.998, 8


def prompts() -> list[str]:
    """The beginning of each text."""
    return [text[:BEGUN] for text in TEXTS]


def write_reciter(folder: Path, device: str, experts: int = 0, layers: int = 4) -> Path:
    """4e6 parameters in bfloat16, in shapes that two or four GPUs can share; some seconds.

    More `layers` make it slow, and more parameters. With `experts` it is a Mixtral, of whose
    experts in a layer a token uses two.

    :raises RuntimeError: It has not learnt its texts.
    """
    from tests.unit.engines.harness import byte_level_tokenizer

    tokenizer = byte_level_tokenizer()
    tokenizer.save_pretrained(folder)
    rows = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in TEXTS]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [tokenizer.eos_token_id] * (width - len(row)) for row in rows])
    model = _untrained(tokenizer, experts, layers).to(device)
    tokens = tokens.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(_STEPS):
        logits = model(input_ids=tokens[:, :-1]).logits.transpose(1, 2)
        losses = torch.nn.functional.cross_entropy(logits, tokens[:, 1:], reduction="none")
        # The first ones cannot be learnt: nothing before them says which text it is.
        sure = float(torch.exp(-losses[:, _FIRST:].max()))
        if sure > _SURE:
            break
        optimizer.zero_grad()
        losses.mean().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    else:
        raise RuntimeError(f"After {_STEPS} steps its least sure token is at {sure:.3f}.")
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def _untrained(tokenizer: Any, experts: int, layers: int) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": -(-len(tokenizer) // 8) * 8,
        "hidden_size": 256,
        "intermediate_size": 192 if experts else 768,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 1024,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    if experts:
        sizes |= {"num_local_experts": experts, "num_experts_per_tok": 2, "rope_theta": 10000.0}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def write_gguf(folder: Path, path: Path) -> Path:
    """The same in float32 for llama.cpp, whose rotary pairs lie side by side in each head."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())["model"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__)
    spare = config["vocab_size"] - len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, *(f"[{n}]" for n in range(spare))])
    writer.add_token_types([3 if one.startswith("<|") else 1 for one in tokens] + [5] * spare)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    experts: int = config.get("num_local_experts", 0)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    for name, values in _read_weights(folder / "model.safetensors", experts).items():
        if "q_proj" in name or "k_proj" in name:
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            pairs = values.view(heads, 2, -1, values.shape[-1])
            values = pairs.transpose(1, 2).reshape(values.shape)
        writer.add_tensor(_gguf_name(name), values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _read_weights(file: Path, experts: int) -> dict[str, torch.Tensor]:
    """Return the weights by name in float32, those of a layer's experts as one."""
    from safetensors.torch import load_file

    found = {name: tensor.float() for name, tensor in load_file(file).items()}
    for first in [name for name in found if ".experts.0." in name]:
        each = [found.pop(first.replace(".0.w", f".{one}.w")) for one in range(experts)]
        found[first.replace(".0.w", ".w")] = torch.stack(each)
    return found


#: From transformers' names to llama.cpp's.
_NAMES = {
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "model.layers.": "blk.",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.o_proj": "attn_output",
    "self_attn.": "attn_",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.": "ffn_",
    "_proj": "",
}


def _gguf_name(name: str) -> str:
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name
