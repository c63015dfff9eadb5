from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from servekit.engines import ENGINES, create_engine
from servekit.engines.echo.engine import EchoEngine
from servekit.errors import LoadError
from servekit.protocol.messages import WorkerSpec
from tests import markov


def spec(engine: str) -> WorkerSpec:
    return WorkerSpec(
        name="a/0",
        model="a",
        engine=engine,
        path="a",
        revision=None,
        device="cpu",
        dtype="auto",
        max_context=None,
        trust_remote_code=False,
        sampling={},
        options={},
        socket="",
    )


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_an_engine_is_found_by_name_and_what_it_imported_is_not_collected() -> None:
    assert type(create_engine(spec("echo"))) is EchoEngine
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


def test_collections_go_on_when_an_import_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "gone", "servekit.engines.gone:Gone")
    with pytest.raises(ModuleNotFoundError):
        create_engine(spec("gone"))
    assert gc.isenabled()


def test_an_unknown_engine_is_one_sentence() -> None:
    with pytest.raises(LoadError, match="there is no engine 'nope'; known: command, echo, "):
        create_engine(spec("nope"))


# ---------------------------------------------------------------- of other packages


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_one_of_another_package_is_found_by_its_entry_point(site: Path) -> None:
    markov.install(site)
    made = create_engine(replace(spec("markov"), options={"order": 2, "slots": 1}))
    assert type(made).__module__ == "markov_engine"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("acme_nowhere:Engine", "'acme' .acme_nowhere:Engine. cannot be imported: ModuleNotFound"),
        ("json:NoSuchThing", "cannot be imported: AttributeError: "),
        ("json:JSONDecoder", "'acme' .json:JSONDecoder. is not a subclass of Engine"),
    ],
)
def test_one_that_is_of_no_use_is_one_sentence(site: Path, target: str, words: str) -> None:
    info = site / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[servekit.engines]\nacme = {target}\n")
    with pytest.raises(LoadError, match=words):
        create_engine(spec("acme"))
