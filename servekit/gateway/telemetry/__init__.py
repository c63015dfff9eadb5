"""Metrics and traces of requests.

Only the gateway may import from here.
"""
