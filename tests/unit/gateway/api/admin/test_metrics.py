"""The page: both formats by their own parsers, who may see it, and one question at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics

from servekit.config.keys import fast_digest
from servekit.gateway.api.admin.metrics import InTurn, Page
from servekit.gateway.app import Application
from servekit.gateway.routing.router import Router
from servekit.metrics import METRICS
from servekit.protocol.control.metrics_messages import Series
from servekit.protocol.messages import AccessRules, KeyRule, Topology
from tests.unit.supervisor.admin.test_control_socket import (
    Answers,
    make_api,
)

HISTOGRAM = "servekit_queue_wait_seconds"
SERIES = (
    Series("servekit_retries_total", ("a",), [3.0]),
    Series("servekit_queue_depth", ('odd "name"\n',), [2.0]),
    Series(HISTOGRAM, ("a",), [1.0, 2.0] + [0.0] * 13 + [4.0, 9.5]),
    Series("servekit_of_tomorrow", ("x",), [1.0]),
)


async def test_both_formats_are_read_by_their_own_parsers() -> None:
    page = Page(SERIES)
    plain, plain_type = await page.text("")
    opened, opened_type = await page.text("application/openmetrics-text; version=1.0.0")
    assert plain_type.startswith("text/plain; version=0.0.4")
    assert opened_type.startswith("application/openmetrics-text; version=1.0.0")
    found = {
        (sample.name, *sorted(sample.labels.values(), reverse=True)): sample.value
        for text, read in ((plain, parser), (opened, openmetrics))
        for family in read.text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
    assert found["servekit_retries_total", "a"] == 3
    assert found["servekit_queue_depth", 'odd "name"\n'] == 2
    assert found[HISTOGRAM + "_bucket", "a", "0.001"] == 1
    assert found[HISTOGRAM + "_bucket", "a", "300.0"] == 3
    assert found[HISTOGRAM + "_bucket", "a", "+Inf"] == 7
    assert (found[HISTOGRAM + "_count", "a"], found[HISTOGRAM + "_sum", "a"]) == (7, 9.5)
    assert not any("tomorrow" in name for name, *_ in found)


async def test_every_metric_is_there_with_its_help_before_anything_happens() -> None:
    text, _ = await Page(()).text("")
    for metric in METRICS:
        assert f"# TYPE {metric.name} {metric.kind}\n".encode() in text


# ---------------------------------------------------------------- who may see it


@asynccontextmanager
async def served(folder: Path, rules: AccessRules) -> AsyncIterator[httpx.AsyncClient]:
    operators = make_api(Answers())
    await operators.listen(folder / "s")
    router = Router("test")
    app = Application(router, 10**6, ui=False, operators=folder / "s")
    router.apply_topology(Topology((), access=rules))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
    operators.close()


SALT = b"salt"


def rule(name: str, *, metrics: bool = False, admin: bool = False) -> KeyRule:
    digest = fast_digest(f"sk-{name}-12345".encode(), SALT)
    return KeyRule(name, digest=digest, metrics=metrics, admin=admin)


KEYS = (rule("user"), rule("scraper", metrics=True), rule("operator", admin=True))


async def status(client: httpx.AsyncClient, key: str) -> int:
    headers = {"authorization": f"Bearer sk-{key}-12345"} if key else {}
    answer = await client.get("/metrics", headers=headers)
    if answer.status_code == 200:
        assert 'servekit_queue_depth{model="m"} 3.0' in answer.text
    return answer.status_code


async def test_without_keys_whoever_reaches_the_port_reads_it(tmp_path: Path) -> None:
    async with served(tmp_path, AccessRules()) as client:
        assert await status(client, "") == 200


async def test_with_keys_it_takes_one_that_may(tmp_path: Path) -> None:
    async with served(tmp_path, AccessRules(keys=KEYS, salt=SALT)) as client:
        found = {key: await status(client, key) for key in ("", "user", "scraper", "operator")}
    assert found == {"": 401, "user": 403, "scraper": 200, "operator": 200}


async def test_the_file_may_open_it(tmp_path: Path) -> None:
    rules = AccessRules(keys=KEYS, salt=SALT, open_metrics=True)
    async with served(tmp_path, rules) as client:
        assert await status(client, "") == 200


async def test_without_a_supervisor_it_is_503_and_says_so(tmp_path: Path) -> None:
    router = Router("test")
    app = Application(router, 10**6, ui=False, operators=tmp_path / "nobody")
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.get("/metrics")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "supervisor_unavailable"


# ---------------------------------------------------------------- one question at once


async def test_who_comes_while_a_question_is_under_way_gets_the_answer_to_the_next() -> None:
    asked: list[asyncio.Future[int]] = []

    def ask() -> asyncio.Future[int]:
        asked.append(asyncio.get_running_loop().create_future())
        return asked[-1]

    turns = InTurn(ask, every_s=0.0)
    first = asyncio.create_task(turns())
    await asyncio.sleep(0.01)
    late = [asyncio.create_task(turns()) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert len(asked) == 1
    asked[0].set_result(1)
    assert await first == 1
    await asyncio.sleep(0.01)
    asked[1].set_result(2)
    assert [await one for one in late] == [2, 2, 2]
    assert len(asked) == 2


async def test_a_question_that_fails_is_told_to_all_who_share_it_and_the_next_is_put() -> None:
    asked: list[None] = []

    async def ask() -> int:
        asked.append(None)
        if len(asked) == 1:
            raise ValueError("no")
        return 7

    turns = InTurn(ask, every_s=0.0)
    both = await asyncio.gather(turns(), turns(), return_exceptions=True)
    assert [str(one) for one in both] == ["no", "no"]
    assert await turns() == 7


@pytest.mark.timeout(20)
async def test_one_who_gives_up_does_not_take_the_others_with_it() -> None:
    asked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    turns = InTurn(lambda: asked, every_s=0.0)
    impatient, patient = asyncio.create_task(turns()), asyncio.create_task(turns())
    await asyncio.sleep(0.01)
    impatient.cancel()
    asked.set_result(5)
    assert await patient == 5
