from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from servekit.engines import ENGINES, create
from servekit.engines.echo import EchoEngine
from servekit.errors import LoadError
from servekit.wire.messages import WorkerSpec


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
    assert type(create(spec("echo"))) is EchoEngine
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


def test_collections_go_on_when_an_import_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "gone", "servekit.engines.gone:Gone")
    with pytest.raises(ModuleNotFoundError):
        create(spec("gone"))
    assert gc.isenabled()


def test_an_unknown_engine_is_one_sentence() -> None:
    with pytest.raises(LoadError, match="there is no engine 'nope'; known: echo, "):
        create(spec("nope"))
