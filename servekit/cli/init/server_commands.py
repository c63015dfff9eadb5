"""Command lines of llama-server and `vllm serve`, and the keys of servekit that say the same.

    llama-server -m model.gguf -c 8192 -np 4          engine: llamacpp, max_context, options.slots
    vllm serve org/name --tensor-parallel-size 2      engine: vllm, gpus_per_replica

Further arguments of vLLM's engine become `options.engine_args`. Other options without a counterpart
are collected: a command that has some needs its own server.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from servekit.vllm_source import arguments as engine_arguments

#: Reads the words after an option; raises ValueError if they are none of its values.
Read = Callable[[list[str]], Any]
_Values = Literal["none", "one", "maybe", "many"]
_NOTHING = object()
#: The least that `max_context` may be; 0 is the model's own in llama-server.
_LEAST_CONTEXT = 16


@dataclass(frozen=True, slots=True)
class _Option:
    """An option of a server, and the key it becomes: "" for none."""

    key: str
    read: Read
    values: _Values


@dataclass(slots=True)
class ServerCommand:
    """What a command line says of its model."""

    engine: Literal["llamacpp", "vllm"]
    model: str = ""
    keys: dict[str, Any] = field(default_factory=dict)  # dotted: options.slots
    names: list[str] = field(default_factory=list)  # that its server answers to
    adapters: list[tuple[str, str]] = field(default_factory=list)
    port: int | None = None
    without: list[str] = field(default_factory=list)  # options that mean nothing here
    unknown: list[str] = field(default_factory=list)  # options that only its own server knows

    def nested_keys(self) -> dict[str, Any]:
        """Return `keys` as they stand in the file."""
        nested: dict[str, Any] = {}
        for key, value in self.keys.items():
            section, _, name = key.rpartition(".")
            (nested.setdefault(section, {}) if section else nested)[name] = value
        return nested


def parse_server(words: list[str]) -> ServerCommand | None:
    """Read a command line; None if it is neither llama-server's nor vLLM's."""
    program = words[0].rpartition("/")[2] if words else ""
    if program in ("llama-server", "llama-server.exe"):
        return _finish_llama(_parse(ServerCommand("llamacpp"), words[1:], _LLAMA, str))
    if program == "vllm" and words[1:2] == ["serve"]:
        return parse_vllm(words[2:])
    module = words.index("-m") + 1 if "-m" in words[:-1] else 0
    if program.startswith("python") and words[module] == "vllm.entrypoints.openai.api_server":
        return parse_vllm(words[module + 1 :])
    return None


def parse_vllm(arguments: list[str]) -> ServerCommand:
    """Read the arguments of `vllm serve`."""
    return _finish_vllm(_parse(ServerCommand("vllm"), arguments, _VLLM, _vllm_name))


def _parse(
    command: ServerCommand,
    words: list[str],
    options: Mapping[str, _Option],
    name_of: Callable[[str], str],
) -> ServerCommand:
    for flag, values in _split_options(words):
        if not flag:
            extra = values[1:] if not command.model else values
            command.model = command.model or values[0]
            command.unknown += extra
            continue
        option = options.get(name_of(flag))
        if option is None:
            if command.engine != "vllm" or not _add_engine_argument(command, flag, values):
                command.unknown.append(" ".join([flag, *values]))
            continue
        used = {"none": 0, "one": 1, "maybe": 1, "many": len(values)}[option.values]
        for word in values[used:]:  # a positional word after an option
            if command.model:
                command.unknown.append(word)
            command.model = command.model or word
        _apply_option(command, option, flag, values[:used])
    return command


def _finish_llama(command: ServerCommand) -> ServerCommand:
    """Give the context to each of the slots, which share it there, and check the cache's types."""
    context = command.keys.pop("context", 0) // command.keys.get("options.slots", 1)
    if context >= _LEAST_CONTEXT:
        command.keys["max_context"] = context
    kind = command.keys.pop("cache_type_v", "f16")
    if kind != command.keys.get("options.cache_type", "f16"):
        command.unknown.append(f"--cache-type-v {kind}")
    return command


