"""What operators see and type: clients of the control socket, the run directory and the HTTP API.

`servekit.cli` registers the commands. What they print is their whole answer, so they write it
themselves; heavy imports stand inside them.
"""
