"""Each complaint is one line: the file, the line, the column, the key, and what to write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from servekit.config.load import error_at, load_config
from servekit.config.schema import Config
from servekit.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "servekit.yaml"
    path.write_text(dedent(text), encoding="utf-8")
    return path


def complaints(path: Path) -> list[str]:
    """The lines of the error, without the file's name."""
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(str(path)) for line in lines), lines
    return [line.removeprefix(str(path)) for line in lines]


# One key of a model that is otherwise right. The column is that of the value, or of the key.
MODEL = [
    ("replcas: 2", ":4:5: models[0].replcas: unknown key. Did you mean 'replicas'?"),
    ("max-context: 64", ":4:5: models[0].max-context: unknown key. Did you mean 'max_context'?"),
    ("MaxQueue: 2", ":4:5: models[0].MaxQueue: unknown key. Did you mean 'max_queue'?"),
    ("workers: 2", ":4:5: models[0].workers: unknown key. Did you mean 'replicas'?"),
    ("slots: 2", "'slots' belongs under models[0].options."),
    ("temperature: 1", "'temperature' belongs under models[0].sampling."),
    ("port: 1", "'port' belongs under server."),
    ("options: {dtype: auto}", "'dtype' belongs under models[0]."),
    ("options: {slot: 2}", ":4:15: models[0].options.slot: unknown key. Did you mean 'slots'?"),
    ("options: {slots: 0}", "options.slots: must be at least 1, but is the number 0."),
    ("options: {step_s: 1}", "unknown key here; 'step_s' is an option of `engine: echo`."),
    ("engine: tranformers", "but is the text 'tranformers'. Did you mean 'transformers'?"),
    ("device: gpu", "must be auto, cpu or cuda, but is the text 'gpu'. Did you mean 'cuda'?"),
    ("dtype: bf16", "Did you mean 'bfloat16'?"),
    ("replicas: two", "must be a whole number or auto, but is the text 'two'."),
    ("replicas: 0", "replicas: must be between 1 and 256, auto, or {min, max}."),
    ("replicas: 1.5", "must be a whole number or auto, but is the number 1.5."),
    ('replicas: "2"', "must be a whole number or auto, but is the text '2'. Leave out the quotes."),
    ("replicas: yes", "must be a whole number or auto, but is the truth value yes."),
    ("max_queue: 1e3", "must be a whole number, but is the number 1e3."),
    (
        "max_queue: none",
        "must be a whole number, but is the text 'none'. Leave out the key instead.",
    ),
    ("timeout_s: 0", "must be more than 0, but is the number 0."),
    ("timeout_s: .inf", "must be a finite number, but is the number .inf."),
    ("timeout_s: 1:30", "must be a number, but is the text '1:30'."),
    ("gpus: 0", ":4:11: models[0].gpus: must be a list, but is the number 0. Write [0]."),
    ("gpus: []", "must be a list of at least 1, but is an empty list."),
    ("gpus: [0, -1]", ":4:15: models[0].gpus[1]: a GPU's index is 0 or more."),
    ("gpus: [one]", "a GPU is an index (0) or a UUID"),
    ("gpus: [0, 0]", ":4:15: models[0].gpus[1]: the GPU 0 is listed twice."),
    ("{gpus: [0], device: cpu}", "models[0].gpus: `device: cpu` uses no GPUs."),
    ("{gpus: [0], replicas: 2}", "2 replicas need a GPU each, and `gpus` lists 1; with `memory`"),
    ("revision: 1234567", 'Put it in quotes: "1234567".'),
    ("env: {THREADS: 4}", 'env.THREADS: must be text, but is the number 4. Put it in quotes: "4".'),
    ("env: {NO: 'x', CUDA_VISIBLE_DEVICES: '0'}", ":4:20: models[0].env.CUDA_VISIBLE_DEVICES: "),
    ("env: {'a b': c}", "'a b' cannot be the name of an environment variable."),
    ("aliases: [a]", ":4:15: models[0].aliases[0]: 'a' is taken by models[0].name on line 2."),
    ("aliases: [' ']", "a name begins with a letter or digit"),
    ("sampling: {top_p: 1.5}", "sampling.top_p: must be at most 1, but is the number 1.5."),
    ("sampling: 5", "must be a mapping of key: value, but is the number 5."),
    ("{sampling: {max_tokens: 64}, max_context: 64}", "64 tokens and a prompt do not fit"),
    ("trust_remote_code: 1", "must be true or false, but is the number 1."),
    ("name: b", ":4:5: the key 'name' is written twice; first on line 2."),
]


