"""`python -m tests.llama_server MODEL PORT`: llama.cpp's own server, which xllamacpp has inside.

With `f32` as a third word its KV cache is in float32, and there is no flash attention; a fourth is
the projector of a model that sees or hears.
"""

from __future__ import annotations

import sys
import threading

import xllamacpp


def main(model: str, port: str, cache: str = "f16", mmproj: str = "") -> None:
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


if __name__ == "__main__":
    main(*sys.argv[1:])
