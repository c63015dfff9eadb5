"""Adapters on real instances: on all workers or on none, whatever happens to the workers."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from servekit.protocol.adapters import AdapterStatus
from servekit.protocol.messages import ReplicaStatus
from tests.api_keys import new_key
from tests.integration.instance import Instance, bearer, echo, run, stream_completion, write_config
from tests.polling import poll

pytestmark = pytest.mark.timeout(180)

ROOT, ROOT_HASH = new_key("root")
USER, USER_HASH = new_key("user")
KEYS: list[dict[str, Any]] = [
    {"name": "root", "hash": ROOT_HASH, "admin": True},
    {"name": "user", "hash": USER_HASH, "models": ["m"]},
    {"name": "other", "hash": new_key("other")[1], "models": ["b"]},
]
OPEN = {"runtime_adapters": True}


def folder(tmp_path: Path, name: str, **config: object) -> str:
    path = tmp_path / name
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)


def named(tmp_path: Path, *names: str) -> list[dict[str, str]]:
    """The section `adapters` of a model."""
    return [{"name": name, "path": folder(tmp_path, name)} for name in names]


def load(url: str, name: str, path: str, key: str = "", **more: object) -> httpx.Response:
    body = {"lora_name": name, "lora_path": path, **more}
    headers = bearer(key) if key else {}
    return httpx.post(f"{url}/v1/load_lora_adapter", json=body, headers=headers, timeout=60)


def unload(url: str, name: str, key: str = "") -> httpx.Response:
    headers = bearer(key) if key else {}
    body = {"lora_name": name}
    return httpx.post(f"{url}/v1/unload_lora_adapter", json=body, headers=headers, timeout=60)


def said(answer: httpx.Response) -> str:
    message: str = answer.json()["error"]["message"]
    return message


def complete(url: str, model: str, prompt: str = "hello", **more: object) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": len(prompt), **more}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["choices"][0]["text"]
    return found


def served(url: str) -> dict[str, dict[str, Any]]:
    data = httpx.get(f"{url}/v1/models", timeout=30).json()["data"]
    return {model["id"]: model for model in data}


def state(instance: Instance, name: str, model: str = "m") -> AdapterStatus | None:
    found = (one for one in instance.model(model).adapters if one.name == name)
    return next(found, None)


def serves(instance: Instance, name: str) -> bool:
    found = state(instance, name)
    return found is not None and found.state == "serving"


def every_worker_has(url: str, name: str, workers: int) -> None:
    """So many requests at once that each worker gets some."""
    with httpx.Client(timeout=60) as client:
        for _ in range(4 * workers):
            body = {"model": name, "prompt": "abc", "max_tokens": 3}
            assert text(client.post(f"{url}/v1/completions", json=body)) == "ABC"


class Traffic:
    """Requests for some models all the time; `failures` are those that were not answered right."""

    def __init__(self, url: str, models: Sequence[str], clients: int = 4) -> None:
        self.answers = 0
        self.failures: list[str] = []
        self._url, self._models = url, models
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(clients)]

    def _ask(self, index: int) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._over.is_set():
                model = self._models[index % len(self._models)]
                body = {"model": model, "prompt": "abcdefgh", "max_tokens": 24, "stream": False}
                answer = client.post(f"{self._url}/v1/completions", json=body)
                want = ("abcdefgh" if model == "m" else "ABCDEFGH") * 3
                if answer.status_code != 200 or text(answer) != want:
                    self.failures.append(f"{model}: {answer.status_code} {answer.text}")
                self.answers += 1

    @contextmanager
    def flowing(self) -> Iterator[Traffic]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join()


@pytest.mark.lane("long")
def test_adapters_of_the_file_are_models_of_their_own(tmp_path: Path) -> None:
    """Two gateways both know them; the `openai` client lists and uses them."""
    model = echo("m", replicas=2) | {"adapters": named(tmp_path, "loud", "lout")}
    with Instance.up(tmp_path, [model], server={"gateways": 2}) as instance:
        url = instance.until_settled().url
        for _ in range(8):  # each on a connection of its own: both gateways
            models = served(url)
            assert list(models) == ["m", "loud", "lout"]
            assert text(complete(url, "loud")) == "HELLO"
            assert text(complete(url, "m")) == "hello"
        assert models["loud"]["parent"] == "m"
        assert models["loud"]["root"] == str(tmp_path / "loud")
        assert models["m"]["parent"] is None
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        assert [one.id for one in client.models.list()] == ["m", "loud", "lout"]
        chat = client.chat.completions.create(
            model="loud", messages=[{"role": "user", "content": "the sea"}], max_tokens=7
        )
        assert (chat.model, chat.choices[0].message.content) == ("loud", "THE SEA")
        other_apis(url)
        assert "adapters" in run("ps", "--json", "--run-dir", str(instance.run_dir)).stdout
        assert "unexpected_error" not in instance.log


def other_apis(url: str) -> None:
    tags = httpx.get(f"{url}/api/tags").json()["models"]
    assert [tag["name"] for tag in tags] == ["m:latest", "loud:latest", "lout:latest"]
    body: dict[str, Any] = {"model": "loud:latest", "prompt": "hey", "stream": False}
    body["options"] = {"num_predict": 3}
    answer = httpx.post(f"{url}/api/generate", json=body).json()
    assert (answer["model"], answer["response"]) == ("loud:latest", "HEY")
    body = {
        "model": "loud",
        "max_tokens": 3,
        "messages": [{"role": "user", "content": "hey"}],
    }
    message = httpx.post(f"{url}/v1/messages", json=body).json()
    assert (message["model"], message["content"][0]["text"]) == ("loud", "HEY")
    tokens = httpx.post(f"{url}/tokenize", json={"model": "loud", "prompt": "hey"}).json()
    assert tokens["tokens"] == [ord(c) for c in "hey"]
    refused = httpx.post(f"{url}/v1/embeddings", json={"model": "loud", "input": "x"})
    assert (refused.status_code, "loud" in said(refused)) == (400, True)
    assert httpx.get(f"{url}/v1/models/loud").json()["parent"] == "m"


def test_load_and_unload_under_traffic(tmp_path: Path) -> None:
    models = [echo("m", replicas=3, step_s=0.002)]
    with Instance.up(tmp_path, models, server={**OPEN, "gateways": 2}) as instance:
        url = instance.until_settled().url
        path = folder(tmp_path, "loud")
        with Traffic(url, ["m"]).flowing() as base:
            answer = load(url, "loud", path)
            assert answer.text == "Success: LoRA adapter 'loud' added successfully."
            assert answer.headers["content-type"].startswith("text/plain")
            every_worker_has(url, "loud", 3)
            refusals(url, path)
            come_and_go(instance, url, path)
            poll("the base answers meanwhile", lambda: base.answers > 20)
        assert not base.failures


def refusals(url: str, path: str) -> None:
    """As vLLM words them."""
    again = load(url, "loud", path)
    assert (again.status_code, "has already been loaded" in said(again)) == (400, True)
    assert load(url, "loud", path, load_inplace=True).status_code == 200
    assert text(complete(url, "loud")) == "HELLO"
    unknown = unload(url, "quiet")
    assert (unknown.status_code, "cannot be found" in said(unknown)) == (404, True)
    missing = load(url, "x", str(Path(path) / "nowhere"))
    assert (missing.status_code, "does not exist" in said(missing)) == (400, True)
    assert load(url, "m", path).status_code == 400
    assert load(url, "", path).status_code == 400
    assert load(url, "a b", path).status_code == 400
    assert load(url, "x", path, base_model_name="nobody").status_code == 400
    form = httpx.post(f"{url}/v1/load_lora_adapter", content=b'{"lora_name":"x","lora_path":"/"}')
    assert (form.status_code, "application/json" in said(form)) == (400, True)


def come_and_go(instance: Instance, url: str, path: str) -> None:
    """Whatever was taken before it went is answered by it, and what comes after is a 404."""
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(complete(url, "loud", "abc" * 30))

    asking = [threading.Thread(target=ask) for _ in range(30)]
    for thread in asking:
        thread.start()
    taken = stream_completion(url, model="loud", prompt="abc" * 30, max_tokens=90)
    begun = next(taken)
    assert unload(url, "loud").text == "Success: LoRA adapter 'loud' removed successfully."
    assert begun + "".join(taken) == "ABC" * 30
    for thread in asking:
        thread.join()
    assert {text(answer) for answer in answers if answer.status_code == 200} <= {"ABC" * 30}
    assert {answer.status_code for answer in answers} <= {200, 404}
    assert complete(url, "loud").status_code == 404
    assert "loud" not in served(url)
    assert state(instance, "loud") is None
    assert load(url, "loud", path).status_code == 200


@pytest.mark.lane("long")
def test_one_refuses_and_none_has_it(tmp_path: Path) -> None:
    models = [echo("m", replicas=3, adapter_error="loud/1", crash_on_adapter="bomb/2")]
    with Instance.up(tmp_path, models, server=OPEN) as instance:
        url = instance.until_settled().url
        with Traffic(url, ["m"]).flowing() as base:
            refused = load(url, "loud", folder(tmp_path, "loud"))
            assert (refused.status_code, "is refused" in said(refused)) == (400, True)
            nobody_has(instance, url, "loud")
            died = load(url, "bomb", folder(tmp_path, "bomb"))
            assert "worker m/2 died while it loaded the adapter 'bomb'" in said(died)
            assert died.status_code == 409
            nobody_has(instance, url, "bomb")
            assert load(url, "fine", folder(tmp_path, "fine")).status_code == 200
        assert not base.failures
        instance.until("m/2 is back", lambda: instance.replica("m/2").state == "ready")
        every_worker_has(url, "fine", 3)


def nobody_has(instance: Instance, url: str, name: str) -> None:
    assert state(instance, name) is None
    assert complete(url, name).status_code == 404
    assert name not in served(url)


@pytest.mark.lane("long")
def test_workers_that_restart_or_are_new_get_what_the_others_have(tmp_path: Path) -> None:
    model = echo("m", replicas=2) | {"adapters": named(tmp_path, "filed")}
    with Instance.up(tmp_path, [model], server=OPEN) as instance:
        url = instance.until_settled().url
        assert load(url, "added", folder(tmp_path, "added")).status_code == 200
        with Traffic(url, ["m", "filed", "added"], clients=6).flowing() as traffic:
            for name in ("m/0", "m/1"):
                kill(instance, name)
            write_config(tmp_path, [{**model, "replicas": 3}], OPEN)
            assert "scaled from 2 to 3" in reload(instance)
            instance.until("the third serves", lambda: ready(instance) == 3)
        assert not traffic.failures
        every_worker_has(url, "added", 3)
        every_worker_has(url, "filed", 3)
        replaced(tmp_path, instance, model)
        assert "unexpected_error" not in instance.log


def replaced(tmp_path: Path, instance: Instance, model: dict[str, Any]) -> None:
    """Another version of the model has the file's adapters, and those that were added."""
    old = {replica.pid for replica in instance.model("m").replicas}
    write_config(tmp_path, [{**model, "options": {"slots": 7}}], OPEN)
    assert "replaced" in reload(instance)

    def new() -> bool:
        pids = {replica.pid for replica in instance.model("m").replicas}
        return ready(instance) == 2 and not pids & old

    instance.until("two new ones serve", new)
    every_worker_has(instance.url, "added", 2)
    every_worker_has(instance.url, "filed", 2)


