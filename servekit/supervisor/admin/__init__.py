"""The supervisor's own interfaces: control socket, status, metrics, resources, systemd.

Only `supervisor`, `ray`, and the clients of the control socket, `cli`, `chaos` and `diagnostics`,
may import from here.
"""
