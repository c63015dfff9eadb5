"""Routing: the queue of each model, load balancing, retries, quarantine, worker connections.

`router` is the entry point. Only the gateway may import from here.
"""