def kill(instance: Instance, name: str) -> None:
    pid = instance.replica(name).pid
    os.kill(pid, signal.SIGKILL)

    def back() -> bool:
        replica = instance.replica(name)
        return replica.state == "ready" and replica.pid != pid

    instance.until(f"{name} is back", back)


def reload(instance: Instance) -> str:
    return run("reload", "--run-dir", str(instance.run_dir)).stdout


def ready(instance: Instance) -> int:
    return sum(replica.state == "ready" for replica in instance.model("m").replicas)


def test_a_reload_changes_adapters_in_place(tmp_path: Path) -> None:
    one, two, three = named(tmp_path, "one", "two", "three")
    model = echo("m", replicas=2)
    first = model | {"adapters": [one, two]}
    with Instance.up(tmp_path, [first], server=OPEN) as instance:
        url = instance.until_settled().url
        pids = [replica.pid for replica in instance.model("m").replicas]
        assert load(url, "added", folder(tmp_path, "added")).status_code == 200
        assert load(url, "claimed", folder(tmp_path, "claimed")).status_code == 200
        claimed = {"name": "claimed", "path": folder(tmp_path, "small", transform="lower")}
        write_config(tmp_path, [model | {"adapters": [two, three, claimed]}], OPEN)
        assert "adapters of m changed" in reload(instance)
        want = ["m", "added", "claimed", "three", "two"]
        instance.until("they are others", lambda: sorted(served(url), key=order) == want)
        instance.until("its path has changed", lambda: text(complete(url, "claimed")) == "hello")
        assert [replica.pid for replica in instance.model("m").replicas] == pids
        assert complete(url, "one").status_code == 404
        every_worker_has(url, "three", 2)
        every_worker_has(url, "added", 2)
        assert "nothing to change" in reload(instance)


