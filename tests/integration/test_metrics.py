"""/metrics of a live instance: right, the same at every gateway, and never backwards.

Two gateways, a worker and a gateway that are killed under way, made-up GPUs, and a Prometheus that
scrapes all the time and goes by the alarms of `deploy/`. The tests are in the order of a story.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from servekit.metrics import METRICS
from tests.api_keys import new_key
from tests.integration.instance import Instance, bearer, echo
from tests.integration.made_up_gpus import GIB, MadeUpGpus, on_gpu
from tests.integration.test_adapters import named
from tests.integration.test_remote import free_port
from tests.polling import poll
from tests.unit.test_metrics import CONFIG, DASHBOARD, RULES, expressions, promtool, rules

pytestmark = pytest.mark.timeout(120)

PROMETHEUS = shutil.which("prometheus")
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None, reason="needs Debian's package prometheus"
)
SCRAPER, SCRAPER_HASH = new_key("scraper")
TEAM, TEAM_HASH = new_key("team")
KEYS = [
    {"name": "scraper", "hash": SCRAPER_HASH, "metrics": True},
    {"name": "team", "hash": TEAM_HASH},
]
MAX_TOKENS = 12


class Live:
    """The instance, and what was scraped of it last."""

    def __init__(self, instance: Instance, gpus: MadeUpGpus) -> None:
        self.instance = instance
        self.gpus = gpus
        self.url = instance.url
        # each request on a connection of its own, so at either gateway
        self.http = httpx.Client(timeout=30, limits=httpx.Limits(max_keepalive_connections=0))
        self._last: dict[tuple[str, frozenset[Any]], float] = {}

    def page(self, **headers: str) -> httpx.Response:
        answer = self.http.get(f"{self.url}/metrics", headers=bearer(SCRAPER) | headers)
        assert answer.status_code == 200, answer.text
        return answer

    def scrape(self) -> dict[tuple[str, frozenset[Any]], float]:
        """All series; fails where a counter is lower than it was, or gone."""
        families = list(text_string_to_metric_families(self.page().text))
        counters: dict[tuple[str, frozenset[Any]], float] = {}
        found: dict[tuple[str, frozenset[Any]], float] = {}
        for family in families:
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                assert key not in found
                found[key] = sample.value
                if family.type != "gauge":
                    counters[key] = sample.value
        for key, value in self._last.items():
            assert counters.get(key, -1.0) >= value, key
        self._last = counters
        return found

    def value(self, name: str, **labels: str) -> float:
        """The sum of the series with these labels."""
        return self._value(name, labels)

    def _value(self, name: str, labels: Mapping[str, str]) -> float:
        wanted = set(labels.items())
        return sum(n for (key, have), n in self.scrape().items() if key == name and wanted <= have)

    def until(self, expected: float, name: str, **labels: str) -> None:
        """Gateways tell once a second."""
        seen: list[float] = []

        def there() -> bool:
            seen.append(self._value(name, labels))
            return seen[-1] == expected

        try:
            poll(f"{name}{labels} is {expected}", there, within_s=60)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {seen[-1]}") from None

    def ask(self, **body: Any) -> httpx.Response:
        body = {"model": "a", "prompt": "hello", "max_tokens": MAX_TOKENS, **body}
        return self.http.post(f"{self.url}/v1/completions", json=body, headers=bearer(TEAM))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("metrics")
    gpus = MadeUpGpus(folder, 2)
    cached: dict[str, Any] = {"prefix_cache_tokens": 4096, "step_s": 0.005, "slots": 4}
    models = [
        {**echo("a", replicas=2, **cached), "device": "cpu", "adapters": named(folder, "loud")},
        on_gpu("g", "40%", 30),
        {**echo("s"), "device": "cpu", "replicas": {"min": 1, "max": 2}},
    ]
    server, sections = {"gateways": 2}, {"keys": KEYS}
    with Instance.up(folder, models, server=server, sections=sections, env=gpus.env) as instance:
        instance.until_settled()
        live = Live(instance, gpus)
        with live.http:
            yield live


@pytest.fixture(scope="module", autouse=True)
def prometheus(live: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asking | None]:
    """Prometheus by the files of `deploy/`, but for the address, the key and how often."""
    if PROMETHEUS is None:
        yield None
        return
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES)]
    scrape = config["scrape_configs"][0]
    scrape["static_configs"] = [{"targets": [live.url.removeprefix("http://")]}]
    (folder / "key").write_text(SCRAPER)
    scrape["authorization"] = {"credentials_file": str(folder / "key")}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{port}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env={"PATH": os.environ["PATH"], "GOMAXPROCS": "1"},
        )
    try:
        asking = Asking(url)
        with asking.http:
            poll("it has scraped once, before anything happens", asking.has_scraped, 30)
            yield asking
    finally:
        process.terminate()
        process.wait(20)


class Asking:
    """Prometheus' own API."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=20)

    def __call__(self, path: str, **params: str) -> Any:
        body = self.http.get(f"/api/v1/{path}", params=params).json()
        assert body["status"] == "success", f"{params}: {body}"
        return body["data"]

    def has_scraped(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            if self.http.get("/-/ready").status_code == 200:
                return bool(self("query", query="servekit_worker_restarts_total")["result"])
        return False


# ---------------------------------------------------------------- the story


def test_all_requests_are_counted_by_whom_of_what_and_how_they_ended(live: Live) -> None:
    prompt_tokens = completion_tokens = 0
    for number in range(8):
        answer = live.ask(stream=number % 2 == 0, stream_options={"include_usage": True})
        line = answer.text if number % 2 else answer.text.split("data: ")[-2]
        usage = json.loads(line)["usage"]
        prompt_tokens += usage["prompt_tokens"]
        completion_tokens += usage["completion_tokens"]
    assert live.ask(model="loud").json()["choices"][0]["text"] == "HELLOHELLOHE"
    assert live.ask(model="no-such-model").status_code == 404
    assert live.http.post(f"{live.url}/v1/completions", json={}).status_code == 401

    of = {"model": "a", "adapter": "", "key": "team"}
    live.until(8, "servekit_requests_total", outcome="length", status="200", **of)
    live.until(1, "servekit_requests_total", model="a", adapter="loud", key="team")
    not_found = {"model": "", "outcome": "model_not_found", "status": "404"}
    live.until(1, "servekit_requests_total", key="team", **not_found)
    live.until(prompt_tokens, "servekit_prompt_tokens_total", **of)
    live.until(completion_tokens, "servekit_completion_tokens_total", **of)
    live.until(9, "servekit_http_requests_total", route="/v1/completions", status="200")
    live.until(1, "servekit_http_requests_total", route="/v1/completions", status="404")
    live.until(1, "servekit_http_requests_total", route="/v1/completions", status="401")
    kind = {"gen_ai_operation_name": "text_completion", "gen_ai_request_model": "a"}
    live.until(8, "gen_ai_server_time_to_first_token_seconds_count", **kind)
    live.until(8, "gen_ai_server_time_per_output_token_seconds_count", **kind)
    live.until(8, "gen_ai_server_request_duration_seconds_count", error_type="", **kind)
    live.until(prompt_tokens, "gen_ai_client_token_usage_sum", gen_ai_token_type="input", **kind)
    live.until(9, "servekit_queue_wait_seconds_count", model="a")
    text = live.page().text
    assert TEAM not in text and SCRAPER not in text and "no-such-model" not in text


def test_what_a_prompt_had_in_the_cache_is_counted(live: Live) -> None:
    cached = 0
    for _ in range(4):  # two replicas, and two gateways of which each chooses for itself
        usage = live.ask(prompt="once upon a time " * 16, max_tokens=2).json()["usage"]
        cached += usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    assert cached > 0
    live.until(cached, "servekit_cached_prompt_tokens_total", model="a")
    live.until(8 + 1 + 4, "servekit_requests_total", model="a")


def test_both_formats_and_promtool_agree(live: Live) -> None:
    opened = live.page(accept="application/openmetrics-text; version=1.0.0")
    assert opened.headers["content-type"].startswith("application/openmetrics-text")
    assert opened.text.endswith("# EOF\n")
    assert "# TYPE servekit_requests counter" in opened.text
    if shutil.which("promtool"):
        assert promtool("check", "metrics", stdin=live.page().content) == ""


def test_each_gateway_tells_the_whole(live: Live) -> None:
    seen = [live.value("servekit_requests_total", model="a")]
    for gateway in live.instance.status().gateways:
        os.kill(gateway.pid, signal.SIGSTOP)  # so the other one answers
        try:
            seen.append(live.value("servekit_requests_total", model="a"))
        finally:
            os.kill(gateway.pid, signal.SIGCONT)
    assert len(set(seen)) == 1


def test_a_worker_killed_under_streams_is_a_restart_and_continuations(live: Live) -> None:
    texts: list[str] = []

    def stream() -> None:
        lines = live.ask(stream=True, max_tokens=300).text.split("data: ")
        events = [json.loads(one) for one in lines[1:-1]]
        texts.append("".join(one["choices"][0]["text"] for one in events))

    before = live.value("servekit_completion_tokens_total", model="a")
    threads = [threading.Thread(target=stream) for _ in range(6)]
    for thread in threads:
        thread.start()
    poll("its streams run", lambda: live.value("servekit_worker_running", worker="a/0"), 10)
    os.kill(live.instance.replica("a/0").pid, signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert texts == ["hello" * 60] * 6
    live.until(1, "servekit_worker_restarts_total", worker="a/0")
    live.until(0, "servekit_worker_restarts_total", worker="a/1")
    live.until(before + 6 * 300, "servekit_completion_tokens_total", model="a")
    again = live.value("servekit_continuations_total", model="a")
    again += live.value("servekit_retries_total", model="a")
    assert 1 <= again <= 6
    live.until(2, "servekit_workers", model="a", state="ready")


def test_a_gateway_killed_takes_nothing_back(live: Live) -> None:
    before = live.value("servekit_requests_total", model="a")
    for index in (0, 1):
        pid = live.instance.gateway(index).pid
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(httpx.TransportError):  # what it had accepted is cut off
            live.scrape()
        live.until(1, "servekit_gateway_restarts_total", gateway=f"gateway/{index}")
        live.until(1, "servekit_gateway_up", gateway=f"gateway/{index}")
    for _ in range(5):
        assert live.ask().status_code == 200
    live.until(before + 5, "servekit_requests_total", model="a")


def test_memory_on_gpus_by_worker_and_device_and_what_strays(live: Live) -> None:
    on = {"model": "g", "worker": "g/0"}
    here = next(gpu for gpu in live.instance.replica("g/0").gpus)
    live.until(30 * GIB, "servekit_worker_gpu_memory_bytes", uuid=here, **on)
    live.until(40 * GIB, "servekit_worker_gpu_memory_claimed_bytes", uuid=here, **on)
    live.until(2 * 100 * GIB, "servekit_gpu_memory_total_bytes")
    live.until(0, "servekit_worker_gpu_memory_stray_bytes")
    live.gpus.hold({live.instance.replica("a/1").pid: 0.5})
    live.instance.status()  # has them read at once
    live.until(GIB, "servekit_worker_gpu_memory_stray_bytes", worker="a/1")
    live.until(0.5 * GIB, "servekit_worker_gpu_memory_stray_bytes", worker="a/1", gpu="1")
    live.gpus.hold({})
    live.instance.status()
    live.until(0, "servekit_worker_gpu_memory_stray_bytes")


# ---------------------------------------------------------------- Prometheus


@needs_prometheus
def test_prometheus_scrapes_it_and_saw_no_counter_fall(live: Live, prometheus: Asking) -> None:
    def target() -> Any:
        return prometheus("targets")["activeTargets"][0]

    poll("it is scraped", lambda: target()["health"] == "up", 20)
    assert target()["lastError"] == ""
    for name in ("servekit_requests_total", "servekit_worker_restarts_total"):
        (total,) = prometheus("query", query=f"sum({name})")["result"]
        assert float(total["value"][1]) > 0
    for metric in METRICS:
        if metric.kind == "gauge":
            continue
        for end in ("_count", "_sum", "_bucket") if metric.kind == "histogram" else ("",):
            fell = f"resets({metric.name}{end}[30m]) > 0"
            assert prometheus("query", query=fell)["result"] == [], fell


@needs_prometheus
def test_the_alarms_of_what_happened_go_off_and_no_others(live: Live, prometheus: Asking) -> None:
    def firing() -> set[str]:
        alerts = prometheus("alerts")["alerts"]
        return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}

    expected = {"ServekitWorkerDied", "ServekitGatewayDied"}
    poll("both go off", lambda: firing() >= expected, 20)
    assert firing() == expected
    groups = prometheus("rules")["groups"]
    found = [rule for group in groups for rule in group["rules"]]
    assert len(found) == len(rules())
    assert {rule["health"] for rule in found} == {"ok"}, found


#: What this instance has nothing to show of: no model comes and goes, nothing was refused, and no
#: engine speculates.
_NOTHING_TO_SHOW = (
    *("Where models are", "instance", "model", "Proposed tokens that were accepted"),
)


@needs_prometheus
def test_every_panel_of_the_dashboard_shows_something(live: Live, prometheus: Asking) -> None:
    live.ask(stream=True)
    alarms = {rule["alert"] for rule in rules()}
    for where, expression in expressions():
        if where in alarms or where in _NOTHING_TO_SHOW:
            continue
        for variable, value in (("$instance", ".*"), ("$model", ".*"), ("$__rate_interval", "2m")):
            expression = expression.replace(variable, value)

        def shows(query: str = expression) -> bool:  # a rate needs two scrapes
            return bool(prometheus("query", query=query)["result"])

        poll(f"{where} shows {expression}", shows, 20)
    assert json.loads(DASHBOARD.read_text())["title"] == "servekit"
