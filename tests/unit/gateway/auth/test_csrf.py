from __future__ import annotations

import pytest

from servekit.errors import Forbidden
from servekit.gateway.auth.csrf import CsrfCheck

OURS = CsrfCheck(("localhost", "gpu1", "llm.example.com"), ("https://app.example",))


def came(host: str, origin: str = "") -> bool:
    """Whether a request with these headers is taken."""
    headers = {b"accept": b"*/*", b"host": host.encode()}
    if origin:
        headers[b"origin"] = origin.encode()
    try:
        OURS.check_request(headers)
    except Forbidden:
        return False
    return True


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8000", "localhost:8000", "LOCALHOST", "[::1]:8000", "10.1.2.3", "gpu1:8000",
     "llm.example.com", "LLM.example.com:443", "me.localhost", "svc.internal", ""],
)  # fmt: skip
def test_names_that_nobody_can_point_here(host: str) -> None:
    assert came(host)
    assert came(host), "also when it is known by then"


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example",
     "evil.example.", "app.example", "1.2.3", "[evil.example]", "notlocal.localhos.t",
     "x", "gpu2:8000", "box.local:80", "gpu1.local", "local", "localhost."],
)  # fmt: skip
def test_names_that_somebody_could(host: str) -> None:
    assert not came(host)


@pytest.mark.parametrize(
    ("origin", "taken"),
    [("http://127.0.0.1:8000", True), ("http://localhost:3000", True),
     ("https://llm.example.com", True), ("https://app.example", True),
     ("app://servant", True), ("vscode-webview://1a2b", True),
     ("https://evil.example", False), ("http://127.0.0.1:9000", False), ("null", False),
     ("file://", False), ("http://app.example", False)],
)  # fmt: skip
def test_pages(origin: str, taken: bool) -> None:
    assert came("127.0.0.1:8000", origin) is taken


def test_any_page_where_the_file_says_so() -> None:
    anybody = CsrfCheck(("localhost",), ("*",))
    anybody.check_request({b"host": b"localhost", b"origin": b"https://evil.example"})
    with pytest.raises(Forbidden, match=r"server\.hosts"):
        anybody.check_request({b"host": b"evil.example"})


def test_many_names_take_no_memory() -> None:
    strangers = CsrfCheck((), ())
    for number in range(1000):
        strangers.check_request({b"host": b"10.0.0.1:%d" % number})
    assert len(strangers._known) <= 256
