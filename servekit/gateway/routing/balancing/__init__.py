"""Load balancing: the choice of a replica by load, prompt prefix and session.

Only `gateway` may import from here.
"""
