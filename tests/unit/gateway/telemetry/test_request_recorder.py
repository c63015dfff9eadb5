"""The recorder of the request log: bounds in memory, in a second, and on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit import request_log
from servekit.gateway.http.request_context import RequestContext
from servekit.gateway.telemetry import request_recorder
from servekit.gateway.telemetry.request_recorder import RequestRecorder


@pytest.fixture
def recorder(tmp_path: Path) -> RequestRecorder:
    made = RequestRecorder()
    made.on, made.path = True, request_log.file_of(tmp_path, "gateway/0")
    return made


def test_a_request_is_written_with_bounded_texts(recorder: RequestRecorder, tmp_path: Path) -> None:
    origin = RequestContext({b"x-request-id": b"r1"})
    origin.key = "alice"
    recorder.note_request(b"/" + b"x" * 10_000, 404, origin)
    recorder.flush()
    (record,) = request_log.read_records(tmp_path)
    assert (record.id, record.key, record.status, len(record.endpoint)) == ("r1", "alice", 404, 200)
    assert record.failed


def test_what_is_too_much_for_a_second_is_counted(
    recorder: RequestRecorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    origin = RequestContext({})
    for _ in range(request_recorder.MOST_PENDING + 7):
        recorder.note_request(b"/v1/completions", 200, origin)
    recorder.flush()
    assert len(request_log.read_records(tmp_path)) == request_recorder.MOST_PENDING


def test_strangers_displace_nobody(recorder: RequestRecorder, tmp_path: Path) -> None:
    for second in range(2):
        for _ in range(2 * request_recorder.MOST_PENDING):
            recorder.note_request(b"/v1/completions", 401, RequestContext({}))
        recorder.note_request(b"/v1/completions", 200, RequestContext({}))
        recorder.flush()
        found = [one.status for one in request_log.read_records(tmp_path)]
        assert found.count(200) == second + 1
        assert found.count(401) == (second + 1) * request_recorder.MOST_STRANGERS


def test_files_are_bounded_and_the_newest_stay(
    recorder: RequestRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_recorder, "MOST_BYTES", 1000)
    for number in range(100):
        recorder.note_request(b"/x", 200, RequestContext({b"x-request-id": b"n%d" % number}))
        recorder.flush()
    files = list((tmp_path / request_log.FOLDER).iterdir())
    assert sum(path.stat().st_size for path in files) < 2500
    assert request_log.read_records(tmp_path)[-1].id == "n99"


def test_damaged_lines_are_left_out(recorder: RequestRecorder, tmp_path: Path) -> None:
    recorder.note_request(b"/x", 200, RequestContext({}))
    recorder.flush()
    assert recorder.path is not None
    with recorder.path.open("ab") as file:
        file.write(b'[1,"half\n\xff\n[]\n')
    assert len(request_log.read_records(tmp_path)) == 1


def test_a_disk_that_refuses_disturbs_nobody(recorder: RequestRecorder, tmp_path: Path) -> None:
    (tmp_path / request_log.FOLDER).write_text("a file in the way")
    recorder.note_request(b"/x", 200, RequestContext({}))
    recorder.flush()


def test_pages_and_probes_are_noted_only_when_they_fail(
    recorder: RequestRecorder, tmp_path: Path
) -> None:
    for path in ("/readyz", "/ui/chat", "/metrics", "/docs/x"):
        recorder.note_asgi(path, 200, RequestContext({}))
    recorder.note_asgi("/ui/assets/a.js", 499, RequestContext({}))
    recorder.note_asgi("/metrics", 403, RequestContext({}))
    recorder.note_asgi("/v1/models", 200, RequestContext({}))
    recorder.flush()
    found = [record.endpoint for record in request_log.read_records(tmp_path)]
    assert found == ["/metrics", "/v1/models"]
