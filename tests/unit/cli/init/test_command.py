"""`servekit init`: the file it writes from its options, what it asks, and what it refuses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from servekit.cli.init import command
from servekit.cli.init.config_template import DEMO
from servekit.config import keys
from servekit.config.load import load_config
from servekit.errors import ConfigError
from servekit.system.gpu.gpus import Gpu
from tests.unit.cli.init.test_huixiangdou import BOTH
from tests.unit.cli.instance import invoke

GPUS = tuple(Gpu(n, f"GPU-{n}", "H100", 80 * 2**30, 80 * 2**30) for n in range(2))


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# ---------------------------------------------------------------- options


def test_without_questions_the_demo_is_written_for_this_machine(tmp_path: Path) -> None:
    done = invoke("init")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == (
        "wrote servekit.yaml\ncheck it: servekit check servekit.yaml\n"
        "serve it: servekit up --config servekit.yaml\n"
    )
    config = load_config(tmp_path / "servekit.yaml")
    assert [(one.name, one.path) for one in config.models] == [("smollm2-135m-instruct", DEMO)]
    assert (config.server.host, config.server.port, config.keys) == ("127.0.0.1", 8000, ())
    machine = f"{len(os.sched_getaffinity(0))} cores, "
    assert f"# Made for this machine: {machine}" in (tmp_path / "servekit.yaml").read_text()


def test_options_say_what_is_written_and_where(tmp_path: Path) -> None:
    (tmp_path / "my model").mkdir()
    options = ("-m", "./my model", "--name", "mine", "--port", "1", "--gpus", "none")
    done = invoke("init", *options, "-o", "my file.yaml")
    assert done.exit_code == 0, done.stderr
    assert "servekit check 'my file.yaml'\n" in done.stdout
    config = load_config(tmp_path / "my file.yaml")
    [model] = config.models
    assert (model.name, model.path, model.device) == ("mine", f"{tmp_path}/my model", "cpu")
    assert config.server.port == 1


def test_a_hub_id_names_the_model_and_an_address_keeps_its_revision(tmp_path: Path) -> None:
    address = "https://huggingface.co/Qwen/Qwen3-0.6B"
    for path in ("Qwen/Qwen3-0.6B", address, f"{address}/tree/v1"):
        done = invoke("init", "-m", path, "--name", "q", "--force")
        assert done.exit_code == 0, done.stderr
        [model] = load_config(tmp_path / "servekit.yaml").models
        assert model.path == "Qwen/Qwen3-0.6B"
        assert model.revision == ("v1" if path.endswith("v1") else None)
    assert command._ask_model("Qwen/Qwen3-0.6B", None, tmp_path, asks=False)[1] == "qwen3-0.6b"
    wheel = "pypi:package==1.0/a.gguf"
    assert command._ask_model(wheel, None, tmp_path, asks=False) == (wheel, "a")


def test_a_key_is_shown_once_and_the_server_is_open_to_others(tmp_path: Path) -> None:
    done = invoke("init", "--keys")
    key = done.stdout.splitlines()[-1]
    config = load_config(tmp_path / "servekit.yaml")
    assert config.server.host == "0.0.0.0"
    [found] = config.keys
    assert found.name == "default" and found.admin
    assert key.startswith("sk-default-") and key not in (tmp_path / "servekit.yaml").read_text()
    assert "Keep it: nothing can show it again" in done.stderr


def test_a_file_that_is_there_stays_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "servekit.yaml").write_text("mine")
    done = invoke("init")
    assert done.exit_code == 2
    assert (
        done.stderr == "servekit.yaml is there already; --force writes over it, -o FILE elsewhere\n"
    )
    assert (tmp_path / "servekit.yaml").read_text() == "mine"
    assert invoke("init", "--force").exit_code == 0
    assert load_config(tmp_path / "servekit.yaml").models


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["x"],
            "say what 'x' is: --from llama-swap, ollama, vllm or huixiangdou; a model is --mod",
        ),
        (["-m", "not a model"], "; or say demo"),
        (["--gpus", "7"], "'7' is not a choice of GPUs: write all, none, or indexes; there "),
        (["--from", "x"], "--from knows llama-swap, ollama, vllm or huixiangdou, not 'x'"),
        (["--from", "vllm"], "is missing: --from vllm 'vllm serve ORG/NAME …'"),
        (["--from", "llama-swap"], "what is to be converted is missing: --from llama-swap FILE"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(
    tmp_path: Path, options: list[str], said: str
) -> None:
    done = invoke("init", *options)
    assert done.exit_code == 2 and said in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- other programs


def test_a_vllm_command_becomes_a_file(tmp_path: Path) -> None:
    done = invoke("init", "--from", "vllm", "vllm serve Qwen/Qwen3-0.6B --port 9000")
    assert "not carried over: vllm serve listens on every interface" in done.stderr
    text = (tmp_path / "servekit.yaml").read_text()
    assert "Qwen/Qwen3-0.6B" in text and "9000" in text


def test_a_file_of_llama_swap_is_read(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("models: {a: {cmd: 'no-such-server --port ${PORT}'}}")
    done = invoke("init", "--from", "llama-swap", "theirs.yaml")
    assert done.exit_code == 2
    assert "there is no program no-such-server in PATH" in done.stderr
    assert "no-such-server" in (tmp_path / "servekit.yaml").read_text()


def test_huixiangdous_file_may_be_given_by_either_option(tmp_path: Path) -> None:
    (tmp_path / "config.ini").write_text(BOTH)
    one = invoke("init", "--from", "huixiangdou", "config.ini", "-o", "one.yaml")
    other = invoke("init", "--from-huixiangdou", "config.ini", "-o", "other.yaml")
    assert (one.exit_code, other.exit_code) == (0, 0), one.stderr
    assert "not carried over: " in one.stderr and one.stderr == other.stderr
    assert (tmp_path / "one.yaml").read_text() == (tmp_path / "other.yaml").read_text()


# ---------------------------------------------------------------- questions


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a person types, one answer for each question; at its end Ctrl-C."""
    typed: list[str] = []

    def prompt(question: str, default: str) -> str:
        if not typed:
            raise typer.Abort
        return typed.pop(0) or default

    monkeypatch.setattr(typer, "prompt", prompt)
    yield typed
    assert not typed, "all was asked for"


