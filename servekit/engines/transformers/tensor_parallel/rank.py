"""Entry point of a rank other than 0, started with `python -m` only by rank 0."""

from __future__ import annotations

from servekit.system.parent_death import die_with

if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(prog="servekit.engines.transformers.tensor_parallel.rank")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    args = parser.parse_args()
    die_with(args.parent_pid)

    import faulthandler
    import os
    import signal
    import socket

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)

    from servekit import logging_config
    from servekit.engines.transformers.tensor_parallel.rank_process import Follower

    logging_config.configure(f"rank/{args.rank}", json=True)
    Follower(socket.socket(fileno=args.channel_fd), args.rank, args.size).live()
    os._exit(0)  # a regular exit of the group would wait for ranks that are gone
