"""llama-swap's files, with entries of the kinds that its own examples have, into ours."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from servekit.cli.init.brought_models import Carried
from servekit.cli.init.llama_swap import convert_file
from servekit.config.load import load_config
from servekit.config.schema import Config, ModelConfig
from servekit.errors import ConfigError
from servekit.system.gpu.gpus import Gpu

GPUS = tuple(Gpu(i, f"GPU-{i}", "H100", 80 * 2**30, 80 * 2**30) for i in range(4))
EXAMPLE = """
# yaml-language-server: $schema=config-schema.json
healthCheckTimeout: 500
logLevel: info
startPort: 10001
globalTTL: 90
sendLoadingState: true
apiKeys: ["sk-hunter2-literal", "${env.SWAP_KEY}"]
macros:
  "latest-llama": >
    /opt/llama-server --port ${PORT}
  "default_ctx": 4096
  "default_args": "--ctx-size ${default_ctx}"
  "models_dir": "${env.MODELS}/gguf"
hooks:
  on_startup:
    preload: ["gpt-oss-120b", "docker-llama"]
models:
  "gpt-oss-120b":
    macros: {default_ctx: 16384, temp: 0.7}
    cmd: |
      # ${no-such-macro} in a comment
      ${latest-llama}
      --model ${models_dir}/gpt-oss-120B.gguf \\
      ${default_args}
      --temperature ${temp} --chat-template-kwargs '{"reasoning_effort": "high"}'
    name: "gpt-oss 120B"
    description: "A thinking model"
    env: ["CUDA_VISIBLE_DEVICES=0,1", "LLAMA_ARG=a=b"]
    checkEndpoint: /custom
    ttl: 60
    unloadTimeout: 10
    useModelName: "openai/gpt-oss-120b"
    filters:
      stripParams: "temperature, top_p"
      setParams: {temperature: 0.7, provider: {zdr: true}}
      setParamsByID:
        "${MODEL_ID}": {chat_template_kwargs: {reasoning_effort: medium}}
        "${MODEL_ID}:high":
          {chat_template_kwargs: {reasoning_effort: high}, top_k: 5, user: x}
        "gpt-5": {}
    aliases: ["gpt-4o-mini", "gpt-5"]
    metadata: {port: "${PORT}"}
    concurrencyLimit: 3
    capabilities: {in: [text], out: [text], context: 32000}
    somethingNew: 1
  "plain model":
    proxy: http://127.0.0.1:8999/base
    ttl: 0
    unlisted: true
    cmd: /opt/llama-server --port 8999 -m /models/x.gguf -c 8192 -np 2
  docker-llama:
    proxy: "http://127.0.0.1:${PORT}"
    cmd: |
      docker run --name ${MODEL_ID}
      --init --rm -p ${PORT}:8080 --gpus '"device=2,3"' -v /mnt/nvme/models:/models
      ghcr.io/ggml-org/llama.cpp:server
      --model '/models/Qwen2.5 Coder.gguf'
    cmdStop: docker stop ${MODEL_ID} ${PID}
  docker-fixed:
    proxy: http://127.0.0.1:8080
    cmd: docker run --rm -p 8080:8080 image --port 8080
  vllm:
    cmd: vllm serve org/name --port ${PORT} -tp 2 --served-model-name vllm
  whisper:
    checkEndpoint: /v1/audio/transcriptions/
    cmd: whisper-server --listen-port 9999 -m /models/whisper.bin
  vectors:
    checkEndpoint: none
    cmd: /opt/llama-server --embedding --port ${PORT} -hf org/embed-GGUF
  elsewhere: {proxy: "http://10.0.0.7:80", cmd: "ssh box serve --port ${PORT}"}
  no-port: {cmd: some-server}
  braces: {cmd: "serve --port ${PORT} --format {name}"}
  quotes: {cmd: "serve --port ${PORT} 'x"}
groups:
  forever: {persistent: true, swap: false, exclusive: false, members: [vectors]}
  others: {members: [whisper]}
peers:
  box: {proxy: "http://192.168.1.23/", models: [model_a, vectors]}
  openrouter:
    proxy: https://openrouter.ai/api
    apiKey: ${env.OPENROUTER_API_KEY}
    models: [z-ai/glm-4.7]
    filters: {stripParams: temperature}
  secret: {proxy: "https://example.com", apiKey: sk-do-not-show, models: [m]}
