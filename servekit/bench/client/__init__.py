"""The HTTP client that generates load: connections, pool, server-sent events, response schemas.

Only `bench` may import from here.
"""
