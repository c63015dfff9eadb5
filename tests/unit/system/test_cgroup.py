"""Memory and processors within the limits of cgroups, of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from servekit.system.cgroup import (
    available_memory_bytes,
    count_oom_kills,
    count_usable_cpus,
    cpu_quota,
    memory_limit_bytes,
    total_memory_bytes,
)

GIB = 2**30
MIB = 2**20


def host(root: Path, available_bytes: int, cgroup: str = "") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: 99999999 kB\nMemAvailable: {available_bytes // 1024} kB\n"
    )
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def limit(folder: Path, **files: str | int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_without_a_cgroup_it_is_what_the_host_has(tmp_path: Path) -> None:
    assert available_memory_bytes(host(tmp_path, 3 * GIB)) == 3 * GIB


def test_the_real_machine_has_some() -> None:
    assert 0 < available_memory_bytes() < 2**50


def test_cgroup_v2_limit_minus_usage_plus_page_cache(tmp_path: Path) -> None:
    root = host(tmp_path, 8 * GIB, "0::/system.slice/job\n")
    limit(
        root / "sys/fs/cgroup/system.slice/job",
        memory__max=2 * GIB,
        memory__current=GIB,
        memory__stat=f"anon 1\ninactive_file {256 * MIB}",
    )
    assert available_memory_bytes(root) == GIB + 256 * MIB


def test_cgroup_v2_limit_of_a_parent_holds(tmp_path: Path) -> None:
    root = host(tmp_path, 8 * GIB, "0::/pod/container\n")
    limit(root / "sys/fs/cgroup/pod/container", memory__max="max", memory__current=MIB)
    limit(root / "sys/fs/cgroup/pod", memory__max=GIB, memory__current=MIB)
    assert available_memory_bytes(root) == GIB - MIB


def test_cgroup_v2_seen_from_inside_a_container(tmp_path: Path) -> None:
    """The path names a folder outside the namespace; its own limits are at the mount's root."""
    root = host(tmp_path, 8 * GIB, "0::/../outside\n")
    limit(root / "sys/fs/cgroup", memory__max=GIB, memory__current=0)
    assert available_memory_bytes(root) == GIB


def test_cgroup_v1(tmp_path: Path) -> None:
    root = host(tmp_path, 8 * GIB, "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n")
    limit(
        root / "sys/fs/cgroup/memory/docker/abc",
        memory__limit_in_bytes=GIB,
        memory__usage_in_bytes=512 * MIB,
        memory__stat=f"total_inactive_file {12 * MIB}",
    )
    assert available_memory_bytes(root) == 524 * MIB


def test_cgroup_v1_without_a_limit_has_a_huge_number(tmp_path: Path) -> None:
    root = host(tmp_path, 8 * GIB, "4:memory:/\n")
    limit(
        root / "sys/fs/cgroup/memory",
        memory__limit_in_bytes=9223372036854771712,
        memory__usage_in_bytes=MIB,
    )
    assert available_memory_bytes(root) == 8 * GIB


def test_a_cgroup_over_its_limit_has_nothing(tmp_path: Path) -> None:
    root = host(tmp_path, 8 * GIB, "0::/\n")
    limit(root / "sys/fs/cgroup", memory__max=MIB, memory__current=2 * MIB)
    assert available_memory_bytes(root) == 0


def test_the_total_is_the_tightest_limit_or_the_machines_memory(tmp_path: Path) -> None:
    root = host(tmp_path, 8 * GIB, "0::/pod/container\n")
    assert total_memory_bytes(root) == 99999999 * 1024
    assert memory_limit_bytes(root) is None
    limit(root / "sys/fs/cgroup/pod/container", memory__max=2 * GIB, memory__current=MIB)
    limit(root / "sys/fs/cgroup/pod", memory__max=GIB, memory__current=MIB)
    assert total_memory_bytes(root) == memory_limit_bytes(root) == GIB


def test_without_proc_nothing_is_known(tmp_path: Path) -> None:
    found = total_memory_bytes(tmp_path), available_memory_bytes(tmp_path)
    assert (*found, count_oom_kills(tmp_path)) == (0, 0, 0)


def test_oom_kills_are_those_of_our_own_group_if_it_counts(tmp_path: Path) -> None:
    root = host(tmp_path, GIB, "0::/job\n")
    (root / "proc/vmstat").write_text("nr_free_pages 1\noom_kill 7\n")
    assert count_oom_kills(root) == 7
    limit(root / "sys/fs/cgroup/job", memory__events="oom 3\noom_kill 2")
    assert count_oom_kills(root) == 2


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({}, None),
    ],
)
def test_reads_a_cpu_quota(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == expected


def test_usable_cpus_never_exceed_the_affinity() -> None:
    assert 1 <= count_usable_cpus() <= len(os.sched_getaffinity(0))
