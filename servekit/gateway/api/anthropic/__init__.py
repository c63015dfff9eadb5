"""Anthropic's Messages API.

Only the gateway may import from here.
"""