@pytest.mark.lane("long")
def test_the_name_of_a_removed_one_of_the_file_is_free_for_its_model(tmp_path: Path) -> None:
    """Until a reload, which has what the file names."""
    models = [echo("m") | {"adapters": named(tmp_path, "loud")}, echo("n")]
    with Instance.up(tmp_path, models) as instance:
        url = instance.until_settled().url
        first = state(instance, "loud")
        instance.until("the file's serves", lambda: serves(instance, "loud"))
        where = ("--run-dir", str(instance.run_dir))
        assert run("adapter", "rm", "loud", *where).returncode == 0
        other = folder(tmp_path, "other")
        refused = run("adapter", "add", "loud", other, "--model", "n", *where)
        assert refused.returncode == 2 and "'loud' is taken" in refused.stderr
        added = run("adapter", "add", "loud", other, "--model", "m", *where)
        assert added.returncode == 0, added.stderr
        now = state(instance, "loud")
        assert now is not None and first is not None and now.path == other != first.path
        assert text(complete(url, "loud")) == "HELLO"
        reload(instance)
        instance.until(
            "the file's is back",
            lambda: (
                serves(instance, "loud") and getattr(state(instance, "loud"), "path", "") != other
            ),
        )


def order(name: str) -> tuple[bool, str]:
    return name != "m", name


