"""Ollama's names of well-known models, such as qwen3:0.6b, and the hub ids of these models.

Ollama serves quantised copies; the hub id is the publisher's own model, instruction-tuned where
Ollama's is. For a name that Ollama has moved to a later model since, it is the later one.
"""

from __future__ import annotations

import re

_NAME = re.compile(
    r"(?P<site>(?:https?://)?(?:www\.)?(?:registry\.)?ollama\.(?:com|ai)/)?(?P<space>library/)?"
    r"(?P<family>[a-z0-9][a-z0-9._-]*)(?::(?P<tag>[A-Za-z0-9][A-Za-z0-9._-]*))?"
)
_SIZE = re.compile(r"\d+(?:\.\d+)?[bm](?=-|$)", re.IGNORECASE)

#: Family → hub id with {} for the size, the sizes (the first is Ollama's default).
_FAMILIES = {
    "qwen3": ("Qwen/Qwen3-{}", "8B 0.6B 1.7B 4B 14B 32B"),
    "qwen2.5": ("Qwen/Qwen2.5-{}-Instruct", "7B 0.5B 1.5B 3B 14B 32B 72B"),
    "qwen2.5-coder": ("Qwen/Qwen2.5-Coder-{}-Instruct", "7B 0.5B 1.5B 3B 14B 32B"),
    "qwq": ("Qwen/QwQ-{}", "32B"),
    "llama3": ("meta-llama/Meta-Llama-3-{}-Instruct", "8B 70B"),
    "llama3.1": ("meta-llama/Llama-3.1-{}-Instruct", "8B 70B 405B"),
    "llama3.2": ("meta-llama/Llama-3.2-{}-Instruct", "3B 1B"),
    "llama3.3": ("meta-llama/Llama-3.3-{}-Instruct", "70B"),
    "gemma2": ("google/gemma-2-{}-it", "9b 2b 27b"),
    "gemma3": ("google/gemma-3-{}-it", "4b 270m 1b 12b 27b"),
    "mistral": ("mistralai/Mistral-{}-Instruct-v0.3", "7B"),
    "gpt-oss": ("openai/gpt-oss-{}", "20b 120b"),
    "smollm2": ("HuggingFaceTB/SmolLM2-{}-Instruct", "1.7B 135M 360M"),
    "tinyllama": ("TinyLlama/TinyLlama-{}-Chat-v1.0", "1.1B"),
}
_EXACTLY = {
    "qwen3:30b": "Qwen/Qwen3-30B-A3B",
    "qwen3:235b": "Qwen/Qwen3-235B-A22B",
    "deepseek-r1": "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B",
    "deepseek-r1:1.5b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "deepseek-r1:7b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    "deepseek-r1:8b": "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B",
    "deepseek-r1:14b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B",
    "deepseek-r1:32b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-r1:70b": "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
    "mistral-nemo": "mistralai/Mistral-Nemo-Instruct-2407",
    "mistral-nemo:12b": "mistralai/Mistral-Nemo-Instruct-2407",
    "phi4": "microsoft/phi-4",
    "phi4:14b": "microsoft/phi-4",
    "phi4-mini": "microsoft/Phi-4-mini-instruct",
    "phi4-mini:3.8b": "microsoft/Phi-4-mini-instruct",
    "nomic-embed-text": "nomic-ai/nomic-embed-text-v1.5",
    "mxbai-embed-large": "mixedbread-ai/mxbai-embed-large-v1",
    "bge-m3": "BAAI/bge-m3",
    "all-minilm": "sentence-transformers/all-MiniLM-L6-v2",
}


def find_hub_id(name: str) -> str:
    """Return the hub id of the model that Ollama calls `name`; "" if it is not known here."""
    found = _NAME.fullmatch(name)
    if found is None:
        return ""
    family, tag = found["family"], found["tag"] or "latest"
    size = _SIZE.match(tag)
    if size is None and tag != "latest":
        return ""
    wanted = size[0].lower() if size else ""
    if exact := _EXACTLY.get(f"{family}:{wanted}" if wanted else family):
        return exact
    pattern, sizes = _FAMILIES.get(family, ("", ""))
    match = [one for one in sizes.split() if one.lower() == (wanted or sizes.split()[0].lower())]
    return pattern.format(match[0]) if match else ""


def explain_name(text: str) -> str:
    """Return a sentence for a text that is one of Ollama's names; "" for other texts."""
    found = _NAME.fullmatch(text)
    if found is None or not (found["site"] or found["space"] or found["tag"] or find_hub_id(text)):
        return ""
    bring = "; `servekit init --from ollama` brings the models that Ollama has here"
    if hub_id := find_hub_id(text):
        return f"'{text}' is Ollama's name of a model; write {hub_id}, its hub id{bring}"
    write = "write a hub id, org/name, or a quantisation of one, org/name-GGUF:Q4_K_M"
    return f"'{text}' is a name in Ollama's library; {write}{bring}"
