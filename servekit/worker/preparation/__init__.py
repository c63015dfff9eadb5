"""Validation and preparation of a request before it reaches the engine.

Only `worker` may import from here.
"""