"""
ENVIRON = {"MODELS": "/srv", "SWAP_KEY": "sk-from-environment", "OPENROUTER_API_KEY": "sk-or"}


def convert(
    folder: Path, text: str, gpus: tuple[Gpu, ...] = GPUS, environ: Any = None
) -> tuple[Config, Carried]:
    theirs, ours = folder / "config.yaml", folder / "servekit.yaml"
    theirs.write_text(dedent(text))
    carried = convert_file(theirs, ENVIRON if environ is None else environ, gpus)
    ours.write_text(carried.text)
    return load_config(ours), carried


@pytest.fixture(scope="module")
def example(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, ModelConfig], Config, Carried]:
    config, carried = convert(tmp_path_factory.mktemp("swap"), EXAMPLE)
    return {model.name: model for model in config.models}, config, carried


Example = tuple[dict[str, ModelConfig], Config, Carried]


def test_a_model_with_everything(example: Example) -> None:
    model = example[0]["gpt-oss-120b"]
    assert (model.engine, model.path) == ("command", "openai/gpt-oss-120b")
    assert model.options["command"] == [
        *("/opt/llama-server", "--port", "{port}", "--model", "/srv/gguf/gpt-oss-120B.gguf"),
        *("--ctx-size", "16384", "--temperature", "0.7"),
        *("--chat-template-kwargs", '{"reasoning_effort": "high"}'),
    ]
    assert model.aliases == ("gpt-4o-mini",)
    high, plain = model.presets
    assert (high.name, high.sampling.top_k) == ("gpt-oss-120b:high", 5)
    assert high.template == {"reasoning_effort": "high"}
    assert (plain.name, plain.template) == ("gpt-5", {})
    assert (model.gpus, model.gpus_per_replica, model.replicas) == ((0, 1), 2, 1)
    assert model.env == {"LLAMA_ARG": "a=b"}
    assert (model.load, model.idle_unload_s, model.load_timeout_s) == ("on_start", 60, 500)
    assert (model.options["health"], model.options["slots"]) == ("/custom", 3)
    assert (model.sampling.temperature, model.max_context) == (0.7, 32000)


def test_a_port_that_stands_in_the_file_is_chosen_here(example: Example) -> None:
    model = example[0]["plain-model"]
    assert model.options["command"][1:3] == ["--port", "{port}"]
    assert (model.options["base"], model.options["health"]) == ("/base/v1", "/base/health")
    assert (model.options["slots"], model.idle_unload_s) == (2, None)
    assert example[0]["docker-fixed"].options["command"][4] == "{port}:8080"
    assert example[0]["docker-fixed"].options["command"][-1] == "8080"
    assert "{port}" in example[0]["whisper"].options["command"]


def test_a_server_sees_the_gpus_that_it_saw(example: Example) -> None:
    models, _, _ = example
    assert (models["docker-llama"].gpus, models["docker-llama"].gpus_per_replica) == ((2, 3), 2)
    assert (models["vllm"].gpus, models["vllm"].gpus_per_replica) == (None, 2)
    assert models["vectors"].gpus_per_replica == 4  # llama-server uses all that it sees


def test_what_else_a_model_is(example: Example) -> None:
    models, config, _ = example
    assert models["docker-llama"].options["command"][-1] == "/models/Qwen2.5 Coder.gguf"
    assert models["docker-llama"].load == "on_demand"  # the second of the preloaded
    assert models["vectors"].options["task"] == "embed"
    assert "health" not in models["vectors"].options
    assert models["vectors"].idle_unload_s == 90
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8080)


def test_peers_are_endpoints(example: Example) -> None:
    models, _, carried = example
    peer = models["openrouter/z-ai/glm-4.7"]
    assert (peer.engine, peer.path, peer.aliases) == ("openai", "z-ai/glm-4.7", ("z-ai/glm-4.7",))
    assert peer.options["url"] == "https://openrouter.ai/api/v1"
    assert peer.options["key_environment"] == "OPENROUTER_API_KEY"
    assert models["box/vectors"].aliases == ()  # a model of the file goes first
    assert models["box/model_a"].options["url"] == "http://192.168.1.23/v1"
    assert "key_environment" not in models["secret/m"].options
    assert "sk-do-not-show" not in carried.text + "".join(carried.left_out)


def test_keys_stay_in_variables(example: Example) -> None:
    _, config, carried = example
    assert [(key.name, key.environment) for key in config.keys] == [("swap_key", "SWAP_KEY")]
    everything = carried.text + "".join(carried.left_out)
    assert "sk-hunter2" not in everything and "sk-from-environment" not in everything
    assert any(line.startswith("apiKeys: 1 of the keys cannot") for line in carried.left_out)


@pytest.mark.parametrize(
    "said",
    [
        "gpt-oss-120b: filters.stripParams: ",
        "gpt-oss-120b: filters.setParams: a request may override",
        'gpt-oss-120b: filters.setParams.provider: {"zdr": true}',
        "gpt-oss-120b: filters.setParamsByID.gpt-oss-120b: ",
        'gpt-oss-120b: filters.setParamsByID.gpt-oss-120b:high: {"user": "x"}',
        "gpt-oss-120b: unloadTimeout: ",
        "gpt-oss-120b: metadata: ",
        "gpt-oss-120b: somethingNew: not known here",
        "gpt-oss-120b: capabilities (in, out): ",
        "plain model: its name cannot be one here; requests ask for plain-model",
        "plain model: unlisted: ",
        "docker-llama: cmdStop: ",
        "docker-llama: preload: ",
        "elsewhere: the model, because its server answers at 10.0.0.7",
        "no-port: the model, because its command does not say its port",
        "braces: the model, because {name} in its command",
        "quotes: the model, because No closing quotation",
        "groups.forever: vectors stay loaded with `load: on_start`",
        "groups.others: whisper take turns",
        "peers.openrouter.filters: ",
        "secret/m: apiKey: put it into the variable SECRET_API_KEY",
        "logLevel: ",
        "sendLoadingState: ",
        "variables: the values of MODELS are written",
    ],
)
def test_what_is_left_out_is_said_twice(example: Example, said: str) -> None:
    _, _, carried = example
    [line] = [line for line in carried.left_out if line.startswith(said)]
    words = " ".join(carried.text.replace("#", " ").split())
    _, _, note = line.partition(": ") if ": " in line else ("", "", line)
    assert " ".join(note.split()) in words


def test_servekits_own_engine_is_suggested_where_it_does_the_same(example: Example) -> None:
    _, _, carried = example
    assert carried.text.count("servekit's own engine does the same") == 2
    llama = "    # engine: llamacpp\n    # path: /models/x.gguf\n    # options:\n    #   slots: 2\n"
    assert f"{llama}    # max_context: 4096\n" in carried.text
    assert "    # engine: vllm\n    # path: org/name\n    # gpus_per_replica: 2\n" in carried.text


def test_gpus_that_are_not_here_are_comments(tmp_path: Path) -> None:
    text = """
    models:
      a: {cmd: "serve ${PORT}", env: ["CUDA_VISIBLE_DEVICES=0,GPU-x"]}
      b: {cmd: "serve ${PORT}", env: ["CUDA_VISIBLE_DEVICES="]}
    """
    config, carried = convert(tmp_path, text, gpus=())
    assert config.models[0].gpus is None and config.models[1].device == "cpu"
    assert "    # gpus: [0, GPU-x]\n" in carried.text
    assert any("this machine has no such GPUs" in line for line in carried.left_out)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models: {}", "has no models"),
        ("logLevel: info", "has no models"),
        ("models: {a: {proxy: 'http://x'}}", "models.a has no `cmd`"),
        ("models: {a: {cmd: 'serve ${PORT} ${nobody}'}}", "models.a.cmd: there is no macro ${nob"),
        ("models: {a: {cmd: 'serve ${PORT} ${env.NOBODY}'}}", "the variable NOBODY is not set"),
        ("models: {a: {cmd: serve}}", "none of the models of config.yaml can be brought:\na: "),
        ("models: [", "config.yaml:2:1: "),
    ],
)
def test_files_that_cannot_be_brought(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(tmp_path, text)
    assert said in str(caught.value)
