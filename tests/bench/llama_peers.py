"""Other servers over llama.cpp: xllamacpp's own, which is llama.cpp's, and llama-cpp-python's.

`python -m tests.bench.llama_peers SETTING` is xllamacpp's, until it is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tests.bench import peers

#: llama.cpp's numbers of flash attention and of 16-bit floats.
FLASH_AUTO, F16 = -1, 1


class Setting(msgspec.Struct, frozen=True):
    """The same for all; `context` is what all `slots` share."""

    model: str
    threads: int
    slots: int
    context: int
    port: int = 0
    interrupts: bool = False  # one request another, at llama-cpp-python's


def installed(folder: Path) -> Path:
    """llama-cpp-python's interpreter. It is compiled here, which takes ten minutes or so."""
    if not list(folder.glob("lib/*/site-packages/llama_cpp")):
        peers.install(folder, "llama-cpp-python[server]")
    return folder / "bin" / "python"


@contextlib.contextmanager
def xllamacpp(setting: Setting, log: Path) -> Iterator[peers.Peer]:
    """In a process of its own, as it is meant to be used: its HTTP server is C++."""
    port = peers.free_port()
    told = msgspec.json.encode(msgspec.structs.replace(setting, port=port)).decode()
    command = (sys.executable, "-m", "tests.bench.llama_peers", told)
    with _running(command, port, "/health", log) as peer:
        yield peer


@contextlib.contextmanager
def llama_cpp_python(setting: Setting, python: Path, log: Path) -> Iterator[peers.Peer]:
    """One request at a time; by default the next one would cut off the one that runs."""
    port = peers.free_port()
    options = {
        "model": setting.model,
        "host": "127.0.0.1",
        "port": port,
        "n_ctx": setting.context,
        "n_threads": setting.threads,
        "n_threads_batch": setting.threads,
        "flash_attn": True,
        "logits_all": False,
        "interrupt_requests": setting.interrupts,
        "verbose": False,
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = (str(python), "-m", "llama_cpp.server", *flags)
    with _running(command, port, "/v1/models", log) as peer:
        yield peer


@contextlib.contextmanager
def _running(command: tuple[str, ...], port: int, path: str, log: Path) -> Iterator[peers.Peer]:
    with peers.started(command, log, os.environ) as process:
        url = f"http://127.0.0.1:{port}"
        peers.await_answer(process, f"{url}{path}", log)
        peer = peers.Peer(url, process.pid)
        peer.rest()
        yield peer


def main() -> int:
    import xllamacpp

    setting = msgspec.json.decode(sys.argv[1], type=Setting)
    params = xllamacpp.CommonParams()
    params.model.path = setting.model
    params.hostnames, params.port = ["127.0.0.1"], setting.port
    params.n_ctx, params.n_parallel, params.kv_unified = setting.context, setting.slots, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = setting.threads
    params.flash_attn_type = xllamacpp.llama_flash_attn_type(FLASH_AUTO)
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type(F16)
    params.no_perf = True
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
