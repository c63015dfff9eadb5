"""The hot routes' short way, where it goes wrong in a way that nobody foresaw."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest

from servekit.errors import ModelNotFound, ServekitError
from servekit.gateway.api.openai.endpoints import OpenAI
from servekit.gateway.api.openai.response import ChatEncoder
from tests.unit.gateway.conftest import Service, until


class Heard:
    """Where a response stands: keeps what it is told to answer."""

    headers: ClassVar[dict[bytes, bytes]] = {}
    is_writable = True
    response_started = False

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = json.dumps(body).encode()
        self.failures: list[ServekitError] = []
        self.on_gone: Any = None
        self.on_writable: Any = None

    def send_error(self, error: ServekitError) -> None:
        self.failures.append(error)


async def test_an_answer_that_cannot_be_written_is_an_error_and_not_silence(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.up()

    def broken(*_: object) -> bytes:
        raise KeyError("unforeseen")

    monkeypatch.setattr(ChatEncoder, "encode_response", broken)
    heard = Heard({"model": "m", "messages": [{"role": "user", "content": "a"}], "n": 2})
    OpenAI(service.router).handlers["/v1/chat/completions"](heard)  # type: ignore[arg-type]
    await until(lambda: heard.failures)
    assert [error.status for error in heard.failures] == [500]
    assert service.router.in_flight == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_request_for_an_unknown_model_is_counted(service: Service, path: str) -> None:
    await service.up()
    heard = Heard({"model": "none", "messages": [{"role": "user", "content": "a"}], "prompt": "a"})
    with pytest.raises(ModelNotFound):
        OpenAI(service.router).handlers[path](heard)  # type: ignore[arg-type]
    counted = service.router.measures.pop_counts()
    assert counted is not None
    assert [(one.metric, one.labels[-1]) for one in counted.series] == [
        ("servekit_requests_total", "model_not_found")
    ]
