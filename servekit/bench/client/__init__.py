"""The HTTP client that makes load: connections, pool, server-sent events, answers' schemas.

Only `bench` may import from here.
"""
