"""`servekit` and `python -m servekit`."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from servekit.system.python.lean_start import collect_less
    from servekit.system.standard_streams import open_standard_streams

    open_standard_streams()
    collect_less()
    from servekit.cli.main import app

    app(prog_name="servekit")


if __name__ == "__main__":
    main()
