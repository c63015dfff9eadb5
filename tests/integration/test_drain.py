"""What may happen while an instance drains, a long stream under way."""

from __future__ import annotations

import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.integration.instance import Instance, echo, write_config
from tests.integration.test_faults_supervisor import cli

LENGTH = 150  # 3 s


def stream(url: str, begun: threading.Event) -> tuple[str, int]:
    """The text of a streamed answer, and the tokens of its usage; `begun` when some is there."""
    text, tokens = "", 0
    body = {"model": "slow", "prompt": "abc", "max_tokens": LENGTH, "stream": True}
    options = {"stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{url}/v1/completions", json=body | options, timeout=30) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                text += "".join(choice["text"] for choice in event["choices"])
                tokens += (event.get("usage") or {}).get("completion_tokens", 0)
                begun.set()
    return text, tokens


@pytest.mark.parametrize("changed", [False, True])
def test_a_reload_while_it_drains_is_refused_and_disturbs_nothing(
    tmp_path: Path, changed: bool
) -> None:
    with (
        ThreadPoolExecutor(1) as pool,
        Instance.up(tmp_path, [echo("slow", step_s=0.02)]) as instance,
    ):
        begun = threading.Event()
        under_way = pool.submit(stream, instance.until_settled().url, begun)
        assert begun.wait(10)
        pid = instance.replica("slow/0").pid
        instance.signal(signal.SIGTERM)
        instance.until("it drains", lambda: instance.status().draining)
        if changed:
            write_config(tmp_path, [echo("slow", step_s=0.01), echo("new")])
        asked = cli(instance, "reload")
        sentence = "servekit is shutting down; there is nothing to reload"
        assert (asked.returncode, asked.stdout, asked.stderr) == (1, "", f"{sentence}\n")
        for refused in (2, 3):
            instance.signal(signal.SIGHUP)
            told = lambda: instance.log.count(f"reason='{sentence}'") == refused  # noqa: B023, E731
            instance.until("a hangup is refused as well, and said to be", told)
        assert not under_way.done(), "all that was asked while it was under way"
        assert [model.name for model in instance.status().models] == ["slow"]
        assert instance.replica("slow/0").pid == pid
        assert under_way.result(30) == (("abc" * LENGTH)[:LENGTH], LENGTH)
        assert instance.wait() == 0
        assert instance.survivors() == []
