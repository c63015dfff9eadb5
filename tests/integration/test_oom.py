"""The kernel's OOM killer, in a cgroup with a memory limit as a container has one."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.instance import PROGRAM, Instance, echo
from tests.polling import poll

LIMIT_BYTES = 384 * 2**20
LEAK_BYTES = 4 * 2**20
_MOUNT = Path("/sys/fs/cgroup")


pytestmark = [pytest.mark.lane("surroundings"), pytest.mark.slow]


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup of version 2 or 1 with that limit, or a skip where none can be made."""
    v1 = (_MOUNT / "memory").is_dir()
    folder = _MOUNT / ("memory" if v1 else "") / f"servekit-test-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error.strerror}")
    try:
        limit = folder / ("memory.limit_in_bytes" if v1 else "memory.max")
        if not limit.exists():
            pytest.skip("the cgroups have no memory controller")
        limit.write_text(str(LIMIT_BYTES))
        yield folder
    finally:
        poll("the cgroup is empty", lambda: not (folder / "cgroup.procs").read_text())
        folder.rmdir()


def test_a_worker_that_the_kernel_kills_is_told_to_have_lacked_memory(
    tmp_path: Path, cgroup: Path
) -> None:
    join = ("bash", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "bash", *PROGRAM)
    leaky = echo("leaky", leak_bytes_per_token=LEAK_BYTES, step_s=0.001)
    with Instance.up(tmp_path, [echo("a"), leaky], program=join) as instance:
        instance.until_settled()
        url, before = instance.url, instance.replica("a/0").pid
        body = {"model": "leaky", "prompt": "x", "max_tokens": 4000}
        failed = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        assert failed.json()["error"]["code"] == "request_quarantined", failed.text
        fine = httpx.post(f"{url}/v1/completions", json={**body, "model": "a"}, timeout=60)
        assert fine.json()["usage"]["completion_tokens"] == 4000
        instance.until("it is back", lambda: instance.replica("leaky/0").state == "ready")
        for command in (["why", "leaky/0"], ["events"]):
            words = [*PROGRAM, *command, "--run-dir", str(instance.run_dir)]
            done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
            assert "by the kernel: out of memory" in " ".join(done.stdout.split()), done.stdout
        assert instance.replica("a/0").pid == before and instance.gateway().restarts == 0
        assert oom_score(before) > oom_score(instance.gateway().pid) == oom_score(instance.pid)


def oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())
