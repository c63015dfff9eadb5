"""Keys on a real instance: who is let in, how often, to what; and that nothing leaks."""

from __future__ import annotations

import json
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from servekit.config.keys import new_key as make_costly_key
from tests.api_keys import new_key
from tests.integration.instance import Instance, bearer, echo, run, write_config
from tests.polling import poll

pytestmark = pytest.mark.timeout(120)

ALICE, ALICE_HASH = new_key("alice")
BOB, BOB_HASH = new_key("bob")
CI = "the-key-of-the-pipeline"
PLAIN = {"model": "a", "prompt": "hello", "max_tokens": 5}
KEYS: list[dict[str, Any]] = [
    {"name": "alice", "hash": ALICE_HASH},
    {"name": "bob", "hash": BOB_HASH, "models": ["b2"], "priority": 3},
    {"name": "ci", "environment": "PIPELINE_KEY", "requests_per_minute": 1000},
    {"name": "dear", "hash": make_costly_key("dear")[1]},  # as users have it: a wrong one costs
]


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    models = [echo("a"), {**echo("b", step_s=0.01), "aliases": ["b2"]}]
    server = {"cors": ["https://app.example"]}
    with Instance.up(
        tmp_path_factory.mktemp("access"), models, server=server, sections={"keys": KEYS},
        env={"PIPELINE_KEY": CI},
    ) as instance:  # fmt: skip
        instance.until_settled()
        yield instance


@pytest.fixture
def http(instance: Instance) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=instance.url, timeout=30) as client:
        yield client


# ---------------------------------------------------------------- who is let in


@pytest.mark.parametrize(
    "path",
    [
        "/livez",
        "/readyz",
        "/version",
        "/docs",
        "/docs/commands",
        "/docs/site.js",
        "/docs/search.js",
        "/docs/images/chat.png",
        "/docs/swagger",
        "/openapi.json",
        "/health",
        "/ping",
    ],
)
def test_open_to_all(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 200


def test_a_page_of_the_docs_that_is_none_needs_no_key(http: httpx.Client) -> None:
    answer = http.get("/docs/acess")
    assert answer.status_code == 404
    assert "see /docs" in answer.json()["error"]["message"]
    assert http.post("/docs/acess").status_code == 401  # a model may have such an endpoint


def test_readyz_tells_of_the_models_of_a_key(http: httpx.Client) -> None:
    told = {key: http.get("/readyz", headers=bearer(key)).json() for key in (ALICE, BOB, "sk-no")}
    assert {*told[ALICE]["models"]} == {"a", "b"}
    assert {*told[BOB]["models"]} == {"b"}
    assert told["sk-no"] == http.get("/readyz").json() == {"status": "ready"}


def test_paths_may_end_in_a_slash(http: httpx.Client) -> None:
    asked = {**PLAIN, "model": "b2"}
    for path in ("/v1/completions/", "/v1/completions//"):
        answer = http.post(path, json=asked, headers=bearer(BOB))
        assert answer.json()["choices"][0]["text"] == "hello"
        assert http.post(path, json=asked).status_code == 401
    listed = http.get("/v1/models/", headers=bearer(BOB)).json()["data"]
    assert [one["id"] for one in listed] == ["b"]
    assert http.get("/livez/").status_code == 200


def test_the_page_to_try_the_api_has_its_files(http: httpx.Client) -> None:
    page = http.get("/docs/swagger").text
    files = [part.split('"')[0] for part in page.split('"/')[1:]]
    found = [http.get(f"/{name}").status_code for name in files if "static" in name]
    assert found and set(found) == {200}


@pytest.mark.lane("long")
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"),
     ("GET", "/v1/models/a"), ("GET", "/nowhere"), ("GET", "/ui/"), ("OPTIONS", "/v1/models"),
     ("POST", "/v1/completions?x=1"), ("GET", "//livez"), ("GET", "/livez/../v1/models"),
     ("GET", "/LIVEZ"), ("GET", "/docs/../v1/models"), ("GET", "/static-offline-docs")],
)  # fmt: skip
@pytest.mark.parametrize(
    "headers",
    [{}, bearer("wrong"), {"authorization": "Bearer"}, {"x-api-key": ALICE[:-1]},
     {"authorization": ALICE}, {"authorization": f"Basic {ALICE}"}, {"cookie": f"key={ALICE}"}],
)  # fmt: skip
def test_closed_to_all_without_a_key(
    instance: Instance, method: str, path: str, headers: dict[str, str]
) -> None:
    body = PLAIN if method == "POST" else None
    answer = httpx.request(method, instance.url + path, json=body, headers=headers)
    assert answer.status_code == 401
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
    assert answer.headers["www-authenticate"].split()[0] in ("Bearer", "Basic")
    assert ALICE[:-1] not in answer.text


