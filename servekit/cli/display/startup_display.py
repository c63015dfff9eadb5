"""The output of `servekit up`.

On a terminal, a live picture of the start with the log above it, then a banner and plain log lines;
elsewhere plain lines from the beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import structlog
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from servekit.cli.display.tables import progress_text, replica_note, state_text
from servekit.config.engines.options import KINDS
from servekit.log_events import OUTPUT
from servekit.logging_config import PatientHandler, is_writable
from servekit.protocol.messages import Link, ModelStatus, Progress, Refused, ReplicaStatus, Status
from servekit.sanitize import strip_controls

log: Any = structlog.get_logger("servekit")

#: Minimum interval between two drawings of the picture.
_DRAW_EVERY_S = 0.1
#: Minimum interval between two progress lines of a replica, without a terminal.
_TELL_EVERY_S = 5.0
_LEVELS = ("debug", "info", "warning", "error", "critical", "exception")
#: Fields of a child's log line that this process sets, or that the logger reserves.
_OURS = frozenset(
    {"event", "level", "logger", "timestamp", "process", "component", "child", "self"}
    | {"args", "exc_info", "stack_info", "stacklevel", "extra"}
)


@dataclass(frozen=True, slots=True)
class BannerFacts:
    """Facts for the banner that are not in the status."""

    ui: bool  # the UI is served
    stop: str  # the command that stops this instance
    log: str = ""  # the log of an instance in the background


@contextlib.contextmanager
def watch(words: BannerFacts, *, quiet: bool, as_json: bool = False) -> Iterator[Display]:
    """Provide a display while an instance lives; with JSON it only logs."""
    console = _Console(stderr=True, markup=False, emoji=False, highlight=False)
    picture = _Picture(console) if console.is_terminal and not (quiet or as_json) else None
    display = Display(console, picture, words, quiet=quiet, as_json=as_json)
    try:
        yield display
    finally:
        display.close()


class _Console(Console):
    """A console that is silent once nobody reads it any more; rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Display:
    """Shows the supervisor's state, and what its children write.

    `create_link` makes the one-time link that follows the banner; without it there is none.
    """

    create_link: Callable[[], Link | Refused] | None = None

    def __init__(
        self,
        console: Console,
        picture: _Picture | None,
        words: BannerFacts,
        *,
        quiet: bool,
        as_json: bool = False,
    ) -> None:
        self._words = words
        self._as_json = as_json
        self._console = console
        self._picture = picture
        self._announced = quiet
        self._told: dict[str, tuple[Progress, float]] = {}  # by replica: last shown, and when
        self._finishing: int | None = None

    def on_change(self, status: Status) -> None:
        if status.draining:
            self._draining(status)
        elif not self._announced:
            self._starting(status)

    def on_line(self, name: str, text: str) -> None:
        """Log a child's line: its log lines as ours with its name, other text unchanged."""
        level, event, fields = read_line(text)
        getattr(log, level)(event, child=name, **fields)

    def close(self) -> None:
        if self._picture is not None:
            self._picture.close()
            self._picture = None

    def _starting(self, status: Status) -> None:
        if is_start_over(status):
            self.close()
            self._announced = True
            if self._as_json:
                log.info("up", url=status.url, models=[one.name for one in status.models])
                return
            boxed = self._console.is_terminal
            self._console.print(banner(status, self._words, boxed=boxed), soft_wrap=not boxed)
            if boxed and self.create_link is not None:  # the link must not get into a log
                self._tell_link(self.create_link())
        elif self._picture is not None:
            self._picture.draw(status)
        else:
            self._tell_progress(status)

    def _tell_link(self, link: Link | Refused) -> None:
        if isinstance(link, Link):
            self._console.print(format_link(link), soft_wrap=True)

    def _tell_progress(self, status: Status) -> None:
        for replica in _replicas(status):
            now = time.monotonic()
            last, at = self._told.get(replica.name, (Progress(""), 0.0))
            new = replica.progress
            if new is None or new == last:
                continue
            if new.phase != last.phase or now - at >= _TELL_EVERY_S:
                self._told[replica.name] = (new, now)
                log.info("process_progressed", child=replica.name, progress=progress_text(new))

    def _draining(self, status: Status) -> None:
        self.close()
        in_flight = sum(gateway.in_flight for gateway in status.gateways)
        if in_flight != self._finishing and in_flight:
            log.info("requests_finishing", in_flight=in_flight)
        self._finishing = in_flight


