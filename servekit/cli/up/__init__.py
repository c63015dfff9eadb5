"""`servekit up` and `servekit run`: find or write the file, serve it here or in the background.

Only `cli` may import from here.
"""
