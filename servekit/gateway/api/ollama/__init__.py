"""Ollama's API.

Only the gateway may import from here.
"""
