"""A child that speaks the wire and behaves as told; started as `python -m wire_child HOW …`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from servekit.protocol.messages import BootFailed, Drain, Ping, Pong, Stop, ToWorker
from servekit.protocol.transport.connection import Connection, adopt_socket


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("how")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    return parser.parse_args()


async def serve(args: argparse.Namespace) -> int:
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_message(message: ToWorker) -> None:
        match message:
            case Ping(seq):
                connection.send(Pong(seq, 0.0, 0, 0, 0.0))
            case Stop() if args.how not in ("deaf", "stubborn"):
                done.set_result(0)
            case Drain() if args.how not in ("deaf", "stubborn"):
                done.set_result(5)

    connection: Connection[ToWorker] = Connection(
        ToWorker, on_message, lambda _: None if done.done() else done.set_result(9)
    )
    await adopt_socket(socket.socket(fileno=args.control_fd), lambda: connection)
    if args.how == "boot-failed":
        connection.send(BootFailed("no such file", True))
        connection.close()
        return 3
    connection.send(Pong(0, 0.0, 0, 0, 0.0))  # "I am here"
    return await done


def main() -> int:
    args = parse()
    if args.how == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.how == "facts":
        fds = [path for path in Path("/proc/self/fd").iterdir() if path.exists()]
        print("fds", *(path.name for path in fds))
        print("parent", args.parent_pid == os.getppid())
        print("leads", os.getpgrp() == os.getpid() == os.getsid(0))
        print("env", os.environ["ONLY"], len(os.environ.get("HOME", "")))
        print("dev-null", Path("/proc/self/fd/0").readlink())
        return 0
    if args.how == "traceback":
        raise RuntimeError("the reason")
    if args.how == "code":
        return 7
    if args.how == "suicide":
        os.kill(os.getpid(), signal.SIGSEGV)
    if args.how == "nonsense":
        socket.socket(fileno=args.control_fd).sendall(b"\0\0\0\4junk")
        time.sleep(600)  # stays until it is killed, which is what is tested
    if args.how == "hangs-up":
        os.close(args.control_fd)
        time.sleep(600)  # as above
    if args.how == "talks":
        sys.stdout.write("out\n")
        sys.stdout.flush()
        sys.stderr.write("10%\r20%\r100%\nerr\nlast words")
        return 0
    if args.how == "children":
        child = subprocess.Popen(["sleep", "600"])
        print("grandchild", child.pid, flush=True)
    return asyncio.run(serve(args))


if __name__ == "__main__":
    sys.exit(main())
