"""Transport of messages: framing, Unix sockets, TCP with mutual TLS, channels that resume.

Every part may import from here; this folder imports only `errors` and `protocol`.
"""
