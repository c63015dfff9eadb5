"""`python -m tests.llama_server MODEL PORT`: llama.cpp's own server, which xllamacpp has inside.

With `f32` as a third word its KV cache is in float32, and there is no flash attention; a fourth is
the projector of a model that sees or hears.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx


def main(model: str, port: str, cache: str = "f16", mmproj: str = "") -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.mmproj.path = mmproj
    params.hostnames = ["127.0.0.1"]
    params.port = int(port)
    params.n_parallel = 4
    params.n_ctx = 8192
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type[f"GGML_TYPE_{cache.upper()}"]
    if cache == "f32":
        kinds = xllamacpp.llama_flash_attn_type
        params.flash_attn_type = kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cpuparams.n_threads = 1
    params.use_jinja = True
    server = xllamacpp.Server(params)  # serves for as long as it is referred to
    print(f"serving at {server.listening_address}", flush=True)
    threading.Event().wait()


@contextlib.contextmanager
def run_server(model: str, cache: str, mmproj: str) -> Iterator[str]:
    """Run the server in a process of its own, and yield its URL once it serves."""
    from tests.polling import poll  # `engine: command` runs this file where no tests are found

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    run = subprocess.Popen(
        (sys.executable, "-m", "tests.llama_server", model, str(port), cache, mmproj),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"

    def serves() -> bool:
        assert run.poll() is None, f"llama.cpp's server ended with {run.returncode}"
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/health").status_code == 200
        return False

    try:
        poll("llama.cpp's server serves", serves)
        yield url
    finally:
        run.kill()
        run.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
