"""The supervisor's own interfaces: control socket, status, metrics, resources, systemd.

Only the supervisor and clients of the control socket (`cli`, `chaos`, `bench`) may import from
here.
"""
