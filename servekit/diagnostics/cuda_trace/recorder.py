"""The recorder of CUDA use in this process, one JSON line per event. Stdlib only; Python 3.8+.

Lines have `kind`, `pid`, `at` (Unix time, s), and, if Python code caused them, `stack` (file, line,
function; outermost first) and `chain` (the modules that are being imported):

    start      argv, parent, python, forked (of a fork that ran no new program), visible
    cuda       what: the call; how: "python", "lookup", "device", "probe"
    returned   what: the call; its error or "", and the devices held after it
    opened     path, of the first open of each /dev/nvidia*
    library    name, of a CUDA library that was loaded by ctypes
    fork       what: os.fork or os.forkpty
    visible    the new value of CUDA_VISIBLE_DEVICES (None: removed) and the one before
    blind      a child that will not be recorded, and why
    broken     an error of the recorder itself
    end        devices held, CUDA libraries mapped, CUDA_VISIBLE_DEVICES

Only torch is known by name: its calls are wrapped until each has been recorded once. Other code is
recognised by its effects: a symbol looked up through ctypes, or a GPU's device file mapped, as
cuInit() does. (NVML opens the same files, including /dev/nvidia-uvm, but maps none: seen with
driver 580.) Native code can do that unseen by Python; the next import, fork, write or exit then
finds it, and the line says so (`how`: "device").

Source: Python documentation, "Audit events table"; torch/cuda/__init__.py; /proc/PID/maps before
and after nvmlInit_v2(), cuInit() and cuDevicePrimaryCtxRetain() on an H100.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from _thread import _local
from types import ModuleType
from typing import Any, Callable, Dict, Optional, Set

_DEVICE_PREFIX = "nvidia"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LIBRARIES = ("libcuda.", "libcudart", "libnvidia-ml", "libcublas", "libcudnn", "libggml-cuda")
#: Symbols that initialise the driver or create a context; other symbols only query, or need these.
_SYMBOLS = ("cuInit", "cuCtxCreate", "cuDevicePrimaryCtxRetain", "cudaSetDevice", "cudaFree",
            "cudaMalloc", "cudaGetDeviceCount", "cudaInitDevice")  # fmt: skip
#: Flags of Python that ignore PYTHONPATH (-I, -E), or skip sitecustomize (-S).
_BLIND = "IES"


class Recorder:
    """The recorder of one process; a forked child continues with its own file."""

    def __init__(self, directory: str, chain: Any, devices: str = "/dev") -> None:
        self._directory = directory
        self._chain = chain
        self._devices = os.path.join(devices, _DEVICE_PREFIX)
        self._busy = _local()
        self._seen: Set[str] = set()
        self._originals: Dict[str, Any] = {}
        self._visible = os.environ.get(_VISIBLE)
        self._handlers: Dict[str, Callable[[Any], None]] = {
            "import": self._on_import,
            "open": self._on_open,
            "ctypes.dlopen": self._on_dlopen,
            "ctypes.dlsym": self._on_dlsym,
            "os.fork": lambda _: self._on_fork("os.fork()"),
            "os.forkpty": lambda _: self._on_fork("os.forkpty()"),
            "os.putenv": lambda args: self._on_environ(args[0], args[1]),
            "os.unsetenv": lambda args: self._on_environ(args[0], None),
            "os.exec": self._on_exec,
            "subprocess.Popen": self._on_popen,
        }

    def hook(self, event: str, args: Any) -> None:
        """Handle an audit event. No error in it reaches the program."""
        handler = self._handlers.get(event)
        if handler is None or getattr(self._busy, "on", False):
            return
        self._busy.on = True
        try:
            handler(args)
        except Exception as error:
            self._say_broken(error)
        finally:
            self._busy.on = False

    def record_start(self, forked: bool) -> None:
        self._write(
            "start",
            argv=_argv(),
            parent=os.getppid(),
            python=sys.version.split()[0],
            forked=forked,
            visible=self._visible,
        )

    def after_fork(self) -> None:
        """Start recording in a forked child. CUDA stays initialised there, but is unusable."""
        self._busy.on = True
        try:
            self._seen &= {"device"}  # the parent's open files are open here, too
            self.record_start(forked=True)
        finally:
            self._busy.on = False

    def record_end(self) -> None:
        """Record the end of the process, or an os._exit or exec."""
        was, self._busy.on = getattr(self._busy, "on", False), True
        try:
            if "end" not in self._seen:
                self._check_native_cuda("the end of the process")
                self._seen.add("end")
                self._write(
                    "end", devices=self._held(), mapped=_mapped(), visible=os.environ.get(_VISIBLE)
                )
        except Exception as error:
            self._say_broken(error)
        finally:
            self._busy.on = was

    # ---- events

    def _on_import(self, args: Any) -> None:
        self._check_native_cuda("the import of " + str(args[0]))
        self._wrap_torch()

    def _on_open(self, args: Any) -> None:
        path = args[0]
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if isinstance(path, str) and path.startswith(self._devices) and path not in self._seen:
            self._seen.add(path)
            self._write("opened", path=path, **self._where())

    def _on_dlopen(self, args: Any) -> None:
        name = os.path.basename(str(args[0] or ""))
        if name.startswith(_LIBRARIES) and name not in self._seen:
            self._seen.add(name)
            self._write("library", name=name, **self._where())

    def _on_dlsym(self, args: Any) -> None:
        name = str(args[1])
        if name.startswith(_SYMBOLS) and "symbol" not in self._seen:
            self._seen.add("symbol")
            self._cuda(name + "() through ctypes", "lookup")

    def _on_fork(self, what: str) -> None:
        self._check_native_cuda(what)
        self._write("fork", what=what, **self._where())

    def _on_environ(self, name: Any, value: Any) -> None:
        if os.fsdecode(name) != _VISIBLE:
            return
        self._check_native_cuda("the write to " + _VISIBLE)
        before, self._visible = self._visible, None if value is None else os.fsdecode(value)
        self._write("visible", value=self._visible, before=before, **self._where())

    def _on_exec(self, args: Any) -> None:
        self._record_blind_child([os.fsdecode(word) for word in args[1]], args[2])
        was = self._seen
        self.record_end()
        self._seen = was - {"end"}  # exec may fail, and the process continue

    def _on_popen(self, args: Any) -> None:
        words = args[1]
        if isinstance(words, (str, bytes)):
            words = [words]
        self._check_native_cuda("the start of a program")
        self._record_blind_child([os.fsdecode(word) for word in words], args[3])

    # ---- helpers

    def _record_blind_child(self, words: Any, env: Any) -> None:
        """Record a Python child that will not load the recorder."""
        python = words and "python" in os.path.basename(words[0])
        if not python:
            return
        flags = [word for word in words[1:2] if word[:1] == "-" and word[:2] != "--"]
        kept = env is None or any(os.fsdecode(key) == "SERVEKIT_TRACE_CUDA" for key in env)
        if not kept:
            self._write("blind", argv=words[:6], why="it was given an environment without ours")
        elif flags and set(flags[0]) & set(_BLIND):
            self._write("blind", argv=words[:6], why="it was started with " + flags[0])

    def _check_native_cuda(self, during: str) -> None:
        """Record CUDA as initialised by native code, if it was."""
        if "device" not in self._seen and self._held() and self._has_mapped():
            self._seen.add("device")
            if not self._seen & {"py:init", "py:count"}:
                self._cuda("native code", "device", noticed_at=during)

    def _held(self) -> Any:
        """Return the open GPU device files, sorted."""
        found = set()
        for fd in os.listdir("/proc/self/fd"):
            try:
                path = os.readlink("/proc/self/fd/" + fd)
            except OSError:
                continue
            if path.startswith(self._devices):
                found.add(path)
        return sorted(found)

    def _has_mapped(self) -> bool:
        with open("/proc/self/maps", "rb") as file:
            return (" " + self._devices).encode() in file.read()

    def _cuda(self, what: str, how: str, **more: Any) -> None:
        self._write("cuda", what=what, how=how, **more, **self._where())

    def _where(self) -> Any:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        chain = self._chain.modules_under_way(frame)
        stack = []
        while frame is not None:
            code = frame.f_code
            if not self._chain.is_machinery(code.co_filename):
                stack.append([code.co_filename, frame.f_lineno, code.co_name])
            frame = frame.f_back
        return {"chain": chain, "stack": stack[::-1]}

    def _say_broken(self, error: Exception) -> None:
        try:
            self._write("broken", error=repr(error))
        except Exception:  # during shutdown of the interpreter
            return

    def _write(self, kind: str, **fields: Any) -> None:
        # Opened each time, since a program may close all descriptors.
        line = json.dumps({"kind": kind, "pid": os.getpid(), "at": time.time(), **fields})
        path = os.path.join(self._directory, "%d.jsonl" % os.getpid())
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, line.encode() + b"\n")
        finally:
            os.close(fd)

    # ---- torch

    def _wrap_torch(self) -> None:
        """Wrap the initialising calls early, before other modules copy them by name."""
        binding, cuda = sys.modules.get("torch._C"), sys.modules.get("torch.cuda")
        has_cuda = hasattr(binding, "_cuda_init")
        if binding is not None and has_cuda:
            self._wrap(binding, "_cuda_init", "init")
            self._wrap(binding, "_cuda_getDeviceCount", "count")
        if cuda is not None:  # it fails before calling the binding in a fork, and without CUDA
            self._wrap(cuda, "_lazy_init", "init")
            if not has_cuda:
                self._wrap(cuda, "is_available", "probe")

    def _wrap(self, module: ModuleType, name: str, key: str) -> None:
        full = module.__name__ + "." + name
        original = getattr(module, name, None)
        if original is None or full in self._originals:
            return
        self._originals[full] = original

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return self._call(original, full, "py:" + key, args, kwargs)

        wrapper.__name__, wrapper.__doc__ = name, getattr(original, "__doc__", None)
        setattr(module, name, wrapper)

    def _call(self, original: Any, full: str, key: str, args: Any, kwargs: Any) -> Any:
        if key in self._seen:
            return original(*args, **kwargs)
        self._seen.add(key)
        self._note("begun", full, key)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            self._note("%s: %s" % (type(error).__name__, error), full, key)
            raise
        self._note("", full, key)
        return result

    def _note(self, error: str, full: str, key: str) -> None:
        """Record a call before it, since it may never return, and after it with its result."""
        was, self._busy.on = getattr(self._busy, "on", False), True
        try:
            if error == "begun":
                self._cuda(full + "()", "probe" if key == "py:probe" else "python")
            else:
                self._write("returned", what=full + "()", error=error, held=self._held())
        except Exception as broken:
            self._say_broken(broken)
        finally:
            self._busy.on = was


def _argv() -> Any:
    try:
        with open("/proc/self/cmdline", "rb") as file:
            return [os.fsdecode(word) for word in file.read().rstrip(b"\0").split(b"\0")]
    except OSError:
        return []


def _mapped() -> Any:
    """Return the CUDA libraries in this process's memory. `import torch` maps some harmlessly."""
    try:
        with open("/proc/self/maps") as file:
            names = {os.path.basename(line.split()[-1]) for line in file}
    except OSError:
        return []
    return sorted(name for name in names if name.startswith(_LIBRARIES))


def start(directory: str, chain: Any, devices: str = "/dev") -> Optional[Recorder]:
    """Record this process, and its forks, into files of `directory`."""
    recorder = Recorder(directory, chain, devices)
    recorder.record_start(forked=False)
    os.register_at_fork(after_in_child=recorder.after_fork)
    atexit.register(recorder.record_end)
    leave = os._exit

    def _exit(status: int) -> Any:
        recorder.record_end()
        leave(status)

    os._exit = _exit
    sys.addaudithook(recorder.hook)
    return recorder
