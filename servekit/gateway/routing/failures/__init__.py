"""Requests whose workers died: retries, quarantine, and suspicion against clients that kill them.

Only `gateway` may import from here.
"""
