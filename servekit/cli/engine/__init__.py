"""`servekit engine`: Python environments for engines, made, listed and removed.

Only `cli` may import from here.
"""
