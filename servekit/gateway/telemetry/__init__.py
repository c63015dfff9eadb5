"""Metrics and traces of requests.

Only `gateway` may import from here.
"""
