"""Keys of vLLM, llama.cpp, Ollama, llama-swap and LiteLLM, and what servekit calls them.

The advice of an unknown key: `{value}` stands for what was written.
"""

from __future__ import annotations

_CONTEXT = "`max_context: {value}` is the context, in tokens"
_VLLM = "under `options: {{engine_args: {{{key}: {value}}}}}`, with `engine: vllm`"
_TEMPLATE = "`chat_template` is a .jinja file or text"

#: By the key in lower case with underscores; of a model, wherever in it the key stands.
OF_A_MODEL = {
    # vLLM and SGLang
    "max_model_len": _CONTEXT,
    "tensor_parallel_size": "`gpus_per_replica: {value}` is the number of GPUs of a replica",
    "tp_size": "`gpus_per_replica: {value}` is the number of GPUs of a replica",
    "tensor_parallel": "`gpus_per_replica: {value}` is the number of GPUs of a replica",
    "data_parallel_size": "`replicas: {value}` is the number of workers",
    "gpu_memory_utilization": "`memory: {percent}` is what a model may take of each GPU",
    "mem_fraction_static": "`memory: {percent}` is what a model may take of each GPU",
    "served_model_name": "`name` is what requests ask for, and `aliases` are further names",
    "tool_call_parser": "`tool_parser` is how the model writes tool calls; auto by default",
    "enable_auto_tool_choice": "tools are on by themselves; leave it out",
    "max_num_seqs": "`options: {{slots: {value}}}` is how many requests run at once",
    "api_key": "keys of clients are `keys` at the top of the file; `servekit key new` makes one",
    "generation": "`sampling` has what requests leave out, such as the temperature",
    "generation_config": "`sampling` has what requests leave out, such as the temperature",
    # llama.cpp
    "n_ctx": _CONTEXT,
    "ctx_size": _CONTEXT,
    "n_gpu_layers": "layers are placed by themselves; `device: cpu` uses no GPU",
    "ngl": "layers are placed by themselves; `device: cpu` uses no GPU",
    "num_gpu": "layers are placed by themselves; `device: cpu` uses no GPU",
    "n_parallel": "`options: {{slots: {value}}}` is how many requests run at once",
    "mmproj": "`options: {{mmproj: {value}}}` is the projector that llamacpp reads images with",
    "num_parallel": "`options: {{slots: {value}}}` is how many requests run at once",
    # Ollama
    "num_ctx": _CONTEXT,
    "context_length": _CONTEXT,
    "num_predict": "`sampling: {{max_tokens: {value}}}` is the longest answer",
    "repeat_penalty": "`sampling: {{repetition_penalty: {value}}}` is that",
    "keep_alive": "`idle_unload_s: {value}` unloads the model after that time without a request",
    # llama-swap
    "ttl": "`idle_unload_s: {value}` unloads the model after that time without a request",
    "cmd": "`engine: command` with `options: {{command: …}}` runs a server of another program",
    "proxy": "`engine: openai` with `options: {{url: {value}}}` forwards to another server",
    # LiteLLM
    "litellm_params": "`engine: openai` with `options: {{url: …, key_environment: …}}` forwards",
    "model_name": "`name` is what requests ask for",
    "api_base": "`engine: openai` with `options: {{url: {value}}}` forwards to another server",
}
#: Options that other engines have.
OF_OPTIONS = {
    "quantization": "transformers and vllm quantise weights while they load them, and a GGUF file "
    "is quantised already: choose another one in `path`, such as org/name:Q4_K_M",
    "quantize": "`quantization: {value}` is that, with transformers and vllm",
    "cache_type": "llamacpp and vllm have it; with transformers the KV cache has the model's dtype",
    "cache_type_k": "`cache_type: {value}` is the KV cache's, keys and values alike",
    "cache_type_v": "`cache_type: {value}` is the KV cache's, keys and values alike",
    "type_k": "`cache_type` is the KV cache's, keys and values alike",
    "type_v": "`cache_type` is the KV cache's, keys and values alike",
    "kv_cache_dtype": "`cache_type: {value}` is the KV cache's, with llamacpp and vllm",
}
#: Of vLLM's arguments, those that servekit passes through.
_ENGINE_ARGS = {
    *("quantization", "enable_prefix_caching", "enforce_eager", "kv_cache_dtype", "swap_space"),
    *("pipeline_parallel_size", "max_num_batched_tokens", "speculative_config", "load_format"),
    *("enable_chunked_prefill", "cpu_offload_gb", "block_size", "tokenizer", "seed"),
}
_NO_CLEAR_KEY = (
    "a key itself does not stand in the file: `servekit key new` prints the `hash` to write, or "
    "name an `environment` variable or a `file` with the key"
)
OF_A_KEY = dict.fromkeys(("key", "value", "token", "secret", "api_key"), _NO_CLEAR_KEY)
OF_THE_FILE = {
    "model_list": "`models` is the list of models",
    "api_keys": "`keys` is the list of API keys",
}
#: Values of other programs, by key.
VALUES = {
    "load": {"lazy": "on_demand", "eager": "on_start", "always": "on_start", "never": "manual"},
}


def advise(loc: tuple[str | int, ...], value: object) -> str:
    """Return what to write instead of an unknown key at `loc`, or ""."""
    key = str(loc[-1]).lower().replace("-", "_")
    if loc[0] == "keys":
        found = OF_A_KEY.get(key, "")
    elif loc[0] == "models":
        in_options = len(loc) == 4 and loc[2] == "options"
        found = OF_OPTIONS.get(key, "") if in_options else ""
        found = found or OF_A_MODEL.get(key, _VLLM if key in _ENGINE_ARGS and len(loc) == 3 else "")
    else:
        found = OF_THE_FILE.get(key, "") if len(loc) == 1 else ""
    shown = str(value).lower() if isinstance(value, bool) else value
    if isinstance(shown, dict | list) or len(str(shown)) > 60:
        shown = "…"
    is_number = isinstance(value, float | int) and not isinstance(value, bool)
    share = is_number and 0 < float(str(value)) <= 1
    percent = f"{float(str(value)) * 100:g}%" if share else "90%"
    return found.format(key=key, value=shown, percent=percent)
