"""A chat template of one's own: where it stands, and what is said of one that does not parse."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.config.load import load_config
from servekit.config.schema import Config
from servekit.errors import ConfigError
from servekit.supervisor.deployments.config_diff import same_worker

GOOD = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
BAD = "{% for m in messages %}\n{{ m.content }\n{% endfor %}"


def loaded(folder: Path, template: str, engine: str = "transformers") -> Config:
    (folder / "m").mkdir(exist_ok=True)
    file = folder / "servekit.yaml"
    path = "./m" if engine != "llamacpp" else "org/name/m.gguf"
    indented = template.replace("\n", "\n      ")
    file.write_text(
        f"models:\n  - name: m\n    path: {path}\n    engine: {engine}\n"
        f"    chat_template: {indented}\n"
        + ("    options: {url: 'https://example.com/v1'}\n" if engine == "openai" else "")
    )
    return load_config(file)


@pytest.mark.parametrize("engine", ["transformers", "vllm", "llamacpp"])
def test_text_and_file_are_the_same(tmp_path: Path, engine: str) -> None:
    (tmp_path / "own.jinja").write_text(GOOD)
    text = loaded(tmp_path, f"|-\n{GOOD}", engine).models[0]
    file = loaded(tmp_path, "own.jinja", engine).models[0]
    assert text.chat_template == file.chat_template == GOOD
    assert loaded(tmp_path, '"{{ messages }}"', engine).models[0].chat_template == "{{ messages }}"


def test_a_file_that_changes_makes_another_worker(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(GOOD)
    before = loaded(tmp_path, "own.jinja").models[0]
    assert same_worker(before, loaded(tmp_path, "own.jinja").models[0])
    (tmp_path / "own.jinja").write_text(GOOD + " ")
    assert not same_worker(before, loaded(tmp_path, "own.jinja").models[0])


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            f"|-\n{BAD}",
            r"yaml:5:20: models\[0\]\.chat_template: line 2 of the template: unexpected",
        ),
        ("bad.jinja", r"chat_template: /.*bad\.jinja:2: unexpected"),
        ('"{% if x %}"', "line 1 of the template: .*endif"),
        ('"{{ x | no_such }}"', "line 1 of the template: No filter named 'no_such'"),
        ("none.jinja", "none.jinja is not a file"),
        (".", "is not a file"),
        ("empty.jinja", "is empty"),
        ("latin.jinja", "is not UTF-8"),
        ("large.jinja", "is larger than 1 MiB"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, template: str, said: str) -> None:
    (tmp_path / "bad.jinja").write_text(BAD)
    (tmp_path / "empty.jinja").write_text("\n")
    (tmp_path / "latin.jinja").write_bytes(b"\xe9{{ x }}")
    (tmp_path / "large.jinja").write_text(" " * (2**20 + 1))
    with pytest.raises(ConfigError, match=said):
        loaded(tmp_path, template)


@pytest.mark.parametrize(
    ("engine", "said"), [("echo", "renders no chat template"), ("openai", "loaded elsewhere")]
)
def test_engines_that_render_none_say_so(tmp_path: Path, engine: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        loaded(tmp_path, '"{{ messages }}"', engine)
