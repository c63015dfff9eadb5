"""The command line: the commands of `servekit`, each in a module of its name.

`main` holds the Typer application and `up`; larger commands have a folder (`chat/`, `init/`,
`top/`), and `display` has the output of several. Commands talk to a running instance through its
control socket, its run directory and its HTTP API; heavy imports stand inside functions.

Only `__main__` may import from here.
"""
