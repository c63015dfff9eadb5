"""Entry point `python -m servekit.ray.process`, started by the supervisor only."""

from __future__ import annotations

from servekit.system.parent_death import die_with

if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(prog="servekit.ray.process")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    args = parser.parse_args()
    die_with(args.parent_pid)

    import asyncio
    import socket
    import sys

    from servekit import logging_config
    from servekit.ray.process.driver import run_driver

    logging_config.configure("ray", json=True)
    sys.exit(asyncio.run(run_driver(socket.socket(fileno=args.control_fd))))