class _Picture:
    """The live picture of a start, drawn by the event loop without a thread."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()
        self._newest: Status | None = None
        self._due: asyncio.TimerHandle | None = None
        _log_to_stderr()  # Live has replaced sys.stderr

    def draw(self, status: Status) -> None:
        self._newest = status
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(_DRAW_EVERY_S, self._draw)

    def _draw(self) -> None:
        self._due = None
        if self._newest is not None and is_writable(2):
            self._live.update(picture(self._newest), refresh=True)

    def close(self) -> None:
        if self._due is not None:
            self._due.cancel()
        self._live.stop()
        _log_to_stderr()


def _log_to_stderr() -> None:
    for handler in logging.getLogger().handlers:
        if isinstance(handler, PatientHandler):
            handler.setStream(sys.stderr)


def is_start_over(status: Status) -> bool:
    """Return whether the start is over: gateways serve, and every replica serves or has failed.

    A gateway on another node may have found its port taken: the others serve without it. A model
    whose remote endpoint is down may wait for it for days.
    """
    return all(g.state == "ready" or (g.node and g.reason) for g in status.gateways) and all(
        replica.state in ("ready", "asleep", "failed") or _waits(model, replica)
        for model in status.models
        for replica in model.replicas
    )


def _waits(model: ModelStatus, replica: ReplicaStatus) -> bool:
    """Return whether the replica waits for its remote endpoint, or tries it again."""
    return bool(replica.reason) and KINDS[model.engine].is_remote


def picture(status: Status) -> RenderableType:
    """Return the live picture: one line for each process that is starting."""
    grid = Table.grid(padding=(0, 2))
    for model in status.models:
        for replica in model.replicas:
            grid.add_row(
                Text(replica.name, style="bold"),
                state_text(replica.state),
                Text(replica.device, style="dim"),
                _bar(replica),
                Text(replica_note(model, replica)),
            )
    for gateway in status.gateways:
        grid.add_row(Text(gateway.name, style="bold"), state_text(gateway.state), "", "", "")
    return Group(Text(), grid)


def _bar(replica: ReplicaStatus) -> RenderableType:
    progress = replica.progress
    if progress is None or not progress.total:
        return ""
    return ProgressBar(total=progress.total, completed=progress.done, width=24)


def banner(status: Status, words: BannerFacts, *, boxed: bool) -> RenderableType:
    """Return the banner: the addresses, the models, and how to stop the instance."""
    lines = Text()
    for label, value in _addresses(status.url, ui=words.ui):
        lines.append(f"{label:<8}", style="bold")
        lines.append(f"{value}\n", style="cyan")
    for model in status.models:
        lines.append(f"{'model':<8}", style="bold")
        lines.append_text(_served(model))
    if any(one.state == "ready" for model in status.models for one in model.replicas):
        lines.append(f"{'try':<8}", style="bold")
        lines.append("servekit chat\n" if len(status.models) == 1 else "servekit chat MODEL\n")
    if words.log:
        lines.append(f"{'log':<8}", style="bold")
        lines.append(f"{words.log}\n")
    lines.append(f"{'stop':<8}", style="bold")
    lines.append(words.stop if words.log else f"Ctrl-C, or: {words.stop}")
    title = f"servekit {status.version}"
    if boxed:
        return Panel(lines, title=title, border_style="green", expand=False, padding=(0, 1))
    return Group(Text(f"{title} is up"), lines)


def format_link(link: Link) -> str:
    """Return the lines on a one-time link, below the banner: its box would break a long one."""
    head = f"To administer in the browser, open this once, within {link.life_s / 60:.0f} minutes"
    return f"{head} (`servekit link` prints another):\n{link.url}"


def _addresses(url: str, *, ui: bool) -> Iterator[tuple[str, str]]:
    yield "API", f"{url}/v1"
    if ui:
        yield "UI", f"{url}/ui"
    yield "docs", f"{url}/docs"


def _served(model: ModelStatus) -> Text:
    ready = [replica for replica in model.replicas if replica.state == "ready"]
    line = Text(model.name)
    if ready:
        devices = ", ".join(sorted({replica.device for replica in ready}))
        times = f"{len(ready)} × " if len(ready) > 1 else ""
        line.append(f"  {times}{devices}\n", style="dim")
    elif model.residence is not None and model.residence.tier == "stopped":
        how = {"on_demand": "loaded on demand"}.get(model.residence.load, "not loaded")
        line.append(f"  {how}\n", style="dim")
    for replica in model.replicas:
        if replica.state == "failed":
            line.append(f"{'' if ready else '  '}failed: {replica.reason}\n", style="red")
        elif replica.state != "ready" and _waits(model, replica):
            line.append(f"{'' if ready else '  '}tried again: {replica.reason}\n", style="red")
    if not line.plain.endswith("\n"):
        states = ", ".join(sorted({replica.state for replica in model.replicas}))
        line.append(f"  {states}\n", style="dim")
    for preset in model.presets:
        line.append(f"{'':<8}{preset.name}")
        line.append(f"  preset of {model.name}\n", style="dim")
    for adapter in model.adapters:
        line.append(f"{'':<8}{adapter.name}")
        if adapter.state == "failed":
            line.append(f"  failed: {adapter.reason}\n", style="red")
        else:
            line.append(f"  adapter of {model.name}\n", style="dim")
    return line


def read_line(text: str) -> tuple[str, str, dict[str, Any]]:
    """Return level, event and fields of a child's line; other text is the event `output`."""
    if text.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            fields = json.loads(text)
            if "event" in fields:
                level, event = fields.get("level", "info"), strip_controls(str(fields["event"]))
                rest = {key: value for key, value in fields.items() if key not in _OURS}
                return level if level in _LEVELS else "info", event, rest
    return "info", OUTPUT, {"text": strip_controls(text)}


def _replicas(status: Status) -> Iterator[ReplicaStatus]:
    for model in status.models:
        yield from model.replicas
