"""Ollama's API.

Only `gateway` may import from here.
"""
