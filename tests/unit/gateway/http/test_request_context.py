"""Each request has an id, its client's or a new one: in the answer, at the worker, in the log."""

from __future__ import annotations

import re

import pytest

from servekit import logging_config
from servekit.gateway.http.request_context import HEADER, ORIGIN, RequestContext
from tests.unit.gateway.conftest import Service
from tests.unit.gateway.routing.test_router import answer, ask


@pytest.mark.parametrize("given", [b"a", b"req_01:x/y=z+1@h-2.3", b"x" * 128])
def test_the_clients_own_is_kept(given: bytes) -> None:
    assert RequestContext({b"host": b"h", HEADER: given}).id == given


@pytest.mark.parametrize("given", [b"", b"a b", b"a\r\nset-cookie: b", b"\xff", b"x" * 129, b"{}"])
def test_what_is_not_fit_to_be_written_down_is_not(given: bytes) -> None:
    made = RequestContext({HEADER: given})
    assert re.fullmatch(rb"[0-9a-f]{12}-[0-9a-f]{6}", made.id)
    assert RequestContext({}).id != made.id


async def test_it_goes_to_the_worker(service: Service) -> None:
    await service.up()
    before = ORIGIN.set(RequestContext({HEADER: b"mine"}))
    call = service.router.queue_call(ask())
    ORIGIN.reset(before)
    assert call.request(99).request == "mine"
    await answer(call)


async def test_a_key_that_nobody_asked_for_is_not_noted(service: Service) -> None:
    """Clients of OpenAI's send the key that they have."""
    await service.up()
    origin = RequestContext({})
    before = ORIGIN.set(origin)
    call = service.router.queue_call(ask(key="Bearer sk-of-elsewhere"))
    ORIGIN.reset(before)
    await answer(call)
    assert origin.calls is not None
    assert "sk-of-elsewhere" not in str(origin.calls)


def test_lines_that_are_about_a_request_say_of_which() -> None:
    line = {"event": "x"}
    assert "request" not in logging_config.add_request(None, "info", dict(line))
    before = ORIGIN.set(RequestContext({HEADER: b"mine"}))
    try:
        assert logging_config.add_request(None, "info", dict(line))["request"] == "mine"
        assert logging_config.add_request(None, "info", {"request": "other"})["request"] == "other"
    finally:
        ORIGIN.reset(before)
