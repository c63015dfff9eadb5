"""Worker processes: one replica of a model, its GPU memory, sleep, and fork servers.

Only `supervisor` and `ray` may import from here.
"""