def _finish_vllm(command: ServerCommand) -> ServerCommand:
    """Count the GPUs of all pipeline stages."""
    stages = command.keys.get("options.engine_args", {}).get("pipeline_parallel_size", 1)
    if isinstance(stages, int) and stages > 1:
        command.keys["gpus_per_replica"] = stages * command.keys.get("gpus_per_replica", 1)
    return command


def _add_engine_argument(command: ServerCommand, flag: str, values: list[str]) -> bool:
    """Add an argument of vLLM's engine; return False if it is none, or one that servekit sets.

    `--speculative-config.method ngram` is a key of the mapping `speculative_config`.
    """
    if re.fullmatch(r"-O\d+", flag):
        flag, values = "-O", [flag[2:], *values]
    flag, *keys = flag.replace("-", "_").split(".") if flag.startswith("--") else flag.split(".")
    name = _SHORT_NAMES.get(flag, flag.removeprefix("__"))
    says_no, name = name.startswith("no_"), name.removeprefix("no_")
    if name.startswith("-") or name in _SERVER_ONLY or engine_arguments.explain_own(name):
        return False
    if values and not command.model and (says_no or name.startswith(("enable_", "disable_"))):
        command.model = values.pop(0)
    value: Any = [_read_json(word) for word in values]
    if len(value) < 2:
        value = value[0] if value else not says_no
    *sections, last = name, *(key.replace("-", "_") for key in keys)
    at = command.keys.setdefault("options.engine_args", {})
    for section in sections:
        at = at.setdefault(section, {})
        if not isinstance(at, dict):
            return False
    at[last] = value
    return True


def _read_json(word: str) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(word)
    return word


def _split_options(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each option with the words up to the next; "" for words before the first."""
    flag, values = "", list[str]()
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            if flag or values:
                yield flag, values
            flag, equals, value = word.partition("=")
            values = [value] if equals else []
        else:
            values.append(word)
    if flag or values:
        yield flag, values


def _apply_option(command: ServerCommand, option: _Option, flag: str, values: list[str]) -> None:
    try:
        value = option.read(values)
    except (ValueError, IndexError):
        command.unknown.append(" ".join([flag, *values]))
        return
    if option.key == "model":
        command.model = value
    elif option.key == "names":
        command.names += value
    elif option.key == "adapters":
        command.adapters += value
    elif option.key == "port":
        command.port = value
    elif option.key == "without":
        command.without.append(flag)
    elif option.key and value is not _NOTHING:
        command.keys[option.key] = value


# ---------------------------------------------------------------- values


def _text(values: list[str]) -> str:
    return values[0]


def _repository(values: list[str]) -> str:
    """Read a repository as llama-server does, which loads Q4_K_M of it by default."""
    return values[0] if ":" in values[0] else f"{values[0]}:Q4_K_M"


def _number(values: list[str]) -> int:
    return int(values[0])


def _amount(values: list[str]) -> Any:
    """Read a number as vLLM does: 32k is 32,000 and 32K is 32,768; auto is no number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)(?:iB|i)?", values[0])
    if values[0] in ("auto", "-1"):
        return _NOTHING
    if found is None:
        raise ValueError(values[0])
    power = " kmgt".index(found[2].lower() or " ")
    return int(float(found[1]) * (1000 if found[2].islower() else 1024) ** power)


def _nothing(values: list[str]) -> object:
    return _NOTHING


def _constant(value: Any) -> Read:
    return lambda _: value


def _choice(**choices: Any) -> Read:
    """Read a word as one of `choices`."""
    return lambda values: choices[values[0]] if values[0] in choices else int("")


def _share(values: list[str]) -> str:
    share = float(values[0])
    if not 0 < share <= 1:
        raise ValueError(values[0])
    return f"{share * 100:g}%"


def _layers(values: list[str]) -> Any:
    """Read a number of layers; more than any model has are all, which is the default."""
    if values[0] in ("all", "auto"):
        return _NOTHING
    layers = int(values[0])
    return layers if 0 <= layers < 99 else _NOTHING


