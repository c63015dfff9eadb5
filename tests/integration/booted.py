"""A real systemd as PID 1 of namespaces of its own, with servekit's unit as deploy/ has it.

    with Machine.booted(tmp_path, config) as machine:
        machine.systemctl("start", "servekit")

What it may write to is in memory and its own: /etc/systemd/system, /etc/servekit, /run, /var. The
tree under test and its interpreter stand in /opt/servekit, where the unit looks for them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tests.polling import poll

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "systemd" / "servekit.service"
SYSTEMD = Path("/lib/systemd/systemd")
_NAMESPACES = ("--pid", "--mount", "--cgroup", "--ipc", "--uts", "--net")
_UNSHARE = ("unshare", "--fork", "--kill-child", "--mount-proc", *_NAMESPACES)

#: $1: the tree, $2: the interpreter's home, $3: its packages, $4: a folder with units and settings.
#: Nothing of the machine's own is started or mounted: its wants and generators are hidden.
_BOOT = """
set -eu
mount --make-rprivate /
ip link set lo up 2>/dev/null || true
src=$1 home=$2 packages=$3 given=$4
exec 8<"$src" 9<"$home" 7<"$packages" 6<"$given"
in_memory() { mkdir -p "$1"; mount -t tmpfs -o mode=0755 tmpfs "$1"; }
from() { mkdir -p "$2"; mount --bind "/proc/self/fd/$1" "$2"; }
in_memory /opt
from 8 /opt/servekit/tree
from 9 /opt/servekit/python
from 7 /opt/servekit/packages
from 6 /opt/given
mkdir -p /opt/servekit/bin
cp /opt/given/servekit /opt/servekit/bin/
for folder in /run /var /etc/systemd/system /lib/systemd/system-generators \
              /lib/systemd/system/sysinit.target.wants /lib/systemd/system/local-fs.target.wants \
              /lib/systemd/system/multi-user.target.wants /lib/systemd/system/timers.target.wants
do in_memory "$folder"; done
mkdir -p /var/lib /var/cache /var/log /var/tmp /run/systemd/system
cp -r /opt/given/units/. /etc/systemd/system/
mkdir -p /etc/servekit
mount --bind /opt/given/etc /etc/servekit
mount -t sysfs -o ro sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
exec env -i container=unshare PATH="$PATH" /lib/systemd/systemd --system --unit=basic.target \
    --log-target=journal --show-status=no
"""

_LAUNCHER = f"""#!/bin/sh
export PYTHONPATH=/opt/servekit/tree:/opt/servekit/packages PYTHONDONTWRITEBYTECODE=1
export LD_LIBRARY_PATH=/opt/servekit/python/lib
exec /opt/servekit/python/bin/python{sys.version_info.major}.{sys.version_info.minor} \
-m servekit "$@"
"""


def why_not() -> str:
    """Why no systemd can be booted here; "" if one can."""
    if not SYSTEMD.exists():
        return f"there is no {SYSTEMD}"
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "namespaces of its own take root, and unshare"
    trial = (
        "mount --make-rprivate / && mount -t cgroup2 cgroup2 /mnt && mkdir /mnt/t && rmdir /mnt/t"
    )
    tried = subprocess.run(
        [*_UNSHARE, "sh", "-c", trial], capture_output=True, text=True, check=False
    )
    return tried.stderr.strip() if tried.returncode else ""


class Machine:
    """What runs under one booted systemd."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process = process
        self.folder = folder
        self.config = folder / "etc" / "servekit.yaml"
        self.log = folder / "boot.log"

    @classmethod
    @contextlib.contextmanager
    def booted(cls, folder: Path, config: str, drop_in: str = "") -> Iterator[Machine]:
        """With `config` as /etc/servekit/servekit.yaml, and `drop_in` beside the unit."""
        extra = folder / "units" / "servekit.service.d"
        extra.mkdir(parents=True)
        (extra / "test.conf").write_text(drop_in)
        shutil.copy(UNIT, folder / "units")
        (folder / "etc").mkdir()
        (folder / "etc" / "servekit.yaml").write_text(config)
        launcher = folder / "servekit"
        launcher.write_text(_LAUNCHER)
        launcher.chmod(0o755)
        folder.chmod(0o755)
        places = (str(ROOT), sys.base_prefix, sysconfig.get_path("purelib"), str(folder))
        with (folder / "boot.log").open("wb") as log:
            process = subprocess.Popen(
                [*_UNSHARE, "bash", "-c", _BOOT, "boot", *places],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        machine = cls(process, folder)
        try:
            poll("systemd is up", machine._is_up, 60)
            yield machine
        finally:
            process.kill()  # and with it, PID 1 of its namespace, and all that is in it
            process.wait()

    def _is_up(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        state = self.run("systemctl", "is-active", "basic.target")
        return state.stdout.strip() == "active"

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command inside, as root, and what came of it."""
        pid = self._process.pid
        inside = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if not inside:
            return subprocess.CompletedProcess(command, 1, "", "")
        return subprocess.run(
            ["nsenter", "--target", inside[0], "--all", *command],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def systemctl(self, *args: str) -> str:
        """Its output; AssertionError with what it and the journal say if it fails."""
        done = self.run("systemctl", *args)
        assert done.returncode == 0, f"{args}: {done.stdout}{done.stderr}\n{self.journal()}"
        return done.stdout

    def show(self, name: str) -> str:
        """A property of the service."""
        return self.systemctl("show", "servekit", "--value", "-p", name).strip()

    def journal(self) -> str:
        """Of the service alone: the kernel's messages in it are those of the whole machine."""
        return self.run("journalctl", "-u", "servekit", "--no-pager", "-o", "cat").stdout
