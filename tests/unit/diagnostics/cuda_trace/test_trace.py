"""`servekit trace-cuda`, run for real. A torch with CUDA, which no machine without a GPU has, is a
stand-in of a few lines here; real GPUs are seen by hand.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

#: torch with CUDA, as far as it matters: `_lazy_init`, copied by name, calls the binding.
TORCH = {
    "torch/__init__.py": "from torch import _C\nfrom torch import cuda\n",
    "torch/_C.py": "def _cuda_init(): pass\ndef _cuda_getDeviceCount(): return 1\n",
    "torch/cuda/__init__.py": (
        "import torch._C\n"
        "import os\n"
        "pid = os.getpid()\n"
        "def _lazy_init():\n"
        "    if os.getpid() != pid: raise RuntimeError('Cannot re-initialize CUDA in forked')\n"
        "    torch._C._cuda_init()\n"
        "def is_available(): return torch._C._cuda_getDeviceCount() > 0\n"
        "from torch.cuda import memory\n"
    ),
    "torch/cuda/memory.py": "from torch.cuda import _lazy_init\ndef empty_cache(): _lazy_init()\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in TORCH.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def servekit(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": path}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    return subprocess.run(
        [sys.executable, "-m", "servekit", "trace-cuda", *args],
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
        cwd=folder,
        check=False,
    )


def traced(folder: Path, code: str, *args: str) -> dict[str, Any]:
    (folder / "app.py").write_text(code)
    done = servekit(folder, "--json", *args, "--", "app.py")
    assert done.stdout.startswith("{"), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert not any(process["broken"] for process in report["processes"]), report
    return report


def findings(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [(found["kind"], found["said"]) for found in report["findings"]]


def test_the_first_initialisation_with_stack_and_import_chain(folder: Path) -> None:
    (folder / "adapters.py").write_text("import kernels\n")
    (folder / "kernels.py").write_text("import torch\n\ntorch.cuda.memory.empty_cache()\n")
    report = traced(folder, "import adapters")
    [process] = report["processes"]
    assert process["cuda"]["what"] == "torch.cuda._lazy_init()"
    assert process["cuda"]["chain"] == ["__main__", "adapters", "kernels"]
    assert [str(folder / "kernels.py"), 3, "<module>"] in process["cuda"]["stack"]
    assert process["cuda"]["error"] == ""
    assert findings(report) == [
        ("import", "an import calls torch.cuda._lazy_init(): __main__ → adapters → kernels")
    ]


def test_use_outside_of_imports_is_no_finding(folder: Path) -> None:
    report = traced(folder, "import torch\ntorch.cuda.memory.empty_cache()")
    assert report["processes"][0]["cuda"]["what"] == "torch.cuda._lazy_init()"
    assert report["findings"] == []


def test_asking_whether_there_is_a_gpu_initialises_the_driver(folder: Path) -> None:
    report = traced(
        folder,
        "import os, torch\ntorch.cuda.is_available()\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'",
    )
    [(kind, said)] = findings(report)
    assert kind == "late write"
    assert said.startswith("CUDA_VISIBLE_DEVICES becomes '1', was unset, after CUDA was init")
    assert report["findings"][0]["stack"][0][1] == 3


def test_a_write_in_time_is_none(folder: Path) -> None:
    code = "import os, torch\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'\ntorch.cuda.is_available()"
    report = traced(folder, code)
    assert report["findings"] == []
    assert report["processes"][0]["writes"][0]["value"] == "1"


FORK = """
import os, torch
torch.cuda.is_available()
if (pid := os.fork()) == 0:
    try:
        torch.cuda.memory.empty_cache()
    except RuntimeError:
        os._exit(0)
os.waitpid(pid, 0)
"""


def test_a_fork_after_it_and_its_child(folder: Path) -> None:
    report = traced(folder, FORK)
    kinds = findings(report)
    parent, child = report["processes"]
    assert kinds[0] == (
        "fork",
        "os.fork() after CUDA was initialised: the child cannot use CUDA",
    )
    assert kinds[1][1].endswith(f"in a fork of pid {parent['pid']}, which had initialised CUDA")
    assert child["cuda"]["error"] == "RuntimeError: Cannot re-initialize CUDA in forked"
    assert child["forked"] and child["parent"] == parent["pid"] and child["ended"]


def test_multiprocessing_by_fork_and_by_spawn(folder: Path) -> None:
    code = """
import multiprocessing, sys
import torch
if __name__ == "__main__":
    torch.cuda.is_available()
    for method in ("spawn", "fork"):
        process = multiprocessing.get_context(method).Process(target=print)
        process.start()
        process.join()
"""
    report = traced(folder, code)
    assert [kind for kind, _ in findings(report)] == ["fork"]
    assert sum(process["forked"] for process in report["processes"]) == 1
    assert len(report["processes"]) >= 3


def test_child_interpreters_are_traced_or_named(folder: Path) -> None:
    code = """
