"""`servekit ls`, `pull` and `rm`: what they list and refuse, from a file or a made-up instance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.cli.init.config_template import DEMO
from servekit.cli.model_files import command
from servekit.config import paths
from servekit.errors import ConfigError
from servekit.protocol.messages import Refused, Status
from servekit.protocol.residency import ResidencyStatus
from tests.unit.cli.instance import invoke, listening, make_model, make_replica, make_status
from tests.unit.cli.model_files.test_disk import environ, fill
from tests.unit.cli.up.test_background import holding

CONFIG = """
models:
  - {name: a, engine: transformers, path: org/name, revision: v2, device: cpu, aliases: [alpha],
     presets: [{name: calm, sampling: {temperature: 0}}]}
  - {name: b, engine: echo}
"""
ENGINES = ("transformers", "echo")


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with two models, in a folder with caches; no instance runs by default."""
    fill(tmp_path)
    for name, value in environ(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("SERVEKIT_CONFIG", raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    path = tmp_path / "here" / "servekit.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


def list_rows(*options: object) -> list[dict[str, Any]]:
    done = invoke("ls", "--json", *options)
    assert done.exit_code == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def serving(config: Path, *states: str, path: str = "org/name") -> Status:
    replicas = [make_replica(f"a/{n}", state) for n, state in enumerate(states)]  # type: ignore[arg-type]
    model = replace(make_model("a"), path=path, replicas=tuple(replicas))
    return replace(make_status(model), config=str(config))


# ---------------------------------------------------------------- ls


def test_models_of_the_file_are_listed_then_what_else_is_in_the_caches(
    config: Path, run_dir: Path
) -> None:
    rows = list_rows("--run-dir", run_dir)
    assert [(row["name"], row["engine"], row["from"]) for row in rows] == [
        ("a", "transformers", "org/name"),
        ("calm", "transformers", "a preset of a"),
        ("b", "echo", ""),
        ("", "", "pkg==1.0"),
    ]
    assert [row["state"] for row in rows] == [""] * 4
    assert rows[0]["size_bytes"] > 130
    assert rows[1]["size_bytes"] is None
    assert rows == list_rows("-c", config)


def test_the_table_has_a_dash_for_what_is_not_known(config: Path) -> None:
    done = invoke("ls", "-c", config)
    head, *lines = (line.split() for line in done.stdout.splitlines())
    assert head == ["MODEL", "STATE", "ENGINE", "ON", "DISK", "FROM"]
    assert lines[0][:3] == ["a", "-", "transformers"] and lines[0][-1] == "org/name"
    assert lines[1] == ["calm", "-", "transformers", "-", "a", "preset", "of", "a"]
    assert lines[-1][:3] == ["-", "-", "-"] and lines[-1][-1] == "pkg==1.0"


def test_without_models_the_next_step_is_told(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))
    assert invoke("ls", "--run-dir", tmp_path).stdout == "no models: `servekit pull ORG/NAME`\n"


def test_a_file_that_is_wrong_is_told_and_the_caches_are_listed(config: Path) -> None:
    config.write_text("models: [{name: a, engine: nothing}]")
    done = invoke("ls", "--json", "-c", config)
    assert "'nothing'" in done.stderr
    assert [row["from"] for row in json.loads(done.stdout)] == ["org/name", "pkg==1.0"]


@pytest.mark.parametrize(
    ("states", "told"),
    [
        (("failed", "ready"), "ready"),
        (("starting", "loading"), "loading"),
        (("failed", "starting"), "starting"),
        (("failed", "backoff"), "failed"),
        ((), "stopped"),
    ],
)
def test_a_model_is_as_its_best_worker(
    config: Path, run_dir: Path, states: tuple[str, ...], told: str
) -> None:
    with listening(run_dir, lambda message: None, serving(config, *states)):
        rows = list_rows("--run-dir", run_dir)
    assert [row["state"] for row in rows[:3]] == [told, told, ""]


def test_a_running_model_has_the_engine_that_was_chosen(config: Path, run_dir: Path) -> None:
    config.write_text(config.read_text().replace("engine: transformers", "engine: auto"))
    status = serving(config, "ready")
    chosen = replace(status, models=(replace(status.models[0], engine="llamacpp"),))
    with listening(run_dir, lambda message: None, chosen):
        rows = list_rows("--run-dir", run_dir)
    assert [row["engine"] for row in rows[:3]] == ["llamacpp", "llamacpp", "echo"]
    assert list_rows("-c", config)[0]["engine"] == "auto"


def test_an_instance_whose_file_is_gone_is_listed_as_it_says(config: Path, run_dir: Path) -> None:
    config.unlink()
    with listening(run_dir, lambda message: None, serving(config, "ready")):
        rows = list_rows("--run-dir", run_dir)
    assert [(row["name"], row["state"], row["from"]) for row in rows[:2]] == [
        ("a", "ready", "org/name"),
        ("", "", "pkg==1.0"),
    ]


def test_a_model_that_comes_and_goes_is_as_its_memory(config: Path, run_dir: Path) -> None:
    status = serving(config, "ready")
    asleep = replace(status.models[0], residence=ResidencyStatus("on_demand", "coming"))
    with listening(run_dir, lambda message: None, replace(status, models=(asleep,))):
        rows = list_rows("--run-dir", run_dir)
        of_the_file = list_rows("--run-dir", run_dir, "-c", config)
    assert rows[0]["state"] == "loading"
    assert of_the_file[0]["state"] == "", "a file that is named is asked alone"


# ---------------------------------------------------------------- pull


@pytest.mark.parametrize(
    ("model", "revision", "found"),
    [
        ("a", None, ("org/name", "v2")),
        ("alpha", None, ("org/name", "v2")),
        ("calm", "v3", ("org/name", "v3")),
        ("demo", None, (DEMO, None)),
        ("org/other:Q4_K_M", None, ("org/other:Q4_K_M", None)),
        ("org/other", "v3", ("org/other", "v3")),
        ("https://huggingface.co/org/other/tree/v4", None, ("org/other", "v4")),
        ("https://huggingface.co/org/other/tree/v4", "v5", ("org/other", "v5")),
    ],
)
def test_what_is_fetched_is_a_model_of_the_file_or_a_source(
    config: Path, model: str, revision: str | None, found: tuple[str, str | None]
) -> None:
    assert command._find_path(model, config, None, revision) == found


def test_a_word_that_is_neither_is_told_with_the_models_of_the_file(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"the file's models are: a, b; did you mean 'a'\?"):
        command._find_path("aa", config, None, None)
    config.write_text("models: [{name: wrong, engine: nothing}]")
    with pytest.raises(ConfigError) as error:
        command._find_path("aa", config, None, None)
    assert "the file's models" not in error.value.message


@pytest.mark.parametrize("path", ["org/name", "org/name:Q4_K_M", "org/name/sub/file.gguf"])
@pytest.mark.parametrize("revision", ["v3", "refs/pr/1"])
def test_a_revision_is_looked_up_as_an_address(path: str, revision: str) -> None:
    found = paths.check_model_path(command._join_revision(path, revision), Path.cwd())
    assert (found.kind, found.text, found.revision) == ("hub", path, revision)


@pytest.mark.parametrize("words", [("pull",), ("rm", "--yes")])
@pytest.mark.parametrize(
    "keys",
    ["engine: echo", "engine: openai, path: org/name, options: {url: 'http://127.0.0.1/v1'}"],
)
def test_a_model_without_files_here_has_none_to_fetch_or_remove(
    config: Path, words: tuple[str, ...], keys: str
) -> None:
    config.write_text(f"models: [{{name: r, {keys}}}]")
    done = invoke(*words, "r", "-c", config)
    engine = keys.split(",")[0].removeprefix("engine: ")
    said = f"r has no files here: its engine is {engine}\n"
    assert (done.exit_code, done.stderr) == (2, said)


def test_a_folder_need_not_be_fetched(config: Path, tmp_path: Path) -> None:
    done = invoke("pull", tmp_path / "here", "-c", config)
    assert done.exit_code == 2
    assert done.stderr == f"{tmp_path}/here is on this machine already\n"


def test_a_fetch_ends_with_its_error_or_tells_the_size(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        b'{"total": 2097152}\n',
        b'{"phase": "fetch", "done": 5, "total": 0}\n',
        b'{"phase": "fetch", "done": 9, "total": 10}\n',
    ]
    assert command._show_progress("org/name", lines) == ""
    assert capsys.readouterr().err == "org/name: 2 MiB\n"
    lines.insert(1, b'{"error": "no network"}\n')
    assert command._show_progress("org/name", lines) == "no network"


# ---------------------------------------------------------------- rm


def test_rm_removes_a_model_of_the_file_once_confirmed(config: Path, run_dir: Path) -> None:
    refused = invoke("rm", "alpha", "--run-dir", run_dir, typed="n\n")
    assert refused.exit_code == 1 and "caches have of org/name, " in refused.stdout
    assert list_rows("-c", config)[0]["size_bytes"]
    done = invoke("rm", "alpha", "--run-dir", run_dir, typed="y\n")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("removed org/name: ")
    assert list_rows("-c", config)[0]["size_bytes"] is None


def test_rm_takes_a_source_as_ls_shows_it(config: Path, run_dir: Path) -> None:
    done = invoke("rm", "pkg==1.0", "--yes", "--run-dir", run_dir)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("removed pkg==1.0: ")
    assert [row["from"] for row in list_rows("-c", config)] == ["org/name", "a preset of a", ""]


def test_rm_takes_a_file_that_was_converted_and_leaves_the_file(
    tmp_path: Path, run_dir: Path
) -> None:
    gguf = tmp_path / "here" / "m.gguf"
    gguf.write_bytes(b"GGUF")
    missing = invoke("rm", "./m.gguf", "--yes", "--run-dir", run_dir)
    assert missing.stderr.startswith(f"{gguf} is not in the caches, which hold: org/name")
    converted = tmp_path / "servekit" / "models" / "m-1"
    converted.mkdir()
    (converted / ".servekit.json").write_text(json.dumps({"identity": ["gguf 3", str(gguf)]}))
    done = invoke("rm", "./m.gguf", "--yes", "--run-dir", run_dir)
    assert done.stdout.startswith(f"removed {gguf}: ")
    assert gguf.exists() and not converted.exists()


def test_rm_of_what_is_not_there_says_what_is(run_dir: Path) -> None:
    done = invoke("rm", "org/other", "--yes", "--run-dir", run_dir)
    said = "org/other is not in the caches, which hold: org/name, pkg==1.0\n"
    assert (done.exit_code, done.stderr) == (2, said)


def test_rm_spares_what_is_being_served(config: Path, run_dir: Path) -> None:
    with listening(run_dir, lambda message: None, serving(config, "ready")):
        done = invoke("rm", "org/name", "--yes", "--run-dir", run_dir)
        other = invoke("rm", "pkg==1.0", "--yes", "--run-dir", run_dir)
    said = f"the instance in {run_dir} serves a from org/name\n"
    assert (done.exit_code, done.stderr) == (1, said)
    assert other.exit_code == 0
    assert list_rows("-c", config)[0]["size_bytes"]


def test_rm_spares_what_any_instance_serves(config: Path, tmp_path: Path, run_dir: Path) -> None:
    (second := tmp_path / "second").mkdir()
    with (
        listening(run_dir, lambda message: None, serving(config, "ready", path="org/other")),
        listening(second, lambda message: None, serving(config, "ready")),
        holding(second),
    ):
        done = invoke("rm", "org/name", "--yes", "--run-dir", run_dir)
    said = f"the instance in {second} serves a from org/name\n"
    assert (done.exit_code, done.stderr) == (1, said)


def test_an_instance_that_does_not_answer_is_told_and_its_files_are_spared(run_dir: Path) -> None:
    def refuse() -> Any:
        return Refused("busy")

    with listening(run_dir, lambda message: None, refuse):
        listed = invoke("ls", "--run-dir", run_dir)
        removed = invoke("rm", "org/name", "--yes", "--run-dir", run_dir)
    assert (listed.exit_code, listed.stderr) == (0, f"{run_dir}: busy\n")
    said = f"what {run_dir} serves is not known: busy\n"
    assert (removed.exit_code, removed.stderr) == (1, said)
