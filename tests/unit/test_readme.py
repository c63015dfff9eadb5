"""README says what is so. SERVEKIT_REWRITE=1 in the environment renews its tables."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from servekit.config.json_schema import json_schema
from servekit.docs import fields

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

TABLES = {
    "configuration": [
        ("", "Config"),
        ("server.", "ServerConfig"),
        ("server.tls.", "TlsConfig"),
        ("server.limits.", "LimitsConfig"),
        ("gpus.", "GpusConfig"),
        ("ray.", "RayConfig"),
        ("keys[].", "KeyConfig"),
        ("logging.", "LoggingConfig"),
        ("tracing.", "TracingConfig"),
        ("models[].", "ModelConfig"),
        ("models[].replicas.", "ReplicaRange"),
        ("models[].scale.", "ScaleConfig"),
        ("models[].adapters[].", "AdapterConfig"),
        ("models[].sampling.", "SamplingDefaults"),
        ("models[].options.", "TransformersOptions"),
    ],
    "vllm": [("models[].options.", "VllmOptions")],
    "llamacpp": [("models[].options.", "LlamaCppOptions")],
    "openai": [("models[].options.", "OpenAIOptions")],
    "echo": [("models[].options.", "EchoOptions")],
    "parameters": [],
}


# ---------------------------------------------------------------- the tables


#: What a parameter of OpenAI's takes an engine to have; all others every engine takes.
NEEDS = {
    "logit_bias": "logit_bias",
    "min_p": "min_p",
    "presence_penalty": "penalties",
    "frequency_penalty": "penalties",
    "repetition_penalty": "penalties",
    "logprobs": "logprobs",
    "top_logprobs": "logprobs",
    "response_format": "grammar",
    "structured_outputs": "grammar",
    "guided_json": "grammar",
    "guided_regex": "grammar",
    "guided_choice": "grammar",
    "guided_grammar": "grammar",
    "bad_words": "bad_words",
    "stop_token_ids": "stop_token_ids",
    "prompt_logprobs": "prompt_logprobs",
    "text": "grammar",
    "tools": "tools",
    "tool_choice": "tools",
    "parallel_tool_calls": "tools",
}
#: What is taken so that clients which send it are served, and changes nothing.
IDLE = {"user", "metadata", "truncation", "store", "service_tier", "safety_identifier"}
IDLE |= {"prompt_cache_retention", "guided_decoding_backend", "request_id", "max_tool_calls"}
IDLE |= {"verbosity"}
#: The echo engine has one candidate for each token: these keep it.
IDLE_FOR_ECHO = {"top_p", "top_k"}


def parameters() -> str:
    """Every parameter of OpenAI's endpoints, by endpoint and by engine."""
    from servekit.engines.echo import SERVES
    from servekit.gateway.responses_schema import STATEFUL, ResponsesRequest
    from servekit.gateway.schema import NOTHING, ChatRequest, CompletionRequest
    from servekit.gateway.vectors import EmbeddingRequest

    kinds = (ChatRequest, CompletionRequest, ResponsesRequest, EmbeddingRequest)
    fields = [kind.__struct_fields__ for kind in kinds]
    names = dict.fromkeys(name for own in fields for name in own)
    head = "parameter | chat | completions | responses | embeddings | transformers | echo"
    lines = [f"| {head} |", "|---|:-:|:-:|:-:|:-:|---|---|"]
    for name in sorted(names):
        if name in {"model", *NOTHING, *STATEFUL}:
            continue
        marks = ["✓" if name in own else "" for own in fields]
        need = NEEDS.get(name)
        ours = "where its template has tools" if need == "tools" else "✓"
        echos = "✓" if need in (None, *SERVES) else "400"
        if need == "tools":
            echos = "where the file says `tool_parser`"
        if name in IDLE:
            ours = echos = "without effect"
        if name in IDLE_FOR_ECHO:
            echos = "without effect"
        lines.append(f"| `{name}` | {' | '.join(marks)} | {ours} | {echos} |")
    return "\n".join(lines) + "\n"


