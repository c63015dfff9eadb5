"""`servekit run` looks for an instance that serves the model already, by any of its names."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from servekit.cli.chat import command as chat
from servekit.cli.up import run
from servekit.cli.up.background import Background
from servekit.errors import ServekitError
from tests.unit.cli.instance import invoke, listening, make_model, make_replica, make_status
from tests.unit.cli.up.test_background import holding


def test_a_model_that_is_served_is_found_by_any_name(tmp_path: Path) -> None:
    status = make_status(make_model("a"), replace(make_model("b"), aliases=("unlikely-alias",)))
    with holding(tmp_path):
        with listening(tmp_path, lambda message: None, status):
            assert run._find_served("unlikely-alias") == tmp_path
            assert run._find_served("unlikely") is None
        assert run._find_served("unlikely-alias") is None, "one that does not answer is left out"


def test_options_for_a_model_that_is_served_already_are_refused(tmp_path: Path) -> None:
    status = make_status(make_model("unlikely"))
    with holding(tmp_path), listening(tmp_path, lambda message: None, status):
        done = invoke("run", "unlikely", "--max-context", "64")
    said = f"--max-context: the instance in {tmp_path} serves unlikely already, as its file says\n"
    assert (done.exit_code, done.stderr) == (2, said)


def test_a_model_that_cannot_be_loaded_ends_the_conversation(tmp_path: Path) -> None:
    ill = replace(make_replica("m/0", "failed"), reason="no such folder")
    status = make_status(make_model("m", ill, ill))
    with (
        holding(tmp_path) as process,
        listening(tmp_path, lambda message: None, status),
        pytest.raises(ServekitError, match=r"^m: no such folder$"),
    ):
        run._serve(Background(process, tmp_path / "log"), tmp_path, "")


def test_one_worker_is_enough_to_talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talked: list[object] = []
    monkeypatch.setattr(chat, "talk_to", lambda *about: talked.append(about))
    status = make_status(make_model("m", make_replica("m/0", "failed"), make_replica("m/1")))
    with holding(tmp_path) as process, listening(tmp_path, lambda message: None, status):
        run._serve(Background(process, tmp_path / "log"), tmp_path, "Be brief.")
    assert talked == [("m", tmp_path, "Be brief.")]
