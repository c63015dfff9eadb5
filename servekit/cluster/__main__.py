"""`python -m servekit.cluster`: started by the supervisor only."""

from __future__ import annotations

from servekit.wire.lifeline import die_with

if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(prog="servekit.cluster")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    args = parser.parse_args()
    die_with(args.parent_pid)

    import asyncio
    import socket
    import sys

    from servekit import logs
    from servekit.cluster.driver import live

    logs.configure("ray", json=True)
    sys.exit(asyncio.run(live(socket.socket(fileno=args.control_fd))))