def test_a_wrong_answer_is_asked_again(
    answers: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    answers += ["65536", "-1", "x", " 65535 "]
    assert command._ask_user("Port", "8000", command._parse_port) == 65535
    said = "is no port: a number up to 65535; 0 is a free one"
    assert capsys.readouterr().out.splitlines() == [
        f"{one!r} {said}" for one in ("65536", "-1", "x")
    ]
    answers += ["", "0"]
    assert command._ask_user("Port", "8000", command._parse_port) == 8000
    assert command._ask_user("Port", "8000", command._parse_port) == 0


def test_ctrl_c_writes_nothing(answers: list[str]) -> None:
    with pytest.raises(ConfigError, match="nothing was written"):
        command._ask_user("Port", "8000", command._parse_port)


def test_only_what_no_option_says_is_asked(answers: list[str], tmp_path: Path) -> None:
    answers += ["Qwen/Qwen3-0.6B"]
    assert command._ask_model(None, None, tmp_path, asks=True) == (
        "Qwen/Qwen3-0.6B",
        "qwen3-0.6b",
    )
    assert command._ask_model("demo", "mine", tmp_path, asks=True) == (DEMO, "mine")
    answers += ["1"]
    assert command._ask_gpus(None, GPUS, asks=True) == (1,)
    assert command._ask_gpus("0", GPUS, asks=True) == (0,)
    assert command._ask_gpus(None, (), asks=True) is None, "there is nothing to choose from"
    answers += ["9000", "maybe", "Yes"]
    options, key = command._collect_options("p", "n", (1,), None, None, asks=True)
    assert (options.port, options.host, options.gpus) == (9000, "0.0.0.0", (1,))
    assert options.key is not None and keys.parse_hash(options.key[1]).matches(key.encode())
    options, key = command._collect_options("p", "n", None, 7, False, asks=True)
    assert (options.port, options.host, options.key, key) == (7, "127.0.0.1", None, "")


@pytest.mark.parametrize(
    ("text", "indexes"),
    [("all", None), ("none", ()), ("1", (1,)), ("1, 0", (1, 0)), ("0,0", (0,))],
)
def test_gpus_are_chosen_by_index_each_once(text: str, indexes: tuple[int, ...] | None) -> None:
    assert command._parse_indexes(text, GPUS) == indexes


@pytest.mark.parametrize("text", ["2", "0,2", "", "gpu0", "0 1"])
def test_a_gpu_that_is_not_there_is_told_with_those_that_are(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write all, none, or indexes; there are: 0, 1$"):
        command._parse_indexes(text, GPUS)
    with pytest.raises(ConfigError, match="there is none here"):
        command._parse_indexes("0", ())


@pytest.mark.parametrize(("text", "yes"), [("y", True), ("YES", True), ("n", False), ("No", False)])
def test_yes_and_no_are_understood(text: str, yes: bool) -> None:
    assert command._parse_yes(text) is yes


def test_the_machine_is_described_with_its_gpus_and_engines() -> None:
    told = command._describe_machine(GPUS)
    assert "GPU 0 (H100), 80.0 GiB; GPU 1 (H100), 80.0 GiB; engines: " in told
    engines = told.partition("engines: ")[2].split(", ")
    assert "transformers" in engines
    assert not {"echo", "openai", "command"} & set(engines)
    assert "no NVIDIA GPU; engines: " in command._describe_machine(())
