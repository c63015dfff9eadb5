"""Machines of one network on one machine: network namespaces, and cables between them.

    def test_x() -> None:
        elsewhere(scenario)            # runs in a thread that is a machine of its own, the head

    cable = Cable(1, process.pid)   # from there to the namespace of a process
    cable.say(delay_s=0.025)        # 50 ms round trip
    cable.say(cut=True)             # as by a power loss: nothing arrives, and nobody says so

A cable is two TUN devices and a process that carries packets from one to the other, late, slowly,
or not at all: what netem does, where a kernel has it. Needs root, or both namespaces and TUN.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

import uvloop

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_TUN = Path("/dev/net/tun")


def _unshare_network() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _in_thread(work: Callable[[], Any]) -> Any:
    """Do it in a thread with a network of its own, and return what it returns or raises."""
    done: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            _unshare_network()
            _run("ip", "link", "set", "lo", "up")
            done.append(work())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return done[0]


def elsewhere(scenario: Callable[[], Awaitable[Any]]) -> Any:
    """Run a scenario on a machine of its own; the processes that it starts are there too."""

    async def whole() -> Any:
        return await scenario()

    return _in_thread(lambda: uvloop.run(whole()))


@cache
def why_not() -> str:
    """Why there are no namespaces here; "" where there are."""
    try:
        _in_thread(lambda: os.close(_tun("probe")))
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces and TUN devices are not to be had here: {error}"
    return ""


def _tun(name: str) -> int:
    fd = os.open(_TUN, os.O_RDWR)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(fd)
        raise
    return fd


class Cable:
    """From this machine, `here`, to the one where a process is, `there`."""

    def __init__(self, number: int, pid: int) -> None:
        self.here, self.there = f"10.77.{number}.1", f"10.77.{number}.2"
        self.device = f"near{number}"
        far, inside = f"far{number}", ("nsenter", "-t", str(pid), "-n")
        fds = _tun(self.device), _tun(far)
        _run("ip", "link", "set", far, "netns", str(pid))
        _run("ip", "addr", "add", self.here, "peer", self.there, "dev", self.device)
        _run(*inside, "ip", "addr", "add", self.there, "peer", self.here, "dev", far)
        _run("ip", "link", "set", self.device, "up")
        _run(*inside, "ip", "link", "set", far, "up")
        _run(*inside, "ip", "link", "set", "lo", "up")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.cable", *map(str, fds)],
            stdin=subprocess.PIPE,
            pass_fds=fds,
            text=True,
        )
        for fd in fds:
            os.close(fd)

    def say(self, *, delay_s: float = 0.0, bytes_per_s: float = 0.0, cut: bool = False) -> None:
        """What becomes of packets from now on, each way; 0 bytes per second: no limit."""
        assert self._process.stdin is not None
        said = {"delay_s": delay_s, "bytes_per_s": bytes_per_s, "cut": cut}
        self._process.stdin.write(json.dumps(said) + "\n")
        self._process.stdin.flush()

    def down(self) -> None:
        """Take the link down at this end."""
        _run("ip", "link", "set", self.device, "down")

    def up(self) -> None:
        _run("ip", "link", "set", self.device, "up")

    def remove(self) -> None:
        self._process.kill()
        self._process.communicate()
