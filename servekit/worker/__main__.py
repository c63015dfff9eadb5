"""Entry point `python -m servekit.worker`, started only by the supervisor.

CPU and GPU pinning is already applied.
"""

from __future__ import annotations

import time

began_s = time.monotonic()  # before the imports below

from servekit.system.parent_death import die_with, prefer_for_oom_kill  # noqa: E402
from servekit.system.python.lean_start import import_structlog  # noqa: E402

if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(prog="servekit.worker")
    parser.add_argument("--name", required=True)
    parser.add_argument(
        "--control-fd", type=int, help="the supervisor, where it is on this machine"
    )
    parser.add_argument("--parent-pid", type=int, help="die with this process")
    parser.add_argument("--orders-fd", type=int, help="be a standby, and take orders to fork there")
    remote = parser.add_argument_group("with the supervisor on another machine")
    remote.add_argument("--listen", help="tcp://HOST:PORT, for the supervisor and gateways")
    remote.add_argument("--advertise", help="the host by which they reach it")
    remote.add_argument("--credentials-fd", type=int, help="where its certificate is to be read")
    remote.add_argument("--report-fd", type=int, help="where its address is written, in JSON")
    remote.add_argument("--grace-s", type=float, help="how long to serve without a supervisor")
    remote.add_argument("--lost-s", type=float, help="after how long a silent peer is lost")
    args = parser.parse_args()
    if (args.control_fd is None) == (args.listen is None):
        parser.error("either --control-fd or --listen")
    if args.listen is None and args.parent_pid is None:
        parser.error("--control-fd needs --parent-pid")
    if args.listen is not None and (args.advertise is None or args.credentials_fd is None):
        parser.error("--listen needs --advertise and --credentials-fd")
    if args.parent_pid is not None:
        die_with(args.parent_pid)
    prefer_for_oom_kill()
    import_structlog()

    import faulthandler
    import signal
    import socket
    import sys

    from servekit import logging_config
    from servekit.protocol.messages import PROTOCOL
    from servekit.system.python.installation import require_protocol
    from servekit.worker.transport import InheritedChannel
    from servekit.worker.worker import run_worker

    faulthandler.enable()
    # The handler is written in C, so stack traces are printed even while the GIL is held.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    logging_config.configure(args.name, json=True)
    require_protocol(PROTOCOL)
    if args.listen is not None:
        from servekit.errors import ServekitError
        from servekit.worker.remote import make_channel

        try:
            sys.exit(run_worker(args.name, make_channel(args), began_s))
        except (ServekitError, OSError, ValueError) as error:
            sys.exit(f"cannot listen on {args.listen}: {error}")
    name, control = args.name, socket.socket(fileno=args.control_fd)
    if args.orders_fd is not None:
        from servekit.worker import fork_server

        orders = socket.socket(fileno=args.orders_fd)
        ended = fork_server.run_fork_server(control, orders, args.parent_pid)
        if isinstance(ended, int):
            sys.exit(ended)
        name, control = ended
        began_s = time.monotonic()
    sys.exit(run_worker(name, InheritedChannel(control), began_s))
