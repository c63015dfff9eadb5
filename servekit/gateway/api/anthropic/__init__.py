"""Anthropic's Messages API.

Only `gateway` may import from here.
"""
