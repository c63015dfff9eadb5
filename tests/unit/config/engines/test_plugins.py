"""Engines of other packages: found by their entry points, described, and refused by a sentence."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from servekit.config.engines import installed, plugins
from servekit.config.engines.options import KINDS
from servekit.config.json_schema import json_schema
from servekit.config.load import load_config
from servekit.supervisor.scheduling.memory_requests import Assignment
from servekit.supervisor.workers.worker_spec import make_worker_spec
from tests import markov
from tests.unit.config.test_load import complaints, write


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages that has none."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    for module in ("markov_engine", "markov_kind"):  # as if no test before had imported them
        monkeypatch.delitem(sys.modules, module, raising=False)
    plugins.look_again()
    yield folder
    plugins.look_again()


def bring(site: Path, package: str, engines: str, kinds: str = "", **modules: str) -> None:
    """Install a package with these lines of entry points, and these modules."""
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    groups = f"[servekit.engines]\n{engines}\n[servekit.engine_kinds]\n{kinds}\n"
    (info / "entry_points.txt").write_text(groups)
    for name, source in modules.items():
        (site / f"{name}.py").write_text(source)
    plugins.look_again()


def model(folder: Path, engine: str, more: str = "") -> Path:
    return write(folder, f"models:\n  - {{name: a, path: ./t, engine: {engine}{more}}}\n")


def test_one_that_describes_itself_is_as_good_as_ours(site: Path, tmp_path: Path) -> None:
    markov.install(site)
    plugins.look_again()
    (tmp_path / "t").mkdir()
    [served] = load_config(model(tmp_path, "markov", ", options: {order: 2}")).models
    assert served.path == str(tmp_path / "t")
    assert served.engine_options().model_dump() == {"order": 2, "slots": 8}
    assert KINDS["markov"].gpu == "never"
    assert dict(installed.list_engines())["markov"] == "from servekit-markov 1.2.0"
    assert "markov_engine" not in sys.modules
    schema = json_schema()
    assert "markov" in schema["$defs"]["ModelConfig"]["properties"]["engine"]["enum"]
    assert "order" in schema["$defs"]["MarkovOptions.markov"]["properties"]


def test_its_options_and_needs_are_checked_by_line(site: Path, tmp_path: Path) -> None:
    markov.install(site)
    plugins.look_again()
    (tmp_path / "t").mkdir()
    assert complaints(model(tmp_path, "markov", ", options: {odrer: 2}")) == [
        ":2:52: models[0].options.odrer: unknown key. Did you mean 'order'?"
    ]
    assert complaints(model(tmp_path, "markov", ", idle_sleep_s: 3"))[0].endswith(
        "models[0].idle_sleep_s: the engine markov cannot sleep; `idle_unload_s` unloads a model, "
        "whatever runs it."
    )
    assert complaints(model(tmp_path, "markof"))[0].endswith(
        "openai, command, echo or markov, but is the text 'markof'. Did you mean 'markov'?"
    )


def test_one_that_does_not_has_options_of_any_form_and_any_path(site: Path, tmp_path: Path) -> None:
    bring(site, "acme", "acme = nowhere:Engine")
    path = model(tmp_path, "acme", ", options: {depth: {a: [1, x]}}")
    [served] = load_config(path).models
    assert served.engine_options().model_dump() == {"depth": {"a": [1, "x"]}}
    assert served.path == "./t"
    (tmp_path / "t").mkdir()
    assert load_config(path).models[0].path == str(tmp_path / "t")


def test_it_is_gone_when_its_package_is(site: Path, tmp_path: Path) -> None:
    bring(site, "acme", "acme = nowhere:Engine")
    path = model(tmp_path, "acme")
    load_config(path)
    (site / "acme-1.0.dist-info" / "entry_points.txt").unlink()
    plugins.look_again()
    assert "but is the text 'acme'" in complaints(path)[0]
    assert KINDS["acme"] is plugins.UNTOLD  # what runs yet is known yet
    with pytest.raises(KeyError):
        plugins.import_plugin_kind("acme")


def test_a_description_that_breaks_harms_nothing_that_runs(site: Path, tmp_path: Path) -> None:
    described = "from servekit.config.engines.plugins import UNTOLD as KIND\n"
    bring(site, "acme", "breaks = nowhere:E", "breaks = acme_breaks:KIND", acme_breaks=described)
    load_config(model(tmp_path, "breaks"))
    entries = site / "acme-1.0.dist-info" / "entry_points.txt"
    entries.write_text(entries.read_text().replace(":KIND", ":GONE"))
    plugins.look_again()
    assert "cannot be imported: AttributeError" in complaints(model(tmp_path, "breaks"))[0]
    assert KINDS["breaks"] is plugins.UNTOLD


@pytest.mark.parametrize("name", ["echo", "transformers", "auto"])
def test_a_name_of_ours_is_refused(site: Path, tmp_path: Path, name: str) -> None:
    bring(site, "acme", f"{name} = nowhere:Engine")
    [line] = complaints(model(tmp_path, name))
    assert line.endswith(
        f"models[0].engine: acme 1.0 brings an engine that is named '{name}' as servekit's own is: "
        "it is not run; uninstall it, or give its entry point another name."
    )
    assert len(list(installed.refused_plugins())) == 1
    assert list(dict(installed.list_engines())) == list(KINDS)


def test_two_of_a_name_are_refused(site: Path, tmp_path: Path) -> None:
    bring(site, "acme", "same = nowhere:Engine")
    bring(site, "other", "same = elsewhere:Engine")
    assert complaints(model(tmp_path, "same"))[0].endswith(
        "two packages bring an engine 'same', acme 1.0 and other 1.0: uninstall one of them."
    )


@pytest.mark.parametrize(
    ("module", "source", "words"),
    [
        ("acme_raises", "raise OSError('no disk')", "cannot be imported: OSError: no disk."),
        ("acme_empty", "", "cannot be imported: AttributeError: module "),
        ("acme_other", "KIND = 5", "is no EngineKind whose options are a Section."),
    ],
)
def test_a_description_of_no_use_is_blamed(
    site: Path, tmp_path: Path, module: str, source: str, words: str
) -> None:
    bring(site, "acme", "acme = nowhere:Engine", f"acme = {module}:KIND", **{module: source})
    [line, other] = complaints(model(tmp_path, "acme", ", optons: {a: 1}"))
    assert "Did you mean 'options'?" in other
    assert "acme" not in json_schema()["$defs"]["ModelConfig"]["properties"]["engine"]["enum"]
    blamed = f"{module}:KIND, with which acme 1.0 describes its engine 'acme', "
    assert f"models[0].engine: {blamed}" in line and words in line


def test_a_description_that_imports_torch_is_refused(site: Path, tmp_path: Path) -> None:
    bring(
        site,
        "acme",
        "acme = nowhere:Engine",
        "acme = acme_torch:KIND",
        acme_torch="import torch\nfrom servekit.config.engines.plugins import UNTOLD as KIND\n",
        torch="",  # not the real one: it takes seconds
    )
    path = model(tmp_path, "acme")
    run = subprocess.run(
        [sys.executable, "-m", "servekit", "check", str(path)],
        env={"PYTHONPATH": f"{site}:{Path(__file__).parents[4]}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 2
    assert "imports torch; only the engine itself may." in run.stderr


WORDS_KIND = """
from servekit.plugin import ConfigPath, EngineKind, Section
class WordsOptions(Section):
    words: ConfigPath
    \'\'\'A list of words, one a line.\'\'\'
    more: tuple[ConfigPath, ...] = ()
    other: ConfigPath | None = None
    default: ConfigPath = "default.txt"
    text: str = "words.txt"
