"""What servekit shows of GPUs: /metrics, `servekit ps` and `top`, and the dashboard's page.

All of it as whoever looks gets it: over HTTP, from the command line, and drawn on a terminal.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from servekit.config import keys
from servekit.gateway.ui.pages.language import Say
from servekit.gateway.ui.widgets import machine_tables
from tests.gpu.nvml import Gpus, Table, show_tails
from tests.integration.instance import Instance
from tests.polling import poll

HAS_UI = importlib.util.find_spec("gradio") is not None
WITHIN_S = 30.0
ADMIN, HASH = keys.new_key("boss")
AUTH = {"authorization": f"Bearer {ADMIN}"}
ESCAPES = re.compile(r"\x1b[\[(][0-9;?]*[A-Za-z]")
SERIES = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(slots=True)
class Watched:
    """An instance, and the ways of looking at it. `keep` is where answers are left."""

    instance: Instance
    gpus: Gpus
    table: Table
    keep: Path | None
    url: str = ""

    def save(self, name: str, text: str) -> str:
        if self.keep is not None:
            self.keep.mkdir(parents=True, exist_ok=True)
            (self.keep / name).write_text(text)
        return text

    # ---- what is shown

    def metrics(self, name: str = "metrics.txt") -> dict[tuple[str, str, str], float]:
        """Of GPUs: by metric, worker (or "") and UUID."""
        answer = httpx.get(f"{self.url}/metrics", headers=AUTH, timeout=30)
        assert answer.status_code == 200, answer.text
        found = {}
        for line in self.save(name, answer.text).splitlines():
            if "gpu_" in line and (series := SERIES.match(line)):
                labels = dict(LABEL.findall(series[2] or ""))
                found[series[1], labels.get("worker", ""), labels["uuid"]] = float(series[3])
        return found

    def ps(self, name: str = "ps.json") -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.save(name, self.command("ps", "--json")))
        return found

    def command(self, *args: str) -> str:
        command = [sys.executable, "-m", "servekit", *args, "--run-dir", str(self.run_dir)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def run_dir(self) -> Path:
        return self.instance.run_dir

    def dashboard(self, name: str = "dashboard") -> dict[str, str]:
        """The parts of the page by their ids, filled as for a browser that has just come.

        Where Gradio is not installed, what it would be given of GPUs.
        """
        if not HAS_UI:
            status = self.instance.status()
            html = machine_tables.render_gpus(status.gpus, status.models, Say("en"))
            return {"sk-gpus": self.save(f"{name}.html", f"<meta charset=utf-8>{html}")}
        with httpx.Client(base_url=f"{self.url}/ui", headers=AUTH, timeout=60) as client:
            page = client.get("/config").json()
            parts = {
                one["id"]: one["props"]["elem_id"]
                for one in page["components"]
                if one["props"].get("elem_id") in ("sk-figures", "sk-gpus", "sk-machine")
            }
            fill = next(
                one
                for one in page["dependencies"]
                if parts.keys() <= set(one["outputs"]) and not one["inputs"]
            )
            body = {"data": [], "fn_index": fill["id"], "session_hash": "watch"}
            answer = client.post(f"{page['api_prefix']}/run/predict", json=body)
        assert answer.status_code == 200, answer.text
        data = dict(zip(fill["outputs"], answer.json()["data"], strict=True))
        self.save(f"{name}.json", json.dumps(answer.json(), indent=1))
        found = {parts[id]: str(data[id]) for id in parts}
        self.save(f"{name}.html", "<meta charset=utf-8>" + "".join(found.values()))
        return found

    # ---- looking

    def row(self, what: str, measured: object, ok: bool | None = None) -> None:
        self.table.row(what, measured, ok)

    def until(self, what: str, probe: Callable[[], tuple[object, bool]]) -> None:
        """A row of what it shows once it is as it should be, or as it is after WITHIN_S."""
        deadline = time.monotonic() + WITHIN_S
        while True:
            try:
                shown, ok = probe()
            except Exception as error:
                shown, ok = f"{type(error).__name__}: {str(error)[-300:]}", False
            if ok or time.monotonic() > deadline:
                break
            time.sleep(0.2)  # between two looks
        self.row(what, shown, ok)
        if not ok:
            show_tails(self.instance.log_path)


# ---------------------------------------------------------------- read


@dataclass(slots=True)
class Card:
    """One GPU as the dashboard shows it; bytes, and percent."""

    index: int
    used: float
    busy: int
    held: dict[str, float]

    def __str__(self) -> str:
        held = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in self.held.items())
        return f"GPU {self.index} {self.used / 2**30:.1f} GiB, {self.busy} %: {held}"


def gpu_cards(watched: Watched, name: str = "dashboard") -> list[str]:
    return re.findall(r'<section class="sk-gpu">.*?</section>', watched.dashboard(name)["sk-gpus"])


def read_card(html: str) -> Card:
    index = re.search(r"<h3>GPU (\d+)", html)
    full = re.search(r'<p class="sk-quiet">([\d.]+ [MG]iB) / ', html)
    busy = re.search(r"(\d+) % busy", html)
    assert index and full, html
    items = re.findall(r"</span>([^<]*) <b>([\d.]+ [MG]iB)</b></li>", html)
    held = {name: in_bytes(size) for name, size in items}
    return Card(int(index[1]), in_bytes(full[1]), int(busy[1]) if busy else 0, held)


def in_bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"MiB": 2**20, "GiB": 2**30}[unit]


def frame(run_dir: Path, height: int = 30, width: int = 160) -> str:
    """The second picture that it draws, and none of what moves the cursor; q ends it."""
    ours, theirs = pty.openpty()
    size = {"COLUMNS": str(width), "LINES": str(height), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.on_terminal", "top", "--run-dir", str(run_dir)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, **size},
    )
    os.close(theirs)
    raw = ""

    def drawn() -> bool:
        nonlocal raw
        if select.select([ours], [], [], 0.1)[0]:
            raw += os.read(ours, 2**16).decode(errors="replace")
        return raw.count("q quit") >= 2

    try:
        poll("top has drawn twice", drawn, WITHIN_S)
        os.write(ours, b"q")
        process.wait(30)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    pictures = ESCAPES.sub("", raw).split("q quit")
    return pictures[1].replace("\r", "").strip("\n") + "\n"
