"""Answers from a worker's tokens: choices, stream writing, OpenAI's byte templates.

Only `gateway` may import from here.
"""
