"""What is required of vLLM is looked for; shown on modules that are always there."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from structlog.testing import capture_logs

from servekit.engines.vllm import library
from servekit.engines.vllm.library import Required, find_missing
from servekit.errors import LoadError

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("one", "sentences"),
    [
        (Required("json:JSONDecoder", ("decode", "strict")), []),  # a method and a parameter
        (Required("json:JSONDecoder", ("decode", "dance")), ["its JSONDecoder has no dance"]),
        (Required("json.decoder:JSONDecoder", ("raw_decode",), inside=True), []),
        (
            Required("json.decoder:JSONDecoder", ("dance", "sing"), inside=True),
            ["its JSONDecoder has no dance, sing"],
        ),
        (
            Required("json.decoder:Dancer", inside=True),
            ["it has no json.decoder.Dancer (there is no such class)"],
        ),
        (
            Required("json.dances:Dancer", inside=True),
            ["it has no json.dances.Dancer (there is no such module)"],
        ),
    ],
)
def test_what_is_missing_is_named(one: Required, sentences: list[str]) -> None:
    assert list(find_missing(one)) == sentences


@pytest.mark.parametrize(
    ("version", "tried"),
    [
        ("0.25.1", False),
        ("0.26.0", True),
        ("0.26.0+cu130", True),
        ("0.32.0+cpu", True),
        ("0.33.0rc1", False),
        ("1.0.0", False),
        ("dev", False),
    ],
)
def test_the_releases_that_were_tried(version: str, tried: bool) -> None:
    assert library.is_tried(version) == tried


def test_the_extra_asks_for_those_that_were_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [extra] = project["optional-dependencies"]["vllm"]
    specifier = Requirement(extra).specifier
    for minor in range(20, 40):
        assert specifier.contains(f"0.{minor}.0") == library.is_tried(f"0.{minor}.0")


def test_one_that_was_not_tried_is_used_with_a_warning_and_a_wrong_one_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def have(version: str, *required: Any) -> None:
        monkeypatch.setattr(library, "vllm_version", lambda: version)
        monkeypatch.setattr(library, "REQUIRED", required)

    right, wrong = Required("json:JSONDecoder"), Required("json:JSONDecoder", ("dance",))
    with capture_logs() as logs:
        have("0.30.0", right)
        library.check_library()
        assert not logs
        have("0.40.0", right)
        library.check_library()
    [warning] = logs
    assert (warning["event"], warning["version"]) == ("vllm_version_untested", "0.40.0")
    assert warning["tested"] == "0.26 to 0.32"
    for version in ("0.30.0", "0.40.0"):
        have(version, right, wrong)
        with pytest.raises(LoadError) as caught:
            library.check_library()
        assert str(caught.value) == (
            f"vLLM {version} cannot be used: its JSONDecoder has no dance. servekit was tried with "
            "0.26 to 0.32: pip install 'servekit[vllm]' brings one of them."
        )