import subprocess, sys
init = "import torch; torch.cuda.memory.empty_cache()"
subprocess.run([sys.executable, "-c", init])
subprocess.run([sys.executable, "-I", "-c", "pass"])
subprocess.run([sys.executable, "-c", "pass"], env={})
"""
    report = traced(folder, code)
    assert [bool(process["cuda"]) for process in report["processes"]] == [False, True]
    not_seen = " ".join(report["not_seen"])
    assert "(it was started with -I): not recorded" in not_seen
    assert "(it was given an environment without ours): not recorded" in not_seen


def test_ctypes_is_seen_looking_up_cuinit(folder: Path) -> None:
    code = "import ctypes\ntry:\n    ctypes.CDLL(None).cuInit(0)\nexcept AttributeError: pass"
    cuda = traced(folder, code)["processes"][0]["cuda"]
    assert (cuda["what"], cuda["how"]) == ("cuInit() through ctypes", "lookup")
    assert cuda["stack"][0][1] == 3


def test_an_opened_device_is_named_though_it_is_not_there(folder: Path) -> None:
    code = "try:\n    open('/dev/nvidia77')\nexcept OSError: pass"
    assert traced(folder, code)["processes"][0]["devices"] == ["/dev/nvidia77"]


#: What cuInit() does tells Python nothing, and neither does libc. NVML opens, and maps nothing.
OPENED = "fd = libc.open(str(folder / 'nvidia-uvm').encode(), 0)"
MAPPED = f"{OPENED}\nlibc.mmap(None, 4096, 1, 2, fd, 0)"


@pytest.mark.parametrize(("native", "noticed"), [(OPENED, []), (MAPPED, ["the import of later"])])
def test_native_code_is_noticed_by_the_device_it_maps(
    native: str, noticed: list[str], tmp_path: Path
) -> None:
    (tmp_path / "nvidia-uvm").write_bytes(bytes(4096))
    (tmp_path / "later.py").write_text("")
    code = f"""
import ctypes, pathlib, sys
from servekit.diagnostics.cuda_trace import recorder
from servekit.system.python import import_chain as chain
folder = pathlib.Path({str(tmp_path)!r})
sys.path.insert(0, str(folder))
libc = ctypes.CDLL(None)
recorder.start(str(folder), chain, devices=str(folder))
{native}
import later
"""
    path = os.pathsep.join(filter(None, sys.path))
    env = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=env)
    [file] = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [
        x["noticed_at"] for x in lines if x["kind"] == "cuda" and x["how"] == "device"
    ] == noticed
    assert lines[-1]["devices"] == [str(tmp_path / "nvidia-uvm")]


def test_a_sitecustomize_of_the_users_own_runs_too(folder: Path) -> None:
    (folder / "sitecustomize.py").write_text("import sys; sys.mine = 1")
    code = "import sys\nassert sys.mine\nassert not [p for p in sys.path if 'injected' in p]"
    assert traced(folder, code)["exit_code"] == 0


@pytest.mark.parametrize(
    ("code", "expected"),
    [("raise SystemExit(7)", 7), (f"import os; os.kill(os.getpid(), {signal.SIGTERM:d})", 143)],
)
def test_the_exit_code_is_the_programs(code: str, expected: int, folder: Path) -> None:
    (folder / "app.py").write_text(code)
    done = servekit(folder, "--check", "--", sys.executable, "app.py")
    assert done.returncode == expected, done.stderr


def test_check_is_one_for_findings_and_text_goes_to_stderr(folder: Path) -> None:
    (folder / "bad.py").write_text("import torch\nprint('hello')\ntorch.cuda.is_available()")
    done = servekit(folder, "--check", "--import", "bad")
    assert (done.returncode, done.stdout) == (1, "hello\n")
    assert "FINDING: an import calls torch._C._cuda_getDeviceCount(): __main__ → bad" in done.stderr
    assert "torch.cuda.is_available()" in done.stderr, "the line of the source"
    assert servekit(folder, "--import", "bad").returncode == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "no command to run"),
        (("--import", "os; bad"), "is not the name of a module"),
        (("--import", "os", "--", "true"), "not both"),
    ],
)
def test_wrong_use_is_told(args: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = servekit(tmp_path, *args)
    assert done.returncode == 2 and said in done.stderr


def test_what_is_no_python_is_said(tmp_path: Path) -> None:
    done = servekit(tmp_path, "--", "true")
    assert done.returncode == 0
    assert "No Python process has recorded anything" in done.stderr
    missing = servekit(tmp_path, "--", "./nothing-here")
    assert missing.returncode == 1 and "cannot start ./nothing-here" in missing.stderr


@pytest.mark.lane("long")
@pytest.mark.slow
def test_real_torch_without_cuda(tmp_path: Path) -> None:
    code = "import torch\ntry:\n    torch.zeros(1).cuda()\nexcept Exception: pass\n"
    cuda = traced(tmp_path, code)["processes"][0]["cuda"]
    if torch.version.cuda:
        pytest.skip("this torch has CUDA")
    assert cuda["what"] == "torch.cuda._lazy_init()"
    assert cuda["error"] == "AssertionError: Torch not compiled with CUDA enabled"
    assert cuda["stack"][-1][1] == 3
