"""Hostile pictures and sounds, and the requests and processes that they go through."""
