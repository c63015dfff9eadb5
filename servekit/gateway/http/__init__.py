"""HTTP: uvicorn's protocol with limits, a fast response path, TLS, request context.

Only `gateway` may import from here.
"""