@pytest.mark.lane("long")
def test_an_adapter_that_fails_is_told_and_its_base_serves(tmp_path: Path) -> None:
    """At the start; one refuses, one takes its worker down. Both are loaded once they are right."""
    wrong, bomb, fine = named(tmp_path, "wrong", "bomb", "fine")
    config = Path(wrong["path"]) / "adapter_config.json"
    config.write_text("no JSON")
    model = echo("m", replicas=2, crash_on_adapter="bomb") | {"adapters": [wrong, bomb, fine]}
    with Instance.up(tmp_path, [model], server=OPEN) as instance:
        url = instance.until_settled().url
        instance.until("fine serves", lambda: serves(instance, "fine") and ready(instance) == 2)
        assert text(complete(url, "m")) == "hello"
        every_worker_has(url, "fine", 2)
        for name, reason in (("wrong", "not valid JSON"), ("bomb", "died while it loaded")):
            refused = complete(url, name)
            assert (refused.status_code, reason in said(refused)) == (503, True)
            why = run("why", name, "--run-dir", str(instance.run_dir)).stdout
            assert "failed" in why
            assert reason in " ".join(why.split())
        unknown = run("why", "nope", "--run-dir", str(instance.run_dir))
        assert "there are: m, wrong, bomb, fine, m/0, m/1, " in unknown.stderr
        assert "not valid JSON" in run("ps", "--run-dir", str(instance.run_dir)).stdout
        assert list(served(url)) == ["m", "fine"]
        config.write_text("{}")
        assert load(url, "wrong", wrong["path"]).status_code == 200
        every_worker_has(url, "wrong", 2)


@pytest.mark.lane("long")
def test_a_load_that_hangs_ends_and_one_that_is_slow_does_not(tmp_path: Path) -> None:
    """A slow load is no stall; the worker of one that hangs is replaced."""
    slow = echo("m", replicas=2, adapter_load_s=1.2, hang_on_adapter="stuck/0", step_s=0.001)
    model = slow | {"stall_timeout_s": 0.5, "load_timeout_s": 3}
    with Instance.up(tmp_path, [model], server=OPEN) as instance:
        url = instance.until_settled().url
        with Traffic(url, ["m"]).flowing() as base:
            assert load(url, "loud", folder(tmp_path, "loud")).status_code == 200
            assert [replica.restarts for replica in instance.model("m").replicas] == [0, 0]
            stuck = load(url, "stuck", folder(tmp_path, "stuck"))
            assert (stuck.status_code, "died while it loaded" in said(stuck)) == (409, True)
            assert "had not loaded the adapter 'stuck' after 3 s" in said(stuck)
        assert not base.failures
        instance.until("it is back", lambda: ready(instance) == 2, within_s=60)
        every_worker_has(url, "loud", 2)
        assert state(instance, "stuck") is None


