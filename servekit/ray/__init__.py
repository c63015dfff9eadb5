"""Multi-node support with Ray: placement of workers and gateways on other nodes.

This folder is the supervisor's side: it does not import Ray, but talks over a socket to the process
in `ray.process`. Only `supervisor` and `cli` may import from here.
"""