KIND = EngineKind(WordsOptions, formats=frozenset({"nothing"}), neutral=frozenset({"other"}))
""".replace("\\'", "'")


def words(folder: Path, text: str) -> Path:
    return write(folder, f"models:\n  - {{name: a, engine: words{text}}}\n")


@pytest.fixture
def words_site(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plugin whose options are paths, and the files `a` to `d` beside the configuration."""
    monkeypatch.delitem(sys.modules, "words_kind", raising=False)
    bring(site, "words", "words = nowhere:Engine", "words = words_kind:KIND", words_kind=WORDS_KIND)
    for name in ("a", "b", "c", "d", "default.txt"):
        (tmp_path / name).write_text(name)
    return tmp_path


def test_options_that_are_paths_are_relative_to_the_file(
    words_site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORPUS", str(words_site / "c"))
    path = words(words_site, ", options: {words: a, more: [./b, $CORPUS], other: d}")
    monkeypatch.chdir("/")
    [served] = load_config(path).models
    here = str(words_site)
    assert served.engine_options().model_dump() == {
        "words": f"{here}/a",
        "more": (f"{here}/b", f"{here}/c"),
        "other": f"{here}/d",
        "default": f"{here}/default.txt",
        "text": "words.txt",
    }
    worker = make_worker_spec(served, Assignment("a", 0, (), None), "")
    names = ("a", "b", "c", "default.txt")
    assert set(worker.files) == {f"{here}/{name}" for name in names}, "others may change the text"


def test_a_file_that_an_option_names_must_exist(words_site: Path) -> None:
    assert complaints(words(words_site, ", options: {words: a, more: [b, x], other: y}")) == [
        f":2:60: models[0].options.more[1]: {words_site}/x: does not exist.",
        f":2:71: models[0].options.other: {words_site}/y: does not exist.",
    ]
    [complaint] = complaints(words(words_site, ", options: {words: $UNSET_HERE}"))
    assert "UNSET_HERE is not set in the environment" in complaint
    (words_site / "default.txt").unlink()
    [complaint] = complaints(words(words_site, ", options: {words: a}"))
    assert complaint.endswith(f"options.default: {words_site}/default.txt: does not exist.")


def test_an_option_that_is_missing_is_named(words_site: Path) -> None:
    said = "missing; it must have 'words': a list of words, one a line."
    assert complaints(words(words_site, "")) == [f":2:5: models[0].options: {said}"]
    assert complaints(words(words_site, ", options: {}")) == [
        ":2:30: models[0].options.words: missing; a list of words, one a line."
    ]


def test_a_path_is_refused_where_the_engine_has_no_model(words_site: Path) -> None:
    assert complaints(words(words_site, ", path: ./a, options: {words: a}")) == [
        ":2:30: models[0].path: the engine words has no model: leave this out."
    ]


def test_an_engine_that_is_not_installed_is_the_one_complaint(site: Path, tmp_path: Path) -> None:
    [complaint] = complaints(words(tmp_path, ""))
    assert complaint.endswith(
        "but is the text 'words'. If a package brings this engine, install that beside servekit: "
        "pip install …"
    )
