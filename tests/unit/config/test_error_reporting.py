"""What is said of a mistake in the file: what stands there, and what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.config import base_model
from servekit.config.error_reporting import (
    MAX_PROBLEMS,
    Problem,
    config_error,
    describe_value,
    dotted_path,
    missing_key,
    shorten_text,
)
from servekit.config.yaml.loader import parse_document
from servekit.config.yaml.nodes import Mark, Node
from tests.unit.config.test_load import complaints, write

FILE = Path("/conf/servekit.yaml")


def told(folder: Path, line: str, more: str = "") -> str:
    """What is said of one line of a model, or of the whole file."""
    [said] = complaints(
        write(folder, f"models:\n  - name: a\n    path: org/name\n    {line}\n{more}")
    )
    return said.partition(": ")[2]


# ---------------------------------------------------------------- texts of a form


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "tracing: {endpoint: localhost:4318}",
            "must be an address, such as http://localhost:4318.",
        ),
        ("server: {cors: ['https://a.b/']}", "must be an origin, such as https://app.example,"),
        ("server: {fetch_images: {hosts: ['https://a']}}", "must be a host, such as example.com,"),
        ("server: {mcp: [{name: a b, url: 'http://a'}]}", "must be letters, digits, _ and -, 32"),
        (
            f"tracing: {{endpoint: 'http://a', service: {'s' * 257}}}",
            "must be text of at most 256 ch",
        ),
    ],
)
def test_a_text_of_another_form_is_answered_in_words(tmp_path: Path, more: str, said: str) -> None:
    assert said in told(tmp_path, "engine: echo", more)


def test_a_text_of_another_form_is_not_repeated(tmp_path: Path) -> None:
    """It may hold a secret."""
    url = "https://me:secret@host/v1"
    answer = told(tmp_path, f"engine: openai\n    options: {{url: '{url}'}}")
    assert "must be an address, such as https://api.example.com/v1" in answer
    assert "secret" not in answer


def test_each_pattern_of_the_file_has_words() -> None:
    folder = Path(base_model.__file__).parent
    having = {path.name for path in folder.rglob("*.py") if "Field(pattern=" in path.read_text()}
    assert having == {"base_model.py"}, "write require_form, which has the pattern and its words"


# ---------------------------------------------------------------- hints


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("memory: 0.5", "the number 0.5. Write 50%, a share of the GPU, or 20GiB."),
        ("memory: 1", "the number 1. Write 100%, a share of the GPU, or 20GiB."),
        ("memory: 21474836480", "the number 21474836480. Write 20480MiB."),
        ("memory: 1.5", "the number 1.5. Write 1.5GiB, or 1.5% of the GPU."),
        ("memory: 100", "the number 100. Write 100GiB, or 100% of the GPU."),
        ("memory: 150", "the number 150. Write 150GiB, or 100% of the GPU."),
        ("memory: -1", "the number -1. Write 20GiB, or 40% of the GPU."),
        ("memory: .inf", "the number .inf. Write 20GiB, or 40% of the GPU."),
        ("revision: 12", 'must be text, but is the number 12. Put it in quotes: "12".'),
        ("revision: [v1]", "must be text, but is a list."),
        ("revision: {v: 1}", "must be text, but is a mapping."),
        ("aliases: b", "must be a list, but is the text 'b'. Write [b]."),
        ("aliases: {b: c}", "must be a list, but is a mapping."),
        ("gpus: none", "must be a list, but is the text 'none'. Leave out the key instead."),
        ("gpus: Unlimited", "is the text 'Unlimited'. Leave out the key instead."),
        ("timeout_s: 5 minutes", "the text '5 minutes'. Write seconds, 300, or 5m."),
        ("timeout_s: '300'", "the text '300'. Leave out the quotes."),
        ("max_queue: '12'", "the text '12'. Leave out the quotes."),
        ("max_queue: '1.2.3'", "must be a whole number, but is the text '1.2.3'."),
        ("load: lazy", "the text 'lazy'. Write on_demand."),
        ("load: on_deman", "the text 'on_deman'. Did you mean 'on_demand'?"),
        ("device: cuda:0", "must be auto, cpu or cuda, but is the text 'cuda:0'. Did you mean"),
        ("dtype: quarter", "float16, but is the text 'quarter'."),
        ("engine: my-own", "If a package brings this engine, install that beside servekit"),
        ("dtype: half", "the text 'half'. Did you mean 'float16'?"),
    ],
)
def test_a_hint_fits_what_was_written(tmp_path: Path, line: str, said: str) -> None:
    found = told(tmp_path, line)
    assert found.endswith(said) or said in found
    if said.endswith((".", "?")):
        assert found.endswith(said), "and nothing more"


def test_a_word_of_a_command_is_told_at_its_place(tmp_path: Path) -> None:
    text = "models:\n  - name: a\n    engine: command\n    options:\n"
    [said] = complaints(write(tmp_path, f"{text}      command: [ls, '{{port}}', 80]\n"))
    assert said == (
        ":5:31: models[0].options.command[2]: must be text, but is the number 80. "
        'Put it in quotes: "80".'
    )


def test_a_key_that_must_be_there_is_not_left_out(tmp_path: Path) -> None:
    [said] = complaints(write(tmp_path, "models: none\n"))
    assert said.endswith("models: must be a list, but is the text 'none'. Write [none].")


def test_an_amount_of_memory_in_another_section_gets_the_same_hint(tmp_path: Path) -> None:
    [said] = complaints(
        write(tmp_path, "gpus: {reserve: 2}\nmodels: [{name: a, path: org/name}]\n")
    )
    assert said.endswith("the number 2. Write 2GiB, or 2% of the GPU.")


# ---------------------------------------------------------------- models as a mapping


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (
            "{big: {cmd: serve}}",
            "this is llama-swap's form; `servekit init --from llama-swap FILE`",
        ),
        ("{big: {path: b/c}, d: {}}", "[{name: big, path: b/c, …}]; or, on lines of their own"),
        ("{big: }", "below it `  path: …`."),
        ("{}", "must be a list, but is a mapping."),
    ],
)
def test_models_by_their_names_are_to_be_a_list(tmp_path: Path, models: str, said: str) -> None:
    [found] = complaints(write(tmp_path, f"models: {models}\n"))
    assert found.startswith(":1:9: models: ") and said in found


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("options: {temperature: 1}", "'temperature' belongs under models[0].sampling."),
        ("options: {replicas: 1}", "'replicas' belongs under models[0]."),
        ("sampling: {slots: 1}", "'slots' belongs under models[0].options."),
        ("certificate: x", "unknown key. Valid here: "),
        ("models: []", "'models' belongs at the top of the file."),
        ("reserve: 1GiB", "'reserve' belongs under gpus."),
        ("options: {n_threads: 4}", "unknown key. Did you mean"),
        ("options: {step_s: 1}", "'step_s' is an option of `engine: echo`."),
        ("step_s: 1", "unknown key."),
        ("Gpus-Per-Replica: 2", "unknown key. Did you mean 'gpus_per_replica'?"),
        ("count: 2", "unknown key. Did you mean 'replicas'?"),
        ("tensor_parallel_size: 2", "unknown key; `gpus_per_replica: 2` is the number of GPUs"),
    ],
)
def test_an_unknown_key_is_told_with_its_place_or_its_name(
    tmp_path: Path, line: str, said: str
) -> None:
    assert said in told(tmp_path, line)


def test_a_key_of_a_model_at_the_top_of_the_file_belongs_to_a_model(tmp_path: Path) -> None:
    [said] = complaints(write(tmp_path, "temperature: 1\nmodels: [{name: a, path: org/name}]\n"))
    assert said == ":1:1: temperature: unknown key here; " + (
        "'temperature' belongs under models[0].sampling."
    )


def test_a_section_that_is_not_there_is_told_with_what_it_must_have(tmp_path: Path) -> None:
    said = told(tmp_path, "engine: openai")
    assert said.startswith("models[0].options: missing; it must have 'url': ")
    said = told(tmp_path, "options: {}", "tracing: {}\n")
    assert said.startswith("tracing.endpoint: missing; ")
    said = told(tmp_path, "options: {}", "server: {tls: {certificate: c.pem}}\n")
    assert said.startswith("server.tls.key: missing; PEM file with its private key")


@pytest.mark.parametrize(("more", "at"), [("[sk-abc]", "keys[0]"), ("sk-abc", "keys")])
def test_a_key_itself_is_not_written_into_the_file(tmp_path: Path, more: str, at: str) -> None:
    said = told(tmp_path, "max_queue: 3", f"keys: {more}\n")
    assert said.startswith(f"{at}: is no mapping; a key itself does not stand in the file: ")
    assert "sk-abc" not in said


@pytest.mark.parametrize(
    ("line", "more"),
    [
        ("env: TOKEN=sk-abc", ""),
        ("env: {TOKEN: [sk-abc]}", ""),
        ("max_queue: 3", "keys: [{name: a, environment: sk-abc}]\n"),
        ("max_queue: 3", "server: {mcp: [{name: a, url: 'http://b/', headers: sk-abc}]}\n"),
    ],
)
def test_what_may_be_a_secret_is_not_shown(tmp_path: Path, line: str, more: str) -> None:
    said = told(tmp_path, line, more)
    assert ": must be " in said
    assert "sk-abc" not in said


# ---------------------------------------------------------------- a list of problems


def test_problems_are_told_once_in_the_order_of_the_file() -> None:
    root = parse_document("models:\n  - name: a\n    path: b\nserver: {port: 1}\n")
    problems = [
        Problem(("server", "port"), "wrong."),
        Problem(("models", 0, "path"), "wrong."),
        Problem(("models", 0, "path"), "unknown.", at_key=True),
        Problem(("server", "port"), "wrong."),
        Problem(("models", 0, "dtype"), "not there."),  # where it would stand
        Problem((), "all of it."),
    ]
    assert str(config_error(FILE, root, problems)).splitlines() == [
        f"{FILE}:1:1: all of it.",
        f"{FILE}:2:5: models[0].dtype: not there.",
        f"{FILE}:3:5: models[0].path: unknown.",
        f"{FILE}:3:11: models[0].path: wrong.",
        f"{FILE}:4:16: server.port: wrong.",
    ]


@pytest.mark.parametrize(("count", "last"), [(MAX_PROBLEMS, "wrong 19."), (21, "and 1 more.")])
def test_a_long_list_of_problems_ends_with_their_number(count: int, last: str) -> None:
    root = parse_document("a: 1")
    error = config_error(FILE, root, [Problem(("a",), f"wrong {n:02}.") for n in range(count)])
    lines = str(error).splitlines()
    assert lines[-1].endswith(last)
    assert len(lines) == min(count, MAX_PROBLEMS + 1)


def test_a_missing_key_is_told_with_its_purpose() -> None:
    root = parse_document("models: [{name: }]")
    loc = ("models", 0, "name")
    assert missing_key(loc, root).message == "missing; the name requests use."
    written = missing_key(loc, root, is_written=True)
    assert written == Problem(loc, "has no value; the name requests use.")
    assert missing_key(("nothing",), root).message == "missing; it must be written."


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("value", "text", "said"),
    [
        (None, "~", "empty"),
        (True, "yes", "the truth value yes"),
        (16, "0x10", "the number 0x10"),
        (1000.0, "1e3", "the number 1e3"),
        ("a\n b", "a\n b", "the text 'a b'"),
        ([], "", "an empty list"),
        ([Node(Mark(1, 1), 1)], "", "a list"),
        ({}, "", "a mapping"),
    ],
)
def test_a_value_is_described_as_it_was_written(value: object, text: str, said: str) -> None:
    assert describe_value(Node(Mark(1, 1), value, text)) == said  # type: ignore[arg-type]


def test_a_text_in_a_message_is_one_short_line() -> None:
    assert shorten_text(" a\n\tb  c ") == "a b c"
    assert shorten_text("x" * 60) == "x" * 60
    assert shorten_text("x" * 61) == "x" * 57 + "..."


def test_a_place_is_written_with_dots_and_brackets() -> None:
    assert dotted_path(("models", 0, "env", "A")) == "models[0].env.A"
    assert dotted_path(()) == ""
    assert dotted_path(("k" * 100,)) == "k" * 57 + "..."
