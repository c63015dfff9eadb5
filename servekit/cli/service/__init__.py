"""`servekit service`: the systemd unit, for the system or for one user.

Only `cli` may import from here.
"""