def test_who_may_load(tmp_path: Path) -> None:
    """With keys an admin's; and an adapter may be used by who may use its base."""
    models = [echo("m") | {"adapters": named(tmp_path, "filed")}, echo("b")]
    path = folder(tmp_path, "loud")
    with Instance.up(tmp_path, models, server=OPEN, sections={"keys": KEYS[:2]}) as instance:
        url = instance.until_settled().url
        assert load(url, "loud", path).status_code == 401
        refused = load(url, "loud", path, USER)
        assert (refused.status_code, "admin: true" in said(refused)) == (403, True)
        ambiguous = load(url, "loud", path, ROOT)
        assert (ambiguous.status_code, "there are: m, b" in said(ambiguous)) == (400, True)
        assert load(url, "loud", path, ROOT, base_model_name="m").status_code == 200
        assert load(url, "bold", path, ROOT, base_model_name="b").status_code == 200
        listed = httpx.get(f"{url}/v1/models", headers=bearer(USER)).json()["data"]
        assert [model["id"] for model in listed] == ["m", "filed", "loud"]
        body = {"model": "loud", "prompt": "x"}
        asked = httpx.post(f"{url}/v1/completions", json=body, headers=bearer(USER))
        assert text(asked) == "X" * 16
        body["model"] = "bold"
        asked = httpx.post(f"{url}/v1/completions", json=body, headers=bearer(USER))
        assert asked.status_code == 403
        assert unload(url, "loud", USER).status_code == 403
        assert unload(url, "loud", ROOT).status_code == 200


@pytest.mark.lane("long")
def test_without_keys_it_takes_the_files_word_and_the_command_line_needs_none(
    tmp_path: Path,
) -> None:
    path = folder(tmp_path, "loud")
    with Instance.up(tmp_path, [echo("m")]) as instance:
        url = instance.until_settled().url
        refused = load(url, "loud", path)
        assert (refused.status_code, "runtime_adapters" in said(refused)) == (403, True)
        where = ("--run-dir", str(instance.run_dir))
        added = run("adapter", "add", "loud", path, *where)
        assert (added.returncode, "loud serves on m" in added.stdout) == (0, True)
        again = run("adapter", "add", "loud", path, *where)
        assert (again.returncode, "already been loaded" in again.stderr) == (2, True)
        assert again.stderr.count("\n") == 1
        assert "letters go through upper" in run("adapter", "ls", *where).stdout
        listed = json.loads(run("adapter", "ls", "--json", *where).stdout)
        assert [one["name"] for one in listed["m"]] == ["loud"]
        assert "letters go through upper" in run("why", "m", *where).stdout
        assert text(complete(url, "loud")) == "HELLO"
        assert run("adapter", "rm", "loud", *where).returncode == 0
        gone = run("adapter", "rm", "loud", *where)
        assert (gone.returncode, "cannot be found" in gone.stderr) == (2, True)
        paths = httpx.get(f"{url}/openapi.json").json()["paths"]
        assert "/v1/load_lora_adapter" in paths


def test_a_stream_goes_on_elsewhere_with_its_adapter(tmp_path: Path) -> None:
    model = echo("m", replicas=2, step_s=0.02) | {"adapters": named(tmp_path, "loud")}
    with Instance.up(tmp_path, [model]) as instance:
        url = instance.until_settled().url
        got = ""
        for text in stream_completion(url, model="loud", prompt="abcd", max_tokens=100):
            got += text
            if len(got) == 10:
                busy = [r for r in instance.model("m").replicas if r.running]
                os.kill((busy or instance.model("m").replicas)[0].pid, signal.SIGKILL)
        assert got == "ABCD" * 25


def test_a_worker_that_starts_again_meanwhile_loads_it_once_it_is_up(tmp_path: Path) -> None:
    model = echo("m", replicas=2, step_s=0.02, load_s=3.0)
    with Instance.up(tmp_path, [model], server=OPEN) as instance:
        url = instance.until_settled().url
        path = folder(tmp_path, "loud")
        assert load(url, "loud", path).status_code == 200

        def replicas() -> tuple[ReplicaStatus, ...]:
            return instance.model("m").replicas

        taken = stream_completion(url, model="loud", prompt="abcd", max_tokens=400)
        next(taken)
        instance.until("one is seen to run it", lambda: any(one.running for one in replicas()))
        answers: list[httpx.Response] = []
        again = threading.Thread(
            target=lambda: answers.append(load(url, "loud", path, load_inplace=True))
        )
        again.start()
        instance.until("it waits for the stream", lambda: not serves(instance, "loud"))
        os.kill(next(one for one in replicas() if not one.running).pid, signal.SIGKILL)
        assert len("".join(taken)) == 399
        again.join()
        assert (answers[0].status_code, answers[0].text[:7]) == (200, "Success")
        instance.until("both serve", lambda: ready(instance) == 2)
        every_worker_has(url, "loud", 2)
        assert sum(one.restarts for one in instance.model("m").replicas) == 1


