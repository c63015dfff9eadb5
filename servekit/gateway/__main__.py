"""`python -m servekit.gateway`: started by the supervisor only."""

from __future__ import annotations

from servekit.wire.lifeline import die_with

if __name__ == "__main__":
    import argparse
    from pathlib import Path

    parser = argparse.ArgumentParser(prog="servekit.gateway")
    parser.add_argument("--name", required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--listen-fd", type=int, action="append", required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--max-body-bytes", type=int, default=8 * 2**20)
    parser.add_argument("--tls-certificate", type=Path)
    parser.add_argument("--tls-key", type=Path)
    parser.add_argument("--no-ui", action="store_true")
    parser.add_argument("--ui-socket", type=Path)
    parser.add_argument("--operators", type=Path, help="the supervisor's socket for operators")
    parser.add_argument("--legacy", action="store_true")
    parser.add_argument("--credentials-fd", type=int, help="where its certificate is to be read")
    parser.add_argument("--lost-s", type=float, help="after how long a silent worker is lost")
    parser.add_argument("--heir", type=Path, help="outlive the supervisor, and wait there")
    parser.add_argument("--grace-s", type=float, default=0.0, help="for so long")
    args = parser.parse_args()
    if args.heir is None:
        die_with(args.parent_pid)

    from servekit.tracing import guard

    guard.stand("gateway")

    import faulthandler
    import signal
    import sys

    from servekit import logs
    from servekit.gateway.gateway import Settings, run
    from servekit.gateway.pool import Reach
    from servekit.wire.connection import LOST_S
    from servekit.wire.credentials import read
    from servekit.wire.identity import Identity

    faulthandler.enable()
    # Written by a handler in C, so that the stacks come out also while the loop is held up.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    logs.configure(args.name, json=True)
    settings = Settings(
        name=args.name,
        control_fd=args.control_fd,
        listen_fds=tuple(args.listen_fd),
        max_body_bytes=args.max_body_bytes,
        ui=not args.no_ui,
        ui_socket=args.ui_socket,
        operators=args.operators,
        reach=Reach(
            None if args.credentials_fd is None else Identity(read(args.credentials_fd)),
            LOST_S if args.lost_s is None else args.lost_s,
        ),
        outlive=None if args.heir is None else (args.heir, args.grace_s),
        legacy=args.legacy,
        tls=(args.tls_certificate, args.tls_key) if args.tls_certificate else None,
    )
    sys.exit(run(settings))
