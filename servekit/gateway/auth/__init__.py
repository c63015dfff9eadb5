"""Authentication and authorization: API keys, quotas, UI sessions, CSRF checks, the middleware.

Only `gateway` may import from here.
"""
