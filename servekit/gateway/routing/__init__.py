"""Routing: the queue of each model, load balancing, retries, quarantine, worker connections.

`router` is the entry point. Only `gateway` may import from here.
"""
