"""Keys of other programs, and what servekit calls them."""

from __future__ import annotations

import pytest

from servekit.config.foreign_keys import OF_A_KEY, OF_A_MODEL, OF_OPTIONS, OF_THE_FILE, advise

MODEL = ("models", 0)


@pytest.mark.parametrize(
    ("loc", "value", "said"),
    [
        ((*MODEL, "max_model_len"), 4096, "`max_context: 4096` is the context, in tokens"),
        ((*MODEL, "--ctx-size"), 1, ""),
        ((*MODEL, "ctx-size"), 1, "`max_context: 1` is the context, in tokens"),
        ((*MODEL, "N_CTX"), 1, "`max_context: 1` is the context, in tokens"),
        ((*MODEL, "options", "n_ctx"), 1, "`max_context: 1` is the context, in tokens"),
        ((*MODEL, "gpu_memory_utilization"), 0.9, "`memory: 90%` is what a model may take of each"),
        ((*MODEL, "gpu_memory_utilization"), 1, "`memory: 100%` is what a model may take of each"),
        ((*MODEL, "gpu_memory_utilization"), 0.855, "`memory: 85.5%` is what a model may take"),
        ((*MODEL, "gpu_memory_utilization"), 0, "`memory: 90%` is what a model may take of each"),
        ((*MODEL, "gpu_memory_utilization"), 90, "`memory: 90%` is what a model may take of each"),
        ((*MODEL, "gpu_memory_utilization"), True, "`memory: 90%` is what a model may take of "),
        ((*MODEL, "gpu_memory_utilization"), "0.9", "`memory: 90%` is what a model may take of"),
        ((*MODEL, "keep_alive"), "5m", "`idle_unload_s: 5m` unloads the model after that time"),
        ((*MODEL, "proxy"), "x" * 61, "`engine: openai` with `options: {url: …}` forwards"),
        ((*MODEL, "proxy"), "x" * 60, f"`engine: openai` with `options: {{url: {'x' * 60}}}` for"),
        ((*MODEL, "litellm_params"), {}, "`engine: openai` with `options: {url: …, key_environme"),
        ((*MODEL, "num_ctx"), [1], "`max_context: …` is the context, in tokens"),
        ((*MODEL, "num_ctx"), True, "`max_context: true` is the context, in tokens"),
        (
            (*MODEL, "enforce-eager"),
            True,
            "under `options: {engine_args: {enforce_eager: true}}`, with `engine: vllm`",
        ),
        ((*MODEL, "options", "enforce_eager"), True, ""),  # an option of vllm's own
        ((*MODEL, "options", "quantization"), "awq", "transformers and vllm quantise weights whi"),
        ((*MODEL, "quantization"), "awq", "under `options: {engine_args: {quantization: awq}}`,"),
        ((*MODEL, "options", "type_k"), "q8_0", "`cache_type` is the KV cache's, keys and values"),
        ((*MODEL, "sampling", "quantize"), 1, ""),
        (("keys", 0, "token"), "sk-1", "a key itself does not stand in the file: `servekit key "),
        (("keys", 0, "num_ctx"), 1, ""),
        (("model_list",), [], "`models` is the list of models"),
        (("API-Keys",), [], "`keys` is the list of API keys"),
        (("server", "model_list"), [], ""),
        (("num_ctx",), 1, ""),
        ((*MODEL, "nothing"), 1, ""),
    ],
)
def test_a_key_of_another_program_is_told_by_its_place(
    loc: tuple[str | int, ...], value: object, said: str
) -> None:
    found = advise(loc, value)
    assert found.startswith(said) and bool(found) == bool(said)


@pytest.mark.parametrize("table", [OF_A_MODEL, OF_OPTIONS, OF_A_KEY, OF_THE_FILE])
def test_keys_stand_as_they_are_looked_up(table: dict[str, str]) -> None:
    for key in table:
        assert key == key.lower().replace("-", "_")


def test_a_value_with_braces_is_shown_as_it_is() -> None:
    assert advise((*MODEL, "cmd"), "{x}").startswith("`engine: command` with `options: {command: …")
    assert advise((*MODEL, "api_base"), "{x}") == (
        "`engine: openai` with `options: {url: {x}}` forwards to another server"
    )
