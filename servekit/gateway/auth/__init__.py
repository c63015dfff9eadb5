"""Authentication and authorization: API keys, quotas, UI sessions, CSRF checks, the middleware.

Only the gateway may import from here.
"""
