"""`servekit top`: the loop that polls an instance, the samples, and the picture drawn of them.

Only `cli` may import from here.
"""