@pytest.mark.parametrize(("line", "expected"), MODEL)
def test_a_wrong_key_of_a_model(tmp_path: Path, line: str, expected: str) -> None:
    extra = f"<<: {line}" if line.startswith("{") else line
    path = write(tmp_path, f"models:\n  - name: a\n    path: org/name\n    {extra}\n")
    found = complaints(path)
    assert len(found) == 1
    assert expected in found[0]


# Whole files.
FILES = [
    ("", ": the file is empty."),
    ("# models:\n", ": the file is empty."),
    ("---\n", ": the file is empty."),
    ("[]", ":1:1: the file must be a mapping"),
    ("models", ":1:1: the file must be a mapping"),
    ("models: []", ":1:9: models: must be a list of at least 1, but is an empty list."),
    ("models:\n", ":1:8: models: has no value; the models to serve."),
    ("models: {name: a, path: b/c}", ":1:9: models: must be a list, but is a mapping."),
    ("models: [x]", ":1:10: models[0]: must be a mapping of key: value, but is the text 'x'."),
    ("models:\n  -\n", ":2:4: models[0]: must be a mapping of key: value, but is empty."),
    ("models: [{path: b/c}]", ":1:10: models[0].name: missing; the name requests use."),
    ("logging:\n  level: x", ":2:3: logging.level: unknown key. Valid here: "),
    ("server:\n  tls: {cert: x}", "server.tls.cert: unknown key. Valid here: certificate, key."),
    ("server:\n  limits: {a: 1}", "server.limits.a: unknown key. Valid here: "),
    ("keys:\n  - {names: x}", "keys[0].names: unknown key. Did you mean 'name'?"),
    ("tracing: {endpont: x}", "tracing.endpont: unknown key. Did you mean 'endpoint'?"),
    ("ray: {adress: x}", "ray.adress: unknown key. Did you mean 'address'?"),
    ("model: []", ":1:1: model: unknown key. Did you mean 'models'?"),
    ("models:\n\t- name: a", ":2:1: a tab is used for indentation; YAML wants spaces."),
    ("models: [\n{name: a}", "It began on line 1."),
    ("models: 'a\nb", ":2:2: a quote or bracket is never closed. It began on line 1."),
    ("models:\n  - name: a\n   path: b", ":3:4: the indentation does not fit"),
    ("models: a: b", ":1:10: ': ' is not allowed here"),
    ("models: @a", ":1:9: a text that begins with @ needs quotes."),
    ("models: *a", ":1:9: the alias *a is not defined above."),
    ("models: &a [*a]", ":1:13: the alias *a contains itself."),
    ("models: !!python/object/apply:os.system [ls]", "the tag !!python/object"),
    ("models: 1\n---\nmodels: 2", ":2:1: a second document begins here"),
    ("models: 1\nmodels: 2", ":2:1: the key 'models' is written twice; first on line 1."),
    ("? [a]\n: b", "a key must be plain text."),
    ("models: " + "[" * 500 + "]" * 500, "nested more than 32 deep."),
    ("models: [" + "1," * 60000 + "]", "more than 50000 values"),
    ('models: "a\\0b"', ":1:9: this text holds an unprintable U+0000."),
    (
        "models: [{name: a, path: b/c}]\nserver: {default_model: c}",
        ":2:25: server.default_model: no model is called 'c'; there are: a.",
    ),
    ('"models\\e[2J": 1', ":1:1: this text holds an unprintable U+001B."),
    ("models: \x07", ":1:9: unprintable character (U+0007)."),
    (
        f"models: [{{name: a, path: b/c, max_queue: {2**64}}}]",
        "max_queue: must be a whole number, but is the number 18446744073709551616",
    ),
]


