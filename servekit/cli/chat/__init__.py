"""`servekit chat`: the command, and the client that reads a streamed answer.

Only `cli` may import from here.
"""
