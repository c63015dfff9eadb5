"""What the OpenAPI document says is what happens: schemathesis against a real instance."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from servekit.gateway.api.fields import MODEL
from tests.integration.instance import Instance, echo

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
PROGRAM = Path(sys.executable).parent / "schemathesis"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = echo(MODEL, max_context=2048)  # the examples' model
    folder = tmp_path_factory.mktemp("schemathesis")
    with Instance.up(folder, [model], server={"legacy": "huixiangdou"}) as instance:
        yield instance.until_settled().url
        assert "Traceback" not in instance.log
        assert "unexpected_error" not in instance.log


@pytest.mark.lane("fuzz")
@pytest.mark.timeout(900)
def test_every_operation_does_what_its_document_says(url: str, tmp_path: Path) -> None:
    run(url, tmp_path, examples=15, within_s=800)


def run(url: str, folder: Path, examples: int, within_s: float) -> None:
    """All phases but stateful, which has nothing to go by here; the same requests each time.

    By itself it gives up on an answer after ten seconds, which a busy machine may take.
    """
    phases = "examples,coverage,fuzzing"
    done = subprocess.run(
        [PROGRAM, "run", f"{url}/openapi.json", "--checks", ",".join(CHECKS), "--phases", phases,
         "--max-examples", str(examples), "--seed", "20261121", "--no-color", "--warnings", "off",
         "--request-timeout", "60"],
        cwd=folder, capture_output=True, text=True, timeout=within_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