def test_the_only_worker_that_dies_in_an_exchange_comes_back_with_the_old_one(
    tmp_path: Path,
) -> None:
    """It was waited for the stream, which waited for the worker, until `drain_timeout_s`."""
    server = OPEN | {"drain_timeout_s": 120.0}
    with Instance.up(tmp_path, [echo("m", step_s=0.02)], server=server) as instance:
        url = instance.until_settled().url
        path = folder(tmp_path, "loud")
        assert load(url, "loud", path).status_code == 200
        taken = stream_completion(url, model="loud", prompt="abcd", max_tokens=200)
        next(taken)
        answers: list[httpx.Response] = []
        again = threading.Thread(
            target=lambda: answers.append(load(url, "loud", path, load_inplace=True))
        )
        again.start()
        instance.until("it waits for the stream", lambda: not serves(instance, "loud"))
        os.kill(instance.model("m").replicas[0].pid, signal.SIGKILL)
        assert len("".join(taken)) == 199
        again.join()
        assert answers[0].status_code == 503
        assert "no worker of 'm' is ready" in said(answers[0])
        instance.until("it serves", lambda: serves(instance, "loud"))


def test_nobody_is_ready(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("m", load_s=60)], server=OPEN) as instance:
        instance.until("it answers", lambda: httpx.get(f"{instance.url}/livez").status_code == 200)
        refused = load(instance.url, "loud", folder(tmp_path, "loud"))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert "no worker of 'm' is ready" in said(refused)


@pytest.mark.lane("long")
def test_check_tells_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    for path, words in (
        ("./nowhere", "does not exist"),
        (".", "holds no adapter_config.json"),
        ("here/slip", "there is no folder"),
    ):
        model = echo("m") | {"adapters": [{"name": "x", "path": path}]}
        told = run("check", str(write_config(tmp_path, [model])))
        assert told.returncode == 2
        assert "models[0].adapters[0].path" in told.stderr
        assert words in told.stderr


def test_check_shows_them(tmp_path: Path) -> None:
    model = echo("m") | {"adapters": [{"name": "loud", "path": folder(tmp_path, "loud")}]}
    told = run("check", str(write_config(tmp_path, [model])))
    assert told.returncode == 0, told.stderr
    rows = [line.split() for line in told.stdout.splitlines()]
    assert ["ADAPTER", "MODEL", "PATH"] in rows
    assert ["loud", "m", str(tmp_path / "loud")] in rows


@pytest.mark.lane("long")
def test_who_is_told_that_it_is_loaded_may_ask_any_gateway(tmp_path: Path) -> None:
    path = folder(tmp_path, "x")
    server = {"gateways": 3, **OPEN}
    with Instance.up(tmp_path, [echo("m")], server=server) as instance:
        url = instance.until_settled().url
        for _ in range(12):
            assert load(url, "x", path).status_code == 200
            # a connection of its own each: the kernel deals them to the gateways
            answers = [complete(url, "x") for _ in range(4)]
            assert [answer.status_code for answer in answers] == [200] * 4
            assert unload(url, "x").status_code == 200
            assert complete(url, "x").status_code == 404


@pytest.mark.lane("long")
def test_names_of_workers_and_paths_that_are_none_are_refused(tmp_path: Path) -> None:
    path = folder(tmp_path, "x")
    with Instance.up(tmp_path, [echo("m")], server=OPEN) as instance:
        url = instance.until_settled().url
        assert "is the name of a worker" in said(load(url, "m/0", path))
        assert "no path has" in said(load(url, "x", f"{path}\0"))
        assert load(url, "x", path).status_code == 200
        again = run("adapter", "add", "x", path, "--run-dir", str(instance.run_dir))
        assert again.returncode == 2
        assert "say --in-place" in again.stderr
