"""`servekit engine`: Python environments for engines, made, listed and removed.

Only `cli.main` may import from here.
"""
