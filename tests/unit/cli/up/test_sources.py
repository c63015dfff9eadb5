"""What `servekit up` serves, by its words and options, and where it looks for a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.cli.up import sources
from servekit.cli.up.sources import ModelOptions, find_source
from servekit.config.load import load_config
from servekit.errors import ConfigError


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def environ(tmp_path: Path, **more: str) -> dict[str, str]:
    return {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        **more,
    }


def find(tmp_path: Path, *words: str, config: Path | None = None, **options: object) -> Path:
    given = ModelOptions(**options)  # type: ignore[arg-type]
    return find_source(words, config, given, environ(tmp_path))


def test_a_word_that_ends_in_yaml_is_the_file(tmp_path: Path) -> None:
    assert find(tmp_path, "other.yaml") == Path("other.yaml")
    assert find(tmp_path, config=Path("x")) == Path("x")


def test_the_file_is_found_here_then_in_the_users_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"servekit\.yaml nor .*/config/servekit/servekit\.yaml"):
        find(tmp_path)
    users = tmp_path / "config" / "servekit" / "servekit.yaml"
    users.parent.mkdir(parents=True)
    users.touch()
    assert find(tmp_path) == users
    Path("servekit.yaml").touch()
    assert find(tmp_path) == Path("servekit.yaml")
    named = environ(tmp_path, SERVEKIT_CONFIG="/etc/s.yaml")
    assert find_source((), None, ModelOptions(), named) == Path("/etc/s.yaml")
    assert find_source(("a.yaml",), None, ModelOptions(), named) == Path("a.yaml")


def test_models_get_a_file_that_is_valid(tmp_path: Path) -> None:
    path = find(tmp_path, "Qwen/Qwen3-0.6B", "org/Other-GGUF:Q4_K_M", gpus="0, 1", max_context=4096)
    first, second = load_config(path).models
    assert (first.name, first.path, first.engine) == ("qwen3-0.6b", "Qwen/Qwen3-0.6B", "auto")
    assert first.aliases == ("Qwen/Qwen3-0.6B",)
    assert first.gpus == second.gpus == (0, 1)
    assert second.path == "org/Other-GGUF:Q4_K_M"
    assert second.max_context == 4096
    assert path == find(
        tmp_path, "Qwen/Qwen3-0.6B", "org/Other-GGUF:Q4_K_M", gpus="0, 1", max_context=4096
    )


def test_options_of_one_model(tmp_path: Path) -> None:
    path = find(tmp_path, "demo", gpus="none", name="tiny", engine="echo", memory="1GiB")
    (model,) = load_config(path).models
    assert (model.name, model.device, model.engine, model.memory) == ("tiny", "cpu", "echo", "1GiB")


def test_an_address_keeps_its_revision(tmp_path: Path) -> None:
    path = find(tmp_path, "https://huggingface.co/org/name/tree/v2")
    (model,) = load_config(path).models
    assert (model.path, model.revision) == ("org/name", "v2")


@pytest.mark.parametrize(
    ("words", "options", "said"),
    [
        (["nonsense"], {}, "neither a hub id .* a configuration file ends in .yaml"),
        (["a/b", "c/b"], {}, "two of these models would be called 'b'"),
        (["a/b", "c/d"], {"name": "x"}, "--name is for one model"),
        (["a/b", "f.yaml"], {}, "f.yaml is a configuration file: give it alone"),
        (["f.yaml"], {"gpus": "0"}, "--gpus is for models that are named here"),
        ([], {"max_context": 16}, "--max-context is for models"),
        (["f.yaml"], {"config": Path("g.yaml")}, "not both"),
        (["qwen3:0.6b"], {}, "write Qwen/Qwen3-0.6B"),
    ],
)
def test_contradictions_are_sentences(
    tmp_path: Path, words: list[str], options: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        find(tmp_path, *words, **options)  # type: ignore[arg-type]


def test_an_error_in_a_written_file_names_the_option(tmp_path: Path) -> None:
    path = find(tmp_path, "org/name", memory="much", gpus="x", max_context=64)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    memory, gpus = sources.blame_options(path, caught.value.message).splitlines()
    assert memory.startswith("--memory: 'much' is not an amount of memory")
    assert gpus.startswith("--gpus: a GPU is an index")
    other = tmp_path / "servekit.yaml"
    said = f"{other}:1:2: models[0].memory: no"
    assert sources.blame_options(other, said) == said
