"""Several machines by Ray: placement of workers and gateways on other nodes.

This folder is the supervisor's side: it imports no Ray and speaks to the process in `ray.process`
over a socket. Only the supervisor and `cli` may import from here.
"""
