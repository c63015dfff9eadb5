"""What a streamed token costs at least: a process that only writes one chunk per stream and step.

    python -m tests.bench.bare_write

Prints the port it got. Whoever has asked anything gets a chat's chunk of the usual size every
STEP_S, by one send(2) each, with no event loop and nothing to encode.
"""

from __future__ import annotations

import contextlib
import socket
import time

from tests.bench.paced import STEP_S

EVENT = (
    b'data: {"id":"chatcmpl-0123456789abc0","object":"chat.completion.chunk",'
    b'"created":1800000000,"model":"m","choices":[{"index":0,"delta":{"content":" day"},'
    b'"finish_reason":null}]}\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    listener.setblocking(False)
    print(listener.getsockname()[1], flush=True)
    chunk = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
    silent: set[socket.socket] = set()
    streams: set[socket.socket] = set()
    due_s = time.monotonic()
    while True:
        due_s = max(due_s + STEP_S, time.monotonic())
        time.sleep(max(0.0, due_s - time.monotonic()))
        with contextlib.suppress(BlockingIOError):
            while True:
                one, _ = listener.accept()
                one.setblocking(False)
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                silent.add(one)
        for one in list(silent):
            with contextlib.suppress(BlockingIOError):
                if one.recv(1 << 20):
                    one.send(HEAD)
                    streams.add(one)
                silent.remove(one)
        for one in list(streams):
            try:
                one.send(chunk)
            except OSError:
                streams.remove(one)
                one.close()


if __name__ == "__main__":
    main()
