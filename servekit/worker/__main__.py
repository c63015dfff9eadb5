"""`python -m servekit.worker`: started by the supervisor only, its pin already in place."""

from __future__ import annotations

from servekit.wire.lifeline import die_with

if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(prog="servekit.worker")
    parser.add_argument("--name", required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--orders-fd", type=int, help="be a standby, and take orders to fork there")
    args = parser.parse_args()
    die_with(args.parent_pid)

    import faulthandler
    import signal
    import socket
    import sys

    from servekit import logs
    from servekit.worker.worker import run

    faulthandler.enable()
    # Written by a handler in C, so that the stacks come out also while the GIL is held.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    logs.configure(args.name, json=True)
    name, control = args.name, socket.socket(fileno=args.control_fd)
    if args.orders_fd is not None:
        from servekit.worker import standby

        try:
            sys.exit(standby.run(control, socket.socket(fileno=args.orders_fd), args.parent_pid))
        except standby.Born as born:
            name, control = born.name, born.control
    sys.exit(run(name, control))