def _on_off(values: list[str]) -> str:
    word = values[0] if values else "on"
    if word not in ("on", "off", "auto"):
        raise ValueError(word)
    return word


def _adapters(values: list[str]) -> list[tuple[str, str]]:
    pairs = [(name, path) for name, equals, path in (v.partition("=") for v in values) if equals]
    if len(pairs) != len(values):
        raise ValueError(values)
    return pairs


def _take(key: str, read: Read, *flags: str, values: _Values = "one") -> dict[str, _Option]:
    """Return an option under all its names."""
    return dict.fromkeys(flags, _Option(key, read, values))


def _drop(*flags: str, values: _Values = "one") -> dict[str, _Option]:
    """Return options about the server, which is servekit's own."""
    return _take("without", _nothing, *flags, values=values)


def _vllm_name(flag: str) -> str:
    return flag.replace("_", "-") if flag.startswith("--") else flag


_CACHE_TYPES = {name: name for name in ("f32", "f16", "bf16", "q8_0", "q4_0")}
_LLAMA = {
    **_take("model", _text, "-m", "--model"),
    **_take("model", _repository, "-hf", "-hfr", "--hf-repo"),
    **_take("options.mmproj", _text, "-mm", "--mmproj"),
    **_take("options.image_min_tokens", _number, "--image-min-tokens"),
    **_take("options.image_max_tokens", _number, "--image-max-tokens"),
    **_take("options.mmproj", lambda _: False, "--no-mmproj", values="none"),
    **_take("names", lambda values: [values[0]], "-a", "--alias"),
    **_take("port", _number, "--port"),
    **_take("context", _number, "-c", "--ctx-size"),
    **_take("options.slots", _number, "-np", "--parallel"),
    **_take("options.gpu_layers", _layers, "-ngl", "--gpu-layers", "--n-gpu-layers"),
    **_take("options.cpu_moe_layers", _number, "-ncmoe", "--n-cpu-moe"),
    **_take("options.cpu_moe_layers", _constant(value=1000), "-cmoe", "--cpu-moe", values="none"),
    **_take("options.threads", _number, "-t", "--threads"),
    **_take("options.batch_tokens", _number, "-ub", "--ubatch-size"),
    **_take("options.flash_attention", _on_off, "-fa", "--flash-attn", values="maybe"),
    **_take("options.cache_type", _choice(**_CACHE_TYPES), "-ctk", "--cache-type-k"),
    **_take("cache_type_v", _choice(**_CACHE_TYPES), "-ctv", "--cache-type-v"),
    **_drop("--host", "-b", "--batch-size", "--timeout", "-to", "--slot-save-path"),
    **_drop("--jinja", "--metrics", "--slots", "--props", "--no-webui", values="none"),
    **_drop("-cb", "--cont-batching", "--no-warmup", "--log-disable", "-v", values="none"),
}
_DTYPES = {name: name for name in ("auto", "float32", "bfloat16", "float16")}
_TOOL_PARSERS = {
    **{name: name for name in ("hermes", "mistral", "pythonic", "llama3_json", "qwen3_coder")},
    "kimi_k2": "kimi_k2",
    "openai": "harmony",
    "llama4_pythonic": "pythonic",
    **dict.fromkeys(("deepseek_v32", "deepseek_v4"), "dsml"),
    **dict.fromkeys(("cohere_command3", "cohere_command4"), "cohere"),
    "gemma4": "gemma",
    "functiongemma": "function_gemma",
}
_VLLM = {
    **_take("model", _text, "--model"),
    **_take("names", list, "--served-model-name", values="many"),
    **_take("adapters", _adapters, "--lora-modules", values="many"),
    **_take("port", _number, "--port"),
    **_take("gpus_per_replica", _number, "--tensor-parallel-size", "-tp"),
    **_take("replicas", _number, "--data-parallel-size", "-dp"),
    **_take("max_context", _amount, "--max-model-len"),
    **_take("dtype", _choice(**_DTYPES, half="float16", float="float32"), "--dtype"),
    **_take("revision", _text, "--revision"),
    **_take("trust_remote_code", _constant(value=True), "--trust-remote-code", values="none"),
    **_take("memory", _share, "--gpu-memory-utilization"),
    **_take("chat_template", _text, "--chat-template"),
    **_take("tool_parser", _choice(**_TOOL_PARSERS), "--tool-call-parser"),
    **_take("options.quantization", _text, "--quantization", "-q"),
    **_take("options.slots", _number, "--max-num-seqs"),
    **_take("options.max_batch_tokens", _amount, "--max-num-batched-tokens"),
    **_take("options.load_format", _text, "--load-format"),
    **_take("options.kv_cache_bytes", _amount, "--kv-cache-memory-bytes"),
    **_take("options.enforce_eager", _constant(value=True), "--enforce-eager", values="none"),
    **_take(
        "options.prefix_caching",
        _constant(value=False),
        "--no-enable-prefix-caching",
        values="none",
    ),
    **_take("options.max_lora_rank", _number, "--max-lora-rank"),
    **_take("options.max_loras", _number, "--max-loras"),
    **_take(
        "",
        _nothing,
        *("--enable-lora", "--enable-auto-tool-choice", "--enable-prefix-caching"),
        "--enable-chunked-prefill",
        values="none",
    ),
    **_drop("--host", "--api-key", "--swap-space", "--uvicorn-log-level", "--root-path"),
    **_drop("--api-server-count", "--reasoning-parser", "--distributed-executor-backend"),
    **_drop("--download-dir", "--seed", "--ssl-keyfile", "--ssl-certfile", "--allowed-origins"),
    **_drop("--disable-log-requests", "--no-enable-log-requests", values="none"),
    **_drop("--disable-log-stats", "--enable-log-requests", "--enable-sleep-mode", values="none"),
    **_drop("--disable-uvicorn-access-log", "--enable-reasoning", values="none"),
    **_drop("--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers", "--log-config-file", "--uds"),
    **_drop("--allowed-methods", "--allowed-headers", values="many"),
    **_drop("--disable-access-log-for-endpoints", "--max-log-len", "--h11-max-header-count"),
    **_drop("--h11-max-incomplete-event-size", "--sse-keep-alive-interval"),
    **_drop("--allow-credentials", "--enable-ssl-refresh", "--disable-fastapi-docs", values="none"),
    **_drop("--enable-request-id-headers", "--enable-server-load-tracking", values="none"),
    **_drop("--enable-prompt-tokens-details", "--enable-log-outputs", values="none"),
    **_drop("--enable-log-deltas", "--no-enable-log-deltas", values="none"),
    **_drop("--enable-per-request-metrics", "--enable-offline-docs", values="none"),
}
#: Options of vLLM's server, and none of its engine, that change answers.
_SERVER_ONLY = frozenset(
    {
        *("chat_template_content_format", "default_chat_template_kwargs", "response_role"),
        *("trust_request_chat_template", "trust_request_mm_kwargs", "tool_parser_plugin"),
        *("tool_server", "tool_strict_level", "exclude_tools_when_tool_choice_none", "middleware"),
        *("return_tokens_as_token_ids", "enable_force_include_usage", "fingerprint_mode"),
        *(
            "enable_tokenizer_info_endpoint",
            "fingerprint_value",
            "cohere_format",
            "log_error_stack",
        ),
        *("cohere_is_reasoning_model", "enable_flash_late_interaction", "enable_scale_out"),
        *("config", "headless", "grpc", "grpc_port", "reasoning_parser_plugin"),
    }
)
_SHORT_NAMES = {
    "-pp": "pipeline_parallel_size",
    "-dcp": "decode_context_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-ep": "enable_expert_parallel",
    "-sc": "speculative_config",
    "-cc": "compilation_config",
    "-ac": "attention_config",
    "-O": "optimization_level",
}