@pytest.mark.parametrize(
    "headers",
    [bearer(ALICE), {"authorization": f"bearer  {ALICE}"}, {"x-api-key": ALICE},
     {"api-key": ALICE}, {"authorization": "Basic eDp5", "x-api-key": ALICE}, bearer(CI)],
)  # fmt: skip
def test_a_key_in_every_place_clients_have_it(http: httpx.Client, headers: dict[str, str]) -> None:
    for path in ("/v1/completions", "/v1/completions?way=asgi"):
        answer = http.post(path, json=PLAIN, headers=headers)
        assert answer.json()["choices"][0]["text"] == "hello"


def test_the_openai_client(instance: Instance) -> None:
    with openai.OpenAI(base_url=f"{instance.url}/v1", api_key=ALICE, max_retries=0) as client:
        assert {model.id for model in client.models.list()} == {"a", "b"}
        stream = client.completions.create(model="a", prompt="hi", max_tokens=4, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "hihi"
    with openai.OpenAI(base_url=f"{instance.url}/v1", api_key="sk-no", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as error:
            client.completions.create(model="a", prompt="hi")
        assert error.value.code == "invalid_api_key"


def test_only_its_models(instance: Instance) -> None:
    with openai.OpenAI(base_url=f"{instance.url}/v1", api_key=BOB, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["b"]
        assert client.models.retrieve("b2").id == "b"
        assert client.completions.create(model="b", prompt="x", max_tokens=2).choices[0].text
        asked: tuple[Callable[[], object], ...] = (
            lambda: client.completions.create(model="a", prompt="x"),
            lambda: client.models.retrieve("a"),
        )
        for forbidden in asked:
            with pytest.raises(openai.PermissionDeniedError, match="'bob' may not use 'a'"):
                forbidden()
        with pytest.raises(openai.NotFoundError) as error:
            client.completions.create(model="nope", prompt="x")
        assert "the models are: b" in error.value.message


# ---------------------------------------------------------------- web pages


def test_cors(http: httpx.Client) -> None:
    ours, theirs = {"origin": "https://app.example"}, {"origin": "https://evil.example"}
    ask_leave = {"access-control-request-method": "POST", "access-control-request-headers": "x-y"}
    for path in ("/v1/completions", "/v1/models"):
        answer = http.options(path, headers={**ours, **ask_leave})
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert answer.headers["access-control-allow-headers"] == "x-y"
        assert "POST" in answer.headers["access-control-allow-methods"]
    allowed = http.post("/v1/completions", json=PLAIN, headers={**ours, **bearer(ALICE)})
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    assert allowed.headers["vary"] == "Origin"
    refused = http.post("/v1/completions", json=PLAIN, headers=ours)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
    for headers in (theirs, {}):
        answer = http.post("/v1/completions", json=PLAIN, headers={**headers, **bearer(ALICE)})
        assert "access-control-allow-origin" not in answer.headers
    evil = http.options("/v1/models", headers={**theirs, **ask_leave})
    assert "access-control-allow-origin" not in evil.headers


# ---------------------------------------------------------------- a bound on strangers


def test_a_flood_of_wrong_keys_leaves_the_others_quick(instance: Instance) -> None:
    with httpx.Client(base_url=instance.url, timeout=30) as http:
        http.post("/v1/completions", json=PLAIN, headers=bearer(ALICE)).raise_for_status()
        gateway = psutil.Process(instance.gateway().pid)
        limits = httpx.Limits(max_connections=200)
        with httpx.Client(base_url=instance.url, timeout=30, limits=limits) as stranger:
            before = sum(gateway.cpu_times()[:2])
            began_s = time.monotonic()
            codes = [
                stranger.get("/v1/models", headers=bearer(f"sk-dear-{i:032d}")).status_code
                for i in range(15)
            ]
            took_s = time.monotonic() - began_s
            spent_s = sum(gateway.cpu_times()[:2]) - before
            assert set(codes) <= {401, 503}
            assert spent_s < 0.6 * took_s
            quick_s = []
            for _ in range(20):
                at_s = time.monotonic()
                http.post("/v1/completions", json=PLAIN, headers=bearer(ALICE)).raise_for_status()
                quick_s.append(time.monotonic() - at_s)
            assert sorted(quick_s)[10] < 0.1


def test_a_big_body_without_a_key_is_not_kept(instance: Instance) -> None:
    answer = httpx.post(f"{instance.url}/v1/completions", content=b"x" * 5_000_000)
    assert answer.status_code == 401


# ---------------------------------------------------------------- limits


def test_limits_and_their_headers(tmp_path: Path) -> None:
    limited = {"name": "alice", "hash": ALICE_HASH, "requests_per_minute": 3, "max_concurrent": 1}
    thrifty = {"name": "bob", "hash": BOB_HASH, "tokens_per_minute": 20}
    sections = {"keys": [limited, thrifty]}
    with Instance.up(tmp_path, [echo("a", step_s=0.01)], sections=sections) as instance:
        instance.until_settled()
        url = f"{instance.url}/v1/completions"
        left = []
        for path in ("", "?way=asgi", ""):
            answer = httpx.post(url + path, json=PLAIN, headers=bearer(ALICE))
            assert answer.headers["x-ratelimit-limit-requests"] == "3"
            left.append(answer.headers["x-ratelimit-remaining-requests"])
        assert left == ["2", "1", "0"]
        for path in ("", "?way=asgi"):
            refused = httpx.post(url + path, json=PLAIN, headers=bearer(ALICE))
            assert refused.status_code == 429
            assert 1 <= int(refused.headers["retry-after"]) <= 20
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        models = httpx.get(f"{instance.url}/v1/models", headers=bearer(ALICE))
        assert models.status_code == 200  # looking costs nothing
        first = httpx.post(url, json={**PLAIN, "max_tokens": 40}, headers=bearer(BOB))
        assert first.headers["x-ratelimit-remaining-tokens"] == "20"
        spent = httpx.post(url, json=PLAIN, headers=bearer(BOB))
        assert spent.status_code == 429
        assert "20 tokens a minute" in spent.json()["error"]["message"]
        assert int(spent.headers["retry-after"]) > 60  # 25 tokens of debt, at 20 a minute


@pytest.mark.lane("long")
def test_gateways_share_a_limit(tmp_path: Path) -> None:
    rule = {"name": "alice", "hash": ALICE_HASH, "requests_per_minute": 20}
    with Instance.up(
        tmp_path, [echo("a")], server={"gateways": 2}, sections={"keys": [rule]}
    ) as instance:
        instance.until_settled()

        def ask_anew(_: int) -> int:  # on a connection of its own, so perhaps at the other gateway
            url = f"{instance.url}/v1/completions"
            return httpx.post(url, json=PLAIN, headers=bearer(ALICE)).status_code

        answers: list[int] = []

        def all_refused() -> bool:  # all at once: one more is allowed every three seconds
            with ThreadPoolExecutor(10) as pool:
                answers.extend(pool.map(ask_anew, range(10)))
            return {*answers[-10:]} == {429}

        poll("both know that it is used up", all_refused, 30)
        # at most a second's worth of the other's more, and the refill
        assert 20 <= answers.count(200) <= 45


# ---------------------------------------------------------------- reload


@pytest.mark.lane("long")
def test_a_reload_changes_who_is_let_in_and_restarts_nothing(tmp_path: Path) -> None:
    models = [{**echo("a", step_s=0.02), "aliases": ["b2"]}]
    with Instance.up(tmp_path, models) as instance:
        pids = {gateway.pid for gateway in instance.until_settled().gateways}
        with httpx.Client(base_url=instance.url, timeout=30) as http:
            long = {**PLAIN, "max_tokens": 400, "stream": True}
            with http.stream("POST", "/v1/completions", json=long) as stream:
                lines = stream.iter_lines()
                assert next(lines).startswith("data:")
                write_config(tmp_path, models, sections={"keys": KEYS[:2]})
                assert instance.reload() == "access changed, a unchanged"
                until_answered(http, {}, 401)
                until_answered(http, bearer(ALICE), 200)
                write_config(tmp_path, models, sections={"keys": KEYS[1:2]})
                instance.reload()
                until_answered(http, bearer(ALICE), 401)
                assert "data: [DONE]" in list(lines)  # what is under way goes on
            write_config(tmp_path, models)
            instance.reload()
            until_answered(http, {}, 200)
        assert {gateway.pid for gateway in instance.status().gateways} == pids
        assert instance.replica("a/0").restarts == 0


def test_a_batch_waits_while_the_file_lacks_its_key(tmp_path: Path) -> None:
    """As where an operator replaces a key in two steps."""
    models = [echo("a", step_s=0.02, slots=1)]
    server: dict[str, Any] = {"batches": {}}
    keys = {"keys": KEYS[:1]}
    with Instance.up(tmp_path, models, server=server, sections=keys) as instance:
        instance.until_settled()
        with httpx.Client(base_url=instance.url, timeout=30, headers=bearer(ALICE)) as http:
            path = _make_batch(http)
            write_config(tmp_path, models, server, {"keys": [{**KEYS[1], "models": ["a"]}]})
            instance.reload()
            until_answered(http, bearer(ALICE), 401)
            until_answered(http, bearer(BOB), 200)  # what was under way has had its turn
            write_config(tmp_path, models, server, keys)
            instance.reload()
            until_answered(http, {}, 200)
            done = poll("the batch is done", partial(_find_end, http, path), 60)
            assert done["status"] == "completed"
            assert done["request_counts"] == {"total": 20, "completed": 20, "failed": 0}


BUSY = {"validating", "in_progress", "finalizing"}


def _find_end(http: httpx.Client, path: str) -> dict[str, Any]:
    """Return a batch once it has ended, {} before."""
    found: dict[str, Any] = http.get(path).json()
    return {} if found["status"] in BUSY else found


def _make_batch(http: httpx.Client) -> str:
    """Ask for a batch of twenty; return its path."""
    line = {"method": "POST", "url": "/v1/completions", "body": PLAIN}
    lines = "".join(json.dumps({**line, "custom_id": f"{i}"}) + "\n" for i in range(20))
    file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": lines.encode()})
    batch = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions"}
    made = http.post("/v1/batches", json={**batch, "completion_window": "24h"})
    return f"/v1/batches/{made.json()['id']}"


def until_answered(http: httpx.Client, headers: dict[str, str], wanted: int) -> None:
    """Gateways learn of it a moment after the operator."""

    def answered() -> bool:
        answer = http.post("/v1/completions", json=PLAIN, headers=headers)
        return answer.status_code == wanted

    poll(f"{wanted} for {list(headers)}", answered, 10)


# ---------------------------------------------------------------- the machine


def up(folder: Path, host: str, *args: str) -> subprocess.CompletedProcess[str]:
    config = write_config(folder, [echo("a")], {"host": host})
    return run("up", "--config", str(config), "--run-dir", str(folder / "run"), *args)


@pytest.mark.lane("long")
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_public_bind_without_keys_is_refused(tmp_path: Path, host: str) -> None:
    refused = up(tmp_path, host)
    assert refused.returncode == 2
    assert "servekit.yaml:" in refused.stderr
    assert "there are no keys" in refused.stderr
    assert "servekit key new" in refused.stderr and "--insecure" in refused.stderr
    by_flag = up(tmp_path, "127.0.0.1", "--host", host)
    assert (by_flag.returncode, "there are no keys" in by_flag.stderr) == (2, True)


@pytest.mark.lane("long")
@pytest.mark.parametrize(
    ("args", "sections"), [(("--insecure",), {}), ((), {"keys": KEYS[:1]})], ids=["said", "keys"]
)
def test_a_public_bind_that_is_meant(
    tmp_path: Path, args: tuple[str, ...], sections: dict[str, Any]
) -> None:
    server = {"host": "0.0.0.0"}
    with Instance.up(tmp_path, [echo("a")], *args, server=server, sections=sections) as instance:
        instance.until_settled()
        assert httpx.get(f"{instance.url}/livez").status_code == 200


@pytest.mark.lane("long")
def test_keys_cannot_be_taken_from_a_public_instance(tmp_path: Path) -> None:
    models, server = [echo("a")], {"host": "0.0.0.0"}
    with Instance.up(tmp_path, models, server=server, sections={"keys": KEYS[:1]}) as instance:
        write_config(tmp_path, models, server)
        refused = instance.run("reload")
        assert (refused.returncode, "there are no keys" in refused.stderr) == (2, True)
        assert httpx.get(f"{instance.url}/v1/models").status_code == 401


def test_the_operators_socket_is_the_owners_alone(instance: Instance) -> None:
    assert stat.S_IMODE((instance.run_dir / "control.sock").stat().st_mode) == 0o600
    assert stat.S_IMODE(instance.run_dir.stat().st_mode) == 0o700


def test_no_child_has_a_key_in_its_environment(instance: Instance) -> None:
    children = instance.survivors()
    assert len(children) >= 3
    for child in children:
        assert CI not in Path(f"/proc/{child.pid}/environ").read_text(errors="replace")


# ---------------------------------------------------------------- secrecy

SECRET = "xyzzy-the-patient-is-called-Rumpelstilzchen"


def written(folder: Path) -> str:
    """All that an instance has written, wherever."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return "".join(path.read_text(errors="replace") for path in files)


def test_no_prompt_is_ever_logged(tmp_path: Path) -> None:
    models = [echo("a", replicas=2, crash_on="DIE"), echo("b", step_s=0.01)]
    with Instance.up(tmp_path, models, sections={"keys": KEYS[:1]}) as instance:
        instance.until_settled()
        url = f"{instance.url}/v1/completions"
        codes = [
            httpx.post(url, timeout=30, headers=bearer(ALICE), content=body).status_code
            for body in (
                json.dumps({**PLAIN, "prompt": SECRET}),
                json.dumps({**PLAIN, "prompt": f"{SECRET} DIE"}),
                json.dumps({**PLAIN, "prompt": SECRET, "temperature": SECRET}),
                json.dumps({**PLAIN, "prompt": SECRET * 1000}),
                json.dumps({"model": "b", "prompt": SECRET, "stop": [SECRET], "stream": True}),
                f'{{"model": "a", "prompt": "{SECRET}',
            )
        ]
        assert codes == [200, 500, 400, 400, 200, 400]
        whys = [why(instance, "a"), why(instance, "a", "--json"), why(instance, "gateway/0")]
        assert "SIGKILL" in whys[0]
        (tmp_path / "servekit.yaml").unlink()
        for text in (*whys, written(tmp_path)):
            assert SECRET not in text
            assert ALICE not in text


def why(instance: Instance, *args: str) -> str:
    return instance.run("why", *args).stdout


def test_prompts_are_logged_where_that_is_asked_for(tmp_path: Path) -> None:
    sections = {"logging": {"prompts": True}}
    with Instance.up(tmp_path, [echo("a")], sections=sections) as instance:
        instance.until_settled()
        body = {**PLAIN, "prompt": SECRET}
        httpx.post(f"{instance.url}/v1/completions", json=body).raise_for_status()
        instance.until("it is logged", lambda: SECRET in instance.log)


@pytest.mark.lane("long")
def test_key_new(tmp_path: Path) -> None:
    made = run("key", "new", "--name", "dora")
    key, _, lines = made.stdout.partition("\n")
    assert key.startswith("sk-dora-")
    assert key not in lines and "it cannot be shown again" in made.stderr
    config = tmp_path / "a.yaml"
    config.write_text(f"{lines}\nmodels: {json.dumps([echo('a')])}\n")
    assert run("check", str(config)).returncode == 0
    refused = run("key", "new", "--name", "a b")
    assert (refused.returncode, "a key's name is" in refused.stderr) == (2, True)
