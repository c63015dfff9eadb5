"""`servekit bench` around the measurement: where it goes, what it may write, how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from servekit.bench.output.result import Result
from servekit.cli import bench
from servekit.errors import ConfigError, StartError
from tests.unit.bench.results import result
from tests.unit.cli.instance import invoke, listening, make_status


def test_the_schema_is_printed_and_nothing_measured() -> None:
    done = invoke("bench", "--schema", "http://127.0.0.1:1")
    assert done.exit_code == 0
    assert "runs" in json.dumps(json.loads(done.stdout))


def test_without_a_url_the_running_instance_is_measured(tmp_path: Path) -> None:
    status = make_status()
    for url, asked in (
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://0.0.0.0:8000", "http://127.0.0.1:8000"),
        ("https://[::]:8000", "https://[::1]:8000"),
        ("http://10.0.0.0:8000", "http://10.0.0.0:8000"),
    ):
        with listening(tmp_path, lambda message: None, replace(status, url=url)):
            assert bench._find_running_url(tmp_path) == asked
    with pytest.raises(StartError, match=r"a URL as argument measures another server$"):
        bench._find_running_url(tmp_path)


def test_outputs_are_checked_before_the_measurement(tmp_path: Path) -> None:
    absent = tmp_path / "none" / "x.json"
    with pytest.raises(ConfigError) as error:
        bench._check_outputs(absent, None)
    assert error.value.message == f"--json {absent}: there is no folder {tmp_path}/none"
    with pytest.raises(ConfigError, match=r"^--json .*: it cannot be written$"):
        bench._check_outputs(tmp_path, None)
    with pytest.raises(ConfigError, match=r"^--plot .*: there is no folder "):
        bench._check_outputs(None, tmp_path / "none" / "x.png")
    with pytest.raises(ConfigError, match="png"):
        bench._check_outputs(None, tmp_path / "x.txt")
    bench._check_outputs(Path("-"), tmp_path / "x.html")
    (tmp_path / "x.json").write_text("of before")
    bench._check_outputs(tmp_path / "x.json", None)
    done = invoke("bench", "http://127.0.0.1:1", "--json", absent)
    assert done.exit_code == 2 and "there is no folder" in done.stderr


def test_a_result_is_a_table_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plot = tmp_path / "x.json", tmp_path / "x.html"
    assert bench._report_result(result(), path, plot) == 0
    assert "1 at once" in capsys.readouterr().out
    assert json.loads(path.read_text())["url"] == "http://a:1/v1"
    assert path.read_text().endswith("}\n")
    assert "<svg" in plot.read_text() or "<html" in plot.read_text()


def test_a_dash_is_stdout_without_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench._report_result(result(), Path("-"), None) == 0
    assert json.loads(capsys.readouterr().out)["url"] == "http://a:1/v1"


def failed(found: Result) -> Result:
    return replace(found, runs=[replace(run, completed=0) for run in found.runs])


def test_the_exit_code_says_whether_anything_was_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench._report_result(failed(result()), None, None) == 1
    one = result()
    assert bench._report_result(replace(one, runs=[*failed(one).runs, *one.runs]), None, None) == 0
    assert bench._report_result(result(0), None, None) == 1
    assert list(tmp_path.iterdir()) == []
    capsys.readouterr()


def test_a_file_that_cannot_be_written_after_all_is_told(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"^--json .*: Is a directory$"):
        bench._write_file(tmp_path, "x")
