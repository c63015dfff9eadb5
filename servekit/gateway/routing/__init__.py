"""Routing: the queue of each model, load balancing, retries, quarantine, worker connections.

`router` is the entry point; `balancing` chooses a replica, `failures` decides about requests whose
worker died. Only `gateway` may import from here.
"""
