"""`servekit ls`, `pull` and `rm`: models, and their files on this machine.

Only `cli` may import from here.
"""
