"""`servekit bench` against real instances, whose speed and whose faults are known."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest

from servekit.bench.output.result import result_schema
from tests.integration import certificates
from tests.integration.instance import PROGRAM, Instance, echo
from tests.polling import poll

STEP_S = 0.02
TOKEN_S = 0.001
KEY = "sk-very-secret-key"

MODELS = [
    echo("paced", step_s=STEP_S, prompt_token_s=TOKEN_S, slots=16),
    echo("fast"),
    {**echo("narrow", step_s=0.005, slots=1), "max_queue": 1},
]


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    with Instance.up(tmp_path_factory.mktemp("bench"), MODELS) as instance:
        instance.until_settled()
        yield instance


def bench(*args: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, "bench", *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(env or {})},
    )


def measured(instance: Instance, *args: str, env: Mapping[str, str] | None = None) -> Any:
    """What the command finds, as JSON that is as its schema says."""
    told = bench(instance.url, "--json", "-", *args, env=env)
    assert told.stdout, told.stderr
    found = json.loads(told.stdout)
    jsonschema.validate(found, result_schema())
    return found


@contextlib.contextmanager
def started(*args: str, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*PROGRAM, "bench", *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


# ---------------------------------------------------------------- known speeds


@pytest.mark.lane("bench")
def test_it_finds_the_speed_that_the_server_was_told(instance: Instance) -> None:
    load = ("-c", "1", "-n", "6", "--prompt-tokens", "100", "--output-tokens", "20")
    found = measured(instance, "-m", "paced", *load, "--slo", "itl=1,e2e=0.3")
    (run,) = found["runs"]
    assert (run["completed"], run["failed"], run["tokens_by"]) == (6, 0, "usage")
    assert run["prompt_tokens"]["p50"] == 100
    assert (run["output_tokens"]["p50"], run["output_tokens"]["max"]) == (20, 20)
    assert run["ttft_s"]["p50"] == pytest.approx(100 * TOKEN_S + STEP_S, abs=0.02)
    assert run["itl_s"]["p50"] == pytest.approx(STEP_S, abs=0.004)
    assert run["itl_s"]["count"] == 6 * 19
    assert run["tpot_s"]["p50"] == pytest.approx(STEP_S, abs=0.004)
    assert run["e2e_s"]["p50"] == pytest.approx(100 * TOKEN_S + 20 * STEP_S, abs=0.06)
    assert run["requests_per_s"] == pytest.approx(1 / run["e2e_s"]["mean"], rel=0.1)
    assert run["output_tokens_per_s"] == pytest.approx(20 * run["requests_per_s"], rel=0.01)
    assert run["goodput"]["share"] == 0, "0.5 s are more than 0.3"


@pytest.mark.lane("bench")
def test_loads_by_turns_in_several_processes(instance: Instance) -> None:
    found = measured(
        instance, "-m", "paced", "-c", "1,4", "-d", "1s", "--processes", "2", "--prompt-tokens", "5"
    )
    one, four = found["runs"]
    assert [one["client"]["processes"], four["client"]["processes"]] == [1, 2]
    assert four["requests_per_s"] == 0.0, "128 tokens take 2.6 s"
    assert four["completed"] == 4, "but they are waited for"
    assert four["output_tokens_per_s"] == pytest.approx(4 / STEP_S, rel=0.3)
    assert one["output_tokens_per_s"] == pytest.approx(1 / STEP_S, rel=0.3)


@pytest.mark.lane("bench")
def test_an_open_loop_has_the_rate_that_was_asked_for(instance: Instance) -> None:
    asked = ("-m", "fast", "--rate", "200", "-d", "2s", "--output-tokens", "4..8")
    (run,) = measured(instance, *asked, "--prompt-tokens", "normal:30,10")["runs"]
    assert run["rate"] == 200
    assert run["completed"] == pytest.approx(400, abs=100)  # five deviations
    assert run["requests_per_s"] == pytest.approx(run["completed"] / 2, rel=0.02)
    assert run["client"]["late_p99_s"] is not None
    assert 4 <= run["output_tokens"]["percentiles"][0] < run["output_tokens"]["max"] <= 8


@pytest.mark.lane("long")
@pytest.mark.parametrize(
    "how",
    [
        ("--no-stream",),
        ("--api", "completions"),
        ("--api", "completions", "--no-stream"),
        ("--api", "embeddings"),
        ("--turns", "2..3", "--shared-prefix-tokens", "40", "--prefixes", "2"),
        ("--ignore-eos", "--extra", '{"temperature": 1, "seed": 3}'),
    ],
)
def test_every_way_of_asking(instance: Instance, how: tuple[str, ...]) -> None:
    asked = ("-m", "fast", "-n", "20", "--prompt-tokens", "30", "--output-tokens", "6")
    (run,) = measured(instance, *asked, *how)["runs"]
    assert (run["completed"], run["failed"]) == (20, 0), run["errors"]
    assert run["prompt_tokens"]["p50"] >= 30
    generates = "embeddings" not in how
    assert (run["output_tokens"] is not None) == generates
    assert not generates or run["output_tokens"]["p50"] == 6
    assert (run["ttft_s"] is not None) == (generates and "--no-stream" not in how)


def test_a_dataset(instance: Instance, tmp_path: Path) -> None:
    file = tmp_path / "asks.jsonl"
    chat = {"messages": [{"role": "user", "content": "abcd"}], "max_tokens": 3}
    file.write_text(f'{{"prompt": "ab"}}\n{json.dumps(chat)}\n')
    asked = ("-m", "fast", "-n", "8", "--dataset", str(file), "--output-tokens", "5")
    (run,) = measured(instance, *asked)["runs"]
    assert run["prompt_tokens"]["mean"] == pytest.approx(3)
    assert run["output_tokens"]["mean"] == pytest.approx(4)


# ---------------------------------------------------------------- what people see


def test_a_table_and_plain_lines(instance: Instance, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    args = ("--run-dir", str(instance.run_dir), "-m", "fast", "-n", "50", "--json", str(file))
    told = bench(*args, "--prompt-tokens", "10")
    assert told.returncode == 0, told.stderr
    assert f"{instance.url}/v1, fast: chat, streams" in told.stdout, "found by its run directory"
    assert "time to first token" in told.stdout
    assert told.stderr.startswith("8 at once: 50 requests in ")
    assert "\x1b" not in told.stdout + told.stderr
    jsonschema.validate(json.loads(file.read_text()), result_schema())


def test_the_schema_is_printed() -> None:
    assert json.loads(bench("--schema").stdout) == result_schema()


# ---------------------------------------------------------------- what is refused


def refused(*args: str, env: Mapping[str, str] | None = None, code: int = 2) -> str:
    told = bench(*args, env=env)
    assert told.returncode == code, told.stdout + told.stderr
    assert told.stdout == "" and "Traceback" not in told.stderr
    return told.stderr


@pytest.mark.lane("long")
def test_bad_input_is_a_sentence(instance: Instance, tmp_path: Path) -> None:
    url = instance.url
    there = "there are: paced, fast, narrow"
    assert f"no model 'nope'; {there}" in refused(url, "-m", "nope")
    assert there in refused(url)
    assert "--prompt-tokens 'few'" in refused(url, "-m", "fast", "--prompt-tokens", "few")
    assert "FILE.png or FILE.html" in refused(url, "-m", "fast", "--plot", "a.gif")
    assert "there is no folder" in refused(url, "-m", "fast", "--json", "no/such/a.json")
    assert "nothing answers at http://127.0.0.1:1/v1" in refused("127.0.0.1:1", code=1)
    nothing = refused("--run-dir", str(tmp_path), code=1)
    assert "no servekit runs in" in nothing and "a URL as argument measures" in nothing


def test_what_the_model_refuses_is_told_at_once(instance: Instance) -> None:
    said = refused(instance.url, "-m", "fast", "--extra", '{"temperature": "hot"}', code=1)
    assert "HTTP 400" in said and "temperature" in said


# ---------------------------------------------------------------- faults


def test_a_full_queue_is_counted_and_does_not_end_it(instance: Instance) -> None:
    asked = ("-m", "narrow", "-c", "6", "-n", "30", "--output-tokens", "20")
    (run,) = measured(instance, *asked, "--prompt-tokens", "5", "--warmup", "0")["runs"]
    assert [error["kind"] for error in run["errors"]] == ["http 429"]
    assert run["completed"] > 0
    assert run["completed"] + run["failed"] == 30
    assert "wait for 'narrow' already" in run["errors"][0]["message"]


@pytest.mark.lane("bench")
def test_a_server_that_dies_under_it(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("a", step_s=0.05)]) as instance:
        instance.until_settled()
        args = (instance.url, "--json", "-", "-c", "4", "-n", "40", "--output-tokens", "200")
        with started(*args, "--warmup", "0") as process:
            until_under_way(instance, 4)
            instance.process.kill()
            out, err = process.communicate(timeout=30)
    (run,) = json.loads(out)["runs"]
    assert process.returncode == 1, "nothing was answered"
    assert (run["completed"], run["failed"]) == (0, 40)
    kinds = {error["kind"]: error["count"] for error in run["errors"]}
    assert kinds == {"cut": 4, "connect": 36}, err
    assert run["output_tokens_per_s"] > 0, "what had come before"


def until_under_way(instance: Instance, count: int) -> None:
    def running() -> bool:
        return instance.status().models[0].replicas[0].running >= count

    instance.until(f"{count} are under way", running)


def test_ctrl_c_tells_what_was_measured(instance: Instance) -> None:
    asked = ("-m", "paced", "-c", "3", "-d", "60s", "--output-tokens", "10")
    args = (instance.url, *asked, "--prompt-tokens", "5", "--json", "-", "--warmup", "0")
    with started(*args) as process:
        us = psutil.Process(process.pid)
        children = poll("clients run", us.children, within_s=60)
        before = answered(instance)
        instance.until("some are answered", lambda: answered(instance) > before + 10)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    (run,) = json.loads(out)["runs"]
    assert (process.returncode, run["interrupted"]) == (0, True), err
    assert run["completed"] > 0 and run["failed"] == 0
    assert run["unfinished"] == 3
    assert run["duration_s"] < 30
    assert run["output_tokens_per_s"] == pytest.approx(3 / STEP_S, rel=0.4)
    assert not any(child.is_running() for child in children)


def answered(instance: Instance) -> int:
    return sum(gateway.requests for gateway in instance.status().gateways)


@pytest.mark.lane("long")
def test_clients_end_when_their_parent_is_killed(instance: Instance) -> None:
    with started(instance.url, "-m", "paced", "-d", "60s") as process:
        children = poll("clients run", psutil.Process(process.pid).children, within_s=60)
        process.kill()
        process.wait()
        poll("they are gone", lambda: not any(map(runs, children)), within_s=30)


def runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


# ---------------------------------------------------------------- keys and TLS


@pytest.mark.lane("bench")
def test_keys_and_tls(tmp_path: Path) -> None:
    certificate, private = certificates.make(tmp_path)
    server = {"tls": {"certificate": str(certificate), "key": str(private)}}
    keys = [{"name": "a", "environment": "BENCH_TEST_KEY"}]
    with Instance.up(
        tmp_path,
        [echo("a", step_s=0.01)],
        server=server,
        sections={"keys": keys},
        env={"BENCH_TEST_KEY": KEY},
    ) as instance:
        instance.until_settled()
        url, trust = instance.url, ("--ca", str(certificate))
        assert url.startswith("https://")
        assert "its certificate is not trusted" in refused(url, code=1)
        assert "wants a key (HTTP 401" in refused(url, *trust, code=1)
        wrong = refused(url, *trust, env={"OPENAI_API_KEY": "wrong"}, code=1)
        assert "wants another key" in wrong and "'wrong'" not in wrong
        said = refused(url, *trust, "--api-key", KEY)
        assert "name of an environment variable" in said and KEY not in said
        args = ("-n", "12", "--output-tokens", "5", "--prompt-tokens", "8", "--api-key", "MINE")
        for how in (trust, ("--insecure",)):
            (run,) = measured(instance, *how, *args, env={"MINE": KEY})["runs"]
            assert (run["completed"], run["failed"]) == (12, 0), run["errors"]
        no_process_listing_shows_the_key(url, *trust, "--api-key", "MINE", "-d", "30s")


def no_process_listing_shows_the_key(*args: str) -> None:
    with started(*args, env={"MINE": KEY}) as process:
        us = psutil.Process(process.pid)
        children = poll("clients run", us.children, within_s=60)
        assert not [word for one in (us, *children) for word in one.cmdline() if KEY in word]
