"""Notification of systemd by sd_notify(3): datagrams of a few lines to $NOTIFY_SOCKET.

    READY=1      once a gateway answers. Models need not be ready: some load for an hour, load on
                 demand or fail while others serve. A start timeout that waited for them would end
                 the whole instance; /readyz and the status line report them.
    STATUS=      which models are ready, and the progress of the others
    RELOADING=1  around every reload; then READY=1
    STOPPING=1   with the time that it may take, by the configuration
    WATCHDOG=1   four times in WatchdogSec, by the supervisor's event loop, while gateways answer

Messages that cannot be sent are dropped.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping

from servekit.errors import ServekitError
from servekit.protocol import readiness
from servekit.protocol.messages import ModelStatus, ReplicaStatus, Status

#: Variables for the supervisor alone, removed from its children's environment.
VARIABLES = frozenset({"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"})
_FEEDS = 4  # per WatchdogSec


class Notifier:
    """Notifier of systemd; without systemd it does nothing.

    `answered_at` returns the last sign of life of any gateway, on the monotonic clock.
    """

    def __init__(self, environ: Mapping[str, str], answered_at: Callable[[], float]) -> None:
        self._answered_at = answered_at
        self._address = address(environ)
        self.feed_every_s = watchdog_s(environ, os.getpid()) / _FEEDS  # 0: it is not fed
        self._fed_at = 0.0
        self._status = ""
        self._ready = self._stopping = False

    def on_change(self, status: Status) -> None:
        """Report the changed state of the instance."""
        if not self._address:
            return
        lines = []
        if not self._ready and any(gateway.state == "ready" for gateway in status.gateways):
            self._ready = True
            lines.append("READY=1")
        if (said := summary(status)) != self._status:
            self._status = said
            lines.append(f"STATUS={said}")
        self._send(*lines)

    def feed_watchdog(self) -> None:
        """Feed the watchdog; call this often, from the supervisor's event loop."""
        now = time.monotonic()
        if not self.feed_every_s or now - self._fed_at < self.feed_every_s:
            return
        if self._stopping or self._answered_at() > self._fed_at:
            self._fed_at = now
            self._send("WATCHDOG=1")

    @contextlib.contextmanager
    def reloading(self) -> Iterator[None]:
        """Report a reload for the duration of the context."""
        if self._stopping:
            yield
            return
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            yield
        finally:
            if not self._stopping:
                self._send("READY=1")

    def stopping(self, within_s: float) -> None:
        """Report the shutdown and its longest duration, which TimeoutStopSec= need not cover."""
        self._stopping = True
        self._send("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int(within_s * 1e6)}")

    def _send(self, *lines: str) -> None:
        if not self._address or not lines:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto("\n".join(lines).encode(), self._address)


def address(environ: Mapping[str, str]) -> str:
    """Return the address of systemd's socket, or ""; "@" becomes the NUL of an abstract one."""
    name = environ.get("NOTIFY_SOCKET", "")
    return "\0" + name[1:] if name.startswith("@") else name if name.startswith("/") else ""


def watchdog_s(environ: Mapping[str, str], pid: int) -> float:
    """Return systemd's watchdog timeout in seconds; 0: none. Source: sd_watchdog_enabled(3)."""
    if environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return 0.0
    time_us = environ.get("WATCHDOG_USEC", "")
    return int(time_us) / 1e6 if time_us.isdecimal() else 0.0


def summary(status: Status) -> str:
    """Return one line for `systemctl status`."""
    if status.draining:
        left = sum(gateway.in_flight for gateway in status.gateways)
        return f"stopping, {left} requests in flight"
    rest = unready(status)
    count = len(_served(status))
    return "; ".join([f"{count - len(rest)} of {count} models ready", *rest])


def unready(status: Status) -> list[str]:
    """Return for each model that cannot answer what it lacks."""
    return [said for model in _served(status) if (said := _unready(model))]


def _served(status: Status) -> list[ModelStatus]:
    """Return the models without those that a reload has removed; draining models come last."""
    names = [one.model for one in status.traffic]
    return list(status.models[: len(names) or None])


def refuse_unready(status: Status) -> None:
    """Raise ServekitError unless gateways serve and every model would answer a request.

    Gateways on other nodes are ignored: a restart for their sake would interrupt everything else.
    """
    ours = [gateway for gateway in status.gateways if not gateway.node]
    lacks = [g.name + " " + g.state for g in ours if g.state != "ready"]
    if status.draining or (lacks := lacks + unready(status)):
        raise ServekitError(summary(status) if status.draining else "; ".join(lacks))


def _unready(model: ModelStatus) -> str:
    """Return what a model lacks; "" if it serves or would when asked. /readyz agrees."""
    if readiness.is_able(model):
        lacking = (one for one in model.adapters if not readiness.adapter_able(model, one))
        return next((_describe_failure(one.name, one.state, one.reason) for one in lacking), "")
    if readiness.in_trouble(model):
        first = next(one for one in model.replicas if one.state == "ready")
        return _describe_failure(first.name, "cannot serve", first.trouble)
    if not model.replicas:
        residence = model.residence
        tier, reason = ("stopped", "") if residence is None else (residence.tier, residence.reason)
        return _describe_failure(model.name, tier, reason)
    return _of_replica(model.replicas[0])


def _describe_failure(name: str, how: str, why: str) -> str:
    """Return the state with the first line of the reason; `servekit why` shows all of it."""
    reason = why.partition("\n")[0]
    return f"{name} {how}" + (f": {reason}" if reason else "")


def _of_replica(replica: ReplicaStatus) -> str:
    progress = replica.progress
    if replica.state == "failed" or progress is None:
        return _describe_failure(replica.name, replica.state, replica.reason)
    share = f" {100 * progress.done // progress.total} %" if progress.total else ""
    return f"{replica.name} {progress.phase}{share}"
