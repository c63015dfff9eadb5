"""Adapters over HTTP: who may, what is asked of the supervisor, and its words as vLLM has them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from servekit.config.keys import fast_digest
from servekit.gateway.app import Application
from servekit.gateway.routing.router import Router
from servekit.protocol.adapters import Adapters as Told
from servekit.protocol.adapters import AdapterSpec, AddAdapter, GetAdapters, RemoveAdapter
from servekit.protocol.messages import Accepted, AccessRules, KeyRule, Refused
from tests.unit.supervisor.admin.test_control_socket import (
    Answers,
    make_api,
)

SALT = b"s" * 32
KEYED = AccessRules(
    tuple(
        KeyRule(name, digest=fast_digest(name.encode(), SALT), admin=name == "root")
        for name in ("root", "user")
    ),
    salt=SALT,
)
OPEN = AccessRules(runtime_adapters=True)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class AdapterAnswers:
    """Does, or refuses, what it is asked."""

    def __init__(self, answer: Accepted | Refused) -> None:
        self.answer = answer
        self.heard: list[AddAdapter | RemoveAdapter] = []

    async def handle_add(self, wish: AddAdapter) -> Accepted | Refused:
        self.heard.append(wish)
        return self.answer

    async def handle_remove(self, wish: RemoveAdapter) -> Accepted | Refused:
        self.heard.append(wish)
        return self.answer

    def list_adapters(self, wish: GetAdapters) -> Told | Refused:
        return Told({})


@asynccontextmanager
async def served(
    folder: Path, answer: Accepted | Refused, rules: AccessRules = OPEN, key: str = ""
) -> AsyncIterator[tuple[httpx.AsyncClient, AdapterAnswers]]:
    adapters = AdapterAnswers(answer)
    operators = make_api(Answers(), adapters)
    await operators.listen(folder / "s")
    router = Router("test")
    app = Application(router, 10**6, ui=False, operators=folder / "s")
    router.access.apply_rules(rules)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    transport = httpx.ASGITransport(app=app)
    try:
        async with httpx.AsyncClient(
            transport=transport, base_url="http://servekit", headers=headers
        ) as http:
            yield http, adapters
    finally:
        operators.close()


@pytest.mark.parametrize(("rules", "key"), [(OPEN, ""), (KEYED, "root")])
async def test_what_is_asked_and_answered(tmp_path: Path, rules: AccessRules, key: str) -> None:
    async with served(tmp_path, Accepted("done"), rules, key) as (http, adapters):
        asked = {"lora_name": "x", "lora_path": "/x", "load_inplace": True, "base_model_name": "m"}
        loaded = await http.post(LOAD, json=asked)
        assert (loaded.status_code, loaded.text) == (
            200,
            "Success: LoRA adapter 'x' added successfully.",
        )
        gone = await http.post(UNLOAD, json={"lora_name": "x", "lora_int_id": 1})
        assert gone.text == "Success: LoRA adapter 'x' removed successfully."
        plain = await http.post(LOAD, json={"lora_name": "x", "lora_path": "/x"})
        assert plain.headers["content-type"] == "text/plain; charset=utf-8"
        spec = AdapterSpec("x", "/x")
        assert adapters.heard == [
            AddAdapter("m", spec, True),
            RemoveAdapter("x"),
            AddAdapter("", spec),
        ]


@pytest.mark.parametrize(
    ("rules", "key", "status"),
    [
        (AccessRules(), "", 403),
        (KEYED, "user", 403),
        (KEYED, "", 401),
        (AccessRules(KEYED.keys, SALT, runtime_adapters=True), "user", 403),
    ],
)
async def test_who_may_not(tmp_path: Path, rules: AccessRules, key: str, status: int) -> None:
    async with served(tmp_path, Accepted("done"), rules, key) as (http, adapters):
        for path in (LOAD, UNLOAD):
            refused = await http.post(path, json={"lora_name": "x", "lora_path": "/x"})
            assert refused.status_code == status
            if status == 403:
                assert "admin: true" in refused.json()["error"]["message"]
                assert "runtime_adapters" in refused.json()["error"]["message"]
        assert not adapters.heard


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (LOAD, {}, "Both 'lora_name' and 'lora_path' must be provided."),
        (LOAD, {"lora_name": "x"}, "Both 'lora_name' and 'lora_path' must be provided."),
        (UNLOAD, {}, "'lora_name' needs to be provided to unload a LoRA adapter."),
        (LOAD, {"lora_name": 1, "lora_path": "/x"}, "lora_name"),
    ],
)
async def test_what_is_wrong_is_said(
    tmp_path: Path, path: str, body: dict[str, object], words: str
) -> None:
    async with served(tmp_path, Accepted("done")) as (http, adapters):
        refused = await http.post(path, json=body)
        assert refused.status_code == 400
        assert words in refused.json()["error"]["message"]
        form = await http.post(path, content=b"{}", headers={"content-type": "text/plain"})
        assert (form.status_code, "application/json" in form.text) == (400, True)
        assert not adapters.heard


@pytest.mark.parametrize(
    ("answer", "path", "status", "retry"),
    [
        (Refused("wrong rank", True), LOAD, 400, None),
        (Refused("m/1 died"), LOAD, 409, None),
        (Refused("nobody is ready", retry_after_s=5.0), LOAD, 503, "5"),
        (Refused("cannot be found", True), UNLOAD, 404, None),
    ],
)
async def test_a_refusal_has_its_status(
    tmp_path: Path, answer: Refused, path: str, status: int, retry: str | None
) -> None:
    async with served(tmp_path, answer) as (http, _):
        refused = await http.post(path, json={"lora_name": "x", "lora_path": "/x"})
        assert refused.status_code == status
        assert refused.json()["error"]["message"] == answer.message
        assert refused.headers.get("retry-after") == retry


async def test_it_is_documented(tmp_path: Path) -> None:
    async with served(tmp_path, Accepted("")) as (http, _):
        document = (await http.get("/openapi.json")).json()
        done = document["paths"][LOAD]["post"]["responses"]["200"]["content"]
        assert done["text/plain"]["example"].startswith("Success: ")
        schemas = document["components"]["schemas"]
        asked = schemas["LoadLoraAdapterRequest"]["properties"]
        more = {"base_model_name", "load_inplace", "any_base"}
        assert set(asked) == {"lora_name", "lora_path"} | more
        assert (await http.get(LOAD)).status_code == 405
