"""What processes have opened and whom they have asked, as strace tells it.

With `--seccomp-bpf` the kernel stops a process at these calls only, so that a whole run can be
traced.
"""

from __future__ import annotations

import math
import re
import shutil
import site
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import servekit

CALLS = "trace=open,openat,openat2,creat,connect,sendto,execve,execveat"
#: `sendto` is of interest with an address only.
_OPENED = re.compile(r'(?:open|openat|openat2|creat|execve|execveat)\((?:[^"]*)"((?:[^"\\]|\\.)*)"')
_ASKED = re.compile(r"(?:connect|sendto)\(.*\{sa_family=(AF_\w+), ?(.*?)\}")
#: Python's own files, and what its processes read about themselves.
_PYTHON = (servekit.__path__[0], sys.prefix, sys.base_prefix, *site.getsitepackages())
_OWN = ("/proc", "/sys/", "/dev/null", "/dev/urandom", "/dev/shm", "/etc/ld.so.cache", "/lib/",
        "/lib64/", "/usr/lib/")  # fmt: skip


def is_possible() -> bool:
    return shutil.which("strace") is not None


def command(output: Path) -> list[str]:
    """Return what to put before a command, whose process stays the child of the caller."""
    return ["strace", "-D", "-f", "--seccomp-bpf", "-q", "-qq", "-ttt", "-s", "300",
            "-e", CALLS, "-e", "signal=none", "-o", str(output)]  # fmt: skip


def find_strangers(
    output: Path, since_s: float, folders: Sequence[Path], until_s: float = math.inf
) -> list[str]:
    """Return the calls of that time that name no file of Python's, the system's or these folders.

    Sockets of the `AF_UNIX` family have to be in these folders, too.
    """
    allowed = (*_PYTHON, *_OWN, *map(str, folders))
    found: Counter[str] = Counter()
    for line in output.read_text(errors="replace").splitlines():
        _, _, rest = line.partition(" ")
        stamp, _, call = rest.lstrip().partition(" ")
        try:
            if not since_s <= float(stamp) <= until_s:
                continue
        except ValueError:
            continue
        if is_strange(call, allowed):
            found[call.partition(" = ")[0][:200]] += 1
    return [f"{count} × {call}" for call, count in found.most_common()]


def is_strange(call: str, allowed: Sequence[str]) -> bool:
    """Whether a call, as strace writes it, opens or asks what it should not."""
    if opened := _OPENED.match(call):
        name = opened[1]
        return not name.startswith(tuple(allowed))
    if asked := _ASKED.match(call):
        family, address = asked.groups()
        if family == "AF_UNIX":
            return not any(folder in address for folder in allowed) and "sun_path=@" not in address
        return family in ("AF_INET", "AF_INET6")
    return False
