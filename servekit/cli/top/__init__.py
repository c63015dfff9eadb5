"""`servekit top`: the polling loop, the samples, and the picture drawn of them.

Only `cli` may import from here.
"""
