"""What systemd is told: sd_notify(3), datagrams of a few lines to the socket in $NOTIFY_SOCKET.

    READY=1      once a gateway answers. Not when models are ready: some load for an hour, come and
                 go on demand, or can never load while others serve. A start timeout that waited
                 for them would end those that serve; /readyz and the status line tell of them.
    STATUS=      which models are ready, and how far the others are
    RELOADING=1  around a reload, whoever asked for it; then READY=1
    STOPPING=1   with the time that it may take, as the configuration has it
    WATCHDOG=1   four times in WatchdogSec, by the supervisor's own loop, while gateways answer

Whoever does not hear us is no reason to do anything: what cannot be sent is let go.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from servekit.errors import ServekitError
from servekit.protocol import readiness
from servekit.protocol.messages import ModelStatus, ReplicaStatus, Status

#: What speaks for the supervisor alone: no child gets it.
VARIABLES = frozenset({"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"})
_FEEDS = 4  # in one WatchdogSec


class Answering(Protocol):
    """A gateway: when it last gave a sign of life, on the monotonic clock."""

    @property
    def answered_at(self) -> float: ...


class Notifier:
    """Tells systemd how the instance is; without one it does nothing."""

    def __init__(self, environ: Mapping[str, str], gateways: Sequence[Answering]) -> None:
        self._gateways = gateways
        self._address = address(environ)
        self._feed_every_s = watchdog_s(environ, os.getpid()) / _FEEDS
        self._fed_at = 0.0
        self._status = ""
        self._ready = self._stopping = False

    def changed(self, status: Status) -> None:
        """The instance is different now."""
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

    def look(self) -> None:
        """Called often, by the loop that does all of the supervisor's work."""
        now = time.monotonic()
        if not self._feed_every_s or now - self._fed_at < self._feed_every_s:
            return
        if self._stopping or any(one.answered_at > self._fed_at for one in self._gateways):
            self._fed_at = now
            self._send("WATCHDOG=1")

    @contextlib.contextmanager
    def reloading(self) -> Iterator[None]:
        """While the file is read again and acted on."""
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
        """It ends, and may take so long: TimeoutStopSec= need not know the configuration."""
        self._stopping = True
        self._send("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int(within_s * 1e6)}")

    def _send(self, *lines: str) -> None:
        if not self._address or not lines:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto("\n".join(lines).encode(), self._address)


def address(environ: Mapping[str, str]) -> str:
    """Where to send to, "" for nowhere; "@" stands for the NUL of an abstract socket."""
    name = environ.get("NOTIFY_SOCKET", "")
    return "\0" + name[1:] if name.startswith("@") else name if name.startswith("/") else ""


def watchdog_s(environ: Mapping[str, str], pid: int) -> float:
    """After which silence systemd acts, in seconds; 0: never. Source: sd_watchdog_enabled(3)."""
    if environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return 0.0
    time_us = environ.get("WATCHDOG_USEC", "")
    return int(time_us) / 1e6 if time_us.isdecimal() else 0.0


def summary(status: Status) -> str:
    """One line for `systemctl status`."""
    if status.draining:
        left = sum(gateway.in_flight for gateway in status.gateways)
        return f"stopping, {left} requests in flight"
    rest = unready(status)
    count = len(_served(status))
    return "; ".join([f"{count - len(rest)} of {count} models ready", *rest])


def unready(status: Status) -> list[str]:
    """What each model lacks that cannot answer."""
    return [said for model in _served(status) if (said := _unready(model))]


def _served(status: Status) -> list[ModelStatus]:
    """Without those that a reload has taken away, which drain yet: they come last there."""
    names = [one.model for one in status.traffic]
    return list(status.models[: len(names) or None])


def refuse_unready(status: Status) -> None:
    """Raise ServekitError unless gateways serve and every model would answer a request.

    Those of other nodes are no reason: what asks would restart all, and they serve on without.
    """
    ours = [gateway for gateway in status.gateways if not gateway.node]
    lacks = [g.name + " " + g.state for g in ours if g.state != "ready"]
    if status.draining or (lacks := lacks + unready(status)):
        raise ServekitError(summary(status) if status.draining else "; ".join(lacks))


def _unready(model: ModelStatus) -> str:
    """What a model lacks; "" if it serves, or would when asked: in this /readyz agrees."""
    if readiness.able(model):
        lacking = (one for one in model.adapters if not readiness.adapter_able(model, one))
        return next((_said(one.name, one.state, one.reason) for one in lacking), "")
    if readiness.in_trouble(model):
        first = next(one for one in model.replicas if one.state == "ready")
        return _said(first.name, "cannot serve", first.trouble)
    if not model.replicas:
        residence = model.residence
        tier, reason = ("stopped", "") if residence is None else (residence.tier, residence.reason)
        return _said(model.name, tier, reason)
    return _of_replica(model.replicas[0])


def _said(name: str, how: str, why: str) -> str:
    """Of a reason only the first line: more is `servekit why`."""
    reason = why.partition("\n")[0]
    return f"{name} {how}" + (f": {reason}" if reason else "")


def _of_replica(replica: ReplicaStatus) -> str:
    progress = replica.progress
    if replica.state == "failed" or progress is None:
        return _said(replica.name, replica.state, replica.reason)
    share = f" {100 * progress.done // progress.total} %" if progress.total else ""
    return f"{replica.name} {progress.phase}{share}"
