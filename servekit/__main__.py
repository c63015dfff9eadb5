"""`servekit` and `python -m servekit`."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    import signal

    # Ctrl-C during the imports; a command has its own exit code for it
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from servekit.system.inherited_state import open_standard_streams, reset_signals
    from servekit.system.python.lean_start import collect_less

    open_standard_streams()
    reset_signals()
    collect_less()
    from servekit.cli.main import app

    app(prog_name="servekit")


if __name__ == "__main__":
    main()
