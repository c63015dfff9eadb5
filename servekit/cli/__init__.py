"""The command line: every command of `servekit`, each in a module of its name.

`main` holds the Typer application and `up`; commands that need more than a file have a folder
(`chat/`, `init/`, `top/`). Commands talk to a running instance through its control socket, its run
directory and its HTTP API, and print; heavy imports stand inside functions.
Only `docs` and `servekit.__main__` may import from here.
"""
