"""What a key of the file may be: its limits, its defaults, and the words of a refusal."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from servekit.config.schema import Config, ModelConfig, ServerConfig, names_of

MODEL: dict[str, Any] = {"name": "m", "path": "org/name"}


def refusal(kind: type[Any], written: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(written)
    error, *_ = caught.value.errors()  # a list without its wrong items may be too short, too
    return str(error.get("ctx", {}).get("error", error["msg"]))


# ---------------------------------------------------------------- defaults


def test_a_file_without_a_section_server_listens_for_this_machine_alone() -> None:
    server = Config.model_validate({"models": [MODEL]}).server
    assert (server.host, server.port, server.gateways, server.ui) == ("127.0.0.1", 8000, 1, True)
    assert (server.open_metrics, server.runtime_adapters) == (False, False)
    assert (server.drain_timeout_s, server.write_timeout_s) == (30.0, 60.0)
    assert (server.max_body_bytes, server.max_queue_bytes) == (8 * 2**20, 256 * 2**20)
    assert (server.cors, server.hosts, server.trusted_proxies, server.tls) == ((), (), (), None)
    assert (server.prefix_cache, server.unknown_parameters) == ("by_key", "warn")


def test_a_model_without_keys_runs_no_code_and_loads_at_the_start() -> None:
    model = ModelConfig.model_validate(MODEL)
    assert (model.engine, model.device, model.replicas, model.load) == (
        "transformers", "auto", "auto", "on_start",
    )  # fmt: skip
    assert (model.trust_remote_code, model.max_queue, model.timeout_s) == (False, 1024, 600.0)
    assert (model.stall_timeout_s, model.load_timeout_s, model.quarantine_s) == (60.0, 600.0, 600.0)
    assert (model.gpus_per_replica, model.memory, model.stray_memory) == (1, None, "alert")


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("key", "least", "most"),
    [
        ("port", 0, 65535),
        ("gateways", 1, 64),
        ("max_body_bytes", 1024, None),
        ("max_queue_bytes", 2**20, None),
        ("write_timeout_s", 1, None),
        ("drain_timeout_s", 0, None),
        ("legacy_port", 0, 65535),
    ],
)
def test_the_limits_of_the_server(key: str, least: int, most: int | None) -> None:
    check_limits(ServerConfig, {}, key, least, most)


@pytest.mark.parametrize(
    ("key", "least", "most"),
    [
        ("gpus_per_replica", 1, 64),
        ("replicas", 1, 256),
        ("max_context", 16, None),
        ("max_queue", 1, None),
        ("quarantine_s", 0, None),
    ],
)
def test_the_limits_of_a_model(key: str, least: int, most: int | None) -> None:
    check_limits(ModelConfig, MODEL, key, least, most)


@pytest.mark.parametrize(
    "key", ["timeout_s", "stall_timeout_s", "load_timeout_s", "idle_sleep_s", "idle_unload_s"]
)
def test_a_time_of_a_model_is_more_than_nothing(key: str) -> None:
    assert getattr(ModelConfig.model_validate({**MODEL, key: 0.001}), key) == 0.001
    assert "greater than 0" in refusal(ModelConfig, {**MODEL, key: 0})


@pytest.mark.parametrize(
    ("key", "least", "most"),
    [
        ("temperature", 0, 100),
        ("top_k", 0, 2**31 - 1),
        ("min_p", 0, 1),
        ("top_p", None, 1),
        ("repetition_penalty", None, 100),
        ("max_tokens", 1, 2**31 - 1),
    ],
)
def test_the_limits_of_sampling(key: str, least: int | None, most: int) -> None:
    sampling = {"sampling": {key: most}}
    found = ModelConfig.model_validate({**MODEL, **sampling}).sampling
    assert getattr(found, key) == most
    assert refusal(ModelConfig, {**MODEL, "sampling": {key: most + 1}})
    if least is None:  # more than nothing
        assert refusal(ModelConfig, {**MODEL, "sampling": {key: 0}})
    else:
        ModelConfig.model_validate({**MODEL, "sampling": {key: least}})
        assert refusal(ModelConfig, {**MODEL, "sampling": {key: least - 1}})


def check_limits(
    kind: type[Any], others: dict[str, Any], key: str, least: int, most: int | None
) -> None:
    for good in (least, most):
        if good is not None:
            assert getattr(kind.model_validate({**others, key: good}), key) == good
    assert refusal(kind, {**others, key: least - 1})
    if most is not None:
        assert refusal(kind, {**others, key: most + 1})


# ---------------------------------------------------------------- names and addresses


@pytest.mark.parametrize("name", ["a", "Qwen/Qwen3-0.6B:latest", "1", "a_b.c-d", "x" * 128])
def test_a_name_may_look_like_any_models_name(name: str) -> None:
    assert ModelConfig.model_validate({**MODEL, "name": name}).name == name


@pytest.mark.parametrize("name", ["", "-a", "/a", "a b", "é", "a\n", "x" * 129, "a?"])
def test_a_name_that_no_request_can_use_is_refused(name: str) -> None:
    assert refusal(ModelConfig, {**MODEL, "name": name}).startswith("a name begins with a letter")


def test_a_profile_is_not_called_as_all_models_are() -> None:
    written = {"models": [MODEL], "profiles": {"all": ["m"]}}
    assert refusal(Config, written).startswith("'all' stands for all models; give the profile")
    assert Config.model_validate({"models": [MODEL], "profiles": {"All": ["m"]}}).profiles


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "CUDA_VISIBLE_DEVICES",
            "CUDA_VISIBLE_DEVICES is set by servekit; choose GPUs with `gpus`",
        ),
        ("A=B", "'A=B' cannot be the name of an environment variable"),
        ("", "'' cannot be the name of an environment variable"),
        ("A B", "'A B' cannot be the name of an environment variable"),
    ],
)
def test_a_variable_that_no_worker_can_have_is_refused(name: str, said: str) -> None:
    assert refusal(ModelConfig, {**MODEL, "env": {name: "x"}}) == said


@pytest.mark.parametrize("gpu", [0, 7, "GPU-aa01", "MIG-1b/2/3"])
def test_a_gpu_is_an_index_or_a_uuid(gpu: int | str) -> None:
    assert ModelConfig.model_validate({**MODEL, "gpus": [gpu]}).gpus == (gpu,)


@pytest.mark.parametrize("gpu", [-1, "0", "cuda:0", "GPU-", "gpu-aa"])
def test_what_names_no_gpu_is_refused(gpu: int | str) -> None:
    assert "GPU" in refusal(ModelConfig, {**MODEL, "gpus": [gpu]})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "fe80::1%eth0", "localhost", "a-b.example"])
def test_the_server_listens_at_an_address_or_a_name(host: str) -> None:
    assert ServerConfig(host=host).host == host


@pytest.mark.parametrize("host", ["", "http://a", "a b", "a/b", "[::1]"])
def test_what_is_no_host_is_refused(host: str) -> None:
    said = "must be an address or a host name, such as 0.0.0.0, without a scheme"
    assert refusal(ServerConfig, {"host": host}) == said
    assert refusal(ServerConfig, {"hosts": [host]}) == said


@pytest.mark.parametrize("network", ["10.0.0.1", "10.0.0.0/8", "fd00::/8"])
def test_a_proxy_is_an_address_or_a_network(network: str) -> None:
    assert ServerConfig(trusted_proxies=(network,)).trusted_proxies == (network,)


@pytest.mark.parametrize("network", ["", "proxy", "10.0.0.1/8", "10.0.0.0/33"])
def test_what_is_no_network_is_refused(network: str) -> None:
    said = refusal(ServerConfig, {"trusted_proxies": [network]})
    assert said.startswith("must be an address or a network, such as 10.0.0.0/8: ")


# ---------------------------------------------------------------- variables of a template


@pytest.mark.parametrize(
    "value", [0, 2**63 - 1, -(2**63), 1.5, "x", None, True, [1, [2]], {"a": {"b": [1]}}]
)
def test_variables_of_a_template_may_be_any_json(value: object) -> None:
    preset = {"name": "p", "template": {"x": value}}
    [made] = ModelConfig.model_validate({**MODEL, "presets": [preset]}).presets
    assert made.template == {"x": value}


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, float("inf"), float("nan")])
def test_a_number_that_no_message_can_carry_is_refused_however_deep(value: float) -> None:
    preset = {"name": "p", "template": {"x": [{"y": value}]}}
    said = refusal(ModelConfig, {**MODEL, "presets": [preset]})
    assert said == "its numbers must be finite, and of 64 bits at most"


# ---------------------------------------------------------------- all names of a file


def test_every_name_that_requests_may_use_stands_for_one_thing() -> None:
    preset, adapter = {"name": "p"}, {"name": "x", "path": "./x"}
    first = {**MODEL, "aliases": ["a"], "presets": [preset], "adapters": [adapter]}
    made = Config.model_validate({"models": [first, {"name": "n", "path": "org/n"}]})
    assert names_of(made) == ["m", "a", "p", "x", "n"]
    assert made.models[0].names == ("m", "a", "p")
    for name in ("m", "a", "p", "x"):
        said = refusal(Config, {"models": [first, {"name": name, "path": "org/n"}]})
        assert said == f"two models are named {name!r}"