def table(name: str) -> str:
    if name == "parameters":
        return parameters()
    schema = json_schema()
    sections = {"Config": schema, **schema["$defs"]}
    lines = ["| key | value | default | |", "|---|---|---|---|"]
    for prefix, section in TABLES[name]:
        for key, field in sections[section]["properties"].items():
            required = key in sections[section].get("required", ())
            lines.append(fields.row(f"{prefix}{key}", field, required=required))
    return "\n".join(lines) + "\n"


def renewed(text: str) -> str:
    return TABLE.sub(lambda found: found[1] + table(found[2]) + found[3], text)


def test_the_tables_are_those_of_the_schema() -> None:
    text = README.read_text()
    if os.environ.get("SERVEKIT_REWRITE"):
        README.write_text(renewed(text))
    assert set(TABLES) == {found[2] for found in TABLE.finditer(text)}
    assert README.read_text() == renewed(text), "stale; run this with SERVEKIT_REWRITE=1"


# ---------------------------------------------------------------- the commands


def code_blocks() -> list[str]:
    return re.findall(r"```\w*\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_check_command_is_readmes() -> None:
    [command] = [block.strip() for block in code_blocks() if ".venv/bin/pytest" in block]
    last = (ROOT / ".ci" / "run").read_text().strip().splitlines()[-1]
    assert last == command
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_demo_command_names_what_there_is() -> None:
    [command] = [block.strip() for block in code_blocks() if "servekit up" in block][:1]
    files = re.findall(r"[\w./-]+\.(?:txt|yaml)", command)
    assert files == ["deploy/constraints.txt", "configs/demo.yaml"]
    assert all((ROOT / name).is_file() for name in files)


def test_the_commands_are_those_of_the_command_line() -> None:
    from servekit.cli import app

    shown = set(re.findall(r"^\| `servekit (\w[\w-]*)", README.read_text(), re.MULTILINE))
    commands = {
        command.name or command.callback.__name__
        for command in app.registered_commands
        if command.callback
    }
    assert shown == commands | {group.name for group in app.registered_groups}


async def test_the_endpoints_are_those_of_the_gateway() -> None:
    from servekit.gateway.app import Application
    from servekit.gateway.router import Router

    shown = set(re.findall(r"^\| `(?:GET|POST) (/[\w/.{}]*)`", README.read_text(), re.MULTILINE))
    application = Application(Router("test"), 10**6, ui=False, legacy=True)
    served = set(application.rest.openapi()["paths"])
    documents = {"/ui", "/docs", "/openapi.json"}
    assert shown - documents == {re.sub(r":path", "", path) for path in served}


def test_the_example_of_an_engine_is_as_short_as_is_said() -> None:
    example = ROOT / "tests" / "markov" / "markov_engine.py"
    assert "of less than 150 lines" in README.read_text()
    assert len(example.read_text().splitlines()) < 150


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README.read_text()):
        assert (ROOT / target).exists(), target


# ---------------------------------------------------------------- the pins


def pins(name: str = "constraints.txt") -> dict[str, str]:
    lines = (ROOT / "deploy" / name).read_text().splitlines()
    stated = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.!]+", line) for line in stated)
    return {canonicalize_name(n): v for n, _, v in (line.partition("==") for line in stated)}


def test_every_dependency_is_pinned_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = pins()
    for text in [*project["dependencies"], *project["optional-dependencies"]["test"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), text


def test_with_vllm_every_dependency_is_pinned_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pinned = pins("constraints-vllm.txt")
    wanted = [text for name in extras if name != "test" for text in extras[name]]
    for text in [*project["dependencies"], *wanted]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), text


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-vllm.txt"])
def test_torch_is_pinned_without_its_build(name: str) -> None:
    assert Version(pins(name)["torch"]).local is None


@pytest.mark.parametrize(
    "name",
    [
        *("README.md", "Dockerfile", ".ci/run", "deploy/constraints.txt"),
        "deploy/constraints-vllm.txt",
    ],
)
def test_no_path_of_one_machine(name: str) -> None:
    assert not re.search(r"/(root|work|home/(?!servekit))\b", (ROOT / name).read_text())
