"""Entry point of `python -m servekit.gateway`, which only the supervisor starts."""

from __future__ import annotations

from servekit.system.parent_death import die_with

if __name__ == "__main__":
    import argparse
    from pathlib import Path

    parser = argparse.ArgumentParser(prog="servekit.gateway")
    parser.add_argument("--name", required=True)
    parser.add_argument(
        "--control-fd", type=int, help="the supervisor, where it is on this machine"
    )
    parser.add_argument("--listen-fd", type=int, action="append", required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--max-body-bytes", type=int, default=8 * 2**20)
    parser.add_argument("--tls-certificate", type=Path)
    parser.add_argument("--tls-key", type=Path)
    parser.add_argument("--tls-handed", action="store_true", help="the supervisor says with which")
    parser.add_argument("--no-ui", action="store_true")
    parser.add_argument("--ui-socket", type=Path)
    parser.add_argument("--operators", type=Path, help="the supervisor's socket for operators")
    parser.add_argument("--request-log", type=Path)
    parser.add_argument("--responses", type=Path, help="the file of stored responses")
    parser.add_argument("--legacy", action="store_true")
    parser.add_argument("--credentials-fd", type=int, help="where its certificate is to be read")
    parser.add_argument("--lost-s", type=float, help="after how long a silent worker is lost")
    parser.add_argument("--heir", type=Path, help="outlive the supervisor, and wait there")
    parser.add_argument("--grace-s", type=float, default=0.0, help="for so long")
    remote = parser.add_argument_group("with the supervisor on another machine")
    remote.add_argument("--control", help="tcp://HOST:PORT, for the supervisor")
    remote.add_argument("--advertise", help="the host by which it reaches it")
    remote.add_argument("--report-fd", type=int, help="where its address is written, in JSON")
    args = parser.parse_args()
    if (args.control_fd is None) == (args.control is None):
        parser.error("either --control-fd or --control")
    if args.control is not None and (args.advertise is None or args.credentials_fd is None):
        parser.error("--control needs --advertise and --credentials-fd")
    if args.heir is None:
        die_with(args.parent_pid)

    from servekit.gateway.fastapi_import import import_fastapi
    from servekit.system.python import import_guard
    from servekit.system.python.lean_start import collect_less, import_structlog

    collect_less()
    import_guard.install_guard("gateway")
    import_structlog()
    import_fastapi()

    import faulthandler
    import signal
    import socket
    import sys

    from servekit import logging_config
    from servekit.gateway.http.tls import Tls
    from servekit.gateway.routing.worker_connection import Reach
    from servekit.gateway.server import Settings, run_gateway
    from servekit.gateway.supervisor_channel import InheritedChannel, TcpChannel
    from servekit.protocol.messages import PROTOCOL
    from servekit.protocol.transport.certificate_holder import CertificateHolder
    from servekit.protocol.transport.connection import LOST_S
    from servekit.protocol.transport.credentials import read_credentials
    from servekit.protocol.transport.remote_server import ListenOptions
    from servekit.system.python.installation import require_protocol

    faulthandler.enable()
    # A handler in C writes the stacks even while the event loop is blocked.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    logging_config.configure(args.name, json=True)
    require_protocol(PROTOCOL)
    lost_s = LOST_S if args.lost_s is None else args.lost_s
    credentials = None if args.credentials_fd is None else read_credentials(args.credentials_fd)
    channel: InheritedChannel | TcpChannel
    if args.control is None:
        channel = InheritedChannel(socket.socket(fileno=args.control_fd))
        identity = None if credentials is None else CertificateHolder(credentials)
    else:
        assert credentials is not None
        report_fd, grace_s = args.report_fd, args.grace_s
        channel = TcpChannel(
            ListenOptions(args.control, args.advertise, credentials, report_fd, grace_s, lost_s)
        )
        identity = channel.identity
    files = (args.tls_certificate, args.tls_key) if args.tls_certificate else None
    settings = Settings(
        name=args.name,
        channel=channel,
        listen_fds=tuple(args.listen_fd),
        max_body_bytes=args.max_body_bytes,
        ui=not args.no_ui,
        ui_socket=args.ui_socket,
        request_log=args.request_log,
        responses=args.responses,
        operators=channel.put if isinstance(channel, TcpChannel) else args.operators,
        reach=Reach(identity, lost_s),
        outlive=None if args.heir is None else (args.heir, args.grace_s),
        legacy=args.legacy,
        tls=Tls(files) if files or args.tls_handed else None,
    )
    sys.exit(run_gateway(settings))
