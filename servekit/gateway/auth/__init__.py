"""Access: API keys and their quotas, sessions of the web pages, CSRF, the middleware.

Only the gateway may import from here.
"""