@pytest.mark.parametrize(("text", "expected"), FILES)
def test_a_wrong_file(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in "\n".join(complaints(write(tmp_path, text)))


def test_an_alias_bomb_is_refused_at_once(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    [line] = complaints(write(tmp_path, "\n".join(lines)))
    assert "more than 50000 values, aliases expanded." in line


def test_all_problems_are_told_at_once_in_the_files_order(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
        server: {port: 70000}
        models:
          - name: a
            path: org/name
            replcas: 2
          - name: a
            path: org/name
            engine: echo
            options: {stepp_s: 1}
        """,
    )
    assert complaints(path) == [
        ":1:16: server.port: must be at most 65535, but is the number 70000.",
        ":5:5: models[0].replcas: unknown key. Did you mean 'replicas'?",
        ":6:11: models[1].name: 'a' is taken by models[0].name on line 3.",
        ":9:15: models[1].options.stepp_s: unknown key. Did you mean 'step_s'?",
    ]


def test_a_long_list_of_problems_ends(tmp_path: Path) -> None:
    found = complaints(write(tmp_path, "models: [" + "1, " * 100 + "]"))
    assert len(found) == 21
    assert found[-1] == ": and 80 more."


def test_an_absurd_key_does_not_make_an_absurd_message(tmp_path: Path) -> None:
    path = write(tmp_path, f"{'k' * 1000}: 1\nmodels: [{{name: {'n' * 9999}, path: a/b}}]")
    assert all(len(line) < 300 for line in complaints(path))


# ---------------------------------------------------------------- the file itself


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    path = write(tmp_path, "models: []")
    wrong = path.with_name("servkit.yml")
    assert complaints(wrong) == [f": there is no such file. Did you mean '{path}'?"]


def test_files_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "servekit.yaml"
    for data, expected in [
        (b"models: \xff", ":1:9: not UTF-8 text (byte 0xff)."),
        (b"\x7fELF\0\0", ": is binary, not YAML."),
        ("models:".encode("utf-16"), ": is saved as UTF-16; save it as UTF-8."),
        (b"#" * (2**20 + 1), ": is larger than 1 MiB"),
    ]:
        path.write_bytes(data)
        assert complaints(path)[0].startswith(expected)


def test_what_is_no_file(tmp_path: Path) -> None:
    write(tmp_path, "models: []")
    assert complaints(tmp_path)[0].endswith("It holds servekit.yaml.")
    assert complaints(Path("/dev/zero")) == [": is not a regular file."]
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert complaints(fifo) == [": is not a regular file."]
    assert complaints(tmp_path / "servekit.yaml" / "x")[0].startswith(": cannot be read: Not a dir")
    assert complaints(tmp_path / ("x" * 300))[0].startswith(": cannot be read: File name too long")
    assert complaints(Path("a\0b"))[0].startswith(": is not a file name")


def test_a_file_in_a_folder_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path / "a") + b"\xff"))
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"a\\udcff/servekit.yaml' is not UTF-8; rename"):
        load_config(write(folder, "models: [{name: a, engine: echo}]"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_of_someone_else(tmp_path: Path) -> None:
    path = write(tmp_path, "models: []")
    path.chmod(0)
    assert complaints(path) == [": cannot be read: Permission denied."]


# ---------------------------------------------------------------- what is right


def test_relative_paths_are_relative_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "org" / "name").mkdir(parents=True)
    (tmp_path / "conf").mkdir()
    (tmp_path / "m.gguf").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir("/")
    path = write(
        tmp_path / "conf",
        """\
        run_dir: run
        models:
          - {name: a, path: ../models/org/name}
          - {name: b, path: ~/m.gguf}
          - {name: c, path: org/name}
          - {name: d, path: "pypi:a-b==1.0/c/d.gguf"}
        """,
    )
    config = load_config(path)
    assert [model.path for model in config.models] == [
        str(tmp_path / "models" / "org" / "name"),
        str(tmp_path / "m.gguf"),
        "org/name",
        "pypi:a-b==1.0/c/d.gguf",
    ]
    assert config.run_dir == tmp_path / "conf" / "run"


@pytest.mark.parametrize("text", ["./nope", "nope.gguf", "../nope.gguf", "~/nope", "/nope/nope"])
def test_a_model_that_is_not_there(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, f"models:\n  - name: a\n    path: {text}\n")
    [line] = complaints(path)
    assert line.startswith(":3:11: models[0].path: /")
    assert line.endswith("does not exist.")


def test_a_revision_is_for_hub_ids(tmp_path: Path) -> None:
    path = write(tmp_path, "models:\n  - {name: a, path: ./, revision: main}\n")
    assert complaints(path) == [
        ":2:25: models[0].revision: only a hub id has revisions, and `path` is not one."
    ]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("engine: echo", ""),
        ("engine: command, options: {command: 'serve --port {port}'}", ""),
        ("engine: auto, options: {command: 'serve --port {port}'}", ""),
        ("max_queue: 1", ":2:5: models[0].path: missing; a folder or .gguf file, relative to this"),
        ("path: , max_queue: 1", ":2:21: models[0].path: has no value; a folder or .gguf file"),
        ("engine: auto", ":2:5: models[0].path: missing; "),
        ("engine: openai, options: {url: 'http://a/v1'}", ":2:5: models[0].path: missing; "),
        ("engine: command, options: {command: 'serve {path} {port}'}", "models[0].path: missing; "),
        ("engine: echo, path: ''", "models[0].path: must be text that is not empty"),
    ],
)
def test_a_path_may_be_missing_where_none_is_used(tmp_path: Path, keys: str, said: str) -> None:
    path = write(tmp_path, f"models:\n  - {{name: a, {keys}}}\n")
    if said:
        [found] = complaints(path)
        assert said in found
    else:
        assert load_config(path).models[0].path == ""


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ("run_dir: NAME", ":2:10: run_dir: "),
        ("server: {mcp: [{name: m, command: [ls], cwd: NAME}]}", ":2:46: server.mcp[0].cwd: "),
    ],
)
def test_a_folder_that_the_system_refuses_is_told_at_its_place(
    tmp_path: Path, more: str, place: str
) -> None:
    text = f"models: [{{name: a, engine: echo}}]\n{more.replace('NAME', 'n' * 300)}\n"
    [said] = complaints(write(tmp_path, text))
    assert said.startswith(place)
    assert said.endswith(": File name too long.")


def test_an_address_of_the_hub_is_a_hub_id_and_its_revision(tmp_path: Path) -> None:
    url = "https://huggingface.co/org/name/tree/v1"
    path = write(tmp_path, f"models: [{{name: a, path: '{url}', revision: v1}}]")
    assert load_config(path).models[0].revision == "v1"
    path = write(tmp_path, f"models: [{{name: a, path: '{url}'}}]")
    model = load_config(path).models[0]
    assert (model.path, model.revision) == ("org/name", "v1")
    path = write(tmp_path, f"models: [{{name: a, path: '{url}', revision: v2}}]")
    assert complaints(path) == [
        ":1:79: models[0].revision: the address in `path` names another revision: v1."
    ]


def test_an_empty_key_counts_as_not_written(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
        models:
          - name: a
            path: org/name
            sampling:
              # temperature: 0.5
        server:
        """,
    )
    expected = Config.model_validate({"models": [{"name": "a", "path": "org/name"}]})
    assert load_config(path) == expected


def test_json_is_yaml(tmp_path: Path) -> None:
    path = write(tmp_path, '{\n\t"models": [\n\t\t{"name": "a", "path": "org/name"}\n\t]\n}\n')
    assert load_config(path).models[0].name == "a"


def test_anchors_and_merges_save_repetition(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
        models:
          - &first {name: a, path: org/name, replicas: 2, options: {slots: 4}}
          - <<: *first
            name: b
            replicas: 1
        """,
    )
    first, second = load_config(path).models
    assert (first.replicas, second.replicas, second.options) == (2, 1, {"slots": 4})


def test_complain_names_the_place_of_what_the_machine_cannot_do(tmp_path: Path) -> None:
    path = write(tmp_path, "models:\n  - name: a\n    path: org/name\n    replicas: 8\n")
    error = error_at(path, ("models", 0, "replicas"), "there are 2 GPUs.")
    assert str(error) == f"{path}:4:15: models[0].replicas: there are 2 GPUs."
    error = error_at(path, ("models", 0, "device"), "no GPU.")  # a default: the model is blamed
    assert str(error) == f"{path}:2:5: models[0].device: no GPU."


# ---------------------------------------------------------------- whatever comes

SCRAPS = (
    "models|name|path|options|engine|echo|server|port|a/b|a|1|~|0.5|true|null|é|---|!!str|>|#|?|%|@"
    "|&a|*a|<<|[|]|{|}|'|\"|, |: |- |\n|\n  |\n    |\t|\ufeff|\x85|\x80"
)
WORDS = st.sampled_from(SCRAPS.split("|"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "path", "env", "gpus", "sampling"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(WORDS, max_size=40).map("".join) | st.text(max_size=40))
@example("models: [{name: 1, path: [], engine: {}, options: {}}]")
def test_any_text_is_a_configuration_or_a_config_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "servekit.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    try:
        assert isinstance(load_config(path), Config)
    except ConfigError as error:
        assert all(line.startswith(f"{path}:") for line in str(error).splitlines())


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    key=st.sampled_from(sorted({"name", "path", "engine", "options", "gpus", "env", "aliases"})),
    value=VALUES,
)
def test_any_value_is_right_or_a_config_error(tmp_path: Path, key: str, value: object) -> None:
    path = tmp_path / "servekit.yaml"
    path.write_text(json.dumps({"models": [{"name": "a", "path": "b/c", key: value}]}))
    try:
        assert isinstance(load_config(path), Config)
    except ConfigError as error:
        assert all(line.startswith(f"{path}:") for line in str(error).splitlines())


def test_loading_is_quick_and_light() -> None:
    """A wrong file is told within a second, however slow the machine."""
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from servekit.config.load import load_config\n"
        f"load_config(Path({str(Path(__file__).parents[3] / 'configs' / 'demo.yaml')!r}))\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'gradio'} & set(sys.modules)\n"
        "print(time.process_time(), *heavy)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    outputs = [run.stdout.split() for run in runs]
    assert all(len(words) == 1 for words in outputs)
    # its own time, not that of a busy machine; 0.3 on a quiet one
    assert min(float(words[0]) for words in outputs) < 1.0
