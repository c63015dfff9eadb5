"""What servekit is made of: the bill of materials, the licences, and the audit's honesty."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.deploy.audit import NOT_ASKED, judge
from tests.deploy.bill import bill, closure, licence_of, pinned

#: Licences that would ask something of who ships servekit.
UNWANTED = ("AGPL", "GPL-2", "GPL-3", "GPLv2", "GPLv3", "SSPL", "BUSL", "Proprietary")
NVIDIAS = ("nvidia-", "cuda-")  # with PyTorch's CUDA build: NVIDIA's own licence


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("bill") / "sbom.json"
    made = bill(path)
    found = JsonStrictValidator(SchemaVersion.V1_6).validate_str(path.read_text())
    assert found is None, found
    return made


def test_it_has_what_runs_and_nothing_else_in_the_pinned_versions(made: dict[str, Any]) -> None:
    names = {canonicalize_name(one["name"]): one["version"] for one in made["components"]}
    assert names.keys() == closure("servekit")
    assert {"torch", "fastapi", "gradio", "msgspec"} <= names.keys()
    assert not {"pytest", "mypy", "cyclonedx-bom"} & names.keys()
    for name, version in names.items():
        if not name.startswith(NVIDIAS) and name != "triton":
            assert Version(version).public == pinned()[name], name


def test_every_licence_is_told_and_none_asks_anything(made: dict[str, Any]) -> None:
    for one in made["components"]:
        licence = licence_of(one)
        if not one["name"].startswith(NVIDIAS):
            assert licence != "not told", one["name"]
            assert not any(word in licence for word in UNWANTED), (one["name"], licence)


def test_it_names_no_place_of_this_machine(made: dict[str, Any]) -> None:
    text = json.dumps(made)
    assert "file://" not in text and str(Path(__file__).parents[2]) not in text


FINE = {"name": "a", "version": "1", "vulns": []}
BAD = {"name": "b", "version": "2", "vulns": [{"id": "CVE-1"}]}
UNKNOWN = {"name": "c", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("report", "code", "told"),
    [
        ({"dependencies": [FINE, FINE]}, 0, "none of 2 packages"),
        ({"dependencies": [FINE, BAD]}, 1, "b 2: CVE-1"),
        ({"dependencies": [UNKNOWN, BAD]}, 1, "CVE-1"),
        ({"dependencies": [FINE, UNKNOWN]}, NOT_ASKED, "nothing is known of 1 of 2"),
        (None, NOT_ASKED, "no route"),
    ],
)  # fmt: skip
def test_an_audit_that_could_not_be_made_says_so(report: Any, code: int, told: str) -> None:
    finding = judge(report, "Traceback\nno route")
    assert finding.code == code and told in finding.told
